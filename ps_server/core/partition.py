"""One job's buckets and tables on one shard: roster, rules and weights put together, and changed by commands alone.

    checker   makes the command that stages a push; that of tables, one of rows. Heavy, and touches nothing that a
              command changes
    execute   carries out a command: the only method by which a partition changes
    done      records that what a bucket's rule said comes next was applied, which follows from the commands before it
    buckets   say how large they are, and so do tables
    reached   says how far all are

All else only reads. Not thread-safe; `checker` and the methods of `DenseBucket` may run outside of the lock that guards
the rest.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ps_protocol.errors import Backlogged, Fenced, InvalidRequest, LimitExceeded, OutOfOrder, PSError, anew
from ps_protocol.job import JobSpec
from ps_protocol.layout import Layout, bucket_layout
from ps_server.core.buckets import Bucket, Buckets
from ps_server.core.budget import PrincipalBudget, StagingBudget, StagingRoom, derived_limit
from ps_server.core.checking import PushChecker
from ps_server.core.checking_rows import RowChecker
from ps_server.core.commands import (
    AddWorker,
    Assign,
    AssignRows,
    BeginRows,
    Close,
    Command,
    Commit,
    Draft,
    Initialise,
    R,
    RemoveWorker,
    RestoreSnapshot,
    Stage,
    Staged,
    StageRows,
)
from ps_server.core.consistency import Add, Admission, Live, Step, UpdateRule
from ps_server.core.data_commits import Committed, DataCommits
from ps_server.core.dense import Assignment
from ps_server.core.membership import Counted, check_incarnation, check_key
from ps_server.core.placement import Place
from ps_server.core.snapshot import VersionRange, union
from ps_server.core.tables import Tables

ASSIGNED_WEIGHTS = 4  # what may be assigned and wait for its step, in weights: they and three optimizer states


def check_buckets(layout: Layout, indices: Sequence[int]) -> None:
    """Raises InvalidRequest unless these are buckets of a layout, each once."""
    wrong = next((index for index in indices if not 0 <= index < len(layout.buckets)), None)
    if wrong is None and len(set(indices)) != len(indices):
        wrong = next(index for index in indices if indices.count(index) > 1)
    if wrong is not None:
        raise InvalidRequest(f"expected buckets below {len(layout.buckets)}, each once, got {wrong}")


class JobPartition:
    """The buckets of one job that this shard holds, and its part of the job's tables."""

    def __init__(
        self,
        spec: JobSpec,
        indices: Iterable[int],
        staged_limit: int | None = None,
        norm_limit: float = math.inf,
        principals: PrincipalBudget | None = None,
        place: Place | None = None,
    ) -> None:
        """staged_limit: bytes that may be staged here; past it, pushes are told to try again, but for those that an
        update waits for. None: as much as the weights here, or two buckets for each worker.
        norm_limit: the L2 norm that the gradient in one push may have.
        principals: what each principal may have staged, over all jobs; None: anything.
        place: of this shard among those that have the job's tables; None: it is the only one."""
        layout = bucket_layout(spec.parameters, spec.bucket_bytes)
        indices = list(indices)
        check_buckets(layout, indices)
        self.spec = spec
        self.layout = layout
        self.roster: dict[int, Live] = {}
        here = {index: layout.buckets[index] for index in indices}
        self.buckets = Buckets(spec, here.values(), self.roster)
        self.checker = PushChecker(spec, here, norm_limit)
        self._removed: dict[int, int] = {}  # by rank, the highest incarnation that was removed
        self._fenced = 0  # no incarnation up to this one may come back
        self._closed: PSError | None = None
        self._staged_limit = staged_limit
        principals = principals or PrincipalBudget()
        self._room = StagingRoom(*(StagingBudget(principals) for _ in range(3)))
        checker = RowChecker(spec, place or Place(), len(layout.buckets), norm_limit)
        self.tables = Tables(spec, checker, self.roster, self._room, lambda: self.staged_limit)
        trained = {index: bucket.rule for index, bucket in self.buckets.items() if not bucket.spec.frozen}
        self.rules: dict[int, UpdateRule[Any]] = trained | {index: table.rule for index, table in self.tables.items()}
        self.reached = Reached(self.rules, self.roster)
        self.data = DataCommits(self.rules)

    def bucket(self, index: int) -> Bucket:
        """Returns the bucket with this index. Raises NotFound when this shard does not hold it."""
        return self.buckets[self.checker.bucket(index).index]

    def check_worker(self, rank: int, incarnation: int, key: bytes | None = None) -> None:
        """Raises UnknownWorker or Fenced unless this is a live worker, Forbidden if a key is given and not its own."""
        if self._closed is not None:
            raise anew(self._closed)
        live = self.roster.get(rank)
        check_incarnation(rank, incarnation, live.incarnation if live else None)
        if live is not None and key is not None:
            check_key(rank, key, live.key)

    def highest_incarnation(self) -> int:
        """Returns the highest incarnation that is live, was removed, or is fenced."""
        live = [worker.incarnation for worker in self.roster.values()]
        return max(self._fenced, *live, *self._removed.values(), 0)

    # -- changing --------------------------------------------------------------------------------------------------

    def execute(self, command: Command[R]) -> R:
        """Carries out a command. Changes nothing if it raises what the command says it may."""
        result: Any = None
        match command:
            case Stage() | Draft() | Assign() | Commit():
                result = self._push(command)
            case StageRows():
                self._check_pusher(command)
                result = self.tables.stage(command, self.data)
            case AssignRows():
                self._check_pusher(command)
                result = self.tables.assign(command)
            case BeginRows():
                self.check_worker(command.rank, command.incarnation, command.key)
                result = self.tables.begin(command)
            case Initialise():
                result = self._initialise(command)
            case AddWorker():
                result = self._add_worker(command)
            case RemoveWorker():
                self._remove_worker(command)
            case RestoreSnapshot():
                self._restore(command)
            case Close():
                self._close(command)
            case _:
                raise TypeError(f"expected a command of a partition, got {type(command).__name__}")
        return result  # type: ignore[no-any-return]

    def done(self, index: int, work: Add[Any] | Step) -> None:
        """Records that what a bucket's or a table's rule said comes next has been done to its weights."""
        self.rules[index].done(work)
        if isinstance(work, Add):
            self._room.staged.release(index, work.rank)

    # -- workers ---------------------------------------------------------------------------------------------------

    def _add_worker(self, command: AddWorker) -> Counted:
        rank, incarnation, clock = command.rank, command.incarnation, command.clock
        live = self.roster.get(rank)
        if incarnation <= max(self._removed.get(rank, 0), self._fenced):
            raise Fenced(f"worker {rank}: incarnation {incarnation} was retired before it was admitted")
        if live is not None and live.incarnation > incarnation:
            check_incarnation(rank, incarnation, live.incarnation)
        frontier = self.reached.frontier()
        start = frontier if clock is None else clock
        known = live is not None and live.incarnation == incarnation
        if not (known and (clock is None or live == Live(incarnation, start, command.key))):
            self._let_go(rank)
            self.roster[rank] = Live(incarnation, start, command.key)
            for rule in self.rules.values():
                rule.add_worker(rank, start)
        return Counted(frontier, self.reached.pushed(rank), self.reached.further(rank))

    def _remove_worker(self, command: RemoveWorker) -> None:
        rank, incarnation = command.rank, command.incarnation
        self._removed[rank] = max(incarnation, self._removed.get(rank, 0))
        live = self.roster.get(rank)
        if live is not None and live.incarnation <= incarnation:
            del self.roster[rank]
            self._let_go(rank)

    def _let_go(self, rank: int) -> None:
        """Drops what is pending of a worker, and copies what is staged out of its memory."""
        self.tables.drop_pending(rank)
        for bucket in self.buckets.values():
            self._drop_pending(bucket, rank)
            waiting = bucket.rule.waiting.get(rank)
            if waiting is not None:
                bucket.rule.waiting[rank] = replace(waiting, contribution=waiting.contribution.owned())

    def _restore(self, command: RestoreSnapshot) -> None:
        snapshots = command.snapshots
        missing = sorted(self.buckets.keys() - snapshots.keys()) + sorted(self.tables.keys() - command.tables.keys())
        if missing:
            raise InvalidRequest(f"expected a snapshot of each bucket and table, got none of {missing[:8]}")
        for index, table in self.tables.items():  # first: one that fits no such table is refused
            table.restore(command.tables[index])
        self._fenced = command.last_incarnation
        self.roster.clear()
        for index, bucket in self.buckets.items():
            bucket.restore(snapshots[index], command.owned)
            if bucket.weights.stage.number:
                self.checker.begin(index, bucket.weights.stage)
        committed = {index: snapshots[index].committed for index in self.buckets}
        self.data.restore(committed | {index: command.tables[index].committed for index in self.tables})

    def _close(self, command: Close) -> None:
        self._closed = command.reason
        for budget in self._room:
            budget.release_all()

    # -- what workers push -------------------------------------------------------------------------------------------

    def _push(self, command: Stage | Draft | Assign | Commit) -> Staged:
        """Takes what a worker pushes for a clock; a repeat of what was staged for it changes nothing."""
        rank, clock = command.rank, command.clock
        self._check_pusher(command)
        bucket = self.bucket(command.bucket)
        if not (isinstance(command, Commit) or bucket.rule.initialised):
            raise InvalidRequest(f"bucket {command.bucket} has no initial value yet: pull before the first push")
        if bucket.rule.is_repeat(rank, clock):
            return Staged(bucket.rule.version, duplicate=True)
        self._drop_other_clock(bucket, rank, clock)  # before anything is reserved for this one
        match command:
            case Stage():
                return self._count(bucket, command)
            case Draft():
                return self._keep_draft(bucket, command)
            case Assign():
                return self._assign(bucket, command)
            case Commit():
                return self._commit(bucket, command)

    def _check_pusher(self, command: Stage | Draft | Assign | Commit | StageRows | AssignRows) -> None:
        """Raises as check_worker, and OutOfOrder for a clock at or before that at which the worker joined."""
        self.check_worker(command.rank, command.incarnation, command.key)
        start = self.roster[command.rank].start
        if command.clock <= start:  # taken for a repeat, it would be acknowledged and lost
            pushed = "a commit of" if isinstance(command, Commit) else "a push of clock"
            raise OutOfOrder(f"worker {command.rank} joined at clock {start}, and {pushed} {command.clock} came")

    def _keep_draft(self, bucket: Bucket, command: Draft) -> Staged:
        pending = bucket.pending_at(command.rank, command.clock)
        if pending is not None and pending.commit is not None:
            return self._count(bucket, _committed_draft(command, pending.commit))
        self._reserve_draft(bucket, command)
        bucket.make_pending(command.rank, command.clock).draft = command
        return Staged(bucket.rule.version, duplicate=False, kept=True)

    def _commit(self, bucket: Bucket, command: Commit) -> Staged:
        pending = bucket.make_pending(command.rank, command.clock)
        if pending.draft is None:
            pending.commit = command
            return Staged(bucket.rule.version, duplicate=False, kept=True)
        return self._count(bucket, _committed_draft(pending.draft, command), is_committed=True)

    def _assign(self, bucket: Bucket, command: Assign) -> Staged:
        rank, clock = command.rank, command.clock
        if command.assignment.next is not None:
            self.checker.begin(command.bucket, command.assignment.next)
        pending = bucket.pending_at(rank, clock)
        before = pending.assignment if pending is not None else None
        assignment = command.assignment if before is None else before.union(command.assignment)
        # One worker's always fit; where others' are here too, they go with their steps.
        limit = ASSIGNED_WEIGHTS * max(self.buckets.parameter_bytes, self.spec.bucket_bytes)
        if not self._room.assigned.reserve(
            command.bucket,
            rank,
            assignment.nbytes,
            limit,
            always=lambda: bucket.rule.is_awaited(rank, clock) or self._room.assigned.is_all_of(rank),
        ):
            raise Backlogged(f"{self._room.assigned.bytes} bytes are assigned here and wait for their workers' steps")
        bucket.make_pending(rank, clock).assignment = assignment
        return Staged(bucket.rule.version, duplicate=False, kept=True)

    def _initialise(self, command: Initialise) -> Staged:
        self.check_worker(command.rank, command.incarnation, command.key)
        bucket = self.bucket(command.bucket)
        if command.rank != 0:
            raise InvalidRequest(f"initial values are rank 0's to send, got them from rank {command.rank}")
        if bucket.rule.initialised:
            return Staged(bucket.rule.version, duplicate=True)
        self._drop_other_clock(bucket, 0, 0)
        pending = bucket.make_pending(0, 0)
        if isinstance(command.value, Assignment):
            before = pending.assignment
            pending.assignment = command.value if before is None else before.union(command.value)
            return Staged(bucket.rule.version, duplicate=False, kept=True)
        if pending.assignment is not None:
            self.checker.check_assigned(bucket.spec, pending.assignment)
            bucket.weights.assign(pending.assignment)
        self._drop_pending(bucket, 0)
        bucket.weights.load(command.value)
        bucket.rule.initialised = True
        return Staged(bucket.rule.version, duplicate=False)

    def _count(self, bucket: Bucket, command: Stage, is_committed: bool = False) -> Staged:
        """Stages a contribution, with what was assigned for its clock, in place of what is pending of its worker.

        is_committed: it is here already, as a draft: it is never refused
        """
        index, rank, gradient = command.bucket, command.rank, command.gradient
        pending = bucket.pending_at(rank, command.clock)
        if pending is not None and pending.assignment is not None:
            self.checker.check_assigned(bucket.spec, pending.assignment)
            gradient = replace(gradient, assignment=pending.assignment)
        if self.spec.consistency.quorum is not None:
            gradient = replace(gradient, clock=command.clock)
        if gradient.values is not None:
            self._reserve(bucket, command, is_committed)
        try:
            use = self.data.use(index, command.ranges)
        except LimitExceeded:
            self._room.staged.release(index, rank)
            raise
        self._drop_pending(bucket, rank)
        if use.spent:
            self._room.staged.release(index, rank)
            gradient = replace(gradient, values=None, absent=frozenset(), borrowed=False, own=False)
        bucket.rule.stage(rank, command.clock, gradient, command.ranges)
        return Staged(bucket.rule.version, duplicate=False, skipped=gradient.values is None, use=use)

    # -- what is pending ---------------------------------------------------------------------------------------------

    def _drop_other_clock(self, bucket: Bucket, rank: int, clock: int) -> None:
        if bucket.pending_at(rank, clock) is None:
            self._drop_pending(bucket, rank)

    def _drop_pending(self, bucket: Bucket, rank: int) -> None:
        if bucket.pending.pop(rank, None) is not None:
            self._room.drafts.release(bucket.spec.index, rank)
            self._room.assigned.release(bucket.spec.index, rank)

    # -- room --------------------------------------------------------------------------------------------------------

    @property
    def staged_limit(self) -> int:
        """Bytes that may be staged here, but for what an update waits for."""
        return self._staged_limit or derived_limit(
            self.buckets.parameter_bytes, self.spec.bucket_bytes, len(self.roster), len(self.spec.tables)
        )

    def _reserve(self, bucket: Bucket, command: Stage, is_committed: bool) -> None:
        """Reserves the bytes of a contribution. Raises Backlogged if there is no room for them.

        What an update waits for is always taken: all that is staged may be waiting behind it. Where no update waits for
        others (ssp, async), what is staged is applied without others' help, and there is room again. With a quorum
        it is added to the open update without their help, but for what a worker brings that is in that one already.
        Drafts of the same clock take room, too. What lies in the worker's own memory takes none here, but counts for
        its principal.
        """
        index, rank, gradient = command.bucket, command.rank, command.gradient
        assert gradient.values is not None
        charge = gradient.values.nbytes
        drafts = self._room.drafts.bytes_besides(index, rank) if self.spec.consistency.one_clock else 0
        if not self._room.staged.reserve(
            index,
            rank,
            0 if gradient.borrowed else charge,
            math.inf if gradient.borrowed else max(0, self.staged_limit - drafts),
            principal=command.principal,
            charge=charge,
            always=lambda: is_committed or bucket.rule.is_awaited(command.rank, command.clock),
        ):
            raise self._room.staged.full(self.staged_limit, drafts)

    def _reserve_draft(self, bucket: Bucket, command: Draft) -> None:
        """Reserves the bytes of a draft. Raises Backlogged if there is no room for them beside what is staged.

        What the next update waits for is always taken, and takes no room: once it counts it is the open sum, which is
        no part of the budget. With a quorum none is awaited more than another: each is added when its step has ended.
        """
        one_clock = self.spec.consistency.one_clock
        awaited = one_clock and bucket.rule.is_awaited(command.rank, command.clock)
        charge = command.gradient.values.nbytes if command.gradient.values is not None else 0
        staged = self._room.staged.bytes if one_clock else 0
        if not self._room.drafts.reserve(
            command.bucket,
            command.rank,
            0 if awaited else charge,
            max(0, self.staged_limit - staged),
            principal=command.principal,
            charge=charge,
            always=lambda: awaited,
        ):
            raise Backlogged(
                f"{self._room.drafts.bytes} bytes are here before their step, and there is no room for more"
            )

    # -- pulls -------------------------------------------------------------------------------------------------------

    def admit_all(self, index: int, pulls: Sequence[tuple[int, int]]) -> list[Admission]:
        """Returns for pulls of one bucket or table, each a rank and a clock, whether it may be answered. What no
        optimizer steps only waits for rank 0."""
        rule = self.rules.get(index)
        if rule is not None:
            return rule.admit_all(pulls)
        return self.bucket(index).rule.admit_all([(rank, 0) for rank, _ in pulls])

    def owed(self, index: int) -> Mapping[int, int]:
        """Returns what a pull of a bucket or table that wants all that is staged has to wait for; see UpdateRule.owed.
        With a quorum it has that applied: schedule the bucket."""
        return self.rules[index].owed() if index in self.rules else {}

    def has(self, index: int, owed: Mapping[int, int]) -> bool:
        """Whether this is in the weights of a bucket or table."""
        return not owed or self.rules[index].has(owed)

    # -- leased data -------------------------------------------------------------------------------------------------

    def committed(self, index: int) -> Committed:
        """Returns the leased data that is in the weights of a bucket, for a snapshot: without what is only staged."""
        return self.data.of(index, self.rules[index].unapplied() if index in self.rules else ())


def _committed_draft(draft: Draft, commit: Commit) -> Stage:
    """Returns a draft as the contribution that it is with its commit."""
    gradient = replace(draft.gradient, groups=commit.groups, stage=commit.stage)
    worker = draft.rank, draft.incarnation, draft.key
    return Stage(*worker, draft.bucket, draft.clock, gradient, commit.ranges, draft.principal)


class Reached:
    """Reads the rules of a job's buckets and tables together. What no optimizer steps is none of them.

    rules:  by index
    roster: the live workers by rank, as the partition keeps them
    """

    def __init__(self, rules: Mapping[int, UpdateRule[Any]], roster: Mapping[int, Live]) -> None:
        self._rules = list(rules.values())
        self._indices = list(rules)
        self._roster = roster

    def frontier(self) -> int:
        """Returns the highest clock that any worker has reached on a bucket or table."""
        return max((rule.frontier() for rule in self._rules), default=0)

    def pushed(self, rank: int) -> int | None:
        """Returns the last clock of which every bucket and table has a push of this rank; None: nothing trains here."""
        return min((rule.pushed.get(rank, 0) for rule in self._rules), default=None)

    def further(self, rank: int) -> dict[int, int]:
        """Returns, by index, the last clock that this rank has pushed of a bucket or table, where it is a later one."""
        least = self.pushed(rank) or 0
        pushed = {index: rule.pushed.get(rank, 0) for index, rule in zip(self._indices, self._rules, strict=True)}
        return {index: clock for index, clock in pushed.items() if clock > least}

    def versions(self) -> tuple[int, int]:
        """Returns the lowest and the highest version of a bucket or table."""
        versions = [rule.versions() for rule in self._rules]
        return min((low for low, _ in versions), default=0), max((high for _, high in versions), default=0)

    def clocks(self) -> dict[int, int]:
        """Returns the lowest clock over this shard's buckets and tables, by live rank."""
        each = [rule.clocks() for rule in self._rules]
        return {rank: min((clocks[rank] for clocks in each), default=0) for rank in self._roster}

    def departed_clocks(self) -> dict[int, int]:
        """Returns the same by rank of a worker that is not live any more."""
        return {rank: clock for rank, clock in self.extent().clocks.items() if rank not in self._roster}

    def extent(self) -> VersionRange:
        """Returns how far they are, with the clocks of the dead."""
        return union(rule.extent() for rule in self._rules)
