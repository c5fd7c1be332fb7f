"""A cluster without clock or socket: workers, shards and the coordinator's calls as seeded random interleavings.

What it checks is read from the weights themselves: each incarnation of a worker counts in a cell of its own, so that a
pulled bucket tells whose steps are in it. So do the two rows of a table on each shard, which come in a message each.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch

from ps_protocol.errors import Backlogged, UnknownWorker
from ps_protocol.identity import Identity
from ps_protocol.messages.data import PushCall
from ps_protocol.messages.rows import RowPushKind, RowsPush
from ps_protocol.tables import Initializer, JobTable, TableSpec
from ps_server.core.commands import AddWorker, RemoveWorker
from ps_server.core.consistency import Add, Step, UpdateRule
from ps_server.core.partition import JobPartition
from ps_server.core.placement import TableShare
from tests.simulation.rows import NEVER, id_of
from tests.tools.partitions import FROZEN, TRAINED, image, initial, job_spec, payload, push, stage

# -- the cluster -----------------------------------------------------------------------------------------------------

CELLS = 32  # one for each incarnation: a simulation ends before it has had more
WHOLE = 60  # divisible by every number of workers up to 6, so that all means are whole numbers and every sum is exact
RANKS = 4
TABLE = 3  # its index, behind the buckets
ON_SHARDS = (3, 4)  # the part of the table on each shard, as a bucket of its own
PARTS = (*TRAINED, *ON_SHARDS)
ROOM = 2**16  # bytes of rows
ROWS = JobTable(TableSpec("rows", CELLS, Initializer("constant", 0.0)), "SGD", {"lr": 1.0})
IDS = {part: np.array([id_of(shard, NEVER, row) for row in (1, 2)]) for shard, part in enumerate(ON_SHARDS)}


def stage_any(shard: JobPartition, one: PushCall | RowsPush) -> bool:
    """Checks and stages; True if it was a repeat."""
    if isinstance(one, PushCall):
        return stage(shard, one)
    return shard.execute(shard.row_checker.push(one)).duplicate


def rows_on(shard: JobPartition, part: int) -> torch.Tensor:
    """The table's rows on a shard: [2, CELLS]"""
    rows = torch.empty(2, CELLS)
    shard.tables[TABLE].weights.pull(IDS[part], rows)
    return rows


@dataclass
class Worker:
    """A worker that follows the protocol: pull, push every bucket, pull every bucket, and so on."""

    rank: int
    incarnation: int
    start: int = 0
    clock: int = 0
    to_push: set[tuple[int, int]] = field(default_factory=set)  # a part, and the number of its message
    to_pull: set[int] = field(default_factory=set)
    sent: list[tuple[int, PushCall | RowsPush]] = field(default_factory=list)  # with the part

    def next_step(self, parts: tuple[int, ...]) -> None:
        if not self.to_push and not self.to_pull:
            self.clock += 1
            self.to_push = {(part, message) for part in parts for message in range(1 + (part in ON_SHARDS))}
            self.to_pull = set(parts)


class Simulation:
    """Two shards with a bucket and two rows each, and up to four workers that come, die and come back.

    Every other seed is without the rows.
    """

    def __init__(self, mode: str, seed: int) -> None:
        self.random = random.Random(seed)
        # Some clusters apply slowly, some join slowly, in some everybody dies.
        self.pace = {"worker": 40, "repeat": 4, "haunt": 2}
        self.pace |= {"apply": self.random.choice([4, 40]), "coordinate": self.random.choice([4, 20])}
        self.pace |= {"die": self.random.choice([1, 4]), "join": self.random.choice([1, 4])}
        self.parts = PARTS if seed % 2 else TRAINED
        self.spec = replace(job_spec(mode), tables=(ROWS,) if seed % 2 else ())
        self.has_quorum = self.spec.consistency.quorum is not None
        self.bound = None if self.has_quorum else self.spec.consistency.max_staleness
        room = self.random.choice([1, 128, 256, None])  # the most that may be staged on a shard; a push has 128 bytes
        self.shards = [
            JobPartition(self.spec, buckets, room, share=TableShare(shard, 2, ROOM))
            for shard, buckets in enumerate(([0, FROZEN], [1]))
        ]
        self.home = {index: shard for shard in self.shards for index in shard.buckets}
        self.home |= dict(zip(ON_SHARDS, self.shards, strict=True))
        self.incarnations = 0
        self.live: dict[int, Worker] = {}
        self.dead: list[Worker] = []
        self.joining: Worker | None = None
        self.calls: list[Callable[[], object]] = []  # what the coordinator still has to ask of shards, in order
        self.expected = {part: torch.zeros(CELLS) for part in self.parts}
        self.counts: dict[tuple[int, int], int] = {}  # (part, incarnation) -> updates that hold its gradient
        for rank in range(self.random.randint(1, 3)):
            self.join(rank)
            while self.calls:
                self.coordinate()

    # -- the coordinator: one thing at a time, a call to each shard

    def join(self, rank: int) -> None:
        """Two rounds over the shards, each in any order; see Coordinator.join."""
        self.incarnations += 1
        newcomer = Worker(rank, self.incarnations)
        older = self.live.pop(rank, None)
        if older is not None:
            self.dead.append(older)
        self.joining = newcomer
        frontiers: list[int] = []

        def first(shard: JobPartition) -> None:
            frontiers.append(shard.execute(AddWorker(rank, newcomer.incarnation, None)).frontier)

        def second(shard: JobPartition) -> None:
            shard.execute(AddWorker(rank, newcomer.incarnation, max(frontiers)))

        def joined() -> None:
            newcomer.start = newcomer.clock = max(frontiers)
            newcomer.to_pull = set(self.parts)
            self.live[rank] = newcomer
            self.joining = None
            if rank == 0:
                for index in (*TRAINED, FROZEN):
                    stage(self.home[index], initial(index, incarnation=newcomer.incarnation))

        for round_ in (first, second):
            shards = self.random.sample(self.shards, len(self.shards))
            self.calls += [lambda shard=shard, round_=round_: round_(shard) for shard in shards]
        self.calls.append(joined)

    def retire(self, worker: Worker) -> None:
        for shard in self.random.sample(self.shards, len(self.shards)):
            self.calls.append(lambda shard=shard: shard.execute(RemoveWorker(worker.rank, worker.incarnation)))

    def coordinate(self) -> bool:
        if not self.calls:
            return False
        self.calls.pop(0)()
        return True

    # -- what can happen

    def push(self, worker: Worker, index: int, message: int) -> bool:
        gradient = torch.zeros(CELLS)
        gradient[worker.incarnation] = -WHOLE
        one = self.made(worker, index, message, payload(gradient))
        try:
            assert not stage_any(self.home[index], one)
        except Backlogged:
            return False
        worker.sent.append((index, one))
        worker.to_push.discard((index, message))
        return True

    def made(self, worker: Worker, index: int, message: int, gradient: bytes) -> PushCall | RowsPush:
        if index in TRAINED:
            return push(index, worker.clock, worker.rank, worker.incarnation, payload=gradient)
        ids, occurrences = IDS[index][message : message + 1].astype("<i8"), np.ones(1, "<u4")
        content = ids.tobytes() + occurrences.tobytes() + gradient
        what = Identity("sums", worker.rank, worker.incarnation), 0, worker.clock
        return RowsPush(*what, RowPushKind.GRADIENT, content, message, 1, 2, {})

    def repeat(self, worker: Worker) -> None:
        if worker.sent:
            index, one = self.random.choice(worker.sent)
            assert stage_any(self.home[index], one), "a repeat is acknowledged"

    def haunt(self, ghost: Worker) -> None:
        """A push of an incarnation that was replaced or retired comes late."""
        index, one = self.random.choice(ghost.sent or [(0, push())])
        shard = self.home[index]
        live = shard.roster.get(ghost.rank)
        if ghost.sent and (live is None or live.incarnation != ghost.incarnation):
            before = self.image(shard)
            with pytest.raises(UnknownWorker):
                stage_any(shard, replace(one, clock=ghost.clock + 1))
            assert self.image(shard) == before

    def image(self, shard: JobPartition) -> list[object]:
        """Everything a push could change."""
        if not shard.tables:
            return image(shard)
        table = shard.tables[TABLE]
        pending = {
            rank: (each.clock, sorted(each.step.parts) if each.step else []) for rank, each in table.pending.items()
        }
        rows = rows_on(shard, ON_SHARDS[self.shards.index(shard)])
        return [*image(shard), pending, dict(table.rule.staged), rows.tolist()]

    def pull(self, worker: Worker, index: int) -> bool:
        shard = self.home[index]
        if not shard.units[min(index, TABLE)].admit_all([(worker.rank, worker.clock)])[0].admitted:
            return False
        self.check_pulled(worker, index, shard)
        worker.to_pull.discard(index)
        return True

    def check_pulled(self, worker: Worker, index: int, shard: JobPartition) -> None:
        """What the data says: the worker's own steps are in, and those of all live workers up to the bound.

        With a quorum its last step may be late.
        """
        cells = self.weights(index)
        needed = {worker.incarnation: worker.clock - worker.start - self.has_quorum}
        if self.bound is not None:
            for other in self.live.values():
                if other is not worker:
                    start = shard.roster[other.rank].start
                    needed[other.incarnation] = max(0, worker.clock - self.bound - start)
        for incarnation, steps in needed.items():
            assert self.counts.get((index, incarnation), 0) >= steps
            if not self.spec.consistency.aggregate:
                assert cells[incarnation] >= WHOLE * steps

    def weights(self, index: int) -> torch.Tensor:
        """Returns the cells of a part, which are as expected: those of a table are in each of its rows."""
        shard, expected = self.home[index], self.expected[index]
        if index in TRAINED:
            cells = shard.buckets[index].weights.flat
            assert torch.equal(cells, expected)
            return cells
        rows = rows_on(shard, index)
        assert torch.equal(rows, expected.expand(2, CELLS))
        return rows[0]

    def rule(self, index: int) -> UpdateRule[Any]:
        return self.home[index].rules[min(index, TABLE)]

    def apply(self, index: int) -> bool:
        shard, item = self.home[index], self.rule(index).next()
        weights = shard.units[min(index, TABLE)].weights
        if isinstance(item, Add):
            weights.add(item.contribution)
            values = item.contribution.values if index in TRAINED else item.contribution.rows[0].gradients
            self.open(index).append(int(values.flatten().nonzero().item()))
        elif isinstance(item, Step):
            weights.step()
            who = self.open(index)
            assert len(who) == len(item.ranks)
            for incarnation in who:
                self.expected[index][incarnation] += WHOLE / len(who)
                self.counts[index, incarnation] = self.counts.get((index, incarnation), 0) + 1
            who.clear()
        if item is not None:
            shard.done(min(index, TABLE), item)
        return item is not None

    def open(self, index: int) -> list[int]:
        """Incarnations whose gradients are in the open update of a part."""
        return self.__dict__.setdefault(f"open_{index}", [])  # type: ignore[no-any-return]

    # -- runs

    def advance(self, worker: Worker) -> bool:
        """One thing that this worker can do now; False if it can do nothing but wait."""
        worker.next_step(self.parts)
        moves = [lambda i=i: self.push(worker, *i) for i in sorted(worker.to_push)]
        moves += [lambda i=i: self.pull(worker, i) for i in sorted(worker.to_pull)]
        self.random.shuffle(moves)
        return any(move() for move in moves)

    def event(self) -> None:
        kind = self.random.choices(list(self.pace), list(self.pace.values()))[0]
        worker = self.random.choice(sorted(self.live.values(), key=lambda w: w.rank)) if self.live else None
        if kind == "worker" and worker is not None:
            self.advance(worker)
        elif kind == "apply":
            self.apply(self.random.choice(self.parts))
        elif kind == "coordinate":
            self.coordinate()
        elif kind == "repeat" and worker is not None:
            self.repeat(worker)
        elif kind == "haunt" and self.dead:
            self.haunt(self.random.choice(self.dead))
        elif kind == "die" and worker is not None:
            self.dead.append(self.live.pop(worker.rank))
            if self.random.random() < 0.7:  # else it comes back, maybe, before anyone has missed it
                self.retire(worker)
        elif kind == "join" and self.joining is None and self.incarnations < CELLS - 2:
            self.join(self.random.randrange(RANKS))

    def settle(self) -> None:
        """Nobody dies any more, the dead are retired: whoever lives must get on, to the same clock and for ever.

        With a quorum each counts its own steps, and a worker that stopped would be missing: all go on until each has
        made some, and then all are taken off, which has everything applied.
        """
        while self.coordinate():
            pass
        if 0 not in self.live:
            self.join(0)
        for worker in self.dead:
            self.retire(worker)
        while self.coordinate():
            pass
        if self.has_quorum:
            targets = {rank: worker.clock + 3 for rank, worker in self.live.items()}
            while any(worker.clock < targets[rank] for rank, worker in self.live.items()):
                moved = [self.apply(index) for index in self.parts]
                moved += [self.advance(worker) for worker in self.live.values()]
                assert any(moved), f"stuck: {[self.rule(index) for index in self.parts]}"
            for worker in self.live.values():
                self.retire(worker)
            while self.coordinate() or any(map(self.apply, self.parts)):
                pass
            self.check_counts()
            return
        target = max(worker.clock for worker in self.live.values()) + 3
        while any(worker.clock < target or worker.to_pull for worker in self.live.values()):
            moved = [self.apply(index) for index in self.parts]
            moved += [
                self.advance(worker)
                for worker in self.live.values()
                if worker.clock < target or worker.to_push or worker.to_pull
            ]
            assert any(moved), f"stuck: {[self.rule(index) for index in self.parts]}"

    def check_counts(self) -> None:
        """All that was staged is in, once."""
        for worker in [*self.dead, *self.live.values()]:
            for index in self.parts:
                clocks = [one.clock for part, one in worker.sent if part == index]
                whole = {clock for clock in clocks if clocks.count(clock) == 1 + (index in ON_SHARDS)}
                assert self.counts.get((index, worker.incarnation), 0) == len(whole)
