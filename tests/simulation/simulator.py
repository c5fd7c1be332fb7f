"""A cluster without clock or socket: workers, shards and the coordinator's calls as seeded random interleavings.

What it checks is read from the weights themselves: each incarnation of a worker counts in a cell of its own, so that a
pulled bucket tells whose steps are in it.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch

from ps_protocol.errors import Backlogged, UnknownWorker
from ps_server.core.commands import AddWorker, RemoveWorker
from ps_server.core.consistency import Add, Step
from ps_server.core.partition import JobPartition
from ps_server.core.requests import Push
from tests.tools.partitions import FROZEN, TRAINED, image, initial, job_spec, payload, push, stage

# -- the cluster -----------------------------------------------------------------------------------------------------

CELLS = 32  # one for each incarnation: a simulation ends before it has had more
WHOLE = 60  # divisible by every number of workers up to 6, so that all means are whole numbers and every sum is exact
RANKS = 4


@dataclass
class Worker:
    """A worker that follows the protocol: pull, push every bucket, pull every bucket, and so on."""

    rank: int
    incarnation: int
    start: int = 0
    clock: int = 0
    to_push: set[int] = field(default_factory=set)
    to_pull: set[int] = field(default_factory=set)
    sent: list[Push] = field(default_factory=list)

    def next_step(self) -> None:
        if not self.to_push and not self.to_pull:
            self.clock += 1
            self.to_push = set(TRAINED)
            self.to_pull = set(TRAINED)


class Simulation:
    """Two shards with a bucket each, and up to four workers that come, die and come back."""

    def __init__(self, mode: str, seed: int) -> None:
        self.random = random.Random(seed)
        # Some clusters apply slowly, some join slowly, in some everybody dies.
        self.pace = {"worker": 40, "repeat": 4, "haunt": 2}
        self.pace |= {"apply": self.random.choice([4, 40]), "coordinate": self.random.choice([4, 20])}
        self.pace |= {"die": self.random.choice([1, 4]), "join": self.random.choice([1, 4])}
        self.spec = job_spec(mode)
        self.bound = self.spec.consistency.max_staleness
        room = self.random.choice([1, 128, 256, None])  # the most that may be staged on a shard; a push has 128 bytes
        self.shards = [JobPartition(self.spec, [0, FROZEN], room), JobPartition(self.spec, [1], room)]
        self.home = {index: shard for shard in self.shards for index in shard.buckets}
        self.incarnations = 0
        self.live: dict[int, Worker] = {}
        self.dead: list[Worker] = []
        self.joining: Worker | None = None
        self.calls: list[Callable[[], object]] = []  # what the coordinator still has to ask of shards, in order
        self.expected = {index: torch.zeros(CELLS) for index in TRAINED}
        self.counts: dict[tuple[int, int], int] = {}  # (bucket, incarnation) -> updates that hold its gradient
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
            newcomer.to_pull = set(TRAINED)
            self.live[rank] = newcomer
            self.joining = None
            if rank == 0:
                for index, shard in self.home.items():
                    stage(shard, initial(index, incarnation=newcomer.incarnation))

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

    def push(self, worker: Worker, index: int) -> bool:
        gradient = torch.zeros(CELLS)
        gradient[worker.incarnation] = -WHOLE
        one = push(index, worker.clock, worker.rank, worker.incarnation, payload=payload(gradient))
        try:
            assert not stage(self.home[index], one)
        except Backlogged:
            return False
        worker.sent.append(one)
        worker.to_push.discard(index)
        return True

    def repeat(self, worker: Worker) -> None:
        if worker.sent:
            one = self.random.choice(worker.sent)
            assert stage(self.home[one.bucket], one), "a repeat is acknowledged"

    def haunt(self, ghost: Worker) -> None:
        """A push of an incarnation that was replaced or retired comes late."""
        shard = self.home[0]
        live = shard.roster.get(ghost.rank)
        if ghost.sent and (live is None or live.incarnation != ghost.incarnation):
            before = image(shard)
            with pytest.raises(UnknownWorker):
                stage(shard, push(0, ghost.clock + 1, ghost.rank, ghost.incarnation))
            assert image(shard) == before

    def pull(self, worker: Worker, index: int) -> bool:
        shard = self.home[index]
        if not shard.admits(index, worker.rank, worker.clock).admitted:
            return False
        self.check_pulled(worker, index, shard)
        worker.to_pull.discard(index)
        return True

    def check_pulled(self, worker: Worker, index: int, shard: JobPartition) -> None:
        """What the data says: the worker's own steps are in, and those of all live workers up to the bound."""
        cells = shard.buckets[index].weights.flat
        assert torch.equal(cells, self.expected[index])
        needed = {worker.incarnation: worker.clock - worker.start}
        if self.bound is not None:
            for other in self.live.values():
                if other is not worker:
                    start = shard.roster[other.rank].start
                    needed[other.incarnation] = max(0, worker.clock - self.bound - start)
        for incarnation, steps in needed.items():
            assert self.counts.get((index, incarnation), 0) >= steps
            if not self.spec.consistency.aggregate:
                assert cells[incarnation] >= WHOLE * steps

    def apply(self, index: int) -> bool:
        bucket = self.home[index].buckets[index]
        item = bucket.rule.next()
        if isinstance(item, Add):
            bucket.weights.add(item.contribution)
            values = item.contribution.values
            assert values is not None
            self.open(index).append(int(values.nonzero().item()))
        elif isinstance(item, Step):
            bucket.weights.step()
            who = self.open(index)
            assert len(who) == len(item.ranks)
            for incarnation in who:
                self.expected[index][incarnation] += WHOLE / len(who)
                self.counts[index, incarnation] = self.counts.get((index, incarnation), 0) + 1
            who.clear()
        if item is not None:
            self.home[index].done(index, item)
        return item is not None

    def open(self, index: int) -> list[int]:
        """Incarnations whose gradients are in the open update of a bucket."""
        return self.__dict__.setdefault(f"open_{index}", [])  # type: ignore[no-any-return]

    # -- runs

    def advance(self, worker: Worker) -> bool:
        """One thing that this worker can do now; False if it can do nothing but wait."""
        worker.next_step()
        moves = [lambda i=i: self.push(worker, i) for i in sorted(worker.to_push)]
        moves += [lambda i=i: self.pull(worker, i) for i in sorted(worker.to_pull)]
        self.random.shuffle(moves)
        return any(move() for move in moves)

    def event(self) -> None:
        kind = self.random.choices(list(self.pace), list(self.pace.values()))[0]
        worker = self.random.choice(sorted(self.live.values(), key=lambda w: w.rank)) if self.live else None
        if kind == "worker" and worker is not None:
            self.advance(worker)
        elif kind == "apply":
            self.apply(self.random.choice(TRAINED))
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
        """Nobody dies any more, the dead are retired: whoever lives must get on, to the same clock and for ever."""
        while self.coordinate():
            pass
        if 0 not in self.live:
            self.join(0)
        for worker in self.dead:
            self.retire(worker)
        while self.coordinate():
            pass
        target = max(worker.clock for worker in self.live.values()) + 3
        while any(worker.clock < target or worker.to_pull for worker in self.live.values()):
            moved = [self.apply(index) for index in TRAINED]
            moved += [
                self.advance(worker)
                for worker in self.live.values()
                if worker.clock < target or worker.to_push or worker.to_pull
            ]
            assert any(moved), f"stuck: {[self.home[i].buckets[i].rule for i in TRAINED]}"
