"""The order and the number in which buckets leave for shards over the network."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import grpc
import pytest

from ps_protocol.layout import BucketSpec
from ps_worker.cluster.transports import (
    DATA_SERVICE,
    PUSHES_IN_FLIGHT,
    PUSHES_TO_ONE_SHARD,
    NetworkTransport,
    ShardCalls,
    network_pushers,
)
from ps_worker.model.flat import FlatModel
from ps_worker.values import BucketPush, Identity
from tests.tools.cluster import until


class Peer:
    """What stands where a shard would: counts pushes, and answers them once `open` is set."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.came = 0
        self._lock = threading.Lock()
        push = grpc.unary_unary_rpc_method_handler(self._push)
        self._server = grpc.server(ThreadPoolExecutor(16))
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(DATA_SERVICE, {"Push": push}),))
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def _push(self, request: bytes, context: Any) -> bytes:
        with self._lock:
            self.came += 1
        self.open.wait(20.0)
        return b""

    def stop(self) -> None:
        self.open.set()
        self._server.stop(None).wait()


@pytest.fixture
def peers() -> Iterator[Callable[[int], list[tuple[Peer, NetworkTransport]]]]:
    """Makes peers, each with one worker's way to it."""
    made: list[tuple[Peer, NetworkTransport]] = []
    pools = []

    def make(count: int) -> list[tuple[Peer, NetworkTransport]]:
        pool = network_pushers(count)
        pools.append(pool)
        who, flat = Identity("job", 0, 1), cast(FlatModel, None)  # empty pushes look at no gradient
        for index in range(count):
            peer = Peer()
            made.append((peer, NetworkTransport(ShardCalls(index, peer.address, 20.0), who, flat, pool)))
        return made

    yield make
    for peer, transport in made:
        peer.stop()
        transport.close()
    for pool in pools:
        pool.close()


def empty_push(index: int) -> BucketPush:
    return BucketPush(
        BucketSpec(index, "trained", "float32", False, 0, 4, ()), clock=1, empty=True, absent=[], groups={}
    )


def test_a_shard_that_answers_nothing_gets_few_pushes_and_others_run_little_ahead(
    peers: Callable[[int], list[tuple[Peer, NetworkTransport]]],
) -> None:
    (slow, to_slow), (quick, to_quick) = peers(2)
    quick.open.set()
    sent = [way.push(empty_push(index)) for index in range(20) for way in (to_slow, to_quick)]
    until(lambda: slow.came == PUSHES_TO_ONE_SHARD and quick.came == PUSHES_IN_FLIGHT - 1)
    assert not any(future.done() for future in sent[2 * PUSHES_IN_FLIGHT :]), "one order over all shards"
    slow.open.set()
    for future in sent:
        future.result(20.0)
    assert (slow.came, quick.came) == (20, 20)


def test_of_one_shard_alone_no_more_are_in_flight(
    peers: Callable[[int], list[tuple[Peer, NetworkTransport]]],
) -> None:
    [(peer, way)] = peers(1)
    sent = [way.push(empty_push(index)) for index in range(6)]
    until(lambda: peer.came == PUSHES_TO_ONE_SHARD)
    assert not any(future.done() for future in sent)
    peer.open.set()
    for future in sent:
        future.result(20.0)
    assert peer.came == 6
