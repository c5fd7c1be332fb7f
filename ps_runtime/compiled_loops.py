"""What a process is told of compiled loops for tables: whether to use them, where they are, what compiles them."""

from __future__ import annotations

import os
import shlex
import shutil
from pathlib import Path

from ps_runtime.settings import Setting, file_path, one_of

NATIVE = Setting(
    "native",
    "compiled loops for tables: auto takes those that are there, build compiles them if none are, off takes none",
    one_of("auto", "build", "off"),
    "auto",
)
NATIVE_DIR = Setting(
    "native_dir", "where compiled loops are; not given: ps-torch in this user's cache", file_path, metavar="DIR"
)


def loops_folder(given: str | None) -> Path:
    """Returns the folder of compiled loops. It is no absolute path where this user has no home, and none is given."""
    if given:
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "ps-torch")


def c_compiler() -> list[str]:
    """Returns the words that start a C compiler: those of CC, or the first that is found; none where there is none."""
    if os.environ.get("CC"):
        return shlex.split(os.environ["CC"])
    return next(([found] for name in ("cc", "gcc", "clang") if (found := shutil.which(name))), [])
