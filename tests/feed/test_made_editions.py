"""A model whose tensors are copies of an edition gets them from a thread: no reader waits for that, unless it asks to.

On a CPU these are models of another type, and those with tensors that a function makes. test_gpu_readers.py has GPUs.
"""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

import pytest
import torch
from torch import nn

import ps_torch as ps
from ps_protocol.errors import InvalidRequest, Unreachable
from ps_server.config import ServerConfig
from tests.chaos.cluster import free_ports
from tests.tools.cluster import TEST_SECONDS, Cluster, until
from tests.tools.followed_trainer import relay
from tests.tools.remembering_trainer import RememberingTrainer, in_background

Trainer = RememberingTrainer[nn.Linear]


def begun(session: ps.Session, width: int = 8) -> Trainer:
    return RememberingTrainer(session, nn.Linear(20, width), lambda model: model(torch.randn(4, 20)).square().mean())


@pytest.fixture
def trainer(shared: Cluster, job: str) -> Iterator[Trainer]:
    with shared.connect("sync", job=job) as session:
        torch.manual_seed(3)
        yield begun(session)


class Gate:
    """A function for `MadeOf` that waits while the gate is closed."""

    def __init__(self) -> None:
        self.open, self.entered = threading.Event(), threading.Event()
        self.open.set()
        self.fails = False
        self.made: weakref.ref[torch.Tensor] | None = None

    def close(self) -> None:
        self.entered.clear()
        self.open.clear()

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        if not self.open.is_set():
            self.entered.set()
            assert self.open.wait(TEST_SECONDS)
        if self.fails:
            made = tensor.clone()
            self.made = weakref.ref(made)
            raise ValueError("it cannot be made")
        return tensor


@pytest.fixture
def gate() -> Iterator[Gate]:
    gate = Gate()
    yield gate
    gate.open.set()  # so that no thread stays


def names(gate: Gate) -> dict[str, str | ps.MadeOf]:
    return {"bias": ps.MadeOf("bias", gate)}


def read(feed: ps.WeightFeed, model: nn.Linear, max_behind: int | None = None) -> tuple[int, torch.Tensor]:
    with feed.reading(model, max_behind) as version:
        return version, model.weight.detach().clone()


def test_a_request_does_not_wait_while_the_tensors_of_a_newer_edition_are_made(
    shared: Cluster, job: str, trainer: Trainer, gate: Gate
) -> None:
    with ps.subscribe(shared.address, job, names=names(gate)) as feed:
        model = feed.load(nn.Linear(20, 8))
        gate.close()
        feed.wait_for(trainer.step())
        assert gate.entered.wait(TEST_SECONDS)
        version, weight = read(feed, model)
        assert version == 0
        assert torch.equal(weight, trainer.past[0]["weight"])
        with pytest.raises(Unreachable, match="1 updates behind, more than 0"):
            feed.reading(model, max_behind=0, timeout=0.1).__enter__()
        gate.open.set()
        version, weight = read(feed, model, max_behind=0)
        assert version == 1
        assert torch.equal(weight, trainer.past[1]["weight"])


def test_a_coroutine_does_not_wait_either(shared: Cluster, job: str, trainer: Trainer, gate: Gate) -> None:
    async def main() -> list[int]:
        async with ps.subscribe(shared.address, job, names=names(gate)) as feed:
            model = await asyncio.to_thread(feed.load, nn.Linear(20, 8))
            gate.close()
            feed.wait_for(trainer.step())
            assert gate.entered.wait(TEST_SECONDS)
            async with feed.reading_async(model) as first:
                gate.open.set()
            async with feed.reading_async(model, max_behind=0) as second:
                return [first, second]

    assert asyncio.run(asyncio.wait_for(main(), TEST_SECONDS)) == [0, 1]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_model_of_another_type_follows(shared: Cluster, job: str, trainer: Trainer, dtype: torch.dtype) -> None:
    with ps.subscribe(shared.address, job) as feed:
        model, own = feed.load(nn.Linear(20, 8, dtype=dtype)), feed.load(nn.Linear(20, 8))
        assert feed._maker is not None
        for _ in range(3):
            clock = trainer.step()
            feed.wait_for(clock)
            version, weight = read(feed, model, max_behind=0)
            assert (version, weight.dtype) == (clock, dtype)
            assert torch.equal(weight, trainer.past[clock]["weight"].to(dtype))
            assert read(feed, own)[0] == clock, "views of the edition take no time"
        feed.wait_for(trainer.step())
        # A reader that does not ask for it gets it, too, once it is made.
        until(lambda: read(feed, model)[0] == 4, "the newest")
        feed.wait_for(trainer.step())
        assert torch.equal(feed.load(model).weight, trainer.past[5]["weight"].to(dtype)), "load brings the newest"


def test_models_of_one_type_share_one_copy(shared: Cluster, job: str, trainer: Trainer) -> None:
    with ps.subscribe(shared.address, job) as feed:
        models = [feed.load(nn.Linear(20, 8, dtype=torch.float64)) for _ in range(3)]
        other = feed.load(nn.Linear(20, 8, dtype=torch.bfloat16))
        clock = trainer.step()
        feed.wait_for(clock)
        places = set()
        for model in (*models, other):
            version, weight = read(feed, model, max_behind=0)
            assert version == clock
            assert torch.equal(weight, trainer.past[clock]["weight"].to(model.weight.dtype))
            places.add(model.weight.data_ptr())
        assert len(places) == 2
        assert len({model.weight.data_ptr() for model in models}) == 1


def test_a_model_that_is_no_copy_waits_for_no_copy_of_another(
    shared: Cluster, job: str, trainer: Trainer, gate: Gate
) -> None:
    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.own = nn.Linear(20, 8)

    with ps.subscribe(shared.address, job, names=names(gate) | {"own.bias": "bias", "own.weight": "weight"}) as feed:
        copied, viewed = feed.load(nn.Linear(20, 8)), feed.load(Wrapped())
        gate.close()
        feed.wait_for(trainer.step())
        assert gate.entered.wait(TEST_SECONDS)
        with feed.reading(viewed, max_behind=0) as version:
            assert version == 1
            assert torch.equal(viewed.own.weight, trainer.past[1]["weight"])
        assert read(feed, copied)[0] == 0
        gate.open.set()


def test_editions_that_come_faster_than_they_are_made_are_passed_over(
    shared: Cluster, job: str, trainer: Trainer, gate: Gate
) -> None:
    with ps.subscribe(shared.address, job, names=names(gate)) as feed:
        model = feed.load(nn.Linear(20, 8))
        gate.close()
        feed.wait_for(trainer.step())
        assert gate.entered.wait(TEST_SECONDS)
        for _ in range(4):
            feed.wait_for(trainer.step())
        gate.open.set()
        versions = set[int]()

        def has_come_to_the_newest() -> bool:
            version, _ = read(feed, model)
            versions.add(version)
            return version == 5

        until(has_come_to_the_newest, "the newest edition")
        assert versions <= {0, 1, 5}


def test_the_end_of_a_job_is_waited_for(shared: Cluster, job: str, gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the last edition is made, the model is behind, and may still come to it."""
    with ps.subscribe(shared.address, job, names=names(gate)) as feed:
        with shared.connect("sync", job=job) as session:
            trainer = begun(session)
            model = feed.load(nn.Linear(20, 8))
            gate.close()
            trainer.steps(3)
        until(lambda: feed.ended, "the end of the job")
        changed = feed._models[model].changed
        wait = changed.wait

        def waited(timeout: float | None = None) -> bool:
            gate.open.set()  # the reader waits now
            return wait(timeout)

        monkeypatch.setattr(changed, "wait", waited)
        assert read(feed, model, max_behind=0)[0] == 3
        assert gate.open.is_set()


class TwoRuns:
    """A model of copies that follows a job by its name, of which another run begins.

    runs: the trainer of each run, by the run's name
    """

    def __init__(self, feed: ps.WeightFeed, model: nn.Linear, runs: dict[str, Trainer]) -> None:
        self.feed, self.model, self.runs = feed, model, runs

    def read(self, max_behind: int | None = None, timeout: float = TEST_SECONDS) -> tuple[str, int]:
        """Returns the run and the version of a block in which all of the model is of that version of that run."""
        with self.feed.reading(self.model, max_behind, timeout) as version:
            edition = self.feed._models[self.model].edition
            assert edition is not None
            past = self.runs[edition.run].past[version]
            assert all(torch.equal(each, past[name]) for name, each in self.model.state_dict().items())
            return edition.run, version


@contextmanager
def another_run(shared: Cluster, job: str, gate: Gate, width: int) -> Iterator[TwoRuns]:
    """Its relay is away while the run ends and the other one begins. The copies of the last edition that the feed has
    of the first run are under way for as long as the gate is closed. width: of the other run's model
    """
    later = ServerConfig(port=free_ports(1))
    with ExitStack() as away:
        near = away.enter_context(relay(shared.address))
        addresses = f"{near.address},127.0.0.1:{later.port}"
        with ps.subscribe(addresses, job, names=names(gate)) as feed:
            with shared.connect("sync", job=job) as session:
                first = begun(session, 8)
                feed.wait_for(first.steps(3))
                model = feed.load(nn.Linear(20, 8))
                gate.close()
                feed.wait_for(first.step())
                assert gate.entered.wait(TEST_SECONDS)
                runs = {feed.wait_for().run: first}
                away.close()
            with shared.connect("sync", job=job) as session:
                second = begun(session, width)
                second.steps(2)  # before the relay comes back: where there is no job, a feed has ended
                with relay(shared.address, later):
                    until(lambda: feed.wait_for().run not in runs, "the other run")
                    runs[feed.wait_for().run] = second
                    try:
                        yield TwoRuns(feed, model, runs)
                    finally:
                        gate.open.set()  # the end of the feed waits for the copies


def test_copies_are_of_one_run_where_another_one_takes_the_name(
    shared: Cluster, job: str, gate: Gate, caplog: pytest.LogCaptureFixture
) -> None:
    with another_run(shared, job, gate, 8) as two:
        first, second = two.runs
        assert two.read() == (first, 3), "until there are copies of a newer edition"
        with pytest.raises(Unreachable, match="the job has left these weights, for a checkpoint or another run"):
            two.read(max_behind=10**6, timeout=0.1)
        assert f"another run of job {job} has begun: version " in caplog.text
        gate.open.set()
        assert two.read(max_behind=0) == (second, 2), "a lower version than before, without a rollback"
        assert two.feed.restores == 0
        two.feed.wait_for(two.runs[second].step())
        assert two.read(max_behind=0) == (second, 3)


def test_a_model_that_does_not_fit_another_run_keeps_the_weights_that_it_has(
    shared: Cluster, job: str, gate: Gate
) -> None:
    with another_run(shared, job, gate, 9) as two:
        gate.open.set()
        [first, _] = two.runs

        def is_told() -> str | None:
            try:
                assert two.read()[0] == first
            except InvalidRequest as error:
                return str(error)
            return None

        told = until(is_told, "the reason")
        assert "the shapes differ of weight [8, 20] for [9, 20], bias [8] for [9]" in told
        version = two.feed._models[two.model].edition.version  # type: ignore[union-attr]
        past = two.runs[first].past[version]
        assert all(torch.equal(each, past[name]) for name, each in two.model.state_dict().items())


def test_readers_are_told_why_a_tensor_cannot_be_made(shared: Cluster, job: str, trainer: Trainer, gate: Gate) -> None:
    with ps.subscribe(shared.address, job, names=names(gate)) as feed:
        model = feed.load(nn.Linear(20, 8))
        gate.fails = True
        feed.wait_for(trainer.step())
        with pytest.raises(ValueError, match="it cannot be made"):
            read(feed, model, max_behind=0)
        gate.fails = False
        feed.wait_for(trainer.step())
        assert read(feed, model, max_behind=0)[0] == 2


def test_what_could_not_be_made_takes_no_memory_and_is_tried_again_for_readers(
    shared: Cluster, job: str, trainer: Trainer, gate: Gate
) -> None:
    """A GPU may have the memory a moment later, and there may be no other edition."""
    with ps.subscribe(shared.address, job, names=names(gate)) as feed:
        model = feed.load(nn.Linear(20, 8))
        gate.fails = True
        feed.wait_for(trainer.step())
        until(lambda: feed._models[model].problem, "the failure")
        until(lambda: gate.made is not None and gate.made() is None, "its memory")
        gate.fails = False

        def has_come() -> bool:
            with suppress(ValueError):
                return read(feed, model)[0] == 1
            return False

        until(has_come, "the edition that could not be made before")


def test_a_coroutine_is_told_at_once(shared: Cluster, job: str, trainer: Trainer, gate: Gate) -> None:
    async def main() -> None:
        async with ps.subscribe(shared.address, job, names=names(gate)) as feed:
            model = await asyncio.to_thread(feed.load, nn.Linear(20, 8))
            gate.fails = True
            feed.wait_for(trainer.step())
            with pytest.raises(ValueError, match="it cannot be made"):
                async with feed.reading_async(model, max_behind=0, timeout=10 * TEST_SECONDS):
                    pass

    asyncio.run(asyncio.wait_for(main(), TEST_SECONDS))


def test_a_model_that_is_converted_after_it_was_loaded_keeps_its_type(
    shared: Cluster, job: str, trainer: Trainer
) -> None:
    with ps.subscribe(shared.address, job) as feed:
        model = feed.load(nn.Linear(20, 8, dtype=torch.float64))
        for clock, dtype in ((1, torch.bfloat16), (2, torch.float64)):
            feed.wait_for(trainer.step())
            until(lambda: feed._models[model].ready[0].version == clock, "the copy in the type before")  # type: ignore[index]  # noqa: B023
            model.to(dtype)
            version, weight = read(feed, model)
            assert (version, weight.dtype) == (clock, dtype)
            assert torch.equal(weight, trainer.past[clock]["weight"].to(dtype))


def test_an_error_at_the_end_of_a_block_leaves_no_reader(
    shared: Cluster, job: str, trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA tells of a failed kernel where the next event is recorded."""

    def used() -> None:
        raise RuntimeError("an illegal memory access was encountered")

    with ps.subscribe(shared.address, job) as feed:
        model = feed.load(nn.Linear(20, 8, dtype=torch.float64))
        with monkeypatch.context() as patch:
            patch.setattr(feed._tensors, "used", used)
            with pytest.raises(RuntimeError, match="illegal memory access"):
                read(feed, model)
        feed.wait_for(trainer.step())
        assert read(feed, model, max_behind=0)[0] == 1


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_readers_make_the_tensors_where_the_thread_has_ended(shared: Cluster, job: str, trainer: Trainer) -> None:
    ends = threading.Event()

    def made(tensor: torch.Tensor) -> torch.Tensor:
        if ends.is_set() and threading.current_thread().name == "ps-feed-tensors":
            raise SystemExit
        return tensor

    with ps.subscribe(shared.address, job, names={"bias": ps.MadeOf("bias", made)}) as feed:
        model = feed.load(nn.Linear(20, 8))
        ends.set()
        feed.wait_for(trainer.step())
        assert feed._maker is not None
        until(lambda: not feed._maker.runs, "the thread's end")  # type: ignore[union-attr]
        assert read(feed, model)[0] == 1


def test_a_feed_that_is_closed_waits_for_the_copy_under_way_and_readers_do_not(
    shared: Cluster, job: str, trainer: Trainer, gate: Gate
) -> None:
    feed = ps.subscribe(shared.address, job, names=names(gate))
    model = feed.load(nn.Linear(20, 8))
    gate.close()
    feed.wait_for(trainer.step())
    assert gate.entered.wait(TEST_SECONDS)
    maker = feed._maker
    assert maker is not None
    thread = maker._thread
    assert thread is not None
    closing = in_background(feed.close)
    until(lambda: maker._closing.is_set(), "the feed's end")
    assert closing.is_alive()
    assert thread.is_alive()
    gate.open.set()
    closing.join(TEST_SECONDS)
    assert not closing.is_alive()
    assert not thread.is_alive()
    assert read(feed, model)[0] == 1, "the newest edition stays readable"


def test_a_function_that_makes_a_tensor_may_close_the_feed(shared: Cluster, job: str, trainer: Trainer) -> None:
    ends, ended = threading.Event(), threading.Event()

    def made(tensor: torch.Tensor) -> torch.Tensor:
        if ends.is_set():
            feed.close()
            ended.set()
        return tensor

    feed = ps.subscribe(shared.address, job, names={"bias": ps.MadeOf("bias", made)})
    try:
        model = feed.load(nn.Linear(20, 8))
        ends.set()
        trainer.step()
        assert ended.wait(TEST_SECONDS)
        assert read(feed, model)[0] == 1
    finally:
        ends.clear()
        feed.close()


def test_the_thread_begins_with_the_first_model_that_needs_it_and_ends_with_the_feed(
    shared: Cluster, job: str, trainer: Trainer
) -> None:
    feed = ps.subscribe(shared.address, job)
    try:
        feed.load(nn.Linear(20, 8))
        assert feed._maker is not None
        assert not feed._maker.runs
        feed.load(nn.Linear(20, 8, dtype=torch.float64))
        assert feed._maker.runs
        thread = feed._maker._thread
        assert thread is not None
    finally:
        feed.close()
    assert not thread.is_alive()
    assert not feed._maker.runs


def test_a_model_that_nobody_has_any_more_is_freed(shared: Cluster, job: str, trainer: Trainer) -> None:
    with ps.subscribe(shared.address, job) as feed:
        model = feed.load(nn.Linear(20, 8, dtype=torch.float64))
        feed.wait_for(trainer.step())
        read(feed, model, max_behind=0)
        gone = weakref.ref(model.weight)
        del model

        def is_freed() -> bool:
            gc.collect()
            return gone() is None

        until(is_freed, "the model's memory")
