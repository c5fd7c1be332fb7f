"""The two ways in which editions come to a reader on the shards' host, and what results of readers have in common."""

from __future__ import annotations

from typing import Any

from bench.results import Result, result
from ps_runtime.settings import DEFAULT_SHARED_DIRECTORY

ELEMENT_BYTES = 2  # of bfloat16
EDITIONS_IN_MEMORY = 2  # of a reader: the one in its model, and the one that arrives
OURS = "ours"
# By system, where a server on the host may hand over its memory. Without a directory a reader is as on another host.
WAYS = {OURS: str(DEFAULT_SHARED_DIRECTORY), "ours, in messages": ""}


def reader_result(scenario: str, system: str, shards: int, size: int, ms: float | None, **more: Any) -> Result:
    """One result of readers of a job of one worker, whose weights travel in bfloat16. The rest as for `result`."""
    own = {"wire": "bfloat16", "workers": 1, "shards": shards, "size": size, "ms": ms}
    return result("feed", system, **own, scenario=scenario, **more)


def check_way(system: str, maps: bool, part: float | None) -> None:
    """Raises SystemExit where editions came in another way than the system says. part: of their bytes, in messages"""
    if part is None or (part == 0) != maps:
        raise SystemExit(f"wrong result: {system}: {part} of the bytes of its editions came in messages")
