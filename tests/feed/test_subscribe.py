"""A process that does not train has a job's weights as training has them, whatever happens to servers and itself."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import errno
import gc
import json
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

import ps_torch as ps
from ps_feed.edition_client import EachShard, KnownShards, ShardReader
from ps_protocol.changes import BucketDelta, encode_change
from ps_protocol.errors import Forbidden, InvalidRequest, NotFound, Unreachable, Unsupported
from ps_protocol.messages.editions import EditionCall, EditionMessage, WeightsAsked, read_edition_part
from ps_runtime.credentials import PLAINTEXT
from ps_server.shard.hosted_job import HostedJob
from ps_server.shard.shard import Shard
from ps_server.shard.weight_feeds import SIGN_SECONDS
from tests.tools.cases import cases
from tests.tools.cluster import TEST_SECONDS, Cluster, until
from tests.tools.followed_trainer import rebuilding_loss, relay
from tests.tools.forkserver import Nursery
from tests.tools.remembering_trainer import RememberingTrainer, in_background
from tests.tools.rollbacks import QUICK


class Model(nn.Module):
    """Some of each: tied parameters, one without elements, buffers, a frozen layer."""

    def __init__(self, width: int = 40) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.last = nn.Linear(20, width), nn.Linear(width, 20, bias=False)
        self.tied = nn.Linear(width, 20, bias=False)
        self.tied.weight = self.last.weight
        self.none = nn.Parameter(torch.empty(0, 3))
        self.frozen = nn.Linear(20, 4).requires_grad_(False)
        self.register_buffer("scale", torch.full((3,), 2.0))
        self.register_buffer("cache", torch.zeros(2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.first(x))) + self.tied(self.first(x))  # type: ignore[no-any-return]


class Trainer(RememberingTrainer[Model]):
    """Trains the model in a session with Adam."""

    def __init__(self, session: ps.Session, bucket_bytes: int = 1024) -> None:
        own = Model()
        optimizer = torch.optim.Adam([each for each in own.parameters() if each.requires_grad], lr=0.01)
        super().__init__(session, own, rebuilding_loss, optimizer, bucket_bytes=bucket_bytes)


@pytest.fixture
def trainer(shared: Cluster, job: str) -> Iterator[Trainer]:
    with shared.connect("sync", job=job) as session:
        yield Trainer(session)


@pytest.mark.parametrize("mode", cases(["sync", "local:2/2"], ["local:2"]))
def test_each_edition_is_the_weights_of_one_version_to_the_bit(shared: Cluster, job: str, mode: str) -> None:
    with shared.connect(mode, job=job) as session, ps.subscribe(shared.address, job) as feed:
        trainer = Trainer(session)
        editions: list[Any] = []
        reader = in_background(lambda: editions.extend(feed))
        until(lambda: bool(editions), "the first edition")
        for _ in range(5):
            last = trainer.steps(6)  # in local modes all are in the warm-up, whose rounds are of one step
            until(lambda: editions[-1].version == last, "the last edition")  # noqa: B023
        assert feed.behind == 0
        assert feed.trouble is None
        feed.close()
        reader.join()
    versions = [edition.version for edition in editions]
    assert versions == sorted(set(versions))
    assert len(versions) > 3
    for edition in editions:
        assert trainer.has(edition.state_dict(), edition.version)


@pytest.mark.parametrize(("mode", "quorum"), cases([("async", None), ("sync", "all-1")], [("ssp:1", None)]))
def test_where_workers_share_no_clock_the_newest_edition_is_the_weights_once_training_rests(
    shared: Cluster, job: str, mode: str, quorum: str | None
) -> None:
    with (
        ps.connect(shared.address, mode, job, elastic=True, quorum=quorum) as session,
        ps.subscribe(shared.address, job) as feed,
    ):
        trainer = Trainer(session)
        trainer.steps(20)
        edition = feed.wait_for(20)
        assert edition.version == 20
        assert trainer.has(edition.state_dict(), 20)
        assert feed.age < 60


def test_editions_have_versions_that_every_divides(
    shared: Cluster, job: str, trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ps_feed.subscription.IDLE_SECONDS", float("inf"))  # however slow this machine is
    with ps.subscribe(shared.address, job, every=8) as feed:
        first = feed.wait_for().version
        seen: list[int] = []
        reader = in_background(lambda: seen.extend(edition.version for edition in feed))
        for _ in range(2):
            before = feed.version
            until(lambda: trainer.steps(3) > 0 and feed.version > before, "another edition")  # noqa: B023
        feed.close()
        reader.join()
    assert first == 0
    assert feed.version >= 16
    assert [version for version in seen if version % 8] == []


@pytest.mark.parametrize("relays", [0, 1])
def test_between_two_editions_lies_the_period(
    shared: Cluster, job: str, trainer: Trainer, relays: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever is asked to keep it: the feed, or a relay for all of its readers."""
    monkeypatch.setattr("ps_feed.subscription.LOOK_SECONDS", 0.01)
    with contextlib.ExitStack() as stack:
        if relays:
            near = stack.enter_context(relay(shared.address, period=3600))
            feed = stack.enter_context(ps.subscribe(near.address, job))
        else:
            feed = stack.enter_context(ps.subscribe(shared.address, job, period=3600))
        feed.wait_for()
        following = near.relayed.followed()[0]._subscription if relays else feed._subscription
        trainer.steps(10)
        until(lambda: feed.behind == 10 or feed.version, "what the shards tell")
        assert (feed.version, following.received.editions) == (0, 1)
        following._due = 0.0  # as if it were over
        assert feed.wait_for(1).version == 10


def test_a_feed_that_has_missed_what_every_divides_gets_the_version_at_which_the_job_rests(
    shared: Cluster, job: str, trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_passed, pull = threading.Event(), ShardReader.pull

    def late(reader: ShardReader, call: EditionCall, *more: Any) -> None:
        assert call.version == 0 or has_passed.wait(60)
        pull(reader, call, *more)

    monkeypatch.setattr(ShardReader, "pull", late)
    with ps.subscribe(shared.address, job, every=8) as feed:
        feed.wait_for()
        trainer.steps(20)
        has_passed.set()
        edition = feed.wait_for(1)
        assert edition.version == 20
        assert trainer.has(edition.state_dict(), 20)


def test_readers_with_different_needs_follow_one_job(shared: Cluster, job: str, trainer: Trainer) -> None:
    trainer.step()
    with (
        ps.subscribe(shared.address, job) as whole,
        ps.subscribe(shared.address, job, wire="bfloat16") as narrow,
        ps.subscribe(shared.address, job, parameters=["first.bias", "scale"]) as part,
    ):
        trainer.steps(5)
        for feed in (whole, narrow, part):
            assert feed.wait_for(6).version == 6
        assert trainer.has(whole.state_dict(), 6)
        assert part.state_dict().keys() == {"first.bias", "scale"}
        assert torch.equal(part.state_dict()["first.bias"], trainer.past[6]["first.bias"])
        rounded = narrow.state_dict()
        assert rounded["first.weight"].dtype == torch.bfloat16
        assert torch.equal(rounded["first.weight"], trainer.past[6]["first.weight"].bfloat16())
        assert rounded["frozen.weight"].dtype == torch.float32, "what is not trained is sent once, as it is"
        with (
            ps.subscribe(shared.address, job, parameters=["nonsense"]) as wrong,
            pytest.raises(InvalidRequest, match=r"has no parameter nonsense; it has \d+, such as "),
        ):
            wrong.wait_for()


@pytest.mark.usefixtures("far")
@pytest.mark.parametrize("wire", cases(["bfloat16"], ["float32"]))
@pytest.mark.parametrize("mode", cases(["sync"], ["async"]))
def test_changes_give_the_same_bits_in_fewer_bytes(
    shared: Cluster, job: str, mode: str, wire: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stepping: set[threading.Thread] = set()
    computing: set[threading.Thread] = set()
    stepped = HostedJob.stepped

    def noted(*given: Any) -> None:
        stepping.add(threading.current_thread())
        stepped(*given)

    def encoded(*given: Any) -> BucketDelta | None:
        computing.add(threading.current_thread())
        return encode_change(*given)

    monkeypatch.setattr(HostedJob, "stepped", noted)
    monkeypatch.setattr("ps_server.shard.shared_changes.encode_change", encoded)
    with (
        shared.connect(mode, job=job) as session,
        ps.subscribe(shared.address, job, wire=wire, changes=True) as feed,
        ps.subscribe(shared.address, job, wire=wire, changes=False) as whole,
    ):
        trainer = Trainer(session)
        feed.wait_for()
        for step in range(1, 6):
            trainer.step()
            state = feed.wait_for(step).state_dict()
            expected = trainer.past[step]
            for name in ("first.weight", "last.weight", "scale"):
                is_cast = expected[name].dtype == torch.float32 and name != "scale"
                assert torch.equal(state[name], expected[name].to(getattr(torch, wire)) if is_cast else expected[name])
        whole.wait_for(5)
        received, others = feed._subscription.received, whole._subscription.received
    assert received.nbytes < received.elements
    assert others.nbytes == others.elements
    assert received.damaged == others.damaged == 0
    assert stepping
    assert computing
    assert not stepping & computing, "no thread that trains computes changes"


@pytest.mark.usefixtures("far")
def test_a_network_that_was_slow_is_measured_again(
    shared: Cluster, job: str, trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ps_feed.pace.CHANGES_BELOW", float("inf"))
    with ps.subscribe(shared.address, job) as feed:
        received = feed._subscription.received

        def saved() -> int:
            """Bytes that did not come of the next edition because only what changed did."""
            before = received.elements - received.nbytes  # before the step: its edition may be there when it returns
            step = trainer.step()
            assert trainer.has(feed.wait_for(step).state_dict(), step)
            return received.elements - received.nbytes - before

        feed.wait_for()
        assert saved() > 0
        monkeypatch.setattr("ps_feed.pace.CHANGES_BELOW", 0.0)
        assert saved() > 0, "it was slow a moment ago"
        feed._subscription._network.measured_until = 0.0
        # The next one may have been asked for before that.
        until(lambda: saved() == 0, "an edition that is asked for whole")
        assert saved() == 0, "it is fast now"
        monkeypatch.setattr("ps_feed.pace.CHANGES_BELOW", float("inf"))
        until(lambda: saved() > 0, "changes, because it is slow again")


@pytest.mark.usefixtures("far")
def test_whole_buckets_in_place_of_changes_do_not_put_off_that_the_network_is_measured_again(
    shared: Cluster, job: str, trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ps_feed.pace.CHANGES_BELOW", float("inf"))
    monkeypatch.setattr("ps_server.shard.shared_changes.encode_change", lambda *_: None)  # none is smaller
    with ps.subscribe(shared.address, job) as feed:
        feed.wait_for()
        until_then, received = feed._subscription._network.measured_until, feed._subscription.received
        for _ in range(3):
            feed.wait_for(trainer.step())
        assert received.nbytes == received.elements, "all came whole"
        assert received.editions == 4
        assert feed._subscription._network.measured_until == until_then


def test_a_server_that_says_it_has_more_shards_than_can_be_followed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each would take a connection and a thread."""
    known = KnownShards({0: "127.0.0.1:1"}, 2**32 - 1, frozenset({"job"}))
    monkeypatch.setattr("ps_feed.edition_client.cluster", lambda server, access: known)
    with pytest.raises(Unsupported, match="says that it has 4294967295 shards: expected 1024 at most"):
        EachShard("stranger:1", PLAINTEXT)


def test_the_error_of_calls_to_shards_is_that_of_the_shard_that_failed(shared: Cluster) -> None:
    """Not that of a call which was cancelled because of it, whichever shard comes first."""
    shards, is_cancelled = EachShard(shared.address, PLAINTEXT), threading.Event()

    def call(reader: ShardReader) -> None:
        if reader.index == 1:
            raise InvalidRequest("the checksum is another one")
        assert is_cancelled.wait(60)
        raise Unreachable("cancelled")

    shards.readers[0].cancel = is_cancelled.set  # type: ignore[method-assign]
    with contextlib.closing(shards), pytest.raises(InvalidRequest, match="checksum"):
        shards.all(call)


@pytest.mark.usefixtures("far")
def test_a_damaged_edition_is_dropped_and_asked_for_whole(
    shared: Cluster, job: str, trainer: Trainer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    spoilt: list[int] = []
    with ps.subscribe(shared.address, job, changes=True) as feed:
        feed.wait_for()

        def spoil(base: Any, new: Any, itemsize: int, sparse: bool) -> BucketDelta | None:
            spoilt.append(itemsize)
            return encode_change(base, bytes(len(new)), itemsize, sparse)

        monkeypatch.setattr("ps_server.shard.shared_changes.encode_change", spoil)
        trainer.step()
        assert trainer.has(feed.wait_for(1).state_dict(), 1)
        received = feed._subscription.received
    assert spoilt
    assert received.damaged == 1
    assert received.nbytes == received.elements
    assert "was damaged on the way: its checksum is another one" in caplog.text


def test_messages_that_can_never_be_read_end_the_wait_with_what_is_wrong(
    shared: Cluster, job: str, trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    came: list[Any] = []

    def newer(*message: Any) -> EditionMessage:
        came.append(message)
        if len(came) < 3:
            raise InvalidRequest("unknown wire format 'float4'")
        return read_edition_part(*message)

    monkeypatch.setattr("ps_feed.edition_client.read_edition_part", newer)
    with ps.subscribe(shared.address, job) as feed:
        assert feed.wait_for().version == 0, "it was asked for again"

    def unknown(*message: Any) -> EditionMessage:
        raise InvalidRequest("unknown wire format 'float4'")

    monkeypatch.setattr("ps_feed.edition_client.read_edition_part", unknown)
    with (
        ps.subscribe(shared.address, job) as feed,
        pytest.raises(InvalidRequest, match=r"3 times in a row a message .* unknown wire format 'float4'"),
    ):
        feed.wait_for(timeout=60)


@pytest.mark.usefixtures("far")
def test_after_a_trouble_no_edition_stays_in_memory_once_a_newer_one_is_there(
    shared: Cluster, job: str, trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def spoil(base: Any, new: Any, itemsize: int, sparse: bool) -> BucketDelta | None:
        return encode_change(base, bytes(len(new)), itemsize, sparse)

    with ps.subscribe(shared.address, job, changes=True) as feed:
        first = weakref.ref(feed.wait_for().arrays)
        monkeypatch.setattr("ps_server.shard.shared_changes.encode_change", spoil)
        trainer.step()
        feed.wait_for(1)
        assert feed._subscription.received.damaged == 1
        until(lambda: gc.collect() >= 0 and first() is None, "the end of the edition before")


def test_a_model_follows_training_and_does_not_change_while_it_is_read(
    shared: Cluster, job: str, trainer: Trainer
) -> None:
    with ps.subscribe(shared.address, job) as feed:
        model = feed.load(Model())
        x = torch.randn(3, 20)
        with feed.reading(model) as version:
            assert version == 0
            before = model(x)
            trainer.steps(3)
            feed.wait_for(3)
            with feed.reading(model) as nested:
                assert nested == 0, "it is in use"
            assert torch.equal(model(x), before)
        with feed.reading(model, max_behind=0) as version:
            assert version == 3
            assert torch.equal(model(x), trainer.model(x))
            assert model.tied.weight is model.last.weight


def test_max_behind_waits_for_those_who_read_an_old_version(shared: Cluster, job: str, trainer: Trainer) -> None:
    with ps.subscribe(shared.address, job) as feed:
        model = feed.load(Model())
        trainer.step()
        feed.wait_for(1)
        got: list[int] = []

        def read() -> None:
            with feed.reading(model, max_behind=0) as version:
                got.append(version)

        with feed.reading(model) as first:
            assert first == 1
            trainer.step()
            feed.wait_for(2)
            thread = in_background(read)
            with pytest.raises(Unreachable, match=r"version 1 is too old: 1 updates behind, more than 0"):
                feed.reading(model, max_behind=0, timeout=0.2).__enter__()
            assert not got
        thread.join()
        assert got == [2]


def test_what_others_told_since_makes_an_edition_old_also_where_no_newer_one_is_wanted(
    shared: Cluster, job: str, trainer: Trainer
) -> None:
    with ps.subscribe(shared.address, job, every=1000) as feed:
        feed.wait_for()
        trainer.steps(5)
        until(lambda: feed.behind == 5, "what the shards tell")
        until(lambda: feed.age > 4 * SIGN_SECONDS, "its age")


def test_a_model_of_another_type_gets_the_weights_in_its_own(shared: Cluster, job: str, trainer: Trainer) -> None:
    trainer.step()
    with ps.subscribe(shared.address, job) as feed:
        feed.wait_for(1)
        model = feed.load(Model().to(torch.float64))
        assert torch.equal(model.first.weight, trainer.past[1]["first.weight"].double())


def test_names_of_the_model_may_be_others(shared: Cluster, job: str, trainer: Trainer) -> None:
    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Model()

    for names in (lambda name: name.removeprefix("inner."), {f"inner.{name}": name for name in Model().state_dict()}):
        with ps.subscribe(shared.address, job, names=names) as feed:  # type: ignore[arg-type]
            model = feed.load(Wrapped())
            assert torch.equal(model.inner.first.weight, trainer.past[0]["first.weight"])


def test_a_tensor_of_the_model_may_be_made_of_others(shared: Cluster, job: str, trainer: Trainer) -> None:
    class Fused(nn.Module):
        """What an engine makes of the model: some joined, split, transposed, and one that is not tied."""

        def __init__(self, width: int = 44) -> None:
            super().__init__()
            self.joined = nn.Parameter(torch.zeros(width, 20))
            self.bias = nn.Parameter(torch.zeros(20))
            self.last, self.tied = nn.Linear(20, 40, bias=False), nn.Linear(40, 20, bias=False)
            self.rest = nn.ParameterDict({"bias": torch.zeros(20), "frozen": torch.zeros(4), "none": torch.empty(0, 3)})
            self.register_buffer("scale", torch.zeros(3))

    own = ps.MadeOf
    names = {
        "joined": own(["first.weight", "frozen.weight"]),
        "bias": own("first.bias", lambda both: both.chunk(2)[0]),
        "rest.bias": own("first.bias", lambda both: both.chunk(2)[1]),
        "last.weight": own("last.weight", torch.t),
        "tied.weight": "last.weight",
        "rest.frozen": "frozen.bias",
        "rest.none": "none",
    }
    with ps.subscribe(shared.address, job, names=names) as feed:
        model = feed.load(Fused())
        trainer.step()
        feed.wait_for(1)
        with feed.reading(model, max_behind=0):
            new = trainer.past[1]
            assert torch.equal(model.joined, torch.cat((new["first.weight"], new["frozen.weight"])))
            assert torch.equal(torch.cat((model.bias, model.rest["bias"])), new["first.bias"])
            assert torch.equal(model.last.weight, new["last.weight"].t())
            assert torch.equal(model.tied.weight, new["last.weight"])
            assert not torch.equal(new["last.weight"], trainer.past[0]["last.weight"])
        with pytest.raises(InvalidRequest, match=r"the shapes differ of joined \[45, 20\] for \[44, 20\]"):
            feed.load(Fused(45))
    for of, message in (
        (
            ["first.weight", "frozen.weight", "frozen.bias"],
            r"joined, which cannot be made of first.weight, frozen.weight",
        ),
        (["first.weight", "other"], "the job has no other"),
    ):
        with (
            ps.subscribe(shared.address, job, names=names | {"joined": own(of)}) as feed,
            pytest.raises(InvalidRequest, match=message),
        ):
            feed.load(Fused())


class Adapted(nn.Module):
    """A model with an adapter, of which the job has the whole and a feed a part."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.adapter = nn.Linear(3, 3), nn.Linear(20, 40)
        self.register_buffer("scale", torch.zeros(3))


def test_a_part_of_the_job_is_loaded_into_a_larger_model_whose_rest_stays(
    shared: Cluster, job: str, trainer: Trainer
) -> None:
    names = {"adapter.weight": "first.weight", "adapter.bias": "first.bias"}
    with ps.subscribe(shared.address, job, parameters=[*names.values()], names=names) as feed:
        model = Adapted()
        before = copy.deepcopy(model.state_dict())
        kept = {name: each.data_ptr() for name, each in model.state_dict().items() if name not in names}
        assert feed.load(model) is model
        feed.wait_for(trainer.step())
        with feed.reading(model, max_behind=0):
            state = model.state_dict()
            assert all(torch.equal(state[name], trainer.past[1][own]) for name, own in names.items())
            assert {name: each.data_ptr() for name, each in state.items() if name not in names} == kept
            assert all(torch.equal(state[name], before[name]) for name in kept)
        stage = feed.load(nn.ModuleDict({"adapter": nn.Linear(20, 40)}))
        assert torch.equal(stage["adapter"].bias, trainer.past[1]["first.bias"])


@pytest.mark.parametrize(
    ("parameters", "names", "message"),
    [
        (
            ["first.weight", "last.weight", "frozen.bias", "frozen.weight", "scale"],
            {"adapter.weight": "first.weight"},
            r"the model has no last.weight, frozen.weight, frozen.bias$",
        ),
        (["cache", "scale"], None, "the model has no cache$"),
        (
            ["first.weight"],
            {"adapter.weight": ps.MadeOf(["first.weight", "frozen.weight"])},
            "`parameters` lack frozen.weight$",
        ),
        (["first.bias"], {"adapter.bias": "first.bias", "base.bias": "first.bias"}, r"base.bias \[3\] for \[40\]$"),
    ],
    ids=["names", "a buffer", "a part of a tensor", "shape"],
)
def test_a_model_that_does_not_fit_a_part_is_left_as_it_is(
    shared: Cluster, job: str, trainer: Trainer, parameters: list[str], names: Any, message: str
) -> None:
    model = Adapted()
    before = copy.deepcopy(model.state_dict())
    with (
        ps.subscribe(shared.address, job, parameters=parameters, names=names) as feed,
        pytest.raises(InvalidRequest, match=message),
    ):
        feed.load(model)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def differ_in_all(model: nn.Module) -> None:
    model.more, model.first = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)), nn.Linear(20, 7)
    del model.frozen


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda model: setattr(model, "more", nn.Linear(1, 1)), "the job has no more.weight, more.bias"),
        (lambda model: delattr(model, "frozen"), "the model has no frozen.weight, frozen.bias"),
        (lambda model: setattr(model, "first", nn.Linear(20, 7)), r"differ of first.weight \[7, 20\] for \[40, 20\]"),
        (
            differ_in_all,
            r"job '\S+': the job has no more.0.weight, more.0.bias, more.1.weight and 1 more; the model has no "
            r"frozen.weight, frozen.bias; the shapes differ of first.weight \[7, 20\] for \[40, 20\], first.bias",
        ),
    ],
    ids=["more", "less", "shape", "all of it"],
)
def test_a_model_that_does_not_fit_is_left_as_it_is(
    shared: Cluster, job: str, trainer: Trainer, change: Callable[[nn.Module], None], message: str
) -> None:
    model = Model()
    change(model)
    before = copy.deepcopy(model.state_dict())
    with ps.subscribe(shared.address, job) as feed:
        with pytest.raises(InvalidRequest, match=message):
            feed.load(model)
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        with pytest.raises(InvalidRequest, match="this model was not loaded"):
            feed.reading(model).__enter__()


def test_an_edition_is_saved_whole_with_what_it_is(shared: Cluster, job: str, trainer: Trainer, tmp_path: Path) -> None:
    trainer.steps(2)
    with ps.subscribe(shared.address, job) as feed:
        feed.wait_for(2)
        assert feed.save(tmp_path / "model.safetensors") == 2
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
    assert trainer.has(load_file(tmp_path / "model.safetensors"), 2)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        about = file.metadata()
    assert (about["job"], about["version"], len(about["run"])) == (job, "2", 16)


@pytest.mark.parametrize("most", [None, 4000])
def test_a_save_that_fails_leaves_what_was_there(
    shared: Cluster, job: str, trainer: Trainer, tmp_path: Path, most: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[Path] = []

    def until_it_is_full(tensors: dict[str, torch.Tensor], file: Path, about: dict[str, str]) -> None:
        save_file(tensors, file, about)
        written.append(file)
        if len(written) == (1 if most is None else 2):  # of several files one is there already
            os.truncate(file, 100)
            raise OSError(errno.ENOSPC, "No space left on device")

    def found() -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    path = tmp_path / "model.safetensors" if most is None else tmp_path
    with ps.subscribe(shared.address, job) as feed:
        feed.save(path, most)
        before = found()
        feed.wait_for(trainer.step())
        monkeypatch.setattr("safetensors.torch.save_file", until_it_is_full)
        with pytest.raises(OSError, match="No space left on device"):
            feed.save(path, most)
    assert found() == before


@pytest.mark.parametrize("most", [None, 4000])
def test_an_edition_is_saved_under_the_names_of_another_model(
    shared: Cluster, job: str, trainer: Trainer, tmp_path: Path, most: int | None
) -> None:
    """As an engine has them: what is made of others has their place, and what is not mentioned keeps its name."""
    names: dict[str, str | ps.MadeOf] = {
        "joined": ps.MadeOf(["first.weight", "frozen.weight"]),
        "up": ps.MadeOf("first.bias", lambda both: both.chunk(2)[0]),
        "down": ps.MadeOf("first.bias", lambda both: both.chunk(2)[1]),
        "turned": ps.MadeOf("last.weight", torch.t),
        "head": "last.weight",
    }
    path = tmp_path / "model.safetensors" if most is None else tmp_path
    with ps.subscribe(shared.address, job) as feed:
        feed.save(path, most, names=names)
        had = feed.state_dict()
        for wrong, said in (
            ({"x": "other"}, "has no other, of which others are to be made"),
            ({"scale": "none"}, "has scale, which is also to be made of others"),
        ):
            with pytest.raises(InvalidRequest, match=said):
                feed.state_dict(names=wrong)
    files = [path] if most is None else sorted(tmp_path.glob("model-*.safetensors"))
    saved = {name: tensor for file in files for name, tensor in load_file(file).items()}
    own = {name: had[name] for name in had if name.partition(".")[0] not in ("first", "last", "tied")}
    del own["frozen.weight"]
    made = {
        "joined": torch.cat((had["first.weight"], had["frozen.weight"])),
        "up": had["first.bias"][:20],
        "down": had["first.bias"][20:],
        "turned": had["last.weight"].t(),
        "head": had["last.weight"],
    }
    assert saved.keys() == own.keys() | made.keys()
    assert all(torch.equal(saved[name], tensor) for name, tensor in {**own, **made}.items())


def test_an_edition_is_saved_in_parts_with_an_index(
    shared: Cluster, job: str, trainer: Trainer, tmp_path: Path
) -> None:
    def loaded() -> dict[str, torch.Tensor]:
        """As transformers and others load it: by the index."""
        index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
        files = {file: load_file(tmp_path / file) for file in index["weight_map"].values()}
        assert index["metadata"]["total_size"] == sum(each.nbytes for part in files.values() for each in part.values())
        assert all(
            part.keys() == {n for n, f in index["weight_map"].items() if f == file} for file, part in files.items()
        )
        return {name: files[file][name] for name, file in index["weight_map"].items()}

    def parts() -> set[str]:
        return {path.name for path in tmp_path.glob("*.safetensors")}

    (tmp_path / "config.json").write_text("{}")
    with ps.subscribe(shared.address, job) as feed:
        for step in range(4):
            version = feed.save(tmp_path, max_shard_bytes=4000)
            assert version == step
            assert trainer.has(loaded(), step)
            trainer.step()
            feed.wait_for(step + 1)
        sizes = [path.stat().st_size for path in tmp_path.glob("*.safetensors")]
        assert max(sizes) < 5000
        assert len(sizes) == 2 * 2, "two versions: the newest, and the one before for those who load it"
        assert not [*tmp_path.glob("*.tmp")]
        assert (tmp_path / "config.json").exists()
        before = parts()
        with pytest.raises(InvalidRequest, match="max_shard_bytes must be from 1, got 0"):
            feed.save(tmp_path, max_shard_bytes=0)
        (tmp_path / "model.safetensors").touch()
        with pytest.raises(InvalidRequest, match=r"has a model.safetensors, which would be loaded in place of"):
            feed.save(tmp_path, max_shard_bytes=4000)
        assert parts() - {"model.safetensors"} == before


def test_a_feed_may_come_before_the_job_and_ends_with_it(shared: Cluster, job: str) -> None:
    with ps.subscribe(shared.address, job) as feed:
        until(lambda: isinstance(feed.trouble, NotFound), "the trouble")
        with pytest.raises(Unreachable, match=f"knows no job '{job}'"):
            feed.wait_for(timeout=0.1)
        with shared.connect("sync", job=job) as session:
            trainer = Trainer(session)
            trainer.step()
            edition = feed.wait_for(1)
        until(lambda: feed.ended, "the end")
        with pytest.raises(NotFound, match=r"has ended at version 1"):
            feed.wait_for(2)
        model = feed.load(Model())
        feed._subscription._announced = 5  # an update that was told of, and came into no edition
        with pytest.raises(NotFound, match=r"has ended: version 1 is the newest there is, and 4 updates older than"):
            feed.reading(model, max_behind=3).__enter__()
        with feed.reading(model, max_behind=4) as version:
            assert version == 1
        assert [each.version for each in feed] == [1], "the newest stays"
        assert trainer.has(edition.state_dict(), 1)


@pytest.mark.parametrize("mode", cases(["sync", "async"], ["local:2/2"]))
def test_readers_get_the_weights_that_rank_0_saves_whatever_versions_they_want(
    shared: Cluster, job: str, mode: str
) -> None:
    with (
        ps.subscribe(shared.address, job, every=1000) as rare,
        ps.subscribe(shared.address, job, period=3600, wire="bfloat16") as slow,
        ps.subscribe(shared.address, job) as newest,
    ):
        with shared.connect(mode, job=job) as session:
            trainer = Trainer(session)
            trainer.step()
            for feed in (rare, slow, newest):
                feed.wait_for()
            seen: list[int] = []
            reader = in_background(lambda: seen.extend(edition.version for edition in rare))
            saved = trainer.steps(7)
        for feed in (rare, slow, newest):
            assert feed.wait_for(saved).version == saved
            until(lambda: feed.ended, "the end")  # noqa: B023
            assert feed.behind == 0
        reader.join()
        assert seen[-1] == saved
        assert trainer.has(rare.state_dict(), saved)
        assert trainer.has(newest.state_dict(), saved)
        rounded = slow.state_dict()["first.weight"]
        assert torch.equal(rounded, trainer.past[saved]["first.weight"].bfloat16())


def test_a_rollback_is_told_and_only_then_a_version_falls(tmp_path: Path) -> None:
    running = Cluster(checkpoint_dir=tmp_path, timing=QUICK)
    try:
        with running.connect("sync") as session, ps.subscribe(running.address) as feed:
            trainer = Trainer(session)
            trainer.steps(3)
            asked = in_background(lambda: running.coordinator.job("default").checkpoint())
            while asked.is_alive():
                trainer.step()
            asked.join()
            last = trainer.steps(5)
            feed.wait_for(last)
            model, copied = feed.load(Model()), feed.load(Model().double())
            assert feed.restores == 0
            with feed.reading(model):
                running.start_again(1)
                trainer.step()
                until(lambda: feed.restores == 1, "the rollback")
                with pytest.raises(Unreachable, match="too old: the job has left these weights, for a checkpoint or"):
                    feed.reading(model, max_behind=10**6, timeout=0.1).__enter__()
            edition = feed.wait_for(session.clock)
            assert feed.trouble is None
            assert trainer.has(edition.state_dict(), edition.version)
            trainer.steps(last - session.clock)
            feed.wait_for(last)
            with feed.reading(model) as version:  # as high as before the rollback, and other weights
                assert version == last
                assert torch.equal(model.first.weight, trainer.past[last]["first.weight"])
            with feed.reading(copied, max_behind=0) as version:
                assert version == last
                assert torch.equal(copied.first.weight, trainer.past[last]["first.weight"].double())
    finally:
        running.stop()


def test_a_reader_that_was_slow_to_enter_puts_no_older_weights_in(
    shared: Cluster, job: str, trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ps.subscribe(shared.address, job) as feed:
        model = feed.load(Model())
        slow, wait_for = [feed.wait_for(trainer.step())], feed.wait_for

        def overtaken(version: int = 0, timeout: float = 60.0) -> Any:
            if not slow:
                return wait_for(version, timeout)
            newest = slow.pop()
            feed.wait_for(trainer.step())
            with feed.reading(model) as version:
                assert version == 2
            return newest

        monkeypatch.setattr(feed, "wait_for", overtaken)
        with feed.reading(model) as version:
            assert version == 2


def test_weights_that_the_job_has_left_are_of_no_version_that_somebody_waits_for(
    shared: Cluster, job: str, trainer: Trainer
) -> None:
    """An engine that asks for so many updates of the new run must not get more of the old one."""
    trainer.steps(3)
    with ps.subscribe(shared.address, job, every=1000) as feed:
        arrays = feed.wait_for(3).arrays
        until(lambda: feed._subscription._asked_for == 1000, "its wish for the next")
        feed._subscription._series = arrays.run, arrays.timeline + 1  # as it hears before the first new edition
        with pytest.raises(Unreachable, match="it has left version 3, for a checkpoint or another run"):
            feed.wait_for(2, timeout=0.1)
        assert feed.wait_for().version == 3, "they stay readable"


def test_a_reader_that_waits_for_a_version_far_away_holds_up_no_other(
    shared: Cluster, job: str, trainer: Trainer
) -> None:
    with (
        ps.subscribe(shared.address, job, every=1000) as rare,
        ps.subscribe(shared.address, job) as feed,
    ):
        rare.wait_for()
        until(lambda: any(1000 in each.describe(job) for each in _Versions.of(shared)), "its wish for version 1000")
        for step in range(1, 12):
            trainer.step()
            assert feed.wait_for(step).version == step
        with ps.subscribe(shared.address, job) as late:
            assert late.wait_for().version == 11


class _Versions:
    """The versions of editions that a shard has, or that somebody waits for there."""

    def __init__(self, shard: Shard) -> None:
        self._shard = shard

    @classmethod
    def of(cls, cluster: Cluster) -> list[_Versions]:
        return [cls(shard) for shard in cluster.shards]

    def describe(self, job: str) -> tuple[int, ...]:
        return self._shard.weight_feeds.describe(WeightsAsked(job)).editions


@pytest.mark.usefixtures("far")
def test_what_is_never_trained_comes_once(shared: Cluster, job: str, trainer: Trainer) -> None:
    with (
        ps.subscribe(shared.address, job, parameters=["frozen.weight", "scale"]) as frozen,
        ps.subscribe(shared.address, job, parameters=["frozen.weight", "first.bias"], changes=False) as both,
    ):
        frozen.wait_for()
        both.wait_for()
        for step in range(1, 4):
            trainer.step()
            both.wait_for(step)
        contents, received = both.wait_for().arrays.contents, both._subscription.received
        trained = sum(contents.size(bucket) for bucket in contents.buckets.values() if not bucket.frozen)
        assert received.nbytes == contents.nbytes + (received.editions - 1) * trained
        assert trained < contents.nbytes
        assert frozen._subscription.received.editions == 1
        for feed in (frozen, both):
            assert torch.equal(feed.state_dict()["frozen.weight"], trainer.past[0]["frozen.weight"])
        with pytest.raises(Unreachable, match="it is at 0"):
            frozen.wait_for(1, timeout=0.1)


def test_a_feed_that_is_closed_says_so_where_newer_weights_are_asked_for(
    shared: Cluster, job: str, trainer: Trainer
) -> None:
    with ps.subscribe(shared.address, job) as feed:
        model = feed.load(Model())
        trainer.step()
        feed.wait_for(1)
        with feed.reading(model, max_behind=0) as version:
            assert version == 1
    with feed.reading(model) as version:
        assert version == 1, "what was there stays"


def test_coroutines_read_as_threads_do(shared: Cluster, job: str, trainer: Trainer) -> None:
    async def follow() -> tuple[list[Any], list[int]]:
        seen: list[Any] = []
        async with ps.subscribe(shared.address, job) as feed:
            model = await asyncio.to_thread(feed.load, Model())

            async def iterate() -> None:
                async for edition in feed:
                    seen.append(edition)

            task = asyncio.create_task(iterate())
            await asyncio.to_thread(trainer.steps, 3)
            await asyncio.to_thread(feed.wait_for, 3)
            async with feed.reading_async(model, max_behind=0) as version:
                before = model.first.weight
                await asyncio.to_thread(trainer.step)
                await asyncio.to_thread(feed.wait_for, 4)
                assert model.first.weight is before
            versions = [version, await _read(feed, model)]
            await asyncio.to_thread(until, lambda: seen[-1].version == 4)
        await task
        return seen, versions

    async def _read(feed: ps.WeightFeed, model: Model) -> int:
        async with feed.reading_async(model, max_behind=0) as version:
            assert torch.equal(model.first.weight, trainer.past[version]["first.weight"])
            return version

    async def told() -> None:
        async with ps.subscribe(shared.address, job, parameters=["nonsense"]) as feed:
            async for _ in feed:
                pass

    editions, versions = asyncio.run(asyncio.wait_for(follow(), 60))
    seen = [edition.version for edition in editions]
    assert seen == sorted(set(seen))
    assert seen[-1] == 4
    # Only now: an edition may be here before the trainer has noted its weights.
    assert all(trainer.has(edition.state_dict(), edition.version) for edition in editions)
    assert versions == [3, 4]
    with pytest.raises(InvalidRequest, match="has no parameter nonsense"):
        asyncio.run(asyncio.wait_for(told(), 60))


def test_a_coroutine_that_is_cancelled_while_it_waits_leaves_no_reader(
    shared: Cluster, job: str, trainer: Trainer
) -> None:
    async def follow() -> int:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))  # so that what came before is over
        async with ps.subscribe(shared.address, job) as feed:
            model = await asyncio.to_thread(feed.load, Model())
            loaded, begun, entered = feed._models[model], asyncio.Event(), asyncio.Event()

            async def read() -> None:
                begun.set()
                async with feed.reading_async(model, max_behind=0):
                    entered.set()

            async def cancelled(task: asyncio.Task[None]) -> None:
                await begun.wait()
                begun.clear()
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task

            with feed.reading(model):  # which keeps `read` waiting
                await asyncio.to_thread(trainer.step)
                await asyncio.to_thread(feed.wait_for, 1)
                await cancelled(asyncio.create_task(read()))
            with loaded.changed:  # which keeps the thread that enters waiting
                await cancelled(asyncio.create_task(read()))
            await asyncio.to_thread(trainer.step)
            await asyncio.to_thread(feed.wait_for, 2)
            assert loaded.readers == 0
            assert not entered.is_set()
            async with feed.reading_async(model, max_behind=0) as version:
                return version

    assert asyncio.run(asyncio.wait_for(follow(), 60)) == 2


def test_coroutines_that_wait_for_a_reader_to_leave_keep_no_thread_from_it(
    shared: Cluster, job: str, trainer: Trainer
) -> None:
    async def follow() -> set[int]:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(2))
        async with ps.subscribe(shared.address, job) as feed:
            model = await asyncio.to_thread(feed.load, Model())

            begun: asyncio.Queue[None] = asyncio.Queue()

            async def read() -> int:
                begun.put_nowait(None)
                async with feed.reading_async(model, max_behind=0) as version:
                    return version

            async with feed.reading_async(model):
                await asyncio.to_thread(trainer.step)
                await asyncio.to_thread(feed.wait_for, 1)
                waiting = [asyncio.create_task(read()) for _ in range(8)]
                for _ in waiting:
                    await begun.get()
                for _ in range(3):  # the first may be ahead of them
                    await asyncio.to_thread(model, torch.zeros(1, 20))
                assert not any(task.done() for task in waiting)
            return set(await asyncio.gather(*waiting))

    assert asyncio.run(asyncio.wait_for(follow(), 60)) == {1}


def test_a_model_without_memory_is_refused(shared: Cluster, job: str, trainer: Trainer) -> None:
    with (
        ps.subscribe(shared.address, job) as feed,
        torch.device("meta"),
        pytest.raises(InvalidRequest, match="is on the meta device"),
    ):
        feed.load(Model())


def test_a_model_that_is_loaded_again_does_not_change_under_its_readers(
    shared: Cluster, job: str, trainer: Trainer
) -> None:
    with ps.subscribe(shared.address, job) as feed:
        model = feed.load(Model())
        with feed.reading(model):
            before = model.first.weight
            trainer.step()
            feed.wait_for(1)
            assert feed.load(model).first.weight is before
            assert torch.equal(before, trainer.past[0]["first.weight"])


def test_a_script_ends_with_a_feed_that_it_left_open(
    shared: Cluster, job: str, trainer: Trainer, nursery: Nursery, tmp_path: Path
) -> None:
    script, log = tmp_path / "script.py", tmp_path / "log"
    script.write_text("import sys, ps_torch\nprint(ps_torch.subscribe(sys.argv[1], sys.argv[2]).wait_for().version)\n")
    ran = nursery.run(script, [shared.address, job], log, finalizes=True)
    assert (ran.wait(TEST_SECONDS), log.read_text()) == (0, "0\n")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"every": 0}, "every must be a number of updates from 1, got 0"),
        ({"every": 2.5}, "every must be a number of updates from 1, got 2.5"),
        ({"every": "8"}, "every must be a number of updates from 1, got '8'"),
        ({"period": "8"}, "period must be 0 to 3600 seconds, got '8'"),
        ({"wire": "int8"}, "wire must be one of float32, bfloat16, float16, got 'int8'"),
        ({"period": -1.0}, "period must be 0 to 3600 seconds, got -1"),
        ({"server": None}, "a feed needs a server"),
    ],
    ids=str,
)
def test_bad_settings_are_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        ps.subscribe(**({"server": "127.0.0.1:1"} | wrong))


def test_settings_may_be_numbers_of_numpy() -> None:
    with ps.subscribe("127.0.0.1:1", every=np.int64(8), period=np.float32(0.5)) as feed:
        assert feed.version == -1
    with pytest.raises(InvalidRequest, match="every must be a number of updates from 1, got 0"):
        ps.subscribe("127.0.0.1:1", every=np.int64(0))


def test_a_feed_that_may_not_read_says_so(tmp_path: Path) -> None:
    secret = "0123456789abcdef" * 2
    for name, text in (("tokens", f"worker:own {secret}\ncluster {secret[::-1]}\n"), ("own", secret)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o600)
    running = Cluster(shards=1, tokens=tmp_path / "tokens")
    try:
        with (
            ps.subscribe(running.address, "other", token_file=str(tmp_path / "own")) as feed,
            pytest.raises(Forbidden),
        ):
            feed.wait_for()
    finally:
        running.stop()
