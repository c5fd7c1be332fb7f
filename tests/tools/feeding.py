"""A shard with a job of one vector, whose clock a test moves; and readers that take a message when a test wants it."""

from __future__ import annotations

import math
import mmap
import os
import zlib
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import torch
from prometheus_client import CollectorRegistry

from ps_protocol.errors import PSError
from ps_protocol.handover import MappingOffer
from ps_protocol.identity import Identity
from ps_protocol.job import JobSpec
from ps_protocol.messages.data import PushCall, PushedBucket, PushKind
from ps_protocol.messages.editions import EditionBucket, EditionCall, EditionMessage, WeightsAsked, WeightsHere
from ps_protocol.tensors import bytes_of, tensor_from
from ps_server.core.feed_figures import FeedFigures
from ps_server.shard.metrics import ShardMetrics
from ps_server.shard.outbox import Answer, Lent
from ps_server.shard.shard import Shard
from ps_server.shard.threads import NoThreads
from tests.tools.raw_worker import vector_job

CELLS, BUCKETS = 64, 4


class Reader:
    """An outbox whose reader takes a message when it wants to."""

    def __init__(self) -> None:
        self.queued: deque[Callable[[], AbstractContextManager[Lent]]] = deque()
        self.signs = 0
        self.error: PSError | None = None
        self.is_finished = False
        self.close: Callable[[], None] = lambda: None

    def tell(self, answer: Answer) -> None:
        assert isinstance(answer, EditionMessage)
        assert answer.begin is None
        assert answer.bucket is None
        self.signs += 1

    def lend(self, lent: Callable[[], AbstractContextManager[Lent]], is_small: bool = False) -> None:
        self.queued.append(lent)

    def finish(self) -> None:
        self.is_finished = True

    def fail(self, error: PSError) -> None:
        self.error = self.error or error

    def on_close(self, callback: Callable[[], None]) -> None:
        self.close = callback

    def buckets(self) -> list[EditionBucket]:
        """Takes all, as it came."""
        begin = self.take().begin
        assert begin is not None
        buckets = [bucket for _ in range(begin.buckets) if (bucket := self.take().bucket) is not None]
        self.close()
        return buckets

    def take(self) -> EditionMessage:
        with self.queued.popleft()() as (part, _):
            assert isinstance(part, EditionMessage)
        return part

    def edition(self, dtype: str = "float32") -> tuple[int, list[float]]:
        """Takes all; the version, and the cells."""
        begin = self.take().begin
        assert begin is not None
        cells: list[float] = []
        for _ in range(begin.buckets):
            bucket = self.take().bucket
            assert isinstance(bucket, EditionBucket)
            assert bucket.checksum == zlib.crc32(bucket.payload)
            cells += tensor_from(bucket.payload, dtype).float().tolist()
        assert self.is_finished
        assert not self.queued
        self.close()
        return begin.version, cells


class Feeding:
    """A shard with a job of one vector, whose worker's steps count its cells up, and whose time a test moves."""

    def __init__(
        self,
        mode: str = "sync",
        limit: float = math.inf,
        spec: JobSpec | None = None,
        run: str = "",
        feed_bytes: float = math.inf,
        directory: Path = Path("/nowhere"),
    ) -> None:
        """directory: where readers wait for the memory of editions"""
        self.now, self.clock = 0.0, 0
        limits = {"feed_limit": limit, "feed_bytes": feed_bytes}
        metrics, threads = ShardMetrics(CollectorRegistry()), NoThreads()
        self.shard = Shard(metrics, threads, lambda: self.now, directory, **limits)  # type: ignore[arg-type]
        self.spec = spec or vector_job("job", mode, CELLS, 1)
        self.shard.create_job(self.spec, range(BUCKETS), run)
        self.shard.add_worker("job", 0, 1, 0)

    @property
    def job(self) -> object:
        return self.shard.jobs()["job"]

    @property
    def seen(self) -> FeedFigures:
        figures = self.shard.statistics().jobs["job"].feed
        assert figures is not None
        return figures

    def push(self, value: float, kind: PushKind = PushKind.GRADIENT, buckets: range = range(BUCKETS)) -> None:
        payload = bytes_of(torch.full((16 * len(buckets),), value))
        pushed = tuple(PushedBucket(index, kind) for index in buckets)
        self.shard.push(PushCall(Identity("job", 0, 1), self.clock, pushed, payload))

    def describe(self, job: str = "job", run: str = "", follows: bool = False) -> WeightsHere:
        return self.shard.weight_feeds.describe(WeightsAsked(job, run, follows=follows))

    def begin(self) -> Feeding:
        self.push(0.0, PushKind.INITIAL_VALUE)
        return self

    def step(self, buckets: range = range(BUCKETS)) -> None:
        self.clock += buckets.start == 0
        self.push(-1.0, buckets=buckets)

    def pull(
        self,
        version: int,
        wire: str = "float32",
        buckets: tuple[int, ...] = (),
        timeline: int = 0,
        caller: str = "",
        run: str = "",
        base: int | None = None,
        offer: MappingOffer | None = None,
        part_bytes: int = 0,
    ) -> Reader:
        reader = Reader()
        bases = {} if base is None else dict.fromkeys(buckets or range(BUCKETS), base)
        call = EditionCall("job", run, timeline, version, wire, buckets, bases, part_bytes, offer)
        self.shard.weight_feeds.pull(call, reader, caller)  # type: ignore[arg-type]
        return reader

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.shard.tick()


def assert_sealed(descriptor: int) -> None:
    """No way changes a memory file through this descriptor: not its elements, not its size, not by a mapping."""
    for change in (
        lambda: os.pwrite(descriptor, b"x", 0),
        lambda: os.ftruncate(descriptor, 1),
        lambda: os.ftruncate(descriptor, 2**20),
        lambda: mmap.mmap(descriptor, os.fstat(descriptor).st_size),
    ):
        with pytest.raises(PermissionError):
            change()
