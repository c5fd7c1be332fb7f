"""A job of the counting oracle in threads, to which something happens on the way."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

import ps_worker
from ps_server.ops import requests
from ps_server.storage.checkpoints import CheckpointStore
from tests.chaos.cluster import read_weights
from tests.chaos.oracle import Cells, Life, Rules, Shape, Violation, Witness, judge, missing, too_stale
from tests.chaos.worker import Task, incarnation_of, place_of
from tests.tools.cluster import in_parallel, until

SHAPE = Shape(buckets=5, rows=4, columns=7)
WORKERS = 2
STEPS = 25
PACE_SECONDS = 0.04  # of a step, until what is to happen has happened
FIRST = 4  # the clock at which workers begin to wait for a checkpoint
AHEAD_SECONDS = 2.0


class Model(Cells):
    """The oracle's cells, and a tensor that has random gradients and a momentum."""

    def __init__(self, rules: Rules) -> None:
        super().__init__(SHAPE)
        self._signs = rules.late
        if rules.averaged:
            self.noise = nn.Parameter(torch.zeros(SHAPE.rows, 1 + SHAPE.columns))

    def optimizer(self, signs: bool = False) -> torch.optim.Optimizer:
        if self._signs or signs:
            return super().optimizer(signs=True)
        groups: list[dict[str, Any]] = [{"params": [*self.buckets]}]
        if hasattr(self, "noise"):
            groups.append({"params": [self.noise], "lr": 0.1, "momentum": 0.9})
        return torch.optim.SGD(groups, lr=1.0)

    def mark(self, witness: Witness, rank: int, number: int) -> None:
        witness.mark(self, number)
        if hasattr(self, "noise"):
            self.noise.grad = torch.randn(
                self.noise.shape, generator=torch.Generator().manual_seed(100 * number + rank)
            )


@dataclass
class Ended:
    """How a run ended.

    weights: of everything, by name
    found:   what the oracle found
    lost:    how many acknowledged steps are not in the weights; `missing`: with those that were not acknowledged
    """

    weights: dict[str, torch.Tensor]
    found: list[Violation]
    lost: int = 0
    missing: int = 0
    status: dict[str, Any] = field(default_factory=dict)


class Run:
    """One job: its workers train until what is to happen has happened, and then to the last step.

    happened:   set when it has; None: nothing is to happen
    store:      where there is to be a checkpoint before it does
    late:       one more worker joins when there is a checkpoint; the job is elastic then
    transports: of the ranks, in turn
    steps:      of each worker
    joined_again: by rank, the clock it had reached when it last joined again, and the clock it went on from
    """

    def __init__(
        self,
        address: str,
        mode: str,
        happened: threading.Event | None = None,
        store: CheckpointStore | None = None,
        late: bool = False,
        transports: tuple[str, ...] = ("shm", "grpc"),
        steps: int = STEPS,
    ) -> None:
        self._address, self._mode, self._happened, self._store = address, mode, happened, store
        self._steps = steps
        self._workers = WORKERS + late
        self._late, self._transports = late, transports
        self._rules = Rules.of(mode, self._workers, SHAPE)
        self._found: list[Violation] = []
        self._lives = [Life(rank, rank) for rank in range(self._workers)]
        self._barrier = threading.Barrier(self._workers, timeout=60)
        self.stepped: Callable[[int, int], object] = lambda rank, clock: None
        self.joined_again: dict[int, tuple[int, int]] = {}
        self._ended: Ended | None = None

    def to_the_end(self) -> Ended:
        in_parallel(self._workers, self._work)
        assert self._ended is not None
        return self._ended

    def _work(self, rank: int) -> None:
        if rank == WORKERS:
            until(self._kept, "a checkpoint")
        elastic = {"rank": None, "world_size": None, "elastic": True} if self._late else {"rank": rank}
        transport = self._transports[rank % len(self._transports)]
        where: dict[str, Any] = {"world_size": WORKERS, **elastic, "transport": transport, "connect_timeout": 60}
        mode, *quorum = self._mode.split(" quorum ")
        where |= {"quorum": quorum[0]} if quorum else {}
        with ps_worker.connect(self._address, mode, "default", **where) as session:
            model = Model(self._rules)
            model, optimizer = session.prepare(model, model.optimizer(), bucket_bytes=SHAPE.bucket_bytes)
            self._train(session, model, optimizer, rank)
            self._barrier.wait()  # then everybody's last step is in
            if rank == 0:
                saved = session.global_weights()
                self._ended = self._look(model)
                self._check_saved(saved, self._ended)
            self._barrier.wait()

    def _train(self, session: ps_worker.Session, model: Model, optimizer: torch.optim.Optimizer, rank: int) -> None:
        life, witness, step = self._lives[rank], Witness(self._rules, rank), 0
        while session.clock < self._steps:
            if self._happened is not None and not self._happened.wait(PACE_SECONDS) and session.clock >= FIRST:
                self._await_kept(self._happened)
            step += 1
            before = session.clock
            number = before + 1 if self._rules.averaged else step
            place = incarnation_of(session)
            life.attempted.append(number)
            model.mark(witness, rank, number)
            optimizer.step()
            if incarnation_of(session) != place:
                self.joined_again[rank] = before, place_of(session).clock
                witness.lost_track()
                continue
            life.done[number], life.at[number] = session.clock, time.monotonic()
            view = model.view()
            self._found += witness.check(view, number)
            counts = {row: [int(count) for count in view[:, row, 0]] for row in range(self._workers)}
            life.seen.append((session.clock, counts, time.monotonic()))
            self.stepped(rank, session.clock)

    def _await_kept(self, happened: threading.Event) -> None:
        """Waits for a checkpoint; not for ever, for the clock that it is to be of may lie ahead of everybody."""
        deadline = time.monotonic() + AHEAD_SECONDS
        while not self._kept() and time.monotonic() < deadline:
            happened.wait(PACE_SECONDS)

    def _kept(self) -> bool:
        return self._store is not None and bool(self._store.names("default"))

    def _check_saved(self, saved: dict[str, torch.Tensor], ended: Ended) -> None:
        """What rank 0 saves is what the servers have when all have made their last step."""
        if not self._rules.averaged:
            before = Model(self._rules)
            before.load_state_dict(saved)
            if not torch.equal(before.view(), ended.weights["cells"]):
                ended.found.append(Violation("updates that are not saved", "rank 0's weights are not the servers'", {}))

    def _look(self, model: Model) -> Ended:
        now = requests.fetch(self._address)
        if self._rules.averaged:
            weights = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
            return Ended(weights, self._found + judge(model.view(), self._lives, self._rules), status=now)
        task = Task(self._mode, "default", self._address, 0 if self._late else WORKERS, 0.0, SHAPE)
        view, _ = read_weights(task)
        anything = frozenset(range(SHAPE.buckets))
        found = self._found + judge(view, self._lives, self._rules, anything)
        if self._happened is None:
            found += too_stale(self._lives, self._rules)
        begun = torch.tensor([len(life.attempted) for life in self._lives])
        absent = int((begun - view[:, : self._workers, 0]).amax(dim=0).sum())
        return Ended({"cells": view}, found, missing(view, self._lives, self._rules), absent, now)
