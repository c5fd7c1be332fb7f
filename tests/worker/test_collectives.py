"""session.mean, gather, broadcast, barrier over real clusters: all have the same, whoever dies, joins or comes back."""

from __future__ import annotations

import contextlib
import re
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import grpc
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import ps_worker
from ps_protocol.errors import (
    Fenced,
    Forbidden,
    InvalidRequest,
    LimitExceeded,
    NotFound,
    PSError,
    UnknownWorker,
    Unsupported,
)
from ps_protocol.v1 import rounds_pb2
from ps_runtime.grpc_status import error_from
from ps_server.coordinator.timing import Timing
from ps_server.core.limits import Limits
from ps_server.ops import requests
from ps_server.storage.checkpoints import CheckpointStore
from ps_worker import Session
from ps_worker.cluster import own_membership
from ps_worker.cluster import value_rounds as rounds
from ps_worker.strategies.collectives import Collectives
from tests.chaos.cluster import free_ports
from tests.tools.cable import LEASE, Cable, live, lose, session_at
from tests.tools.cases import cases
from tests.tools.cluster import TEST_SECONDS, Cluster, in_parallel, until
from tests.tools.counting import PASSES, train
from tests.tools.forkserver import ROOT, Nursery
from tests.tools.raw_worker import RawWorker, vector_job
from tests.tools.rpc_faults import KINDS, RpcFaults, break_calls

MODES = ["sync", "ssp:2", "async"]
MakeCluster = Callable[..., Cluster]
T = TypeVar("T")


class Worker:
    """A session with a vector as its model."""

    def __init__(self, session: Session) -> None:
        self.session = session
        model = nn.Linear(4, 1, bias=False)
        self.model, self.optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            self.model(torch.ones(1, 4)).sum().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()


def workers(
    count: int, cluster: Cluster, mode: str, work: Callable[[int, Worker], T], job: str = "default", **options: Any
) -> list[T]:
    """What the workers of a job return, by rank, each in a thread of its own."""

    def run(rank: int) -> T:
        with cluster.connect(mode, rank, count, job=job, **options) as session:
            return work(rank, Worker(session))

    return in_parallel(count, run)


def beside_a_raw_worker(
    cluster: Cluster,
    mode: str,
    work: Callable[[Session], object],
    peer_work: Callable[[RawWorker], object],
    job: str = "default",
    **options: Any,
) -> None:
    """Worker 0 of a job has a session; worker 1 sends what the test says."""

    def run(which: int) -> None:
        if which == 0:
            with cluster.connect(mode, 0, 2, job=job, **options) as session:
                Worker(session)
                work(session)
        else:
            spec = until(lambda: cluster.coordinator.jobs().get(job)).spec
            with RawWorker(cluster.address, spec, 1) as peer:
                peer_work(peer)

    in_parallel(2, run)


def elastic(cluster: Cluster, mode: str, job: str) -> Session:
    return ps_worker.connect(cluster.address, mode, job=job, elastic=True)


def in_round(cluster: Cluster, job: str = "default", count: int = 1) -> bool:
    """Whether so many workers wait in a round."""
    known = cluster.coordinator.jobs().get(job)
    return known is not None and known.rounds.waiting() >= count


# -- what comes of it ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", cases(["ssp:2"], ["sync", "async"]))
def test_all_workers_have_the_same_and_in_the_order_of_ranks(shared: Cluster, job: str, mode: str) -> None:
    def work(rank: int, worker: Worker) -> dict[str, Any]:
        session = worker.session
        assert session.is_main == (rank == 0)
        found = {
            "number": session.mean(float(rank)),
            "weighted": session.mean(rank, weight=2 * rank),
            "tensor": session.mean(torch.tensor([rank / 3, 1.0])),
            "half": session.mean(torch.tensor(rank, dtype=torch.bfloat16)),
            "whole": session.mean(torch.tensor([[rank, 1]])),
            "dict": session.mean({"loss": 0.1 * rank, "hits": torch.tensor([rank, 2])}),
            "gather": session.gather({"rank": rank, "x": torch.full((rank,), rank), "more": (None, True, "é", 0.5)}),
            "first": session.broadcast({"name": f"run of {rank}", "x": torch.tensor([rank])}),
            "last": session.broadcast(object() if rank < 2 else [1, "two"], source=2),
        }
        session.barrier()
        return found

    results = workers(3, shared, mode, work, job)
    expected = {
        "number": 1.0,
        "weighted": (1 * 2 + 2 * 4) / 6,
        "tensor": torch.tensor([1 / 3, 1.0]),
        "half": torch.tensor(1.0, dtype=torch.bfloat16),
        "whole": torch.tensor([[1.0, 1.0]]),
        "dict": {"loss": (0.0 + 0.1 + 0.2) / 3, "hits": torch.tensor([1.0, 2.0])},
        "gather": [{"rank": r, "x": torch.full((r,), r), "more": (None, True, "é", 0.5)} for r in range(3)],
        "first": {"name": "run of 0", "x": torch.tensor([0])},
        "last": [1, "two"],
    }
    assert [repr(found) for found in results] == [repr(expected)] * 3


def test_in_single_it_is_this_worker_alone() -> None:
    with ps_worker.connect(mode="single") as session:
        assert session.is_main
        assert session.mean(3) == 3.0
        assert session.mean({"a": torch.tensor([1.0, 2.0])}, weight=5)["a"].tolist() == [1.0, 2.0]
        assert session.gather([1, None]) == [[1, None]]
        assert session.broadcast("x", source=0) == "x"
        session.barrier()
        assert session.mean(3, weight=np.int64(5)) == session.mean(np.float32(3), weight=np.float32(0.5)) == 3.0
        assert session.broadcast("x", source=np.int64(0)) == "x"


def test_a_weight_of_zero_leaves_a_worker_out_whatever_it_gives(shared: Cluster, job: str) -> None:
    def work(rank: int, worker: Worker) -> tuple[float, list[float]]:
        mean, x = worker.session.mean, float("nan") if rank else 7.0  # an empty shard has no mean
        found = mean(x, weight=1 - rank), mean(torch.tensor([x]), weight=1 - rank).tolist()
        with pytest.raises(InvalidRequest, match="the weights of all workers are 0"):
            mean(x, weight=0)
        return found

    assert workers(2, shared, "async", work, job) == [(7.0, [7.0])] * 2


def test_values_that_fill_several_messages_arrive(shared: Cluster, job: str) -> None:
    def work(rank: int, worker: Worker) -> list[float]:
        return [float(x.sum()) for x in worker.session.gather(torch.full((1_300_000,), float(rank)))]

    assert workers(3, shared, "async", work, job) == [[0.0, 1_300_000.0, 2_600_000.0]] * 3


# -- what is refused -------------------------------------------------------------------------------------------------


def test_values_and_calls_that_differ_are_one_error_for_all_and_the_next_call_is_right(
    shared: Cluster, job: str
) -> None:
    def work(rank: int, worker: Worker) -> list[str]:
        session, said = worker.session, []
        for call in (
            lambda: session.mean(torch.zeros(3 + rank)),
            lambda: session.mean(1.0 if rank else {"loss": 1.0}),
            lambda: session.mean(1.0) if rank else session.gather(1.0),
            lambda: session.broadcast(1.0, source=rank),
        ):
            with pytest.raises(InvalidRequest) as caught:
                call()
            said.append(str(caught.value))
        assert session.mean(rank) == 0.5
        return said

    first, second = workers(2, shared, "sync", work, job)
    assert first == second
    assert "worker 0: float32 of shape (3,); worker 1: float32 of shape (4,)" in first[0]
    assert "worker 0: {'loss': a number}; worker 1: a number" in first[1]
    assert "worker 0: session.gather; worker 1: session.mean" in first[2]
    assert "worker 0: session.broadcast from worker 0; worker 1: session.broadcast from worker 1" in first[3]


def test_bad_arguments_are_refused_before_anything_is_sent(shared: Cluster, job: str) -> None:
    with shared.connect("sync", job=job) as session:
        for call in (session.mean, session.gather, session.broadcast, lambda _: session.barrier()):
            with pytest.raises(InvalidRequest, match="call prepare first"):
                call(1.0)
        assert session.is_main
        Worker(session)
        itself: list[Any] = []
        itself.append(itself)
        for x in (True, None, "one", [1.0], torch.tensor([True]), torch.tensor([1j]), {"loss": {"inner": 1.0}}):
            with pytest.raises(InvalidRequest, match="mean takes numbers and tensors of numbers"):
                session.mean(x)
        for weight in (-1, float("nan"), float("inf"), "1"):
            with pytest.raises(InvalidRequest, match="a weight is a finite number from 0"):
                session.mean(1.0, weight=weight)  # type: ignore[arg-type]
        for x in (object(), torch.zeros(2).to_sparse(), torch.zeros(2, device="meta"), itself, {1: lambda: None}):
            with pytest.raises(Unsupported, match="gather: the value"):
                session.gather(x)
        with pytest.raises(InvalidRequest, match="a source is a rank"):
            session.broadcast(1, source=-1)
        assert shared.coordinator.jobs()[job].rounds.done()[0] == 0, "no round was begun"
    with elastic(shared, "async", job) as session, pytest.raises(InvalidRequest, match="call prepare first"):
        assert session.is_main


def test_too_many_bytes_are_one_error_for_all_and_the_limit_is_named(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(shards=1, limits=Limits(round_bytes=4000))

    def work(rank: int, worker: Worker) -> str:
        said = r"gather: the values of workers .* max-round-bytes is 4000"
        with pytest.raises(LimitExceeded, match=said) as caught:
            worker.session.gather(torch.zeros(800))
        assert worker.session.mean(rank) == 0.5
        with pytest.raises(LimitExceeded, match="a value may have"):
            worker.session.gather(torch.zeros(2**22 + 1))
        return str(caught.value)

    first, second = workers(2, cluster, "async", work)
    assert first == second


def raw_exchange(worker: RawWorker, **fields: Any) -> list[Any]:
    asked = {"round": 1, **{name: fields.pop(name) for name in ("round", "clock", "value") if name in fields}}
    request = rounds_pb2.GatherValuesRequest(worker=worker.identity(**fields), **asked)
    try:
        return list(worker.rounds.GatherValues(request, timeout=20.0))
    except grpc.RpcError as error:
        raise error_from(error, "coordinator") from None


def test_only_a_live_worker_may_give_a_value_and_only_for_the_open_round(shared: Cluster, job: str) -> None:
    with RawWorker(shared.address, vector_job(job, "async", 16, 1), 0) as worker:
        refused: list[tuple[type[PSError], dict[str, Any]]] = [
            (Forbidden, {"lease_key": b"x" * 16}),
            (UnknownWorker, {"rank": 1}),
            (Fenced, {"incarnation": worker.incarnation - 1}),
            (UnknownWorker, {"incarnation": worker.incarnation + 1}),
            (NotFound, {"job": "another"}),
            (InvalidRequest, {"round": 2}),
            (InvalidRequest, {"round": 2**64 - 1}),
        ]
        for error, fields in refused:
            with pytest.raises(error):
                raw_exchange(worker, **fields)
        assert shared.coordinator.jobs()[job].rounds.done() == (0, ())
        [answer] = raw_exchange(worker, round=0, clock=9)
        assert (answer.round, answer.complete) == (1, False)
        [answer] = raw_exchange(worker, value=b"mine")
        assert (answer.round, answer.complete, answer.values[0].value) == (1, True, b"mine")
        worker.leave()


@pytest.mark.parametrize("value", [b"", b"nonsense", bytes(8), b"\xff" * 40, (2).to_bytes(8, "little") + b"{}"])
def test_what_is_no_value_is_an_error_that_names_its_worker(shared: Cluster, job: str, value: bytes) -> None:
    def work(session: Session) -> None:
        with pytest.raises(InvalidRequest, match="what worker 1 sent cannot be read"):
            session.gather(1)

    def give(peer: RawWorker) -> None:
        assert raw_exchange(peer, value=value)[-1].complete
        peer.leave()

    beside_a_raw_worker(shared, "async", work, give, job, transport="grpc")


@pytest.mark.parametrize("call", ["mean", "gather"])
def test_any_bytes_of_a_worker_are_read_or_refused(call: str) -> None:
    class Peers:
        """Worker 1 gives what `other` makes of the value of worker 0."""

        rank = 0

        def __init__(self, other: Callable[[bytes], bytes]) -> None:
            self.other = other

        def exchange(self, value: bytes, what: str) -> dict[int, bytes]:
            return {0: value, 1: self.other(value)}

    def ask(other: Callable[[bytes], bytes]) -> None:
        x = {"loss": torch.ones(2), "n": 1}
        getattr(Collectives(Peers(other), torch.device("cpu")), call)(x)

    ask(lambda value: value)

    @settings(max_examples=300)
    @given(st.one_of(st.binary(max_size=200), st.tuples(st.floats(0, 1), st.binary(max_size=4))))
    def check(raw: bytes | tuple[float, bytes]) -> None:
        def other(value: bytes) -> bytes:
            if isinstance(raw, bytes):
                return raw
            place, changed = int(raw[0] * len(value)), raw[1]
            return value[:place] + changed + value[place + len(changed) :]

        with contextlib.suppress(InvalidRequest):
            ask(other)

    check()


# -- workers that come and go ----------------------------------------------------------------------------------------


def test_a_worker_that_dies_is_not_waited_for_and_who_waits_says_for_whom(
    make_cluster: MakeCluster, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rounds, "NOTICE_SECONDS", 0.0)
    cluster = make_cluster(lease=LEASE)

    def work(session: Session) -> None:
        assert session.gather("alone") == ["alone"]
        assert session.mean(4) == 4.0

    def die(peer: RawWorker) -> None:
        until(lambda: in_round(cluster))
        until(lambda: cluster.end_lease(1) or 1 not in live(cluster), "the end of its lease")

    beside_a_raw_worker(cluster, "sync", work, die)
    assert "waiting in session.gather for worker 1" in caplog.text


def test_a_worker_that_leaves_is_not_waited_for(shared: Cluster, job: str) -> None:
    def work(rank: int, worker: Worker) -> Any:
        if rank == 0:
            return worker.session.broadcast("of 0", source=1)
        return until(lambda: in_round(shared, job))

    assert workers(2, shared, "async", work, job)[0] == "of 0", "the source is gone: the lowest rank that takes part"


def test_workers_that_wait_hold_no_thread_of_the_coordinator(shared: Cluster, job: str) -> None:
    count = 8

    def busy_threads() -> list[str]:
        frames = sys._current_frames()
        return [
            thread.name
            for thread in threading.enumerate()
            if thread.name.startswith("watch") and thread.ident in frames
            if frames[thread.ident].f_code.co_name != "_worker"
        ]

    with contextlib.ExitStack() as stack:
        spec = vector_job(job, "async", 16, 0)
        last, *waiting = (stack.enter_context(RawWorker(shared.address, spec, rank)) for rank in range(count))
        calls = []
        for worker in waiting:
            request = rounds_pb2.GatherValuesRequest(worker=worker.identity(), round=1)
            calls.append(worker.rounds.GatherValues(request, timeout=20.0))
        until(lambda: in_round(shared, job, count - 1))
        until(lambda: not busy_threads(), "the threads are given back")
        raw_exchange(last, value=b"last")
        assert all(list(call)[-1].complete for call in calls)
        for worker in [*waiting, last]:
            worker.leave()


@pytest.mark.parametrize("mode", MODES)
def test_a_worker_that_joins_late_learns_what_the_others_had_and_decides_as_they_do(
    shared: Cluster, job: str, mode: str
) -> None:
    """Three passes: each the same for a worker that was there and for one that came after two of them."""
    joined, over = threading.Event(), threading.Event()

    def work(which: int) -> tuple[str, list[float]]:
        if which == 1:
            assert over.wait(TEST_SECONDS)
        with elastic(shared, mode, job) as session:
            worker = Worker(session)
            name = session.broadcast(f"run of {which}")
            losses = []
            for epoch in range(3):
                if which == 0:
                    worker.step()
                    if epoch == 2:
                        over.set()
                        assert joined.wait(TEST_SECONDS)
                elif epoch == 2:
                    joined.set()
                losses.append(session.mean(float(10 * which + epoch)))
            return name, losses

    assert in_parallel(2, work) == [("run of 0", [0.0, 1.0, (2 + 12) / 2])] * 2


def test_a_process_that_has_stepped_before_its_first_call_meets_the_others_where_they_are(
    shared: Cluster, job: str
) -> None:
    """As a script that calls by its clock."""
    with elastic(shared, "async", job) as first:
        worker = Worker(first)
        for number in range(3):
            worker.step(5)
            assert first.mean(number) == number
        with elastic(shared, "async", job) as second:
            late = Worker(second)
            assert second.clock == 15
            late.step(5)
            worker.step(5)
            assert not second.is_main
            for _ in range(2):
                assert in_parallel(2, lambda which: (second if which else first).mean(which)) == [0.5, 0.5]
            first.close()
            until(lambda: second.is_main, "the next worker takes over")
            assert second.mean(9) == 9.0


@pytest.fixture
def cable(make_cluster: MakeCluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Cluster, Cable]]:
    """A cluster, and a cable to it."""
    cluster = make_cluster(lease=LEASE, timing=Timing(round_look=0.02))
    monkeypatch.setattr(own_membership, "NOTICE_SECONDS", 0.1)  # a watch that broke is begun again at once
    with contextlib.closing(Cable(cluster.address, monkeypatch)) as made:
        yield cluster, made


@pytest.mark.parametrize("mode", cases(["sync"], ["ssp:2", "async"]))
def test_a_worker_that_was_cut_off_gets_what_it_missed_and_meets_the_others_again(
    cable: tuple[Cluster, Cable], mode: str
) -> None:
    """In sync its script is behind by then: the other makes steps without a gradient, or both would wait for ever."""
    cluster, line = cable
    away, back = threading.Event(), threading.Event()

    def work(rank: int) -> list[float]:
        with session_at(line.address if rank == 0 else cluster.address, mode, rank) as session:
            worker, means = Worker(session), []
            for epoch in range(4):
                for number in range(4):
                    if epoch == 1 and number == 2:
                        if rank == 0:
                            lose(cluster, line)
                            away.set()
                            assert back.wait(TEST_SECONDS)
                            line.heal()
                        else:
                            assert away.wait(TEST_SECONDS)
                    worker.step()
                means.append(session.mean(100 * epoch + rank))
                if rank == 1 and epoch == 2:
                    back.set()
                    until(lambda: 0 in live(cluster), "the other is back")
            return means

    assert in_parallel(2, work) == [[0.5, 101.0, 201.0, 300.5]] * 2


def test_a_worker_that_loses_its_place_while_it_waits_asks_again(cable: tuple[Cluster, Cable]) -> None:
    cluster, line = cable

    def work(rank: int) -> list[int]:
        with session_at(line.address if rank == 0 else cluster.address, "sync", rank) as session:
            Worker(session)
            if rank == 1:
                until(lambda: in_round(cluster))
                lose(cluster, line)
                line.heal()
                until(lambda: 0 in live(cluster) and in_round(cluster))
            return session.gather(rank)

    assert in_parallel(2, work) == [[0, 1]] * 2


@pytest.mark.parametrize("mode", ["sync", "ssp:0"])
def test_a_worker_in_a_round_does_not_keep_one_in_a_step_waiting_for_ever(make_cluster: MakeCluster, mode: str) -> None:
    """One makes more steps than the other between two rounds."""
    cluster = make_cluster(timing=Timing(round_look=0.02))

    def work(rank: int, worker: Worker) -> tuple[list[float], int]:
        means = []
        for _ in range(2):
            worker.step(2 + 2 * rank)
            means.append(worker.session.mean(rank))
        return means, worker.session.clock

    first, second = workers(2, cluster, mode, work)
    assert first[0] == second[0] == [0.5, 0.5]
    assert second[1] == 8
    assert first[1] >= 7, "with the steps without a gradient"


@pytest.mark.parametrize("mode", cases(["sync", "async"], ["ssp:2"]))
def test_validation_after_a_leased_pass_meets(shared: Cluster, job: str, mode: str) -> None:
    """The pass ends for one worker while the other is still in a step."""

    def work(which: int) -> list[int]:
        sums: list[int] = []
        pause = threading.Event()
        with elastic(shared, mode, job) as session:
            train(
                session,
                mode,
                each=lambda taken: pause.wait(0.005 * which),
                ended=lambda count: sums.append(sum(session.gather(count))),
            )
        return sums

    first, second = in_parallel(2, work)
    assert first[-1] == second[-1]
    assert len(first) == len(second) == PASSES


# -- servers that come back ------------------------------------------------------------------------------------------


def step_until_kept(worker: Worker, store: CheckpointStore) -> None:
    """All workers step until there is a checkpoint, and know it in the same step."""
    while not worker.session.broadcast(bool(store.names("default"))):
        worker.step()


@pytest.fixture
def keeping(make_cluster: MakeCluster, tmp_path: Path) -> tuple[Cluster, CheckpointStore]:
    """A cluster with a checkpoint every two steps, and where they are."""
    cluster = make_cluster(checkpoint_dir=tmp_path, checkpoint_every="2steps", lease=LEASE)
    return cluster, CheckpointStore(tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("mode", cases(MODES[:1], MODES[1:]))
def test_a_coordinator_that_is_started_again_knows_the_rounds(
    keeping: tuple[Cluster, CheckpointStore], mode: str
) -> None:
    """Its shard is gone as well: in sync the whole job goes back to the checkpoint, with both workers in a round."""
    cluster, store = keeping

    def work(rank: int, worker: Worker) -> list[Any]:
        session = worker.session
        found: list[Any] = [session.gather(rank)]
        step_until_kept(worker, store)
        if rank == 1:
            until(lambda: in_round(cluster))
            cluster.start_again(0)
        found.append(session.gather(10 + rank))
        worker.step()
        found.append(session.mean(20 + rank))
        return found

    assert workers(2, cluster, mode, work, connect_timeout=60.0) == [[[0, 1], [10, 11], 20.5]] * 2


def test_a_round_in_which_a_job_was_set_back_ends_where_others_repeat_steps_that_are_over_here(
    make_cluster: MakeCluster, tmp_path: Path
) -> None:
    """Steps without a gradient would make another model of it than the one that was promised."""
    cluster = make_cluster(checkpoint_dir=tmp_path, checkpoint_every="1000steps", lease=LEASE)
    store = CheckpointStore(tmp_path)

    def work(rank: int, worker: Worker) -> None:
        step_until_kept(worker, store)
        worker.step()  # which no checkpoint has
        if rank == 0:
            with pytest.raises(InvalidRequest, match="rolled back to a checkpoint while this worker was in"):
                worker.session.mean(1)
            with pytest.raises(InvalidRequest, match="no loop of this script has repeated"):
                worker.session.close()
        else:
            until(lambda: in_round(cluster))
            cluster.start_again(1)
            until(lambda: cluster.coordinator.job("default").workers.restore_count == 1)
            worker.step(2)
            assert worker.session.mean(2) == 2.0, "the other is not there any more"

    workers(2, cluster, "sync", work)


@pytest.mark.long
def test_a_new_process_after_a_coordinators_death_learns_what_the_others_had(
    keeping: tuple[Cluster, CheckpointStore],
) -> None:
    cluster, store = keeping
    with elastic(cluster, "async", "default") as first:
        worker = Worker(first)
        assert first.gather("one") == ["one"]
        until(lambda: worker.step() or store.names("default"))
        cluster.start_again(0)
        until(lambda: cluster.coordinator.jobs().get("default"), "the job is taken up again")
        with elastic(cluster, "async", "default") as second:
            Worker(second)
            assert second.gather("another") == ["one"]
            assert in_parallel(2, lambda which: (second if which else first).gather(which)) == [[0, 1]] * 2


def test_with_calls_lost_unheard_and_repeated_every_round_is_right(
    make_cluster: MakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults = RpcFaults(seed=3, only={"GatherValues"})
    break_calls(monkeypatch, faults)
    cluster = make_cluster(lease=60.0)

    def work(rank: int, worker: Worker) -> list[list[tuple[int, int]]]:
        return [worker.session.gather((rank, number)) for number in range(25)]

    for found in workers(3, cluster, "async", work):
        assert found == [[(rank, number) for rank in range(3)] for number in range(25)]
    faults.finish()
    assert all(faults.counts["GatherValues", kind] for kind in KINDS)


def test_a_job_that_is_ended_ends_the_waiting(shared: Cluster, job: str) -> None:
    def work(session: Session) -> None:
        with pytest.raises(PSError):
            session.barrier()

    def end(peer: RawWorker) -> None:
        until(lambda: in_round(shared, job))
        requests.end_job(shared.address, job)

    beside_a_raw_worker(shared, "async", work, end, job, connect_timeout=2.0)


# -- as users run it -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["async", "ddp"])
def test_a_script_with_validation_lowers_its_rate_and_stops_at_the_same_epoch_on_all_workers(
    shared: Cluster, nursery: Nursery, job: str, tmp_path: Path, mode: str
) -> None:
    if mode == "ddp":
        where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_ports(1))}
    else:
        where = {"PS_SERVER": shared.address, "PS_JOB": job}
    script, log = ROOT / "tests" / "scripts" / "validate_and_stop.py", tmp_path / "log"
    ranks = [{"PS_RANK": str(rank), "PS_WORLD_SIZE": "2", "PS_MODE": mode} for rank in range(2)]
    processes = [nursery.run(script, [], log, **variables, **where) for variables in ranks]
    assert [process.wait(TEST_SECONDS) for process in processes] == [0, 0], log.read_text()
    said = log.read_text()
    first, second = (re.findall(rf"rank {rank} (epoch .*)", said) for rank in range(2))
    assert first == second, "the same loss and rate, to the bit, at every epoch, and the same last epoch"
    assert 5 < len(first) < 60, "it stops early"
    assert len(set(re.findall(r"lr (\S+)", "\n".join(first)))) > 1, "the rate is lowered"
    last = len(first) - 1
    assert f"ended [{last}, {last}] said" in said
