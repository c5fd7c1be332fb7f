"""Streaming local steps (mode local:H/F): what a worker has after each step, and that it steps while parts travel."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

import ps_worker
from ps_protocol.layout import bucket_layout
from ps_protocol.modes import Consistency, local_rounds
from ps_server.coordinator.timing import Timing
from ps_worker import InvalidRequest, JobMismatch, LimitExceeded, NonFiniteGradient, Unsupported
from ps_worker.cluster.connection import Connection
from ps_worker.cluster.own_membership import OwnMembership
from ps_worker.model.job_spec import describe
from ps_worker.values import PrepareOptions
from tests.tools.cases import cases, crossed
from tests.tools.cluster import TEST_SECONDS, Cluster, in_parallel, until
from tests.tools.small_models import close, drawn, filled, same, step, weights_of
from tests.tools.small_steps import Make, adamw, batch, make_net, sgd

TRANSPORTS = ("grpc", "tcp", "shm")
BUCKET_BYTES = 128


def together(cluster: Cluster, job: str, mode: str, steps: int, make: Make = adamw, **options: Any) -> Any:
    """Of two workers: each one's own weights at the end, and those of the servers, which must be the same."""
    transport = options.pop("transport", "auto")

    def work(rank: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        with cluster.connect(mode, rank, 2, job=job, transport=transport) as session:
            model = make_net()
            model, optimizer = session.prepare(model, make(model), bucket_bytes=BUCKET_BYTES, **options)
            for number in range(steps):
                step(model, optimizer, batch(rank, number))
            return weights_of(model), list(session.global_weights().values())

    (first, servers), (second, others) = in_parallel(2, work)
    assert same(servers, others)
    return first, second, servers


# -- what it computes --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("transport", "wires"), crossed(TRANSPORTS, [{}, {"gradient_wire": "int4", "weight_wire": "bfloat16"}])
)
def test_one_fragment_without_delay_is_local_h_to_the_bit(
    shared: Cluster, job: str, transport: str, wires: dict[str, str]
) -> None:
    if wires and transport == "shm":
        pytest.skip("blocks do not travel in shared memory")
    settings = {"warm_up": 2, "delay": 0}
    found = together(shared, f"{job}-f", "local:4/1", 14, outer=settings, transport=transport, **wires)
    expected = together(shared, f"{job}-l", "local:4", 14, outer={"warm_up": 2}, transport=transport, **wires)
    assert all(same(*pair) for pair in zip(found, expected, strict=True))


def fragment_of_each_element(mode: str) -> list[torch.Tensor]:
    """Of each parameter, to which fragment its elements belong, as the layout of the job has it."""
    model, local = make_net(), local_rounds(mode)
    assert local is not None
    assert local.fragments is not None
    options = PrepareOptions(bucket_bytes=BUCKET_BYTES, local=local)
    outer = torch.optim.SGD(model.parameters(), lr=1.0)
    rule = Consistency(max_staleness=0, aggregate=True)
    spec, _ = describe([model], [outer], options, name="x", consistency=rule, world_size=2)
    layout = bucket_layout(spec.parameters, spec.bucket_bytes)
    found = [torch.full(parameter.shape, -1).flatten() for parameter in model.parameters()]
    for number, bucket in enumerate(layout.buckets):
        for part in bucket.slices:
            found[part.parameter][part.start : part.start + part.length] = local.fragments.of(number)
    assert {int(each) for tensor in found for each in tensor} == set(range(local.fragments.count))
    return [each.view(parameter.shape) for each, parameter in zip(found, model.parameters(), strict=True)]


class Reference:
    """Streaming DiLoCo in one process, as plain PyTorch."""

    def __init__(self, mode: str, warm_up: int, delay: int, mixing: float, outer: dict[str, Any]) -> None:
        self.steps, self.count = map(int, mode.removeprefix("local:").split("/"))
        self.warm_up, self.delay, self.mixing, self.outer = warm_up, delay, mixing, outer
        self.masks = fragment_of_each_element(mode)
        self.globals = weights_of(make_net())
        self.momenta = [torch.full_like(values, float("nan")) for values in self.globals]
        self.models = [make_net() for _ in range(2)]

    def run(self, steps: int, make: Make) -> None:
        optimizers = [make(model) for model in self.models]
        waiting: list[tuple[int, int, list[torch.Tensor]]] = []
        for made in range(1, steps + 1):
            for rank, (model, optimizer) in enumerate(zip(self.models, optimizers, strict=True)):
                step(model, optimizer, batch(rank, made - 1))
            since = made - self.warm_up
            if since <= 0:
                for fragment in range(self.count):
                    self.mix(fragment, self.stepped(fragment, {"lr": 1.0, "momentum": 0.0}), 0.0)
                continue
            if since % (self.steps // self.count) == 0:
                fragment = (since // (self.steps // self.count) - 1) % self.count
                waiting.append((made + self.delay, fragment, self.stepped(fragment, self.outer)))
            for due, fragment, values in [each for each in waiting if each[0] == made]:
                self.mix(fragment, values, self.mixing)
                waiting.remove((due, fragment, values))

    def stepped(self, fragment: int, outer: dict[str, Any]) -> list[torch.Tensor]:
        """One step of the outer optimizer on a fragment: SGD with Nesterov momentum, whose first gradient is its
        momentum."""
        own = [weights_of(model) for model in self.models]
        result = []
        for index, (base, mask) in enumerate(zip(self.globals, self.masks, strict=True)):
            gradient = torch.stack([base - weights[index] for weights in own]).mean(0)
            moved = gradient
            if outer["momentum"]:
                before = self.momenta[index]
                momentum = torch.where(before.isnan(), gradient, outer["momentum"] * before + gradient)
                self.momenta[index] = torch.where(mask == fragment, momentum, before)
                moved = gradient + outer["momentum"] * momentum
            values = torch.where(mask == fragment, base - outer["lr"] * moved, base)
            self.globals[index] = values
            result.append(values.clone())
        return result

    def mix(self, fragment: int, values: list[torch.Tensor], mixing: float) -> None:
        for model in self.models:
            for parameter, value, mask in zip(model.parameters(), values, self.masks, strict=True):
                mixed = mixing * parameter.data + (1 - mixing) * value
                parameter.data.copy_(torch.where(mask == fragment, mixed, parameter.data))


OUTER = {"lr": 0.8, "momentum": 0.7}


WAYS = [
    ("local:4/2", 1, 0.5),
    ("local:6/2", 2, 0.25),
    ("local:6/3", 0, 0.0),
    ("local:4/4", 0, 0.0),
    ("local:3/1", 2, 0.5),
]


@pytest.mark.parametrize(
    ("mode", "delay", "mixing", "make"),
    cases(
        [(*way, make) for way, make in zip(WAYS, [sgd, adamw, sgd, adamw, adamw], strict=True)],
        [(*way, make) for way, make in zip(WAYS, [adamw, sgd, adamw, sgd, sgd], strict=True)],
    ),
)
def test_a_job_is_streaming_diloco(shared: Cluster, job: str, mode: str, delay: int, mixing: float, make: Make) -> None:
    settings = {"warm_up": 2, "delay": delay, "mixing": mixing, **OUTER}
    *own, servers = together(shared, job, mode, 17, make, outer=settings)
    reference = Reference(mode, 2, delay, mixing, OUTER)
    reference.run(17, make)
    assert close(servers, reference.globals, rtol=0, atol=1e-5)
    for weights, model in zip(own, reference.models, strict=True):
        assert close(weights, weights_of(model), rtol=0, atol=1e-5)
    if delay:
        other = Reference(mode, 2, delay, 0.9, OUTER)
        other.run(17, make)
        assert not close(servers, other.globals, rtol=0, atol=1e-5), "the mixing matters"


def test_two_runs_agree_to_the_bit_over_every_transport(shared: Cluster, job: str) -> None:
    runs = [
        together(shared, f"{job}-{number}", "local:6/3", 17, outer={"warm_up": 1}, transport=transport)
        for number, transport in enumerate((*TRANSPORTS, "auto"))
    ]
    assert all(same(found, expected) for run in runs for found, expected in zip(run, runs[0], strict=True))


def test_on_a_small_problem_it_learns_what_local_h_learns(shared: Cluster, job: str) -> None:
    def loss(weights: list[torch.Tensor]) -> float:
        model = make_net()
        model.load_state_dict(dict(zip(model.state_dict(), weights, strict=True)))
        with torch.no_grad():
            return float(model(drawn(5, 256, 6)).square().mean())

    settings = {"warm_up": 8}
    streamed = loss(together(shared, f"{job}-s", "local:8/4", 72, outer=settings)[2])
    whole = loss(together(shared, f"{job}-w", "local:8", 72, outer=settings)[2])
    begin = loss(weights_of(make_net()))
    assert whole < begin / 4
    assert streamed < whole + begin / 20


# -- the link works while the script steps -----------------------------------------------------------------------------


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_worker_steps_while_its_fragment_travels_and_waits_where_it_is_mixed_in(
    shared: Cluster, job: str, transport: str
) -> None:
    """Worker 1 makes no step before worker 0 has made all but the one at which its fragment is due."""
    events: list[str] = []
    ahead = threading.Event()

    def work(rank: int) -> None:
        with shared.connect("local:6/2", rank, 2, job=job, transport=transport) as session:
            model = make_net()
            settings = {"warm_up": 0, "delay": 2}
            model, optimizer = session.prepare(model, adamw(model), bucket_bytes=BUCKET_BYTES, outer=settings)
            assert rank == 0 or ahead.wait(TEST_SECONDS)
            for number in range(1, 6):
                if rank == 0 and number == 5:
                    ahead.set()
                step(model, optimizer, batch(rank, number))
                events.append(f"worker {rank} has made step {number}")

    in_parallel(2, work)
    first = [f"worker 0 has made step {number}" for number in range(1, 5)]
    assert events[:4] == first, "with a push at step 3, it went on to step 4 although the other had pushed nothing"
    assert events.index("worker 0 has made step 5") > events.index("worker 1 has made step 2"), "there it has waited"


def test_only_one_fragment_is_under_way_and_the_servers_weights_follow_it(shared: Cluster, job: str) -> None:
    with shared.connect("local:6/3", job=job) as session:
        model = make_net()
        model, optimizer = session.prepare(model, adamw(model), bucket_bytes=BUCKET_BYTES, outer={"warm_up": 1})
        marks = fragment_of_each_element("local:6/3")
        before, changed, rounds = list(session.global_weights().values()), [], []
        for number in range(1, 15):
            step(model, optimizer, batch(0, number))
            now = list(session.global_weights().values())
            moved = {
                int(mark)
                for old, new, which in zip(before, now, marks, strict=True)
                for mark in which[old != new].unique()
            }
            changed.append(moved)
            rounds.append(session.round)
            before = now
        assert changed == [{0, 1, 2}, set(), {0}, set(), {1}, set(), {2}, set(), {0}, set(), {1}, set(), {2}, set()]
        assert rounds == [1] * 7 + [2] * 6 + [3]
        assert session.clock == 14


# -- unlike workers, and what is refused -------------------------------------------------------------------------------


def test_workers_with_other_fragments_are_told_what_differs(shared: Cluster, job: str) -> None:
    differences: list[tuple[str, dict[str, Any], str]] = [
        ("local:8/2", {}, "the mode is local:8/4 in the registered job and local:8/2 in this one"),
        ("local:8", {}, "the mode is local:8/4 in the registered job and local:8 in this one"),
        ("local:8/4", {"delay": 0}, "the delay of a fragment is 1 in the registered job and 0 in this one"),
        ("local:8/4", {"mixing": 0.25}, "the mixing of a fragment is 0.5 in the registered job and 0.25 in this one"),
    ]
    with ps_worker.connect(shared.address, "local:8/4", job, elastic=True) as session:
        model = make_net()
        session.prepare(model, sgd(model))
        for mode, outer, difference in differences:
            with ps_worker.connect(shared.address, mode, job, elastic=True) as other:
                model = make_net()
                with pytest.raises(JobMismatch) as told:
                    other.prepare(model, sgd(model), outer=outer)
                assert difference in str(told.value)


@pytest.mark.parametrize(
    ("mode", "refusals", "right"),
    [
        (
            "local:8/4",
            [
                ({"delay": 2}, "the delay of local:8/4 is from 0 to below 2 steps"),
                ({"delay": 0.5}, "outer['delay'] is a whole number, got 0.5"),
                ({"delay": -1}, "outer['delay'] is a number of steps from 0, got -1"),
                ({"mixing": 1}, "mixing of local:H/F is from 0 to below 1, got 1"),
            ],
            {"delay": 0, "mixing": 0.0},
        ),
        (
            "local:8",
            [
                ({"delay": 1}, "outer['delay'] is for fragments, such as local:8/4: in local:8 the model is pulled"),
                ({"mixing": 0.5}, "outer['mixing'] is for fragments, such as local:8/4"),
            ],
            {},
        ),
        (
            "sync",
            [
                ({"delay": -1}, "outer['delay'] is a number of steps from 0, got -1"),
                ({"mixing": 2.0}, "mixing of local:H/F is from 0 to below 1, got 2"),
            ],
            {"delay": 0, "mixing": 0.0},
        ),
    ],
    ids=["fragments", "local", "sync"],
)
def test_a_wrong_setting_is_refused_before_anything_changes(
    shared: Cluster, job: str, mode: str, refusals: list[tuple[dict[str, Any], str]], right: dict[str, Any]
) -> None:
    with shared.connect(mode, job=job) as session:
        model = make_net()
        for outer, message in refusals:
            with pytest.raises(InvalidRequest) as refused:
                session.prepare(model, sgd(model), outer=outer)
            assert message in str(refused.value)
        session.prepare(model, sgd(model), outer=right)


def test_a_quorum_and_tables_are_refused(shared: Cluster, job: str) -> None:
    with ps_worker.connect(shared.address, "local:4/2", job, elastic=True, quorum="all-1") as session:
        model = make_net()
        with pytest.raises(InvalidRequest, match="local:H takes no quorum"):
            session.prepare(model, sgd(model))
    with shared.connect("local:4/2", job=job) as session:
        model = make_net()
        with_table = nn.Sequential(ps_worker.Embedding(4), nn.Linear(4, 1))
        with pytest.raises(Unsupported, match="has no tables of rows"):
            session.prepare(with_table, sgd(with_table))


class Endless(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Any:
        return (drawn(number, 6) for number in range(1_000))


def test_an_elastic_job_leases_no_batches_and_takes_data_that_divides_itself(shared: Cluster, job: str) -> None:
    with ps_worker.connect(shared.address, "local:4/2", job, elastic=True) as session:
        model = make_net()
        model, optimizer, loader = session.prepare(model, adamw(model), DataLoader(Endless(), batch_size=4))
        with pytest.raises(Unsupported, match="an elastic job of local:H/F leases no batches"):
            session.prepare(DataLoader([drawn(number, 6) for number in range(8)]))  # type: ignore[arg-type]
        for number, data in zip(range(3), loader, strict=False):
            step(model, optimizer, data)
            assert session.clock == number + 1


# -- between rounds ----------------------------------------------------------------------------------------------------


def spoil(model: Any) -> None:
    with torch.no_grad():
        model[0].bias[0] = float("nan")


def test_weights_that_are_not_finite_are_refused_and_the_script_may_go_back(shared: Cluster, job: str) -> None:
    with shared.connect("local:4/2", job=job) as session:
        model = make_net()
        model, optimizer = session.prepare(model, sgd(model), bucket_bytes=BUCKET_BYTES, outer={"warm_up": 0})
        for number in range(3):
            step(model, optimizer, batch(0, number))
        spoil(model)
        before = session.global_weights()
        with pytest.raises(NonFiniteGradient, match=r"0\.weight is not finite after the steps of this round"):
            step(model, optimizer, batch(0, 3))
        assert (session.clock, session.round) == (3, 0)
        assert same(before.values(), session.global_weights().values())
        model.load_state_dict(before)
        for number in range(2):
            step(model, optimizer, batch(0, number))
        assert (session.clock, session.round) == (5, 1)
        assert all(value.isfinite().all() for value in session.global_weights().values())


def test_a_fragment_that_is_not_finite_is_left_out_and_all_weights_are_the_servers_again(
    shared: Cluster, job: str
) -> None:
    def work(rank: int) -> list[torch.Tensor]:
        with shared.connect("local:4/2", rank, 2, job=job) as session:
            model = make_net()
            settings = {"warm_up": 0, "lr": 1.0, "momentum": 0.0}
            model, optimizer = session.prepare(
                model, adamw(model), bucket_bytes=BUCKET_BYTES, outer=settings, non_finite="skip"
            )
            for number in range(9):
                if rank == 1 and number == 3:
                    spoil(model)
                step(model, optimizer, batch(rank, number))
                if rank == 1 and number == 3:
                    assert not optimizer.state, "no NaN is left in its moments"
            assert all(value.isfinite().all() for value in weights_of(model))
            assert session.round == 2
            return list(session.global_weights().values())

    first, second = in_parallel(2, work)
    assert same(first, second)
    assert all(value.isfinite().all() for value in first)


@pytest.mark.parametrize("steps", [3, 4], ids=["between", "under-way"])
def test_who_leaves_in_the_middle_of_a_round_leaves_all_fragments_at_one_round(
    shared: Cluster, job: str, monkeypatch: pytest.MonkeyPatch, steps: int
) -> None:
    """So that a checkpoint of the job has a moment even where nobody is left to bring the rest."""
    found: list[tuple[int, int]] = []
    leave = OwnMembership.close

    def versions() -> list[tuple[int, int]]:
        states = [shard.jobs()[job].partition for shard in shared.shards]
        return [state.reached.versions() for state in states if state.rules]

    def leaves(*arguments: Any) -> None:
        until(lambda: set(versions()) == {(1, 1)}, "one round of all buckets")
        found.extend(versions())
        leave(*arguments)

    with shared.connect("local:4/2", job=job) as session:
        model = make_net()
        model, optimizer = session.prepare(model, sgd(model), bucket_bytes=BUCKET_BYTES, outer={"warm_up": 0})
        for number in range(steps):
            step(model, optimizer, batch(0, number))
        assert steps == 4 or 0 in {low for low, _ in versions()}, "the second fragment has had no update"
        monkeypatch.setattr(OwnMembership, "close", leaves)
    assert found


def test_channels_last_and_replaced_weights_count(shared: Cluster, job: str) -> None:
    def made() -> Any:
        return filled(nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(8 * 16, 4)), std=0.2)

    def run(name: str, channels_last: bool) -> list[torch.Tensor]:
        with shared.connect("local:4/2", job=name) as session:
            model = made()
            model, optimizer = session.prepare(model, sgd(model), bucket_bytes=512, outer={"warm_up": 1})
            for number in range(11):
                step(model, optimizer, drawn(number, 8, 3, 6, 6))
                if number == 1 and channels_last:
                    model.to(memory_format=torch.channels_last)
                if number == 2:
                    model[2].weight.data = model[2].weight.data * 0.5
            return weights_of(model)

    assert close(run(f"{job}-c", True), run(f"{job}-p", False), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("at", "place"),
    crossed([2, 3, 4, 5, 8, 9], ["push_pull", "settle"]),  # before it is sent, while it is awaited
)
def test_an_interrupt_that_a_script_goes_on_from_loses_no_fragment(
    shared: Cluster, job: str, monkeypatch: pytest.MonkeyPatch, place: str, at: int
) -> None:
    """As in a notebook. The next step pushes, or mixes in, what was due."""
    with shared.connect("local:4/2", job=job) as session:
        model = make_net()
        model, optimizer = session.prepare(model, adamw(model), bucket_bytes=BUCKET_BYTES, outer={"warm_up": 0})
        interrupted = 0
        for number in range(1, 14):
            with monkeypatch.context() as replaced, contextlib.suppress(KeyboardInterrupt):
                if number == at:
                    replaced.setattr(Connection, place, cut)
                    interrupted += 1
                step(model, optimizer, batch(0, number))
                interrupted -= number == at
            model.zero_grad()
        assert interrupted == ((at % 2 == 0) if place == "push_pull" else at % 2 == 1 and at > 2)
        is_longer = place == "settle" and at in (5, 9)  # the round that was to be over with this step
        assert (session.clock, session.round) == ((12, 2) if is_longer else (13, 3))
        assert all(value.isfinite().all() for value in session.global_weights().values())


def test_a_fragment_that_does_not_come_back_is_told_at_each_step_from_there_on(
    shared: Cluster, job: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost: Future[Any] = Future()
    lost.set_exception(LimitExceeded("a test refuses this pull"))
    push_pull = Connection.push_pull

    def refused(*arguments: Any, **more: Any) -> Any:
        pushed, _, committing = push_pull(*arguments, **more)
        arguments[0].await_with_others([lost])
        return pushed, [lost], committing

    with shared.connect("local:4/2", job=job) as session:
        model = make_net()
        model, optimizer = session.prepare(model, adamw(model), bucket_bytes=BUCKET_BYTES, outer={"warm_up": 0})
        step(model, optimizer, batch(0, 0))
        with monkeypatch.context() as replaced:
            replaced.setattr(Connection, "push_pull", refused)
            step(model, optimizer, batch(0, 1))
        for number in range(2, 5):
            with pytest.raises(LimitExceeded, match="a test refuses this pull"):
                step(model, optimizer, batch(0, number))
        assert session.round == 0


def cut(*_: Any, **__: Any) -> None:
    raise KeyboardInterrupt


def test_who_has_no_more_data_brings_the_fragments_that_others_wait_for(
    make_cluster: Callable[..., Cluster],
) -> None:
    """It is in session.mean, in the middle of a round, and then of a later one."""
    cluster = make_cluster(timing=Timing(round_look=0.02))

    def work(rank: int) -> tuple[list[torch.Tensor], float, int]:
        with cluster.connect("local:4/2", rank, 2) as session:
            model = make_net()
            model, optimizer = session.prepare(model, adamw(model), bucket_bytes=BUCKET_BYTES, outer={"warm_up": 1})
            for number in range(3 if rank == 0 else 14):
                step(model, optimizer, batch(rank, number))
            mean = session.mean(float(rank))
            servers = list(session.global_weights().values())
            assert not same(weights_of(model), servers), "they are mixed, as ever"
            return servers, mean, session.round

    (first, mean, rounds), (second, _, others) = in_parallel(2, work)
    assert mean == 0.5
    assert rounds == others
    assert same(first, second)
