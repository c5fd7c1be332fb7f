"""Readers get rank 0's buffers, so that a model with BatchNorm evaluates as rank 0's does."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import ps_torch as ps
from ps_feed.edition import EditionArrays
from ps_protocol.errors import InvalidRequest, LimitExceeded, TryLater
from ps_protocol.identity import Identity
from ps_protocol.job import JobSpec, validate
from ps_protocol.layout import BucketSpec, PiecePlace, bucket_layout
from ps_protocol.messages.data import PushCall, PushedBucket, PushKind
from ps_protocol.tensors import bytes_of
from ps_server.core.commands import AddWorker
from ps_server.core.partition import JobPartition
from ps_server.shard.copied_buckets import as_typed
from ps_server.shard.editions import TakenEdition, WantedEdition
from ps_server.shard.weight_feeds import JobSource
from ps_worker.cluster import reader_buffers
from tests.tools.cases import cases
from tests.tools.cluster import Cluster, in_parallel, until
from tests.tools.followed_trainer import relay
from tests.tools.partitions import FROZEN, TRAINED, job_spec, lone_shard, payload, running, stage


def normed(frozen: bool = True) -> nn.Sequential:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 8), nn.BatchNorm1d(8))
    if frozen:
        model.add_module("last", nn.Linear(8, 2).requires_grad_(False))
    return model


class NormTrainer:
    """A worker whose model has BatchNorm. It remembers its buffers, those that it began with and those of each step."""

    def __init__(self, session: ps.Session) -> None:
        self.session, own = session, normed()
        optimizer = torch.optim.SGD([each for each in own.parameters() if each.requires_grad], lr=0.05)
        self.model, self.optimizer = session.prepare(own, optimizer, bucket_bytes=1024)
        self.buffers: dict[int, dict[str, torch.Tensor]] = {}
        self._remember()

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.optimizer.zero_grad()
            self.model(3 + 2 * torch.randn(16, 6)).square().mean().backward()
            self.optimizer.step()
            self._remember()

    def _remember(self) -> None:
        named = self.session.unwrap(self.model).named_buffers()
        self.buffers[self.session.clock] = {name: buffer.clone() for name, buffer in named}

    def evaluated(self) -> torch.Tensor:
        return evaluated(self.session.unwrap(self.model))


def evaluated(model: nn.Module) -> torch.Tensor:
    model.eval()
    with torch.no_grad():
        found = model(torch.linspace(-2, 2, 24).view(4, 6))
    model.train()
    return found


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 tells after each step."""
    monkeypatch.setattr(reader_buffers, "TELL_SECONDS", 0.0)


@pytest.fixture
def trainer(shared: Cluster, job: str) -> Iterator[NormTrainer]:
    with shared.connect("sync", job=job) as session:
        yield NormTrainer(session)


@pytest.mark.parametrize("mode", cases(["sync", "async"], ["ssp:2"]))
@pytest.mark.parametrize("relays", cases([0], [2]))
def test_the_last_edition_evaluates_as_the_model_of_rank_0(shared: Cluster, job: str, mode: str, relays: int) -> None:
    with ExitStack() as stack:
        address = shared.address
        for _ in range(relays):
            address = stack.enter_context(relay(address)).address
        with shared.connect(mode, job=job) as session:
            trainer = NormTrainer(session)
            feed = stack.enter_context(ps.subscribe(address, job))
            model = feed.load(normed())
            first = evaluated(model)
            trainer.steps(5)
            wanted = trainer.evaluated()
        until(lambda: feed.ended, "the end")
        with feed.reading(model) as version:
            assert version == 5
            assert torch.equal(evaluated(model), wanted)
            assert not torch.allclose(first, wanted)
        assert feed.wait_for().buffers_version == 5


def test_buffers_that_change_after_the_last_step_come_too(shared: Cluster, job: str, always: None) -> None:
    with ps.subscribe(shared.address, job) as feed, shared.connect("sync", job=job) as session:
        trainer = NormTrainer(session)
        model = feed.load(normed())
        trainer.steps(2)
        session.unwrap(trainer.model).train()(torch.full((4, 6), 9.0))  # as torch.optim.swa_utils.update_bn does
        wanted = trainer.evaluated()
        session.close()
        until(lambda: feed.ended, "the end")
        with feed.reading(model):
            assert torch.equal(evaluated(model), wanted)
        assert feed.wait_for().buffers_version == 3


def test_buffers_come_while_the_job_trains_and_say_of_which_step_they_are(
    shared: Cluster, job: str, trainer: NormTrainer, always: None
) -> None:
    with ps.subscribe(shared.address, job) as feed:
        first = feed.wait_for()
        assert first.buffers_version == 0, "as the job began"
        seen = {0}

        def has_more() -> bool:
            trainer.steps(1)
            edition = feed.wait_for(trainer.session.clock)
            assert edition.buffers_version >= max(seen), "they never fall"
            seen.add(edition.buffers_version)
            for name in trainer.buffers[0]:  # one shard may have had nothing yet, while the other has
                step = version_of(edition.arrays, name)
                assert torch.equal(edition.tensor(name), trainer.buffers[step][name]), (name, step)
            return len(seen) > 3

        until(has_more, "buffers of three steps")
        assert torch.equal(first.tensor("1.running_mean"), torch.zeros(8)), "an edition does not change"


def version_of(arrays: EditionArrays, name: str) -> int:
    """The version of the one bucket that has a tensor."""
    contents = arrays.contents
    [index] = contents.tensors[name]
    [bucket] = [each.index for each in contents.buckets.values() if index in {part.parameter for part in each.slices}]
    return arrays.versions[bucket]


@pytest.mark.parametrize("mode", cases(["async", "sync"], ["ssp:2"]))
def test_buffers_are_those_of_rank_0_alone(shared: Cluster, job: str, mode: str, always: None) -> None:
    with ps.subscribe(shared.address, job) as feed:
        trainers = in_parallel(2, lambda rank: NormTrainer(shared.connect(mode, rank, 2, job=job)))
        try:
            feed.wait_for()
            in_parallel(2, lambda rank: trainers[rank].steps(4))
            wanted, others = (trainer.buffers[trainer.session.clock] for trainer in trainers)
        finally:
            in_parallel(2, lambda rank: trainers[rank].session.close())
        until(lambda: feed.ended, "the end")
        edition = feed.wait_for()
        assert all(torch.equal(edition.tensor(name), buffer) for name, buffer in wanted.items())
        assert not torch.equal(wanted["1.running_mean"], others["1.running_mean"])


def test_of_a_bucket_that_is_trained_or_of_an_earlier_step_nothing_is_told() -> None:
    job = running(workers=2)

    def tell(bucket: int, clock: int, value: int) -> None:
        content = payload(float(value)) if bucket in TRAINED else payload(torch.full((8,), value))
        pushed = PushedBucket(bucket, PushKind.INITIAL_VALUE)
        stage(job, PushCall(Identity("sums", 0, 1), clock, (pushed,), content))

    before = {index: job.buckets[index].weights.flat.clone() for index in (TRAINED[0], FROZEN)}
    for clock, value in ((0, 5), (7, 7), (3, 3), (7, 9)):
        for bucket in before:
            tell(bucket, clock, value)
    assert all(torch.equal(job.buckets[index].weights.flat, each) for index, each in before.items()), "for workers"
    trained, frozen = job.buckets[TRAINED[0]], job.buckets[FROZEN]
    version, values = frozen.shown()
    assert (version, frozen.reader_version, values.tolist()) == (7, 7, [7] * 8)
    assert (trained.shown()[0], trained.reader_version) == (0, 0)
    with pytest.raises(InvalidRequest, match="rank 0"):
        stage(
            job,
            PushCall(
                Identity("sums", 1, 2), 9, (PushedBucket(FROZEN, PushKind.INITIAL_VALUE),), payload(torch.full((8,), 1))
            ),
        )


def test_a_reader_that_shares_an_edition_gets_what_was_told_since_it_was_copied_for_another() -> None:
    """It may have had newer buffers than those of the copy: they never fall."""
    sharding = lone_shard(workers=1)
    job = sharding.jobs()["sums"]
    typed_bucket = as_typed(job.buckets[FROZEN].unit.spec, "float32")

    def tell(clock: int) -> None:
        pushed = (PushedBucket(FROZEN, PushKind.INITIAL_VALUE),)
        sharding.push(PushCall(Identity("sums", 0, 1), clock, pushed, payload(torch.full((8,), clock))))

    def asked(reader: Any) -> TakenEdition:
        wanted = WantedEdition(9, 0, frozenset({typed_bucket}))
        return JobSource(job).take(reader, wanted, lambda error: None, lambda: 0.0)

    tell(3)
    edition = asked("one")
    before = edition.copy(typed_bucket)
    tell(7)
    assert asked("another") is edition
    after = edition.copy(typed_bucket)
    assert (before.version, after.version) == (3, 7)
    assert (bytes(before.payload), bytes(after.payload)) == tuple(
        bytes_of(torch.full((8,), clock)).tobytes() for clock in (3, 7)
    )
    assert asked("a third") is edition
    assert edition.copy(typed_bucket) is after, "it is copied once"


class Told:
    """Stands for the connection of a worker in one place, and answers as it is told to."""

    def __init__(self, rank: int) -> None:
        self.place = SimpleNamespace(identity=Identity("sums", rank, 1))
        self.clock = 5
        self.error: Exception | None = None
        self.came: list[bytes] = []
        self.numbers: list[int] = []

    def tell(self, bucket: BucketSpec, number: int, payload: memoryview) -> Future[None]:
        answer: Future[None] = Future()
        self.came.append(bytes(payload))
        self.numbers.append(number)
        answer.set_exception(self.error) if self.error else answer.set_result(None)
        return answer


def test_what_has_not_changed_is_told_once_in_each_place_and_again_where_it_was_lost(always: None) -> None:
    frozen = bucket_layout(job_spec().parameters, 128).buckets[FROZEN]
    content = [b"first"]
    model: Any = SimpleNamespace(
        spec=job_spec(), layout=SimpleNamespace(held=[frozen]), initial=lambda bucket: memoryview(content[0])
    )
    connections = [Told(0)]
    telling = reader_buffers.ReaderBuffers(model, lambda: connections[-1])  # type: ignore[arg-type, return-value]
    changed = [frozen.slices[0].parameter]
    telling.stepped(list)
    assert connections[0].came == [], "as the job began"
    for _ in range(3):
        telling.stepped(lambda: changed)
    assert connections[0].came == [b"first"]
    content[0] = b"second"
    connections[0].error = TryLater("the shard is away")
    telling.stepped(lambda: changed)
    connections[0].error = None
    telling.stepped(lambda: changed)
    assert connections[0].came == [b"first", b"second", b"second"]
    assert connections[0].numbers == [5, 6, 7], "it has changed since that step was told"
    connections.append(Told(0))
    telling.stepped(lambda: changed, is_last=True)
    assert connections[1].came == [b"second"], "the shard may have been restored"
    connections.append(Told(1))
    telling.stepped(lambda: changed, is_last=True)
    assert connections[2].came == []


def test_buffers_that_a_shard_has_no_room_for_are_sent_again_ever_later_and_that_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = [100.0]
    monkeypatch.setattr(reader_buffers, "time", SimpleNamespace(monotonic=lambda: now[0]))
    frozen = bucket_layout(job_spec().parameters, 128).buckets[FROZEN]
    model: Any = SimpleNamespace(
        spec=job_spec(), layout=SimpleNamespace(held=[frozen]), initial=lambda bucket: memoryview(b"%f" % now[0])
    )
    connection = Told(0)
    telling = reader_buffers.ReaderBuffers(model, lambda: connection)  # type: ignore[arg-type, return-value]
    sent: list[float] = []

    def trained(seconds: int) -> list[float]:
        sent.clear()
        for _ in range(seconds):
            now[0] += 1.0
            before = len(connection.came)
            telling.stepped(lambda: [frozen.slices[0].parameter])
            if len(connection.came) > before:
                sent.append(now[0])
        return [after - before for before, after in pairwise(sent)]

    connection.error = LimitExceeded("no room for 64 bytes of buffers")
    with caplog.at_level("INFO", "ps_worker"):
        assert trained(200) == [2, 4, 8, 16, 32, 60, 60], "each takes bandwidth"
        assert [each.levelname for each in caplog.records] == ["WARNING"]
        connection.error = None
        assert trained(100)[-10:] == [1] * 10, "once there is room again"
        assert "over, after 8 times" in caplog.text


def cut_spec() -> JobSpec:
    """The job of `job_spec`, whose workers are groups of two processes that cut the second tensor."""
    first, second, buffer = job_spec().parameters
    pieces = [replace(second, shape=(2, 8), member=each, piece=PiecePlace((4, 8), (2 * each, 0))) for each in (0, 1)]
    return replace(job_spec(), parameters=(first, *pieces, buffer), group_size=2)


def test_where_groups_cut_parameters_their_first_member_tells_and_shards_keep_it(always: None) -> None:
    spec = cut_spec()
    validate(spec)
    [frozen] = [each for each in bucket_layout(spec.parameters, 128).buckets if each.frozen]
    model: Any = SimpleNamespace(
        spec=spec, layout=SimpleNamespace(held=[frozen]), initial=lambda bucket: memoryview(b"new")
    )
    connection = Told(0)
    telling = reader_buffers.ReaderBuffers(model, lambda: connection)  # type: ignore[arg-type, return-value]
    telling.stepped(lambda: [frozen.slices[0].parameter], is_last=True)
    assert connection.came == [b"new"]
    job = JobPartition(spec, range(frozen.index + 1))
    job.execute(AddWorker(0, 1, 0))
    for clock in (0, 7):
        pushed = (PushedBucket(frozen.index, PushKind.INITIAL_VALUE),)
        content = payload(torch.full((8,), clock))
        stage(job, PushCall(Identity("sums", 0, 1), clock, pushed, content))
    assert job.buckets[frozen.index].reader_version == 7
    assert job.buckets[frozen.index].weights.flat.tolist() == [0] * 8, "other workers begin with these"


def test_where_memory_has_no_room_readers_keep_the_buffers_that_they_have(monkeypatch: pytest.MonkeyPatch) -> None:
    sharding = lone_shard(workers=1)
    job = sharding.jobs()["sums"]

    def tell(clock: int) -> None:
        pushed = (PushedBucket(FROZEN, PushKind.INITIAL_VALUE),)
        sharding.push(PushCall(Identity("sums", 0, 1), clock, pushed, payload(torch.full((8,), clock))))

    size = job.buckets[FROZEN].unit.spec.nbytes
    tell(3)
    for free, clock, told in ((size - 1, 4, 3), (size, 5, 5)):
        monkeypatch.setattr("ps_server.shard.reader_room.free_bytes", lambda free=free: free + job.promised())
        with pytest.raises(LimitExceeded, match="no room for 64 bytes of buffers") if told < clock else nullcontext():
            tell(clock)
        assert job.buckets[FROZEN].unit.shown()[1].tolist() == [told] * 8
    monkeypatch.setattr("ps_server.shard.reader_room.free_bytes", lambda: 0)
    tell(4)  # it is older, and takes nothing
