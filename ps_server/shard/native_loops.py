"""Compiled loops for tables in a server process: whether it uses them, and how they are made."""

from __future__ import annotations

import logging

from ps_protocol.errors import Unsupported
from ps_runtime.compiled_loops import c_compiler, loops_folder
from ps_tables.choosing import AUTO, choose
from ps_tables.native.building import build

log = logging.getLogger("ps_server")


def use_native_loops(how: str, directory: str | None) -> bool:
    """Has this process use compiled loops, where they can be had; says so in the log. Returns whether it does.

    how: auto, build or off; directory: where they are, or None
    """
    choice = choose(how, loops_folder(directory), c_compiler)
    if choice.text:
        log.log(logging.WARNING if choice.is_trouble else logging.INFO, "%s", choice.text)
    return choice.is_native


def compile_loops(directory: str | None) -> str:
    """Compiles them, also where they are there already, and tries them. Returns a line about what is used of them.

    Raises Unsupported where that cannot be done.
    """
    folder = loops_folder(directory)
    build(folder, c_compiler())
    choice = choose(AUTO, folder, c_compiler)
    if not choice.is_native:
        raise Unsupported(choice.text)
    return choice.text
