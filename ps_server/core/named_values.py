"""Which hyper-parameters an update uses, out of those that contributions name: one rule for buckets and tables.

A contribution names its worker's hyper-parameters, or none if its step was left out. Those of the first contribution
count, which in sync is that of the lowest live rank. If contributions may differ in their clocks
(`UpdateRule.mixes_clocks`), those with the highest clock count; an update in which only late workers name some keeps
those that the bucket has. So a late worker never sets a schedule back.
"""

from __future__ import annotations

from collections.abc import Iterable

from ps_protocol.hyper_parameters import HyperParameters


class GoodValues:
    """The hyper-parameters that last passed the check, by key. Most steps name those of the step before, and need no
    check.
    """

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
        """Adds what one contribution names. clock: its worker's, if contributions may differ in it; else 0"""
        if group not in self._named or clock > self._named[group][0]:
            self._named[group] = clock, values

    def items(self) -> Iterable[tuple[int, tuple[int, HyperParameters]]]:
        """Returns, by group, the values that count, and the clock of the worker that named them."""
        return self._named.items()


class ValuesInUse:
    """By group, the clock of the worker that named the hyper-parameters in use; 0 at first, and after a restore."""

    def __init__(self) -> None:
        self._clocks: dict[int, int] = {}

    def newer(self, named: NamedValues) -> dict[int, HyperParameters]:
        """Returns, by group, the values to use from an update on; without those of workers at a lower clock than
        before.
        """
        newer = {}
        for group, (clock, values) in named.items():
            if clock >= self._clocks.get(group, 0):
                self._clocks[group], newer[group] = clock, values
        return newer
