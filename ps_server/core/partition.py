"""One job's buckets and tables on one shard: roster, rules and weights put together, and changed by commands alone.

    checkers  make the commands that stage pushes, of buckets and of rows. They compute a lot, and access nothing that
              a command changes
    execute   carries out a command: the only method by which a partition changes
    done      records that an operation which a unit's rule has returned was carried out
    units     are the buckets and the tables (unit.py)
    reached   returns the versions and clocks that all units have reached

All other methods only read. Not thread-safe; the checkers and the methods of a unit's weights may run outside of the
lock that guards the rest.
"""

from __future__ import annotations

import hmac
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ps_protocol.errors import Fenced, InvalidRequest, OutOfOrder, PSError, anew
from ps_protocol.identity import Identity
from ps_protocol.job import JobSpec
from ps_protocol.layout import Layout, bucket_layout
from ps_server.core.agreement import Agreement
from ps_server.core.budget import PrincipalBudget, StagingRoom, derived_limit
from ps_server.core.checking import PushChecker
from ps_server.core.checking_rows import RowChecker
from ps_server.core.commands import (
    AddWorker,
    Close,
    Command,
    Commit,
    PushCommand,
    R,
    RemoveWorker,
    RestoreSnapshot,
    Staged,
    UnitCommand,
)
from ps_server.core.consistency import Add, Live, Step, UpdateRule, update_rule
from ps_server.core.data_commits import DataCommits
from ps_server.core.dense import DenseBucket, Gradient
from ps_server.core.membership import ShardProgress, check_incarnation, wrong_key
from ps_server.core.placement import TableShare
from ps_server.core.server_figures import TableFigures, reported
from ps_server.core.shard_table import ShardTable
from ps_server.core.snapshot import VersionRange, union
from ps_server.core.sums import Scratch
from ps_server.core.unit import Bucket, Unit

# Assignments that wait may take so many times the bytes of the weights: for the weights and three optimizer states.
ASSIGNED_WEIGHTS = 4


def check_buckets(layout: Layout, indices: Sequence[int]) -> None:
    """Raises InvalidRequest unless these are buckets of a layout, each once."""
    wrong = next((index for index in indices if not 0 <= index < len(layout.buckets)), None)
    if wrong is None and len(set(indices)) != len(indices):
        wrong = next(index for index in indices if indices.count(index) > 1)
    if wrong is not None:
        raise InvalidRequest(f"expected buckets below {len(layout.buckets)}, each once, got {wrong}")


class JobPartition:
    """The buckets of one job that this shard holds, and its part of the job's tables.

    units: the buckets and the tables, by index: tables follow the buckets
    rules: the update rules of the units that an optimizer steps, by index
    """

    def __init__(
        self,
        spec: JobSpec,
        indices: Iterable[int],
        staged_limit: int | None = None,
        norm_limit: float = math.inf,
        principals: PrincipalBudget | None = None,
        share: TableShare | None = None,
    ) -> None:
        """staged_limit: bytes that may be staged on this shard. Past it, pushes raise Backlogged, unless an update
        waits for them. None: the bytes of this shard's weights, or two buckets for each worker if that is more.
        norm_limit: the L2 norm that the gradient in one push may have.
        principals: the budget of each principal, over all jobs; None: unlimited.
        share: this shard's number among the shards of the job's tables, and its room for them; None if it is the only
        shard."""
        layout, share = bucket_layout(spec.parameters, spec.bucket_bytes), share or TableShare()
        indices = list(indices)
        check_buckets(layout, indices)
        self.spec, self.layout = spec, layout
        self.roster: dict[int, Live] = {}
        here = {index: layout.buckets[index] for index in indices}
        self.parameter_bytes = sum(bucket.nbytes for bucket in here.values())  # computed once: each push needs it
        self._removed: dict[int, int] = {}  # by rank, the highest incarnation that was removed
        self._fenced = 0  # no incarnation up to this one may come back
        self._closed: PSError | None = None
        self._staged_limit = staged_limit
        self._room = StagingRoom(principals or PrincipalBudget(), lambda: self.staged_limit, self._assigned_limit)
        self.checker = PushChecker(spec, here, norm_limit)
        self.row_checker = RowChecker(spec, share, len(layout.buckets), norm_limit)
        tables = dict(enumerate(spec.tables, self.row_checker.first))
        self.data = DataCommits([*(index for index, bucket in here.items() if not bucket.frozen), *tables])
        scratch, shared = Scratch(), (self._room, self.data)
        self.buckets: dict[int, Bucket] = {}
        for index, bucket in here.items():
            rule: UpdateRule[Gradient] = update_rule(spec.consistency, self.roster)
            weights = DenseBucket(spec, bucket, scratch, rule.mixes_clocks)
            self.buckets[index] = Bucket(bucket, rule, weights, *shared, self.checker)
        self.tables: dict[int, ShardTable] = {
            index: ShardTable(index, table, update_rule(spec.consistency, self.roster), share, *shared)
            for index, table in tables.items()
        }
        self.units: dict[int, Unit[Any, Any, Any]] = {**self.buckets, **self.tables}
        self.rules: dict[int, UpdateRule[Any]] = {
            index: unit.rule for index, unit in self.units.items() if unit.is_trained
        }
        self.reached = Reached(self.rules, self.roster)

    def bucket(self, index: int) -> Bucket:
        """Returns the bucket with this index. Raises NotFound when this shard does not hold it."""
        return self.buckets[self.checker.bucket(index).index]

    def check_worker(self, worker: Identity) -> None:
        """Raises UnknownWorker or Fenced unless the worker is live, Forbidden for a wrong key, InvalidRequest for a
        member that its group does not have.
        """
        if self._closed is not None:
            raise anew(self._closed)
        rank, live = worker.rank, self.roster.get(worker.rank)
        if worker.member >= self.spec.group_size:
            raise InvalidRequest(
                f"expected a member below {self.spec.group_size} of worker {rank}, got {worker.member}"
            )
        if live is None or live.incarnation != worker.incarnation:
            check_incarnation(rank, worker.incarnation, live.incarnation if live else None)
        elif not hmac.compare_digest(worker.key, live.key):
            raise wrong_key(rank)

    def highest_incarnation(self) -> int:
        """Returns the highest incarnation that this partition has heard of: live, removed or fenced."""
        live = [worker.incarnation for worker in self.roster.values()]
        return max(self._fenced, *live, *self._removed.values(), 0)

    # -- changing --------------------------------------------------------------------------------------------------

    def execute(self, command: Command[R]) -> R:
        """Carries out a command, and returns its result. If it raises an error that the command documents, nothing is
        changed.
        """
        result: Any = None
        match command:
            case UnitCommand():
                result = self._of_unit(command)
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

    def _of_unit(self, command: UnitCommand) -> Staged:
        self.check_worker(command.worker)
        if isinstance(command, PushCommand):
            rank, start = command.worker.rank, self.roster[command.worker.rank].start
            if command.clock <= start:  # the unit would take it for a repeat, acknowledge it, and not apply it
                pushed = "a commit of" if isinstance(command, Commit) else "a push of clock"
                raise OutOfOrder(f"worker {rank} joined at clock {start}, and {pushed} {command.clock} came")
        unit = self.units.get(command.unit)
        return (self.bucket(command.unit) if unit is None else unit).execute(command)

    def done(self, index: int, work: Add[Any] | Step) -> None:
        """Records that the operation that a unit's rule returned was applied to its weights."""
        self.units[index].done(work)

    # -- workers ---------------------------------------------------------------------------------------------------

    def _add_worker(self, command: AddWorker) -> ShardProgress:
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
        return ShardProgress(frontier, self.reached.pushed(rank), self.reached.further(rank))

    def _remove_worker(self, command: RemoveWorker) -> None:
        rank, incarnation = command.rank, command.incarnation
        self._removed[rank] = max(incarnation, self._removed.get(rank, 0))
        live = self.roster.get(rank)
        if live is not None and live.incarnation <= incarnation:
            del self.roster[rank]
            self._let_go(rank)

    def _let_go(self, rank: int) -> None:
        for unit in self.units.values():
            unit.let_go(rank)

    def _restore(self, command: RestoreSnapshot) -> None:
        snapshots = command.snapshots
        missing = sorted(self.buckets.keys() - snapshots.keys()) + sorted(self.tables.keys() - command.tables.keys())
        if missing:
            raise InvalidRequest(f"expected a snapshot of each bucket and table, got none of {missing[:8]}")
        # Tables first: a snapshot that does not fit is refused before any bucket changes
        for index, table in self.tables.items():
            table.restore(command.tables[index])
        self._fenced = command.last_incarnation
        self.roster.clear()
        for index, bucket in self.buckets.items():
            bucket.restore(snapshots[index], command.owned)
        committed = {index: snapshots[index].committed for index in self.buckets}
        self.data.restore(committed | {index: command.tables[index].committed for index in self.tables})

    def _close(self, command: Close) -> None:
        self._closed = command.reason
        self._room.release_all()

    # -- room --------------------------------------------------------------------------------------------------------

    @property
    def staged_limit(self) -> int:
        """The bytes that may be staged on this shard. A contribution for which an update waits may exceed it."""
        return self._staged_limit or derived_limit(
            self.parameter_bytes, self.spec.bucket_bytes, len(self.roster), len(self.spec.tables)
        )

    def _assigned_limit(self) -> int:
        """Returns the bytes of assignments that may wait for their steps on this shard."""
        weights = ASSIGNED_WEIGHTS * max(self.parameter_bytes, self.spec.bucket_bytes)
        return self._staged_limit or max(weights, self.staged_limit)

    # -- pulls -------------------------------------------------------------------------------------------------------

    def owed(self, index: int) -> Mapping[int, int]:
        """Returns what a pull of all staged contributions waits for; see UpdateRule.owed. The caller must schedule the
        unit.
        """
        return self.rules[index].owed() if index in self.rules else {}

    # -- figures -----------------------------------------------------------------------------------------------------

    @property
    def optimizer_bytes(self) -> int:
        """Bytes of the optimizer state of buckets on this shard."""
        return sum(bucket.weights.optimizer_bytes for bucket in self.buckets.values())

    @property
    def staged_bytes(self) -> int:
        """Bytes staged and not yet part of an update."""
        return sum(unit.staged_bytes for unit in self.units.values())

    @property
    def reserved_bytes(self) -> int:
        """Bytes that are staged in memory of this process, without those in workers' memory."""
        return self._room.staged.bytes

    @property
    def promised_bytes(self) -> int:
        """Bytes that the tables will still allocate for the rows that the job has announced."""
        return sum(table.promised_bytes for table in self.tables.values())

    def agreement(self) -> Agreement | None:
        """Returns how alike workers have moved, over the last rounds of all buckets; None: none is known."""
        known = [bucket.weights.agreement for bucket in self.buckets.values()]
        return sum((each for each in known if each is not None), Agreement()) if any(known) else None

    def table_figures(self) -> tuple[TableFigures, ...]:
        """Returns the size and the counts of each table; see `server_figures.reported`. Tables may step meanwhile."""
        return reported([table.figures() for table in self.tables.values()])


class Reached:
    """The versions and clocks of a job's units, over all their rules. Frozen buckets are left out.

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
        """Returns the last clock that a rank has pushed to all buckets and tables; None: this shard trains none."""
        return min((rule.pushed.get(rank, 0) for rule in self._rules), default=None)

    def further(self, rank: int) -> dict[int, int]:
        """Returns, by index, the last clock that a rank has pushed to a bucket or table, if it is later
        than `pushed`.
        """
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
        """Returns the clocks of workers that are not live any more, by rank."""
        return {rank: clock for rank, clock in self.extent().clocks.items() if rank not in self._roster}

    def extent(self) -> VersionRange:
        """Returns the versions of all units, and each worker's lowest clock, also of workers that are gone."""
        return union(rule.extent() for rule in self._rules)
