"""Texts of peers, for a terminal."""

from __future__ import annotations


def printable(text: str) -> str:
    """Returns a text of a peer's so that it does nothing to a terminal: escaped where it cannot be printed."""
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)
