"""The calls of a step of rows over the network: how many they are, and what becomes of them where one fails."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import ps_worker
from ps_frames.frames import Kind
from ps_frames.server import FrameCall
from ps_protocol.framing import Buffer, Parts
from ps_protocol.messages import data
from ps_protocol.row_ids import COUNT_BYTES, ID_BYTES, shards_of
from ps_protocol.v1 import data_pb2
from ps_server.shard.pulls import Pulls
from ps_server.shard.pushes import Pushes
from ps_server.shard.shard import Shard
from ps_worker.cluster import row_transport
from ps_worker.cluster.calls import ShardCalls
from tests.tools.cluster import Cluster, in_parallel, until
from tests.tools.rpc_faults import KINDS, RpcFaults, break_calls

RATE, DIM = 0.5, 4


class Counting(nn.Module):
    """Rows whose gradients are ones: with SGD a row counts how often it was looked up. layer: a bucket beside them"""

    def __init__(self, layer: bool) -> None:
        super().__init__()
        self.rows = ps_worker.Embedding(DIM, initial="constant", scale=0.0, seed=0)
        self.layer = nn.Linear(1, 1) if layer else None

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.rows(ids)
        return found if self.layer is None else found + 0 * self.layer(torch.ones(1))


class Worker:
    """A worker that trains Counting."""

    def __init__(self, session: ps_worker.Session, layer: bool = False, **options: Any) -> None:
        self.own = Counting(layer)
        optimizer = torch.optim.SGD(self.own.parameters(), lr=RATE)
        self.model, self.optimizer = session.prepare(self.own, optimizer, **options)

    def step(self, ids: torch.Tensor, following: torch.Tensor | None = None) -> set[float]:
        """Makes a step; returns how often its ids had been looked up before, as it found them."""
        self.own.rows.announce(following)
        self.optimizer.zero_grad()
        rows = self.model(ids)
        rows.sum().backward()
        self.optimizer.step()
        return {count / -RATE for count in rows.flatten().tolist()}

    def counted(self, ids: torch.Tensor) -> set[float]:
        """Returns how often ids were looked up."""
        return {count / -RATE for count in self.own.rows.rows(ids).flatten().tolist()}


class Calls:
    """The requests about rows that shards receive over data connections."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._kinds: list[Kind] = []
        receive = FrameCall.receive

        def noted(call: FrameCall) -> Parts | None:
            self._kinds.append(call._header.kind)
            return receive(call)

        monkeypatch.setattr(FrameCall, "receive", noted)

    def of(self, step: Callable[[], object]) -> dict[Kind, int]:
        self._kinds.clear()
        step()
        return dict(Counter(kind for kind in self._kinds if kind in OF_ROWS))


OF_ROWS = (Kind.PUSH_ROWS, Kind.PULL_ROWS, Kind.EXCHANGE_ROWS)
ONE_CALL, TWO_CALLS = {Kind.EXCHANGE_ROWS: 2}, {Kind.PUSH_ROWS: 2, Kind.PULL_ROWS: 2}


@pytest.mark.parametrize(("wire", "layer"), [("float32", True), ("float32", False), ("bfloat16", False)])
def test_over_tcp_a_step_and_the_rows_of_the_next_one_are_one_call_to_each_shard(
    shared: Cluster, job: str, wire: str, layer: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids, calls = torch.arange(3000), Calls(monkeypatch)
    with shared.connect("sync", job=job, transport="tcp") as session:
        worker = Worker(session, layer, gradient_wire=wire, weight_wire=wire)
        worker.step(ids, following=ids)
        assert calls.of(lambda: worker.step(ids, following=ids)) == ONE_CALL
        with monkeypatch.context() as patch:
            most = int(np.bincount(shards_of(ids.numpy(), 2)).max())
            enough = most * (ID_BYTES + COUNT_BYTES + DIM * (4 if wire == "float32" else 2))
            patch.setattr(row_transport, "MESSAGE_BYTES", enough)  # for the rows, but not with the ids
            assert calls.of(lambda: worker.step(ids, following=ids)) == TWO_CALLS
        if not layer:  # the pull of no rows ends the step
            assert calls.of(lambda: worker.step(ids)) == ONE_CALL
        assert worker.counted(ids) == {4.0 - layer}


@pytest.mark.parametrize("was_later", [False, True], ids=["always", "when it is called"])
def test_a_shard_of_an_earlier_version_gets_two_calls(
    shared: Cluster, job: str, was_later: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """was_later: another one, to which a connection was open just before"""
    opened, ids, calls = data.write_opened, torch.arange(3000), Calls(monkeypatch)

    def earlier(*arguments: Any) -> bytes:
        answer = data_pb2.OpenDataConnectionResponse.FromString(opened(*arguments))
        answer.ClearField("row_payloads")
        return answer.SerializeToString()

    monkeypatch.setattr(data, "write_opened", earlier)
    if was_later:
        monkeypatch.setattr(ShardCalls, "takes_row_payloads", True)
    with shared.connect("sync", job=job, transport="tcp") as session:
        worker = Worker(session)
        worker.step(ids, following=ids)
        assert calls.of(lambda: worker.step(ids, following=ids)) == TWO_CALLS
        assert worker.counted(ids) == {2.0}


@pytest.mark.parametrize("answered", [None, 0, 20_000])
def test_an_exchange_whose_connection_breaks_is_repeated_as_a_push_and_a_pull_and_counts_once(
    shared: Cluster, job: str, answered: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """answered: the bytes of the answer that come; None: the request is lost"""
    ids, exchange = torch.arange(20_000), Shard.exchange
    broken: list[Shard] = []

    def breaks(shard: Shard, push: Any, pull: Any, outbox: Any, *more: Any) -> None:
        if shard in broken:
            exchange(shard, push, pull, outbox, *more)
            return
        broken.append(shard)
        frames = outbox._call._connection._frames
        if answered is None:
            frames.abort()
            return
        send_now = frames.send_now

        def send_some(parts: Sequence[Buffer]) -> list[memoryview]:
            send_now([b"".join(parts)[:answered]])
            frames.abort()
            return []

        monkeypatch.setattr(frames, "send_now", send_some)
        exchange(shard, push, pull, outbox, *more)

    with shared.connect("sync", job=job, transport="tcp") as session:
        worker = Worker(session)
        worker.step(ids, following=ids)
        monkeypatch.setattr(Shard, "exchange", breaks)
        assert worker.step(ids, following=ids) == {1}
        assert len(broken) == 2
        assert worker.step(ids, following=ids) == {2}
        assert worker.counted(ids) == {3.0}


def test_with_calls_lost_unheard_and_repeated_each_step_of_rows_counts_once(
    make_cluster: Callable[..., Cluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    steps, ids, faults = 12, torch.arange(3000), RpcFaults(5, only=("ExchangeRows", "PushRows", "PullRows"))
    break_calls(monkeypatch, faults)
    cluster = make_cluster(shards=2)

    def work(rank: int) -> list[set[float]]:
        with cluster.connect("sync", rank, 2, transport="tcp") as session:
            worker = Worker(session)
            seen = [worker.step(ids, following=ids) for _ in range(steps)]
            return [*seen, worker.counted(ids)]

    for found in in_parallel(2, work):
        assert found == [{float(clock)} for clock in range(steps + 1)]
    faults.finish()
    assert all(faults.counts["ExchangeRows", kind] for kind in KINDS), faults.counts


def test_what_is_pushed_again_after_step_has_returned_is_what_was_pushed(
    shared: Cluster, job: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The script may have changed its gradients since then, if the push was staged and the rows were yet to come."""
    ids, exchanged, again = torch.arange(3000), list[bytes](), list[bytes]()
    may_send, send = threading.Event(), Pulls._send_rows

    def note(method: str, to: list[bytes]) -> None:
        original = getattr(Pushes, method)

        def noted(pushes: Pushes, job: Any, push: Any, *more: Any) -> Any:
            to.append(bytes(push.payload))
            return original(pushes, job, push, *more)

        monkeypatch.setattr(Pushes, method, noted)

    def send_later(pulls: Pulls, job: Any, table: Any, pull: Any, waited: float) -> None:
        def soon() -> None:
            may_send.wait(30.0)
            send(pulls, job, table, pull, waited)

        threading.Thread(target=soon).start()  # not here: this thread makes the updates of buckets

    with shared.connect("sync", job=job, transport="tcp") as session:
        worker = Worker(session, layer=True)
        worker.step(ids, following=ids)
        worker.own.rows.announce(ids)
        worker.optimizer.zero_grad()
        worker.model(ids).sum().backward()
        parameters = [each for group in worker.optimizer.param_groups for each in group["params"]]
        [gradient] = [each.grad for each in parameters if each.shape == (3000, DIM)]
        note("exchange_rows", exchanged)
        note("push_rows", again)
        monkeypatch.setattr(Pulls, "_send_rows", send_later)
        worker.optimizer.step()
        gradient.zero_()
        for calls in session._strategy._training.participation.connection._calls.values():  # type: ignore[attr-defined]
            calls.data().close()
        until(lambda: len(again) == len(exchanged) == 2)
        may_send.set()
        assert worker.counted(ids) == {2.0}
    assert sorted(exchanged) == sorted(again)
