"""Memory that workers share with the shards on their host, and exchanges, which name what lies there.

In some seeds a worker is on the host of some shards, or of all. It offers them a segment for its buckets, and one for
its rows if the job has tables, and opens a data connection to each. Then a step with such a shard is one exchange, as
in ps_worker.cluster: the gradients lie in the segment, the shard writes the weights there. What a shard may read no
more is overwritten at once, and weights that it is to write are overwritten before. With the other shards a step of
rows is often one exchange, too, whose message has the rows (row_worker.py).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from ps_protocol.errors import NotShared, PSError, TryLater
from ps_protocol.layout import bucket_layout
from ps_protocol.messages.data import Notice, PullCall, PulledBucket, PushCall, PushedBucket, PushKind, write_exchange
from ps_protocol.segment_layout import PAGE_BYTES, RowMemory, SegmentMap, SegmentOffer, segment_plan
from ps_protocol.tensors import bytes_of
from ps_server.shard import segments
from tests.simulation.binding import simulated_here
from tests.simulation.members import Works
from tests.simulation.network import Call
from tests.simulation.world import World

if TYPE_CHECKING:
    from tests.simulation.worker import Place, Worker

SHARE = 0.3  # of the seeds: in them workers share memory
BESIDE = ((0, 1), (0, 1), (0,), (1,), ())  # the shards on the host of a worker, one choice as likely as the other
REFUSED = 0.05  # of the offers to a shard
MAPPED_SECONDS = 0.02  # that a shard takes at most to map a segment
LOST, LOST_WITHIN = 0.03, 0.3  # of the answers to exchanges, and after how many seconds their worker gives up
BROKEN = 0.5  # of the data connections over which no answer has come; the others bring the repeated call
OFFERED_ANEW = 0.08  # of the steps: before them a worker offers other segments, as when it needs larger ones
CHECKED = 0.8  # of the workers: they look themselves whether gradients are finite
CALL_SECONDS, PULL_SECONDS = 15.0, 60.0  # of ps_worker.cluster
ROW_BYTES = 2**15  # which is more than the rows of a step take
OVERWRITTEN, STALE = 3.0, -1000.0  # gradients that were read, and weights that are to be written


class Segments:
    """The segments that the workers of a cluster offer, by the name of the socket where a shard gets each.

    some: there are some
    """

    def __init__(self, world: World, mode: str, seed: int, always: bool) -> None:
        """always: workers share memory; otherwise the seed says whether

        That is drawn beside the world's own chance, so that seeds without segments stay what they were.
        """
        self.some = always or random.Random(f"segments {mode} {seed}").random() < SHARE
        self._world = world
        self._offered: dict[str, bytearray] = {}

    def beside(self) -> frozenset[int]:
        """Returns the shards on the host of a worker that starts."""
        return frozenset(self._world.random.choice(BESIDE) if self.some else ())

    def offer(self, memory: bytearray, row_bytes: int) -> SegmentOffer:
        """Returns the offer of a segment, which stands until `hide`."""
        name = self._world.random.randbytes(16).hex()
        self._offered[name] = memory
        return SegmentOffer(name, 0, b"", row_bytes)

    def hide(self, offer: SegmentOffer) -> None:
        """Ends an offer."""
        del self._offered[offer.location]

    def replacements(self) -> list[tuple[Any, Any]]:
        """Returns what stands for the handover of a segment; see binding.bound."""
        return [(segments.attach, simulated_here(segments.attach, self._attach))]

    def _attach(self, offer: SegmentOffer, size: int, directory: object) -> bytearray:
        """Does as ps_server.shard.segments.attach."""
        self._world.let_pass(self._world.random.uniform(0.0, MAPPED_SECONDS))
        memory = self._offered.get(offer.location)
        if memory is None:
            raise NotShared("the socket was closed: it offers another segment")
        if len(memory) != size or self._world.random.random() < REFUSED:
            raise NotShared(f"the segment cannot be mapped: it has {len(memory)} bytes of {size}")
        return memory


class SharedMemory:
    """What a worker shares with shards, in one place. The methods are for its training thread, those that are returned
    for a thread of the member that they are for.

    row_memory: the memory for rows; None: there is none
    row_shards: the shards that have mapped it
    """

    def __init__(self, worker: Worker, place: Place) -> None:
        self._worker, self._place, self._network = worker, place, worker.cluster.network
        spec = worker.run.spec
        layout = bucket_layout(spec.parameters, spec.bucket_bytes)
        self._specs, self._plan = layout.buckets, segment_plan(layout)
        self._maps: dict[int, SegmentMap] = {}  # by member
        self._sharing: set[tuple[int, int]] = set()  # the shards that have mapped the segment of a member
        self.row_memory: RowMemory | None = None
        self.row_shards: set[int] = set()
        self._rows = bytearray()
        self._connections: dict[tuple[int, int], int] = {}  # by shard and member
        draw = random.Random(worker.life.number)  # in each place of a worker the same
        self._notify_bytes = draw.choice([0, 1])
        self._checks = draw.random() < CHECKED  # whether it says that gradients are finite: then shards look no more

    def has(self, shard: int, member: int) -> bool:
        """Whether a shard has mapped the segment of a member."""
        return (shard, member) in self._sharing

    # -- segments ------------------------------------------------------------------------------------------------------

    def offers(self) -> list[Callable[[], object]]:
        """Returns what offers new segments to the shards beside the worker, in place of those of now."""
        works: list[Callable[[], object]] = [
            Works(member, partial(self._offer, member)) for member in range(len(self._worker.members.hosts))
        ]
        return [*works, self._offer_rows] if self._worker.rows.parts else works

    def _offer(self, member: int) -> None:
        before, memory = self._maps.get(member), bytearray(self._plan.size)
        mapped = self._attached(memory, member, 0)
        self._sharing -= {(shard, member) for shard in self._worker.beside - mapped}
        self._sharing |= {(shard, member) for shard in mapped}
        self._maps[member] = SegmentMap(memory, self._plan)  # type: ignore[arg-type]
        if before is not None:
            _overwrite(before)

    def _offer_rows(self) -> None:
        before, self._rows = self._rows, bytearray(PAGE_BYTES + ROW_BYTES)
        self.row_shards = self._attached(self._rows, 0, ROW_BYTES)
        self.row_memory = RowMemory(self._rows)  # type: ignore[arg-type]
        _overwrite_bytes(before, 0, len(before))

    def _attached(self, memory: bytearray, member: int, row_bytes: int) -> set[int]:
        """Offers a segment. Returns the shards that have mapped it."""
        of_all, identity = self._worker.cluster.segments, self._worker.identity(self._place, member)
        offer, mapped = of_all.offer(memory, row_bytes), set[int]()
        try:
            for shard in sorted(self._worker.beside):
                try:
                    self.call(shard, "attach", identity, offer)
                except NotShared as error:
                    self._worker.world.trace(f"{self._worker.host.name}, member {member}: shard {shard}: {error}")
                else:
                    mapped.add(shard)
        finally:
            of_all.hide(offer)
        return mapped

    def overwrite(self) -> None:
        """Overwrites all of it, once the worker has another place."""
        for each in self._maps.values():
            _overwrite(each)
        _overwrite_bytes(self._rows, 0, len(self._rows))

    def overwrite_rows(self, first: int, end: int) -> None:
        """Overwrites what rows had from one byte on, up to another."""
        _overwrite_bytes(self._rows, first, end)

    # -- calls ---------------------------------------------------------------------------------------------------------

    def call(self, shard: int, method: str, *arguments: object) -> Any:
        """Calls a shard until it answers."""
        place, address = self._place, self._place.addresses[shard]
        attempt = partial(self._network.call, address, method, *arguments, seconds=CALL_SECONDS)
        return self._worker.retry(attempt, lambda: place.closed)

    def exchanged(self, shard: int, member: int, method: str, request: bytes) -> Iterator[Any]:
        """Yields the answers to an exchange, over the data connection of a member; it is opened if there is none."""
        place, of = self._place, (shard, member)
        address, identity = place.addresses[shard], self._worker.identity(place, member)
        try:
            if of not in self._connections:
                opened = self._network.call(address, "open", identity, seconds=CALL_SECONDS)
                self._connections[of] = opened
            arguments = self._connections[of], request
            yield from self._network.stream(address, method, *arguments, seconds=PULL_SECONDS, begun=self._begun)
        except PSError as error:
            if error.retry_after is None and self._worker.world.random.random() < BROKEN:
                self._connections.pop(of, None)
            raise

    def _begun(self, call: Call) -> None:
        """Notes a call, whose answer is lost now and then."""
        self._place.calls.append(call)
        world = self._worker.world
        if world.random.random() < LOST:
            error = TryLater(f"{call.name} does not answer (connection reset)")
            world.at(world.random.uniform(0.0, LOST_WITHIN), partial(call.deliver, None, error), call.caller)

    # -- buckets -------------------------------------------------------------------------------------------------------

    def exchange(self, shard: int, member: int, buckets: Sequence[int], clock: int, pushed: Pushed) -> None:
        """Pushes buckets to a shard and pulls them: as SharedTransport.exchange does."""
        worker, segment = self._worker, self._maps[member]
        specs, identity = [self._specs[bucket] for bucket in buckets], worker.identity(self._place, member)
        for spec in specs:
            segment.weight(spec).fill_(STALE)
            if spec.index not in pushed.had:
                segment.gradient(spec).copy_(pushed.gradient)
        kinds = (PushKind.SKIP if bucket in pushed.had else PushKind.GRADIENT for bucket in buckets)
        each = tuple(PushedBucket(*which, finite=self._checks) for which in zip(buckets, kinds, strict=True))
        push = PushCall(identity, clock, each, None, groups=pushed.groups)

        def answers(missing: Sequence[int]) -> Iterator[Any]:
            pull = PullCall(identity, clock, tuple(missing), True, self._notify_bytes)
            return self.exchanged(shard, member, "exchange", write_exchange(push, pull))

        worker.fetch(self._place, buckets, answers, clock)
        for spec in specs:
            segment.gradient(spec).fill_(OVERWRITTEN)

    def pulled(self, bucket: int, member: int) -> memoryview:
        """Returns what a shard has written of a bucket."""
        return bytes_of(self._maps[member].weight(self._specs[bucket]))

    def stale(self, buckets: Sequence[int], member: int) -> None:
        """Overwrites the weights of buckets before a pull."""
        for bucket in buckets:
            self._maps[member].weight(self._specs[bucket]).fill_(STALE)


class Pushed:
    """What an exchange pushes to each of its buckets.

    gradient: flat, of the size of a bucket
    had:      the buckets that had had it when the place was taken
    """

    def __init__(self, gradient: torch.Tensor, had: set[int], groups: Any) -> None:
        self.gradient, self.had, self.groups = gradient.flatten(), had, groups


def landed(answer: object) -> Sequence[PulledBucket]:
    """Returns the buckets that an answer to a pull brings, or that lie in the segment when it comes."""
    if isinstance(answer, Notice):
        return [bucket for bucket in answer.buckets if bucket.waiting is None]
    return [answer] if isinstance(answer, PulledBucket) and answer.waiting is None else []


def _overwrite(segment: SegmentMap) -> None:
    for gradients in segment.gradients.values():
        gradients.fill_(OVERWRITTEN)


def _overwrite_bytes(memory: bytearray, first: int, end: int) -> None:
    memory[first:end] = b"\x3f" * (end - first)
