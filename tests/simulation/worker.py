"""A worker: it follows the protocol, and trains the counting oracle's job.

It calls the real servers over the simulated network, with the deadlines and retries of ps_worker.cluster: it registers
the job, joins, keeps its place by heartbeats, sends and fetches buckets, joins again where it lost its place, saves its
state for checkpoints, and leaves.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from ps_protocol.errors import Fenced, NotFound, PSError, TryLater, UnknownWorker, Unreachable
from ps_protocol.hyper_parameters import HyperParameters
from ps_protocol.identity import Identity
from ps_protocol.messages.data import PullCall, PulledBucket, PushCall, PushedBucket, PushKind
from ps_protocol.messages.workers import JoinRequest
from ps_protocol.tensors import BLOCKS, bytes_of, tensor_from
from ps_server.core.membership import JoinedWorker
from tests.chaos.oracle import Life, Violation, Witness
from tests.simulation.buffers import Buffers
from tests.simulation.fragments import StreamedRound
from tests.simulation.members import Members, Works
from tests.simulation.network import Call
from tests.simulation.processes import Host
from tests.simulation.row_worker import WorkerRows
from tests.simulation.runs import moved_in
from tests.simulation.saving import Saver
from tests.simulation.schedules import Script, rate_of
from tests.simulation.servers import COORDINATOR
from tests.simulation.sharing import OFFERED_ANEW, Pushed, SharedMemory, landed
from tests.simulation.threads import Condition
from tests.simulation.whole_steps import marks_of

if TYPE_CHECKING:
    from tests.simulation.cluster import Cluster
    from tests.simulation.runs import Run

CALL_SECONDS, PULL_SECONDS = 15.0, 60.0  # of ps_worker.cluster
CONNECT_SECONDS = 60.0  # without any progress, after which a worker gives up
FIRST_PAUSE, LONGEST_PAUSE = 0.05, 2.0
HEARTBEATS_PER_LEASE = 4
LOOK_SECONDS, NOTICE_SECONDS, DISOWNED_SECONDS = 0.2, 2.0, 1.0


class PlaceLost(Exception):
    """The place that a call was made from was lost; its cause says how."""


@dataclass(eq=False)
class Place:
    """A worker's place in the job, and its connections from there.

    closed: they are cut off
    shared: the memory that it shares with shards; None: there is none
    """

    result: JoinedWorker
    addresses: dict[int, str]
    clock: int
    since: float
    closed: bool = False

    def __post_init__(self) -> None:
        self.calls: list[Call] = []
        self.shared: SharedMemory | None = None

    @property
    def incarnation(self) -> int:
        """Its number."""
        return self.result.worker.incarnation

    @property
    def run(self) -> str:
        """The run that it is in, as the servers name it."""
        return self.result.run

    @property
    def key(self) -> bytes:
        """Its secret."""
        return self.result.worker.key

    def has_had(self, shard: int, part: int, clock: int) -> bool:
        """Whether a bucket or a table there had had what its rank pushes for a clock, when it was taken."""
        counted = self.result.worker.on_shards.get(shard)
        return counted is not None and max(counted.pushed or 0, (counted.further or {}).get(part, 0)) >= clock

    def shares(self, shard: int, member: int) -> bool:
        """Whether a shard has mapped the segment of a member."""
        return self.shared is not None and self.shared.has(shard, member)

    def cut(self) -> None:
        """Ends every call that is under way."""
        self.closed = True
        for call in self.calls:
            call.deliver(None, TryLater("the connection is closed"))


class Worker:
    """One life of a worker's process.

    launch:   what started it
    row:      its own in the weights
    computes: it is in a step, and waits for no server
    stepped:  when its last step was acknowledged
    unfinished: it is in a step of which a part may count
    rows:     its part of the job's tables
    saver:    what it saves
    versions: of the buckets that it has
    script:   with a schedule; None: its rate stays what it is
    members:  its processes
    buffers:  what it has of tensors that no optimizer steps
    beside:   the shards on its host
    """

    def __init__(self, cluster: Cluster, run: Run, rank: int, launch: str, life: Life, row: int) -> None:
        self.cluster, self.run, self.rank, self.launch, self.life = cluster, run, rank, launch, life
        self.world = cluster.world
        which = "the job beside" if run.is_beside else f"run {run.number}"
        self.host = Host(self.world, f"worker {rank} of {which}, life {life.number}")
        self.places: list[Place] = []
        self.error: PSError | None = None
        self.holds, self.leaving, self.left, self.ended = False, False, False, False
        self.computes, self.stepped, self.unfinished = False, 0.0, False
        self._begun, self._joining = False, False
        self._at: Place | None = None  # where the training thread is
        self._disowned: Place | None = None  # one that a shard does not know
        self._changed = Condition(self.world)
        self._witness = Witness(run.rules, row)
        shape = run.rules.shape
        self._view = torch.zeros(shape.buckets, shape.rows, 1 + shape.columns)
        self._buckets = list(self._view.view(shape.buckets, -1))  # each as it is sent
        self._before: tuple[int, torch.Tensor] | None = None  # what it saw last, and at which clock
        self.versions: dict[int, int] = {}
        self._number = 0  # of the step at hand
        self._made = 0  # steps of the round at hand
        self._counts = torch.zeros(shape.buckets, shape.rows)
        self.rows = WorkerRows(self, run, row)
        self._saves: set[int] = self.rows.saves
        self.saver = Saver(self, run)
        self._streamed = StreamedRound(self, run)
        self.script = Script(self) if cluster.with_schedules and run.rules.averaged else None
        self.members = Members(self, run.job.members)
        self.buffers = Buffers(self, run)
        self.beside = cluster.segments.beside()
        self.host.spawn("train", self._main)

    @property
    def place(self) -> Place:
        """The place of now."""
        return self.places[-1]

    @property
    def _here(self) -> Place:
        """The place where its training thread is."""
        assert self._at is not None
        return self._at

    @property
    def is_there(self) -> bool:
        """Whether its process lives and has a place."""
        return self.host.alive and bool(self.places)

    @property
    def is_well(self) -> bool:
        """Whether it has a place, and all its processes live, and none of them hangs or is cut off."""
        disturbed, hosts = self.cluster.faults.disturbed, self.members.hosts
        return bool(self.places) and all(h.alive and disturbed.get(h, 0.0) <= self.world.now for h in hosts)

    @property
    def is_training(self) -> bool:
        """Whether it is in the middle of a step, or between two."""
        return self.is_there and self._begun and self._at is self.place

    @property
    def clock(self) -> int:
        """How many steps it has finished or sent."""
        return self.place.clock if self.places else 0

    def kept(self) -> Life:
        """Returns its life without the steps of which a rollback in sync may have left nothing: after the checkpoint,
        and before the clock at which it went on."""
        done = dict(self.life.done)
        for before, after in itertools.pairwise(self.places):
            if after.result.restore_count > before.result.restore_count:
                restored = after.result.state[0] if after.result.state is not None else 0
                for step in range(restored + 1, after.result.clock + 1):
                    if self.life.at.get(step, math.inf) < after.since:
                        done.pop(step, None)
        return replace(self.life, done=done)

    def leave(self) -> None:
        """Has it leave after its step."""
        self.leaving = True

    # -- calls -------------------------------------------------------------------------------------------------------

    def retry(self, attempt: Callable[[], Any], closed: Callable[[], bool] = lambda: False) -> Any:
        """Does as ps_runtime.retry."""
        since, pause = self.world.now, FIRST_PAUSE
        while True:
            try:
                return attempt()
            except PSError as error:
                if not error.retryable or closed():
                    raise
                if error.retry_after is not None:
                    since, pause = self.world.now, FIRST_PAUSE
                    self.world.let_pass(error.retry_after * self.world.random.uniform(1.0, 1.5))
                    continue
                if self.world.now - since >= CONNECT_SECONDS:
                    raise Unreachable(f"gave up after {CONNECT_SECONDS:g} s: {error}") from None
            self.world.let_pass(pause * self.world.random.uniform(0.5, 1.0))
            pause = min(2 * pause, LONGEST_PAUSE)

    def _ask(self, method: str, *arguments: Any) -> Any:
        """Calls the coordinator until it answers."""
        call = self.cluster.network.call
        return self.retry(lambda: call(COORDINATOR, method, *arguments, seconds=CALL_SECONDS))

    def _join(self, run: str, before: Place | None) -> Place:
        attempt, since = self.world.random.getrandbits(62), math.inf
        clock = 0 if before is None else before.clock - (self.unfinished and before is self._at)
        request = JoinRequest(
            pid=self.life.number,
            host="there",
            previous=None if before is None else before.incarnation,
            clock=clock,
            attempt=attempt,
            launch=self.launch,
            run=run,
        )
        arguments = self.run.name, self.rank

        def ask() -> Any:
            nonlocal since
            asked = replace(request, waited=max(0.0, self.world.now - since))
            try:
                return self.cluster.network.call(COORDINATOR, "join", *arguments, asked, seconds=CALL_SECONDS)
            except PSError as error:
                if error.retry_after is not None:
                    since = min(since, self.world.now)
                raise

        result, addresses = self.retry(ask)
        self.world.trace(f"{self.host.name} joins: incarnation {result.worker.incarnation}, clock {result.clock}")
        return Place(result, addresses, result.clock, self.world.now)

    def _leave_place(self, place: Place) -> bool:
        try:
            return self.members.leave(place)
        except PSError:
            return False

    # -- its place ---------------------------------------------------------------------------------------------------

    def _take(self, place: Place) -> None:
        before = self.places[-1] if self.places else None
        self.places.append(place)
        if before is not None:
            before.cut()
            if before.shared is not None:
                before.shared.overwrite()
        self.run.whole_steps.joined(place.result.restore_count, place.result.clock)
        self.cluster.took(self, place)
        self.cluster.promises.joined(self, place)
        with self._changed:
            self._changed.notify_all()

    def _beat(self) -> None:
        """Keeps the place, as ps_worker.cluster.own_membership does."""
        pause = self.cluster.lease / HEARTBEATS_PER_LEASE
        while not self._is_to_leave:
            self.world.let_pass(pause)
            place = self.place
            if self._is_to_leave:
                return
            who = self.run.name, place.run, self.rank, place.incarnation, place.clock, place.key
            method = "heartbeat" if self.script is None else "heartbeat_of_script"
            try:
                try:
                    asked = self.cluster.network.call(COORDINATOR, method, *who, seconds=pause)
                    if self.script is not None:
                        self.script.telling.want(asked)
                    if self._disowned is place:
                        self._join_again(place, "a shard does not know it")
                except Fenced:
                    raise
                except UnknownWorker as error:
                    self._join_again(place, str(error))
            except PSError as error:
                if error.retryable or self.leaving:
                    continue
                self.error = error
                place.cut()
                with self._changed:
                    self._changed.notify_all()
                return

    def _join_again(self, place: Place, why: str) -> None:
        self.world.trace(f"{self.host.name} hears: {why}")
        self.cluster.lost_place(self, place)
        self._joining = True
        try:
            self.members.meet()
            self._take(self._join(place.run, place))
        finally:
            self._joining = False

    def _renewed(self, place: Place, cause: BaseException | None) -> Place:
        """Waits for the place that follows one. Raises the cause of its loss if none will come."""
        since = self.world.now
        with self._changed:
            while self.place is place:
                if self.error is not None:
                    raise self.error
                fenced = isinstance(cause, Fenced) and not self._joining and self.world.now >= since + NOTICE_SECONDS
                if cause is not None and (fenced or self.world.now >= since + CONNECT_SECONDS):
                    raise cause
                if isinstance(cause, NotFound | UnknownWorker) and self.world.now >= since + DISOWNED_SECONDS:
                    self._disowned = place
                self._changed.wait(LOOK_SECONDS)
        return self.place

    # -- training ----------------------------------------------------------------------------------------------------

    def _main(self) -> None:
        try:
            self._begin()
            self.host.spawn("heartbeat", self._beat)
            self.members.begin()
            self._connect(self.place)
            if self.script is not None:
                self.script.begin(self.place)
            step = 0
            while not self._is_to_leave:
                self.computes = True
                self.world.let_pass(self.cluster.step_seconds())
                self.computes = False
                self.holds = self._is_to_hold()
                if self.holds:
                    if self.saver.is_due:
                        self.saver.save()
                    continue
                self.saver.between_steps()
                self._offer_anew()
                if self._is_to_hold():  # it has moved meanwhile, to where the others hold: they make no further step
                    continue
                self._made += 1
                local = self.run.spec.local
                if local is not None and local.is_streamed(self._streamed.number):
                    self._stream()
                    self.buffers.stepped(self._here)
                    continue
                if local is not None and self._made < local.steps_of(self.clock + 1):
                    continue
                step += 1
                self._step(self.clock + 1 if self.run.rules.averaged else step)
                self.buffers.stepped(self._here)
            if self.error is None and self.rank == 0:
                self.saver.save()
                self.buffers.leave(self._here)
            self.places[-1].cut()
            if self.error is None:
                self.ended = self._leave_place(self.place)
            self.left = True
            self.world.trace(f"{self.host.name} has left at clock {self.clock}")
            self.cluster.ended(self, None)
        except PSError as error:
            self.world.trace(f"{self.host.name} ends with {type(error).__name__}: {error}")
            self.cluster.ended(self, error)

    def _offer_anew(self) -> None:
        """Shares other segments with shards, now and then."""
        if not self.beside or self.is_streaming or self.world.random.random() >= OFFERED_ANEW:
            return
        self.in_place(lambda place: [] if place.shared is None else place.shared.offers())

    @property
    def _is_to_leave(self) -> bool:
        return self.leaving and not self._streamed.is_under_way

    def _is_to_hold(self) -> bool:
        target, run = self.run.target, self.run
        if self._streamed.is_under_way:
            return False  # the others wait for it
        if run.rules.late and not all(worker.clock >= (target or 0) for worker in run.staying()):
            return False  # the others would have no quorum
        return target is not None and self.clock >= target and self.error is None

    def _begin(self) -> None:
        """Does as ps_worker.cluster.participation.join."""
        for last in (False, True):
            run = self._ask("register_job", self.run.spec)
            try:
                self._take(self._join(run, None))
                return
            except NotFound:
                if last:
                    raise

    def _connect(self, place: Place) -> None:
        """Goes on from a place, or from the one that follows it should it be lost on the way."""
        while True:
            cause: BaseException | None
            try:
                self._enter(place)
                self._at = place
                return
            except PlaceLost as lost:
                cause = lost.__cause__
            place.cut()
            place = self._renewed(place, cause)

    def _enter(self, place: Place) -> None:
        self._witness.lost_track()
        self._before = None
        self.rows.lost_track()
        self.versions.clear()
        self._made = 0
        self._streamed.begin(place.clock)
        if self.beside:
            place.shared = SharedMemory(self, place)
            self.all(place, place.shared.offers())
        if not self._begun:
            if self.rank == 0:
                weights = self.pushes(place, 0, self.run.initial)
                self.all(place, [*weights, *self.buffers.beginnings(place), *self.rows.beginnings(place)])
            self._await_started(place)
        self.all(place, self.pulls(place, place.clock))
        self._before = None if self.rows.parts else (place.clock, self._view.clone())
        self._begun = True
        self._await_started(place)

    def _await_started(self, place: Place) -> None:
        while self.place is place:
            try:
                if self._ask("roster", self.run.name, place.run)[2]:
                    return
            except PSError as error:
                raise PlaceLost from error
            self.world.let_pass(LOOK_SECONDS)
            if self.error is not None:
                raise self.error
        raise PlaceLost

    def in_place(self, works: Callable[[Place], Sequence[Callable[[], object]]]) -> Place:
        """Does things at once between two steps, from as many places as it takes; returns the last one."""
        while True:
            if self.error is not None:
                raise self.error
            assert self._at is not None
            place, to_do = self._at, works(self._at)
            try:
                if to_do and self.place is not place:
                    raise PlaceLost
                self.all(place, to_do)
            except PlaceLost as lost:
                self._lose(place, lost)
                continue
            self._save_if_wanted(place, place.clock)
            return place

    def weights(self) -> torch.Tensor:
        """Returns a copy of the buckets as it has them: [buckets, rows, 1 + columns]."""
        return self._view[: len(self.run.buckets)].clone()

    @property
    def is_streaming(self) -> bool:
        """Whether some buckets of a round may have come, and not all."""
        return self._streamed.is_under_way

    def all(self, place: Place, works: Sequence[Callable[[], object]]) -> None:
        """Does several things at once. Raises the first error; PlaceLost where the loss of the place has caused it."""
        self.begun(place, works)()
        self.members.meet()  # and compares

    def begun(self, place: Place, works: Sequence[Callable[[], object]]) -> Callable[[], None]:
        """Begins to do several things at once; returns what waits for them, as `all` does."""
        left, errors = [len(works)], list[PSError]()

        def do(work: Callable[[], object]) -> None:
            try:
                work()
            except PSError as error:
                errors.append(error)
            left[0] -= 1
            if errors or not left[0]:
                with self._changed:
                    self._changed.notify_all()

        def await_all() -> None:
            with self._changed:
                self._changed.wait_for(lambda: errors or not left[0])
            if errors:
                if self.error is not None:
                    raise self.error
                if isinstance(errors[0], NotFound | UnknownWorker) or self.place is not place:
                    raise PlaceLost from errors[0]
                raise errors[0]

        for work in works:
            self.members.do(work.member if isinstance(work, Works) else 0, partial(do, work))
        return await_all

    def pushes(
        self,
        place: Place,
        clock: int,
        values: torch.Tensor,
        buckets: Collection[int] | None = None,
        begun: int | None = None,
    ) -> list[Callable[[], object]]:
        """Returns what pushes the same to some buckets, or all: to each shard one after the other, to all at once. A
        step is not pushed so to shards that share memory: see `exchanges`.

        begun: the clock for which it was pushed first; what had come of that then is skipped
        """
        codec = BLOCKS.get(self.run.spec.gradient_wire) if clock else None
        payload = bytes(bytes_of(values.flatten() if codec is None else codec.encode(values.flatten())))

        def push(shard: int, buckets: list[int]) -> None:
            for bucket in buckets:
                had = begun is not None and place.has_had(shard, bucket, begun)
                self._push(place, shard, bucket, clock, b"" if had else payload)

        homes = self._homes(place, buckets, apart=clock > 0).items()
        return [Works(member, partial(push, shard, held)) for (shard, member), held in homes]

    def exchanges(
        self,
        place: Place,
        clock: int,
        gradient: torch.Tensor,
        buckets: Collection[int] | None = None,
        begun: int | None = None,
    ) -> list[Callable[[], object]]:
        """Returns what pushes a step to the shards that share memory, and pulls some buckets, or all, at its clock. The
        others: see `pushes` and `pulls`."""
        if place.shared is None:
            return []
        works = list[Callable[[], object]]()
        for (shard, member), held in self._homes(place, buckets).items():
            if place.shares(shard, member):
                had = {bucket for bucket in held if begun is not None and place.has_had(shard, bucket, begun)}
                pushed = Pushed(gradient, had, self._groups(clock))
                exchange = partial(place.shared.exchange, shard, member, sorted(held), clock, pushed)
                works.append(Works(member, partial(self._exchange, exchange, set(held) - had)))
        return works

    def _exchange(self, exchange: Callable[[], object], pushed: Collection[int]) -> None:
        number = self._number
        exchange()
        for bucket in pushed:
            self.run.acknowledged.note(bucket, self.life.number, number)

    def identity(self, place: Place, member: int = 0) -> Identity:
        """Returns how a member of the worker calls itself in a place."""
        return Identity(self.run.name, self.rank, place.incarnation, place.key, place.run, member)

    def _push(self, place: Place, shard: int, bucket: int, clock: int, payload: bytes) -> None:
        kind = PushKind.INITIAL_VALUE if not clock else PushKind.GRADIENT if payload else PushKind.SKIP
        spec = self.run.spec
        narrow = spec.gradient_wire if kind is PushKind.GRADIENT and spec.gradient_wire in BLOCKS else ""
        call = PushCall(
            self.identity(place, self.members.of(bucket)),
            clock,
            (PushedBucket(bucket, kind, wire_format=narrow),),
            payload,
            groups=self._groups(clock) if clock else {},
        )
        address, network, number = place.addresses[shard], self.cluster.network, self._number
        self.retry(lambda: network.call(address, "push", call, seconds=CALL_SECONDS), lambda: place.closed)
        if kind is PushKind.GRADIENT:
            self.run.acknowledged.note(bucket, self.life.number, number)

    def _groups(self, clock: int) -> dict[int, HyperParameters]:
        if self.script is not None:
            return {0: {"lr": self.script.rate}}
        local = self.run.spec.local
        return {} if local is None else {0: local.outer(clock)}

    def _homes(
        self, place: Place, wanted: Collection[int] | None, apart: bool = False
    ) -> dict[tuple[int, int], list[int]]:
        """Returns the buckets of each shard and member, some or all, in an order of this worker's own. apart: without
        those of shards that share memory"""
        homes: dict[tuple[int, int], list[int]] = {}
        for bucket in self.world.random.sample(self.run.buckets, len(self.run.buckets)):
            if wanted is None or bucket in wanted:
                homes.setdefault((place.result.placement[bucket], self.members.of(bucket)), []).append(bucket)
        return {home: held for home, held in homes.items() if not apart or not place.shares(*home)}

    def pulls(
        self,
        place: Place,
        clock: int,
        buckets: Collection[int] | None = None,
        all_staged: bool = False,
        apart: bool = False,
    ) -> list[Callable[[], object]]:
        """Returns what pulls some buckets, or all, at a clock: from all shards at once.

        all_staged: see PullCall
        apart:      not from shards that share memory, with which a step is an exchange
        """
        return [
            Works(member, partial(self._pull, place, shard, held, clock, all_staged))
            for (shard, member), held in self._homes(place, buckets, apart).items()
        ]

    def _pull(self, place: Place, shard: int, buckets: list[int], clock: int, all_staged: bool) -> None:
        member, address = self.members.of(buckets[0]), place.addresses[shard]
        in_segment, narrow = place.shares(shard, member), self.run.spec.weight_wire in BLOCKS
        if in_segment and place.shared is not None:
            place.shared.stale(buckets, member)

        def answers(missing: Sequence[int]) -> Iterator[object]:
            whole = {bucket for bucket in missing if narrow and self.versions.get(bucket) != clock - 1}
            which = self.identity(place, member), clock, tuple(missing), in_segment
            call = PullCall(*which, whole=frozenset(whole), all_staged=all_staged)
            network = self.cluster.network
            return network.stream(address, "pull", call, seconds=PULL_SECONDS, begun=place.calls.append)

        self.fetch(place, buckets, answers, clock)

    def fetch(
        self, place: Place, buckets: Collection[int], answers: Callable[[Sequence[int]], Iterator[object]], clock: int
    ) -> None:
        """Fetches buckets; after a failure those that are missing. answers: asks for some of them"""
        missing = dict.fromkeys(buckets)

        def attempt() -> None:
            for answer in answers(tuple(missing)):
                if place.closed:  # meanwhile, while the member that pulls hung: it lands nothing over later weights
                    raise TryLater("the connection is closed")
                for pulled in landed(answer):
                    payload = pulled.payload
                    if place.shared is not None and not payload:
                        payload = place.shared.pulled(pulled.bucket, self.members.of(pulled.bucket))
                    self._land(pulled, payload)
                    missing.pop(pulled.bucket, None)
                    if pulled.save_state:
                        self._saves.add(clock)
            if missing:
                raise TryLater("the answer broke off")

        try:
            self.retry(attempt, lambda: place.closed)
        finally:
            place.calls = [call for call in place.calls if not call.over]

    def _land(self, pulled: PulledBucket, payload: memoryview) -> None:
        """Takes a bucket over; codes are added to the version before."""
        values, codec = self._buckets[pulled.bucket], BLOCKS.get(pulled.wire_format)
        has = self.versions.get(pulled.bucket)
        if codec is None:
            values.copy_(tensor_from(payload, "float32"))
        elif has == pulled.version - 1:
            values += codec.decode(payload, values.numel())
        else:
            said = f"{self.host.name} has version {has} and gets codes that lead to {pulled.version}"
            self.cluster.violated(Violation("codes without their base", said, {"bucket": pulled.bucket}))
        self.versions[pulled.bucket] = pulled.version

    def _step(self, number: int) -> None:
        self._made = 0
        if self.error is not None:
            raise self.error
        is_late = self.place is not self._at
        if is_late:
            self._connect(self.place)
        if self.script is None:
            self._make(number, is_late=is_late)
            return
        with self.script.telling.standing():
            assert self._at is not None
            self.script.moved(self._at)
            self.script.stepping()
            self._make(self.clock + 1, is_late=is_late)
        self.script.stepped()
        self._save_if_wanted(self._at, self._at.clock)

    def _make(self, number: int, begun: int | None = None, is_late: bool = False) -> None:
        """Makes a step, from as many places as it takes.

        begun:   the clock for which it was pushed first; what shards have had of it since is skipped
        is_late: the place is lost in which it began
        """
        while True:
            place = self._at
            assert place is not None
            clock = place.clock + 1
            number = clock if self.run.rules.averaged else number
            self.attempt(place, number)
            place.clock, begun = clock, begun or clock
            if self.run.target is not None and is_late and not self.run.rules.late:  # all go on to where that is
                self.run.target = max(self.run.target, clock)
            try:
                gradient = self.gradient(number, clock)
                buckets = self.pushes(place, clock, gradient, begun=begun)
                rows = [*self.rows.pulls(place, number), *self.rows.pushes(place, clock, number, begun)]
                works = [*self.pulls(place, clock, apart=True), *buckets, *rows]
                works += self.exchanges(place, clock, gradient, begun=begun)
                self.all(place, [*works, *self.rows.exchanges(place, clock, number, begun)])
                break
            except PlaceLost as lost:
                self._lose(place, lost)
            if not self._is_to_be_pushed_again(place, number, begun):
                return
            assert self._at is not None
            if not any(self._had(self._at, begun)):  # clocks may come a second time, after a rollback
                begun = None
            is_late = True
        self.unfinished = False
        if self.run.rules.averaged and any(self._had(place, begun)):
            # Its step is in other updates of some buckets than of others: it is not acknowledged as that of one clock.
            if self.rows.parts:
                self._before = None
            else:
                self._look_who_was_in(clock, place.result.restore_count)
        else:
            self.acknowledge(place, number, clock)
        self._streamed.begin(clock)

    def _had(self, place: Place, begun: int) -> list[bool]:
        """Returns of all buckets, and of the tables, which had had a step when a place was taken."""
        homes = enumerate(place.result.placement[: len(self.run.buckets)])
        tables = [self.rows.has_had(place, table, shard, begun) for table, shard in self.rows.parts]
        return [*(place.has_had(shard, bucket, begun) for bucket, shard in homes), *tables]

    def _is_to_be_pushed_again(self, lost: Place, number: int, begun: int) -> bool:
        """Whether a step whose place was lost is to be pushed again: some shard has not had it, and it still can be."""
        assert self._at is not None
        result, averaged = self._at.result, self.run.rules.averaged
        rolled_back = result.restore_count > lost.result.restore_count
        if all(self._had(self._at, begun)):
            if not averaged or number == begun:
                self.run.tries.acknowledged(self.life.number, number, result.restore_count)
                self.life.done[number], self.life.at[number] = begun, self.world.now
                self.life.found.add(number)
        elif not (rolled_back and averaged and result.clock < begun - 1):  # in a mean, it is of later weights
            return True
        self.unfinished = False
        return False

    def attempt(self, place: Place, number: int) -> None:
        """Notes that it begins a step."""
        self.cluster.promises.steps(self)
        self.unfinished, self._number = True, number
        if number not in self.life.attempted[-2:]:
            self.life.attempted.append(number)
        self.run.tries.begun(number, place.result.restore_count)

    def gradient(self, number: int, clock: int) -> torch.Tensor:
        """Returns what a step pushes to each bucket."""
        scale = 1.0 if self.script is None else 1 / rate_of(clock)
        return self._witness.gradient(number) * moved_in(self.run.spec.local, clock) * scale

    def _stream(self) -> None:
        """Ends a step of a round whose buckets leave fragment by fragment."""
        if self.error is not None:
            raise self.error
        place = self._at
        assert place is not None
        try:
            self._streamed.stepped(place)
            return
        except PlaceLost as lost:
            begun = self._streamed.begun_in(place)
            self._lose(place, lost)
        if begun is None or self._is_to_be_pushed_again(place, begun, begun):  # all that is left of the round, at once
            self._make(0, begun, is_late=True)

    def check(self, place: Place) -> None:
        """Raises PlaceLost unless a place is this worker's, as far as it has heard."""
        if self.place is not place:
            raise PlaceLost

    def _lose(self, place: Place, lost: PlaceLost) -> None:
        """Goes on from the place that follows one that was lost in a step."""
        place.cut()
        self._connect(self._renewed(place, lost.__cause__))

    def acknowledge(self, place: Place, number: int, clock: int) -> None:
        """Ends a step that all shards have acknowledged, and whose weights are here."""
        self.unfinished = False
        self.run.tries.acknowledged(self.life.number, number, place.result.restore_count)
        self._acknowledged(number, clock)
        if self.run.rules.averaged:
            self._look_who_was_in(number, place.result.restore_count)
        if self.script is None:
            self._save_if_wanted(place, clock)

    def _save_if_wanted(self, place: Place, clock: int) -> None:
        if clock not in self._saves:
            return
        self._saves.discard(clock)
        state = b"%d %d" % (self.rank, clock)
        if self.script is not None:
            self.script.moved(place)
            state = self.script.state(clock)
        self.host.spawn("state", partial(self._save_state, place, clock, state))

    def _look_who_was_in(self, clock: int, rollbacks: int) -> None:
        """Has the run know who was in the last update, if this worker has seen the one before."""
        view = self._view.clone()
        if self._before is not None and self._before[0] == clock - 1:
            marks = marks_of(self._before[1], view, self._witness.column(clock))
            self.run.whole_steps.saw(clock, rollbacks, marks)
        self._before = clock, view

    def _save_state(self, place: Place, clock: int, state: bytes) -> None:
        who = self.run.name, place.run, self.rank, place.incarnation, place.key
        try:
            for member in range(len(self.members.hosts)):  # it counts once all have sent theirs
                self._ask("save_state", *who, clock, state, member)
        except PSError as error:
            self.world.trace(f"{self.host.name}: its state is not saved: {error}")

    def _acknowledged(self, number: int, clock: int) -> None:
        """Notes a step that is over. clock: after it; by now the worker may have another place, with another clock."""
        run, in_rows = self.run, self.rows.look(number, self._view[self.run.job.shape.buckets :])
        view = self._view.clone()
        self.life.done[number], self.life.at[number] = clock, self.world.now
        self.stepped = self.world.now
        for violation in [*in_rows, *self._witness.check(view, number)]:
            where = {**violation.where, "life": self.life.number, "at": round(self.world.now - 1000, 3)}
            self.cluster.violated(Violation(violation.kind, violation.said, where))
        if not run.rules.averaged:
            counts = view[:, :, 0]
            changed = (counts != self._counts).any(dim=0).nonzero().flatten()
            self._counts = counts
            rows = counts[:, changed].int().t().tolist()
            self.life.seen.append((clock, dict(zip(changed.tolist(), rows, strict=True)), self.world.now))
