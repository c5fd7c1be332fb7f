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

from ps_protocol.identity import Identity
from ps_protocol.layout import BucketSpec
from ps_protocol.messages.data import BucketPush
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
    """What stands where a shard would: counts pushes, and answers them once `open` is set."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.came = 0
        self._lock = threading.Lock()
        self.requests: list[bytes] = []
        push = grpc.unary_unary_rpc_method_handler(self._push)
        self._server = grpc.server(ThreadPoolExecutor(16))
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(DATA_SERVICE, {"Push": push}),))
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def _push(self, request: bytes, context: Any) -> bytes:
        with self._lock:
            self.came += 1
            self.requests.append(request)
        self.open.wait(20.0)
        return b""

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


@pytest.fixture
def shared() -> Iterator[tuple[Peer, CopiedGradients, SharedTransport]]:
    peer, flat = Peer(), CopiedGradients()
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
    assert [result.size for result in results] == [16] * 4
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


def test_a_push_after_the_end_fails(shared: tuple[Peer, CopiedGradients, SharedTransport]) -> None:
    _, _, way = shared
    way.close()
    with pytest.raises(Closed):
        way.push(full_push(0)).result(20.0)
