"""The data of elastic jobs: batches leased from the coordinator, each used once per pass by the worker that leases it.

lease   The loader's batch sampler leases batches as it needs them, a few ahead.
take    A batch that the script gets from the loader belongs to the next step.
push    Every push of that step names the batch, and the shards commit it. The next lease reports it to the coordinator.
wait    If no batch is left to lease while other workers still have some, this worker waits until the pass is complete.
        If the mode makes others wait for this worker's clock, it makes empty steps meanwhile.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader, Sampler

from ps_protocol.batches import BatchLease, DataRange, LeaseReport, LeaseRequest, LoaderSpec
from ps_protocol.errors import InvalidRequest, PSError
from ps_worker.data.loaders import POSITION_METHODS, PreparedLoader, rebuilt, shuffles
from ps_worker.data.look_ahead import LookAhead
from ps_worker.metrics import StepTimer

NO_POSITION = (
    "a loader of an elastic job has no state_dict: its batches are leased to whoever comes for them, and which are "
    "used is in the servers' checkpoints (docs/save-and-resume.md). A script's own file is for the end of a pass; in a "
    "job with a world size it has the position in the data, too"
)
MOST_AHEAD = 64
# A worker leases batches for about this long. If it dies, others wait for no more than these; and one call in this time
# costs little.
SHORT_SECONDS, LONG_SECONDS = 0.25, 1.0
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.02, 0.5


@dataclass
class Account:
    """The leased batches of one loader, in the coordinator's terms: leased, committed and returned."""

    waiting: deque[DataRange] = field(default_factory=deque)  # leased, and not requested yet
    handed: deque[DataRange] = field(default_factory=deque)  # requested by the DataLoader, which may be loading them
    pushed: list[DataRange] = field(default_factory=list)
    returned: list[DataRange] = field(default_factory=list)

    def clear(self) -> None:
        """Forgets all batches."""
        for batches in (self.waiting, self.handed, self.pushed, self.returned):
            batches.clear()


class LeasingStrategy(Protocol):
    """The part of a strategy that leasing calls."""

    def lease_batches(self, ask: LeaseRequest) -> BatchLease | None:
        """Returns batches, and whether the pass is complete; None: ask again. Raises PSError."""

    def empty_step(self) -> None:
        """Makes a step without a gradient, which commits the batches of the step."""

    @property
    def others_wait(self) -> bool:
        """Whether the mode makes other workers wait for this worker's clock."""

    @property
    def world_size(self) -> int:
        """The number of workers that take part now."""

    def pause(self, seconds: float) -> None:
        """Waits for a moment. Raises PSError if the session is closed."""


class StepData:
    """The batches that the script has taken from its loaders and no step has used yet.

    accounts: by loader
    rollbacks: the number of rollbacks of the job
    is_behind: since the last of them no loop has asked for a batch
    """

    def __init__(self) -> None:
        self.accounts: dict[int, Account] = {}
        self._taken: list[DataRange] = []
        self._using: list[DataRange] | None = None
        self.rollbacks = 0
        self.is_behind = False

    def took(self, batch: DataRange) -> None:
        """Records a batch that the script takes."""
        self._taken.append(batch)

    def use(self) -> list[DataRange]:
        """Returns the batches of the current step. Batches taken later belong to the next step."""
        if self._using is None:
            self._using, self._taken = self._taken, []
        return self._using

    def pushed(self) -> None:
        """Records that every shard has staged the step's pushes."""
        for batch in self._using or ():
            self.accounts[batch.loader].pushed.append(batch)
        self._using = None

    def failed(self) -> None:
        """Returns the step's batches to the coordinator after a failed push. The shards know which buckets have used
        them."""
        for batch in self._using or ():
            self.accounts[batch.loader].returned.append(batch)
        self._using = None

    def lost(self) -> None:
        """Returns the batches of the current step to the coordinator, whether a part of the step was pushed or not."""
        self.use()
        self.failed()

    def keep(self) -> None:
        """Moves the batches of a step that no shard has seen to the next step."""
        self._taken = [*(self._using or ()), *self._taken]
        self._using = None

    def rollback(self, keep_using: bool = False) -> None:
        """Drops all batches: after a rollback of the job they are leased again.

        keep_using: keeps those of the current step, which is pushed again
        """
        self.rollbacks += 1
        self.is_behind = True
        self._using, self._taken = self._using if keep_using else None, []
        for account in self.accounts.values():
            account.clear()

    def held(self, loader: int) -> list[DataRange]:
        """Returns the taken batches of one loader."""
        return [batch for batch in [*(self._using or ()), *self._taken] if batch.loader == loader]

    @property
    def taken(self) -> int:
        """The number of batches that the script has taken since the last push."""
        return len(self._taken)

    @property
    def pending(self) -> bool:
        """Whether the script has taken batches that no step has used."""
        return bool(self._taken or self._using)


class LeasedBatches(Sampler[list[int]]):
    """The batch sampler of a leased loader. It yields the indices of leased batches until the pass is complete."""

    def __init__(self, spec: LoaderSpec, data: StepData, stepper: LeasingStrategy) -> None:
        self.spec = spec
        self.number = 0  # the pass of the next iteration
        self.data = data
        self._stepper = stepper
        self._account = data.accounts[spec.loader] = Account()
        self._complete = False
        self._took_part = False
        self._ahead = 1
        self._asked = float("-inf")
        self._permutation: tuple[int, torch.Tensor] | None = None

    def __len__(self) -> int:
        return self.spec.batches

    def share(self) -> int:
        """Returns the number of this worker's batches in a pass, if all live workers are equally fast."""
        return -(-self.spec.batches // max(1, self._stepper.world_size))

    def __iter__(self) -> Iterator[list[int]]:
        """Yields batches as lists of indices, in the process and thread that iterates over the DataLoader."""
        while (batch := self._next()) is not None:
            self._account.handed.append(batch)
            yield self._indices(batch)

    def _next(self) -> DataRange | None:
        waiting = self._account.waiting
        if not waiting and not self._complete:
            now = time.monotonic()
            if now - self._asked < SHORT_SECONDS:
                self._ahead = min(2 * self._ahead, MOST_AHEAD)
            elif now - self._asked > LONG_SECONDS:
                self._ahead = max(self._ahead // 2, 1)
            self._asked = now
            self._ask(self._ahead)
        return waiting.popleft() if waiting else None

    def _ask(self, count: int) -> None:
        account, spec = self._account, self.spec
        lease = None
        while lease is None:
            held = [*self.data.held(spec.loader), *account.handed, *account.waiting]
            report = LeaseReport(held, list(account.pushed), list(account.returned))
            lease = self._stepper.lease_batches(LeaseRequest(spec, self.number, count, report))
        self.data.is_behind &= count == 0
        self._complete = lease.complete
        del account.pushed[: len(report.committed)], account.returned[: len(report.returned)]
        account.waiting += lease.ranges
        self._took_part |= bool(lease.ranges)

    def _indices(self, batch: DataRange) -> list[int]:
        if self.spec.seed is None:
            return list(range(batch.start, batch.stop))
        if self._permutation is None or self._permutation[0] != batch.pass_number:
            generator = torch.Generator().manual_seed(self.spec.seed + batch.pass_number)
            self._permutation = batch.pass_number, torch.randperm(self.spec.size, generator=generator)
        indices: list[int] = self._permutation[1][batch.start : batch.stop].tolist()
        return indices

    # -- one iteration -----------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Begins an iteration: the rest of an interrupted pass, or the next pass if others have completed that one."""
        self.give_back()  # batches of an iteration that did not end
        self._complete = False
        if self._took_part:
            self._ask(1)
            if self._complete:
                self._next_pass()

    def take(self) -> DataRange:
        """Returns the batch that the script takes: the first that the DataLoader requested, as it keeps their order."""
        batch = self._account.handed.popleft()
        self.data.took(batch)
        return batch

    def more(self) -> bool:
        """Waits for a batch. Returns False if the pass is complete instead."""
        pause = FIRST_PAUSE_SECONDS
        while not self._account.waiting:
            if not self._complete:
                self._ask(1)
            if self._complete:
                self._next_pass()
                return False
            if self._account.waiting:
                break
            # Batches without a step, such as the rest of an accumulation, would otherwise keep the pass incomplete.
            if self._stepper.others_wait or self.data.pending:
                self._stepper.empty_step()
            else:
                self._stepper.pause(pause)
                pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
        return True

    def rollback(self) -> None:
        """Continues this iteration after a rollback of the job, until its pass is complete again."""
        self._account.waiting.extendleft(reversed(self._account.handed))  # leased since: loaded batches are older
        self._account.handed.clear()
        self._complete = False

    def _next_pass(self) -> None:
        self.number += 1
        self._complete = self._took_part = False

    def give_back(self) -> None:
        """Returns the batches that an interrupted loop has not taken. The next iteration continues the pass."""
        account = self._account
        unused = [*account.handed, *account.waiting]
        account.handed.clear()
        account.waiting.clear()
        account.returned += unused
        if unused:
            with contextlib.suppress(PSError):  # the next request reports them, or this worker leaves
                self._ask(0)


class LeasedLoader:
    """Yields leased batches on the session's device until the pass is complete. All other attributes are the loader's.

    The k-th iteration is the job's k-th pass. For a worker that joins late, passes that are over yield nothing. In
    no_grad mode an iteration yields this worker's fixed share instead, because no push could commit leased batches.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        shares: PreparedLoader,
        leases: LeasedBatches,
        device: torch.device,
        timer: StepTimer,
        look_ahead: LookAhead,
    ) -> None:
        """loader: the script's own. shares: the same, divided among the workers. device: for the batches.

        look_ahead: whether batches may be read ahead
        """
        self._loader = loader
        self._shares = shares
        self._leases = leases
        self._timer = timer
        sampling = {"sampler": _Singly(leases)} if loader.batch_size is None else {"batch_sampler": leases}
        leased = rebuilt(loader, **sampling)
        self._inner = PreparedLoader(leased, device, timer, lambda: look_ahead(iter(leased)))
        self._iteration = 0

    def __iter__(self) -> Iterator[Any]:
        return self._pass() if torch.is_grad_enabled() else iter(self._shares)

    def _pass(self) -> Iterator[Any]:
        self._iteration += 1
        iteration, leases = self._iteration, self._leases
        leases.begin()
        try:
            while self._await_more():
                rollbacks = leases.data.rollbacks
                for batch in self._inner:
                    if leases.data.rollbacks == rollbacks:
                        leases.take()
                        yield batch
                        if self._iteration != iteration:
                            raise InvalidRequest("another iteration over this loader has begun: this one cannot go on")
                    if leases.data.rollbacks != rollbacks:
                        leases.rollback()
                        break  # the batches that are loaded were leased before the rollback
        finally:
            if self._iteration == iteration:
                leases.give_back()

    def _await_more(self) -> bool:
        self._timer.asked()
        more = self._leases.more()
        self._timer.yielded()
        return more

    def __len__(self) -> int:
        """Returns the number of this worker's batches in a pass, if all live workers are equally fast."""
        return self._leases.share()

    def __getattr__(self, name: str) -> Any:
        # The script's own loader may have these methods, and would not know the leased batches
        if name in POSITION_METHODS:
            raise AttributeError(NO_POSITION)
        return getattr(self.__dict__["_loader"], name)


class _Singly(Sampler[int]):
    """Yields the indices of leased batches one by one, for a loader without batches."""

    def __init__(self, leases: Iterable[list[int]]) -> None:
        self._leases = leases

    def __iter__(self) -> Iterator[int]:
        return (index for [index] in self._leases)


def loader_spec(number: int, loader: DataLoader[Any], seed: int) -> LoaderSpec:
    """Returns the properties of a loader that all workers must share. Raises InvalidRequest for its seed."""
    if not -(2**63) <= seed < 2**63:
        raise InvalidRequest(f"a seed has 64 bits, got {seed}")
    return LoaderSpec(
        loader=number,
        size=len(loader.dataset),  # type: ignore[arg-type]
        batch_size=loader.batch_size or 1,
        drop_last=bool(loader.drop_last),
        seed=seed if shuffles(loader.sampler) else None,
    )
