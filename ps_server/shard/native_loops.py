"""Chooses whether a server process uses the compiled library for tables, or numpy."""

from __future__ import annotations

import logging

from ps_tables.choosing import choose

log = logging.getLogger("ps_server")


def use_native_loops(how: str) -> str:
    """Loads the compiled library for tables, if there is one for this processor, and logs the choice.

    how: "auto", or "off" for numpy
    Returns the processor level that the library was compiled for; empty: numpy is used.
    """
    choice = choose(how)
    log.log(logging.WARNING if choice.is_trouble else logging.INFO, "%s", choice.text)
    return choice.level
