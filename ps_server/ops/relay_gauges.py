"""A relay's gauges, read from what it follows at each scrape. Needs no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from ps_runtime.metrics import Gauges, Sample
from ps_server.relay.followed import FollowedJob
from ps_server.relay.relayed import Relayed

ByJob = dict[str, list[FollowedJob]]  # a job may be followed in several wire formats


def relay_gauges(relayed: Relayed) -> Gauges[ByJob]:
    """Returns gauges of the editions of each job, and who reads them."""

    def followed() -> ByJob:
        jobs: ByJob = {}
        for job in relayed.followed():
            if job.newest is not None:
                jobs.setdefault(job.name, []).append(job)
        return jobs

    def each(read: Callable[[Sequence[FollowedJob]], float]) -> Callable[[ByJob], Iterable[Sample]]:
        return lambda jobs: [((name,), read(parts)) for name, parts in jobs.items()]

    return Gauges(
        followed,
        [
            (
                "ps_edition_version",
                "Updates of the newest.",
                ("job",),
                each(lambda parts: max(map(_of, parts))),
            ),
            ("ps_edition_behind", "Updates that it lacks.", ("job",), each(lambda parts: max(map(_behind, parts)))),
            ("ps_edition_age_seconds", "Since it was the newest.", ("job",), each(lambda parts: max(map(_age, parts)))),
            ("ps_edition_bytes", "Memory of editions.", ("job",), each(lambda parts: sum(p.nbytes for p in parts))),
            ("ps_feed_readers", "Readers.", ("job",), each(lambda parts: sum(len(p.callers()) for p in parts))),
            ("ps_feed_sent_bytes_total", "Sent.", ("job",), each(lambda parts: sum(p.sent_bytes for p in parts))),
            (
                "ps_feed_element_bytes_total",
                "What was sent, as if all had been sent whole.",
                ("job",),
                each(lambda parts: sum(p.sent_elements for p in parts)),
            ),
        ],
    )


def _of(job: FollowedJob) -> int:
    return job.newest.arrays.version if job.newest is not None else 0


def _behind(job: FollowedJob) -> int:
    return max(0, job.latest - _of(job))


def _age(job: FollowedJob) -> float:
    return job.newest.age() if job.newest is not None else 0.0
