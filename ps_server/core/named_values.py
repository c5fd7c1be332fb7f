"""The hyper-parameters that contributions name: one rule for buckets and tables.

Each worker names its own with what it contributes, or names none: a step that was left out has none to name. The first
contributor's count, which in sync is the live worker of the lowest rank. Where the contributors to one update may have
several clocks (`UpdateRule.mixes_clocks`), those of the worker that is furthest count, and an update in which only late
workers name some keeps those that the bucket has. So a late worker never sets a schedule back.
"""

from __future__ import annotations

from collections.abc import Iterable

from ps_protocol.hyper_parameters import HyperParameters


class GoodValues:
    """The hyper-parameters last found good, by what they are for. Most steps name those of the step before, and need no
    new check."""

    def __init__(self) -> None:
        self._last: dict[object, HyperParameters] = {}

    def has(self, key: object, values: HyperParameters) -> bool:
        """Whether these are the hyper-parameters that passed the last check."""
        return self._last.get(key) == values

    def note(self, key: object, values: HyperParameters) -> None:
        """Notes that these hyper-parameters have passed the check."""
        self._last[key] = values


class NamedValues:
    """The hyper-parameters that the contributions to one update name, by group."""

    def __init__(self) -> None:
        self._named: dict[int, tuple[int, HyperParameters]] = {}

    def add(self, group: int, values: HyperParameters, clock: int) -> None:
        """Takes what one contribution names. clock: of its worker, where an update may have several; else 0"""
        if group not in self._named or clock > self._named[group][0]:
            self._named[group] = clock, values

    def items(self) -> Iterable[tuple[int, tuple[int, HyperParameters]]]:
        """Returns, by group, the values that count, and the clock of the worker that named them."""
        return self._named.items()


class ValuesInUse:
    """How far the workers were whose hyper-parameters a bucket, or a table, has. It begins, or is restored, with 0."""

    def __init__(self) -> None:
        self._clocks: dict[int, int] = {}

    def newer(self, named: NamedValues) -> dict[int, HyperParameters]:
        """Returns, by group, the values to use from an update on; without those of workers that were less far."""
        newer = {}
        for group, (clock, values) in named.items():
            if clock >= self._clocks.get(group, 0):
                self._clocks[group], newer[group] = clock, values
        return newer
