"""Clusters that are broken on purpose: each mutation takes one rule, or one repair, out of the real code.

A simulation that finds nothing wrong says something only if it finds these.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from ps_protocol.errors import PSError, TryLater
from ps_protocol.job import JobSpec
from ps_protocol.row_ids import Ids
from ps_server.coordinator.charge import Charge
from ps_server.coordinator.coordinated_job import CoordinatedJob
from ps_server.coordinator.coordinator import Coordinator
from ps_server.coordinator.job_workers import JobWorkers, Joined, Reservation
from ps_server.coordinator.lifecycle import Lifecycle, Phase
from ps_server.coordinator.recovery import Recovery
from ps_server.coordinator.removals import Removal, Removals
from ps_server.core.commands import BeginRows, Staged, StageRows, UnitCommand
from ps_server.core.consistency import ADMITTED, Add, Admission, QuorumRule, Step, UpdateRule
from ps_server.core.data_leases import WorkerId
from ps_server.core.dense import OpenUpdate, SentWeights
from ps_server.core.membership import Membership, Rivals, ShardProgress
from ps_server.core.partition import JobPartition
from ps_server.core.shard_table import ComingRows, ShardTable
from ps_server.core.table_rows import TableRows
from ps_server.shard.hosted import HostedJobs
from ps_server.shard.hosted_job import HostedJob, HostedUnit
from ps_server.shard.pulls import Pulls
from ps_server.shard.snapshots import SnapshotTask
from ps_server.shard.terms import CoordinatorTerms
from ps_tables.candidates import Candidates
from ps_tables.contributions import RowGradients
from ps_tables.copies import TableCopy
from ps_tables.entries import Entries
from ps_tables.initial import initial_rows
from ps_tables.table import Table
from tests.simulation.cluster import Cluster
from tests.simulation.runs import BUCKETS_WITH_TABLES

Break = Callable[[pytest.MonkeyPatch], None]


@dataclass(frozen=True)
class Mutation:
    """One thing that is broken.

    modes:   in which it is looked for
    kinds:   of promises that it breaks, any of which will do
    faults:  the kinds of faults among which it shows often, also while all leave; None: any
    known:   a mode and a seed that find it among these faults; None: none is known
    besides: what is broken too, because it hides this one: without this one, that must show nothing
    tables:  it is looked for in jobs with tables
    sharing: it is looked for among workers that share memory with shards
    """

    breaks: Break
    modes: tuple[str, ...]
    kinds: frozenset[str]
    faults: tuple[str, ...] | None = None
    known: tuple[str, int] | None = None
    besides: Break | None = None
    tables: bool = False
    sharing: bool = False

    @property
    def name(self) -> str:
        """What it is called."""
        return self.breaks.__name__

    def finds(self, patch: pytest.MonkeyPatch, mode: str, seed: int, faults: tuple[str, ...] | None) -> str:
        """Returns the kind of promise that a seed finds broken, and that holds without the mutation; empty: none."""
        self.breaks(patch)
        if self.besides is not None:
            self.besides(patch)
        kinds = {violation.kind for violation in self._cluster(mode, seed, faults).run()} & self.kinds
        patch.undo()
        if kinds and self.besides is not None:
            self.besides(patch)
        holds = not kinds or not self._cluster(mode, seed, faults).run()  # otherwise something else is wrong there
        patch.undo()
        return min(kinds) if kinds and holds else ""

    def _cluster(self, mode: str, seed: int, faults: tuple[str, ...] | None) -> Cluster:
        return Cluster(mode, seed, faults=faults, tables=self.tables, sharing=self.sharing)

    def find(self, patch: pytest.MonkeyPatch, seeds: range) -> tuple[str, int, str] | None:
        """Returns the first mode and seed that find it among any faults, and what is broken; None: none does."""
        for seed in seeds:
            for mode in self.modes:
                kind = self.finds(patch, mode, seed, None)
                if kind:
                    return mode, seed, kind
        return None


# -- rules of the core -----------------------------------------------------------------------------------------------


def takes_repeats_for_new(patch: pytest.MonkeyPatch) -> None:
    """A push that comes twice counts twice."""
    patch.setattr(UpdateRule, "is_repeat", lambda self, rank, clock: False)


def acknowledges_and_forgets(patch: pytest.MonkeyPatch) -> None:
    """Some pushes are acknowledged and never applied."""
    stage = UpdateRule.stage

    def forgetful(self: UpdateRule[object], rank: int, clock: int, *rest: object) -> None:
        stage(self, rank, clock, *rest)  # type: ignore[arg-type]
        if clock % 7 == 0:
            del self.waiting[rank]

    patch.setattr(UpdateRule, "stage", forgetful)


def admits_everybody(patch: pytest.MonkeyPatch) -> None:
    """No pull waits for anybody."""
    patch.setattr(UpdateRule, "admit_all", lambda self, pulls: [ADMITTED for _ in pulls])


def fences_nobody(patch: pytest.MonkeyPatch) -> None:
    """Workers that were replaced, or whose lease ran out, may push and pull."""
    patch.setattr(JobPartition, "check_worker", lambda self, worker: None)


def never_removes(patch: pytest.MonkeyPatch) -> None:
    """A shard goes on counting the dead."""
    patch.setattr(JobPartition, "_remove_worker", lambda self, command: None)


def refuses_launches_at_once(patch: pytest.MonkeyPatch) -> None:
    """A launch is refused although those in its way may be dead."""
    rivals = Membership.rivals

    def at_once(self: Membership, *arguments: Any) -> Rivals | None:
        found = rivals(self, *arguments)
        return found and replace(found, live=True)

    patch.setattr(Membership, "rivals", at_once)


def answers_no_pull_that_waits(patch: pytest.MonkeyPatch) -> None:
    """A few updates on, none wakes the pulls that wait for it: a job stands still with which nothing is wrong."""
    release = Pulls.release

    def forgetful(self: Pulls, job: HostedJob, unit: HostedUnit[Any]) -> None:
        if unit.rule.version <= 5:
            release(self, job, unit)

    patch.setattr(Pulls, "release", forgetful)


def drops_what_is_late(patch: pytest.MonkeyPatch) -> None:
    """With a quorum, a contribution that comes after its update is acknowledged, and left out."""
    following = QuorumRule.next

    def dropping(self: QuorumRule[Any]) -> Add[Any] | Step | None:
        work = following(self)
        while isinstance(work, Add) and self.weights_of.get(work.rank, self.version) < self.version:
            del self.waiting[work.rank]
            self._clear(work.rank, work.clock)
            work = following(self)
        return work

    patch.setattr(QuorumRule, "next", dropping)


def hears_no_hyper_parameters(patch: pytest.MonkeyPatch) -> None:
    """An update is made with the hyper-parameters that the job began with, and not with those that come with pushes."""
    add = OpenUpdate.add
    patch.setattr(OpenUpdate, "add", lambda self, gradient, last: add(self, replace(gradient, groups={}), last))


def forgets_what_it_has_sent(patch: pytest.MonkeyPatch) -> None:
    """The codes of each update are of all that changed since the weights went whole."""

    def advance(self: SentWeights, weights: torch.Tensor, whole: bool) -> None:
        self.codes = self.codec.encode(weights - self.flat)

    patch.setattr(SentWeights, "advance", advance)


def sends_codes_to_newcomers(patch: pytest.MonkeyPatch) -> None:
    """A worker that has not what codes are to be added to gets them nevertheless."""
    check = Pulls.check
    patch.setattr(
        Pulls, "check", lambda self, job, call, *rest: check(self, job, replace(call, whole=frozenset()), *rest)
    )


def _says_of_all_shards(patch: pytest.MonkeyPatch, pushed_of: Callable[[list[int]], int]) -> None:
    """Has a worker that comes back hear the same of all buckets of all shards."""
    count = JobWorkers.count

    def alike(joined: Joined | PSError) -> Joined | PSError:
        if isinstance(joined, PSError):
            return joined
        clocks = [c for of in joined.on_shards.values() for c in (of.pushed or 0, *(of.further or {}).values())]
        pushed = pushed_of(clocks)
        return Joined(
            joined.clock, pushed, {shard: ShardProgress(joined.clock, pushed, {}) for shard in joined.on_shards}
        )

    def all_alike(self: JobWorkers, reservations: Sequence[Reservation]) -> list[Joined | PSError]:
        return [alike(joined) for joined in count(self, reservations)]

    patch.setattr(JobWorkers, "count", all_alike)


def takes_a_part_of_a_step_for_all(patch: pytest.MonkeyPatch) -> None:
    """A worker that comes back hears that all shards have had a step of which some have had nothing."""
    _says_of_all_shards(patch, max)


def takes_a_part_of_a_step_for_none(patch: pytest.MonkeyPatch) -> None:
    """A worker that comes back pushes a step as a whole of which some shards have had their part."""
    _says_of_all_shards(patch, min)


RULES = (
    Mutation(hears_no_hyper_parameters, ("local:4",), frozenset({"wrong update", "torn", "own update missing"})),
    Mutation(sends_codes_to_newcomers, ("sync int4",), frozenset({"codes without their base"})),
    Mutation(forgets_what_it_has_sent, ("sync int4",), frozenset({"wrong update", "torn", "doubled"})),
    Mutation(drops_what_is_late, ("sync quorum all-1",), frozenset({"lost"})),
    Mutation(takes_repeats_for_new, ("async",), frozenset({"doubled"})),
    Mutation(acknowledges_and_forgets, ("async",), frozenset({"lost", "own update missing", "stuck", "gave up"})),
    Mutation(admits_everybody, ("ssp:0",), frozenset({"too stale", "own update missing"})),
    Mutation(admits_everybody, ("sync",), frozenset({"wrong update", "own update missing"})),
    Mutation(fences_nobody, ("sync",), frozenset({"wrong update", "gave up", "stuck", "lost", "doubled"})),
    Mutation(never_removes, ("ssp:0",), frozenset({"stuck", "waits for the dead", "wrong roster"})),
    Mutation(refuses_launches_at_once, ("async",), frozenset({"gave up"})),
    Mutation(answers_no_pull_that_waits, ("sync", "ssp:0"), frozenset({"another job waits"})),
)

# -- repairs: what was broken once -----------------------------------------------------------------------------------


def asks_shards_that_have_not_called_in(patch: pytest.MonkeyPatch) -> None:
    """The coordinator came back; it removes a worker from a shard that it does not know yet."""

    def tell(self: Removals) -> None:
        for index in {shard for shard, _, _ in self.pending()}:
            self._shards.beside(index, partial(self._tell_all, index))

    patch.setattr(Removals, "tell", tell)


def forgets_shards_that_have_not_called_in(patch: pytest.MonkeyPatch) -> None:
    """A worker whose lease runs out meanwhile is never removed from such a shard."""

    def everywhere(self: Removals, workers: Iterable[WorkerId]) -> set[Removal]:
        return {(shard, *worker) for worker in workers for shard in self._shards.known()}

    patch.setattr(Removals, "everywhere", everywhere)


def removes_from_one_shard_after_the_other(patch: pytest.MonkeyPatch) -> None:
    """A shard that hangs delays what a healthy one has to hear."""

    def tell(self: Removals) -> None:
        for index in sorted(self._shards.known()):
            self._tell_all(index)

    patch.setattr(Removals, "tell", tell)


def admits_what_is_not_on_disk(patch: pytest.MonkeyPatch) -> None:
    """A join, or a job, goes on although the coordinator's file cannot be written."""
    save_ahead = Coordinator.save_ahead

    def hopeful(self: Coordinator) -> None:
        with contextlib.suppress(TryLater):
            save_ahead(self)

    patch.setattr(Coordinator, "save_ahead", hopeful)


def rolls_back_what_ends(patch: pytest.MonkeyPatch) -> None:
    """A shard is lost while the last worker leaves: its recovery waits for the job's end, and then rolls it back."""
    recover = CoordinatedJob.recover

    def late(self: CoordinatedJob, recovery: Recovery | None) -> None:
        checkpoints = self.checkpoints
        while checkpoints is not None and self.life._phase is Phase.ENDING and not self.life.has_ended:
            with checkpoints._changed:
                checkpoints._changed.wait(0.1)
        recover(self, recovery)

    patch.setattr(CoordinatedJob, "recover", late)
    patch.setattr(Lifecycle, "is_running", property(lambda self: True))


def keeps_the_job_of_an_earlier_run(patch: pytest.MonkeyPatch) -> None:
    """A shard takes a run for another one of the same name."""
    create = HostedJobs.create

    def keeping(self: HostedJobs, spec: JobSpec, buckets: Sequence[int], run: str, shards: int) -> None:
        if spec.name in self.jobs:
            self.jobs[spec.name].run = run
        create(self, spec, buckets, run, shards)

    patch.setattr(HostedJobs, "create", keeping)


def takes_workers_of_an_earlier_run(patch: pytest.MonkeyPatch) -> None:
    """A worker of an earlier run that wakes up takes part in the one of now."""
    job = Coordinator.job
    patch.setattr(Coordinator, "job", lambda self, name, run="": job(self, name))


EVERY_MODE = ("sync", "ssp:0", "ssp:2", "async")
HANGS = frozenset({"stuck", "gave up", "wrong roster", "waits for the dead", "wrong members"})
MIXED = frozenset({"lost", "doubled", "torn", "another run", "wrong update", *HANGS})

SHARD_HANGS, SHARD_DIES = "a shard hangs", "a shard is killed"
WORKER_DIES, COORDINATOR_DIES = "a worker is killed", "the coordinator is killed"
RETURN = SHARD_HANGS, WORKER_DIES, COORDINATOR_DIES

REPAIRS = (
    Mutation(
        asks_shards_that_have_not_called_in,
        EVERY_MODE,
        frozenset({"round failed", "thread died"}),
        faults=RETURN,
        known=("sync", 0),
    ),
    Mutation(forgets_shards_that_have_not_called_in, EVERY_MODE, HANGS, faults=RETURN, known=("sync", 4)),
    Mutation(
        removes_from_one_shard_after_the_other,
        EVERY_MODE,
        frozenset({"waits for the dead"}),
        faults=(SHARD_HANGS, WORKER_DIES),
        known=("async", 30),
    ),
    Mutation(
        admits_what_is_not_on_disk,
        EVERY_MODE,
        MIXED,
        faults=(*["a disk is full"] * 6, WORKER_DIES, COORDINATOR_DIES),
        known=("async", 105),
    ),
    Mutation(
        rolls_back_what_ends,
        EVERY_MODE,
        MIXED | {"round failed", "internal error", "saved"},
        faults=(SHARD_DIES, SHARD_HANGS, SHARD_HANGS),
        known=("async", 17),
        besides=keeps_the_job_of_an_earlier_run,
    ),
    Mutation(keeps_the_job_of_an_earlier_run, EVERY_MODE, MIXED),
    Mutation(takes_workers_of_an_earlier_run, EVERY_MODE, MIXED),
)

# -- rows --------------------------------------------------------------------------------------------------------------


def adds_a_message_twice(patch: pytest.MonkeyPatch) -> None:
    """A message of rows that comes again, while others of its step are missing, is added once more."""
    stage = ShardTable.stage

    def adding(self: ShardTable, command: StageRows) -> Staged:
        pending = self.pending.get(command.worker.rank)
        if pending is not None and pending.step is not None and command.first in pending.step.parts:
            known = pending.step.parts[command.first]
            gradients = known.rows.gradients + command.rows.gradients
            twice = RowGradients(known.rows.ids, known.rows.counts, gradients)
            pending.step.parts[command.first] = replace(known, rows=twice)
        return stage(self, command)

    patch.setattr(ShardTable, "stage", adding)


def counts_a_repeated_push_twice(patch: pytest.MonkeyPatch) -> None:
    """A push of rows that comes again, when all of it is here, counts twice."""
    execute = ShardTable.execute

    def again(self: ShardTable, command: UnitCommand) -> Staged:
        rule = self.rule
        is_repeat = isinstance(command, StageRows) and rule.staged.get(command.worker.rank) == command.clock
        if is_repeat and rule.applied.get(command.worker.rank) == rule.staged[command.worker.rank]:
            rule.staged[command.worker.rank] -= 1
        return execute(self, command)

    patch.setattr(ShardTable, "execute", again)


def stages_the_first_message(patch: pytest.MonkeyPatch) -> None:
    """A push of rows is staged although messages of it are missing."""
    stage = ShardTable.stage

    def hasty(self: ShardTable, command: StageRows) -> Staged:
        return stage(self, replace(command, first=0, total=command.count))

    patch.setattr(ShardTable, "stage", hasty)


def leaves_rows_out_of_checkpoints(patch: pytest.MonkeyPatch) -> None:
    """A checkpoint has no rows, or as few as the table had once."""
    tensors = TableCopy.tensors

    def without(self: TableCopy) -> dict[str, torch.Tensor]:
        of_rows = {name: tensor for name, tensor in tensors(self).items() if not name.startswith("waiting.")}
        single = {"version", "since", "oldest"}
        return {name: tensor if name in single else tensor[:0] for name, tensor in of_rows.items()}

    patch.setattr(TableCopy, "tensors", without)


def copies_tables_at_once(patch: pytest.MonkeyPatch) -> None:
    """A checkpoint has tables as they are when it begins, and buckets as of its clock."""
    is_due = SnapshotTask.is_due

    def early(self: SnapshotTask, index: int, rule: UpdateRule[Any]) -> bool:
        return (index >= BUCKETS_WITH_TABLES and index in self._wanted) or is_due(self, index, rule)

    patch.setattr(SnapshotTask, "is_due", early)


def sends_rows_before_the_bound(patch: pytest.MonkeyPatch) -> None:
    """Rows are sent whatever their worker must not miss."""

    def hasty(self: ShardTable, pulls: Sequence[tuple[int, int]]) -> list[Admission]:
        return [ADMITTED for _ in pulls]

    patch.setattr(ShardTable, "admit_all", hasty)


def shifts_gradients_behind_refused_ids(patch: pytest.MonkeyPatch) -> None:
    """Where an id does not become a row, the next one gets its gradient, and so on."""
    apply = Table.apply

    def shifted(self: Table, update: RowGradients, *rest: Any) -> Any:
        refused = (self._rows.find(update.ids) < 0) & (update.counts < self.spec.admit_after)
        kept, gradients = np.flatnonzero(~refused), update.gradients.clone()
        gradients[torch.from_numpy(kept)] = update.gradients[: len(kept)]
        return apply(self, RowGradients(update.ids, update.counts, gradients), *rest)

    patch.setattr(Table, "apply", shifted)


def begins_with_some_rows(patch: pytest.MonkeyPatch) -> None:
    """A table begins when the first of its rows are there, and not all."""
    take = ComingRows.take

    def hasty(self: ComingRows, command: BeginRows, rows: TableRows) -> bool:
        is_new = take(self, command, rows)
        self.is_complete |= self.came > 0
        return is_new

    patch.setattr(ComingRows, "take", hasty)


def makes_rows_in_pulls(patch: pytest.MonkeyPatch) -> None:
    """An id that is looked up is a row from then on."""
    pull = Table.pull

    def making(self: Table, ids: Ids, out: torch.Tensor) -> int:
        new = np.unique(ids[self._rows.find(ids) < 0])
        self._weights.write(
            self._rows.add(new, max(1, self.version)), initial_rows(self.spec.initializer, new, self.spec.dim)
        )
        return pull(self, ids, out)

    patch.setattr(Table, "pull", making)


def divides_by_those_with_rows(patch: pytest.MonkeyPatch) -> None:
    """A worker without a row on a shard is no term of the mean there."""
    step = TableRows.step

    def among_some(self: TableRows) -> None:
        self._open = [replace(each, in_mean=bool(each.rows)) for each in self._open]
        step(self)

    patch.setattr(TableRows, "step", among_some)


def forgets_nothing(patch: pytest.MonkeyPatch) -> None:
    """Rows do not expire."""
    patch.setattr(Entries, "expire", lambda self, before: np.empty(0, np.int64))


def forgets_counts(patch: pytest.MonkeyPatch) -> None:
    """A restored table begins anew to count ids that are no rows yet."""
    patch.setattr(Candidates, "restore", lambda self, *arrays: None)


WORKER_HANGS = "a worker hangs"
LOSSES = SHARD_HANGS, WORKER_HANGS, "a worker is cut off"  # of places, in the middle of a step

lost_halves = partial(Mutation, takes_a_part_of_a_step_for_all, faults=LOSSES)
doubled_halves = partial(Mutation, takes_a_part_of_a_step_for_none, faults=LOSSES)

HALF_STEPS = (
    lost_halves(("async", "ssp:2"), frozenset({"lost"}), known=("async", 1)),
    lost_halves(("sync", "local:4"), frozenset({"half a step"}), known=("sync", 8)),
    doubled_halves(("async", "ssp:2"), frozenset({"doubled"}), known=("ssp:2", 384)),
    doubled_halves(("sync", "local:4"), frozenset({"half a step"}), known=("local:4", 40)),
)
# "saved": rank 0 mostly saves at once in a new place, and so finds first what a rollback did to rows.
IN_ROWS = frozenset({"doubled", "lost", "torn", "wrong row", "wrong update", "lost row", "saved"})
in_rows = partial(Mutation, kinds=IN_ROWS, tables=True)

ROWS = (
    in_rows(adds_a_message_twice, ("sync", "async"), known=("async", 15)),
    in_rows(counts_a_repeated_push_twice, ("async",), known=("async", 130)),
    in_rows(stages_the_first_message, ("async",), known=("async", 0)),
    in_rows(leaves_rows_out_of_checkpoints, ("sync", "async"), faults=(SHARD_DIES,), known=("sync", 2)),
    in_rows(copies_tables_at_once, ("sync",), faults=(SHARD_DIES,), known=("sync", 2)),
    in_rows(
        sends_rows_before_the_bound,
        ("ssp:0", "ssp:2"),
        kinds=frozenset({"too stale", "own update missing"}),
        known=("ssp:0", 0),
    ),
    in_rows(shifts_gradients_behind_refused_ids, ("sync", "async"), known=("sync", 0)),
    in_rows(begins_with_some_rows, ("async", "sync"), kinds=frozenset({"wrong beginning"}), known=("async", 0)),
    in_rows(makes_rows_in_pulls, ("async",), known=("async", 0)),
    in_rows(divides_by_those_with_rows, ("sync",), faults=(WORKER_HANGS,), known=("sync", 0)),
    in_rows(forgets_nothing, ("async", "sync"), kinds=frozenset({"row stays"}), known=("async", 19)),
    in_rows(forgets_counts, ("sync", "async"), faults=(SHARD_DIES,), known=("sync", 2)),
)


# -- what rank 0 saves -----------------------------------------------------------------------------------------------


def sends_what_is_applied(patch: pytest.MonkeyPatch) -> None:
    """Who asks for all that is staged gets the weights as they are, without what waits for its update."""
    patch.setattr(JobPartition, "owed", lambda self, index: {})


def sends_newcomers_what_there_is(patch: pytest.MonkeyPatch) -> None:
    """A worker that joins gets the weights from before the clock that it joins at."""
    admit_all = UpdateRule.admit_all

    def early(self: UpdateRule[object], pulls: Sequence[tuple[int, int]]) -> list[Admission]:
        live = self.roster
        is_new = [self.initialised and rank in live and live[rank].start == clock for rank, clock in pulls]
        return [ADMITTED if new else each for new, each in zip(is_new, admit_all(self, pulls), strict=True)]

    patch.setattr(UpdateRule, "admit_all", early)


IN_FILES = frozenset({"saved"})
SAVED = (
    Mutation(sends_what_is_applied, ("async", "sync quorum 2"), IN_FILES, faults=(), known=("sync quorum 2", 0)),
    Mutation(sends_newcomers_what_there_is, ("sync",), IN_FILES, faults=(WORKER_DIES,), known=("sync", 34)),
)

# -- what strikes a whole launch, or the store -----------------------------------------------------------------------


def forgets_that_all_died(patch: pytest.MonkeyPatch) -> None:
    """The first worker that comes back after all have died trains alone."""
    patch.setattr(Membership, "_is_carried", lambda *_: True)


def goes_on_when_deposed(patch: pytest.MonkeyPatch) -> None:
    """A coordinator whose lease another one has taken over goes on, and shards obey it."""
    patch.setattr(Charge, "lost", "")
    patch.setattr(CoordinatorTerms, "check", lambda *_, **__: None)


DEPOSED = frozenset({"lost its place", "wrong roster", "wrong members", "gave up", "stuck", "another run", "no job"})
WHOLESALE = (
    Mutation(
        forgets_that_all_died,
        EVERY_MODE,
        frozenset({"trains alone"}),
        faults=("all workers are killed",),
        known=("sync", 2),
    ),
    Mutation(
        goes_on_when_deposed, EVERY_MODE, DEPOSED, faults=("another coordinator takes over",), known=("async", 12)
    ),
)
