"""One shard and one coordinator to throw bytes at, without a network; and what they hold, as a hash.

The shard has a job in sync mode with two live workers. The bytes may speak for rank 1, whose lease key they know: what
it pushes is staged and, since rank 0 never pushes, changes no weight, whenever the hash is taken.
"""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from google.protobuf import descriptor_pool, message_factory
from google.protobuf.message import DecodeError
from prometheus_client import CollectorRegistry

from ps_protocol.convert import AnsweringShard
from ps_protocol.errors import PSError
from ps_protocol.identity import Identity
from ps_protocol.job import JobSpec
from ps_protocol.layout import bucket_layout
from ps_protocol.messages.data import PushCall, PushedBucket, PushKind
from ps_protocol.segment_layout import PAGE_BYTES
from ps_protocol.tensors import TORCH_DTYPES, bytes_of
from ps_protocol.v1 import shard_pb2
from ps_runtime.settings import DEFAULT_SHARED_DIRECTORY
from ps_server.coordinator.coordinator import Coordinator
from ps_server.core.snapshot import SnapshotRequest
from ps_server.rpc import shard_messages
from ps_server.rpc.cluster_service import ClusterService
from ps_server.rpc.data_service import DataService
from ps_server.rpc.feed_service import FeedService
from ps_server.rpc.job_service import JobService
from ps_server.rpc.shard_service import ShardService
from ps_server.rpc.views import Views
from ps_server.rpc.worker_services import DataLeaseService, MembershipService, RoundService
from ps_server.shard.metrics import ShardMetrics
from ps_server.shard.shard import Shard
from ps_server.shard.threads import NoThreads
from ps_server.storage.checkpoints import CheckpointStore
from ps_server.view.watch import Watch
from ps_worker.cluster.local_segment import LocalSegment
from tests.tools.checkpoint_files import manifest_of
from tests.tools.fuzz_requests import BEGINNING_SPEC, BLOCKS_SPEC, CHECKPOINT, KEPT, KEY, SPEC
from tests.tools.one_process import AtOnce, DirectShard


class Finding(AssertionError):
    """Something came of bytes that should not."""


class _Context:
    """A call that is never over, of gRPC and as the data service sees it."""

    worker = kept = None

    def peer(self) -> str:
        return "ipv4:192.0.2.1:1"

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return ()

    def auth_context(self) -> dict[str, Any]:
        return {}

    def add_callback(self, callback: Callable[[], None]) -> bool:
        return True

    def time_remaining(self) -> float | None:
        return None

    def fail(self, error: PSError) -> None: ...

    def set_code(self, code: Any) -> None: ...

    def set_details(self, details: str) -> None: ...

    def set_trailing_metadata(self, metadata: Any) -> None: ...


class Target:
    """What bytes are thrown at: every handler of every service by name, as the boundary calls them."""

    def __init__(self) -> None:
        self._level = logging.getLogger("ps_server").level
        logging.getLogger("ps_server").setLevel(logging.CRITICAL)
        # In memory where there is such a place: what is flushed to a disk would be most of the time.
        self._files = tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None)
        self.store = CheckpointStore(Path(self._files.name))
        # Without threads: nothing changes between two inputs.
        self.shard = Shard(ShardMetrics(CollectorRegistry()), NoThreads(), checkpoints=self.store)
        self.coordinator = Coordinator(1, lambda index, address: DirectShard(self.shard, 1), make_executor=AtOnce)
        self._fill()
        inline: Any = NoThreads()  # does at once what a pool would do later, and lets errors out
        data = DataService(self.shard, AnsweringShard(0, 1))
        feeds = FeedService(self.shard, AnsweringShard(0, 1))
        data.senders = feeds.senders = inline
        self.handlers: dict[str, Callable[[bytes], Any]] = {
            "Push": lambda raw: data._push(raw, _Context()),  # type: ignore[arg-type]
            "AttachSegment": lambda raw: data._attach(raw, _Context()),  # type: ignore[arg-type]
            "OpenDataConnection": lambda raw: data._open(raw, _Context()),  # type: ignore[arg-type]
            "Pull": lambda raw: data._pull(raw, _Context(), _ignore),  # type: ignore[arg-type]
            "Exchange": lambda raw: data._exchange(raw, _Context(), _ignore),  # type: ignore[arg-type]
            "PullState": lambda raw: data._pull_state(raw, _Context(), _ignore),  # type: ignore[arg-type]
            "PushTable": lambda raw: data._push_table(raw, _Context()),  # type: ignore[arg-type]
            "PushRows": lambda raw: data._push_rows(raw, _Context()),  # type: ignore[arg-type]
            "ExchangeRows": lambda raw: data._exchange_rows(raw, _Context(), _ignore),  # type: ignore[arg-type]
            "PullRows": lambda raw: data._pull_rows(raw, _Context(), _ignore),  # type: ignore[arg-type]
            "WatchRows": lambda raw: feeds.watch_rows(raw, _Context(), _ignore),  # type: ignore[arg-type]
            "DescribeWeights": lambda raw: feeds.describe_weights(raw, _Context()),  # type: ignore[arg-type]
            "PullEdition": lambda raw: feeds.pull_edition(raw, _Context(), _ignore),  # type: ignore[arg-type]
            "PullTable": lambda raw: data._pull_table(raw, _Context(), _ignore),  # type: ignore[arg-type]
        }
        services = [
            JobService(self.coordinator),
            MembershipService(self.coordinator, inline),
            DataLeaseService(self.coordinator),
            RoundService(self.coordinator, inline),
            ClusterService(self.coordinator, self._views(), inline),
            ShardService(self.shard),
        ]
        for service in services:
            for method in descriptor_pool.Default().FindServiceByName(service.NAME).methods:
                self.handlers[method.name] = _handler(service, method)
        self.handlers["AwaitSnapshot"] = self._await_snapshot  # as the service does, but for the waiting

    def _await_snapshot(self, raw: bytes) -> None:
        try:
            request = shard_pb2.AwaitSnapshotRequest.FromString(raw)
        except DecodeError:
            return
        shard_messages.await_snapshot_response(self.shard.await_snapshot(request.job, request.checkpoint, 0.0))

    def _fill(self) -> None:
        """Makes the job with its two workers, and a checkpoint on disk of a job that is not there any more."""
        for spec in (SPEC, BLOCKS_SPEC):
            self._make(spec, b"another key of 1")
            self.shard.add_worker(spec.name, 1, 2, 0, KEY)
        self._make(BEGINNING_SPEC, KEY)  # whose table has not begun
        self._make(replace(SPEC, name=KEPT), KEY)
        assert self.store.begin(KEPT, CHECKPOINT)
        self.shard.begin_snapshot(SnapshotRequest(KEPT, CHECKPOINT, None))
        part = self.shard.await_snapshot(KEPT, CHECKPOINT, 0.0).part
        self.shard.drop_job(KEPT)
        self.store.commit(KEPT, manifest_of(replace(SPEC, name=KEPT), CHECKPOINT, part, clock=0))

    def _make(self, spec: JobSpec, key: bytes) -> None:
        """A job with its initial values, and rank 0 with this key."""
        self.shard.create_job(spec, [0, 1, 2])
        self.shard.add_worker(spec.name, 0, 1, 0, key)
        if spec.tables:
            with LocalSegment(2 * PAGE_BYTES, DEFAULT_SHARED_DIRECTORY, PAGE_BYTES) as segment:
                self.shard.attach(Identity(spec.name, 0, 1, key), segment.offer)
        for bucket in bucket_layout(spec.parameters, spec.bucket_bytes).buckets:
            values = torch.arange(bucket.numel).to(TORCH_DTYPES[bucket.dtype]).numpy().tobytes()
            pushed = (PushedBucket(bucket.index, PushKind.INITIAL_VALUE),)
            self.shard.push(PushCall(Identity(spec.name, 0, 1, key=key), 0, pushed, values))

    def _views(self) -> Views:
        """Returns the views of the cluster as it is now: nothing looks at it again."""
        return Views(Watch(self.coordinator, 1), self.coordinator.events, 1, lambda: ("127.0.0.1:1", ""))

    def throw(self, name: str, raw: bytes) -> PSError | None:
        """Has a handler answer these bytes; the error that it refuses them with, None if it takes them.

        Raises Finding for any other error, and for a refusal that left something changed.
        """
        before = self.fingerprint()
        try:
            self.handlers[name](raw)
        except PSError as error:
            if self.fingerprint() != before:
                raise Finding(f"{name} refused bytes ({error}) and changed something") from error
            return error
        except Exception as error:
            raise Finding(f"{name} failed with {type(error).__name__}: {error}") from error
        return None

    def fingerprint(self) -> bytes:
        """A hash of all that a shard and a coordinator remember."""
        remembered = hashlib.sha256(repr((sorted(self.coordinator.jobs()), sorted(self.coordinator.shards()))).encode())
        for name, job in sorted(self.shard.jobs().items()):
            state, task = job.partition, job.snapshot_task
            remembered.update(
                repr((name, state.spec, sorted(state.roster.items()), sorted(job.of_workers.segments))).encode()
            )
            remembered.update(repr(task and (task.name, task.clock)).encode())
            for index, bucket in sorted(job.buckets.items()):
                rule = bucket.rule
                numbers = rule.initialised, rule.version, rule.staged, rule.applied, rule.added
                remembered.update(repr((index, numbers, sorted(rule.waiting), bucket.busy)).encode())
                remembered.update(bytes_of(bucket.unit.weights.flat))
            for table in state.tables.values():
                rule, pending = (
                    table.rule,
                    sorted(
                        (rank, sorted(each.step.parts if each.step else ())) for rank, each in table.pending.items()
                    ),
                )
                coming = table.coming.incarnation, table.coming.beginning, table.coming.came, rule.initialised
                numbers = rule.version, rule.staged, rule.applied, len(rule.added), len(table.weights), coming
                remembered.update(repr((table.index, numbers, sorted(rule.waiting), pending)).encode())
        return remembered.digest()

    def stop(self) -> None:
        """Ends the threads."""
        self.shard.stop()
        self._files.cleanup()
        self.coordinator.stop()
        logging.getLogger("ps_server").setLevel(self._level)


def _ignore(message: Any) -> None:
    """Where answers go."""


def _handler(service: Any, method: Any) -> Callable[[bytes], Any]:
    behaviour = getattr(service, method.name)
    parse = message_factory.GetMessageClass(method.input_type).FromString

    def handle(raw: bytes) -> None:
        try:
            request = parse(raw)
        except DecodeError:
            return  # the boundary refuses these
        if method.server_streaming:
            behaviour(request, _Context(), _ignore)
        else:
            behaviour(request, _Context())

    return handle
