"""A short run of `python -m bench chaos`: real commands, real faults, and not one push lost or doubled."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.tools.cluster import until

ROOT = Path(__file__).parents[2]
SECONDS = 110.0  # for what takes ten where nothing else runs


def _until_faults(flags: list[str], tmp_path: Path, count: int) -> dict[str, Any]:
    """The result of a run of one mode that SIGTERM ended after so many faults."""
    result, kept = tmp_path / "found.jsonl", tmp_path / "kept"
    with (tmp_path / "said.txt").open("wb") as said:
        words = ["-m", "bench", "chaos", *flags, f"--json={result}", f"--keep={kept}"]
        chaos = subprocess.Popen([sys.executable, *words], cwd=ROOT, stderr=said)
    try:
        until(lambda: chaos.poll() is not None or _faults(kept) >= count, f"{count} faults", SECONDS)
        chaos.send_signal(signal.SIGTERM)
        assert chaos.wait(SECONDS) == 0, (tmp_path / "said.txt").read_text()
    finally:
        chaos.kill()
    [line] = map(json.loads, result.read_text().splitlines())
    return dict(line)


def _faults(kept: Path) -> int:
    return sum(path.read_bytes().count(b"\n") for path in kept.glob("*/chaos/faults.jsonl"))


@pytest.mark.long
@pytest.mark.timeout(240)
def test_two_faults_that_overlap_break_no_promise_and_sigterm_ends_the_run_with_its_result(tmp_path: Path) -> None:
    flags = ["--minutes=30", "--every=2", "--modes=ssp:4", "--undisturbed=1", "--workers=2", "--lease=2", "--overlap=1"]
    flags += ["--faults=kill-shard,kill", "--checkpoint-every=1s", "--seed=2", "--readers=0"]
    line = _until_faults(flags, tmp_path, 2)
    assert line["violations"] == 0
    [pair] = line["pairs"]
    assert pair == "kill-shard+kill"
    assert line["missed_faults"] == 0
    assert line["saved_steps"] >= line["steps"] > 0, "what rank 0 saved was judged, too"
    assert 0 < line["recovery_seconds"][pair]["most"] < line["recovery_bound"]


@pytest.mark.long
@pytest.mark.timeout(240)
def test_readers_go_on_after_faults_of_theirs_and_of_the_relay_and_a_shard(tmp_path: Path) -> None:
    flags = ["--minutes=30", "--every=2", "--modes=sync", "--undisturbed=1", "--workers=2", "--lease=2", "--overlap=0"]
    flags += ["--faults=kill-reader,kill-relay,kill-shard", "--checkpoint-every=1s", "--seed=4", "--readers=2"]
    line = _until_faults(flags, tmp_path, 3)
    assert (line["violations"], line["violation_details"]) == (0, [])
    kinds = set(line["faults"])  # not always all three: one that finds no process between two lives is missed
    assert len(kinds) > 1
    assert kinds <= {"kill-reader", "kill-relay", "kill-shard"}
    assert line["readings"] >= line["editions"] > 2
