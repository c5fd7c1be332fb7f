"""Loads compiled loops, from where nobody else can write: what is loaded runs with all that this process may do."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

from ps_protocol.errors import Unsupported
from ps_tables.native.loops import Loops, check_complete

DECLARATIONS = Path(__file__).with_name("loops.h")


def load(path: Path) -> Loops:
    """Returns the loops of a compiled file. Raises Unsupported where it must not, or cannot, be loaded."""
    check_absolute(path.parent)
    declared = re.sub(r"/\*.*?\*/", "", DECLARATIONS.read_text(), flags=re.DOTALL)
    try:
        from cffi import FFI

        foreign = FFI()
        foreign.cdef(declared)
    except ImportError as error:  # of cffi, or of what it parses declarations with
        raise Unsupported(f"cffi cannot be used ({error}): pip install 'ps-torch[native]'") from None
    try:
        library = foreign.dlopen(os.fspath(check_private(path)))
        check_complete(library)
        return Loops(foreign, library)
    except (OSError, AttributeError) as error:
        raise Unsupported(f"{path} cannot be loaded: {error}") from None


def check_absolute(folder: Path) -> None:
    """Raises Unsupported for a folder below whatever folder this process happens to be in."""
    if not folder.is_absolute():
        raise Unsupported(f"expected an absolute path of a folder, got {str(folder)!r}: name one in PS_NATIVE_DIR")


def check_private(path: Path) -> Path:
    """Returns the path without links. Raises Unsupported where anybody but this user and root could put something
    else in its place: where it, or a folder above, belongs to another, or can be written by others.

    A folder such as /tmp, in which each may remove only what is his own, may be above.
    """
    real = path.resolve(strict=True)
    for each in (real, *real.parents):
        found = os.lstat(each)
        if found.st_uid not in (0, os.geteuid()):
            raise Unsupported(f"{each} belongs to another user (uid {found.st_uid}), who could change what is loaded")
        is_sticky = stat.S_ISDIR(found.st_mode) and found.st_mode & stat.S_ISVTX
        if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not is_sticky:
            raise Unsupported(f"others can write to {each}, and change what is loaded: chmod go-w {each}")
    return real
