"""What processes measure of their own work, as messages, and back."""

from __future__ import annotations

import math

from ps_protocol.convert import duration, seconds
from ps_protocol.figures import PHASES, LoggedValue, WorkerFigures
from ps_protocol.v1 import figures_pb2
from ps_server.core.figures import RowCounts, ShardFigures, ShardJobFigures, TableFigures, check_worker_figures


def worker_figures(message: figures_pb2.WorkerFigures) -> WorkerFigures:
    """Returns what a worker says that it has measured. Raises InvalidRequest for what no worker can measure."""
    figures = WorkerFigures(
        measured=seconds(message.measured_duration),
        steps=message.step_count,
        phases={phase: seconds(getattr(message, f"{phase}_duration")) for phase in PHASES},
        sent=message.sent_bytes,
        received=message.received_bytes,
        values=tuple(LoggedValue(value.name, value.last, value.mean) for value in message.values),
        looked_up=message.looked_up_id_count,
        distinct=message.distinct_id_count,
        residual_ratio=message.residual_ratio if message.HasField("residual_ratio") else None,
        total=message.total_step_count,
        done=message.done_step_count,
    )
    check_worker_figures(figures)
    return figures


def shard_figures(message: figures_pb2.ShardFigures) -> ShardFigures:
    """Returns what a shard has measured of itself."""
    return ShardFigures(
        seconds(message.measured_duration),
        message.resident_bytes,
        message.memory_limit_bytes,
        message.table_library,
    )


def shard_message(figures: ShardFigures) -> figures_pb2.ShardFigures:
    """Returns the message of what a shard has measured of itself."""
    return figures_pb2.ShardFigures(
        measured_duration=duration(figures.measured),
        resident_bytes=figures.resident,
        memory_limit_bytes=figures.limit,
        table_library=figures.library,
    )


def shard_job_figures(message: figures_pb2.ShardJobFigures) -> ShardJobFigures:
    """Returns what a shard has measured of a job."""
    return ShardJobFigures(
        applies=message.apply_count,
        apply_seconds=seconds(message.apply_duration),
        received=message.received_bytes,
        sent=message.sent_bytes,
        staleness=tuple(
            (each.max_clocks if each.HasField("max_clocks") else math.inf, each.gradient_count)
            for each in message.staleness
        ),
        awaited={rank: seconds(waited) for rank, waited in message.awaited_durations.items()},
    )


def shard_job_message(figures: ShardJobFigures) -> figures_pb2.ShardJobFigures:
    """Returns the message of what a shard has measured of a job."""
    message = figures_pb2.ShardJobFigures(
        apply_count=figures.applies,
        apply_duration=duration(figures.apply_seconds),
        received_bytes=figures.received,
        sent_bytes=figures.sent,
        staleness=[
            figures_pb2.StalenessCount(max_clocks=None if most == math.inf else int(most), gradient_count=count)
            for most, count in figures.staleness
        ],
    )
    for rank, waited in figures.awaited.items():
        message.awaited_durations[rank].CopyFrom(duration(waited))
    return message


def table_figures(message: figures_pb2.TableFigures) -> TableFigures:
    """Returns what a shard has of a table."""
    counts = RowCounts(
        found=message.found_id_count,
        missing=message.missing_id_count,
        pushed=message.pushed_row_count,
        admitted=message.admitted_row_count,
        expired=message.expired_row_count,
        evicted=message.evicted_row_count,
        waiting=message.waiting_gradient_count,
        no_room=message.no_room_gradient_count,
        cold=message.cold_id_count,
    )
    in_file = message.file_row_count, message.file_size_bytes
    return TableFigures(message.table, message.row_count, message.size_bytes, counts, *in_file)


def table_message(figures: TableFigures) -> figures_pb2.TableFigures:
    """Returns the message of what a shard has of a table."""
    counts = figures.counts
    return figures_pb2.TableFigures(
        table=figures.name,
        row_count=figures.rows,
        size_bytes=figures.nbytes,
        found_id_count=counts.found,
        missing_id_count=counts.missing,
        pushed_row_count=counts.pushed,
        admitted_row_count=counts.admitted,
        expired_row_count=counts.expired,
        evicted_row_count=counts.evicted,
        waiting_gradient_count=counts.waiting,
        no_room_gradient_count=counts.no_room,
        cold_id_count=counts.cold,
        file_row_count=figures.file_rows,
        file_size_bytes=figures.file_bytes,
    )
