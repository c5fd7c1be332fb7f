"""A short run of `python -m bench chaos`: real commands, real faults, and not one push lost or doubled."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tools.cluster import until

ROOT = Path(__file__).parents[2]
SECONDS = 110.0  # for what takes ten where nothing else runs


def _lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


@pytest.mark.long
@pytest.mark.timeout(240)
def test_two_faults_that_overlap_break_no_promise_and_sigterm_ends_the_run_with_its_result(tmp_path: Path) -> None:
    flags = ["--minutes=30", "--every=2", "--modes=ssp:4", "--undisturbed=1", "--workers=2", "--lease=2", "--overlap=1"]
    flags += ["--faults=kill-shard,kill", "--checkpoint-every=1s", "--seed=2"]
    result, kept = tmp_path / "found.jsonl", tmp_path / "kept"
    with (tmp_path / "said.txt").open("wb") as said:
        words = ["-m", "bench", "chaos", *flags, f"--json={result}", f"--keep={kept}"]
        chaos = subprocess.Popen([sys.executable, *words], cwd=ROOT, stderr=said)
    try:
        happened = kept / "ssp-4" / "chaos" / "faults.jsonl"
        until(lambda: chaos.poll() is not None or _lines(happened) >= 2, "two faults", SECONDS)
        chaos.send_signal(signal.SIGTERM)
        assert chaos.wait(SECONDS) == 0, (tmp_path / "said.txt").read_text()
    finally:
        chaos.kill()
    [line] = map(json.loads, result.read_text().splitlines())
    assert line["violations"] == 0
    [pair] = line["pairs"]
    assert pair == "kill-shard+kill"
    assert line["missed_faults"] == 0
    assert line["steps"] > 0
    assert 0 < line["recovery_seconds"][pair]["most"] < line["recovery_bound"]
