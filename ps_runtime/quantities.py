"""Quantities as text for a person: sizes in bytes, how many there are of something, and which ranks."""

from __future__ import annotations

from collections.abc import Iterable


def size_text(count: int) -> str:
    """Returns bytes in the largest unit that leaves a whole number before the point: `5.77 MB`."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count} B"


def time_text(seconds: float) -> str:
    """Returns a duration to two figures or so, for a person: 0.4 s, 12 s, 3 min, 1.5 h, 2.1 days."""
    if seconds < 120:
        return f"{seconds:.1f} s" if 0 < seconds < 1 else f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 48 * 3600 else f"{seconds / 86400:.1f} days"


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


def ranks_text(ranks: Iterable[int]) -> str:
    """Names workers: "worker 3", "workers 0 and 1", "workers 0-63, 70"."""
    named = sorted(ranks)
    if len(named) == 1:
        return f"worker {named[0]}"
    if len(named) == 2 and named[1] == named[0] + 1:
        return f"workers {named[0]} and {named[1]}"
    return f"workers {ranges(named)}"
