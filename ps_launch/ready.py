"""The line with which a supervised server tells its parent its addresses."""

from __future__ import annotations

import json

_BEGIN = '{"address": '


def ready_line(address: str, metrics: str, page: str, process: int) -> str:
    """Returns the ready line.

    metrics: the address of the metrics
    page:    the address of the page for people; empty: there is none
    process: the number of the process
    """
    return json.dumps({"address": address, "metrics": metrics, "page": page, "process": str(process)})


def addresses_in(line: str) -> dict[str, str] | None:
    """Parses the line that a server prints when it is ready. Returns its addresses, or None for any other line."""
    return dict(json.loads(line)) if line.startswith(_BEGIN) else None
