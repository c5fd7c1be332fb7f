"""The order and the number in which buckets leave for shards, and what leaves together."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from typing import Any, cast

import grpc
import pytest

from ps_protocol.errors import PSError
from ps_protocol.hyper_parameters import HyperParameters
from ps_protocol.identity import Identity
from ps_protocol.layout import BucketSpec
from ps_protocol.messages.data import BucketPush, PullCall, push_of, read_exchange
from ps_protocol.v1 import data_pb2
from ps_protocol.v1.data_pb2 import PushRequest
from ps_runtime.pools import Closed
from ps_worker.cluster.calls import DATA_SERVICE, ShardCalls
from ps_worker.cluster.shared_memory import SharedTransport
from ps_worker.cluster.transport import (
    PUSHES_IN_FLIGHT,
    PUSHES_TO_ONE_SHARD,
    NetworkTransport,
    network_pushers,
    pullers,
)
from ps_worker.model.flat import FlatModel
from ps_worker.timeline.recording import Timeline
from tests.tools.cluster import until

WHO = Identity("job", 0, 1)


class Peer:
    """What stands where a shard would: counts pushes, and answers them once `open` is set. An exchange is answered at
    once, or acknowledged first and answered when `open` is set. error: which it then gets instead"""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.acknowledges, self.error = False, ""
        self.came = 0
        self._lock = threading.Lock()
        self.requests: list[bytes] = []
        methods = {
            "Push": grpc.unary_unary_rpc_method_handler(self._push),
            "Exchange": grpc.unary_stream_rpc_method_handler(self._exchange),
        }
        self._server = grpc.server(ThreadPoolExecutor(16))
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(DATA_SERVICE, methods),))
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def _push(self, request: bytes, context: Any) -> bytes:
        with self._lock:
            self.came += 1
            self.requests.append(request)
        self.open.wait(20.0)
        return b""

    def _exchange(self, request: bytes, context: Any) -> Iterator[bytes]:
        self.requests.append(request)
        if self.acknowledges:
            yield data_pb2.ExchangeResponse(staged_duration={"nanos": 1}).SerializeToString()
            self.open.wait(20.0)
        if self.error:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, self.error)
        there = [data_pb2.PulledBucket(bucket=index) for index in data_pb2.ExchangeRequest.FromString(request).buckets]
        yield data_pb2.ExchangeResponse(buckets=there, in_segment=data_pb2.InSegment()).SerializeToString()

    def stop(self) -> None:
        self.open.set()
        self._server.stop(None).wait()


@contextmanager
def peers(count: int) -> Iterator[list[tuple[Peer, NetworkTransport]]]:
    """Peers, each with one worker's way to it."""
    with ExitStack() as stack:
        pools = [stack.enter_context(closing(pool)) for pool in (network_pushers(count), pullers(count))]
        made = []
        for index in range(count):
            peer = Peer()
            calls = ShardCalls(index, peer.address, 20.0)
            transport = NetworkTransport(
                calls, WHO, cast(FlatModel, None), *pools, Timeline()
            )  # empty pushes look at no gradient
            stack.enter_context(closing(transport))
            stack.callback(peer.stop)
            made.append((peer, transport))
        yield made


def empty_push(index: int) -> BucketPush:
    return BucketPush(
        BucketSpec(index, "trained", "float32", False, 0, 4, ()), clock=1, empty=True, absent=[], groups={}
    )


def test_a_shard_that_answers_nothing_gets_few_pushes_and_others_run_little_ahead() -> None:
    with peers(2) as [(slow, to_slow), (quick, to_quick)]:
        quick.open.set()
        sent = [way.push(empty_push(index)) for index in range(20) for way in (to_slow, to_quick)]
        until(lambda: slow.came == PUSHES_TO_ONE_SHARD and quick.came == PUSHES_IN_FLIGHT - 1)
        assert not any(future.done() for future in sent[2 * PUSHES_IN_FLIGHT :]), "one order over all shards"
        slow.open.set()
        for future in sent:
            future.result(20.0)
        assert (slow.came, quick.came) == (20, 20)


def test_of_one_shard_alone_no_more_are_in_flight() -> None:
    with peers(1) as [(peer, way)]:
        sent = [way.push(empty_push(index)) for index in range(6)]
        until(lambda: peer.came == PUSHES_TO_ONE_SHARD)
        assert not any(future.done() for future in sent)
        peer.open.set()
        for future in sent:
            future.result(20.0)
        assert peer.came == 6


class CopiedGradients:
    """Stands for a model whose gradients are copied into the segment."""

    in_segment = False

    def __init__(self) -> None:
        self.copied: list[int] = []
        self.full = False

    def leaving(self, bucket: BucketSpec) -> None:
        pass

    def share_gradient(self, bucket: BucketSpec) -> None:
        if self.full:
            raise MemoryError("the segment is full")
        self.copied.append(bucket.index)

    is_checked = True
    lands_in_place = False


@pytest.fixture(params=[CopiedGradients])
def shared(request: pytest.FixtureRequest) -> Iterator[tuple[Peer, CopiedGradients, SharedTransport]]:
    peer, flat = Peer(), request.param()
    with closing(pullers(1)) as pool:
        way = SharedTransport(ShardCalls(0, peer.address, 20.0), WHO, cast(FlatModel, flat), pool, Timeline())
        yield peer, flat, way
        peer.stop()
        way.close()


def full_push(index: int, clock: int = 1) -> BucketPush:
    return replace(empty_push(index), empty=False, clock=clock)


def test_gradients_that_are_copied_leave_with_those_that_came_while_a_message_was_under_way(
    shared: tuple[Peer, CopiedGradients, SharedTransport],
) -> None:
    peer, flat, way = shared
    sent = [way.push(full_push(0))]
    until(lambda: peer.came == 1)
    sent += [way.push(full_push(1)), way.push(full_push(2)), way.push(full_push(3, clock=2))]
    assert not any(future.done() for future in sent)
    peer.open.set()
    results = [future.result(20.0) for future in sent]
    messages = [PushRequest.FromString(request).header for request in peer.requests]
    assert [[(bucket.bucket, bucket.finite) for bucket in message.buckets] for message in messages] == [
        [(0, True)],
        [(1, True), (2, True)],
        [(3, True)],
    ]
    assert [message.clock for message in messages] == [1, 1, 2]
    assert flat.copied == [0, 1, 2, 3]
    assert [result.sizes for result in results] == [{"float32": 16}] * 4
    assert results[0].staged < results[1].staged == results[2].staged < results[3].staged


def test_what_leaves_together_fails_together_and_what_follows_does_not(
    shared: tuple[Peer, CopiedGradients, SharedTransport],
) -> None:
    peer, flat, way = shared
    first = way.push(full_push(0))
    until(lambda: peer.came == 1)
    flat.full = True
    failing = [way.push(full_push(1)), way.push(full_push(2))]
    peer.open.set()
    first.result(20.0)
    for future in failing:
        with pytest.raises(MemoryError, match="full"):
            future.result(20.0)
    assert peer.came == 1
    flat.full = False
    way.push(full_push(1)).result(20.0)
    assert peer.came == 2


# -- one call a step -------------------------------------------------------------------------------------------------


class MadeInSegment(CopiedGradients):
    """Stands for a model whose gradients and weights lie in the segment."""

    in_segment = lands_in_place = True

    def land_shared(self, bucket: BucketSpec, wire_format: str) -> None:
        pass


@pytest.mark.parametrize("shared", [MadeInSegment], indirect=True)
def test_each_step_asks_for_what_it_has_at_its_own_clock(
    shared: tuple[Peer, MadeInSegment, SharedTransport],
) -> None:
    """Requests that differ in their clock and hyper-parameters alone are written once, but for these: what differs in
    more is written anew."""
    peer, _, way = shared
    lower = {0: {"lr": 0.5}}
    steps = [
        [full_push(1), full_push(2)],
        [full_push(1), full_push(2)],
        [full_push(1), full_push(2)],
        [replace(full_push(1), groups=lower), full_push(2)],
        [replace(full_push(1), groups=lower), full_push(2)],
        [replace(full_push(1), groups={0: {"lr": 0.25}}), replace(full_push(2), groups={1: {"lr": None}})],
        [replace(full_push(1), groups={0: {"lr": 0.25}}), replace(full_push(2), groups={1: {"lr": (0.5, 0.5)}})],
        [replace(full_push(1), groups={0: {"lr": 0.25}}), replace(full_push(2), groups={0: {"lr": 0.25}})],
        [replace(full_push(1), groups=lower, absent=[0]), full_push(2)],
        [full_push(1), replace(empty_push(2), absent=[0])],
        [full_push(2)],
        [full_push(1), full_push(2)],
    ]
    for clock, pushes in enumerate(steps, 124):  # the number of bytes of a clock changes on the way, too
        now = [replace(push, clock=clock) for push in pushes]
        step = way.exchange(clock, now, [push.bucket for push in now], {})
        assert step.pull.result(20.0).sizes == {"float32": 16 * len(now)}
        [staged] = step.pushes
        assert staged.result(20.0).sizes == {"float32": 16 * sum(not push.empty for push in now)}
        call = push_of(WHO, clock, now, None, finite={push.bucket.index for push in now})
        indices = tuple(push.bucket.index for push in now)
        assert read_exchange(peer.requests[-1]) == (call, PullCall(WHO, clock, indices, in_segment=True))


@pytest.mark.parametrize("shared", [MadeInSegment], indirect=True)
@pytest.mark.parametrize("error", ["", "the job is gone"], ids=["answered", "refused"])
def test_the_pushes_of_a_message_are_acknowledged_as_one_while_its_pull_waits(
    shared: tuple[Peer, MadeInSegment, SharedTransport], error: str
) -> None:
    """A step whose pushes are all acknowledged counts, also where the wait for other workers then fails."""
    peer, _, way = shared
    peer.acknowledges, peer.error = True, error
    pushes = [full_push(index) for index in range(8)]
    step = way.exchange(1, pushes, [push.bucket for push in pushes], {})
    [staged] = step.pushes
    assert staged.result(20.0).sizes == {"float32": 16 * 8}
    assert not step.pull.done()
    peer.open.set()
    if error:
        with pytest.raises(PSError, match=error):
            step.pull.result(20.0)
    else:
        assert step.pull.result(20.0).sizes == {"float32": 16 * 8}
    assert staged.exception() is None


@pytest.mark.parametrize("shared", [MadeInSegment], indirect=True)
def test_the_pushes_of_a_message_that_is_refused_fail_with_its_pull(
    shared: tuple[Peer, MadeInSegment, SharedTransport],
) -> None:
    peer, _, way = shared
    peer.error = "the worker is unknown"
    step = way.exchange(1, [full_push(1), full_push(2)], [full_push(1).bucket, full_push(2).bucket], {})
    [staged] = step.pushes
    assert staged.exception(20.0) is step.pull.exception(20.0)
    assert isinstance(staged.exception(), PSError)


@pytest.mark.parametrize("shared", [MadeInSegment], indirect=True)
def test_a_request_that_is_repeated_while_another_is_written_is_its_own(
    shared: tuple[Peer, MadeInSegment, SharedTransport],
) -> None:
    """A thread of the pool asks again for the step before, after its connection has broken."""
    _, _, way = shared
    first, later = full_push(1), replace(full_push(1), absent=[0])
    before = way._request(1, [first], [1], None)

    class Compared(list[BucketPush]):
        def __eq__(self, other: object) -> bool:
            way._request(1, [later], [1], None)  # as the other thread, at this moment
            return super().__eq__(other)

    assert way._request(1, Compared([first]), [1], None) == before
    assert not read_exchange(before)[0].buckets[0].absent


@pytest.mark.parametrize("shared", [MadeInSegment], indirect=True)
def test_a_request_has_its_own_hyper_parameters_while_others_are_written(
    shared: tuple[Peer, MadeInSegment, SharedTransport],
) -> None:
    _, _, way = shared
    first, later = ({0: {"lr": rate}} for rate in (0.5, 0.25))
    before = way._request(1, [replace(full_push(1), groups=first)], [1], None)

    class Compared(dict[int, HyperParameters]):
        def __eq__(self, other: object) -> bool:
            way._request(1, [replace(full_push(1), groups=later)], [1], None)  # as another thread, at this moment
            return super().__eq__(other)

    assert way._request(1, [replace(full_push(1), groups=Compared(first))], [1], None) == before
    assert read_exchange(before)[0].groups == first


def test_a_push_after_the_end_fails(shared: tuple[Peer, CopiedGradients, SharedTransport]) -> None:
    _, _, way = shared
    way.close()
    with pytest.raises(Closed):
        way.push(full_push(0)).result(20.0)
