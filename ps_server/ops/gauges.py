"""A server process' gauges, read from its statistics at each scrape; and /sd, where Prometheus finds all of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import Any

from ps_runtime.metrics import Gauges, Sample
from ps_server.coordinator.coordinator import Coordinator
from ps_server.core.feed_figures import FeedFigures
from ps_server.core.server_figures import TableFigures
from ps_server.core.statistics import (
    CheckpointStatistics,
    CoordinatorStatistics,
    JobStatistics,
    ShardJobStatistics,
    ShardStatistics,
)
from ps_server.ops.feed_gauges import feed_gauges
from ps_server.shard.shard import Shard

# Of each job: name, help, and how its number is read from the statistics.
_OF_HOSTED_JOB: tuple[tuple[str, str, Callable[[ShardJobStatistics], float]], ...] = (
    ("ps_staged_bytes", "Bytes staged, not yet applied.", lambda job: job.staged_bytes),
    ("ps_buckets", "Buckets held.", lambda job: job.bucket_count),
    ("ps_bucket_version_min", "Lowest version here.", lambda job: job.version_min),
    ("ps_bucket_version_max", "Highest version here.", lambda job: job.version_max),
    ("ps_waiting_pulls", "Bucket pulls that wait.", lambda job: job.waiting_pulls),
)
# Of each table of a job: name, help, a label with its values, and how their numbers are read.
_OF_TABLE: tuple[tuple[str, str, str, dict[str, Callable[[TableFigures], float]]], ...] = (
    ("ps_table_rows", "Rows held.", "", {"": lambda table: table.rows}),
    ("ps_table_bytes", "Bytes of rows, their state and the index.", "", {"": lambda table: table.nbytes}),
    (
        "ps_table_lookups_total",
        "Ids looked up, by whether they had a row.",
        "result",
        {"found": lambda table: table.counts.found, "missing": lambda table: table.counts.missing},
    ),
    ("ps_table_file_rows", "Rows in a file beside memory.", "", {"": lambda table: table.file_rows}),
    ("ps_table_file_bytes", "Bytes of that file.", "", {"": lambda table: table.file_bytes}),
    ("ps_table_cold_lookups_total", "Ids whose row was read from the file.", "", {"": lambda table: table.counts.cold}),
    ("ps_table_pushed_rows_total", "Gradients of single rows taken in.", "", {"": lambda table: table.counts.pushed}),
    ("ps_table_admitted_rows_total", "Rows that came into being.", "", {"": lambda table: table.counts.admitted}),
    (
        "ps_table_forgotten_rows_total",
        "Rows forgotten: not trained for too long, or to make room.",
        "reason",
        {"expired": lambda table: table.counts.expired, "evicted": lambda table: table.counts.evicted},
    ),
    (
        "ps_table_dropped_gradients_total",
        "Gradients dropped: ids that have not occurred often enough, or that do not fit.",
        "reason",
        {"waiting": lambda table: table.counts.waiting, "no_room": lambda table: table.counts.no_room},
    ),
)
_OF_JOB: tuple[tuple[str, str, Callable[[JobStatistics], float]], ...] = (
    ("ps_lost_steps_total", "Workers' steps lost with a shard.", lambda job: job.lost_steps),
    ("ps_redone_steps_total", "Workers' steps made again.", lambda job: job.redone_steps),
    ("ps_workers", "Live workers.", lambda job: len(job.workers)),
    ("ps_placement_imbalance_ratio", "Most bytes on a shard over the mean: 1 is even.", lambda job: job.imbalance),
)
_OF_CHECKPOINTS: tuple[tuple[str, str, Callable[[CheckpointStatistics], float]], ...] = (
    ("ps_checkpoints_total", "Checkpoints completed.", lambda made: made.complete),
    ("ps_checkpoints_failed_total", "Checkpoints not completed.", lambda made: made.failed),
    (
        "ps_checkpoints_without_states_total",
        "Completed, but without a worker's own state.",
        lambda made: made.incomplete,
    ),
    ("ps_checkpoint_clock", "Clock of the last one.", lambda made: made.clock),
    ("ps_checkpoint_seconds", "How long the last one took.", lambda made: made.seconds),
    ("ps_checkpoint_held_up_seconds", "The longest that the last one held up a shard.", lambda m: m.held_up_seconds),
    ("ps_checkpoint_age_seconds", "How old the last one is.", lambda made: made.age_seconds),
)


def shard_gauges(shard: Shard) -> Gauges[ShardStatistics]:
    """Returns the gauges of a shard's memory, its progress and its waiting pulls."""

    def each_job(read: Callable[[ShardJobStatistics], float]) -> Callable[[ShardStatistics], Iterable[Sample]]:
        return lambda statistics: [((name,), read(job)) for name, job in statistics.jobs.items()]

    def sizes(statistics: ShardStatistics) -> Iterable[Sample]:
        for name, job in statistics.jobs.items():
            yield (name, "parameters"), job.parameter_bytes
            yield (name, "optimizer"), job.optimizer_bytes
            yield (name, "tables"), job.table_bytes

    def agreements(statistics: ShardStatistics) -> Iterable[Sample]:
        for name, job in statistics.jobs.items():
            if job.agreement is not None and job.agreement.ratio is not None:
                yield (name,), job.agreement.ratio

    def clocks(statistics: ShardStatistics) -> Iterable[Sample]:
        for name, job in statistics.jobs.items():
            yield from (((name, str(rank)), clock) for rank, clock in job.clocks.items())

    def transports(statistics: ShardStatistics) -> Iterable[Sample]:
        for name, job in statistics.jobs.items():
            yield (name, "shm"), len(job.sharing)
            yield (name, "tcp"), len({*job.connected} - {*job.sharing})
            yield (name, "grpc"), len({*job.clocks} - {*job.sharing, *job.connected})

    return Gauges(
        shard.statistics,
        [
            *((name, text, ("job",), each_job(read)) for name, text, read in _OF_HOSTED_JOB),
            ("ps_job_bytes", "Bytes held, by kind.", ("job", "kind"), sizes),
            ("ps_shard_workers", "Live workers, by how buckets travel here.", ("job", "transport"), transports),
            ("ps_round_agreement", "How alike workers move in a round: 1 is equal.", ("job",), agreements),
            ("ps_shard_clock", "Steps of each live worker applied here.", ("job", "rank"), clocks),
            *(
                (name, text, ("job", "table", label) if label else ("job", "table"), _each_table(label, numbers))
                for name, text, label, numbers in _OF_TABLE
            ),
            *feed_gauges(_feeds, "ps_edition_taken_age_seconds", "How long ago the newest edition was complete."),
            ("ps_feed_relayed_readers", "Readers that relays have, as they say.", ("job",), _relayed_readers),
            ("ps_edition_refused_total", "Editions not taken, by reason.", ("job", "reason"), _refused_editions),
        ],
    )


def _feeds(statistics: ShardStatistics) -> dict[str, FeedFigures]:
    return {name: job.feed for name, job in statistics.jobs.items() if job.feed is not None}


def _relayed_readers(statistics: ShardStatistics) -> Iterable[Sample]:
    return [((name,), feed.relays.readers) for name, feed in _feeds(statistics).items()]


def _refused_editions(statistics: ShardStatistics) -> Iterable[Sample]:
    for name, feed in _feeds(statistics).items():
        yield from (((name, reason), count) for reason, count in feed.refused.items())


def _each_table(
    label: str, numbers: dict[str, Callable[[TableFigures], float]]
) -> Callable[[ShardStatistics], Iterable[Sample]]:
    def samples(statistics: ShardStatistics) -> Iterable[Sample]:
        for name, job in statistics.jobs.items():
            for table in job.tables:
                for value, read in numbers.items():
                    yield (name, table.name, value) if label else (name, table.name), read(table)

    return samples


def coordinator_gauges(coordinator: Coordinator) -> Gauges[CoordinatorStatistics]:
    """Returns gauges of live workers, the balance of the placement, checkpoints and rollbacks."""

    def each_job(read: Callable[[JobStatistics], float]) -> Callable[[CoordinatorStatistics], Iterable[Sample]]:
        return lambda statistics: [((name,), read(job)) for name, job in statistics.jobs.items()]

    def each_made(read: Callable[[CheckpointStatistics], float]) -> Callable[[CoordinatorStatistics], Iterable[Sample]]:
        return lambda statistics: [
            ((name,), read(job.checkpoints)) for name, job in statistics.jobs.items() if job.checkpoints is not None
        ]

    def restores(statistics: CoordinatorStatistics) -> Iterable[Sample]:
        counts = asdict(statistics.recovery) if statistics.recovery is not None else {}
        return [((result,), count) for result, count in counts.items()]

    return Gauges(
        coordinator.statistics,
        [
            ("ps_shards", "Shards that have called in.", (), lambda statistics: [((), statistics.shards)]),
            ("ps_jobs", "Jobs that run.", (), lambda statistics: [((), len(statistics.jobs))]),
            ("ps_restores_total", "Checkpoints that a rollback considered, by result.", ("result",), restores),
            *((name, text, ("job",), each_job(read)) for name, text, read in _OF_JOB),
            *((name, text, ("job",), each_made(read)) for name, text, read in _OF_CHECKPOINTS),
            ("ps_worker_clock", "Steps finished, as last heard.", ("job", "rank"), _worker_clocks),
            ("ps_data_samples", "Leased data of the pass, by state.", ("job", "loader", "state"), _samples),
            ("ps_data_pass", "The pass over a loader's data, from 0.", ("job", "loader"), _passes),
        ],
    )


def _worker_clocks(statistics: CoordinatorStatistics) -> Iterable[Sample]:
    for name, job in statistics.jobs.items():
        yield from (((name, str(worker.rank)), worker.clock) for worker in job.workers)


def _samples(statistics: CoordinatorStatistics) -> Iterable[Sample]:
    for name, job in statistics.jobs.items():
        for loader, progress in job.loaders.items():
            yield (name, str(loader), "committed"), progress.committed
            yield (name, str(loader), "leased"), progress.leased
            yield (name, str(loader), "returned"), progress.returned


def _passes(statistics: CoordinatorStatistics) -> Iterable[Sample]:
    for name, job in statistics.jobs.items():
        yield from (((name, str(loader)), progress.pass_number) for loader, progress in job.loaders.items())


def restart_gauges(count: int) -> Gauges[int]:
    """Returns the gauge of how often this shard was started again."""
    text = "How often `ps-server up` has started this shard again."
    return Gauges(lambda: count, [("ps_shard_restarts_total", text, (), lambda count: [((), count)])])


def loops_gauge(level: str) -> Gauges[str]:
    """Returns the gauge of whether this shard uses the compiled library for tables.

    level: the processor level for which the library was compiled; empty: the shard uses numpy
    """
    text = "1 where tables use the library, by the level of processors that it is for; 0 where numpy is used."
    return Gauges(lambda: level, [("ps_native_loops", text, ("level",), lambda level: [((level,), int(bool(level)))])])


def service_discovery(coordinator: Coordinator, encrypted: bool = False) -> bytes:
    """Returns every live shard and worker that serves metrics, in the JSON of Prometheus' http_sd_configs."""
    scheme = {"__scheme__": "https"} if encrypted else {}
    targets: list[dict[str, Any]] = [
        {"targets": [shard.metrics_address], "labels": {"role": "shard", "index": str(index)} | scheme}
        for index, shard in sorted(coordinator.shards().items())
        if shard.metrics_address
    ]
    for name, job in sorted(coordinator.jobs().items()):
        targets += [
            {
                "targets": [worker.metrics_address],
                "labels": {"role": "worker", "job_name": name, "rank": str(worker.rank)} | scheme,
            }
            for worker in job.workers.all()
            if worker.metrics_address
        ]
    return json.dumps(targets).encode()
