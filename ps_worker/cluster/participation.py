"""A worker's part in its job, over all its places (memberships): one connection after the other.

join       The job is registered; OwnMembership joins, and keeps the place from then on.
connect    A connection is made from that place: the model moves into memory that shards share, if they can; rank 0
           sends the rows that tables begin with, and the initial values; all workers pull the weights. It returns when
           every declared worker has joined.
lost       A lease runs out, a process is replaced, or the job is rolled back: calls fail, or the heartbeat thread
           learns of it and aborts them. The training thread sees PlaceLost at its next step or wait.
rejoin     The old connection ends, and another is made from the next place. If that place is lost before the connection
           is made, it is made from the one after.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TypeVar

from ps_protocol.errors import FinishedWithout, JobFinished, NotFound, PSError, UnknownWorker
from ps_protocol.figures import WorkerFigures
from ps_protocol.identity import Identity
from ps_protocol.job import JobSpec, validate
from ps_protocol.layout import BucketSpec
from ps_protocol.messages.workers import HeartbeatAnswer, JoinResult, SavedState, ShardMap, read_script, write_script
from ps_runtime.launch_id import LauncherReports
from ps_runtime.pools import Closed
from ps_runtime.signals import undisturbed
from ps_worker.cluster.connection import Connection
from ps_worker.cluster.coordinator_calls import CoordinatorClient, Patience
from ps_worker.cluster.first_rows import RowsBefore
from ps_worker.cluster.group_membership import GroupMembership
from ps_worker.cluster.options import JobOptions
from ps_worker.cluster.own_membership import CLOSED_EARLY, OwnMembership
from ps_worker.cluster.reader_buffers import ReaderBuffers
from ps_worker.cluster.script import ScriptTelling
from ps_worker.group import Group
from ps_worker.group import PlaceLost as PlaceLost
from ps_worker.model.flat import FlatModel
from ps_worker.model.state_transfer import States, state_assignments
from ps_worker.tables.server_rows import ServerTables
from ps_worker.timeline.recording import Timeline
from ps_worker.values import Registration

log = logging.getLogger("ps_worker")

T = TypeVar("T")

# How long a worker that joins late waits for another one's report of its script's settings: that one may be evaluating.
SCRIPT_SECONDS = 2.0
SCRIPT_CALL_SECONDS = 2.0  # for one call
# How long a worker that goes on for now waits for a coordinator that does not answer: training does not need it.
AGAIN_SECONDS = 0.5
AGAIN_CALL_SECONDS = 0.25
LANDING_SECONDS = 2.0  # the longest wait for weights that are on their way when a move is broken off
CLOSED = "the session is closed: its calls have ended"
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.005, 0.1

# The jobs and launches in which sessions of this process have taken part: the next session begins such a job anew. The
# server's address is no part of the key: a restarted one may have another.
_taken_part: set[tuple[str, str]] = set()


class Participation:
    """A worker's part in its job: it joins, joins again after a loss, and owns the connection of the current place.

    The constructor calls no server.

    Methods are for the training thread, and raise PSError. The heartbeat's thread reads this worker's clocks
    from `_reached` and `_finished`, and calls `_cut_off` if the place is lost. Any thread may call `close`, which
    also ends a `join` or `connect` that waits.

    metrics_address: the address of this worker's /metrics, for the coordinator; empty: not reachable
    launcher:        hears whether the job has begun: all declared workers have joined
    figures:         returns this worker's measurements, for status and metrics; None: there are none
    timeline:        records the times of steps; None: a new one, which records nothing until it is switched on
    script:          reports the settings of this worker's script to the coordinator
    group:           the processes that are this worker; None: this one is. All of them call these methods then
    connection:      that of the training thread's place. There is one after `connect`
    restore_count:   the job's rollbacks that this worker has made
    has_arrived:     the step loop has adopted the current place. `rejoin` sets it to False, and `arrive` to True. After
                     a signal in between, the next step or wait begins with the rest of the rejoin
    """

    def __init__(
        self,
        options: JobOptions,
        metrics_address: str,
        launcher: LauncherReports,
        figures: Callable[[], WorkerFigures] | None = None,
        timeline: Timeline | None = None,
        group: Group | None = None,
    ) -> None:
        assert options.server is not None
        self.options = options
        self.group = group
        self.coordinator = CoordinatorClient(options.server, options.connect_timeout, options.access, figures)
        self.restore_count = 0
        self.script = ScriptTelling(self._is_ahead)
        moves = self._reached, self._finished, self._cut_off, self.script
        given = self.coordinator, options, metrics_address, *moves
        self.membership = OwnMembership(*given) if group is None else GroupMembership(group, *given)
        self.timeline = timeline or Timeline()
        self._patience_beside = Patience()
        self.came_late = False  # the job was under way when this process joined
        self._metrics_address = metrics_address
        self._launcher, self._run = launcher, ""
        self.stage_limit = 0  # how many stages the job may come to: from `join` on
        self._shard_map = ShardMap({}, ())
        self._connection: Connection | None = None  # for other threads, as `connection`; None until there is one
        self._begun = False
        self._before: RowsBefore | None = None  # while `connect` runs
        self.has_arrived = True
        self._lost: BaseException | None = None  # the error by which a call showed that the connection's place is lost

    # -- joining and rejoining ---------------------------------------------------------------------------------------

    def join(self, spec: JobSpec) -> JobSpec:
        """Registers a job and joins it; returns its spec with the size of its buckets.

        Raises JobMismatch, JobInUse, Unreachable and other PSErrors; JobFinished in a process that comes late, and
        FinishedWithout if this process has trained another job of its launch.
        """
        for last in (False, True):
            registered = self._together(lambda: self._register(spec))
            if last:
                log.warning("job %r ended while this worker waited for a place: it begins the job anew", spec.name)
            self._shard_map, self.stage_limit = registered.shard_map, registered.stage_limit
            agreed = replace(spec, bucket_bytes=registered.bucket_bytes)
            validate(agreed)  # the server may have answered anything
            self._run = registered.run
            try:
                self.membership.join(registered.run)
                _taken_part.add(self._where)
                return agreed
            except NotFound:  # the job ended with its launch, while this worker waited to join
                if last or self.is_closed:
                    raise
        raise AssertionError

    def _register(self, spec: JobSpec) -> Registration:
        is_late = self.options.launch.is_unique and self._where not in _taken_part  # if the job has finished
        launch = self.options.launch.name if is_late else ""
        try:
            return self.coordinator.register(spec, launch, self.options.memory_place)
        except JobFinished as error:
            # A process that has trained is in the middle of its script: an end with 0 would look like the script's own.
            if not any(launch == trained for _, trained in _taken_part):
                raise
            raise FinishedWithout(f"this worker has trained, and finds its next job without it: {error}") from error

    @property
    def _where(self) -> tuple[str, str]:
        return self.options.job, self.options.launch.name

    def connect(self, model: FlatModel, states: States, tables: ServerTables | None = None) -> bool:
        """Connects from the first place. The model has the weights at its clock then: rank 0's at first.

        states: the job's initial optimizer state, used if this worker has rank 0
        tables: the tables with their initial rows, used if this worker has rank 0
        Returns whether a checkpoint wants this worker's own state at this clock.
        """
        place = self.membership.place
        assert place is not None
        before = self._before = None if tables is None else RowsBefore(tables)
        checkpoint_wanted = self._connect(place, model, states)
        self._before = None
        self.came_late = self.connection.place.clock > 0
        arrive(self)
        if before is not None:
            before.began(self.connection.place.clock)
        return checkpoint_wanted

    def rejoin(self, model: FlatModel) -> bool:
        """Continues from the place that follows a lost one. Raises the error that ended this worker's part for good.

        Returns the same as `connect`.
        """
        place, self.has_arrived = self.connection.place, False
        self.connection.end()
        if self.group is not None or self._lost is not None or not self.membership.holds(place):
            # Else an interrupt came before it had arrived in this one.
            place = self.membership.renewed(place, self._lost)
            self._lost = None  # it belongs to the old place
        return self._connect(place, model, {})

    def _connect(self, place: JoinResult, model: FlatModel, states: States) -> bool:
        """Connects from a place; if it is lost meanwhile, from the next one."""
        while True:
            try:
                enter = lambda: (None, self._enter_or_lose(place, model, states))  # noqa: B023, E731
                _, checkpoint_wanted = self.together_or(enter)
                self._lost = None
                return checkpoint_wanted
            except PlaceLost as lost:
                cause = lost.__cause__
            if self._connection is not None:
                self._connection.end()
            place = self.membership.renewed(place, cause)
            self._lost = None

    def _together(self, make: Callable[[], T]) -> T:
        """Returns the result of a call. In a group it first waits for the calls of all members: Group.all_through."""
        return make() if self.group is None else self.group.all_through(make)

    def together_or(self, make: Callable[[], tuple[T, bool]]) -> tuple[T, bool]:
        """Returns the result of a call: a value and a flag. In a group it first waits for the calls of all members, and
        the flag is True if it is for one of them: Group.any_through.
        """
        return make() if self.group is None else self.group.any_through(make)

    def _enter_or_lose(self, place: JoinResult, model: FlatModel, states: States) -> bool:
        """As `_enter`. Raises PlaceLost for an error that the loss of the place has caused."""
        try:
            return self._enter(place, model, states)
        except PlaceLost:
            raise
        except Exception as error:
            if not self.membership.has_lost(place, error):
                raise
            raise PlaceLost from error

    def _enter(self, place: JoinResult, model: FlatModel, states: States) -> bool:
        """Connects from a place; returns when the weights have been pulled and all declared workers have joined."""
        self._shard_map = place.shard_map or self._shard_map
        connection = Connection(self.options, place, self._shard_map, model, self.timeline)
        self.connection = self._connection = connection
        self._check(place)  # `_cut_off` knew nothing of this connection until now
        if not self._begun:
            if place.identity.rank == 0:  # the shards use its rows and values if they have none yet
                if self._before is not None:
                    self._before.send(connection.begin_tables, self.settle)
                for assignment in state_assignments(model.spec, model.layout, states):
                    connection.assign(0, assignment)
                self.settle()
                connection.push_initial(model.layout.held)
                self.settle()
            # Raises after the start timeout; the pulls below wait for rank 0.
            self.membership.await_started(place, lambda ranks: self._launcher.waits(self._run, ranks))
            connection.pull(frozen=True)
            self.settle()
        model.begin_pull()
        model.base.is_overwritten = model.base.is_separate
        pulls = connection.pull()
        self.settle()
        model.end_pull()
        model.base.is_overwritten = False
        self._begun = True
        self.membership.await_started(place)
        self._check(place)
        self._launcher.started(self._run)
        return any(pull.result().checkpoint for pull in pulls)

    def _check(self, place: JoinResult) -> None:
        if self.is_closed:
            raise UnknownWorker(CLOSED_EARLY)
        if not self.membership.holds(place):
            raise PlaceLost

    def beside(self, options: JobOptions) -> Participation:
        """Returns this worker's part in another job, which it has not joined yet. It has this one's figures.

        All that are beside this one share their patience: a launcher ends a worker that takes long to leave. This one
        has its own, as the worker's state is left in its job.
        """
        other = Participation(options, self._metrics_address, self._launcher)
        other.coordinator.patience = self._patience_beside
        return other

    # -- the current place -------------------------------------------------------------------------------------------

    @property
    def draft(self) -> Callable[[BucketSpec], int]:
        """A function that sends a full bucket over the connection of that moment; see Connection.draft."""
        return lambda bucket: self.connection.draft(bucket)

    @property
    def has_place(self) -> bool:
        """Whether the connection's place is still valid, as far as this worker knows, and the step loop has
        adopted it.
        """
        place, membership = self.connection.place, self.membership
        return self.has_arrived and self._lost is None and membership.place is place and membership.lost is not place

    @property
    def may_call(self) -> bool:
        """Whether calls can be made: see `has_place`. Raises the error that has ended this worker's part in the job."""
        if self.membership.error is not None:
            self.membership.raise_lost()
        return self.has_place

    @property
    def ranks(self) -> tuple[int, ...]:
        """The live ranks, as far as this worker knows."""
        return self.membership.roster.ranks

    @property
    def rank(self) -> int:
        """This worker's rank."""
        return self.connection.place.identity.rank

    @property
    def world_size(self) -> int:
        """The declared world size, or how many take part now in an elastic job."""
        return self.options.world_size or max(1, len(self.ranks))

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, and the first member of its group; in an elastic job the lowest live rank, as far as
        this worker knows.
        """
        is_first = self.group is None or self.group.member == 0
        return is_first and self.rank == (0 if self.options.world_size else min(self.ranks, default=0))

    def share(self) -> tuple[int, int]:
        """Returns the share of the data of this process, as (index, how many shares); in an elastic job, among the live
        workers. In a group, members with different batches have a share each.
        """
        ranks = self.ranks
        if self.group is not None:
            index, shares = self.group.data
            return self.rank * shares + index, self.world_size * shares
        if self.options.world_size or self.rank not in ranks:
            return self.rank, self.world_size
        return ranks.index(self.rank), len(ranks)

    def begin_step(self) -> None:
        """Begins the next step in the timeline; if it is recorded, with readings of the shards' clocks."""
        timeline = self.timeline
        if timeline.wanted is not None and timeline.begin_step(self.connection.clock + 1, self.rank):
            self.connection.read_clocks()

    def settle(self) -> None:
        """Waits for all calls under way. Raises the first error; PlaceLost if the loss of the place has caused it."""
        error = self.connection.settle()
        if error is not None:
            self.membership.raise_lost()  # a fenced worker's calls all fail: this error says why
            self._raise_as_lost(error)
            raise self._as_closed(error) from error

    def call(self, ask: Callable[[Identity], T]) -> T:
        """Returns the coordinator's answer to this worker. Raises PlaceLost if its place is lost."""
        if not self.has_arrived:
            raise PlaceLost
        try:
            return ask(self.connection.place.identity)
        except PSError as error:
            self._raise_as_lost(error)
            closed = self._as_closed(error)
            if closed is error:
                raise
            raise closed from error

    def _as_closed(self, error: BaseException) -> BaseException:
        """Returns the error of a call; if the end of this session has caused it, an error that says so."""
        # A shard may learn that the worker has left before its calls are aborted: it answers UnknownWorker.
        has_ended = isinstance(error, Closed | UnknownWorker) or (isinstance(error, PSError) and error.retryable)
        return UnknownWorker(CLOSED) if has_ended and self.is_closed else error

    def ask_script(self, seconds: float | None = None) -> tuple[SavedState | None, bool]:
        """Returns the settings of the job's script, and whether a newer report of them is on its way: then they are of
        the last one before. None: there are none. In a group the first member asks.

        seconds: of a question that is asked again, the longest wait for a report that is on its way. None: it is the
                 first question, and waits for SCRIPT_SECONDS
        Raises PlaceLost if this worker's place is lost.
        """
        group = self.group
        if group is None:
            return self._asked_script(seconds)
        with group.during("optimizer.step"):
            own = group.all_through(lambda: self._asked_script(seconds) if group.member == 0 else (None, False))
            answer = group.from_first(lambda: bytes([own[1]]) + write_script(own[0]))
            return read_script(answer[1:]), bool(answer[0])

    def _asked_script(self, seconds: float | None) -> tuple[SavedState | None, bool]:
        began, pause = time.monotonic(), FIRST_PAUSE_SECONDS
        first = SCRIPT_SECONDS, SCRIPT_SECONDS, SCRIPT_CALL_SECONDS
        again = seconds or 0.0, min(seconds or 0.0, AGAIN_SECONDS), AGAIN_CALL_SECONDS
        longest, unanswered, timeout = first if seconds is None else again
        answer: HeartbeatAnswer | None = None
        while True:
            patience = longest
            try:
                ask = partial(self.coordinator.heartbeat, clock=self.connection.clock, timeout=timeout)
                answer = self.call(lambda identity: ask(identity, script_wanted=True))  # noqa: B023
            except PSError as error:
                if not error.retryable:
                    raise
                patience = unanswered
            is_coming = answer is None or answer.script_coming
            if not is_coming or time.monotonic() - began >= patience:
                return None if answer is None else answer.script, is_coming
            self.wait(pause)
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)

    def _raise_as_lost(self, error: BaseException) -> None:
        if self.membership.has_lost(self.connection.place, error):
            self._lost = error
            raise PlaceLost from error

    def wait(self, seconds: float) -> None:
        """Waits for `seconds`. Raises the error that ended this worker's part in the job, if there is one."""
        self.coordinator.closing.wait(seconds)
        self.membership.raise_lost()

    # -- other threads -----------------------------------------------------------------------------------------------

    @property
    def is_closed(self) -> bool:
        """Whether this worker has left."""
        return self.coordinator.closing.is_set()

    def _reached(self, place: JoinResult) -> int:
        connection = self._connection
        return connection.clock if connection is not None and connection.place is place else place.clock

    def _finished(self, place: JoinResult) -> int:
        connection = self._connection
        return connection.finished if connection is not None and connection.place is place else place.clock

    def _is_ahead(self) -> bool:
        """Whether the job was rolled back, and this worker has not gone back with it yet."""
        place = self.membership.place
        return place is not None and place.restore_count > self.restore_count

    def _cut_off(self, lost: JoinResult) -> None:
        """Aborts the calls of a lost place. The training thread may have the next place already: its calls go on."""
        connection = self._connection
        if connection is not None and connection.place is lost:
            connection.cut()

    def close(self, state: SavedState | None = None, done: bool = False) -> None:
        """Leaves the job and ends every thread and connection; may be called more than once.

        state: this worker's own state, for a process that takes its rank later
        done:  the script has ended
        """
        if not self.is_closed:
            self.membership.close(state, done)
            self.coordinator.close()
            self.membership.join_threads()
        if self._connection is not None:
            self._connection.close()


def teller(participation: Participation, model: FlatModel) -> ReaderBuffers:
    """Returns the sender of tensors that no optimizer steps, for readers of the weights."""
    return ReaderBuffers(model, lambda: participation.connection)


def arrive(participation: Participation) -> None:
    """Records that the step loop has adopted the current place, and has gone back if the job has."""
    participation.has_arrived, participation.restore_count = True, participation.connection.place.restore_count


def break_off_move(participation: Participation, model: FlatModel) -> None:
    """Ends the connection of a place in which the worker has not arrived. Weights that have landed from it are not the
    script's changes.
    """
    with undisturbed():
        try:
            participation.connection.end(LANDING_SECONDS)
        finally:
            model.end_pull()
            model.weights.mark()


def end_last_step(participation: Participation) -> None:
    """Ends the last step, if it did not end: see Connection.resume. Raises as Participation.settle."""
    if participation.connection.resume():
        try:
            participation.settle()
        except Exception:
            participation.connection.fail()  # what was sent in its place is sent once more
            raise
