"""The benchmarks' commands, in forms so small that their figures mean nothing: that they run, check and draw."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.tools.launching import python

SMALLEST = {
    "round": "--mib 1 --rounds 1 --transport shm --wire float32 --no-peers",
    "scale": "--mib 1 --workers 1 --shards 1 --rounds 1 --transport shm",
    "train": "--layers 1 --width 64 --batch 1 --turns 1 --steps 2",
    "straggler": "--workers 2 --shards 1 --base-ms 5 --seconds 1 --turns 1",
    "memory": "--layers 1 --width 64 --batch 1 --workers 2 --shards 1 --steps 2 --transport grpc --bucket-kib 64",
    "rows": "--rows 1000 --dim 4 --ids 100 --steps 5 --grow 20000 --only known --beyond 80000 --checkpoints 1",
    "lowcomm": "--samples 4 --layers 1 --width 64 --batch 1 --workers 2 --shards 1 --seeds 1 --systems sync",
    "crowd": "--workers 2 --shards 1 --rounds 1 --transport tcp",
    "restore": "--mib 1 --bucket-kib 64 --rounds 1",
    "recovery": "--mib 1 --seconds 1 --every 0.5 --rounds 1",
}
QUICK = ("scale", "rows", "lowcomm", "crowd", "restore")  # which is made of rounds


def run(name: str, flags: str, directory: Path) -> list[dict[str, Any]]:
    """The results of a benchmark; a picture of them is in the directory."""
    results = ["--json", str(directory / "found.jsonl"), "--picture", str(directory / "found.png")]
    done = python("-m", "bench", name, *flags.split(), *results, folder=directory, seconds=600)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in (directory / "found.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long if name in QUICK else pytest.mark.slow) for name in SMALLEST]
)
def test_a_benchmark_runs_and_says_what_it_found(name: str, tmp_path: Path) -> None:
    found = run(name, SMALLEST[name], tmp_path)
    assert found
    for line in found:
        assert line["bench"] == name
        assert line["ms"] > 0
        assert {"system", "transport", "wire", "workers", "shards", "bytes", "ratios", "threads", "versions"} <= set(
            line
        )
    assert (tmp_path / "found.png").read_bytes().startswith(b"\x89PNG")
