"""The workers' own states for a job's checkpoints: those that live workers sent last, those that workers sent when they
left, and those in the last checkpoint."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Mapping

from ps_protocol.errors import LimitExceeded
from ps_protocol.messages.workers import group_state, member_states
from ps_server.coordinator.shared_room import Owner, SharedRoom
from ps_server.storage.checkpoints import CheckpointStore
from ps_server.storage.manifest import Manifest

# By rank, the clock of a worker's state and the state.
States = Mapping[int, tuple[int, bytes]]


class StatesOnDisk(Mapping[int, tuple[int, bytes]]):
    """The states in a checkpoint. Each is read when it is asked for; CheckpointDamaged is raised for a damaged one."""

    def __init__(self, store: CheckpointStore, manifest: Manifest) -> None:
        self._store, self._manifest = store, manifest

    def __getitem__(self, rank: int) -> tuple[int, bytes]:
        worker, manifest = self._manifest.workers[rank], self._manifest
        return worker.clock, self._store.read_worker(manifest.job["name"], manifest.name, worker.part)

    def __iter__(self) -> Iterator[int]:
        return iter(self._manifest.workers)

    def clocks(self) -> Mapping[int, int]:
        """Returns the clock of each state, by rank: of a worker that had left before, the one that it had come to."""
        reached = self._manifest.clocks
        return {rank: min(part.clock, reached.get(rank, part.clock)) for rank, part in self._manifest.workers.items()}

    def __len__(self) -> int:
        return len(self._manifest.workers)


class WorkerStates:
    """The workers' own parts of one job's checkpoints. Thread-safe.

    room:  what all jobs' states are counted in
    owner: of the job
    kept: those in the last checkpoint
    group_size: of each worker. The state of a group counts once those of all its members are here, of one clock
    state_bytes: the limit for the state of one worker, and so for those of a group's members together
    """

    def __init__(
        self, room: SharedRoom, owner: Owner | None = None, group_size: int = 1, state_bytes: float = math.inf
    ) -> None:
        self._group_size, self._state_bytes = group_size, state_bytes
        # By rank, and whether they were left behind, what members have sent: by member.
        self._of_members: dict[tuple[int, bool], dict[int, tuple[int, bytes]]] = {}
        self._room = room.of_job(owner or Owner())
        self.kept: States = {}
        self._sent: dict[int, tuple[int, bytes]] = {}  # by rank, what came last
        self._left: dict[int, tuple[int, bytes] | None] = {}  # by rank that has left, its state then
        self._closed = False
        self._lock = threading.Lock()

    def save(self, rank: int, clock: int, state: bytes, of: int = 0) -> None:
        """Takes what a live worker sends, or member `of` of its group. Raises LimitExceeded where there is no room, and
        keeps what came before."""
        with self._lock:
            if self._closed:  # what is kept then would keep its room for good
                return
            if self._group_size > 1:
                together = self._together(rank, False, of, (clock, state))
                if together is None:
                    return
                clock, state = together
            self._room.hold(len(state) - _size(self._sent.get(rank)))
            self._sent[rank] = clock, state

    def member_left(self, rank: int, of: int, state: tuple[int, bytes] | None) -> tuple[int, bytes] | None:
        """Takes what a member of a group leaves behind; returns what the group does, once each member has left a state
        of one clock. Raises LimitExceeded where there is no room for it, or it is too large: the group leaves nothing.
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
        """Takes the state of a member; returns that of the group if it is complete with it.

        Raises LimitExceeded where those of its clock are too large together: all of them come back in one message.
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
        """Drops what members have sent while others of their group have not: of one rank, or of all."""
        for key in [key for key in self._of_members if rank in (None, key[0])]:
            self._room.hold(-sum(map(_size, self._of_members.pop(key).values())))

    def leave(self, rank: int, state: tuple[int, bytes] | None) -> None:
        """Takes what a worker leaves behind: its clock and state, or nothing. Raises LimitExceeded where there is no
        room for it: then it has left nothing."""
        with self._lock:
            if self._closed:
                return
            self._room.hold(-_size(self._sent.pop(rank, None)) - _size(self._left.get(rank)))
            self._left[rank] = None
            self._drop_of_members(rank)
            self._room.hold(_size(state))
            self._left[rank] = state

    def joined(self, rank: int) -> None:
        """Notes that a rank has a live worker: what an earlier one has left behind is its to go on from."""
        with self._lock:
            self._room.hold(-_size(self._left.pop(rank, None)))
            self._drop_of_members(rank)

    def forget(self) -> None:
        """Drops what live workers have sent so far."""
        with self._lock:
            self._room.hold(-sum(map(_size, self._sent.values())))
            self._sent = {}
            self._drop_of_members()

    def rolled_back(self, kept: States) -> None:
        """Notes that the job continues with the states of a checkpoint: what was sent or left since is void."""
        self.forget()
        with self._lock:
            self._room.hold(-sum(map(_size, self._left.values())))
            self._left, self.kept = {}, kept

    def close(self) -> None:
        """Gives its room back, and keeps nothing more: the job ends, and a call may be under way."""
        with self._lock:
            self._closed = True
        self.rolled_back({})

    def at(self, clock: int | None) -> States:
        """Returns the states that live workers sent at a clock, or at any."""
        with self._lock:
            return {rank: state for rank, state in self._sent.items() if clock in (None, state[0])}

    def left(self, clock: int) -> States:
        """Returns what workers have left behind, as of a clock: one that left made no step since, so its state is that
        of each later clock. Not of one that was further on: an update of its own would be missing.
        """
        with self._lock:
            left = {rank: state for rank, state in self._left.items() if state is not None}
        return {rank: (clock, state) for rank, (then, state) in left.items() if then <= clock}

    def left_at(self) -> Mapping[int, int | None]:
        """Returns the ranks that have left, each with its clock then; None for one that sent no state."""
        with self._lock:
            return {rank: None if state is None else state[0] for rank, state in self._left.items()}

    def newest(self, above: int) -> tuple[int, bytes] | None:
        """Returns the newest state of any rank, of a clock above this one: what was left behind, or what is kept. Of a
        group it is that of its first member.

        Raises CheckpointDamaged.
        """
        found = self._newest(above)
        return (found[0], member_states(found[1])[0]) if found is not None and self._group_size > 1 else found

    def _newest(self, above: int) -> tuple[int, bytes] | None:
        kept = self.kept
        clocks = kept.clocks() if isinstance(kept, StatesOnDisk) else {rank: clock for rank, (clock, _) in kept.items()}
        with self._lock:
            left = max((state for state in self._left.values() if state is not None), default=(above, b""))
        rank = max(clocks, key=lambda rank: (clocks[rank], -rank), default=None)
        if rank is not None and clocks[rank] > left[0]:
            return clocks[rank], kept[rank][1]
        return left if left[0] > above else None

    def of(self, rank: int) -> tuple[int, bytes] | None:
        """Returns what a new worker of a rank goes on from: its clock then, and the state. Raises CheckpointDamaged."""
        with self._lock:
            left = self._left.get(rank)
        return left if left is not None else self.kept.get(rank)


def _size(state: tuple[int, bytes] | None) -> int:
    return len(state[1]) if state is not None else 0
