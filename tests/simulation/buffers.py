"""The tensors of a followed job that no optimizer steps: a frozen parameter, and a buffer, of which each worker has its
own.

Rank 0 tells readers of its buffer by the real code (ps_worker/cluster/reader_buffers.py). The buffer has other elements
after each step of each process, and what is told of it is noted. So a reader's elements say which step they are of.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from ps_protocol.errors import PSError
from ps_protocol.identity import Identity
from ps_protocol.layout import BucketSpec
from ps_protocol.messages.data import PushCall, PushedBucket, PushKind
from ps_protocol.tensors import bytes_of
from ps_worker.cluster.reader_buffers import ReaderBuffers
from tests.simulation.runs import BUFFER
from tests.simulation.threads import Future

if TYPE_CHECKING:
    from tests.simulation.runs import Run
    from tests.simulation.worker import Place, Worker

CALL_SECONDS = 15.0


class Buffers:
    """Those of one worker's process. For its training thread."""

    def __init__(self, worker: Worker, run: Run) -> None:
        self._worker, self._run = worker, run
        self._steps = 0
        self._content = run.initial.clone()
        self._connection: TellingConnection | None = None
        model: Any = SimpleNamespace(layout=SimpleNamespace(held=run.untrained), initial=self._elements)
        self._telling = ReaderBuffers(model, self._connected)  # type: ignore[arg-type]

    def beginnings(self, place: Place) -> list[Callable[[], object]]:
        """Returns what sends the values with which rank 0 begins."""
        return [partial(self._begin, place, bucket) for bucket in self._run.untrained]

    def stepped(self, place: Place) -> None:
        """Changes the buffer, as a step does, and has readers be told."""
        if self._run.untrained:
            self._steps += 1
            self._content.fill_(self._worker.life.number)
            self._content[0, 0] = self._steps
            self._tell(place, is_last=False)

    def leave(self, place: Place) -> None:
        """Tells what readers were not told of yet."""
        if self._run.untrained:
            self._tell(place, is_last=True)

    def _tell(self, place: Place, is_last: bool) -> None:
        if self._connection is None or self._connection.from_place is not place:
            self._connection = TellingConnection(self._worker, place)
        names = [parameter.name for parameter in self._run.spec.parameters]
        self._telling.stepped(lambda: [names.index(BUFFER)] if self._steps else [], is_last)

    def _begin(self, place: Place, bucket: BucketSpec) -> None:
        address, elements = address_of(place, bucket), bytes(self._elements(bucket))
        note_told(self._worker, place, bucket, 0, elements)
        call = told_call(self._worker.identity(place), bucket, 0, elements)
        network = self._worker.cluster.network
        self._worker.retry(lambda: network.call(address, "push", call, seconds=CALL_SECONDS), lambda: place.closed)

    def _connected(self) -> TellingConnection:
        assert self._connection is not None
        return self._connection

    def _elements(self, bucket: BucketSpec) -> memoryview:
        parameter = self._run.spec.parameters[bucket.slices[0].parameter]
        content = self._content if parameter.name == BUFFER else self._run.initial
        return bytes_of(content.flatten())


class TellingConnection:
    """What ReaderBuffers knows of ps_worker.cluster.connection.Connection."""

    def __init__(self, worker: Worker, from_place: Place) -> None:
        self._worker, self.from_place = worker, from_place
        self.place = SimpleNamespace(identity=worker.identity(from_place))

    @property
    def clock(self) -> int:
        """The worker's."""
        return self.from_place.clock

    def tell(self, bucket: BucketSpec, number: int, payload: memoryview) -> Future:
        """Sends a bucket in the background."""
        worker, place, elements = self._worker, self.from_place, bytes(payload)
        note_told(worker, place, bucket, number, elements)
        call, answer = told_call(self.place.identity, bucket, number, elements), Future(worker.world)
        address, network = address_of(place, bucket), worker.cluster.network

        def send() -> None:
            try:
                worker.retry(lambda: network.call(address, "push", call, seconds=CALL_SECONDS), lambda: place.closed)
            except PSError as error:
                answer.settle(None, error)
            else:
                answer.settle(None, None)

        worker.host.spawn("tell", send)
        return answer


def told_call(identity: Identity, bucket: BucketSpec, number: int, elements: bytes) -> PushCall:
    """Returns the call that sends a bucket that no optimizer steps. number: of the step; 0: the job begins with it"""
    return PushCall(identity, number, (PushedBucket(bucket.index, PushKind.INITIAL_VALUE),), elements)


def address_of(place: Place, bucket: BucketSpec) -> str:
    """Returns where the shard is that has a bucket."""
    return place.addresses[place.result.placement[bucket.index]]


def note_told(worker: Worker, place: Place, bucket: BucketSpec, number: int, elements: bytes) -> None:
    """Notes what a process of rank 0 says is in a bucket after a step."""
    told = worker.cluster.readers.told.setdefault((place.run, bucket.index, number), set())
    told.add(zlib.crc32(elements))
