"""Dates in words, for people who read logs, and in the form that JSON has."""

from __future__ import annotations

from datetime import datetime, timezone


def date_text(seconds: float) -> str:
    """Returns a date from seconds since 1970."""
    return datetime.fromtimestamp(seconds, timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")


def seconds_of(text: str) -> float:
    """Returns the seconds since 1970 of a date as protobuf's JSON has it, to the millisecond."""
    return datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()


def described(began: float, trained: float | None) -> str:
    """Returns when a job was begun, and when it was trained last if that is known."""
    begun = f"begun {date_text(began)}"
    return begun if trained is None else f"{begun}, last trained {date_text(trained)}"
