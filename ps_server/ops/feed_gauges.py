"""Gauges of the readers of a job's weights, with the same names on shards and relays. Needs no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

from ps_runtime.metrics import Sample
from ps_server.core.feed_figures import FeedFigures

S = TypeVar("S")
Gauge = tuple[str, str, tuple[str, ...], Callable[[S], Iterable[Sample]]]

# Name, help, and how its number is read; None: there is no such number yet.
_OF_FEED: tuple[tuple[str, str, Callable[[FeedFigures], float | None]], ...] = (
    ("ps_edition_version", "Updates of the newest edition.", lambda feed: feed.version),
    ("ps_edition_behind", "Updates that it lacks.", lambda feed: None if feed.version is None else feed.behind),
    ("ps_edition_bytes", "Memory of editions.", lambda feed: feed.nbytes),
    ("ps_feed_readers", "Readers that have an edition or wait for one.", lambda feed: feed.readers),
    ("ps_feed_mapped_readers", "Readers of this host that have memory of editions mapped.", lambda feed: feed.mapped),
    ("ps_edition_held_bytes", "What these have of editions that are kept no more.", lambda feed: feed.held),
    ("ps_feed_sent_bytes_total", "Bytes that readers were sent.", lambda feed: feed.sent),
    ("ps_feed_element_bytes_total", "The same, as if all had been sent whole.", lambda feed: feed.elements),
)


def feed_gauges(feeds: Callable[[S], Mapping[str, FeedFigures]], age: str, of_age: str) -> list[Gauge[S]]:
    """Returns the gauges of the readers of jobs.

    feeds: returns the figures of each job that is read, by its name
    age, of_age: the name and the help of the gauge of an edition's age: shards and relays count it from other moments
    """

    def samples(read: Callable[[FeedFigures], float | None]) -> Callable[[S], Iterable[Sample]]:
        return lambda statistics: [
            ((name,), number) for name, feed in feeds(statistics).items() if (number := read(feed)) is not None
        ]

    def read_age(feed: FeedFigures) -> float | None:
        return None if feed.version is None else feed.age

    return [(name, text, ("job",), samples(read)) for name, text, read in (*_OF_FEED, (age, of_age, read_age))]
