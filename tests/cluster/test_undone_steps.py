"""A rollback of the job behind which nothing repeats the steps: a script does not end as if it had made them."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import ps_torch
from ps_runtime import signals
from ps_server.storage.checkpoints import CheckpointStore, Manifest
from ps_worker import InvalidRequest, Session, Unsupported
from ps_worker.cluster.participation import Participation
from tests.tools.cluster import Cluster, until
from tests.tools.forkserver import Nursery
from tests.tools.rollbacks import QUICK, await_first
from tests.tools.small_models import drawn, same, step, weights_of
from tests.tools.small_steps import adamw, make_net

pytestmark = pytest.mark.usefixtures("soon_sure")

MakeCluster = Callable[..., Cluster]

STEPS = 16  # of one pass
# The one checkpoint is of the first clock: after this many steps. In local:6/2 a fragment of the third round has come.
KEPT = {"sync": 1, "local:6": 6, "local:6/2": 7}
COUNTED = {"sync": 16, "local:6": 12, "local:6/2": 16}
MODES = [*KEPT]
CALLS: dict[str, Callable[[Session], object]] = {
    "barrier": Session.barrier,
    "mean": lambda session: session.mean(1.0),
    "gather": lambda session: session.gather(None),
}


@dataclass
class Loses:
    """Loses a shard once there is a checkpoint. hears: waits until the worker has heard of the rollback"""

    cluster: Cluster
    directory: Path
    is_over: bool = False

    def begun(self) -> None:
        """Waits until the checkpoint of the first clock is begun."""
        await_first(self.cluster)

    def __call__(self, session: Session, hears: bool = False) -> None:
        if self.is_over:
            return
        self.is_over = True
        until(lambda: CheckpointStore(self.directory).names("default"), "the checkpoint")
        self.cluster.start_again(1)
        until(lambda: self.cluster.coordinator.job("default").workers.restore_count, "the rollback")
        part = participation_of(session)
        own = part.connection.place

        def has_heard() -> bool:
            part.membership.await_change(own)
            place = part.membership.place
            return place is not None and place.restore_count > own.restore_count

        if hears:
            until(has_heard, "the worker to hear of it")


@pytest.fixture
def loses(make_cluster: MakeCluster, tmp_path: Path) -> Loses:
    cluster = make_cluster(checkpoint_dir=tmp_path, checkpoint_every="1000steps", timing=QUICK)
    return Loses(cluster, tmp_path)


def participation_of(session: Session) -> Participation:
    return session._strategy._training.participation  # type: ignore[attr-defined, no-any-return]


def run(
    session: Session,
    begun: Callable[[], object] = lambda: None,
    each: Callable[[int], object] = lambda number: None,
    after: Callable[[], object] = lambda: None,
    passes: int = 1,
    steps: int = STEPS,
) -> torch.nn.Module:
    """Trains on a prepared loader; returns the model.

    begun: is called before the first step; each: after each step, with its number; after: after each pass
    """
    model = make_net()
    loader: Any = DataLoader([drawn(number, 6) for number in range(4 * steps)], batch_size=4)  # type: ignore[arg-type]
    prepared = session.prepare(model, adamw(model), loader, bucket_bytes=128, outer={"warm_up": 0})
    model, optimizer, loader = prepared
    begun()
    number = 0
    for _ in range(passes):
        for batch in loader:
            step(model, optimizer, batch)
            number += 1
            each(number)
        after()
    return model


def ends_with(session: Session, model: torch.nn.Module) -> list[torch.Tensor]:
    return [*(value.clone() for value in session.global_weights().values()), *weights_of(model)]


@pytest.mark.parametrize("mode", MODES)
def test_a_pass_does_not_end_before_a_rollback_is_made_that_the_worker_has_heard_of(
    loses: Loses, shared: Cluster, job: str, mode: str
) -> None:
    with shared.connect(mode, job=job) as session:
        expected = ends_with(session, run(session))
    with loses.cluster.connect(mode) as session:

        def each(number: int) -> None:
            if number == STEPS:
                loses(session, hears=True)

        model = run(session, loses.begun, each)
        assert loses.is_over
        session.barrier()  # which would make it here
        found = ends_with(session, model)
        assert session.clock == STEPS
        assert same(found, expected)


@pytest.mark.parametrize(("mode", "call"), [*zip(MODES, CALLS, strict=True)])
def test_a_script_whose_last_steps_are_undone_behind_its_loop_ends_with_an_error_and_its_job_is_not_finished(
    loses: Loses, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, mode: str, call: str
) -> None:
    ends: list[bool] = []
    close = Participation.close

    def noted(part: Participation, state: Any = None, done: bool = False) -> None:
        ends.append(done)
        close(part, state, done)

    monkeypatch.setattr(Participation, "close", noted)
    session = loses.cluster.connect(mode)
    run(session, loses.begun)
    loses(session)
    CALLS[call](session)
    assert session.clock == KEPT[mode]
    back = f"rolled back from clock {COUNTED[mode]} to clock {KEPT[mode]}, and no loop of this script"
    with pytest.raises(InvalidRequest, match=back):
        session.close()
    assert ends == [False]
    assert "default" not in loses.cluster.coordinator.jobs()
    session.close()  # once is enough
    said = "it was in no step" if mode == "sync" else "the data of its last step comes again when the script next asks"
    assert said in caplog.text


def accumulating(session: Session, tables: bool, lost_at: int, begun: Callable[[], object], lose: Loses | None) -> Any:
    """Two batches a step; returns the model. The job is rolled back between the batches of a step, in a call of the
    session.
    """
    model: Any = Rows() if tables else make_net()
    loader: Any = DataLoader([drawn(number, 6) for number in range(8 * STEPS)], batch_size=4)  # type: ignore[arg-type]
    model, optimizer, loader = session.prepare(model, adamw(model), loader, bucket_bytes=128)
    begun()
    taken = 0
    for batch in loader:
        model(batch).square().mean().backward()
        taken += 1
        if taken == 2:
            optimizer.step()
            optimizer.zero_grad()
            taken = 0
        elif session.clock == lost_at and lose is not None and not lose.is_over:
            lose(session)
            session.barrier()
            assert session.clock < lost_at
            taken = 0
    return model


class Rows(torch.nn.Module):
    """A table whose ids are in the batch, behind a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = ps_torch.Embedding(6, initial="constant", scale=0.5, seed=1, lazy_decay=True)
        self.net = make_net()

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.net(batch + self.rows((batch[:, 0] * 4).long()))


@pytest.mark.parametrize("tables", [False, True])
def test_half_of_a_steps_gradient_does_not_outlast_a_rollback(
    loses: Loses, shared: Cluster, job: str, tables: bool
) -> None:
    def ended(session: Session, lose: Loses | None) -> list[torch.Tensor]:
        model = accumulating(session, tables, 9, loses.begun if lose else lambda: None, lose)
        assert session.clock == STEPS
        rows = [model.rows.rows(torch.arange(-20, 20))] if tables else []
        return [*session.global_weights().values(), *rows]

    with shared.connect("sync", job=job) as session:
        expected = ended(session, None)
    with loses.cluster.connect("sync") as session:
        found = ended(session, loses)
    assert loses.is_over
    assert same(found, expected)


def by_turns(session: Session, begun: Callable[[], object], lose: Loses | None) -> list[torch.Tensor]:
    """Two optimizers of one sum: one steps with each batch, the other with every second one behind the first. The job
    is rolled back in a step of the first, with half of the gradient of the other. Returns the weights.
    """
    one, other = make_net(), make_net()
    loader: Any = DataLoader([drawn(number, 6) for number in range(36)], batch_size=4)  # type: ignore[arg-type]
    things = session.prepare(one, other, adamw(one), adamw(other), loader, bucket_bytes=128)
    one, other, stepping, waiting, loader = things
    begun()
    taken = 0
    for batch in loader:
        is_first = session.clock == 0  # the checkpoint is of behind it
        (one(batch) if is_first else one(batch) + other(batch)).square().mean().backward()
        taken += not is_first
        before = session.clock
        if lose is not None and before >= 7 and taken == 1:
            lose(session, hears=True)
        stepping.step()
        stepping.zero_grad()
        if session.clock < before:
            taken = 0
        if taken == 2:
            waiting.step()
            waiting.zero_grad()
            taken = 0
    return [value.clone() for model in (one, other) for value in session.global_weights(model).values()]


def test_half_of_the_gradient_of_another_optimizer_does_not_outlast_a_rollback(
    loses: Loses, shared: Cluster, job: str
) -> None:
    with shared.connect("sync", job=job) as session:
        expected = by_turns(session, lambda: None, None)
    with loses.cluster.connect("sync") as session:
        found = by_turns(session, loses.begun, loses)
    assert loses.is_over
    assert same(found, expected)


@pytest.mark.parametrize("mode", MODES)
def test_the_next_loop_repeats_the_steps_that_are_undone_between_two_passes(
    loses: Loses, shared: Cluster, job: str, mode: str
) -> None:
    with shared.connect(mode, job=job) as session:
        expected = ends_with(session, run(session, passes=2))
    with loses.cluster.connect(mode) as session:

        def between() -> None:
            loses(session)
            session.barrier()

        found = ends_with(session, run(session, loses.begun, after=between, passes=2))
        assert session.clock == 2 * STEPS
        assert same(found, expected)


def test_steps_of_a_round_that_is_not_finished_are_not_missed(loses: Loses) -> None:
    """Undisturbed the script would end without them, too."""
    with loses.cluster.connect("local:6") as session:
        run(session, loses.begun, steps=8)
        loses(session)
        session.barrier()
        assert session.round == 1


@pytest.mark.parametrize(("mode", "again"), [("sync", False), ("sync", True), ("local:6", True)])
def test_without_a_loader_the_undone_steps_are_missed_unless_the_script_steps_again(
    loses: Loses, mode: str, again: bool
) -> None:
    session = loses.cluster.connect(mode)
    model = make_net()
    model, optimizer = session.prepare(model, adamw(model), bucket_bytes=128, outer={"warm_up": 0})
    loses.begun()
    while session.clock < STEPS - 4:
        step(model, optimizer, drawn(session.clock, 4, 6))
    loses(session)
    session.barrier()
    assert session.clock == KEPT[mode]
    while again and session.clock < STEPS - 5:
        step(model, optimizer, drawn(session.clock, 4, 6))
    with contextlib.nullcontext() if again else pytest.raises(InvalidRequest, match="rolled back from clock 12 to"):
        session.close()


def test_a_loader_that_only_evaluates_repeats_no_step(loses: Loses) -> None:
    session = loses.cluster.connect("sync")
    model = make_net()
    validation: Any = DataLoader([drawn(number, 6) for number in range(8)], batch_size=4)  # type: ignore[arg-type]
    model, optimizer, validation = session.prepare(model, adamw(model), validation, bucket_bytes=128)
    loses.begun()
    while session.clock < STEPS:
        step(model, optimizer, drawn(session.clock, 4, 6))
        if session.clock % 4 == 0:
            with torch.no_grad():
                for batch in validation:
                    model(batch)
    loses(session)
    session.barrier()
    with pytest.raises(InvalidRequest, match=f"rolled back from clock {STEPS} to"):
        session.close()


def test_a_script_without_a_loader_that_stops_by_its_own_count_is_not_an_error(loses: Loses) -> None:
    """It sees the rollback in the clock."""
    with loses.cluster.connect("sync") as session:
        model = make_net()
        model, optimizer = session.prepare(model, adamw(model), bucket_bytes=128)
        loses.begun()
        for number in range(STEPS):
            if number == STEPS - 1:
                loses(session)
            step(model, optimizer, drawn(number, 4, 6))
        assert session.clock < STEPS


def test_an_error_of_the_script_is_the_one_that_is_seen(loses: Loses) -> None:
    with pytest.raises(ZeroDivisionError), loses.cluster.connect("sync") as session:  # noqa: PT012
        run(session, loses.begun)
        loses(session)
        session.barrier()
        raise ZeroDivisionError


@pytest.fixture
def prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process has a prompt, at which an error was seen, and the user has gone on."""
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    monkeypatch.setattr(sys, "last_value", NameError("name 'x' is not defined"), raising=False)


@pytest.mark.usefixtures("prompt")
def test_an_earlier_error_in_a_notebook_hides_no_lost_steps(loses: Loses) -> None:
    session = loses.cluster.connect("sync")
    run(session, loses.begun)
    loses(session)
    session.barrier()
    with pytest.raises(InvalidRequest, match="no loop of this script has repeated that"):
        session.close()


@pytest.mark.usefixtures("prompt")
def test_an_error_cuts_a_notebook_short_where_its_process_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not signals.is_cut_short()
    monkeypatch.setattr(signals._ending, "at_exit", True)
    assert signals.is_cut_short()


def test_a_worker_that_leaves_before_it_is_rolled_back_says_that_the_servers_are_behind_it(
    loses: Loses, caplog: pytest.LogCaptureFixture
) -> None:
    """It has the weights of its last step, and the script may have saved them."""
    with loses.cluster.connect("sync") as session:
        run(session, loses.begun)
        loses(session, hears=True)
    assert f"rolled back from clock {STEPS} to clock 1 after this worker's last step" in caplog.text


SCRIPT = """
import sys
import torch
import ps_worker

session = ps_worker.connect(sys.argv[1], "sync", sys.argv[2])
model = torch.nn.Linear(2, 1)
model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
for _ in range(3):
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
session._strategy._training.rolled_back = int(sys.argv[3])  # as behind a rollback of two steps
print("the script is over")
"""


@pytest.mark.parametrize(("before", "code"), [(5, 1), (3, 0)])
def test_a_process_that_ends_without_close_shows_it_in_its_code(
    nursery: Nursery, shared: Cluster, job: str, tmp_path: Path, before: int, code: int
) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    worker = nursery.run(script, [shared.address, job, before], tmp_path / "out", finalizes=True)
    assert worker.wait(60.0) == code
    text = (tmp_path / "out").read_text()
    assert "the script is over" in text
    assert ("rolled back from clock 5 to clock 3" in text) == bool(code)


# -- steps behind the last loop ----------------------------------------------------------------------------------------

LOOP = 4  # steps of one pass


def loop_and_more(
    session: Session, begun: Callable[[], object], goes_on: Callable[[], bool], passes: int = 1
) -> torch.nn.Module:
    """Passes over a prepared loader. Behind each the script makes steps of its own while `goes_on`, which it asks
    before each of them."""
    model = make_net()
    loader: Any = DataLoader([drawn(number, 6) for number in range(4 * LOOP)], batch_size=4)  # type: ignore[arg-type]
    model, optimizer, loader = session.prepare(model, adamw(model), loader, bucket_bytes=128, outer={"warm_up": 0})
    begun()
    for _ in range(passes):
        for batch in loader:
            step(model, optimizer, batch)
        while goes_on():
            step(model, optimizer, drawn(session.clock, 4, 6))
    return model


@pytest.mark.parametrize("mode", ["sync", "local:2"])
def test_a_rollback_to_behind_the_last_loop_is_made_in_step(loses: Loses, shared: Cluster, job: str, mode: str) -> None:
    """The script's own steps go by the clock, and ask no loader."""
    made: list[Manifest] = []
    clocks: list[int] = []
    with loses.cluster.connect(mode) as session, ThreadPoolExecutor(1) as pool:
        asked: list[Future[Manifest]] = []

        def goes_on() -> bool:
            if not asked and not made and session.clock > LOOP + 2:
                until(lambda: CheckpointStore(loses.directory).names("default"), "the first checkpoint")
                asked.append(pool.submit(loses.cluster.coordinator.job("default").checkpoint))
            if asked and asked[0].done():
                manifest = asked.pop().result()
                if manifest.workers:  # on a busy machine a worker's state may come too late for QUICK
                    made.append(manifest)
                    loses(session, hears=True)
            if made:
                clocks.append(session.clock)
            return len(clocks) < 40

        found = ends_with(session, loop_and_more(session, loses.begun, goes_on))
        end = session.clock
    with shared.connect(mode, job=job) as session:
        expected = ends_with(session, loop_and_more(session, lambda: None, lambda: session.clock < end))
    back = clocks.index(min(clocks))
    assert clocks[back:] == [*range(clocks[back], clocks[back] + 40 - back)]  # no step is left out behind it
    assert same(found, expected)


@pytest.mark.parametrize("mode", ["sync", "local:2"])
def test_steps_behind_the_last_loop_end_with_an_error_after_a_rollback_into_it(loses: Loses, mode: str) -> None:
    session = loses.cluster.connect(mode)
    turns = 0

    def goes_on() -> bool:
        nonlocal turns
        turns += 1
        if session.clock == 3 * LOOP:
            loses(session, hears=True)
        assert turns < 10 * LOOP, "the steps are left out without an end"
        return session.clock < 4 * LOOP

    with pytest.raises(Unsupported, match="rolled back into a loop that is over in this script"):
        loop_and_more(session, loses.begun, goes_on)
    with pytest.raises(InvalidRequest, match="and no loop of this script has repeated that"):
        session.close()


def test_steps_between_two_loops_are_left_out_until_the_next_loop_repeats_the_earlier_one(
    loses: Loses, caplog: pytest.LogCaptureFixture
) -> None:
    """A script that has gone from such steps to a loop before does so again."""
    with loses.cluster.connect("sync") as session:
        turns = 0

        def goes_on() -> bool:
            nonlocal turns
            turns += 1
            if turns == 11:  # behind the second pass
                loses(session, hears=True)
            return bool(turns % 8)

        loop_and_more(session, loses.begun, goes_on, passes=3)
        assert loses.is_over
        assert session.clock == 3 * LOOP + 7  # all passes, and the last of the script's own steps
    said = [each.levelname for each in caplog.records if each.msg.startswith("step() makes no step until")]
    assert said == ["WARNING"]
