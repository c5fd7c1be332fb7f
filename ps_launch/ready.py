"""The line by which a supervised server tells its parent where it serves."""

from __future__ import annotations

import json

_BEGIN = '{"address": '


def ready_line(address: str, metrics: str, page: str, process: int) -> str:
    """Returns the line. metrics, page: where they are served, the page empty where it is not; process: its number"""
    return json.dumps({"address": address, "metrics": metrics, "page": page, "process": str(process)})


def place_in(line: str) -> dict[str, str] | None:
    """Returns what the line says; None for any other line that a server writes."""
    return dict(json.loads(line)) if line.startswith(_BEGIN) else None
