"""A short run of `python -m bench chaos`: real processes, real faults, and not one push lost or doubled."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(230)
def test_three_faults_on_a_real_cluster_break_no_promise(tmp_path: Path) -> None:
    flags = ["--minutes=0.4", "--every=7", "--modes=ssp:4", "--undisturbed=1", "--workers=2", "--lease=2"]
    flags += [
        "--faults=kill,pause-shard,kill-saving",
        "--checkpoint-every=1s",
        "--seed=9",
        f"--json={tmp_path / 'found.jsonl'}",
    ]
    ended = subprocess.run(
        [sys.executable, "-m", "bench", "chaos", *flags, f"--keep={tmp_path}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=220,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    [line] = map(json.loads, (tmp_path / "found.jsonl").read_text().splitlines())
    assert line["violations"] == 0
    assert line["faults"] == {"pause-shard": 1, "kill-saving": 1, "kill": 1}
    assert line["steps"] > 20
    assert line["ratios"]["undisturbed"] > 0
