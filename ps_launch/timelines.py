"""Combines the timelines of the workers of one launch into one file.

Each worker writes its own Chrome trace. All times are on this host's clock, so the events of all traces together are
one trace: each worker is a process in it, and so is each shard, with what the workers record about it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

VARIABLE = "PS_TIMELINE"


class Timelines:
    """The traces that workers write, and the file that combines them.

    settings: those of the launch, as PS_* variables
    folder:   where the workers write their traces
    """

    def __init__(self, settings: Mapping[str, str], folder: Path) -> None:
        self._path = Path(settings[VARIABLE]) if settings.get(VARIABLE) else None
        self._folder = folder

    def variables(self, local: int, restart: int) -> dict[str, str]:
        """Returns the variables that make a worker write its trace; empty if no timeline is wanted.

        local:   the worker's number on this host
        restart: how often it was restarted: each process writes a trace of its own
        """
        return {} if self._path is None else {VARIABLE: str(self._folder / f"timeline-{local}-{restart}.json")}

    def join(self) -> str:
        """Writes the file. Returns a message about it for the user; empty if no timeline is wanted."""
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
