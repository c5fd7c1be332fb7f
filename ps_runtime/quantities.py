"""Quantities as text for a person: sizes in bytes, durations, counts, and ranks."""

from __future__ import annotations

from collections.abc import Iterable


def size_text(count: int) -> str:
    """Returns bytes as text, in the largest unit in which it is 1 or more: `5.77 MB`."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= 0.9995 * size:  # from here on, the next smaller unit would round to 1000
            return f"{number_text(count / size)} {unit}"
    return f"{count} B"


def duration_text(seconds: float) -> str:
    """Returns a duration to two figures or so, for a person: 0.4 s, 12 s, 3 min, 1.5 h, 2.1 days."""
    if seconds < 120:
        return f"{seconds:.1f} s" if 0 < seconds < 1 else f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 48 * 3600 else f"{seconds / 86400:.1f} days"


def number_text(value: float) -> str:
    """Returns a number with three digits, or all before the point, never with an exponent: 0.0123, 12.3, 12,345."""
    if value >= 999.5:
        return f"{value:,.0f}"
    text = f"{value:.3g}"
    return text if "e" not in text else f"{value:.12f}".rstrip("0").rstrip(".")


def time_text(seconds: float) -> str:
    """Returns seconds in a unit that people read: 12.3 ms, 4.2 s, 12 min, 3.5 h."""
    if seconds < 0.9995:
        return f"{number_text(seconds * 1e3)} ms"
    for unit, size in (("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * size:
            return f"{number_text(seconds / size)} {unit}"
    return f"{number_text(seconds)} s"


def counted(count: int, noun: str) -> str:
    """Returns a count with its noun: `1 bucket`, `2 buckets`."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def ranges(ranks: list[int]) -> str:
    """Returns sorted ranks as short text: "0-3, 7"."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and runs[-1][-1] == rank - 1:
            runs[-1][1:] = [rank]
        else:
            runs.append([rank])
    return ", ".join("-".join(map(str, ends)) for ends in runs)


def ranks_text(ranks: Iterable[int]) -> str:
    """Returns workers as text: "worker 3", "workers 0 and 1", "workers 0-63, 70"."""
    named = sorted(ranks)
    if len(named) == 1:
        return f"worker {named[0]}"
    if len(named) == 2 and named[1] == named[0] + 1:
        return f"workers {named[0]} and {named[1]}"
    return f"workers {ranges(named)}"
