"""Steps that are cut in half: one shard has them, and the other one not; and models whose weights tell which steps
count.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn

import ps_worker
from ps_protocol.messages.data import PushKind
from ps_protocol.messages.rows import RowPushKind
from ps_server.shard.hosted_job import HostedJob
from ps_server.shard.pushes import Pushes
from tests.tools.cluster import Cluster, until

STEPS, CUT = 5, 3
ASSIGNS = {PushKind.ASSIGN, PushKind.ASSIGN_STATE, RowPushKind.ASSIGN}


def size(number: int) -> float:
    """The gradient of a worker's step, the same in every element. Sums of them tell which steps are in it."""
    return 2.0 ** (number % 8)


def total(*numbers: int) -> float:
    """The sum of the gradients of these steps."""
    return sum(map(size, numbers))


class Net(nn.Module):
    """Buckets on each shard, by default one, and rows on both; all elements have the same gradient, by default 1."""

    def __init__(self, with_table: bool, layers: int = 2) -> None:
        super().__init__()
        self.layers = nn.ParameterList(nn.Parameter(torch.zeros(16)) for _ in range(layers))
        self.table = ps_worker.Embedding(1, initial="constant", scale=0.0) if with_table else None
        self.looks_up = True  # a step has rows of the table

    def forward(self, gradient: float = 1.0) -> torch.Tensor:
        looks_up = self.table is not None and self.looks_up
        rows = self.table(torch.arange(8)).sum() if looks_up else torch.zeros(())
        return gradient * sum((layer.sum() for layer in self.layers), rows)

    def values(self) -> list[float]:
        """All of them."""
        rows = [] if self.table is None else self.table.rows(torch.arange(8))[:, 0].tolist()
        return [*(value for layer in self.layers for value in layer.tolist()), *rows]


class CutInHalf:
    """Has the lease of worker 0 end once one shard has had all of a step, and before the other has had any.

    times: so often, also when the step is pushed again
    first: the shard that has it
    of:    all of its buckets have it, or any: in local:H/F those of a fragment are not all
    """

    def __init__(
        self,
        cluster: Cluster,
        patch: pytest.MonkeyPatch,
        times: int = 1,
        first: int = 0,
        of: Callable[[Iterable[bool]], bool] = all,
    ) -> None:
        self.left, self._cluster, self._of = times, cluster, of
        self._first, self._second = cluster.shards[first], cluster.shards[1 - first]
        self._clock, self._losing = CUT, threading.Lock()
        for name in ("_stage_all", "_stage_rows"):
            patch.setattr(Pushes, name, self._held(getattr(Pushes, name)))

    def _held(self, stage: Callable[..., Any]) -> Callable[..., Any]:
        def staged(pushes: Pushes, job: HostedJob, call: Any, *rest: Any, **more: Any) -> Any:
            if pushes is self._second._pushes and self._is_of_step(call) and self.left:
                rules = self._first.jobs()[job.name].partition.rules.values()
                # The first of several calls moves `_clock` on. The worker's others wait for the next step then, so that
                # nothing of this one comes late; a call of another worker does not, for that step waits for it.
                until(
                    lambda: self._of(
                        rule.pushed.get(0, 0) >= (call.clock if call.worker.rank else self._clock) for rule in rules
                    ),
                    "the step on one shard",
                )
                with self._losing:  # nor does a repeat of a call come before the place is lost
                    if self.left and call.clock == self._clock:  # the first of several calls
                        self._cluster.lose_place(0, job.name)
                        self.left, self._clock = self.left - 1, self._clock + 1
            return stage(pushes, job, call, *rest, **more)

        return staged

    def _is_of_step(self, call: Any) -> bool:
        """Whether a call brings a step, and not what is assigned before it, or what a table begins with."""
        kinds = {getattr(call, "kind", None), *(bucket.kind for bucket in getattr(call, "buckets", ()))}
        return getattr(call, "clock", 0) == self._clock and kinds.isdisjoint(ASSIGNS)


def prepared(
    session: ps_worker.Session, mode: str, gradient: Callable[[int], float] = size, **more: Any
) -> tuple[Any, Callable[..., None]]:
    """Returns a model, and what makes a step of it, in local modes two: a round of local:2. Fragments have buckets on
    each of two shards, and are mixed in at once.

    gradient: of a step, by its number from 1
    more:     as for `prepare`
    before:   is called in the last step of it, before that ends
    """
    is_local = mode.startswith("local")
    in_fragments = "/" in mode
    net: Any = Net(with_table=not is_local, layers=4 if in_fragments else 2)
    outer = {"warm_up": 0, "lr": 1.0, "momentum": 0.0, **({"delay": 0} if in_fragments else {})}
    options: dict[str, Any] = {"outer": outer} if is_local else {}
    sgd = torch.optim.SGD(net.parameters(), lr=1.0)
    model, optimizer = session.prepare(net, sgd, bucket_bytes=64, **options, **more)
    numbers = itertools.count(1)

    def step(before: Callable[[], None] | None = None) -> None:
        for is_last in (False, True) if is_local else (True,):
            optimizer.zero_grad()
            model(gradient(next(numbers))).backward()
            if is_last and before is not None:
                before()
            optimizer.step()

    return net, step


def set_all(net: Any, value: float) -> None:
    """Sets all of them, with the next step."""
    with torch.no_grad():
        for layer in net.layers:
            layer.fill_(value)
    net.table.assign(torch.arange(8), torch.full((8, 1), value))
