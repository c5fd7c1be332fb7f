"""A worker that is a group of processes: how its members agree.

All members are one worker: one rank, one incarnation, one clock. The first member joins the job; the others get the
place from it. They talk over a gloo group of their own, in the threads that train.

A step counts on all members or on none of them. No process may go on into a collective that its neighbour, which has
lost the place or refuses the step, never enters. So they compare before the step is pushed, and when it is through.

All members make the same calls of a session. All that they do together begins with one and the same collective, in
which each says in which call it is, and how often it has met the others there. So a call that one member makes alone
fails on all of them, with the names of both calls; without that, gloo would wait for ever in two unlike collectives. So
does the next call of a member that was interrupted in one, which the others are in still.

An exchange may take two collectives. A signal that ends it may come between these, and the others are in the second one
then, or go there. So a member that was interrupted makes the rest of the exchange before its next one.
"""

from __future__ import annotations

import ctypes
import logging
import time
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ps_protocol.errors import BY_REASON, InvalidRequest, PSError
from ps_protocol.messages.workers import JoinResult, member_states
from ps_runtime.signals import HEARD_SECONDS, undisturbed
from ps_worker.neighbours import Neighbours

log = logging.getLogger("ps_worker")

T = TypeVar("T")
Members = tuple[int, ...]  # some members of a group, in ascending order
Collectives = Generator[Any, None, T]  # an exchange: yields its collectives, one after the other, as each has begun

NOTICE_SECONDS = 30.0  # the time before a member logs that it waits for the others
START_TIMEOUT = 1800.0  # the default of the setting

# What a member says of its part in something that all do together. The highest counts.
THROUGH, LOST, FAILED = range(3)

_agreed: Counter[tuple[int, ...]] = Counter()  # how often these ranks have agreed on their number of groups
_formed: Counter[tuple[int, ...]] = Counter()  # how often this process has formed a group of these ranks

_NUMBERS = 6  # that members compare at once, at most
_NAME_BYTES = 64  # of a call
_SIZE_BYTES = 8  # the space for a length

# How long a collective waits for the others. The first member may be at the coordinator for long, behind another
# worker's evaluation. The connection to one that is dead breaks at once, and `Neighbours` notices one that hangs.
WAIT = timedelta(days=365)


class PlaceLost(Exception):
    """A call failed because the worker has lost its place: its membership in the job. The cause has the reason."""


class RaisedByAll(Exception):
    """All members raise the error that is this one's cause, so it need not be sent to any of them."""


class Group:
    """The processes that together are this worker. For the training thread; all members make the same calls.

    size:   how many there are
    member: which of them this one is, from 0
    ranks:  of the processes in the default process group
    given:  as `prepare` got it, if it did: a DeviceMesh or a process group
    data:   the share of the group's data that this member has, as (index, how many shares)
    pipeline_stages: by member, the pipeline stage that it holds: the number of the first member that holds the same one
    neighbours: whether the other members go on

    start_timeout: seconds to wait for the other members to come
    timeouts:      the group timeout and the step timeout, as for Neighbours; 0: none
    Raises LimitExceeded, with those that have not come.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        given: Any = None,
        start_timeout: float = START_TIMEOUT,
        timeouts: tuple[float, float] = (0.0, 0.0),
    ) -> None:
        self.ranks, self.size, self.given = tuple(ranks), len(ranks), given
        self._start_timeout = timedelta(seconds=start_timeout)
        self.neighbours = _come(self.ranks, start_timeout, timeouts)
        try:
            self._gloo = _connected(self.ranks, self._start_timeout)
        except BaseException:
            self.neighbours.leave()
            raise
        self._parts: dict[Members, Any] = {}  # process groups of some of the members
        self.member, self._first = dist.get_rank(self._gloo), dist.get_global_rank(self._gloo, 0)
        self.data = self.member, self.size
        self.pipeline_stages = [0] * self.size
        self._call, self._met = "", 0  # the call that the script is in, and how often the members have met in it
        self._under_way: tuple[Collectives[Any], Any] | None = None  # an exchange, and its collective that has begun
        self._waits_since: float | None = None
        self._has_said = False

    @property
    def is_pipeline(self) -> bool:
        """Whether members hold unlike stages of a pipeline."""
        return len(set(self.pipeline_stages)) > 1

    @contextmanager
    def during(self, call: str) -> Iterator[None]:
        """A `with` block in which this member is in a call of the script, by its name. A call within it is a part."""
        if self._call:
            yield
            return
        try:  # from the first line on: Ctrl-C may act in any of them, and a notebook goes on
            self._call, self._met = call, 0
            self.neighbours.thread.enters()
            yield
        finally:
            self._call, self._met = "", 0
            self.neighbours.thread.is_in_call = False

    def _make(self, exchange: Collectives[T]) -> T:
        """Makes an exchange with the other members, after the rest of one that was interrupted. Returns its result."""
        self._has_said, self._waits_since, self.neighbours.awaits_all = False, time.monotonic(), True
        try:
            self._end_interrupted()
            return self._go_on(exchange)
        finally:
            self._waits_since, self.neighbours.awaits_all = None, False

    def _end_interrupted(self) -> None:
        """Completes an exchange that was interrupted, for which the other members may wait. Discards its result."""
        if self._under_way is not None:
            exchange, begun = self._under_way
            with suppress(InvalidRequest):  # the error tells them that this member was in another call
                self._await(begun)
                self._go_on(exchange)

    def _go_on(self, exchange: Collectives[T]) -> T:
        while True:
            with undisturbed():  # a collective that has begun is known to have
                self._under_way = None
                try:
                    begun = next(exchange)
                except StopIteration as end:
                    return end.value  # type: ignore[no-any-return]
                self._under_way = exchange, begun
            self._await(begun)

    def _await(self, work: Any) -> None:
        """Waits for a collective. Raises its error. Signals are handled meanwhile: in torch's wait none is."""
        try:
            while not work.is_completed():
                with suppress(RuntimeError):  # a timeout, or an error, which the last line of this method raises
                    work.wait(timedelta(seconds=HEARD_SECONDS))
                # `check` takes a lock, and a signal's handler must not end it in between, with the lock held.
                with undisturbed():
                    self.neighbours.check()  # during `prepare` there is no thread of heartbeats that checks them
        except BaseException:
            # The others may never come, and a process group waits for its collectives when it is freed, also at the end
            # of the process: it is never freed.
            for each in (self._gloo, *self._parts.values()):
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(each))
            raise
        try:
            work.wait()
        except RuntimeError:
            self._under_way = None  # its rest cannot be made
            raise

    def say_if_waiting(self) -> None:
        """Logs, once, that this member has waited for the others for a while. For the heartbeat's thread: those that
        say nothing are the ones that have not come.
        """
        since = self._waits_since
        if since is not None and not self._has_said and time.monotonic() - since > NOTICE_SECONDS:
            self._has_said = True
            log.warning(
                "member %d of this worker's group waits in %s for the other members: all of them make the same calls",
                *(self.member, self._call or "a call"),
            )

    def _meet(self, *numbers: int) -> list[int]:
        """Returns, for each number, the highest of any member.

        Raises InvalidRequest, on all members, if they are in different calls of the script, or at different places of
        one.
        """
        return self._make(self._meeting(*numbers))

    def _meeting(self, *numbers: int) -> Collectives[list[int]]:
        self._met += bool(self._call)
        where = f"{self._met} {self._call}".encode()[:_NAME_BYTES]
        call = zlib.crc32(where)
        own = [call, -call, *numbers, *[0] * (_NUMBERS - len(numbers))]
        numbers_of_all = torch.tensor(own, dtype=torch.int64, device="cpu")  # a script may have set another default
        yield dist.all_reduce(numbers_of_all, op=dist.ReduceOp.MAX, group=self._gloo, async_op=True)
        highest, lowest, *found = numbers_of_all.tolist()
        if highest != -lowest:
            raise unlike_calls((yield from self._gathering(where, _NAME_BYTES)))
        return found[: len(numbers)]

    def _gathering(self, own: bytes, size: int) -> Collectives[list[bytes]]:
        """Gathers `size` bytes of each member, by member. own: this member's bytes, at most `size`"""
        padded = torch.zeros(size, dtype=torch.uint8, device="cpu")
        padded[: len(own)] = _tensor(own)
        parts = [torch.zeros_like(padded) for _ in range(self.size)]
        yield dist.all_gather(parts, padded, group=self._gloo, async_op=True)
        return [part.numpy().tobytes() for part in parts]

    def gather(self, own: bytes) -> list[bytes]:
        """Returns what each member gives, by member."""

        def exchange() -> Collectives[list[bytes]]:
            [most] = yield from self._meeting(len(own))
            size = len(own).to_bytes(_SIZE_BYTES, "little")
            return (yield from self._gathering(size + own, _SIZE_BYTES + most))

        parts = self._make(exchange())
        return [part[_SIZE_BYTES:][: int.from_bytes(part[:_SIZE_BYTES], "little")] for part in parts]

    def from_first(self, make: Callable[[], bytes]) -> bytes:
        """Returns what the first member makes, on all members. Raises its error on all of them.

        Where it makes a call of all members, which fails for all of them, it raises RaisedByAll: nobody is told.
        """
        error: Exception | None = None
        made = b""
        if self.member == 0:
            try:
                made = b"+" + make()
            except RaisedByAll as raised:
                raise raised.__cause__ or raised from None
            except Exception as raised:
                error, made = raised, b"-" + _error_bytes(raised)
        answer = self._broadcast(made)
        if error is not None:
            raise error
        if answer[:1] != b"+":
            raise _error_of(answer[1:], 0)
        return answer[1:]

    def _broadcast(self, made: bytes) -> bytes:
        """Returns what the first member has made. Each member needs memory for that alone."""

        def exchange() -> Collectives[bytes]:
            [size] = yield from self._meeting(len(made))
            content = _tensor(made) if self.member == 0 else torch.zeros(size, dtype=torch.uint8, device="cpu")
            yield dist.broadcast(content, self._first, group=self._gloo, async_op=True)
            return made if self.member == 0 else content.numpy().tobytes()

        return self._make(exchange())

    def connect(self, parts: Collection[Members]) -> None:
        """Connects some of the members with each other: the others take no part in what these hand out.

        parts: the same on all members
        """
        some = sorted({*parts} - {tuple(range(self.size))})
        for members in some:
            if self.member in members and members not in self._parts:
                self._parts[members] = _connected(
                    [dist.get_global_rank(self._gloo, each) for each in members], self._start_timeout
                )
        if some:  # torch names a group by how many its process is in: all members need the same number
            _be_in_as_many(self.ranks)

    def hand_out(
        self, says: bool, contents: Callable[[bool], Sequence[tuple[Members, torch.Tensor]]], take: Callable[[], None]
    ) -> None:
        """Overwrites tensors on the host with the content that another member has.

        says:     whether something is so for this member
        contents: is called with whether it is so for one member. Returns the tensors that this member has, in the order
                  that all have, each with its members: the first of them has the content. See `connect`
        take:     is called once all have come, also where this call was interrupted, before the next one
        """

        def exchange() -> Collectives[None]:
            [said] = yield from self._meeting(says)
            for members, content in contents(bool(said)):
                source = dist.get_global_rank(self._gloo, members[0])
                connected = self._gloo if len(members) == self.size else self._parts[members]
                yield dist.broadcast(content, source, group=connected, async_op=True)
            take()

        self._make(exchange())

    def check_alike(self, own: str) -> None:
        """Raises InvalidRequest, on all members, if one describes this worker differently from the first one. After any
        error the neighbours have been left.
        """
        try:
            gathered = [each.decode() for each in self.gather(own.encode())]
            member = next((index for index, each in enumerate(gathered) if each != gathered[0]), None)
            if member is not None:
                raise InvalidRequest(
                    f"the members of a group are one worker: member 0 is {gathered[0]}, and member {member} is "
                    f"{gathered[member]}. connect(rank=..., world_size=...) takes the number of the group, and how "
                    "many groups there are"
                )
        except BaseException:  # the session does not know of this group yet
            self.neighbours.leave()
            raise

    def all_through(self, make: Callable[[], T]) -> T:
        """Returns what a call of this member returns, once those of all members are through.

        Raises PlaceLost where the place was lost for one of them, and where the call of one fails, its error.
        """
        return self.any_through(lambda: (make(), False))[0]

    def any_through(self, make: Callable[[], tuple[T, bool]]) -> tuple[T, bool]:
        """As `all_through`, for a call that also returns a flag. The result's flag is True if it is for one member."""
        error: Exception | None = None
        made: T | None = None
        own = False
        try:
            made, own = make()
        except Exception as raised:
            error = raised
        lost, (anywhere,) = self.compare(error, own)
        if lost is not None:
            raise lost
        return made, bool(anywhere)  # type: ignore[return-value]

    def compare(self, error: Exception | None, *own: int) -> tuple[PlaceLost | None, list[int]]:
        """Compares with the other members. Raises the error of a member whose call has failed.

        Returns the loss of the place, where it is lost for one of them, and of each number the highest of any member.
        """
        worst = THROUGH
        if error is not None:
            worst = LOST if isinstance(error, PlaceLost) else FAILED
        own_worst, (worst, *highest) = worst, self._meet(worst, *own)
        if worst == FAILED:
            gathered = self.gather(_error_bytes(error) if error is not None and own_worst == FAILED else b"")
            if error is not None and own_worst == FAILED:
                raise error
            member = next(index for index, each in enumerate(gathered) if each)
            raise _error_of(gathered[member], member) from error
        if worst == LOST:
            return error if isinstance(error, PlaceLost) else PlaceLost(), highest
        return None, highest


def unlike_calls(where: Sequence[bytes]) -> InvalidRequest:
    """Returns the error for members that are in unlike calls.

    where: by member, how often it has met the others, and in which call
    """
    gathered = [each.rstrip(b"\0").decode(errors="replace") for each in where]
    member = next((index for index, each in enumerate(gathered) if each != gathered[0]), 0)
    (first, call), (second, other) = (gathered[index].split(" ", 1) for index in (0, member))
    if call == other:  # its name says nothing of what differs
        call, other = f"part {first} of {call}", f"part {second} of {other}: one of them was interrupted in it"
    return InvalidRequest(
        "the members of a group make the same calls of a session, in one order: member 0 of this worker's group is "
        f"in {call or 'another call'}, and member {member} in {other or 'another call'}"
    )


def in_call(group: Group | None, call: str) -> AbstractContextManager[None]:
    """Returns a context in which a member of a group is in a call of the script: see `Group.during`. None: no group"""
    return nullcontext() if group is None else group.during(call)


def group_of(
    given: Any, launched: int = 0, start_timeout: float = START_TIMEOUT, timeouts: tuple[float, float] = (0.0, 0.0)
) -> Group:
    """Returns the group that `prepare(..., group=...)` names: a DeviceMesh or a process group.

    launched: how many processes the launcher has started as this worker; 0: it does not say
    start_timeout, timeouts: as for Group

    Raises InvalidRequest if `given` is neither, if torch.distributed is not initialised, if this process is not in the
    group, or if the group has another size than `launched`.
    """
    ranks = [] if launched and given is None else ranks_of(given)
    if launched and len(ranks) != launched:  # each of them would join as the same worker, and take another's place
        named = f"a group of {len(ranks)}" if ranks else "no group"
        raise InvalidRequest(
            f"the launcher has started {launched} processes as this worker (--group {launched}), and prepare got "
            f"{named}: give it prepare(..., group=mesh), the mesh of all of them"
        )
    return Group(ranks, given, start_timeout, timeouts)


def _come(ranks: tuple[int, ...], start_timeout: float, timeouts: tuple[float, float]) -> Neighbours:
    """Waits until all members have come, and returns them. Raises LimitExceeded."""
    key_prefix = f"ps_torch/group/{'-'.join(map(str, ranks))}/{_formed[ranks]}"
    _formed[ranks] += 1
    member = sorted(ranks).index(dist.get_rank())
    store = dist.distributed_c10d._get_default_store()
    seconds, step_seconds = timeouts
    neighbours = Neighbours(store, key_prefix, member, len(ranks), seconds, step_seconds=step_seconds)
    neighbours.begin()
    try:
        neighbours.await_all(start_timeout)
    except BaseException:
        neighbours.leave()
        raise
    return neighbours


def _connected(ranks: Sequence[int], start_timeout: timedelta) -> Any:
    """Returns a process group of these ranks, whose collectives wait for as long as it takes. All of them call it.

    start_timeout: the longest wait for the others to come
    """
    some: dict[str, Any] = {"backend": "gloo", "use_local_synchronization": len(ranks) < dist.get_world_size()}
    if some["use_local_synchronization"]:
        _be_in_as_many(tuple(ranks))
    # The others may never come. This group stays: torch numbers those of the same ranks by how many there are: without
    # it the next session's would get a number that is taken.
    dist.new_group(list(ranks), timeout=start_timeout, **some)
    return dist.new_group(list(ranks), timeout=WAIT, **some)


def _be_in_as_many(ranks: tuple[int, ...]) -> None:
    """Makes this process a member of as many process groups as the other processes of these ranks. All of them call it.

    torch names a group of some of the processes by the number of groups that the process is in. These numbers may
    differ: a stage with a tied embedding is in one group more. The processes would then wait for different names.
    """
    store = dist.distributed_c10d._get_default_store()
    own = len(dist.distributed_c10d._world.pg_names)
    key = f"ps_torch/{'-'.join(map(str, ranks))}/{_agreed[ranks]}"
    _agreed[ranks] += 1
    store.set(f"{key}/{dist.get_rank()}", str(own))
    most = max(int(store.get(f"{key}/{rank}")) for rank in ranks)
    for _ in range(most - own):
        dist.new_group([dist.get_rank()], backend="gloo", use_local_synchronization=True)


def ranks_of(given: Any) -> list[int]:
    """Returns the ranks of a DeviceMesh or a process group in the default process group. Raises InvalidRequest as
    `group_of`.
    """
    if not (dist.is_available() and dist.is_initialized()):
        raise InvalidRequest(
            "prepare(..., group=...) needs a process group: call torch.distributed.init_process_group in each process "
            "of the group before"
        )
    mesh = getattr(given, "mesh", None)
    if isinstance(mesh, torch.Tensor):
        ranks = [int(rank) for rank in mesh.flatten()]
    elif isinstance(given, dist.ProcessGroup):
        ranks = dist.get_process_group_ranks(given)
    else:
        raise InvalidRequest(
            "prepare(..., group=...) takes a DeviceMesh or a process group, such as torch.distributed.group.WORLD, got "
            f"{type(given).__name__}"
        )
    if dist.get_rank() not in ranks:
        raise InvalidRequest(f"this process, {dist.get_rank()}, is not in the group that prepare got: {ranks}")
    return ranks


def place_of_member(place: JoinResult, group: Group) -> JoinResult:
    """Returns the place of a group as one of its members has it: with its own number, and its own state."""
    state = place.state
    if state is not None and group.size > 1:
        content = member_states(state.content)
        state = replace(state, content=content[group.member]) if len(content) == group.size else None
    return replace(place, identity=replace(place.identity, member=group.member), state=state)


def _tensor(content: bytes) -> torch.Tensor:
    if not content:  # torch makes no tensor of that
        return torch.zeros(0, dtype=torch.uint8, device="cpu")
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def _error_bytes(error: BaseException) -> bytes:
    reason = error.reason if isinstance(error, PSError) else ""
    return f"{reason}\n{type(error).__name__}: {error}".encode()


def _error_of(encoded: bytes, member: int) -> PSError:
    """Returns the error of another member, as this one raises it."""
    reason, _, text = encoded.decode(errors="replace").partition("\n")
    return BY_REASON.get(reason, InvalidRequest)(f"member {member} of this worker's group: {text}")
