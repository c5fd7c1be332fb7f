"""A relay's gauges, read at each scrape from the jobs that it follows. Needs no torch."""

from __future__ import annotations

from ps_runtime.metrics import Gauges
from ps_server.core.feed_figures import FeedFigures, of_all_wires
from ps_server.ops.feed_gauges import feed_gauges
from ps_server.relay.relayed import Relayed

Feeds = dict[str, FeedFigures]  # by job


def relay_gauges(relayed: Relayed) -> Gauges[Feeds]:
    """Returns gauges of the editions of each job, and of their readers."""

    def followed() -> Feeds:
        jobs: dict[str, list[FeedFigures]] = {}  # a job may be followed in several wire formats
        for job in relayed.followed():
            if job.newest is not None:
                jobs.setdefault(job.name, []).append(job.figures)
        return {name: of_all_wires(wires) for name, wires in jobs.items()}

    return Gauges(followed, feed_gauges(lambda feeds: feeds, "ps_edition_age_seconds", "Since it was the newest."))
