"""The compiled libraries of this installation, and the processors that can run them.

One source is compiled for several processor levels: a library for the lowest would run everywhere, but would take up to
half as long again. setup.py imports this file without the rest of the package, so it imports nothing of the package.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

FOLDER = Path(__file__).parent
SOURCE, DECLARATIONS = FOLDER / "loops.c", FOLDER / "loops.h"

# By machine, the best level first: its name for compilers, and the flags of /proc/cpuinfo that it needs. The
# levels of x86-64 are those of its psABI (https://gitlab.com/x86-psABIs/x86-64-ABI); numpy's wheels begin with v2, too.
LEVELS: Mapping[str, Mapping[str, frozenset[str]]] = {
    "x86_64": {
        "x86-64-v3": frozenset({"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"}),
        "x86-64-v2": frozenset({"cx16", "lahf_lm", "popcnt", "sse4_1", "sse4_2", "ssse3"}),
    },
    "aarch64": {"armv8-a": frozenset({"fp", "asimd"})},
}


def file_name(level: str) -> str:
    """Returns the name of the library for a level."""
    return f"loops-{level}.so"


def sources() -> int:
    """Returns the checksum of the C sources beside this file, 0 if they are missing. A library contains the checksum of
    the sources that it was compiled from.
    """
    try:
        text = SOURCE.read_bytes() + DECLARATIONS.read_bytes()
    except OSError:
        return 0
    return int(hashlib.sha256(text).hexdigest()[:16], 16)


def features(cpuinfo: str) -> frozenset[str]:
    """Returns the feature flags of the first processor. cpuinfo: the content of /proc/cpuinfo"""
    for line in cpuinfo.splitlines():
        name, _, words = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return frozenset(words.split())
    return frozenset()


def runnable(machine: str, has: frozenset[str], folder: Path = FOLDER) -> list[Path]:
    """Returns the libraries in a folder that a processor can run, the best first.

    machine: the machine name of uname
    has:     the features of the processor
    """
    levels = LEVELS.get(machine, {}).items()
    paths = [folder / file_name(level) for level, needed in levels if needed <= has]
    return [path for path in paths if path.exists()]
