"""examples/rl as actors of a real Ray: the model learns while a rollout actor is killed and another one is added."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.tools.launching import ROOT, environment
from tests.tools.learning_runs import check
from tests.tools.rays import needs_ray

pytestmark = needs_ray

RUN_SECONDS = 400.0
BOUND, STEPS, TRAINERS = 2, 100, 2


@pytest.mark.timeout(RUN_SECONDS + 60)
def test_trainers_and_rollout_processes_may_be_actors(tmp_path: Path) -> None:
    """On a Ray of its own, as on a laptop."""
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as short:
        own = environment(RAY_ADDRESS="local", RAY_TMPDIR=short, HOME=str(tmp_path))
        flags = ["--ray", f"--steps={STEPS}", f"--bound={BOUND}", "--goal=0.2", f"--out={tmp_path / 'rl'}"]
        words = [sys.executable, str(ROOT / "examples" / "rl" / "run.py"), *flags]
        done = subprocess.run(words, env=own, capture_output=True, text=True, timeout=RUN_SECONDS, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    check(tmp_path / "rl", "sync", STEPS, TRAINERS, BOUND)
