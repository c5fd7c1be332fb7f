"""Quantities as text for a person: sizes in bytes, and how many there are of something."""

from __future__ import annotations


def size_text(count: int) -> str:
    """Returns bytes in the largest unit that leaves a whole number before the point: `5.77 MB`."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count} B"


def counted(count: int, noun: str) -> str:
    """Returns how many there are of something: `1 bucket`, `2 buckets`."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def ranges(ranks: list[int]) -> str:
    """Returns sorted ranks in short: 0-3, 7."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and runs[-1][-1] == rank - 1:
            runs[-1][1:] = [rank]
        else:
            runs.append([rank])
    return ", ".join("-".join(map(str, ends)) for ends in runs)
