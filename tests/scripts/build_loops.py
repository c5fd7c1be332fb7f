"""Compiles the loops of tables into a folder, with a compiler that is given: build_loops.py FOLDER COMPILER..."""

from __future__ import annotations

import sys
from pathlib import Path

from ps_tables.native.building import build

if __name__ == "__main__":
    build(Path(sys.argv[1]), sys.argv[2:])
