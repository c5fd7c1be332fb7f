"""The bytes that may wait on a shard, by job and by principal: reserved when they come, released when they are used.

A job has a budget for each kind of waiting bytes: contributions until their update, drafts until their commit, and
assignments until the contribution of their clock. What a principal has reserved counts over all jobs of the shard.

`room_for` computes the memory that a whole job will take, so that a shard can refuse a job that does not fit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ps_protocol.errors import Backlogged
from ps_protocol.job import JobSpec
from ps_protocol.layout import bucket_layout
from ps_protocol.optimizer_state import tensors_kept
from ps_protocol.wire_formats import BLOCK_FORMATS, weight_format


class PrincipalBudget:
    """The bytes that each principal has reserved. Not thread-safe.

    limit: the most bytes of one principal
    """

    def __init__(self, limit: float = math.inf) -> None:
        self.limit = limit
        self._bytes: dict[str, int] = {}

    def bytes_of(self, principal: str) -> int:
        """Bytes that a principal has reserved now."""
        return self._bytes.get(principal, 0)

    def reserve(self, principal: str, size: int, instead_of: int = 0, always: bool = False) -> bool:
        """Reserves `size` bytes in place of `instead_of` bytes. Returns False, and changes nothing, past the limit.

        A principal that has reserved nothing else may reserve any size. always: the limit does not apply
        """
        others = self._bytes.get(principal, 0) - instead_of
        if others and others + size > self.limit and not always:
            return False
        if others + size:
            self._bytes[principal] = others + size
        else:
            self._bytes.pop(principal, None)  # otherwise the entries of principals that are gone would accumulate
        return True

    def release(self, principal: str, size: int) -> None:
        """Gives bytes back. A principal that has reserved nothing gives back nothing: callers may release twice."""
        if size:
            left = self._bytes.get(principal, 0) - size
            if left:
                self._bytes[principal] = left
            else:
                self._bytes.pop(principal, None)


class _Reservation(NamedTuple):
    size: int
    principal: str
    charge: int


_NOTHING = _Reservation(0, "", 0)


class StagingBudget:
    """One kind of waiting bytes of one job: a reservation for each unit and rank. Not thread-safe."""

    def __init__(self, principals: PrincipalBudget) -> None:
        self.bytes = 0
        self._principals = principals
        self._reserved: dict[tuple[int, int], _Reservation] = {}

    def reserve(
        self,
        bucket: int,
        rank: int,
        size: int,
        limit: float,
        *,
        principal: str = "",
        charge: int = 0,
        always: Callable[[], bool] = lambda: False,
    ) -> bool:
        """Reserves `size` bytes of the job, and `charge` bytes of a principal, in place of the earlier reservation of
        this bucket and rank.

        Returns False, and changes nothing, past the job's `limit`; but the first reservation of a job may have any
        size. Raises Backlogged past the principal's limit.

        always: called if there is no room. If it returns True, the bytes are reserved nevertheless
        """
        before = self._reserved.get((bucket, rank), _NOTHING)
        others = self.bytes - before.size
        if others and others + size > limit and not always():
            return False
        if charge or before.charge:
            instead_of = before.charge if before.principal == principal else 0
            if not self._principals.reserve(principal, charge, instead_of) and not (
                always() and self._principals.reserve(principal, charge, instead_of, always=True)
            ):
                raise Backlogged(
                    f"worker {rank}: its caller has more bytes staged that are not applied yet, "
                    "over all its workers, than max-caller-bytes allows"
                )
            if before.charge and before.principal != principal:
                self._principals.release(before.principal, before.charge)
        self._reserved[bucket, rank] = _Reservation(size, principal, charge)
        self.bytes = others + size
        return True

    def bytes_besides(self, bucket: int, rank: int) -> int:
        """Bytes reserved by all other buckets and ranks."""
        return self.bytes - self._reserved.get((bucket, rank), _NOTHING).size

    def full(self, limit: float, drafts: int = 0) -> Backlogged:
        """Returns the error for a contribution that `reserve` refused. drafts: bytes of the drafts that share the
        budget
        """
        return Backlogged(
            f"{self.bytes} bytes are staged here and wait for other workers, {drafts} are here before their step, and "
            f"max-staged-bytes is {limit:.0f}"
        )

    def release(self, bucket: int, rank: int) -> None:
        """Gives back what a rank has reserved for a bucket, if anything."""
        before = self._reserved.pop((bucket, rank), None)
        if before is not None:
            self.bytes -= before.size
            if before.charge:
                self._principals.release(before.principal, before.charge)

    def release_all(self) -> None:
        """Gives everything back."""
        for bucket, rank in list(self._reserved):
            self.release(bucket, rank)

    def is_first(self, rank: int) -> bool:
        """Whether this rank has the oldest reservation, or there is none."""
        first = next(iter(self._reserved), None)
        return first is None or first[1] == rank


class StagingRoom:
    """The bytes that the units of one job have reserved on a shard, and their limits. Not thread-safe.

    staged:         contributions, until they are added to an update
    drafts:         drafts, until their commit
    assigned:       assignments of scripts, until the worker's next step
    limit:          returns the bytes that may be staged; a contribution for which an update waits may exceed it
    assigned_limit: returns the bytes that may be assigned
    """

    def __init__(
        self,
        principals: PrincipalBudget,
        limit: Callable[[], int],
        assigned_limit: Callable[[], int],
    ) -> None:
        self.staged, self.drafts, self.assigned = (StagingBudget(principals) for _ in range(3))
        self.limit, self.assigned_limit = limit, assigned_limit

    def stage(
        self,
        unit: int,
        rank: int,
        size: int,
        principal: str,
        *,
        borrowed: bool = False,
        beside_drafts: bool,
        always: Callable[[], bool],
    ) -> None:
        """Reserves the bytes of a contribution. Raises Backlogged if there is no room.

        borrowed:      the bytes lie in the worker's memory: they take no room here, but count for the principal
        beside_drafts: drafts and contributions share the room: see UpdateRule.drafts_take_room
        always:        returns whether an update waits for the contribution. Then it is staged past the limit, because
                       everything that is staged may wait for it
        """
        if borrowed:
            self.staged.reserve(unit, rank, 0, math.inf, principal=principal, charge=size, always=always)
            return
        limit = self.limit()
        drafts = self.drafts.bytes_besides(unit, rank) if beside_drafts else 0
        room = max(0, limit - drafts)
        if not self.staged.reserve(unit, rank, size, room, principal=principal, charge=size, always=always):
            raise self.staged.full(limit, drafts)

    def draft(self, unit: int, rank: int, size: int, principal: str, *, beside_staged: bool, is_awaited: bool) -> None:
        """Reserves the bytes of a draft. Raises Backlogged if there is no room.

        beside_staged: drafts and contributions share the room: see UpdateRule.drafts_take_room
        is_awaited:    the next update waits for this draft. Then it is accepted past the limit, and its bytes are not
                       counted: once committed it becomes the open sum, which is not part of the budget
        """
        room = max(0, self.limit() - (self.staged.bytes if beside_staged else 0))
        taken = 0 if is_awaited else size
        if not self.drafts.reserve(
            unit, rank, taken, room, principal=principal, charge=size, always=lambda: is_awaited
        ):
            raise Backlogged(f"{self.drafts.bytes} bytes are here before their step, and there is no room for more")

    def assign(self, unit: int, rank: int, size: int, principal: str, always: Callable[[], bool]) -> None:
        """Reserves the bytes of a script's assignment. Raises Backlogged if there is no room.

        The worker with the oldest reservation is never refused: two workers that have each sent half of an assignment
        would otherwise wait for each other's bytes for ever.
        """
        if not self.assigned.reserve(
            unit,
            rank,
            size,
            self.assigned_limit(),
            principal=principal,
            charge=size,
            always=lambda: always() or self.assigned.is_first(rank),
        ):
            raise Backlogged(f"{self.assigned.bytes} bytes are assigned here and wait for their workers' steps")

    @property
    def bytes(self) -> tuple[int, int, int]:
        """Bytes reserved for contributions, for drafts, and for assignments."""
        return self.staged.bytes, self.drafts.bytes, self.assigned.bytes

    def release_pending(self, unit: int, rank: int) -> None:
        """Releases the bytes of a rank's draft and assignment for a unit. Its contribution stays reserved."""
        self.drafts.release(unit, rank)
        self.assigned.release(unit, rank)

    def release_all(self) -> None:
        """Gives everything back."""
        for budget in (self.staged, self.drafts, self.assigned):
            budget.release_all()


ROWS_BYTES = 16 * 2**20  # bytes of rows of one table that a worker may push ahead of the other workers


def derived_limit(weights: int, bucket: int, workers: int, tables: int = 0) -> int:
    """Returns the bytes that may be staged on a shard without a configured limit: the size of its weights, or two
    buckets for each worker if that is more.

    With two workers no push is refused then, however far one of them is ahead within a step, so no bucket is sent
    twice. With more workers each has room for two buckets, as many as it has under way to one shard at a time. The rows
    of the job's tables are added to this.

    weights: bytes of the weights; bucket: bytes of a full bucket; workers, tables: their numbers
    """
    return max(weights, 2 * bucket * workers) + tables * ROWS_BYTES * workers


# Bytes of a job beside its tensors' elements (measured).
BUCKET_BYTES, SLICE_BYTES, GROUP_BYTES = 5 * 1024, 1536, 1024


@dataclass(frozen=True)
class JobRoom:
    """All bytes that a job will take on a shard, some of them long after the job was admitted.

    weights:   the buckets' weights, and the workers' version of them if they travel in blocks
    optimizer: the optimizer's state, once it has stepped
    staged:    contributions that may wait for others
    objects:   the overhead of buckets, parameters and groups
    """

    weights: int
    optimizer: int
    staged: int
    objects: int

    @property
    def total(self) -> int:
        """The sum of all kinds of bytes."""
        return self.weights + self.optimizer + self.staged + self.objects


def room_for(spec: JobSpec, indices: Sequence[int], staged_limit: int | None = None) -> JobRoom:
    """Returns the memory that the buckets with these indices will take. staged_limit: the shard's option;
    None: not set
    """
    layout = bucket_layout(spec.parameters, spec.bucket_bytes).buckets
    buckets = [layout[index] for index in indices if 0 <= index < len(layout)]
    kept = [len(tensors_kept(spec.optimizer_of(index), group)) for index, group in enumerate(spec.param_groups)]
    weights = sum(bucket.nbytes for bucket in buckets)
    optimizer = 0
    for bucket in buckets:
        itemsize = bucket.nbytes // bucket.numel if bucket.numel else 0
        for part in bucket.slices:
            group = spec.parameters[part.parameter].param_group
            optimizer += part.length * itemsize * kept[group] if group is not None else 0
    staged = staged_limit or derived_limit(weights, spec.bucket_bytes, max(1, spec.world_size))
    if spec.world_size:  # at most world_size - 1 workers can wait for another one
        trained = sum(bucket.nbytes for bucket in buckets if not bucket.frozen)
        staged = min(staged, trained * (spec.world_size - 1))
    if not staged_limit:
        staged += derived_limit(0, 0, max(0, spec.world_size - 1), len(spec.tables))
    slices = sum(len(bucket.slices) for bucket in buckets)
    objects = len(buckets) * BUCKET_BYTES + slices * SLICE_BYTES + len(spec.param_groups) * GROUP_BYTES
    weights += sum(bucket.nbytes for bucket in buckets if weight_format(spec.weight_wire, bucket) in BLOCK_FORMATS)
    return JobRoom(weights, optimizer, staged, objects)
