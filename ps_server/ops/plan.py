"""`ps-server plan`: the shards, memory, bytes on the wire and time that a job needs, and the mode that pays.

Memory is the sum by which a shard admits a job (core/budget.py), plus the copies for a checkpoint and the messages
under way. A round takes as long as its busiest link, or its busiest processor if that takes longer. Rates follow from
it. docs/planning.md has each formula, with its conditions.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from ps_protocol.errors import InvalidRequest
from ps_protocol.job import JobSpec
from ps_protocol.layout import Layout, ParameterSpec, PiecePlace, bucket_layout
from ps_protocol.modes import Consistency
from ps_protocol.optimizer_state import KNOWN
from ps_protocol.wire_formats import FORMATS, BlockFormat, CastFormat
from ps_runtime.quantities import counted, number_text, size_text, time_text
from ps_server.core.budget import room_for
from ps_server.core.extent import check_extent
from ps_server.core.limits import DEFAULTS
from ps_server.core.placement import place_job, sized
from ps_server.ops.columns import folded, parts_of
from ps_server.ops.plan_costs import apply_seconds, coordinator_load, travel_seconds, way
from ps_server.ops.plan_tables import TableMemory, TableQuestion, fewest_shards, table_memory

# Buckets of each process of a worker that a shard holds while they travel. Over gRPC two pushes, each in gRPC's slices
# and then joined, and an answer to a pull as bytes and as a slice (docs/data-path.md); over data connections as it was
# measured.
BUCKETS_UNDER_WAY = {"shm": 0, "tcp": 3, "grpc": 6}
LEASE_SECONDS = 10.0  # the default of --lease
# A mode that does not give the result of sync is recommended only if it makes at least so many times as many steps.
WORTH_IT = 1.1


@dataclass(frozen=True)
class Question:
    """The model, the machines and the links that a plan is for.

    parameters:   elements that the optimizer steps, of float32; without those of tables
    tensors:      the number of tensors that they are in
    shards:       their number; None: as many as the links need
    link:         bits a second of each machine's link, each way; None: all processes share one machine and its memory
    wire:         the format in which gradients and weights travel
    transport:    how, as --transport of workers; tls: encrypted
    tables:       tables of rows, as they are when they are full
    lookups:      distinct ids of each table in a worker's step; 0: not known, and not counted
    step_seconds: the seconds of a worker's forward and backward pass; None if they are not known
    straggler:    how many times as long the slowest worker takes
    stalls:       the fraction of steps in which some worker is that slow; None: one worker is, in every step
    group_size:   processes of each worker. They hold one model, each tensor cut along its first dimension, as
                  fully_shard cuts it; each has a machine and a link of its own
    """

    parameters: int
    workers: int
    optimizer: str = "AdamW"
    momentum: float = 0.0
    tensors: int = 1
    shards: int | None = None
    link: float | None = None
    wire: str = "float32"
    step_seconds: float | None = None
    straggler: float = 1.0
    stalls: float | None = None
    transport: str = "auto"
    tls: bool = False
    tables: tuple[TableQuestion, ...] = ()
    lookups: int = 0
    group_size: int = 1

    @property
    def way(self) -> str:
        """How buckets travel, a name of plan_costs.MS_A_MIB."""
        return way(self.transport, self.tls, self.link is None)

    @property
    def processes(self) -> int:
        """The number of processes of all workers."""
        return self.workers * self.group_size


@dataclass(frozen=True)
class ShardMemory:
    """Bytes on the shard that holds the most, beside what a server takes before its first job.

    staged:    sums of open updates, and gradients that wait for others
    objects:   Python objects of buckets, tensors and groups
    under_way: messages of all workers; 0 with shared memory
    snapshot:  the copy of its part while a checkpoint is made; without checkpoints there is none
    tables:    rows with their optimizer's state, and the index that finds them
    cold:      the least that the tables need with --cold-rows-dir
    """

    weights: int
    optimizer: int
    staged: int
    objects: int
    under_way: int
    snapshot: int
    tables: int = 0
    cold: int = 0

    @property
    def training(self) -> int:
        """The part of training, without checkpoints."""
        return self.weights + self.optimizer + self.staged + self.objects + self.under_way + self.tables

    @property
    def total(self) -> int:
        """Training and checkpoints together."""
        return self.training + self.snapshot


@dataclass(frozen=True)
class ShardPlan:
    """The answer for one number of shards.

    worker_bytes:  bytes that a worker sends in a step; it receives as many. Of a group, the process that sends the most
    shard_bytes:   bytes that the fullest shard receives in a step of every worker; it sends as many
    link_seconds:  the least time of these bytes on the link, both ways at once; None if no link is given
    shard_cpu:     seconds of a core that the fullest shard uses for a step of every worker
    worker_cpu:    seconds of a core that this worker or process uses to send and receive
    ddp_seconds:   the same as link_seconds of a ring all-reduce among the workers; of groups, among the processes that
                   hold the same pieces (HSDP's outer level)
    """

    shards: int
    buckets: int
    bucket_bytes: int
    memory: ShardMemory
    worker_bytes: int
    shard_bytes: int
    link_seconds: float | None
    shard_cpu: float
    worker_cpu: float
    ddp_seconds: float | None

    @property
    def exchange_seconds(self) -> float:
        """The seconds of a step's pushes and pulls: those of the busiest link, or of the busiest processor."""
        return max(self.link_seconds or 0.0, self.shard_cpu, self.worker_cpu)


@dataclass(frozen=True)
class ModeRate:
    """Steps a second of all workers together."""

    mode: str
    steps_per_second: float


@dataclass(frozen=True)
class Advice:
    """The answer of `ps-server plan`.

    plans: the one that is recommended first, then others to compare it with, by number of shards
    rates: empty if the time of a step is not known
    mode:  the mode that pays; why: the reason, as text
    way:   how buckets travel
    coordinator_cpu: the part of a core that it uses while the job trains
    group_size: processes of each worker
    """

    plans: tuple[ShardPlan, ...]
    rates: tuple[ModeRate, ...]
    mode: str
    why: str
    way: str
    coordinator_cpu: float
    group_size: int


def advise(question: Question) -> Advice:
    """Returns the plans for a job. Raises InvalidRequest or LimitExceeded for a job that servers would refuse."""
    spec = job_spec(question)
    buckets = len(bucket_layout(spec.parameters, spec.bucket_bytes).buckets)
    most = min(max(1, buckets), question.processes)
    chosen = question.shards or (most if question.link is not None else min(2, buckets))
    least = fewest_shards(question.tables)  # with fewer shards, one of them would have more rows than it may
    others = {count for count in (1, 2, 4, 8, 16, 32, 64, most) if least <= count <= most} - {chosen}
    plans = tuple(plan(question, spec, count) for count in (chosen, *sorted(others)))
    rates = mode_rates(question, plans[0].exchange_seconds)
    load = coordinator_load(question.processes, LEASE_SECONDS)
    return Advice(plans, rates, *_best_mode(question, rates), question.way, load, question.group_size)


def job_spec(question: Question) -> JobSpec:
    """Returns the job as its workers would register it, with the size of buckets that a server would choose."""
    name = next((name for name in KNOWN if name.lower() == question.optimizer.lower()), None)
    if name is None:
        raise InvalidRequest(f"expected an optimizer out of {', '.join(KNOWN)}, got {question.optimizer!r}")
    if question.wire not in FORMATS:
        raise InvalidRequest(f"expected one of {', '.join(FORMATS)} on the wire, got {question.wire!r}")
    if question.tables and question.group_size > 1:
        raise InvalidRequest("a job whose workers are groups has no tables of rows")
    group = {"momentum": question.momentum} if question.momentum else {}
    if question.momentum:
        _check_momentum(name, question.momentum)
    count, rest = divmod(question.parameters, question.tensors)
    if count == 0:
        raise InvalidRequest(f"{question.parameters} parameters do not make {question.tensors} tensors")
    sizes = [count + (index < rest) for index in range(question.tensors)]
    pieces = tuple(
        piece for index, size in enumerate(sizes) for piece in _pieces(str(index), size, question.group_size)
    )
    sync, wire = Consistency(0, aggregate=True), question.wire
    spec = JobSpec(
        *("plan", pieces, name, (group,), sync, 0, question.workers),
        gradient_wire=wire,
        weight_wire=wire,
        group_size=question.group_size,
    )
    spec = sized(spec, question.link is None, DEFAULTS.buckets)
    check_extent(spec, DEFAULTS)
    return spec


def _pieces(name: str, size: int, members: int) -> Iterator[ParameterSpec]:
    """Yields what each member of a group holds of a tensor. The last members hold nothing of a small one."""
    if members == 1:
        yield ParameterSpec(name, (size,), "float32", 0)
        return
    most = -(-size // members)
    for member, offset in enumerate(range(0, size, most)):
        numel = min(most, size - offset)
        yield ParameterSpec(name, (numel,), "float32", 0, member=member, piece=PiecePlace((size,), (offset,)))


def _fullest_member(layout: Layout) -> tuple[int, int]:
    """Returns the elements and the buckets of the member that holds the most: of all, where workers are no groups."""
    held: Counter[int] = Counter()
    for bucket in layout.buckets:
        held[bucket.member] += bucket.numel
    [(member, numel)] = held.most_common(1)
    return numel, sum(bucket.member == member for bucket in layout.buckets)


def _check_momentum(optimizer: str, momentum: float) -> None:
    """Raises InvalidRequest unless torch's optimizer of that name takes this momentum."""
    if optimizer not in ("SGD", "RMSprop"):
        raise InvalidRequest(f"momentum is of SGD and RMSprop, got it for {optimizer}")
    if not 0 <= momentum < math.inf:
        raise InvalidRequest(f"momentum is a finite number from 0, got {momentum:g}")


def plan(question: Question, spec: JobSpec, shards: int) -> ShardPlan:
    """Returns the plan of a job on `shards` shards."""
    placed = place_job(spec, shards, "")
    layout = bucket_layout(spec.parameters, spec.bucket_bytes)
    loads = [sum(layout.buckets[bucket].numel for bucket in placed.buckets_of(index)) for index in range(shards)]
    fullest = max(range(shards), key=loads.__getitem__)
    room = room_for(spec, placed.buckets_of(fullest), DEFAULTS.staged_bytes)
    tables = table_memory(question.tables, shards) if question.tables else TableMemory(0, 0, 0)
    held = BUCKETS_UNDER_WAY[question.way.partition("+")[0]]
    numel, buckets = _fullest_member(layout)
    memory = ShardMemory(
        weights=room.weights,
        optimizer=room.optimizer,
        staged=room.staged,
        objects=room.objects,
        under_way=held * min(question.processes * spec.bucket_bytes, question.workers * room.weights),
        snapshot=room.weights + room.optimizer + tables.rows,
        tables=tables.rows + tables.index,
        cold=tables.cold,
    )
    codec = FORMATS[question.wire]
    worker_bytes, shard_bytes = codec.size(numel), codec.size(loads[fullest]) * question.workers
    looked_up = sum(question.lookups * table.row_bytes for table in question.tables)
    worker_bytes, shard_bytes = worker_bytes + looked_up, shard_bytes + looked_up * question.workers // shards
    times: list[float | None] = [None, None]
    if question.link is not None:
        # DDP has hooks for half types, and none for blocks.
        in_ring = CastFormat("float32").size(numel) if isinstance(codec, BlockFormat) else worker_bytes
        ring = 2 * (question.workers - 1) / question.workers * in_ring
        times = [8 * max(worker_bytes, shard_bytes) / question.link, 8 * ring / question.link]
    here = len(placed.buckets_of(fullest))
    travel = travel_seconds(question.way, shard_bytes, here * question.workers, question.processes)
    weights = 4 * loads[fullest]
    shard_cpu = travel + apply_seconds(spec.optimizer, room.optimizer // weights, weights)
    worker_cpu = travel_seconds(question.way, worker_bytes, buckets, shards)
    cpu = shard_cpu, worker_cpu
    return ShardPlan(
        shards, len(layout.buckets), spec.bucket_bytes, memory, worker_bytes, shard_bytes, times[0], *cpu, times[1]
    )


def mode_rates(question: Question, exchange_seconds: float) -> tuple[ModeRate, ...]:
    """Returns how many steps all workers make a second, by mode; nothing if the time of a step is not known."""
    step, workers, slow = question.step_seconds, question.workers, question.straggler
    if step is None:
        return ()
    fast, slowest = step + exchange_seconds, slow * step + exchange_seconds
    if question.stalls is None:  # one worker is slow always: a worker that may be K steps ahead waits K steps later
        sync = ssp = workers / slowest
        free = (workers - 1) / fast + 1 / slowest
    else:
        some = 1 - (1 - question.stalls) ** workers  # the probability that any worker stalls in a step
        sync = workers / (fast + some * (slowest - fast))
        ssp = free = workers / (fast + question.stalls * (slowest - fast))
    return ModeRate("sync", sync), ModeRate("ssp", ssp), ModeRate("async", free)


def _best_mode(question: Question, rates: tuple[ModeRate, ...]) -> tuple[str, str]:
    if not rates:
        return "sync", "the result of DDP; with --step-seconds and --straggler the modes are compared"
    sync, ssp, free = (rate.steps_per_second for rate in rates)
    gain = f"{max(ssp, free) / sync:.2f} times the steps of sync"
    if max(ssp, free) < WORTH_IT * sync:
        return "sync", "the result of DDP, and no other mode makes a tenth more steps"
    if ssp * WORTH_IT >= free:
        return "ssp", f"{gain}, while no worker is K steps ahead: K has to be as long as stalls last"
    return "async", f"{gain}; the slow worker's gradients are then {question.straggler:g} times as late as the others'"


def as_json(advice: Advice) -> dict[str, Any]:
    """Returns the advice as plain data: bytes, seconds, steps a second."""
    data = asdict(advice)
    for values, made in zip(data["plans"], advice.plans, strict=True):
        values["memory"] |= {"training": made.memory.training, "total": made.memory.total}
        values["round_seconds"] = made.exchange_seconds
    return data


def table(advice: Advice, width: int | None = None) -> str:
    """Returns the advice for a person. width: of the window, which it keeps; None if there is no limit"""
    has_tables = any(made.memory.tables for made in advice.plans)
    columns = ("SHARDS", "WEIGHTS", "OPTIMIZER", *["TABLES"] * has_tables, "STAGED", "OBJECTS", "UNDER WAY", "TRAINING")
    times = ("WORKER'S LINK", "SHARD'S LINK", "LINK", "SHARD'S CPU", "WORKER'S CPU", "ROUND", "DDP'S")
    rows: list[tuple[str, ...]] = [(*columns, "SNAPSHOT", "IN ALL", *times)]
    for made in advice.plans:
        memory = made.memory
        tables = [memory.tables] * has_tables
        parts = (memory.weights, memory.optimizer, *tables, memory.staged, memory.objects, memory.under_way)
        sums = (memory.training, memory.snapshot, memory.total)
        sizes = map(size_text, (*parts, *sums, made.worker_bytes, made.shard_bytes))
        seconds = (made.link_seconds, made.shard_cpu, made.worker_cpu, made.exchange_seconds, made.ddp_seconds)
        rows.append((str(made.shards), *sizes, *("-" if each is None else time_text(each) for each in seconds)))
    remarks = [line for remark in _remarks(advice) for line in folded(remark, width)]
    return "\n".join([*parts_of(rows, width), "", *remarks])


def _remarks(advice: Advice) -> list[str]:
    """Returns the lines below the table: the meaning of its columns, and the mode."""
    best = advice.plans[0]
    parts = f"{counted(best.shards, 'shard')}, {counted(best.buckets, 'bucket')} of {size_text(best.bucket_bytes)}"
    said = [
        f"{parts}: the first row",
        f"memory is that of the fullest shard, beside {_IDLE}; links carry a step's bytes, each way",
    ]
    if advice.group_size > 1:
        said.append(f"each worker is a group of {advice.group_size} processes: columns of a worker are of one of them")
    said.append(f"buckets travel by {advice.way}; CPU is of one core, as fast as the one that was measured")
    limits = {
        best.link_seconds: "the links",
        best.shard_cpu: "shards' processors",
        best.worker_cpu: "workers' processors",
    }
    said.append(f"a round is limited by {limits[best.exchange_seconds]}")
    if best.memory.under_way > best.memory.training / 2:
        said.append("more than half of the memory is under way, and grows with workers times the size of a bucket")
    if best.memory.cold:
        said.append(
            f"with --cold-rows-dir the tables need at least {size_text(best.memory.cold)} of memory, and a file"
        )
    said.append(f"the coordinator's heartbeats take {number_text(100 * advice.coordinator_cpu)} % of a core")
    said += [
        f"{rate.mode}: {number_text(rate.steps_per_second)} steps a second of all workers" for rate in advice.rates
    ]
    return [*said, f"mode {advice.mode}: {advice.why}"]


_IDLE = "what a server takes before its first job"
