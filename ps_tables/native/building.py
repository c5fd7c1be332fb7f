"""Compiles the loops with this machine's C compiler, into a folder of the user's.

The file's name says what it was made of: the sources, the options, and the kind of processor. So a new version never
takes an old file, and machines of several kinds may share a folder. Several processes may compile at once: each makes a
file of its own, and the last one that is complete stays.
"""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch

from ps_protocol.errors import Unsupported
from ps_tables.native.loading import DECLARATIONS, check_absolute, check_private

SOURCE = DECLARATIONS.with_name("loops.c")
FILES = "loops-*.so"

# What keeps the bits: no product is fused with a sum, nothing is reordered. What does not touch them: no errno.
_OPTIONS = ("-std=c11", "-O3", "-ffp-contract=off", "-fno-math-errno", "-fPIC", "-shared")
_WIDE = ("-mavx2", "-mfma")
_SECONDS = 120.0


@cache
def file_name() -> str:
    """Returns the name of the compiled loops of this version, for this processor."""
    made_of = SOURCE.read_bytes() + DECLARATIONS.read_bytes() + " ".join(_options()).encode()
    return f"loops-{platform.machine()}-{hashlib.sha256(made_of).hexdigest()[:16]}.so"


def build(folder: Path, compiler: Sequence[str]) -> Path:
    """Compiles the loops; returns their file. Raises Unsupported where that cannot be done.

    folder:   is made where it is missing, for its owner alone
    compiler: the words that start a C compiler; none: there is none
    """
    if not compiler:
        raise Unsupported("there is no C compiler: install gcc or clang, or name one in CC")
    check_absolute(folder)
    try:
        _make(folder)
        folder = check_private(folder)
        with tempfile.TemporaryDirectory(prefix="loops-", dir=folder) as scratch:
            made = Path(scratch, "loops.so")
            _compile(compiler, made)
            made.chmod(0o755)  # for its owner to write, whatever the umask says
            return made.replace(folder / file_name())
    except OSError as error:
        raise Unsupported(f"{folder}: {error.strerror or error}") from None


def _make(folder: Path) -> None:
    for each in (*reversed(folder.parents), folder):
        if not each.exists():
            each.mkdir(mode=0o700, exist_ok=True)


def _compile(compiler: Sequence[str], made: Path) -> None:
    command = [*compiler, *_options(), "-o", os.fspath(made), os.fspath(SOURCE), "-lm"]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=_SECONDS
        )
    except subprocess.TimeoutExpired:
        raise Unsupported(f"{compiler[0]} has not compiled the loops in {_SECONDS:g} s") from None
    except OSError as error:
        raise Unsupported(f"{compiler[0]} cannot be started: {error.strerror or error}") from None
    if done.returncode or not made.exists():
        said = (done.stderr.strip() or done.stdout.strip() or "nothing").splitlines()
        text = next((line for line in said if "error" in line), said[0])
        raise Unsupported(f"{compiler[0]} failed with code {done.returncode}: {text[:200]}")


def _options() -> tuple[str, ...]:
    """Returns the compiler's options. torch says which registers the processor has."""
    is_wide = platform.machine() == "x86_64" and torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
    return (*_OPTIONS, *_WIDE) if is_wide else _OPTIONS
