"""The live workers of a job: leases, incarnations, ranks. Times are seconds on the caller's clock."""

from __future__ import annotations

import hmac
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from ps_protocol.errors import Fenced, Forbidden, InvalidRequest, UnknownWorker
from ps_protocol.messages.workers import Continued, JoinRequest

# Heartbeats of a worker within an eighth of a lease count as one. Workers send them further apart, so if they come that
# close together, a network has held the earlier ones back.
TOGETHER_PER_LEASE = 8
DELAYED_PER_LEASE = 16  # a dead worker's last heartbeat may lie in a queue for a sixteenth of a lease
# After a rollback live workers come back at once. For so many seconds no other launch gets their ranks. It is not
# longer because they may all be dead, and the other launch may be their user's next attempt.
AWAY_SECONDS = 5.0
DEFAULT_ABSENCE_SECONDS = 300.0  # how long a job that ends waits for a worker that was removed as silent
# When its last worker has fallen silent, a job waits for the processes that were live then. A process that is started
# again first imports its libraries, perhaps on another host. With the default lease this is a minute.
RETURN_LEASES = 6
HEARTBEATS_PER_LEASE = 4  # heartbeats that a client sends in one lease
WORKERS_A_CALL = 64  # workers of a job in one call to a shard, so that the call ends long before its deadline
REPLACED_KEPT = 16  # launches kept of those that took a rank over one after the other; the oldest are forgotten


@dataclass(frozen=True)
class ShardProgress:
    """A shard's answer to AddWorker: how far the job, and workers of this rank, had come there.

    frontier: the highest clock that any worker has reached
    pushed:   the last clock at which some incarnation of this rank had pushed every trained bucket of this shard. That
              step counts, even if its worker never got the answer. None: the shard trains no bucket
    further:  by bucket or table, a later clock that was pushed to this unit alone. None: unknown
    """

    frontier: int
    pushed: int | None
    further: Mapping[int, int] | None = None


@dataclass(frozen=True)
class Arrival:
    """A worker that a shard must begin to count.

    clock: the first clock at which it counts; None: the shard's own frontier
    """

    rank: int
    incarnation: int
    key: bytes = field(repr=False)
    clock: int | None = None


@dataclass(frozen=True)
class LiveWorker:
    """One live worker.

    incarnation: rises with every join in the job, and fences the process that held the rank before
    expires:     when its lease runs out unless a heartbeat comes
    clock:       the number of its finished steps, as last reported
    key:         the secret that proves the incarnation: numbers can be guessed
    attempt:     the number of the join request; 0: none
    launch:      the launch that started it; empty: unknown
    pushed:      the last clock that workers of this rank had pushed to all buckets when it joined; None: unknown
    on_shards:   each shard's state when it counted the worker; empty: unknown. Not on disk: only the answer to the join
                 has it
    since:       when a worker of its launch took the rank, in seconds since 1970, for logs
    signs:       of a group, by member, the time of its last heartbeat; infinity: it is done, and need send no more
    processes:   of a group, by member, the host and process id that it has told; `host` and `pid` are the first one's
    heard:       the time of the last heartbeat; minus infinity: none yet. A join does not count: its caller may be dead
                 when it is carried out
    heard_before: the time of the heartbeat before. Heartbeats that a network held back come together, and count as one
    replaced:    the launches from which it took the rank, each with the incarnation of its last worker there
    """

    rank: int
    incarnation: int
    expires: float
    clock: int = 0
    pid: int = 0
    host: str = ""
    metrics_address: str = ""
    key: bytes = field(default=b"", repr=False)
    attempt: int = field(default=0, repr=False)
    launch: str = ""
    pushed: int | None = None
    on_shards: Mapping[int, ShardProgress] = field(default_factory=dict, repr=False, compare=False)
    since: float = 0.0
    signs: Mapping[int, float] = field(default_factory=dict, repr=False, compare=False)
    processes: Mapping[int, tuple[str, int]] = field(default_factory=dict, repr=False, compare=False)
    heard: float = -math.inf
    heard_before: float = -math.inf
    replaced: tuple[tuple[str, int], ...] = ()


UNKNOWN = JoinRequest()


@dataclass(frozen=True)
class NamedProcess:
    """A process, by the launch, host and pid that it named when it joined.

    incarnation: only the worker of this incarnation; 0: any. Processes of containers may have the same pid one after
                 the other
    """

    launch: str
    host: str
    pid: int
    incarnation: int = 0

    def was(self, worker: LiveWorker) -> bool:
        """Whether a worker is or was one of this process."""
        same = (worker.launch, worker.host, worker.pid) == (self.launch, self.host, self.pid)
        return same and self.incarnation in (0, worker.incarnation)


@dataclass(frozen=True)
class Rivals:
    """The workers of other launches that prevent a join.

    workers: by rank; at least one
    live:    one of them is known to live: it has sent heartbeats since the caller began to wait. Otherwise all may be
             dead: after a launch was killed, its workers look live until their leases end
    seconds: the time until the last of their leases ends
    """

    workers: tuple[LiveWorker, ...]
    live: bool
    seconds: float


@dataclass(frozen=True)
class JoinedWorker:
    """The result of a join.

    worker:        the worker
    clock:         the clock at which it starts
    placement:     for each bucket, the index of its shard
    restore_count: how many times the job was rolled back to a checkpoint
    state:         the state that an earlier worker of its rank has saved or left behind, with its clock; None: there is
                   none
    run:           the run of the job
    continued:     set for the first worker of a launch, if earlier launches have trained the job; otherwise None
    """

    worker: LiveWorker
    clock: int
    placement: list[int]
    restore_count: int = 0
    state: tuple[int, bytes] | None = None
    run: str = ""
    continued: Continued | None = None


@dataclass
class Membership:
    """The live workers of one job.

    world_size: the number of workers that the job declares; 0: elastic
    started:    all declared workers have joined; an elastic job has started at once. A worker that dies later does not
                change it: the others go on. If no worker is left, the first that comes back waits for the others, as at
                the first start
    rejoining:  the ranks that are expected to join again, after a rollback or when no worker was left, each with the
                time until which the others wait for it: without end if there are no others, or if its launch is about
                to start it
    away:       the workers that were live at the rollback: for AWAY_SECONDS no other launch gets their rank
    absent:     by rank, workers that were removed as silent, until their `expires`: they may live, and come back. No
                other worker waits for them
    absence:    seconds for which an absent worker is remembered
    done:       the ranks whose workers have left because their scripts ended
    gone:       in a job with a world size: by rank, when its last worker gave its last sign of life
    in_doubt:   live workers that have sent no heartbeat since another worker was started again: all may have died
    group_size: the number of processes of each worker: above 1 if workers are groups
    """

    world_size: int
    lease: float
    workers: dict[int, LiveWorker] = field(default_factory=dict)
    last_incarnation: int = 0
    started: bool = False
    ever_joined: bool = False
    rejoining: dict[int, float] = field(default_factory=dict)
    away: dict[int, LiveWorker] = field(default_factory=dict)
    absent: dict[int, LiveWorker] = field(default_factory=dict)
    absence: float = DEFAULT_ABSENCE_SECONDS
    done: set[int] = field(default_factory=set)
    gone: dict[int, float] = field(default_factory=dict)
    in_doubt: set[int] = field(default_factory=set)
    group_size: int = 1
    # By rank of a live group, the time of each member's last heartbeat; infinity: the member is done.
    _left: set[int] = field(default_factory=set)  # ranks whose last worker has left by itself
    _doubted: float = -math.inf  # when the workers of `in_doubt` came into doubt
    _has_nobody: bool = False  # no worker was left, and the job waits for its ranks to join again
    _is_reported: bool = True  # `newly_awaited` has returned the ranks

    def claim(
        self, rank: int | None, request: JoinRequest = UNKNOWN, reserved: Iterable[int] = (), now: float = math.inf
    ) -> int:
        """Returns the rank that a worker gets: the one it asks for; for None, the lowest free one. Changes nothing.

        reserved: the ranks of workers that are joining at this moment
        now:      the time. A rank whose worker was removed only recently is not free: the worker may come back
        Raises Fenced for a worker that comes back to a rank that another process has now; InvalidRequest for a rank
        beyond the world size.
        """
        live = self.workers.get(rank) if rank is not None else None
        # The same process asks again if the answer to its first call was lost.
        repeats = live is not None and (live.pid, live.host) == (request.pid, request.host)
        if request.previous is not None and live is not None and live.incarnation > request.previous and not repeats:
            raise Fenced(
                f"worker {rank} was replaced by another process: incarnation {live.incarnation} is live"
                f"{_other_launch(live) if _strangers(live.launch, request.launch) else ''}"
            )
        if rank is None:
            since = now + self.absence - min(self.lease, AWAY_SECONDS)
            just_gone = {r for r, worker in self.absent.items() if worker.expires > since}
            taken = self.workers.keys() | self.rejoining.keys() | just_gone | set(reserved)
            rank = next(r for r in range(len(taken) + 1) if r not in taken)
        if self.world_size and rank >= self.world_size:
            raise InvalidRequest(f"rank must be below the job's world_size {self.world_size}, got {rank}")
        return rank

    def rivals(self, rank: int, request: JoinRequest, now: float) -> Rivals | None:
        """Returns the live workers of other launches that prevent this worker from taking a rank; None if it may take
        it.

        A rank may always be taken if it is free, if a worker of the same launch holds it (which restarts it), or if
        either launch is unknown. A new launch is refused as a whole: each worker on one of its `launch_ranks` prevents
        it. A launch from which a rank was taken over does not take it back.
        """
        if not request.launch or request.previous is not None:
            return None
        taken = {r: worker for r, worker in self.away.items() if worker.expires > now} | self.workers
        rivals = [
            worker
            for _, worker in sorted(taken.items())
            if (worker.rank == rank or worker.rank in request.launch_ranks)
            and _strangers(worker.launch, request.launch)
            and not (request.take_over and all(launch != request.launch for launch, _ in worker.replaced))
        ]
        if not rivals:
            return None
        since = now - request.waited + self.lease / DELAYED_PER_LEASE
        # One heartbeat may be a dead worker's that the network held back. Its other heartbeats would come together with
        # it.
        live = bool(request.waited) and any(worker.heard_before > since for worker in rivals)
        return Rivals(tuple(rivals), live, max(0.0, max(worker.expires for worker in rivals) - now))

    def repeated(self, attempt: int, now: float) -> LiveWorker | None:
        """Returns the live worker that joined with this attempt, and renews its lease; None if there is none."""
        worker = next((m for m in self.workers.values() if attempt and m.attempt == attempt), None)
        if worker is not None:
            worker = self.workers[worker.rank] = replace(worker, expires=now + self.lease)
        return worker

    def next_incarnation(self) -> int:
        """Returns a number that no worker of this job has had."""
        self.last_incarnation += 1
        return self.last_incarnation

    def join(self, worker: LiveWorker, launch_ranks: range = range(0), is_back: bool = False) -> None:
        """Makes a worker live, in place of an earlier one of its rank.

        launch_ranks: the ranks that its launch is about to start
        is_back:      the process was live before
        """
        now, older = worker.expires - self.lease, self.workers.get(worker.rank)
        # Workers that a rollback removed come back by themselves.
        has_trained = self.started or (self.rejoining and not is_back)
        if self.world_size and has_trained and not self._is_carried(worker.rank, older, now):
            self._await_all(worker.rank, now)
        self._give_time(worker.rank, now, launch_ranks, is_back)
        self.workers[worker.rank] = worker if older is None else _after(worker, older)
        for known in (self.away, self.absent, self.gone):
            known.pop(worker.rank, None)
        for ranks in (self.done, self.in_doubt, self._left):
            ranks.discard(worker.rank)
        self.ever_joined = True
        if self.rejoining.pop(worker.rank, None) is not None or self.rejoining:
            self._look_whether_started()
        else:
            self.started = self.started or len(self.workers) >= self.world_size
            self._has_nobody = False

    def _look_whether_started(self) -> None:
        self.started = not self.rejoining
        if self.started:
            self._has_nobody = False
            self.in_doubt.clear()

    def _is_carried(self, rank: int, older: LiveWorker | None, now: float) -> bool:
        """Whether another worker outlived the worker of this rank, so that the job has gone on without it.

        Otherwise all workers may have died together, although the leases of some end later than those of others.

        older: the live worker of the rank
        """
        others = [worker for r, worker in self.workers.items() if r != rank]
        if others and (self.rejoining or self.in_doubt or rank in self._left):
            return True  # another worker came back first, so the awaited ranks are known; or this worker left by itself
        ended = self.gone.get(rank, now) if older is None else _last_sign(older, now)
        # A worker that died at the same time may have sent its last heartbeat up to one interval later, and that
        # heartbeat may have lain in a queue. A heartbeat later than both is from a worker that lives on.
        since = ended + self.lease / HEARTBEATS_PER_LEASE + self.lease / DELAYED_PER_LEASE
        return any(worker.heard > since for worker in others)

    def _await_all(self, rank: int, now: float) -> None:
        """Expects all workers to join again that were live shortly before the last one fell silent.

        Workers whose scripts have ended are not expected. rank: the rank of the first one to join
        """
        others = self.workers.keys() - {rank}
        end = max(self.gone.values(), default=now)
        recent = {r for r, at in self.gone.items() if at > end - RETURN_LEASES * self.lease}
        awaited = (recent | others) - self.done - self.rejoining.keys() - {rank}
        self.rejoining |= dict.fromkeys(sorted(awaited), math.inf)
        self.in_doubt, self._doubted = set(others), now
        self._has_nobody, self._is_reported = True, False

    def newly_awaited(self) -> tuple[int, ...]:
        """Returns, once, the ranks that the job begins to wait for because no worker is left; later calls
        return none.
        """
        if self._is_reported or self.started or self.in_doubt:
            return ()
        self._is_reported = True
        return tuple(sorted(self.rejoining))

    def _give_time(self, rank: int, now: float, launch_ranks: range, is_back: bool) -> None:
        """Sets until when the job waits for the ranks that have to join again.

        The time begins when the first worker joins. A launch's own ranks have no limit until they have joined. A
        process that was live before comes back at once, and so do the other processes that were live with it: they get
        one lease.

        rank: that of the worker that joins; the worker that it replaces may still look live
        """
        anew = bool(self.world_size) and not is_back
        grace = now + self.lease * (RETURN_LEASES if anew else 1)
        is_first = not self.workers.keys() - self.in_doubt - {rank}
        for r, until in self.rejoining.items():
            if r in launch_ranks:
                self.rejoining[r] = math.inf
            elif is_first and (until == math.inf or anew):
                self.rejoining[r] = grace

    def resume(self, done: set[int], now: float) -> None:
        """Continues a job of an earlier coordinator, once its workers and rejoining ranks are set.

        done: the ranks whose scripts have run to their ends
        For all other ranks it is unknown when they left: the time counts from `now`. Ranks that rejoin
        without a rollback must be started again, and get more time.
        """
        self.done = done
        here = self.workers.keys() | self.rejoining.keys()
        self.gone = dict.fromkeys((rank for rank in range(self.world_size) if rank not in here), now)
        anew = self.rejoining.keys() - self.away.keys()
        self.rejoining |= dict.fromkeys(sorted(anew), now + RETURN_LEASES * self.lease)
        self._has_nobody = bool(anew)

    def doubt_is_over(self) -> bool:
        """Returns whether a worker of `in_doubt` has sent a heartbeat since, and so is alive. If so, the job no longer
        waits for any rank.
        """
        since = self._doubted + self.lease / DELAYED_PER_LEASE
        if not any(self.workers[rank].heard > since for rank in self.in_doubt if rank in self.workers):
            return False
        self.rejoining.clear()
        self._look_whether_started()
        return True

    def rollback(self, now: float, fenced: Iterable[LiveWorker] = ()) -> list[LiveWorker]:
        """Removes all workers and returns them. If the job had started, they are expected to join again within a lease.

        fenced: workers that were live, and that are about to join again anyway
        """
        before, self.workers = [*self.workers.values(), *fenced], {}
        until = now + min(self.lease, AWAY_SECONDS)
        self.away |= {m.rank: replace(m, expires=until, heard=-math.inf, heard_before=-math.inf) for m in before}
        self.in_doubt.clear()
        if self.started or self.rejoining:
            self.rejoining = dict.fromkeys([*self.rejoining, *(worker.rank for worker in before)], now + self.lease)
            self.started = self.ever_joined and not self.rejoining
        return before

    def stop_waiting(self, now: float) -> list[int]:
        """Drops the ranks that did not rejoin in time, so that training goes on without them. Returns them.

        While no worker has come back yet, the time is unlimited: it begins when the first one has.
        """
        late = [rank for rank, until in self.rejoining.items() if until <= now]
        if not self.workers:
            self.rejoining |= dict.fromkeys(late, math.inf)
            return []
        for rank in late:
            del self.rejoining[rank]
            self.gone[rank] = -math.inf  # so long ago that `_await_all` never waits for this rank again
        if late:
            self._look_whether_started()
        return late

    def heartbeat(
        self,
        rank: int,
        incarnation: int,
        clock: int,
        now: float,
        key: bytes = b"",
        of: int = 0,
        process: tuple[str, int] | None = None,
    ) -> None:
        """Renews a lease. Raises UnknownWorker, Fenced or Forbidden if the caller is not the live worker.

        of: the member of the worker's group that sends it. A group's lease is that of the member that was silent
            longest
        process: its host and process id; None if it does not tell them
        """
        worker = self.check(rank, incarnation, key)
        sign: float | None = now
        if self.group_size > 1:
            # The heartbeat of a member that is done counts no more.
            at = now if worker.signs.get(of) != math.inf else math.inf
            worker = replace(worker, signs={**worker.signs, of: at})
            if process is not None:
                worker = replace(worker, processes={**worker.processes, of: process})
            is_whole = at == now and len(worker.signs) == self.group_size
            sign = min(worker.signs.values()) if is_whole else None  # None: a member has sent no heartbeat yet
        if sign is not None:
            worker = replace(worker, expires=max(sign + self.lease, worker.expires))
            if sign - worker.heard > self.lease / TOGETHER_PER_LEASE:
                worker = replace(worker, heard=sign, heard_before=worker.heard)
        self.workers[rank] = replace(worker, clock=max(clock, worker.clock))

    def member_leaves(self, rank: int, of: int) -> bool:
        """Records that a member of a group is done: it need send no more heartbeats. Returns whether all members are
        done.
        """
        signs = {**self.workers[rank].signs, of: math.inf}
        self.workers[rank] = replace(self.workers[rank], signs=signs)
        return sum(at == math.inf for at in signs.values()) >= self.group_size

    def leave(self, rank: int, incarnation: int, now: float = 0.0, done: bool = False, expired: bool = False) -> bool:
        """Removes a worker. Returns False if it was removed already.

        done:    its script has ended
        expired: the worker's lease has run out, or its process has ended; False: the worker leaves by itself
        A worker that a rollback had removed is no longer expected to join again. Nor is one in doubt whose script has
        ended.
        """
        away, worker = self.away.get(rank), self.workers.get(rank)
        is_away = away is not None and away.incarnation == incarnation
        is_live = worker is not None and worker.incarnation == incarnation
        if done and (is_away or is_live):
            self.done.add(rank)
        if is_away or is_live:
            self.gone[rank] = _last_sign(worker, now) if expired and worker is not None else now
            (self._left.discard if expired else self._left.add)(rank)
        if is_away:
            del self.away[rank]
        if (is_away or (done and is_live)) and self.rejoining.pop(rank, None) is not None:
            self._look_whether_started()
        if not is_live:
            return False
        del self.workers[rank]
        self.in_doubt.discard(rank)
        if expired and self._has_nobody and not self.started:  # its launcher may start it again
            self.rejoining.setdefault(rank, now + RETURN_LEASES * self.lease)
        return True

    def take_silent(self, now: float) -> list[LiveWorker]:
        """Removes the workers whose lease has run out, and returns them. They are remembered as absent, as they may
        come back.
        """
        silent = self.expired(now)
        for worker in silent:
            self.leave(worker.rank, worker.incarnation, now, expired=True)
            if self.absence:
                self.absent[worker.rank] = replace(worker, expires=now + self.absence)
        return silent

    def forget_absent(self, now: float) -> list[int]:
        """Forgets the workers that were silent and have not come back in time. Returns their ranks."""
        late = [rank for rank, worker in self.absent.items() if worker.expires <= now]
        for rank in late:
            del self.absent[rank]
        return late

    def postpone(self, seconds: float, now: float) -> None:
        """Extends leases and waits for rejoining ranks by `seconds`, but to no later than a lease from now: some may
        have been renewed already, by heartbeats that lay in a queue. The times of absent workers are extended by the
        full `seconds`.
        """

        def later(until: float) -> float:
            return max(until, min(until + seconds, now + self.lease))

        self.workers = {rank: replace(m, expires=later(m.expires)) for rank, m in self.workers.items()}
        self.rejoining = {rank: later(until) for rank, until in self.rejoining.items()}
        self.absent = {r: replace(m, expires=m.expires + seconds) for r, m in self.absent.items()}

    def expired(self, now: float) -> list[LiveWorker]:
        """Returns the workers whose lease has run out."""
        return [worker for worker in self.workers.values() if worker.expires <= now]

    def ended(self, process: NamedProcess, now: float) -> list[LiveWorker]:
        """Returns the live workers of a process that has ended. Those of its workers that were absent or expected to
        rejoin are awaited no more.
        """
        self.absent = {rank: worker for rank, worker in self.absent.items() if not process.was(worker)}
        for rank in [rank for rank, worker in self.away.items() if process.was(worker)]:
            del self.away[rank]
            if rank in self.rejoining:
                self.rejoining[rank] = now
        return [worker for worker in self.workers.values() if process.was(worker)]

    def check(self, rank: int, incarnation: int, key: bytes = b"") -> LiveWorker:
        """Returns the live worker with this rank, incarnation and key. Raises UnknownWorker, Fenced or Forbidden."""
        worker = self.workers.get(rank)
        if worker is not None and any(incarnation == last for _, last in worker.replaced):
            raise Fenced(
                f"worker {rank} was replaced: incarnation {worker.incarnation} is live, "
                f"the call came from {incarnation}{_other_launch(worker)}"
            )
        check_incarnation(rank, incarnation, worker.incarnation if worker else None)
        assert worker is not None
        check_key(rank, key, worker.key)
        return worker


def _last_sign(worker: LiveWorker, now: float) -> float:
    """Returns the time of a worker's last heartbeat; if it has sent none, `now`."""
    return worker.heard if worker.heard > -math.inf else now


def _strangers(launch: str, other: str) -> bool:
    """Whether both launches are known, and differ."""
    return bool(launch) and bool(other) and launch != other


def _after(worker: LiveWorker, older: LiveWorker) -> LiveWorker:
    """Returns a worker that takes the rank of an older one, with the history that it inherits."""
    if older.launch == worker.launch:
        return replace(worker, since=older.since, replaced=older.replaced) if worker.launch else worker
    if not _strangers(older.launch, worker.launch):
        return worker
    replaced = (*older.replaced, (older.launch, older.incarnation))
    return replace(worker, replaced=replaced[-REPLACED_KEPT:])


def _other_launch(worker: LiveWorker) -> str:
    """Returns the end of the error for a worker that another launch replaced."""
    return f"; another launch took over: pid {worker.pid} on host {worker.host or '?'}"


def check_incarnation(rank: int, incarnation: int, live: int | None) -> None:
    """Raises unless `incarnation` is the live one of a rank; `live` is None where the rank has no live worker.

    An older incarnation was replaced: Fenced. A newer one was not replaced: it joined servers that have gone back to an
    earlier state since, and no longer know it. UnknownWorker: it may join again, and fences the one that is live.
    """
    if live is None:
        raise UnknownWorker(f"worker {rank} is not a live worker of the job: its lease ran out, or it never joined")
    if incarnation > live:
        raise UnknownWorker(f"worker {rank} never joined: incarnation {live} is live, the call came from {incarnation}")
    if incarnation < live:
        raise Fenced(f"worker {rank} was replaced: incarnation {live} is live, the call came from {incarnation}")


def check_key(rank: int, key: bytes, issued: bytes) -> None:
    """Raises Forbidden unless `key` is the one that was issued with a live incarnation; in constant time."""
    if not hmac.compare_digest(key, issued):
        raise wrong_key(rank)


def wrong_key(rank: int) -> Forbidden:
    """Returns the error for a call whose key is not the one that was issued with a live incarnation."""
    return Forbidden(f"the call does not come from worker {rank}: its lease_key is not the one that Join gave")
