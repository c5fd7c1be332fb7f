"""An exchange that differs from the one before in its clock and its hyper-parameters alone is checked once, for as long
as what it was checked with stays the same. Whether its worker may make it is asked each time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from ps_protocol.errors import (
    Backlogged,
    Fenced,
    InvalidRequest,
    LimitExceeded,
    NonFiniteGradient,
    NotFound,
    PSError,
    TryLater,
    UnknownWorker,
)
from ps_protocol.identity import Identity
from ps_protocol.layout import bucket_layout
from ps_protocol.messages.data import PullCall, PushCall, PushedBucket, PushKind
from ps_protocol.segment_layout import SegmentMap, segment_plan
from ps_protocol.stage_spec import StageSpec
from ps_runtime.settings import DEFAULT_SHARED_DIRECTORY
from ps_server.core.commands import StageGradient
from ps_server.shard.pulls import Pulls
from ps_server.shard.pushes import Checked
from ps_server.shard.shard import Shard
from ps_worker import Session
from ps_worker.cluster.local_segment import LocalSegment
from tests.tools.cases import crossed
from tests.tools.cluster import Cluster
from tests.tools.frame_client import clocks_read
from tests.tools.outbox import Answers
from tests.tools.partitions import job_spec, lone_shard, push

RANK, INCARNATION = 0, 1
BYTES = 2 * 128  # of the gradients of a step


class Sharing:
    """A worker whose gradients and weights lie in a segment. finite: it says that it has looked at its gradients"""

    def __init__(self, shard: Shard, finite: bool = True, rank: int = RANK) -> None:
        self.shard, self.finite = shard, finite
        self.worker = Identity("sums", rank, rank + 1)
        self.checked = Checked()
        self.attach()

    def attach(self) -> None:
        spec = job_spec()
        plan = segment_plan(bucket_layout(spec.parameters, spec.bucket_bytes))
        segment = LocalSegment(plan.size, DEFAULT_SHARED_DIRECTORY)
        self.memory = SegmentMap(segment.memory, plan)
        self.shard.attach(self.worker, segment.offer)
        segment.hide()

    def begin(self, clock: int, gradient: float = 1.0, caller: str = "them", **other: Any) -> Answers:
        """Pushes the same gradient for both buckets at a clock, as the call before but for that; `other`: fields of
        the push."""
        self.memory.gradients["float32"][:] = gradient
        buckets = tuple(PushedBucket(index, PushKind.GRADIENT, finite=self.finite) for index in (0, 1))
        call = replace(PushCall(self.worker, clock, buckets, None), **other)
        outbox = Answers()
        self.shard.exchange(call, PullCall(call.worker, clock, (0, 1), True), outbox, caller, self.checked)
        return outbox

    def exchange(self, clock: int, gradient: float = 1.0, caller: str = "them", **other: Any) -> list[float]:
        """As `begin`. Returns the first weight of each bucket."""
        outbox = self.begin(clock, gradient, caller, **other)
        if outbox.error is not None:
            raise outbox.error
        return self.weights()

    def weights(self) -> list[float]:
        """The first weight of each bucket."""
        return [self.memory.weights["float32"][first].item() for first in (0, 32)]

    @property
    def is_checked(self) -> bool:
        return self.checked.job is self.shard.jobs()["sums"]


@pytest.fixture
def sharing() -> Sharing:
    made = Sharing(lone_shard("sync", 1))
    assert made.exchange(1) == [-1.0, -1.0]
    assert made.is_checked
    return made


def test_each_step_has_the_gradient_of_its_own_time(sharing: Sharing) -> None:
    assert sharing.exchange(2, 3.0) == [-4.0, -4.0]
    assert sharing.exchange(3, -4.0) == [0.0, 0.0]
    commands = [command for command, _ in sharing.checked.made[1]]
    assert [type(command) for command in commands] == [StageGradient] * 2
    assert {command.clock for command in commands} == {1}, "they were made with the first call"


def test_a_step_that_comes_twice_counts_once(sharing: Sharing) -> None:
    assert [sharing.exchange(2) for _ in range(2)] == [[-2.0, -2.0]] * 2


@pytest.mark.parametrize(
    ("finite", "norm_limit", "bad", "error"),
    [(False, math.inf, math.nan, NonFiniteGradient), (True, 100.0, 1000.0, LimitExceeded)],
    ids=["its worker has not looked", "a limit of the norm"],
)
def test_gradients_at_which_the_shard_looks_are_looked_at_each_time(
    finite: bool, norm_limit: float, bad: float, error: type[PSError]
) -> None:
    sharing = Sharing(lone_shard("sync", 1, norm_limit=norm_limit), finite)
    assert sharing.exchange(1) == [-1.0, -1.0]
    assert not sharing.is_checked
    with pytest.raises(error):
        sharing.exchange(2, bad)
    assert sharing.exchange(2) == [-2.0, -2.0]


def test_an_exchange_is_checked_each_time_that_names_groups_of_no_bucket_in_it(sharing: Sharing) -> None:
    """Nobody has looked at them: there may be any number."""
    sharing.checked = Checked()
    sharing.exchange(2, buckets=(), groups={7: {"lr": 0.5}})
    assert sharing.checked.job is None
    sharing.exchange(2)
    assert sharing.is_checked


def test_what_was_checked_is_staged_for_the_worker_that_calls() -> None:
    shard = lone_shard("sync", 2)
    first, second = Sharing(shard, rank=0), Sharing(shard, rank=1)
    first.exchange(1)
    [job] = shard.jobs().values()
    call = PushCall(second.worker, 1, (PushedBucket(0, PushKind.GRADIENT, finite=True),), None)
    made = first.checked.commands_of(job, call, "them", first.checked.segment)
    assert {command.worker for command, _ in made} == {second.worker}


def test_each_step_has_the_hyper_parameters_of_its_own_time(sharing: Sharing) -> None:
    assert sharing.exchange(2, groups={0: {"lr": 0.5}}) == [-1.5, -1.5]
    assert sharing.exchange(3, groups={0: {"lr": 0.25}}) == [-1.75, -1.75]
    assert sharing.exchange(4, groups={0: {"momentum": 0.0}}) == [-2.0, -2.0], "what is left out stays as it was"
    assert sharing.exchange(5, groups={0: {"lr": 1.0}}) == [-3.0, -3.0]


@pytest.mark.parametrize("groups", [{0: {"lr": -1.0}}, {0: {"lr": math.nan}}, {0: {"other": 1.0}}, {7: {"lr": 1.0}}])
def test_hyper_parameters_are_checked_each_time_that_they_differ(sharing: Sharing, groups: dict[int, Any]) -> None:
    assert sharing.exchange(2, groups={0: {"lr": 1.0}}) == [-2.0, -2.0]
    for _ in range(2):
        with pytest.raises(InvalidRequest):
            sharing.exchange(3, groups=groups)
    assert sharing.exchange(3, groups={0: {"lr": 1.0}}) == [-3.0, -3.0]


def test_hyper_parameters_of_a_later_stage_are_checked_for_each_bucket() -> None:
    """There each bucket has groups of its own."""
    shard = lone_shard("sync", 1)
    sharing, rates = Sharing(shard), {"lr": 1.0}
    for bucket in (0, 1):
        following = StageSpec(1, "SGD", (bucket,), {bucket: rates})
        shard.push(push(bucket, kind=PushKind.NEXT_OPTIMIZER, next_optimizer=following, payload=b""))
    assert sharing.exchange(1, stage=1, groups={0: rates, 1: {"lr": 2.0}}) == [-1.0, -2.0]
    assert sharing.is_checked
    assert sharing.exchange(2, stage=1, groups={0: {"lr": 0.5}, 1: {"lr": 0.25}}) == [-1.5, -2.25]
    for bad in ({0: rates, 1: {"lr": -1.0}}, {0: {"lr": math.inf}, 1: rates}, {0: rates, 1: {"other": 1.0}}):
        with pytest.raises(InvalidRequest):
            sharing.exchange(3, stage=1, groups=bad)
    assert sharing.exchange(3, stage=1, groups={0: rates, 1: rates}) == [-2.5, -3.25]


@pytest.mark.parametrize("rates", [(0.5, 0.5), (0.5, 0.25)], ids=["as before", "others"])
def test_a_step_that_is_refused_is_made_with_what_it_says_when_it_comes_again(
    sharing: Sharing, monkeypatch: pytest.MonkeyPatch, rates: tuple[float, float]
) -> None:
    """Its hyper-parameters were checked then, and are not those of the last step."""
    sharing.exchange(2, groups={0: {"lr": 1.0}})
    with monkeypatch.context() as patch:
        patch.setattr(Pulls, "ask", busy)
        with pytest.raises(Backlogged):
            sharing.exchange(3, groups={0: {"lr": rates[0]}})
    assert sharing.exchange(3, groups={0: {"lr": 4.0}}) == [-2.0 - rates[0]] * 2, "it was staged, and counts once"
    assert sharing.exchange(4, groups={0: {"lr": rates[1]}}) == [-2.0 - sum(rates)] * 2


def busy(*_: object) -> None:
    raise Backlogged("the push before is not applied yet")


def trained(session: Session, rates: Iterable[object], **more: Any) -> list[float]:
    """The weight after each step of SGD with gradients of 1 and these learning rates."""
    model = nn.Linear(4, 2, bias=False)
    model.weight.data.zero_()
    model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0), **more)
    found = []
    for rate in rates:
        optimizer.param_groups[0]["lr"] = rate
        optimizer.zero_grad()
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        found.append(model.weight.flatten()[0].item())
    return found


@pytest.mark.parametrize(("transport", "wire"), crossed(["shm", "tcp", "grpc"], ["", "int8", "int4"]))
def test_a_step_uses_the_learning_rate_of_its_own_time(
    make_cluster: Callable[..., Cluster], transport: str, wire: str
) -> None:
    """Also where it is a whole number, or lies in a tensor that a script changes."""

    def rates() -> Iterator[object]:
        yield from (1.0, 0.5, 0.5, 0.25, 1)
        rate = torch.tensor(1.0)
        for _ in range(3):
            yield rate.mul_(0.5)
        yield from (0.0, 2, 2.0)

    if wire and transport == "shm":
        pytest.skip("blocks are for messages alone")
    wires = {"gradient_wire": wire, "weight_wire": wire} if wire else {}
    with make_cluster(shards=1).connect("sync", transport=transport) as session:
        found = trained(session, rates(), **wires)
    expected, weight = [], 0.0
    for each in (1.0, 0.5, 0.5, 0.25, 1.0, 0.5, 0.25, 0.125, 0.0, 2.0, 2.0):
        weight -= each
        expected.append(weight)
    assert found == pytest.approx(expected, rel=1e-6 if not wire else 0.02)


def test_the_steps_of_a_session_are_read_once(
    make_cluster: Callable[..., Cluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    clocks = clocks_read(monkeypatch)
    with make_cluster(shards=1).connect("sync", transport="shm") as session:
        model = nn.Linear(4, 2, bias=False)
        model.weight.data.zero_()
        model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))

        for rate in (1.0, 1.0, 1.0, 0.5, 0.5):
            optimizer.param_groups[0]["lr"] = rate
            model(torch.ones(1, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert torch.equal(model.weight, torch.full((2, 4), -4.0))
    assert clocks == [1]


def test_the_first_step_with_another_optimizer_is_read_anew(
    make_cluster: Callable[..., Cluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    clocks = clocks_read(monkeypatch)
    with make_cluster(shards=1).connect("sync", transport="shm") as session:
        model = nn.Linear(4, 2, bias=False)
        model.weight.data.zero_()
        model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
        for stage in range(2):
            if stage:
                optimizer = session.prepare(torch.optim.SGD(model.parameters(), lr=0.5, momentum=1.0))
            for step in range(3):
                optimizer.param_groups[0]["lr"] = 1.0 / (1 + step)
                optimizer.zero_grad()
                model(torch.ones(1, 4)).sum().backward()
                optimizer.step()
        rates = 1.0 + 1 / 2 + 1 / 3
        assert torch.allclose(model.weight, torch.full((2, 4), -rates - (1 + 2 / 2 + 3 / 3)))
    assert clocks == [1, 4]


# -- the end of what it was checked with -----------------------------------------------------------------------------


def test_a_worker_that_is_removed_is_refused(sharing: Sharing) -> None:
    sharing.shard.remove_worker("sums", RANK, INCARNATION)
    with pytest.raises(UnknownWorker):
        sharing.exchange(2)


def test_a_worker_whose_place_is_taken_is_refused(sharing: Sharing) -> None:
    sharing.shard.add_worker("sums", RANK, INCARNATION + 1, 1)
    with pytest.raises(Fenced):
        sharing.exchange(2)


def test_a_worker_without_its_key_is_refused(sharing: Sharing) -> None:
    sharing.shard.add_worker("sums", RANK, INCARNATION + 1, 1, key=b"key")
    sharing.worker = replace(sharing.worker, incarnation=INCARNATION + 1, key=b"key")
    sharing.attach()
    assert sharing.exchange(2) == [-2.0, -2.0]
    with pytest.raises(PSError, match="key"):
        sharing.exchange(3, worker=replace(sharing.worker, key=b"another"))


def test_an_ended_job_takes_nothing(sharing: Sharing) -> None:
    sharing.shard.drop_job("sums")
    with pytest.raises(PSError):
        sharing.exchange(2)


def test_a_job_that_begins_anew_checks_anew(sharing: Sharing) -> None:
    """As after a rollback: a job of the same name has other buckets, where what was checked would be wrong."""
    shard, before = sharing.shard, sharing.checked.job
    shard.drop_job("sums")
    shard.create_job(replace(job_spec(), bucket_bytes=256), [0, 1])
    shard.add_worker("sums", RANK, INCARNATION, 0)
    assert shard.jobs()["sums"] is not before
    sharing.attach()
    with pytest.raises(InvalidRequest, match="bucket 1 holds what no optimizer steps"):
        sharing.exchange(1)


def test_a_segment_that_takes_the_place_of_another_is_the_one_that_is_read(sharing: Sharing) -> None:
    sharing.attach()
    assert sharing.exchange(2, 5.0) == [-6.0, -6.0]
    assert sharing.checked.segment is sharing.shard.jobs()["sums"].of_workers.segments[RANK, 0].segment


def test_what_is_staged_counts_for_who_calls_now() -> None:
    """A token may get another name while its worker trains."""
    shard = lone_shard("sync", 2)
    sharing = Sharing(shard, rank=1)  # its gradients stay staged until worker 0 comes
    for clock, (caller, other) in enumerate((("one", "two"), ("two", "one")), 1):
        sharing.exchange(clock, caller=caller)
        assert (shard.principals.bytes_of(caller), shard.principals.bytes_of(other)) == (BYTES, 0)
        for bucket in (0, 1):
            shard.push(push(bucket, clock))
    assert sharing.is_checked


# -- the end of a wait -----------------------------------------------------------------------------------------------


class Waiting(Sharing):
    """A worker whose second exchange is known by its first, and waits for another worker."""

    def __init__(self, mode: str) -> None:
        super().__init__(lone_shard(mode, 2))
        first = self.begin(1)
        self.other_comes(1)
        assert first.finished
        assert self.is_checked
        self.wait = self.begin(2)
        assert not self.wait.finished
        assert self.waiters == 2

    @property
    def waiters(self) -> int:
        """How many buckets are waited for."""
        return sum(len(unit.waiters) for unit in self.shard.jobs()["sums"].units.values())

    def other_comes(self, clock: int) -> None:
        for bucket in (0, 1):
            self.shard.push(push(bucket, clock, 1, 2))


@pytest.fixture(params=["sync", "ssp:0", "sync quorum 2"])
def waiting(request: pytest.FixtureRequest) -> Waiting:
    return Waiting(request.param)


@pytest.mark.parametrize(
    ("end", "error"),
    [
        (lambda shard: shard.remove_worker("sums", RANK, INCARNATION), UnknownWorker),
        (lambda shard: shard.add_worker("sums", RANK, INCARNATION + 1, 1), Fenced),
        (lambda shard: shard.drop_job("sums"), NotFound),
        (lambda shard: shard.stop(), TryLater),
    ],
    ids=["its place is lost", "its place is taken", "the job ends", "the shard stops"],
)
def test_a_wait_ends_with_the_error_of_what_ends_it(
    waiting: Waiting, end: Callable[[Shard], None], error: type[PSError]
) -> None:
    job = waiting.shard.jobs()["sums"]
    end(waiting.shard)
    assert isinstance(waiting.wait.error, error)
    assert not any(unit.waiters for unit in job.units.values())


@pytest.mark.parametrize("goes", [False, True], ids=["comes", "goes"])
def test_a_wait_ends_when_the_other_worker_comes_or_goes(waiting: Waiting, goes: bool) -> None:
    before = waiting.weights()
    if goes:
        waiting.shard.remove_worker("sums", 1, 2)
    else:
        waiting.other_comes(2)
    assert waiting.wait.finished
    assert waiting.wait.error is None
    assert waiting.weights() < before, "with the update of its clock"


def test_a_wait_whose_caller_is_gone_is_forgotten_and_may_be_made_again(waiting: Waiting) -> None:
    waiting.wait.close()
    assert waiting.waiters == 0
    again = waiting.begin(2)
    assert waiting.waiters == 2
    waiting.other_comes(2)
    assert again.finished
    assert not waiting.wait.finished
