"""Maps the arguments of `prepare` to its results: a script may pass either to `prepare` again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any


class Prepared:
    """The models and optimizers of one session, as the script handed them over and as it got them back."""

    def __init__(self) -> None:
        self._pairs: list[tuple[Any, Any]] = []

    def add(self, things: Iterable[Any], prepared: Iterable[Any]) -> None:
        """Records the results of `prepare` for these arguments."""
        self._pairs += zip(things, prepared, strict=True)

    def knows(self, thing: Any) -> bool:
        """Whether `prepare` was given this object, or has returned it."""
        return any(thing is own or thing is made for own, made in self._pairs)

    def of(self, things: Iterable[Any]) -> Mapping[int, Any]:
        """Returns the results for known objects, by their id."""
        wanted = list(things)
        return {id(thing): made for thing in wanted for own, made in self._pairs if thing is own or thing is made}
