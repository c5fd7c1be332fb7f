"""The timelines of the workers of one launch, as one file.

Each worker writes a Chrome trace of its own. Their times are of this host's clock, so one list of all events is one
trace: each worker is a process of it, and so is each shard, with what all workers know of it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

VARIABLE = "PS_TIMELINE"


class Timelines:
    """Where workers write their parts, and what becomes of them.

    settings: of the launch, as PS_* variables
    folder:   for the parts
    """

    def __init__(self, settings: Mapping[str, str], folder: Path) -> None:
        self._path = Path(settings[VARIABLE]) if settings.get(VARIABLE) else None
        self._folder = folder

    def variables(self, local: int, restart: int) -> dict[str, str]:
        """Returns what has a worker write its part. restart: how often it was started again: each has its own part"""
        return {} if self._path is None else {VARIABLE: str(self._folder / f"timeline-{local}-{restart}.json")}

    def join(self) -> str:
        """Writes the file; returns what there is to say of it, if anything."""
        if self._path is None:
            return ""
        parts = sorted(self._folder.glob("timeline-*.json"))
        if not parts:
            return "there is no timeline: no worker has recorded a step"
        events: list[dict[str, Any]] = []
        try:
            for part in parts:
                events += json.loads(part.read_text())["traceEvents"]
            self._path.write_text(json.dumps({"displayTimeUnit": "ms", "traceEvents": events}, separators=(",", ":")))
        except OSError as error:
            return f"the timeline cannot be written to {self._path} ({error.strerror})"
        return f"the timeline is in {self._path}"
