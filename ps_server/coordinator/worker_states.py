"""The workers' own states for a job's checkpoints: the last ones of live workers, those of workers that have left, and
those in the last checkpoint.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar

from ps_protocol.convert import job_spec_from_data
from ps_protocol.errors import CheckpointDamaged, LimitExceeded
from ps_protocol.job import JobSpec, are_cut_alike
from ps_protocol.messages.workers import group_state, member_states
from ps_server.coordinator.shared_room import Owner, SharedRoom
from ps_server.storage.checkpoints import CheckpointStore
from ps_server.storage.manifest import Manifest

# By rank, the clock of a worker's state and the state.
States = Mapping[int, tuple[int, bytes]]

T = TypeVar("T")


class StatesOnDisk(Mapping[int, tuple[int, bytes]]):
    """The states in a checkpoint, by rank. A state is read when it is looked up; raises CheckpointDamaged if it is
    damaged.

    spec: the job with its present cut; None: the checkpoint's. No worker can continue from the state of a worker with
          another cut. Then there are no states, except for the job's settings in them (`first_of`)
    """

    def __init__(self, store: CheckpointStore, manifest: Manifest, spec: JobSpec | None = None) -> None:
        self._store, self._manifest = store, manifest
        before = job_spec_from_data(manifest.job)
        self._group_size = before.group_size
        self._workers = manifest.workers if spec is None or are_cut_alike(before, spec) else {}

    def __getitem__(self, rank: int) -> tuple[int, bytes]:
        return self._workers[rank].clock, self._read(rank)

    def _read(self, rank: int) -> bytes:
        manifest = self._manifest
        return self._store.read_worker(manifest.job["name"], manifest.name, manifest.workers[rank].part)

    def first_of(self, rank: int) -> bytes:
        """Returns the state of a worker; for a group, the state of its first member."""
        return _first_of(self._read(rank), self._group_size)

    def __iter__(self) -> Iterator[int]:
        return iter(self._workers)

    def clocks(self) -> Mapping[int, int]:
        """Returns the clock of each state that `first_of` has, by rank. For a worker that had left before, it is the
        clock at which it left.
        """
        reached = self._manifest.clocks
        return {rank: min(part.clock, reached.get(rank, part.clock)) for rank, part in self._manifest.workers.items()}

    def __len__(self) -> int:
        return len(self._workers)


class WorkerStates:
    """The workers' own states for one job's checkpoints. Thread-safe.

    room:        the memory budget for the states of all jobs
    owner:       the principal to whom this job's states are accounted
    kept:        the states in the last checkpoint
    group_size:  members of each worker's group. A group's state counts once all members have sent theirs, at one clock
    state_bytes: the limit for one worker's state, and for those of a group's members together
    """

    def __init__(
        self, room: SharedRoom, owner: Owner | None = None, group_size: int = 1, state_bytes: float = math.inf
    ) -> None:
        self._group_size, self._state_bytes = group_size, state_bytes
        # The states of incomplete groups. Key: the rank, and whether the members have left; then by member.
        self._of_members: dict[tuple[int, bool], dict[int, tuple[int, bytes]]] = {}
        self._room = room.of_job(owner or Owner())
        self.kept: States = {}
        self._sent: dict[int, tuple[int, bytes]] = {}  # by rank, the last state
        self._left: dict[int, tuple[int, bytes] | None] = {}  # by rank that has left, its state then
        # By rank, a state that was taken over by a worker that may not know it yet
        self._taken: dict[int, tuple[int, bytes]] = {}
        self._closed = False
        self._lock = threading.Lock()

    def save(self, rank: int, clock: int, state: bytes, of: int = 0) -> None:
        """Keeps the state that a live worker sends. Raises LimitExceeded if there is no room; the earlier state then
        stays.

        of: the member of the worker's group that sends it
        """
        with self._lock:
            if self._closed:  # a state kept now would hold its bytes for ever
                return
            if self._group_size > 1:
                together = self._together(rank, False, of, (clock, state))
                if together is None:
                    return
                clock, state = together
            self._drop_taken(rank)
            self._room.hold(len(state) - _size(self._sent.get(rank)))
            self._sent[rank] = clock, state

    def member_left(self, rank: int, of: int, state: tuple[int, bytes] | None) -> tuple[int, bytes] | None:
        """Keeps the state that a member of a group leaves behind. Returns the group's state once each member has left
        one, all of one clock; otherwise None.

        state: the member's clock and state; None if it leaves none

        Raises LimitExceeded if there is no room or the state is too large: then the group leaves no state.
        """
        with self._lock:
            if self._closed:
                return None
            if state is None:
                self._drop_of_members(rank)
                return None
            try:
                return self._together(rank, True, of, state)
            except LimitExceeded:
                self._drop_of_members(rank)
                raise

    def _together(self, rank: int, left: bool, of: int, state: tuple[int, bytes]) -> tuple[int, bytes] | None:
        """Keeps the state of a member; returns the group's state if it is complete now.

        Raises LimitExceeded if the members' states of one clock are too large together: one message returns all of
        them.
        """
        states = self._of_members.setdefault((rank, left), {})
        others = sum(_size(each) for member, each in states.items() if member != of and each[0] == state[0])
        if others + _size(state) > self._state_bytes:
            raise LimitExceeded(
                f"max-state-bytes is {self._state_bytes}, got states of {others + _size(state)} bytes of members of "
                "one group, which are one worker's state"
            )
        self._room.hold(_size(state) - _size(states.get(of)))
        states[of] = state
        if len(states) < self._group_size or any(clock != state[0] for clock, _ in states.values()):
            return None
        del self._of_members[rank, left]
        self._room.hold(-sum(map(_size, states.values())))
        return state[0], group_state([states[member][1] for member in range(self._group_size)])

    def _drop_of_members(self, rank: int | None = None) -> None:
        """Drops the states of members whose groups are incomplete: of one rank, or of all."""
        for key in [key for key in self._of_members if rank in (None, key[0])]:
            self._room.hold(-sum(map(_size, self._of_members.pop(key).values())))

    def leave(self, rank: int, state: tuple[int, bytes] | None) -> None:
        """Keeps the clock and state that a worker leaves behind; None: it leaves none. Raises LimitExceeded if there is
        no room: then it leaves none either.
        """
        with self._lock:
            if self._closed:
                return
            self._room.hold(-_size(self._sent.pop(rank, None)) - _size(self._left.get(rank)))
            self._left[rank] = None
            self._drop_taken(rank)
            self._drop_of_members(rank)
            self._room.hold(_size(state))
            self._left[rank] = state

    def joined(self, rank: int, has_place: bool = False) -> None:
        """Records that a live worker takes over the state that an earlier worker of the rank has left behind.

        If the answer to its join is lost, it joins once more, or another process does instead. So the state is kept
        until the worker has made a call of its own.

        has_place: the worker has made such a call: it knows its membership
        """
        if has_place and rank not in self._taken:
            return  # true for nearly every heartbeat, so no lock is taken
        with self._lock:
            if has_place:
                self._drop_taken(rank)
                return
            left = self._left.pop(rank, None)
            if left is not None:
                self._drop_taken(rank)
                self._taken[rank] = left
            self._drop_of_members(rank)

    def _drop_taken(self, rank: int) -> None:
        self._room.hold(-_size(self._taken.pop(rank, None)))

    def forget(self) -> None:
        """Drops the states of live workers."""
        with self._lock:
            self._room.hold(-sum(map(_size, self._sent.values())))
            self._sent = {}
            self._drop_of_members()

    def rolled_back(self, kept: States) -> None:
        """Drops all states that were sent or left since a checkpoint. kept: the states in the checkpoint"""
        self.forget()
        with self._lock:
            self._room.hold(-sum(map(_size, (*self._left.values(), *self._taken.values()))))
            self._left, self._taken, self.kept = {}, {}, kept

    def close(self) -> None:
        """Frees the memory of all states, and keeps none that comes later: the job ends."""
        with self._lock:
            self._closed = True
        self.rolled_back({})

    def at(self, clock: int | None) -> States:
        """Returns the states of live workers that belong to `clock`; None: the newest of each."""
        with self._lock:
            return {rank: state for rank, state in self._sent.items() if clock in (None, state[0])}

    def left(self, clock: int) -> States:
        """Returns the states of workers that have left at `clock` or before, as states of `clock`: they made no step
        since.

        A worker that left at a later clock is not included: one of its updates is missing at `clock`.
        """
        with self._lock:
            left = {rank: state for rank, state in self._left.items() if state is not None}
        return {rank: (clock, state) for rank, (then, state) in left.items() if then <= clock}

    def left_at(self) -> Mapping[int, int | None]:
        """Returns the clock at which each rank has left; None for a rank that left no state."""
        with self._lock:
            return {rank: None if state is None else state[0] for rank, state in self._left.items()}

    def newest(self, above: int) -> tuple[int, bytes] | None:
        """Returns the newest clock and state of any rank, left behind or in the last checkpoint; None if none is above
        `above`.

        For a group it is the state of its first member. Raises CheckpointDamaged.
        """
        return self._from_kept(lambda kept: self._newest(kept, above))

    def _newest(self, kept: States, above: int) -> tuple[int, bytes] | None:
        clocks = kept.clocks() if isinstance(kept, StatesOnDisk) else {rank: clock for rank, (clock, _) in kept.items()}
        with self._lock:
            left = max((state for state in self._left.values() if state is not None), default=(above, b""))
        rank = max(clocks, key=lambda rank: (clocks[rank], -rank), default=None)
        if rank is not None and clocks[rank] > left[0]:
            if isinstance(kept, StatesOnDisk):
                return clocks[rank], kept.first_of(rank)
            return clocks[rank], _first_of(kept[rank][1], self._group_size)
        return (left[0], _first_of(left[1], self._group_size)) if left[0] > above else None

    def of(self, rank: int) -> tuple[int, bytes] | None:
        """Returns the clock and state from which a new worker of a rank continues; None if there is none. Raises
        CheckpointDamaged.
        """
        with self._lock:
            left = self._left.get(rank) or self._taken.get(rank)
        return left if left is not None else self._from_kept(lambda kept: kept.get(rank))

    def _from_kept(self, read: Callable[[States], T]) -> T:
        """Reads from the last checkpoint. If that is another one by now, the files of the one before may be gone: then
        reads from the new one."""
        while True:
            kept = self.kept
            try:
                return read(kept)
            except CheckpointDamaged:
                if self.kept is kept:
                    raise


def _first_of(state: bytes, group_size: int) -> bytes:
    return member_states(state)[0] if group_size > 1 else state


def _size(state: tuple[int, bytes] | None) -> int:
    return len(state[1]) if state is not None else 0
