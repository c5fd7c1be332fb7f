"""A worker that is rolled back ends where it would have ended: to the bit, with all that a training script is made of.

The weights and the optimizer's state, which the servers hold, are kept and put back here by the test.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy
import pytest
import torch
from safetensors.torch import save
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from ps_protocol.errors import Backlogged, InvalidRequest, PSError, TryLater, Unsupported
from ps_runtime.retry import Peer, Retry
from ps_worker.data.loaders import PreparedLoader, shard_loader
from ps_worker.metrics import StepTimer
from ps_worker.state.checkpoint import WorkerCheckpoint
from ps_worker.state.encoding import decode
from ps_worker.state.model_state import ModelState
from tests.tools.cases import cases, crossed
from tests.tools.small_models import same

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


class Died(Exception):
    """The process ends here."""


@dataclass
class Kept:
    """A checkpoint: the servers' part, and the worker's own."""

    clock: int
    model: dict[str, torch.Tensor]
    optimizer: dict[str, Any]
    state: bytes = b""


class Worker:
    """A training process: a model with dropout and BatchNorm, two schedulers, and loaders.

    keep:  the clock of the checkpoint
    back:  at which clock it is rolled back to it, once; or, with `dies`, ends
    """

    def __init__(self, keep: int = 0, back: int = 0, dies: bool = False, loader_workers: int = 0) -> None:
        random.seed(1)
        numpy.random.seed(1)
        torch.manual_seed(1)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.4), nn.Linear(8, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.cycle = lr_scheduler.OneCycleLR(self.optimizer, max_lr=0.1, total_steps=10 * BATCHES)
        self.passes = lr_scheduler.StepLR(self.optimizer, step_size=1, gamma=0.7)
        self.checkpoint = WorkerCheckpoint(CPU, self._save)
        trained = dict(self.model.named_parameters())
        frozen = [tensor for name, tensor in self.model.state_dict(keep_vars=True).items() if name not in trained]
        self.checkpoint.watch([self.optimizer], ModelState(dict(enumerate(frozen))))
        for scheduler in (self.cycle, self.passes):
            self.checkpoint.add(scheduler)
        self.loader = self.prepare(DataLoader(Augmented(), BATCH, shuffle=True, num_workers=loader_workers))
        self.clock = 0
        self.kept: Kept | None = None
        self._keep, self._back, self._dies = keep, back, dies

    def prepare(self, loader: DataLoader[torch.Tensor]) -> PreparedLoader:
        share = shard_loader(loader, lambda: (0, 1), seed=5)
        return PreparedLoader(share, CPU, StepTimer(), self.checkpoint.add_loader(share, iter).batches)

    def _save(self, clock: int, state: bytes) -> None:
        assert self.kept is not None
        assert clock == self.kept.clock
        self.kept.state = state

    def train_on(self, batch: torch.Tensor) -> None:
        """One step, as the servers make it, and one of the schedule."""
        self.step(self.model(batch).square().mean())
        self.cycle.step()

    def step(self, loss: torch.Tensor) -> None:
        loss.backward()
        self.optimizer_step()

    def optimizer_step(self) -> None:
        self.checkpoint.stepping()
        self.optimizer.step()
        self.clock += 1
        if self.clock == self._keep and self.kept is None:
            self.keep_now()
        self.checkpoint.stepped()
        if self._back and self.clock == self._back:
            self._back = 0
            if self._dies:
                raise Died
            assert self.kept is not None
            self.take(self.kept)
        self.optimizer.zero_grad()

    def keep_now(self) -> None:
        """Begins a checkpoint, which wants this worker's state."""
        if self.kept is None:
            weights = {name: parameter.detach().clone() for name, parameter in self.model.named_parameters()}
            self.kept = Kept(self.clock, weights, copy.deepcopy(self.optimizer.state_dict()))
            self.checkpoint.want(self.clock)

    def take(self, kept: Kept) -> None:
        """Goes on from a checkpoint: the weights at once, the rest in its time."""
        self.model.load_state_dict(kept.model, strict=False)
        state = copy.deepcopy(kept.optimizer)
        for group, current in zip(state["param_groups"], self.optimizer.param_groups, strict=True):
            group.update({key: value for key, value in current.items() if key != "params"})
        self.optimizer.load_state_dict(state)
        for scheduler in (self.cycle, self.passes):
            scheduler.optimizer = self.optimizer
        self.clock = kept.clock
        self.checkpoint.rollback(kept.state, kept.clock)
        self.checkpoint.try_restore()

    def ends(self, script: Script) -> list[torch.Tensor]:
        """Runs a script. All that it is judged by: weights, buffers, learning rate, and each source's next number."""
        script(self)
        self.checkpoint.capture()
        numbers = [random.random(), numpy.random.rand(), torch.rand(()).item(), self.optimizer.param_groups[0]["lr"]]
        return [*self.model.state_dict().values(), torch.tensor(numbers, dtype=torch.float64)]


@functools.cache
def undisturbed(script: Script) -> list[torch.Tensor]:
    """What a run ends with that keeps nothing."""
    return Worker().ends(script)


def kept_by_one_that_dies(script: Script, keep: int, back: int) -> Kept:
    worker = Worker(keep, back, dies=True)
    with pytest.raises(Died):
        script(worker)
    assert worker.kept is not None
    return worker.kept


# -- scripts ---------------------------------------------------------------------------------------------------------

Script = Callable[[Worker], None]


def plain(worker: Worker) -> None:
    """A loop as most scripts have it."""
    for _ in range(PASSES):
        for batch in worker.loader:
            worker.train_on(batch)
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
            worker.train_on(batch)
            if worker.clock % 5 == 0:
                evaluate()
        worker.passes.step()
        evaluate()


def leaving_early(worker: Worker) -> None:
    """Passes that end before the data does, by the clock."""
    while worker.clock < PASSES * 6:
        for batch in worker.loader:
            worker.train_on(batch)
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
        worker.train_on(batch)


def with_a_sampler_of_its_own(worker: Worker) -> None:
    """The script sets the epoch before each pass, as DDP's scripts do."""
    worker.checkpoint.loaders.clear()
    sampler = DistributedSampler(Augmented(), num_replicas=1, rank=0, seed=3)
    loader = worker.prepare(DataLoader(Augmented(), BATCH, sampler=sampler))
    for number in range(PASSES):
        sampler.set_epoch(7 * number)
        for batch in loader:
            worker.train_on(batch)
        worker.passes.step()


def without_a_loader(worker: Worker) -> None:
    """Batches that the script makes by itself, and counts by the clock."""
    worker.checkpoint.loaders.clear()
    while worker.clock < PASSES * BATCHES:
        worker.step(worker.model(torch.randn(BATCH, 4)).square().mean())


def evaluating_alone(worker: Worker) -> None:
    """Batches that the script makes by itself, and a loader that only evaluates."""
    while worker.clock < PASSES * BATCHES:
        worker.step(worker.model(torch.randn(BATCH, 4)).square().mean())
        if worker.clock % 4 == 0:
            for batch in worker.loader:
                with torch.no_grad():
                    worker.model(batch)


SCRIPTS = [plain, accumulating, evaluating, leaving_early, two_at_once, by_hand, with_a_sampler_of_its_own]

# -- rolled back while it runs ---------------------------------------------------------------------------------------

# In steps, where a pass has 8 (accumulating: 4; leaving early: 6): within a pass, over the end of one, at the very
# ends, and over several.
BACK = [(3, 5), (3, 4), (4, 13), (8, 9), (8, 11), (7, 8), (2, 16), (6, 15)]
FEW = [(3, 5), (4, 13), (8, 9)]
PAIRS = [(script, at) for script in SCRIPTS for at in BACK]  # 56: a third of them has each script and each place


@pytest.mark.parametrize(
    ("script", "keep", "back"),
    cases(
        [
            *((script, *at) for script, at in PAIRS[::3]),
            *((script, *at) for script in (without_a_loader, evaluating_alone) for at in FEW),
        ],
        [(script, *at) for number, (script, at) in enumerate(PAIRS) if number % 3],
    ),
)
def test_a_run_that_is_set_back_ends_as_if_it_had_not_been(script: Script, keep: int, back: int) -> None:
    disturbed = Worker(keep, back)
    assert same(disturbed.ends(script), undisturbed(script))
    assert disturbed.clock >= back


@pytest.mark.long
def test_so_does_one_whose_loader_has_processes() -> None:
    assert same(Worker(4, 13, loader_workers=1).ends(plain), Worker(loader_workers=1).ends(plain))


@pytest.mark.parametrize("error", [Backlogged, TryLater])
def test_a_call_that_is_repeated_draws_none_of_the_scripts_random_numbers(error: type[PSError]) -> None:
    before = random.getstate(), torch.get_rng_state(), numpy.random.get_state()[1].tolist()
    Retry(Peer("coordinator", "127.0.0.1:1"), 60.0, threading.Event()).wait_after(error("come back"))
    assert random.getstate() == before[0]
    assert torch.equal(torch.get_rng_state(), before[1])
    assert numpy.random.get_state()[1].tolist() == before[2]


def test_without_being_put_back_it_ends_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test can fail: each part of the state counts."""
    worker = Worker(3, 5)
    monkeypatch.setattr(worker.checkpoint, "set_settings", lambda settings: None)
    assert not same(worker.ends(plain), undisturbed(plain))


def test_a_job_that_went_back_into_a_loop_that_is_over_asks_for_a_new_start() -> None:
    def in_two_phases(worker: Worker) -> None:
        second = worker.prepare(DataLoader(Augmented(), BATCH))
        for loader in (worker.loader, second):
            for batch in loader:
                worker.step(worker.model(batch).square().mean())

    worker = Worker(3, 10)
    in_two_phases(worker)  # nobody asks the first loader again
    assert worker.clock == 3 + 16 - 10


SCHEDULERS: list[Callable[[torch.optim.Optimizer], lr_scheduler.LRScheduler]] = [
    lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
    lambda o: lr_scheduler.MultiStepLR(o, [2, 3, 3, 5]),
    lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=3),
    lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=30),
    lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o, 0.5, 3), lr_scheduler.ExponentialLR(o, 0.9)], milestones=[4]
    ),
]


@pytest.mark.parametrize("make", SCHEDULERS)
def test_schedulers_go_back(make: Callable[[torch.optim.Optimizer], lr_scheduler.LRScheduler]) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=0.1, momentum=0.9)
    scheduler = make(optimizer)
    states: list[bytes] = []
    checkpoint = WorkerCheckpoint(CPU, lambda clock, state: states.append(state))
    checkpoint.watch([optimizer], ModelState({}))
    checkpoint.add(scheduler)

    def rates(steps: int) -> list[float]:
        found = []
        for _ in range(steps):
            optimizer.step()
            scheduler.step()
            found.append(optimizer.param_groups[0]["lr"])
        return found

    rates(3)
    checkpoint.want(3)
    checkpoint.stepped()
    checkpoint.close()  # no further step is told
    first = rates(8)
    checkpoint.rollback(states[0], 3)
    checkpoint.try_restore()
    assert rates(8) == first


# -- a new process ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("script", "keep", "back"),
    cases(
        [(script, *at) for script, at in PAIRS[1::3]],
        [(script, *at) for number, (script, at) in enumerate(PAIRS) if number % 3 != 1],
    ),
)
def test_a_new_process_goes_on_where_the_checkpoint_was_made(script: Script, keep: int, back: int) -> None:
    kept = kept_by_one_that_dies(script, keep, back)

    def resumed(worker: Worker) -> None:
        worker.take(kept)
        script(worker)

    assert same(Worker().ends(resumed), undisturbed(script))


def two_in_step(worker: Worker) -> None:
    """Two loaders in step. The loop ends with the first of them."""
    other = worker.prepare(DataLoader(Augmented(), BATCH, shuffle=True))
    for _ in range(PASSES):
        for batch, second in zip(worker.loader, other, strict=False):
            worker.step((worker.model(batch) - worker.model(second)).square().mean())
            worker.cycle.step()
        worker.passes.step()


@pytest.mark.parametrize("keep", [3, BATCHES + 3, 2 * BATCHES + 5])
def test_a_new_process_goes_on_in_both_of_two_loops_that_are_in_step(keep: int) -> None:
    kept = kept_by_one_that_dies(two_in_step, keep, keep + 2)

    def resumed(worker: Worker) -> None:
        worker.take(kept)
        two_in_step(worker)

    assert Worker().ends(resumed)[-1].equal(undisturbed(two_in_step)[-1])


@pytest.mark.parametrize("at", [3, BATCHES + 3])
def test_a_process_that_stops_in_two_loops_in_step_loses_no_batch_of_either(at: int) -> None:
    def samples(worker: Worker, stop: int | None = None) -> list[tuple[int, int]]:
        other = worker.prepare(DataLoader(Augmented(), BATCH, shuffle=True))
        seen: list[tuple[int, int]] = []
        for _ in range(PASSES):
            for one, two in zip(worker.loader, other, strict=False):
                if len(seen) == stop:
                    return seen
                seen.append((int(one[0, 0]), int(two[0, 0])))
                worker.step((worker.model(one) - worker.model(two)).square().mean())
        return seen

    first, later = Worker(), Worker()
    before = samples(first, at)
    later.clock = at
    later.checkpoint.rollback(first.checkpoint.last_state(at, counts=False), at, at)
    assert [*before, *samples(later)] == samples(Worker())


def evaluating_after_a_wait(worker: Worker, keep_after: int | None = None) -> None:
    """An evaluation before the first pass and behind each. A checkpoint wants a state before one of them."""
    validation = worker.prepare(DataLoader(Augmented(), BATCH, shuffle=True))
    for number in range(PASSES + 1):
        if number:
            for batch in worker.loader:
                worker.train_on(batch)
            worker.passes.step()
        if number == keep_after:
            worker.keep_now()
        worker.model.eval()
        for batch in validation:
            with torch.no_grad():
                worker.model(batch)
        worker.model.train()


@pytest.mark.parametrize("after", [0, 1, 2])
@pytest.mark.parametrize("dies", [False, True])
def test_a_state_that_is_wanted_between_two_loops_brings_no_pass_back_and_leaves_none_out(
    after: int, dies: bool
) -> None:
    """As where a worker waits for the others between its training and its evaluation."""
    worker = Worker(back=after * BATCHES + 3, dies=dies)
    script = functools.partial(evaluating_after_a_wait, keep_after=after)
    if not dies:
        assert same(worker.ends(script), undisturbed(evaluating_after_a_wait))
        return
    with pytest.raises(Died):
        script(worker)
    kept = worker.kept
    assert kept is not None

    def resumed(again: Worker) -> None:
        again.take(kept)
        evaluating_after_a_wait(again)

    assert same(Worker().ends(resumed), undisturbed(evaluating_after_a_wait))


def in_phases(worker: Worker) -> None:
    """Passes over one loader, and then over another one."""
    second = worker.prepare(DataLoader(Augmented(), BATCH, shuffle=True))
    for loader in (worker.loader, worker.loader, second, second):
        for batch in loader:
            worker.train_on(batch)
        worker.passes.step()


def in_turns(worker: Worker) -> None:
    """Passes over two loaders by turns, and evaluations over a third."""
    second = worker.prepare(DataLoader(Augmented(), BATCH, shuffle=True))
    third = worker.prepare(DataLoader(Augmented(), BATCH, shuffle=True))
    for loader in (worker.loader, second, worker.loader, second):
        for batch in loader:
            worker.train_on(batch)
        worker.passes.step()
        for batch in third:
            worker.model.eval()
            with torch.no_grad():
                worker.model(batch)
            worker.model.train()


@pytest.mark.parametrize("script", [in_phases, in_turns])
@pytest.mark.parametrize("keep", [[BATCHES + 3], [2 * BATCHES + 3, 2 * BATCHES + 5], [3 * BATCHES, 3 * BATCHES + 2]])
def test_a_new_process_makes_no_pass_again_over_a_loader_before_the_one_it_goes_on_in(
    script: Script, keep: list[int]
) -> None:
    """With several in a row, each goes on from a checkpoint of the one before."""
    kept = None

    def resumed(worker: Worker) -> None:
        if kept is not None:
            worker.take(kept)
        script(worker)

    for clock in keep:
        worker = Worker(clock, clock + 2, dies=True)
        with pytest.raises(Died):
            resumed(worker)
        kept = worker.kept
    assert same(Worker().ends(resumed), undisturbed(script))


@pytest.mark.parametrize("keep", [3, BATCHES + 3])
def test_a_new_process_goes_on_where_training_is_if_a_batch_of_an_evaluation_is_asked_for_first(keep: int) -> None:
    """Behind each step it asks an iterator that is not at its end."""

    def samples(worker: Worker) -> list[int]:
        validation = iter(worker.prepare(DataLoader(Augmented(), 1)))
        seen = []
        for _ in range(2):
            for batch in worker.loader:
                seen.append(int(batch[0, 0]))
                worker.step(worker.model(batch).square().mean())
                with torch.no_grad():
                    worker.model(torch.cat([next(validation)] * 2))
        return seen

    kept, later = kept_by_one_that_dies(samples, keep, keep + 2), Worker()
    later.take(kept)
    assert samples(later) == samples(Worker())[keep:]


def evaluating_before_each_step(worker: Worker) -> None:
    """Batches that the script makes by itself, each behind an evaluation in which torch makes no gradients."""
    while worker.clock < PASSES * BATCHES:
        for batch in worker.loader:
            with torch.no_grad():
                worker.model(batch)
        worker.train_on(torch.randn(BATCH, 4))


def test_a_new_process_does_not_wait_for_an_evaluation_that_is_taken_for_the_steps_data() -> None:
    kept, later = kept_by_one_that_dies(evaluating_before_each_step, 5, 7), Worker()
    later.take(kept)
    evaluating_before_each_step(later)
    assert later.clock == PASSES * BATCHES
    assert later.cycle.last_epoch == later.clock
    assert later.checkpoint.loaders[0].state().begun == later.clock - 1  # but for the evaluation before its first step


def test_a_process_that_was_away_leaves_out_the_steps_of_the_others() -> None:
    def first_samples(worker: Worker) -> list[int]:
        """Which sample each batch began with."""
        seen = []
        for _ in range(PASSES):
            for batch in worker.loader:
                seen.append(int(batch[0, 0]))
                worker.step(worker.model(batch).square().mean())
        return seen

    kept, whole = kept_by_one_that_dies(first_samples, 3, 5), first_samples(Worker())
    for missed in (1, 4, 5, 9, 13):
        late = Worker()
        late.clock = 3 + missed
        late.checkpoint.rollback(kept.state, 3 + missed)
        assert first_samples(late) == whole[3 + missed :]


# -- a process that is told to stop ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("at", "counts"), crossed([0, 3, BATCHES - 1, BATCHES, BATCHES + 2], [True, False]))
def test_a_process_that_stops_within_a_step_loses_no_batch_and_repeats_none(at: int, counts: bool) -> None:
    def samples(worker: Worker, stop: int | None = None) -> list[int]:
        """Which sample each batch began with, up to a batch that is taken and not stepped with."""
        seen: list[int] = []
        for _ in range(PASSES):
            for batch in worker.loader:
                if len(seen) == stop:
                    return seen  # what an exception does, too: the loop is left
                seen.append(int(batch[0, 0]))
                worker.step(worker.model(batch).square().mean())
        return seen

    first, later = Worker(), Worker()
    before = samples(first, at)
    later.clock = at + counts
    later.checkpoint.rollback(first.checkpoint.last_state(later.clock, counts), later.clock, later.clock)
    whole = samples(Worker())
    assert before == whole[:at]
    assert samples(later) == whole[at + counts :]


def test_a_process_that_stops_while_it_evaluates_evaluates_again() -> None:
    evaluated: list[int] = []

    def script(worker: Worker, dies: bool) -> None:
        validation = worker.prepare(DataLoader(Augmented(), BATCH))
        for _ in range(2):
            for batch in worker.loader:
                worker.step(worker.model(batch).square().mean())
            for number, _ in enumerate(validation):
                if dies and number == 2:
                    raise Died
                evaluated.append(worker.clock)

    first, later = Worker(), Worker()
    with pytest.raises(Died):
        script(first, dies=True)
    assert first.clock == BATCHES
    later.clock = BATCHES
    later.checkpoint.rollback(first.checkpoint.last_state(BATCHES, counts=False), BATCHES, BATCHES)
    evaluated.clear()
    script(later, dies=False)
    assert evaluated == [BATCHES] * BATCHES + [2 * BATCHES] * BATCHES


def test_a_script_that_has_left_its_loop_goes_on_behind_it() -> None:
    def script(worker: Worker, passes: int) -> list[int]:
        seen = []
        for _ in range(passes):
            for number, batch in enumerate(worker.loader):
                if number == 2:
                    break
                seen.append(int(batch[0, 0]))
                worker.step(worker.model(batch).square().mean())
        return seen

    first, later = Worker(), Worker()
    before = script(first, 2)
    later.clock = 4
    later.checkpoint.rollback(first.checkpoint.last_state(4, counts=False, cut_short=False), 4, 4)
    assert before + script(later, 4) == script(Worker(), 4)


def test_a_process_that_stops_before_it_has_gone_on_leaves_what_it_was_given(state: bytes) -> None:
    worker = Worker()
    worker.checkpoint.rollback(state, 3)
    left = decode(worker.checkpoint.last_state(3, counts=False))
    assert (left.clock, left.script.loaders[0].taken) == (3, 3)


# -- what comes from a server ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def state() -> bytes:
    """What the servers keep of a worker."""
    return kept_by_one_that_dies(plain, 3, 5).state


def test_a_state_is_read_as_it_was_written(state: bytes) -> None:
    found = decode(state)
    assert (found.clock, found.feeding, found.per_step) == (3, 0, 1)
    assert (found.script.loaders[0].begun, found.script.loaders[0].going, found.script.loaders[0].taken) == (1, True, 3)
    assert isinstance(found.script.settings.groups[0]["betas"], tuple)


def test_what_is_no_state_is_one_clear_error(state: bytes) -> None:
    bad = [b"", b"x", b"\xff" * 64, save({}), save({}, {"ps_worker": "{}"}), save({}, {"ps_worker": "[1]"})]
    bad += [state[:size] for size in (7, 100, 1000, len(state) - 1)]
    for data in bad:
        with pytest.raises(InvalidRequest, match="what the servers keep of this worker's state cannot be read: "):
            decode(data)
    noise = torch.Generator().manual_seed(0)
    for place in torch.randint(9, 3000, (60,), generator=noise).tolist():
        with contextlib.suppress(InvalidRequest):  # and nothing else: a changed number may still be a number
            decode(state[:place] + bytes([state[place] ^ 0x5A]) + state[place + 1 :])


def test_the_state_of_another_script_is_refused(state: bytes) -> None:
    worker = Worker()
    worker.checkpoint.add(lr_scheduler.StepLR(worker.optimizer, 1))
    worker.checkpoint.rollback(state, 3)
    with pytest.raises(Unsupported, match="of another script"):
        next(iter(worker.loader))


class Unsavable:
    """Has a state that cannot be saved."""

    def state_dict(self) -> dict[str, object]:
        return {"call": print}

    def load_state_dict(self, state: dict[str, object]) -> None:
        raise AssertionError


def test_what_cannot_be_saved_is_refused_when_it_is_handed_over() -> None:
    said = r"Unsavable\.call holds a builtin_function_or_method, which cannot be saved"
    with pytest.raises(Unsupported, match=said):
        Worker().checkpoint.add(Unsavable())


# -- without a loader ------------------------------------------------------------------------------------------------


class Looping(Worker):
    """A worker whose script draws its batches itself, and steps its schedule where `place` says."""

    def run(self, place: str, until: int) -> None:
        """The loop of a script that goes by the job's clock."""
        while self.clock < until:
            batch = torch.rand(BATCH, 4) + random.random() + numpy.random.rand()
            if place == "before":
                self.cycle.step()
            self.model(batch).square().mean().backward()
            self.optimizer_step()
            if place == "behind":
                self.cycle.step()
            if self.clock % 5 == 0:
                self.passes.step()


def looping(place: str) -> Script:
    def script(worker: Worker) -> None:
        assert isinstance(worker, Looping)
        worker.run(place, 60)

    return script


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")  # of the order that torch advises against
@pytest.mark.parametrize("place", ["behind", "before"])
@pytest.mark.parametrize("back", [[25], [21, 22, 27]])
def test_a_loop_without_a_loader_is_rolled_back_to_the_bit(place: str, back: list[int]) -> None:
    """Once, and again and again."""

    class Thrice(Looping):
        def optimizer_step(self) -> None:
            super().optimizer_step()
            if back_at and self.clock == back_at[0] and self.kept is not None:
                del back_at[0]
                self.take(self.kept)
                self.optimizer.zero_grad()

    back_at: list[int] = []
    expected = Looping().ends(looping(place))
    back_at = list(back)
    assert same(Thrice(keep=20).ends(looping(place)), expected)
    assert not back_at


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")  # of the order that torch advises against
@pytest.mark.parametrize("place", ["behind", "before"])
def test_a_new_process_without_a_loader_goes_on_to_the_bit(place: str) -> None:
    """Several in a row, each from a checkpoint of the one before."""
    expected = Looping().ends(looping(place))
    kept = None
    for keep in (20, 24, 30):
        worker = Looping(keep, keep + 2, dies=True)
        if kept is not None:
            worker.take(kept)
        with pytest.raises(Died):
            worker.run(place, 60)
        kept = worker.kept
    last = Looping()
    assert kept is not None
    last.take(kept)
    assert same(last.ends(looping(place)), expected)


def test_a_state_without_a_next_step_is_that_of_the_end_of_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """A script that is long between two steps does not keep a checkpoint waiting."""
    monkeypatch.setattr("ps_worker.state.checkpoint.NEXT_STEP_SECONDS", 0.01)
    saved = threading.Event()
    states: list[bytes] = []
    checkpoint = WorkerCheckpoint(CPU, lambda clock, state: (states.append(state), saved.set())[0])
    checkpoint.want(1)
    checkpoint.stepped()
    assert saved.wait(30)
    checkpoint.stepping()
    assert [decode(state).at_step for state in states] == [None]
