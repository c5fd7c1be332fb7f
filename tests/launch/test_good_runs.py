"""A launch in which nothing goes wrong writes no warning: not while its workers start together, nor at its end."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.tools.cases import cases
from tests.tools.launching import ROOT, python

RUN = ("-m", "ps_worker", "run", "--shards", "2", "--workers", "3")
WORSE_THAN_INFO = re.compile(r"\b(WARNING|ERROR|CRITICAL|Traceback)\b")
SLOW_FILE = "coordinator-file-half-written=delay:0.5"  # so all workers but the first find the job being registered


# One that waits for the others for long says so in a warning: they begin together, however long one takes to start.
TOGETHER = """
import glob, os, runpy, time
import ps_worker, torch
open(f"here-{os.getpid()}", "w").close()
while len(glob.glob("here-*")) < 3:  # all three are there, is the condition
    time.sleep(0.01)
runpy.run_path(TRAIN, run_name="__main__")
"""


def together(folder: Path) -> str:
    """A script of workers that begin to train at one time."""
    own = folder / "together.py"
    own.write_text(f"TRAIN = {str(ROOT / 'examples' / 'train.py')!r}\n{TOGETHER}")
    return str(own)


@pytest.mark.long
@pytest.mark.parametrize("mode", cases(["sync"], ["ssp:2"]))
def test_a_good_run_ends_without_a_warning(tmp_path: Path, mode: str) -> None:
    checkpoints = "--checkpoint-dir", str(tmp_path / "kept"), "--checkpoint-every", "5steps"
    words = *RUN, "--mode", mode, *checkpoints, together(tmp_path)
    done = python(*words, folder=tmp_path, PS_FAILPOINTS=SLOW_FILE)
    assert done.returncode == 0, done.stderr
    assert "job 'default' has finished" in done.stderr
    lines = [line for line in done.stderr.splitlines() if "PS_FAILPOINTS is set" not in line]
    assert not [line for line in lines if WORSE_THAN_INFO.search(line)]
    assert len(re.findall(r"shard \d has given its memory back", done.stderr)) == 2, "each is named"


@pytest.mark.long
def test_workers_say_what_they_wait_for_where_they_are_asked_for_more(tmp_path: Path) -> None:
    words = *RUN, "--checkpoint-dir", str(tmp_path / "kept"), "--log-level", "info", together(tmp_path)
    done = python(*words, folder=tmp_path, PS_FAILPOINTS=SLOW_FILE.replace("0.5", "1.5"))
    assert done.returncode == 0, done.stderr
    assert re.search(r"\] \S+ \S+ INFO worker \d: job 'default' is being registered at this moment", done.stderr)
