"""A worker loses its place when one shard has had its step and the other has not: the step counts on both, once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import ps_worker
from ps_server.core.requests import PushKind
from ps_server.shard.job import HostedJob
from ps_server.shard.pushes import Pushes
from tests.tools.cases import cases
from tests.tools.cluster import Cluster, scrape, until

STEPS, CUT = 5, 3


class Net(nn.Module):
    """A bucket on each shard, and rows on both; all go down by 1 with each step."""

    def __init__(self, with_table: bool) -> None:
        super().__init__()
        self.layers = nn.ParameterList(nn.Parameter(torch.zeros(16)) for _ in range(2))
        self.table = ps_worker.Embedding(1, initial="constant", scale=0.0) if with_table else None

    def forward(self) -> torch.Tensor:
        rows = torch.zeros(()) if self.table is None else self.table(torch.arange(8)).sum()
        return sum((layer.sum() for layer in self.layers), rows)

    def values(self) -> list[float]:
        """All of them."""
        rows = [] if self.table is None else self.table.rows(torch.arange(8))[:, 0].tolist()
        return [*(value for layer in self.layers for value in layer.tolist()), *rows]


class CutInHalf:
    """Has the lease of worker 0 end once shard 0 has had all of a step, and before shard 1 has had any.

    times: so often, also when the step is pushed again
    """

    def __init__(self, cluster: Cluster, patch: pytest.MonkeyPatch, times: int = 1) -> None:
        self.left, self._cluster = times, cluster
        self._clock = CUT
        for name in ("_stage_all", "_stage_rows"):
            patch.setattr(Pushes, name, self._held(getattr(Pushes, name)))

    def _held(self, stage: Callable[..., Any]) -> Callable[..., Any]:
        def staged(pushes: Pushes, job: HostedJob, call: Any, *rest: Any) -> Any:
            if pushes is self._cluster.shards[1]._pushes and self._is_of_step(call) and self.left:
                rules = self._cluster.shards[0].jobs()[job.name].state.rules.values()
                until(lambda: all(rule.pushed.get(0, 0) >= self._clock for rule in rules), "the step on shard 0")
                if self.left and call.clock == self._clock:  # the first of several calls
                    self.left, self._clock = self.left - 1, self._clock + 1
                    self._cluster.end_lease(0, job.name)
            return stage(pushes, job, call, *rest)

        return staged

    def _is_of_step(self, call: Any) -> bool:
        """Whether a call brings a step, and not what is assigned before it, or what a table begins with."""
        kinds = {bucket.kind for bucket in getattr(call, "buckets", ())}
        return getattr(call, "clock", 0) == self._clock and kinds.isdisjoint({PushKind.ASSIGN, PushKind.ASSIGN_STATE})


@pytest.mark.parametrize(
    ("mode", "transport"),
    cases(
        [("sync", "shm"), ("async", "tcp"), ("local:2", "grpc")],
        [("async", "shm"), ("sync", "grpc"), ("ssp:1", "shm"), ("ssp:0", "tcp"), ("local:2", "shm")],
    ),
)
@pytest.mark.parametrize("times", [1, 2])
def test_a_step_that_is_cut_in_half_counts_as_a_whole_once(
    make_cluster: Callable[..., Cluster], monkeypatch: pytest.MonkeyPatch, mode: str, transport: str, times: int
) -> None:
    cluster, is_local = make_cluster(shards=2), mode.startswith("local")
    with cluster.connect(mode, transport=transport) as session:
        net: Any = Net(with_table=not is_local)
        options: dict[str, Any] = {"outer": {"warm_up": 0, "lr": 1.0, "momentum": 0.0}} if is_local else {}
        sgd = torch.optim.SGD(net.parameters(), lr=1.0)
        model, optimizer = session.prepare(net, sgd, bucket_bytes=64, **options)
        cut = CutInHalf(cluster, monkeypatch, times)
        steps = STEPS * (2 if is_local else 1)
        for _ in range(steps):
            optimizer.zero_grad()
            model().backward()
            optimizer.step()
        assert cut.left == 0
        assert net.values() == [-float(steps)] * len(net.values())
        figures = scrape(session.metrics_address)
        assert (figures["ps_worker_rejoins_total"], figures["ps_worker_lost_steps_total"]) == (times, 0)


@pytest.mark.parametrize("wire", ["int8", "int4"])
def test_what_a_narrow_wire_has_left_out_of_a_step_that_was_cut_in_half_is_sent_once(
    make_cluster: Callable[..., Cluster], monkeypatch: pytest.MonkeyPatch, wire: str
) -> None:
    """What was sent and what is still to be sent are the gradients together, on both shards alike."""
    cluster = make_cluster(shards=2)
    gradient = torch.linspace(0.1, 1.7, 16)
    with cluster.connect("async", transport="tcp") as session:
        net: Any = Net(with_table=False)
        sgd = torch.optim.SGD(net.parameters(), lr=1.0)
        model, optimizer = session.prepare(net, sgd, bucket_bytes=64, gradient_wire=wire)
        cut = CutInHalf(cluster, monkeypatch)
        for _ in range(STEPS):
            optimizer.zero_grad()
            sum((layer * gradient).sum() for layer in model.layers).backward()
            optimizer.step()
        assert cut.left == 0
        residuals = session._strategy._training._model.residuals.copy()  # type: ignore[attr-defined]
        for layer, left in zip(net.layers, residuals.values(), strict=True):
            torch.testing.assert_close(-layer.detach() + left, STEPS * gradient)


def test_weights_that_a_script_has_set_count_with_a_step_that_was_cut_in_half(
    make_cluster: Callable[..., Cluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = make_cluster(shards=2)
    with cluster.connect("async") as session:
        net: Any = Net(with_table=False)
        model, optimizer = session.prepare(net, torch.optim.SGD(net.parameters(), lr=1.0), bucket_bytes=64)
        cut = CutInHalf(cluster, monkeypatch)
        for number in range(1, STEPS + 1):
            optimizer.zero_grad()
            model().backward()
            if number == CUT:
                with torch.no_grad():
                    for layer in net.layers:
                        layer.fill_(100.0)
            optimizer.step()
        assert cut.left == 0
        assert net.values() == [100.0 - (STEPS - CUT + 1)] * 32
