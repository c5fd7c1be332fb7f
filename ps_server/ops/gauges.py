"""A server process' gauges, read from its state when somebody scrapes; and /sd, where Prometheus finds everyone."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from typing import Any

from ps_runtime.metrics import Gauges, Sample, StatisticsGauges
from ps_server.coordinator.checkpoints import JobCheckpoints
from ps_server.coordinator.coordinator import Coordinator
from ps_server.core.statistics import ShardJobStatistics, ShardStatistics
from ps_server.rpc.call_limits import CallLimits
from ps_server.shard.shard import Shard


def shard_gauges(shard: Shard) -> StatisticsGauges[ShardStatistics]:
    """What a shard has, how far it is, and how many pulls wait."""

    def each_job(read: Callable[[ShardJobStatistics], float]) -> Callable[[ShardStatistics], Iterable[Sample]]:
        return lambda statistics: [((name,), read(job)) for name, job in statistics.jobs.items()]

    def sizes(statistics: ShardStatistics) -> Iterable[Sample]:
        for name, job in statistics.jobs.items():
            yield (name, "parameters"), job.parameter_bytes
            yield (name, "optimizer"), job.optimizer_bytes

    def clocks(statistics: ShardStatistics) -> Iterable[Sample]:
        for name, job in statistics.jobs.items():
            yield from (((name, str(rank)), clock) for rank, clock in job.clocks.items())

    return StatisticsGauges(
        shard.statistics,
        [
            ("ps_job_bytes", "Bytes held, by kind.", ("job", "kind"), sizes),
            ("ps_staged_bytes", "Bytes staged, not yet applied.", ("job",), each_job(lambda j: j.staged_bytes)),
            ("ps_buckets", "Buckets held.", ("job",), each_job(lambda j: j.bucket_count)),
            ("ps_bucket_version_min", "Lowest version here.", ("job",), each_job(lambda j: j.version_min)),
            ("ps_bucket_version_max", "Highest version here.", ("job",), each_job(lambda j: j.version_max)),
            ("ps_waiting_pulls", "Bucket pulls that wait.", ("job",), each_job(lambda j: j.waiting_pulls)),
            ("ps_shard_clock", "Steps of each live worker applied here.", ("job", "rank"), clocks),
        ],
    )


def coordinator_gauges(coordinator: Coordinator) -> Gauges:
    """Who takes part, and how evenly the buckets lie."""

    def clocks() -> Iterable[Sample]:
        for name, job in coordinator.jobs().items():
            yield from (((name, str(member.rank)), member.clock) for member in job.members())

    def each_job(read: Callable[[Any], float]) -> Callable[[], Iterable[Sample]]:
        return lambda: [((name,), read(job)) for name, job in coordinator.jobs().items()]

    def samples() -> Iterable[Sample]:
        for name, job in coordinator.jobs().items():
            for loader, how in job.data.progress().items():
                yield (name, str(loader), "committed"), how.committed
                yield (name, str(loader), "leased"), how.leased
                yield (name, str(loader), "returned"), how.returned

    def passes() -> Iterable[Sample]:
        for name, job in coordinator.jobs().items():
            yield from (((name, str(loader)), how.pass_number) for loader, how in job.data.progress().items())

    def each_kept(read: Callable[[JobCheckpoints], float]) -> Callable[[], Iterable[Sample]]:
        return lambda: [
            ((name,), read(job.checkpoints)) for name, job in coordinator.jobs().items() if job.checkpoints is not None
        ]

    keeping = coordinator.keeping

    def restores() -> Iterable[Sample]:
        if keeping is not None:
            yield ("restored",), keeping.recovery.restored
            yield ("damaged",), keeping.recovery.damaged
            yield ("unfinished",), keeping.recovery.unfinished

    return Gauges(
        [
            ("ps_checkpoints_total", "Checkpoints completed.", ("job",), each_kept(lambda c: c.complete)),
            ("ps_checkpoints_failed_total", "Checkpoints not completed.", ("job",), each_kept(lambda c: c.failed)),
            (
                "ps_checkpoint_clock",
                "Clock of the last one.",
                ("job",),
                each_kept(lambda c: c.last.clock if c.last else 0),
            ),
            ("ps_checkpoint_seconds", "How long the last one took.", ("job",), each_kept(lambda c: c.last_seconds)),
            (
                "ps_checkpoint_held_up_seconds",
                "For how long the last one held up the shard that it held up most.",
                ("job",),
                each_kept(lambda c: c.last_held_up),
            ),
            (
                "ps_checkpoint_age_seconds",
                "How old the last one is.",
                ("job",),
                each_kept(lambda c: time.monotonic() - c.last_at),
            ),
            ("ps_restores_total", "Checkpoints that were to be gone back to.", ("result",), restores),
            ("ps_lost_steps_total", "Workers' steps lost with a shard.", ("job",), each_job(lambda j: j.lost_steps)),
            ("ps_redone_steps_total", "Workers' steps made again.", ("job",), each_job(lambda j: j.redone_steps)),
            ("ps_shards", "Shards that have called in.", (), lambda: [((), len(coordinator.shards()))]),
            ("ps_jobs", "Jobs that run.", (), lambda: [((), len(coordinator.jobs()))]),
            ("ps_workers", "Live workers.", ("job",), each_job(lambda j: len(j.members()))),
            ("ps_data_samples", "Leased data of the pass, by state.", ("job", "loader", "state"), samples),
            ("ps_data_pass", "The pass over a loader's data, from 0.", ("job", "loader"), passes),
            ("ps_worker_clock", "Steps finished, as last heard.", ("job", "rank"), clocks),
            (
                "ps_placement_imbalance_ratio",
                "Most bytes on a shard over the mean: 1 is even.",
                ("job",),
                each_job(lambda j: j.imbalance),
            ),
        ]
    )


def security_gauges(call_limits: CallLimits, exposed: bool, encrypted: bool, asks: bool) -> Gauges:
    """What this process is open to, and what its callers have in flight."""

    def flag(value: bool) -> Callable[[], Iterable[Sample]]:
        return lambda: [((), float(value))]

    def count(name: str) -> Callable[[], Iterable[Sample]]:
        return lambda: [((), call_limits.statistics()[name])]

    return Gauges(
        [
            ("ps_insecure", "1: plaintext is served beyond this machine, as --insecure says.", (), flag(exposed)),
            ("ps_tls", "1: connections are encrypted.", (), flag(encrypted)),
            ("ps_identity_required", "1: callers must say who they are.", (), flag(asks)),
            ("ps_calls_in_flight", "Calls in flight.", (), count("calls")),
            ("ps_callers", "Callers with calls in flight.", (), count("callers")),
            ("ps_slow_peer_waits", "Waits for a peer to send or to read.", (), count("waits")),
        ]
    )


def service_discovery(coordinator: Coordinator, encrypted: bool = False) -> bytes:
    """Every live shard and worker that serves metrics, in the JSON of Prometheus' http_sd_configs."""
    scheme = {"__scheme__": "https"} if encrypted else {}
    targets: list[dict[str, Any]] = [
        {"targets": [shard.metrics_address], "labels": {"role": "shard", "index": str(index)} | scheme}
        for index, shard in sorted(coordinator.shards().items())
        if shard.metrics_address
    ]
    for name, job in sorted(coordinator.jobs().items()):
        targets += [
            {
                "targets": [m.metrics_address],
                "labels": {"role": "worker", "job_name": name, "rank": str(m.rank)} | scheme,
            }
            for m in job.members()
            if m.metrics_address
        ]
    return json.dumps(targets).encode()
