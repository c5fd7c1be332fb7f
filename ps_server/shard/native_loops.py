"""The library for tables in a server process: whether it is used."""

from __future__ import annotations

import logging

from ps_tables.choosing import choose

log = logging.getLogger("ps_server")


def use_native_loops(how: str) -> str:
    """Has this process use the library for tables, where there is one; says so in the log.

    Returns the level of processors that it was compiled for; an empty text: numpy is used. how: auto or off
    """
    choice = choose(how)
    log.log(logging.WARNING if choice.is_trouble else logging.INFO, "%s", choice.text)
    return choice.level
