"""Runs buf, wherever the package buf-bin has put it: `python -m tests.tools.buf lint`."""

from __future__ import annotations

import os
import sys
from importlib.metadata import files
from pathlib import Path


def buf() -> Path:
    """Returns the program. It may belong to an environment beneath this one."""
    [program] = [file for file in files("buf-bin") or () if file.name == "buf"]
    return Path(str(program.locate())).resolve()


if __name__ == "__main__":
    os.execv(buf(), ["buf", *sys.argv[1:]])
