"""What rank 0 saves: now and then between two steps, before it leaves, and when all have finished.

It takes the weights as `session.global_weights` and the tables' `state_dict` do: in ssp, async and with a quorum they
are fetched, with all that is staged; elsewhere they are those of the last update that it has. What it has got then is
judged as the weights are at the end: each push that was acknowledged before, of any worker, is in it once. Where the
workers share a clock, all of it is of one version, and has the updates of the clocks up to that one.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from tests.chaos.oracle import Life, Violation, judge
from tests.simulation.row_oracle import Content, in_counting_order
from tests.simulation.rows import COUNTS, UPDATES_BEFORE

if TYPE_CHECKING:
    from tests.simulation.runs import Run
    from tests.simulation.worker import Place, Worker

SAVES, SAVES_FIRST = 0.06, 0.5  # how often rank 0 saves before a step, and before its first one in a place


class Acknowledged:
    """The pushes of one run that shards have acknowledged: of each bucket, and of "counts" on each shard."""

    def __init__(self) -> None:
        self._of: defaultdict[int, defaultdict[int, set[int]]] = defaultdict(lambda: defaultdict(set))

    def note(self, part: int, life: int, step: int) -> None:
        """Notes that a life's push was acknowledged."""
        self._of[part][life].add(step)

    def follow(self, earlier: Acknowledged) -> None:
        """Takes what an earlier launch of the same job has pushed."""
        for part, lives in earlier._of.items():
            for life, steps in lives.items():
                self._of[part][life] |= steps

    def now(self, parts: int) -> list[dict[int, set[int]]]:
        """Returns what is acknowledged by now, by part and life."""
        return [{life: set(steps) for life, steps in self._of[part].items()} for part in range(parts)]


class Saver:
    """What saves on rank 0. is_due: it is to save once more, where it holds"""

    def __init__(self, worker: Worker, run: Run) -> None:
        self._worker, self._run = worker, run
        # Drawn apart: what else happens with a seed stays as it was.
        self._draw = random.Random(f"saves {run.job.mode} {run.name} {worker.life.number}")
        self.is_due = False
        self._last: Place | None = None  # where it was before its last step

    def between_steps(self) -> None:
        """Saves perhaps. Raises PSError, as a step does."""
        place, self._last = self._last, self._worker.place
        chance = SAVES if place is self._last else SAVES_FIRST
        if self._worker.rank == 0 and self._draw.random() < chance:
            self.save()

    def save(self) -> None:
        """Saves once, and judges what it has got. Raises PSError, as a step does."""
        worker, run, tables = self._worker, self._run, dict[int, Content]()
        before = dict[int, dict[int, set[int]]]()

        def fetch(place: Place) -> list[Callable[[], object]]:
            before.update(enumerate(run.acknowledged.now(run.rules.shape.buckets)))
            counts = [(table, shard) for table, shard in worker.rows.parts if table.number == COUNTS]
            works: list[Callable[[], object]] = [
                lambda table=table, shard=shard: tables.update({shard: worker.rows.fetched(place, table, shard)})  # type: ignore[misc]
                for table, shard in counts
            ]
            return works if run.rules.averaged else [*works, *worker.pulls(place, place.clock, all_staged=True)]

        place, views = worker.in_place(fetch), dict(enumerate(worker.weights()))
        views |= {len(run.buckets) + at: in_counting_order(each.in_order(at)) for at, each in tables.items()}
        versions = worker.versions | {
            len(run.buckets) + at: each.version - UPDATES_BEFORE for at, each in tables.items()
        }
        self.is_due = False
        worker.world.trace(f"{worker.host.name} saves at clock {place.clock}")
        if run.rules.averaged:
            self._report(place, self._of_one_version(place, views, versions))
        else:
            self._report(place, self._with_all_acknowledged(views, before))

    def _with_all_acknowledged(
        self, views: Mapping[int, torch.Tensor], before: Mapping[int, Mapping[int, set[int]]]
    ) -> Iterator[tuple[int, Violation]]:
        """Yields what is wrong where workers have clocks of their own. before: what was acknowledged, by part, life"""
        run = self._run
        for part, view in views.items():
            lives = [_with(life, before[part].get(life.number, set())) for life in run.lives]
            lossy = frozenset({0} if part in run.lossy else ())
            yield from _in(part, judge(view[None], [*self._marks(part), *lives], run.rules, lossy))

    def _of_one_version(
        self, place: Place, views: Mapping[int, torch.Tensor], versions: Mapping[int, int]
    ) -> Iterator[tuple[int, Violation]]:
        """Yields what is wrong where workers share a clock. A fragment of a round is of the round after, if it came."""
        run, clock = self._run, place.clock
        may_lack_a_step = run.may_lack_a_step(clock, place.since) and not self._worker.life.done
        lives = [run.tries.decided(life) for life in run.lives]
        for part, view in views.items():
            version = versions[part]
            is_of_clock = version == clock or (may_lack_a_step and version == clock - 1)
            if not is_of_clock and not self._worker.is_streaming:
                yield part, Violation("saved", f"it is of version {version} at clock {clock}", {})
            until = [_until(life, version) for life in lives]
            yield from _in(part, judge(view[None], [*self._marks(part), *until], run.rules))

    def _marks(self, part: int) -> list[Life]:
        """Returns what the weights of a part begin with."""
        return self._run.marks if part in self._run.buckets else []

    def _report(self, place: Place, found: Iterator[tuple[int, Violation]]) -> None:
        for part, each in found:
            where = {**each.where, "part": part, "at": round(self._worker.world.now - 1000, 3)}
            said = f"rank 0 has saved at clock {place.clock}: {each.kind}: {each.said}"
            self._worker.cluster.violated(Violation("saved", said, where))


def _in(part: int, found: list[Violation]) -> Iterator[tuple[int, Violation]]:
    return ((part, each) for each in found)


def _with(life: Life, acknowledged: set[int]) -> Life:
    """Returns a life of which these steps are in the weights, and the others that it has begun may be."""
    return replace(life, done=dict.fromkeys(acknowledged, 0))


def _until(life: Life, clock: int) -> Life:
    """Returns a life without the steps of later clocks."""
    done = {number: at for number, at in life.done.items() if at <= clock}
    return replace(life, attempted=[number for number in life.attempted if number <= clock], done=done)
