"""A job's buckets on shards: bad pushes change nothing, and no interleaving of a simulated cluster breaks a promise."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ps_protocol.errors import Fenced, InvalidRequest, NonFiniteGradient, NotFound, OutOfOrder, PSError, UnknownWorker
from ps_protocol.hyper_parameters import HyperParameters
from ps_protocol.job import NonFinite
from ps_protocol.messages.data import PushCall, PushKind
from ps_protocol.optimizers import ELEMENTWISE, check_hyper_parameters, hyper_parameter_names
from ps_server.core.commands import AddWorker, RemoveWorker, RestoreSnapshot
from ps_server.core.membership import ShardProgress
from ps_server.core.partition import JobPartition
from tests.simulation.simulator import Simulation
from tests.tools.cases import cases
from tests.tools.one_thread import one_thread
from tests.tools.partitions import FROZEN, TRAINED, check, image, initial, job_spec, payload, push, running, stage, work

NAN, INF = float("nan"), float("inf")


# -- bad pushes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bad", "error", "said"),
    [
        (push(bucket=7), NotFound, "no bucket 7"),
        (push(bucket=FROZEN), InvalidRequest, "holds what no optimizer steps"),
        (push(payload=payload(1.0)[:-1]), InvalidRequest, "expected 128 bytes .32 x float32., got 127"),
        (push(payload=b""), InvalidRequest, "expected 128 bytes .32 x float32., got 0"),
        (push(kind=PushKind.SKIP), InvalidRequest, "expected 0 bytes"),
        (push(absent=frozenset({1})), InvalidRequest, "has 1 slices, got slice 1"),
        (push(groups={1: {"lr": 0.1}}), InvalidRequest, "expected a group below 1, got 1"),
        (push(groups={0: {"lr": -1.0}}), InvalidRequest, "SGD refuses"),
        (push(groups={0: {"betas": (0.9, 0.999)}}), InvalidRequest, "SGD takes lr, .* got 'betas'"),
        (push(payload=payload(NAN)), NonFiniteGradient, "gradient of second from worker 0 is not finite"),
        (push(payload=payload(-INF)), NonFiniteGradient, "gradient of second from worker 0 is not finite"),
        (push(clock=0), OutOfOrder, "worker 0 joined at clock 0, and a push of clock 0 came"),
        (push(groups={0: {"nesterov": True}}), InvalidRequest, "Nesterov"),
        (push(rank=5), UnknownWorker, "worker 5 is not a live worker"),
        (push(incarnation=99), UnknownWorker, "incarnation 1 is live, the call came from 99"),
        (push(clock=3), PSError, "worker 0 pushed clock 3 where 2 comes next"),
        (initial(0, rank=1, incarnation=2), InvalidRequest, "initial values are rank 0's to send"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_bad_push_is_refused_with_one_clear_error_and_changes_nothing(
    bad: PushCall, error: type[PSError], said: str
) -> None:
    job = running(workers=2)
    stage(job, push(0))
    before = image(job)
    with pytest.raises(error, match=said):
        stage(job, bad)
    assert image(job) == before


def test_a_push_from_before_the_worker_joined_is_not_taken_for_a_repeat() -> None:
    """Its gradient would be acknowledged and lost."""
    job = running("async")
    for clock in (1, 2):
        stage(job, push(0, clock))
        work(job, 0)
    job.execute(AddWorker(1, 9, None))
    with pytest.raises(OutOfOrder, match="worker 1 joined at clock 2, and a push of clock 1 came"):
        stage(job, push(0, 1, rank=1, incarnation=9))
    assert not stage(job, push(0, 3, rank=1, incarnation=9))


def test_what_a_push_leaves_out_stays_as_the_job_has_it() -> None:
    spec = replace(job_spec(), param_groups=({"lr": 1.0, "momentum": 0.9, "nesterov": False},))
    job = JobPartition(spec, [0])
    check(job, push(0, groups={0: {"nesterov": True}}))
    with pytest.raises(InvalidRequest, match="Nesterov"):
        check(job, push(0, groups={0: {"nesterov": True, "momentum": 0.0}}))


@pytest.mark.parametrize(
    ("optimizer", "switched"),
    [
        ("Adam", {"amsgrad": True}),
        ("AdamW", {"amsgrad": True}),
        ("RMSprop", {"centered": True}),
        ("RMSprop", {"momentum": 0.5}),
    ],
)
def test_what_needs_state_from_the_first_step_on_cannot_be_switched_on_later(
    optimizer: str, switched: HyperParameters
) -> None:
    """torch would fail in the step, on the thread that applies updates for everyone."""
    job = JobPartition(replace(job_spec(), optimizer=optimizer, param_groups=({"lr": 0.1},)), [0])
    ((name, value),) = switched.items()
    with pytest.raises(InvalidRequest, match=f"{name!r} of {optimizer} cannot be switched on in a running job"):
        check(job, push(0, groups={0: switched}))
    job = JobPartition(replace(job_spec(), optimizer=optimizer, param_groups=({"lr": 0.1, **switched},)), [0])
    check(job, push(0, groups={0: {name: type(value)(0)}}))


@st.composite
def changes(draw: st.DrawFn) -> tuple[str, list[HyperParameters]]:
    """An optimizer, and the hyper-parameters that a job has at first and those that pushes bring."""
    name = draw(st.sampled_from(sorted(ELEMENTWISE)))
    values = {
        key: st.booleans() if isinstance(default, bool) else st.sampled_from([default, 0.0, 0.25])
        for key, default in ELEMENTWISE[name]([torch.zeros(1)]).defaults.items()
        if key in hyper_parameter_names(name)
    }
    return name, draw(st.lists(st.fixed_dictionaries({}, optional=values), min_size=3, max_size=3))


@given(changes())
def test_whatever_hyper_parameters_are_let_in_can_be_stepped_with(found: tuple[str, list[HyperParameters]]) -> None:
    optimizer, (first, *later) = found
    try:
        check_hyper_parameters(optimizer, first)
    except InvalidRequest:
        return
    job = running(spec=replace(job_spec("async"), optimizer=optimizer, param_groups=(first,)))
    for clock, values in enumerate([{}, *later], 1):
        try:
            command = check(job, push(0, clock, groups={0: values}))
        except InvalidRequest:
            command = check(job, push(0, clock))
        job.execute(command)
        work(job, 0)
    assert job.buckets[0].rule.version == 3


def test_a_gradient_before_the_initial_weights_is_refused() -> None:
    job = JobPartition(job_spec(), [0])
    job.execute(AddWorker(0, 1, 0))
    with pytest.raises(InvalidRequest, match="has no initial value yet"):
        stage(job, push(0))


def test_the_first_initial_value_counts_and_later_ones_are_acknowledged() -> None:
    job = running()
    stage(job, push(0))
    work(job, 0)
    assert stage(job, initial(0))
    assert job.buckets[0].weights.flat.tolist() == [-1.0] * 32


def test_a_non_finite_gradient_can_be_declared_to_be_skipped() -> None:
    job = running(spec=job_spec("async", non_finite=NonFinite.SKIP))
    bad = push(0, payload=payload(INF))
    assert job.execute(check(job, bad)).skipped
    work(job, 0)
    assert job.buckets[0].weights.flat.tolist() == [0.0] * 32
    assert job.reached.clocks() == {0: 0}  # bucket 1 has not had this clock yet
    stage(job, push(1))
    work(job, 1)
    assert job.reached.clocks() == {0: 1}, "the clock counts on"


def test_a_worker_that_has_looked_for_infinities_in_memory_of_its_own_is_believed() -> None:
    job = running("async")
    with pytest.raises(NonFiniteGradient):
        stage(job, push(payload=None), payload(NAN))
    assert not stage(job, push(payload=None, finite=True), payload(NAN))


def test_what_is_not_finite_in_a_segment_without_a_gradient_is_ignored() -> None:
    job = running("async")
    stage(job, push(0, payload=payload(NAN), absent=frozenset({0})))
    work(job, 0)
    assert job.buckets[0].weights.flat.tolist() == [0.0] * 32


# -- who takes part --------------------------------------------------------------------------------------------------


def test_a_newer_incarnation_fences_the_older_one_at_once() -> None:
    job = running("async")
    job.execute(AddWorker(0, 5, None))
    with pytest.raises(Fenced):
        stage(job, push(0))
    with pytest.raises(Fenced):
        job.execute(AddWorker(0, 1, None))
    job.execute(RemoveWorker(0, 1))
    assert not stage(job, push(0, incarnation=5)), "and the end of the older one leaves it alone"


def test_admitting_twice_changes_nothing() -> None:
    job = running("async")
    stage(job, push(0))
    before = image(job)
    job.execute(AddWorker(0, 1, None))
    job.execute(AddWorker(0, 1, 0))
    assert image(job) == before


def test_a_call_that_comes_late_does_not_bring_the_dead_back() -> None:
    """A join that the coordinator gave up on is removed; its AddWorker may reach the shard after that."""
    job = running("sync")
    job.execute(RemoveWorker(3, 7))
    for clock in (None, 0):
        with pytest.raises(Fenced):
            job.execute(AddWorker(3, 7, clock))
    job.execute(AddWorker(3, 8, None))
    assert set(job.roster) == {0, 3}


@pytest.mark.parametrize("end", ["retired", "replaced"])
def test_what_a_lost_worker_lent_is_copied_before_it_may_write_there_again(end: str) -> None:
    job = running("sync", workers=2)
    lent = bytearray(payload(3.0))
    stage(job, push(0, rank=1, incarnation=2, payload=None), lent)
    if end == "retired":
        job.execute(RemoveWorker(1, 2))
    else:
        job.execute(AddWorker(1, 9, None))
    lent[:] = payload(100.0)
    stage(job, push(0))
    work(job, 0)
    assert job.buckets[0].weights.flat.tolist() == [-2.0] * 32


def test_the_frontier_is_the_highest_clock_of_any_bucket_that_trains() -> None:
    job = running("ssp:3", workers=2)
    for clock in (1, 2):
        stage(job, push(1, clock))
        work(job, 1)
    assert job.execute(AddWorker(2, 9, None)).frontier == 2
    assert job.roster[2].start == 2


def test_a_worker_that_comes_back_learns_how_far_it_had_pushed_whatever_clock_it_joined_at() -> None:
    """Also by a call that is repeated, and after a join of which the worker never heard."""
    job = running("ssp:3", workers=2)
    for clock in (1, 2, 3):
        for bucket in TRAINED:
            stage(job, push(bucket, clock, rank=1, incarnation=2))
            work(job, bucket)
    for clock in (1, 2):
        stage(job, push(0, clock))
        work(job, 0)
    stage(job, push(1, 1))  # of its second step only one bucket came
    work(job, 1)
    assert [job.execute(AddWorker(0, incarnation, None)) for incarnation in (9, 9, 10)] == [
        ShardProgress(3, 1, {0: 2})
    ] * 3
    stage(job, push(0, 4, incarnation=10))
    stage(job, push(1, 4, incarnation=10))
    assert job.execute(AddWorker(0, 11, None)) == ShardProgress(4, 4, {})


@pytest.mark.parametrize("mode", ["async", "ssp:1", "sync"])
def test_a_clock_that_a_worker_joined_at_is_no_push_of_its_in_a_checkpoint_either(mode: str) -> None:
    """Otherwise half of a step would be lost that it is about to push again."""
    job = running(mode, workers=2)
    for index in TRAINED:
        stage(job, push(index, 1, rank=1, incarnation=2))
    stage(job, push(0, 1))
    job.execute(AddWorker(0, 9, 1))  # clock 1, of which bucket 1 has not had its push
    for index in TRAINED:
        work(job, index)
    restored = JobPartition(job_spec(mode), [0, 1, FROZEN])
    snapshots = {index: bucket.snapshot() for index, bucket in job.buckets.items()}
    restored.execute(RestoreSnapshot(snapshots, last_incarnation=9))
    assert restored.execute(AddWorker(0, 10, None)) == ShardProgress(1, 0, {0: 1})
    assert restored.execute(AddWorker(1, 11, None)).pushed == 1


def test_a_buffer_is_sent_at_any_clock_once_it_is_there() -> None:
    job = JobPartition(job_spec("sync"), [0, FROZEN])
    job.execute(AddWorker(0, 1, 0))
    assert not job.units[FROZEN].admit_all([(0, 4)])[0].admitted
    stage(job, initial(FROZEN))
    assert job.units[FROZEN].admit_all([(0, 4)])[0].admitted
    assert job.reached.versions() == (0, 0)


def test_sizes_are_counted_in_bytes() -> None:
    job = running("sync", workers=2)
    stage(job, push(0, rank=1, incarnation=2))
    assert job.parameter_bytes == 2 * 128 + 64
    assert job.staged_bytes == 128, "held back for worker 0"
    assert job.optimizer_bytes == 0


# -- simulated clusters ----------------------------------------------------------------------------------------------

MODES = ["sync", "ssp:0", "ssp:2", "async", "sync quorum 2", "sync quorum all-1"]


@pytest.mark.parametrize(
    ("mode", "seeds"), cases([(mode, range(15)) for mode in MODES], [(mode, range(15, 200)) for mode in MODES])
)
def test_no_interleaving_breaks_a_promise_or_stops_the_living(mode: str, seeds: range) -> None:
    for seed in seeds:
        print(f"seed {seed}")  # the last one is shown when the test fails
        simulation = Simulation(mode, seed)
        with one_thread():
            for _ in range(200):
                simulation.event()
            simulation.settle()
        for index in simulation.parts:
            assert not simulation.rule(index).waiting, "nothing staged is left behind"
            simulation.weights(index)
        assert not any(table.pending for shard in simulation.shards for table in shard.tables.values())
