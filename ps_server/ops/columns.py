"""Tables for a terminal: columns as wide as their content, lines no wider than the window."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

CUT = "…"


def lines_of(rows: Sequence[Sequence[str]], width: int | None = None, droppable: Sequence[str] = ()) -> list[str]:
    """Returns rows as lines, the first of which has the columns' names.

    width:     the window's width: columns are left out until a line fits, and lines are cut; None: no limit
    droppable: the names of columns that may be left out, the first one first
    """
    kept = list(range(len(rows[0])))
    for name in droppable:
        if width is None or _width(rows, kept) <= width:
            break
        kept = [column for column in kept if rows[0][column] != name]
    widths = [max(len(row[column]) for row in rows) for column in kept]
    lines = ["  ".join(row[column].ljust(size) for column, size in zip(kept, widths, strict=True)) for row in rows]
    return [cut(line.rstrip(), width) for line in lines]


def _width(rows: Sequence[Sequence[str]], columns: Sequence[int]) -> int:
    return sum(max(len(row[column]) for row in rows) for column in columns) + 2 * (len(columns) - 1)


def cut(line: str, width: int | None) -> str:
    """Returns a line that is no wider than the window, with a mark where something is missing."""
    return line if width is None or len(line) <= width else line[: max(0, width - 1)] + CUT


def folded(line: str, width: int | None) -> list[str]:
    """Returns a sentence as lines that are no wider than the window, all but the first indented."""
    if width is None or len(line) <= width:
        return [line]
    indent = " " * (len(line) - len(line.lstrip()))
    return textwrap.wrap(line, width, subsequent_indent=f"{indent}    ")


def parts_of(rows: Sequence[Sequence[str]], width: int | None) -> list[str]:
    """Returns rows of numbers as one table, or as several below each other if the window is too narrow. Each has the
    first column and some of the others.
    """
    first, *rest = range(len(rows[0]))
    parts = [[first]]
    for column in rest:
        if width is not None and len(parts[-1]) > 1 and _width(rows, [*parts[-1], column]) > width:
            parts.append([first])
        parts[-1].append(column)
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    tables = [["  ".join(row[column].rjust(widths[column]) for column in part) for row in rows] for part in parts]
    return [cut(line, width) for index, lines in enumerate(tables) for line in [""] * bool(index) + lines]


def wrapped(parts: Sequence[str], width: int | None, between: str = " · ") -> list[str]:
    """Joins parts into lines, as many parts in a line as fit into the window."""
    lines: list[str] = []
    for part in parts:
        if lines and (width is None or len(lines[-1]) + len(between) + len(part) <= width):
            lines[-1] += between + part
        else:
            lines.append(part)
    return [cut(line, width) for line in lines]


def printable(text: str) -> str:
    """Returns a peer's text with unprintable characters escaped, so that it cannot control the terminal."""
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)
