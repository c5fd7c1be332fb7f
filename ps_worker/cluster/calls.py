"""Calls to a shard: with bytes, through the one retry loop, and with a limit to each attempt."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import grpc

from ps_protocol.layout import BucketSpec
from ps_protocol.v1.data_pb2 import DESCRIPTOR as DATA
from ps_runtime.channel import open_channel
from ps_runtime.credentials import PLAINTEXT, Access
from ps_runtime.retry import Peer, Retry
from ps_runtime.status import error_from
from ps_runtime.troubles import Troubles
from ps_worker.cluster.coordinator import CALL_SECONDS
from ps_worker.values import PulledBucket, PullResult

log = logging.getLogger("ps_worker")

DATA_SERVICE = DATA.services_by_name["DataService"].full_name
PULL_SECONDS = 60.0


class ShardCalls:
    """The calls to one shard. Requests and answers are bytes: gRPC neither parses nor copies a payload."""

    def __init__(self, index: int, address: str, timeout: float, access: Access = PLAINTEXT) -> None:
        self.index = index
        self.peer = Peer(f"shard {index}", address, access)
        self.closing = threading.Event()
        self._timeout = timeout
        self._channel = open_channel(address, access)
        self._last: Any = None  # the pull that ended last
        self._waits = Troubles(log, None)  # ps_worker_step_seconds has for how long

    def unary(self, method: str, request: bytes) -> bytes:
        """Returns the answer of one method of the data service. Raises PSError."""
        call = self._channel.unary_unary(f"/{DATA_SERVICE}/{method}")
        response: bytes = self._retry().call(lambda: call(request, timeout=CALL_SECONDS))
        return response

    def try_once(self, method: str, request: bytes) -> None:
        """Calls one method of the data service, in one attempt. Raises PSError."""
        try:
            self._channel.unary_unary(f"/{DATA_SERVICE}/{method}")(request, timeout=CALL_SECONDS)
        except grpc.RpcError as error:
            raise error_from(error, str(self.peer)) from None

    def first_of(self, method: str, request: bytes, seconds: float) -> bytes | None:
        """Returns the first message of one streaming method's answer, in one attempt; None: there is none.

        Raises PSError.
        """
        try:
            call = self._channel.unary_stream(f"/{DATA_SERVICE}/{method}")(request, timeout=seconds)
            first: bytes | None = None
            for message in call:  # to its end
                first = message if first is None else first
            return first
        except grpc.RpcError as error:
            raise error_from(error, str(self.peer)) from None

    def stream(self, method: str, request: bytes, read: Callable[[bytes], None]) -> None:
        """Hands each message of one streaming method's answer to `read`; if the stream breaks off, all of them anew."""
        retry = self._retry()
        while True:
            try:
                for message in self._channel.unary_stream(f"/{DATA_SERVICE}/{method}")(request, timeout=PULL_SECONDS):
                    retry.progressed()
                    read(message)
                return
            except grpc.RpcError as error:
                retry.failed(error)

    def pull(
        self,
        method: str,
        request: Callable[[list[int]], bytes],
        clock: int,
        buckets: Sequence[BucketSpec],
        read: Callable[[bytes], Iterable[PulledBucket]],
        land: Callable[[BucketSpec, PulledBucket], int],
    ) -> PullResult:
        """Fetches buckets, landing each as it comes; after a failure those that are missing.

        request: makes the request for buckets of these indices
        read:    takes a message of the answer apart
        land:    takes a bucket over; returns its bytes
        """
        stream = self._channel.unary_stream(f"/{DATA_SERVICE}/{method}")
        missing = {bucket.index: bucket for bucket in buckets}
        size, longest, checkpoint, has_waited = 0, 0.0, False, False
        retry = self._retry()
        while missing:
            try:
                # Kept: a call without a reference to it is cancelled, and its end is still to come.
                self._last = stream(request(list(missing)), timeout=PULL_SECONDS)
                for message in self._last:
                    retry.progressed()
                    for pulled in read(message):
                        if pulled.waiting is not None:
                            awaited, reason = pulled.waiting
                            self._waits.met("pull", "waiting at clock %d: %s", clock, reason, detail=awaited)
                            has_waited = True
                            continue
                        size += land(missing.pop(pulled.bucket), pulled)
                        longest = max(longest, pulled.waited)
                        checkpoint = checkpoint or pulled.checkpoint
                    if not missing:
                        break
            except grpc.RpcError as error:
                retry.failed(error)
        if not has_waited:  # it is over with the first pull that does not wait
            self._waits.over("pull")
        return PullResult(size, longest, checkpoint)

    def close(self) -> None:
        """Closes the connection; calls in flight end."""
        self.closing.set()
        self._channel.close()

    def _retry(self) -> Retry:
        return Retry(self.peer, self._timeout, self.closing)
