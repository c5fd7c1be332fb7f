"""Which faults are to come, and when: seeded, so that the same seed does the same at the same times.

Half of the faults (by default) bring a second one, which begins within three seconds of the first. The pairs of kinds
take turns, in an order drawn from the seed, so that a long run makes all of them.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from tests.chaos.faults import KINDS

SECOND_SECONDS = 3.0  # within which the second fault begins
RARE = frozenset({"kill-cluster"})  # it takes the place of every other fault, so few pairs have it


@dataclass(frozen=True)
class Plan:
    """One fault to come, to the victim that is first of those to which it can be done.

    after:  seconds from the window's beginning, or, for a second fault, from the first
    second: the fault that overlaps with it
    """

    after: float
    kind: str
    victims: tuple[int, ...]
    seconds: float
    second: Plan | None = None


@dataclass(frozen=True)
class Weather:
    """What is drawn from.

    kinds: of faults
    sizes: how many workers, shards and so on there are, by what kinds are done to
    every: seconds from fault to fault, about
    share: of the faults that bring a second one
    """

    kinds: Sequence[str]
    sizes: Mapping[str, int]
    lease: float
    every: float
    share: float

    def plans(self, seed: str, seconds: float, pairs: Iterator[tuple[str, str]]) -> list[Plan]:
        """Returns faults for so many seconds, none in the last `every` of them, so that each has time to be seen."""
        draw = random.Random(seed)
        weights = [KINDS[kind].weight for kind in self.kinds]
        found, after = [], self.every / 2
        while after < seconds - self.every / 2:
            if draw.random() < self.share:
                first, other = next(pairs)
                second = self._plan(draw, draw.uniform(0.0, SECOND_SECONDS), other)
                found.append(self._plan(draw, after, first, second))
            else:
                found.append(self._plan(draw, after, draw.choices(self.kinds, weights)[0]))
            after += self.every * draw.uniform(0.8, 1.2)
        return found

    def pairs(self, seed: int, turn: int = 0, turns: int = 1) -> Iterator[tuple[str, str]]:
        """Yields pairs of kinds without end: each once before any comes again. Of several turns, each has its own."""
        usual = [kind for kind in self.kinds if kind not in RARE]
        found = list(itertools.product(usual, usual))
        found += [(kind, draw) for kind in self.kinds if kind in RARE for draw in usual[turn % len(usual) :: 4]]
        random.Random(seed).shuffle(found)
        return itertools.cycle(found[turn::turns] or found)

    def _plan(self, draw: random.Random, after: float, kind: str, second: Plan | None = None) -> Plan:
        shortest, longest = KINDS[kind].long
        many = self.sizes[KINDS[kind].to]
        return Plan(
            after, kind, tuple(draw.sample(range(many), many)), self.lease * draw.uniform(shortest, longest), second
        )


def steady(kinds: Sequence[str], sizes: Mapping[str, int], seed: str, window: float, windows: int) -> list[Plan]:
    """Returns a fault in every second window, a tenth of it after its beginning: the others are to compare with."""
    draw, found = random.Random(seed), []
    for number in range(1, windows, 2):
        kind = draw.choice(kinds)
        many = sizes[KINDS[kind].to]
        found.append(Plan((number + 0.1) * window, kind, tuple(draw.sample(range(many), many)), 0.0))
    return found
