"""`ps-worker run` over scripts that a test writes, to its end."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def script(directory: Path, text: str) -> str:
    """A script that needs neither torch nor a server: it starts in a moment."""
    path = directory / "script.py"
    # One write a line: workers share one output, and nothing may come between a line and its end.
    path.write_text(
        "import os, sys, time\nsay = lambda *words: sys.stdout.write(' '.join(map(str, words)) + '\\n')\n" + text
    )
    return str(path)


def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """`ps-worker run`, to its end."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
    command = [sys.executable, "-m", "ps_worker", "run", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=90, check=False)
