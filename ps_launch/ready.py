"""The line with which a supervised server tells its parent its addresses."""

from __future__ import annotations

import json

_BEGIN = '{"address": '


def ready_line(address: str, metrics: str, page: str, process: int) -> str:
    """Returns the ready line.

    metrics: where metrics are served
    page:    where the page for people is served; empty: it is not
    process: the number of the process
    """
    return json.dumps({"address": address, "metrics": metrics, "page": page, "process": str(process)})


def place_in(line: str) -> dict[str, str] | None:
    """Returns the content of a ready line; None for any other line."""
    return dict(json.loads(line)) if line.startswith(_BEGIN) else None
