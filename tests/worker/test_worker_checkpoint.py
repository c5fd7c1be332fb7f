"""A worker that is set back ends where it would have ended: to the bit, with all that a training script is made of.

The weights and the optimizer's state, which the servers hold, are kept and put back here by the test.
"""

from __future__ import annotations

import contextlib
import copy
import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy
import pytest
import torch
from safetensors.torch import save
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

from ps_protocol.errors import Backlogged, InvalidRequest, PSError, TryLater, Unsupported
from ps_runtime.retry import Peer, Retry
from ps_worker.data.loaders import PreparedLoader, shard_loader
from ps_worker.metrics import StepTimer
from ps_worker.state.checkpoint import WorkerCheckpoint
from ps_worker.state.encoding import decode

CPU = torch.device("cpu")
SAMPLES, BATCH = 24, 3
BATCHES = SAMPLES // BATCH
PASSES = 4


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Tensors are tiny here: more threads would only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Augmented(Dataset[torch.Tensor]):
    """Samples with noise from every source of randomness that a script may use."""

    def __getitem__(self, index: int) -> torch.Tensor:
        noise = random.random() + numpy.random.rand() + torch.rand(()).item()
        return torch.tensor([float(index), noise, 1.0, noise * index])

    def __len__(self) -> int:
        return SAMPLES


class Stream(IterableDataset[torch.Tensor]):
    """The same, one after the other."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        samples = Augmented()
        return (samples[index] for index in range(SAMPLES))


class Disturbed(Exception):
    """The process ends here."""


@dataclass
class Kept:
    """What the servers have of a checkpoint."""

    clock: int
    model: dict[str, torch.Tensor]
    optimizer: dict[str, object]
    state: bytes = b""


class Worker:
    """A training process: a model with dropout and BatchNorm, two schedulers, and loaders.

    keep:  the clock of the checkpoint
    back:  at which clock it is set back to it, once; or, with `dies`, ends
    """

    def __init__(self, keep: int, back: int = 0, dies: bool = False, loader_workers: int = 0, **more: object) -> None:
        random.seed(1)
        numpy.random.seed(1)
        torch.manual_seed(1)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.4), nn.Linear(8, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.cycle = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, max_lr=0.1, total_steps=10 * BATCHES)
        self.passes = torch.optim.lr_scheduler.StepLR(self.optimizer, step_size=1, gamma=0.7)
        self.rewind = WorkerCheckpoint(CPU, self._save)
        trained = {name for name, _ in self.model.named_parameters()}
        held = [tensor for name, tensor in self.model.state_dict(keep_vars=True).items() if name not in trained]
        self.rewind.watch([self.optimizer], dict(enumerate(held)))
        for scheduler in (self.cycle, self.passes):
            self.rewind.add(scheduler)
        self.loader = self.prepare(DataLoader(Augmented(), BATCH, shuffle=True, num_workers=loader_workers, **more))  # type: ignore[arg-type]
        self.clock = 0
        self.kept: Kept | None = None
        self._keep, self._back, self._dies = keep, back, dies

    def prepare(self, loader: DataLoader[torch.Tensor]) -> PreparedLoader:
        share = shard_loader(loader, lambda: (0, 1), seed=5)
        return PreparedLoader(share, CPU, StepTimer(), self.rewind.add_loader(share).batches)

    def _save(self, clock: int, state: bytes) -> None:
        assert self.kept is not None
        assert clock == self.kept.clock
        self.kept.state = state

    def step(self, loss: torch.Tensor) -> None:
        """As `optimizer.step()` on the servers."""
        loss.backward()
        self.optimizer_step()

    def optimizer_step(self) -> None:
        self.rewind.stepping()
        self.optimizer.step()
        self.clock += 1
        if self.clock == self._keep and self.kept is None:
            self.kept = Kept(self.clock, copy.deepcopy(self.weights()), copy.deepcopy(self.optimizer.state_dict()))
            self.rewind.want(self.clock)
        self.rewind.stepped()
        if self._back and self.clock == self._back:
            self._back = 0
            if self._dies:
                raise Disturbed
            assert self.kept is not None
            self.take(self.kept)
        self.optimizer.zero_grad()

    def take(self, kept: Kept) -> None:
        """Goes on from a checkpoint: the weights at once, the rest in its time."""
        self.model.load_state_dict(kept.model, strict=False)
        state = copy.deepcopy(kept.optimizer)
        for group, mine in zip(state["param_groups"], self.optimizer.param_groups, strict=True):  # type: ignore[call-overload]
            group.update({key: value for key, value in mine.items() if key != "params"})
        self.optimizer.load_state_dict(state)
        for scheduler in (self.cycle, self.passes):
            scheduler.optimizer = self.optimizer
        self.clock = kept.clock
        self.rewind.rollback(kept.state, kept.clock)
        self.rewind.try_restore()

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: parameter.detach() for name, parameter in self.model.named_parameters()}

    def everything(self) -> list[torch.Tensor]:
        """All that a run is judged by: weights, buffers, learning rate, and the next random numbers of each source."""
        self.rewind.capture()
        numbers = [random.random(), numpy.random.rand(), torch.rand(()).item(), self.optimizer.param_groups[0]["lr"]]
        return [*self.model.state_dict().values(), torch.tensor(numbers, dtype=torch.float64)]


Script = Callable[[Worker], None]


def plain(worker: Worker) -> None:
    """A loop as most scripts have it."""
    for _ in range(PASSES):
        for batch in worker.loader:
            worker.step(worker.model(batch).square().mean())
            worker.cycle.step()
        worker.passes.step()


def accumulating(worker: Worker) -> None:
    """A step for every other batch."""
    for _ in range(PASSES):
        for number, batch in enumerate(worker.loader):
            worker.model(batch).square().mean().backward()
            if number % 2:
                worker.optimizer_step()
                worker.cycle.step()
        worker.passes.step()


def evaluating(worker: Worker) -> None:
    """A second loader, between passes and in the middle of them."""
    validation = worker.prepare(DataLoader(Augmented(), BATCH, shuffle=True))

    def evaluate() -> None:
        worker.model.eval()
        with torch.no_grad():
            for batch in validation:
                random.seed(int(worker.model(batch).sum().item() * 1000))
        worker.model.train()

    for _ in range(PASSES):
        for batch in worker.loader:
            worker.step(worker.model(batch).square().mean())
            worker.cycle.step()
            if worker.clock % 5 == 0:
                evaluate()
        worker.passes.step()
        evaluate()


def leaving_early(worker: Worker) -> None:
    """Passes that end before the data does, by the clock."""
    while worker.clock < PASSES * 6:
        for batch in worker.loader:
            worker.step(worker.model(batch).square().mean())
            worker.cycle.step()
            if worker.clock % 6 == 0:
                break
        worker.passes.step()


def two_at_once(worker: Worker) -> None:
    """Two loaders in step."""
    other = worker.prepare(DataLoader(Augmented(), BATCH, shuffle=True))
    for _ in range(PASSES):
        for batch, second in zip(worker.loader, other, strict=True):
            worker.step((worker.model(batch) - worker.model(second)).square().mean())
            worker.cycle.step()
        worker.passes.step()


def by_hand(worker: Worker) -> None:
    """An iterator that is begun again whenever it has ended."""
    batches = iter(worker.loader)
    while worker.clock < PASSES * BATCHES:
        try:
            batch = next(batches)
        except StopIteration:
            worker.passes.step()
            batches = iter(worker.loader)
            batch = next(batches)
        worker.step(worker.model(batch).square().mean())
        worker.cycle.step()


def with_a_sampler_of_its_own(worker: Worker) -> None:
    """The script sets the epoch before each pass, as DDP's scripts do."""
    worker.rewind.loaders.clear()
    sampler = DistributedSampler(Augmented(), num_replicas=1, rank=0, seed=3)
    loader = worker.prepare(DataLoader(Augmented(), BATCH, sampler=sampler))
    for number in range(PASSES):
        sampler.set_epoch(7 * number)
        for batch in loader:
            worker.step(worker.model(batch).square().mean())
            worker.cycle.step()
        worker.passes.step()


def without_a_loader(worker: Worker) -> None:
    """Batches that the script makes by itself, and counts by the clock."""
    worker.rewind.loaders.clear()
    while worker.clock < PASSES * BATCHES:
        worker.step(worker.model(torch.randn(BATCH, 4)).square().mean())


SCRIPTS: list[Script] = [
    plain,
    accumulating,
    evaluating,
    leaving_early,
    two_at_once,
    by_hand,
    with_a_sampler_of_its_own,
]


def run(script: Script, worker: Worker) -> list[torch.Tensor]:
    script(worker)
    return worker.everything()


def same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return all(torch.equal(mine, theirs) for mine, theirs in zip(found, expected, strict=True))


# -- set back while it runs ------------------------------------------------------------------------------------------

# In steps, where a pass has 8 (accumulating: 4; leaving early: 6): within a pass, over the end of one, at the very
# ends, and over several.
BACK = [(3, 5), (3, 4), (4, 13), (8, 9), (8, 11), (7, 8), (2, 16), (6, 15)]


@pytest.mark.parametrize(("keep", "back"), BACK)
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_run_that_is_set_back_ends_as_if_it_had_not_been(script: Script, keep: int, back: int) -> None:
    undisturbed = run(script, Worker(keep))
    disturbed = Worker(keep, back)
    assert same(run(script, disturbed), undisturbed)
    assert disturbed.clock >= back


@pytest.mark.parametrize(("keep", "back"), [(3, 5), (4, 13), (8, 9)])
def test_so_does_one_whose_loader_has_processes(keep: int, back: int) -> None:
    assert same(
        run(plain, Worker(keep, back, loader_workers=1)),
        run(plain, Worker(keep, loader_workers=1)),
    )


@pytest.mark.parametrize(("keep", "back"), [(3, 5), (4, 13), (8, 9)])
def test_so_does_one_without_a_loader(keep: int, back: int) -> None:
    assert same(run(without_a_loader, Worker(keep, back)), run(without_a_loader, Worker(keep)))


@pytest.mark.parametrize("error", [Backlogged, TryLater])
def test_a_call_that_is_repeated_draws_none_of_the_scripts_random_numbers(error: type[PSError]) -> None:
    before = random.getstate(), torch.get_rng_state(), numpy.random.get_state()[1].tolist()
    Retry(Peer("coordinator", "127.0.0.1:1"), 60.0, threading.Event()).wait_after(error("come back"))
    assert random.getstate() == before[0]
    assert torch.equal(torch.get_rng_state(), before[1])
    assert numpy.random.get_state()[1].tolist() == before[2]


def test_without_being_put_back_it_ends_elsewhere() -> None:
    """The test can fail: each part of the state counts."""
    undisturbed = run(plain, Worker(3))
    worker = Worker(3, 5)
    worker.rewind.set_settings = lambda settings: None  # type: ignore[method-assign]
    assert not same(run(plain, worker), undisturbed)


# -- a new process ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("keep", "back"), BACK)
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_new_process_goes_on_where_the_checkpoint_was_made(script: Script, keep: int, back: int) -> None:
    undisturbed = run(script, Worker(keep))
    first = Worker(keep, back, dies=True)
    with pytest.raises(Disturbed):
        script(first)
    assert first.kept is not None
    second = Worker(0)
    kept = first.kept

    def resumed(worker: Worker) -> None:
        worker.take(kept)
        script(worker)

    assert same(run(resumed, second), undisturbed)


def test_a_process_that_was_away_leaves_out_the_steps_of_the_others() -> None:
    seen: list[list[int]] = []

    def loop(worker: Worker) -> None:
        for _ in range(PASSES):
            for batch in worker.loader:
                seen[-1].append(int(batch[0, 0]))
                worker.step(worker.model(batch).square().mean())

    seen.append([])
    first = Worker(3, 5, dies=True)
    with pytest.raises(Disturbed):
        loop(first)
    assert first.kept is not None
    seen.append([])
    loop(Worker(0))
    for missed in (1, 4, 5, 9, 13):
        seen.append([])
        late = Worker(0)
        late.clock = 3 + missed
        late.rewind.rollback(first.kept.state, 3 + missed)
        loop(late)
        assert seen[-1] == seen[1][3 + missed :]


# -- what comes from a server ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def kept() -> bytes:
    worker = Worker(3, 5, dies=True)
    with pytest.raises(Disturbed):
        plain(worker)
    assert worker.kept is not None
    return worker.kept.state


def test_a_state_is_read_as_it_was_written(kept: bytes) -> None:
    found = decode(kept)
    assert (found.clock, found.feeding, found.per_step) == (3, 0, 1)
    assert (found.script.loaders[0].begun, found.script.loaders[0].going, found.script.loaders[0].taken) == (1, True, 3)
    assert isinstance(found.script.settings.groups[0]["betas"], tuple)


def test_what_is_no_state_is_one_clear_error(kept: bytes) -> None:
    noise = torch.Generator().manual_seed(0)
    bad = [b"", b"x", b"\xff" * 64, save({}), save({}, {"ps_worker": "{}"}), save({}, {"ps_worker": "[1]"})]
    bad += [kept[:size] for size in (7, 100, 1000, len(kept) - 1)]
    for _ in range(60):
        place = int(torch.randint(9, 3000, (), generator=noise))
        bad.append(kept[:place] + bytes([kept[place] ^ 0x5A]) + kept[place + 1 :])
    for data in bad[:10]:
        with pytest.raises(InvalidRequest, match="what the servers keep of this worker's state cannot be read: "):
            decode(data)
    for data in bad[10:]:
        with contextlib.suppress(InvalidRequest):  # and nothing else: a changed number may still be a number
            decode(data)


def test_the_state_of_another_script_is_refused(kept: bytes) -> None:
    worker = Worker(0)
    worker.rewind._stateful.pop()
    worker.rewind.rollback(kept, 3)
    with pytest.raises(Unsupported, match="of another script"):
        next(iter(worker.loader))


def test_a_job_that_went_back_into_a_loop_that_is_over_asks_for_a_new_start() -> None:
    def in_two_phases(worker: Worker) -> None:
        second = worker.prepare(DataLoader(Augmented(), BATCH))
        for loader in (worker.loader, second):
            for batch in loader:
                worker.step(worker.model(batch).square().mean())

    worker = Worker(3, 10)
    in_two_phases(worker)  # nobody asks the first loader again
    assert worker.clock == 3 + 16 - 10


class Odd:
    """Has a state that cannot be saved."""

    def state_dict(self) -> dict[str, object]:
        return {"call": print}

    def load_state_dict(self, state: dict[str, object]) -> None:
        raise AssertionError


def test_what_cannot_be_saved_is_refused_when_it_is_handed_over() -> None:
    with pytest.raises(Unsupported, match=r"Odd\.call holds a builtin_function_or_method, which cannot be saved"):
        Worker(0).rewind.add(Odd())


SCHEDULERS: list[Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler]] = [
    lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
    lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [2, 3, 3, 5]),
    lambda o: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    lambda o: torch.optim.lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=3),
    lambda o: torch.optim.lr_scheduler.SequentialLR(
        o,
        [torch.optim.lr_scheduler.ConstantLR(o, 0.5, 3), torch.optim.lr_scheduler.ExponentialLR(o, 0.9)],
        milestones=[4],
    ),
    lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=30),
]


@pytest.mark.parametrize("make", SCHEDULERS)
def test_schedulers_go_back(make: Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler]) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=0.1, momentum=0.9)
    scheduler = make(optimizer)
    states: list[bytes] = []
    rewind = WorkerCheckpoint(CPU, lambda clock, state: states.append(state))
    rewind.watch([optimizer], {})
    rewind.add(scheduler)

    def train(steps: int) -> list[float]:
        found = []
        for _ in range(steps):
            optimizer.step()
            scheduler.step()
            found.append(optimizer.param_groups[0]["lr"])
        return found

    train(3)
    rewind.want(3)
    rewind.stepped()
    first = train(8)
    rewind.rollback(states[0], 3)
    rewind.try_restore()
    assert train(8) == first
