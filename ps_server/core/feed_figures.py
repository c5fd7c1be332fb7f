"""Measurements of the readers of a job's weights, on a shard or a relay. For status and metrics; needs no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class RelayFigures:
    """What a relay has reported about itself: RelayStatus in shard.proto.

    readers: the number of its readers, with those of the relays that follow it
    version: the version of its newest edition; None if it has none yet
    behind:  updates that this edition lacks
    """

    name: str
    readers: int
    version: int | None = None
    behind: int = 0


@dataclass(frozen=True)
class AllRelays:
    """The relays of a job.

    shown:   the relays with the most readers
    count:   the number of all relays, shown or not
    readers: the readers of all relays, as these have reported
    """

    shown: tuple[RelayFigures, ...] = ()
    count: int = 0
    readers: int = 0


@dataclass(frozen=True)
class FeedFigures:
    """The readers of a job's weights, and the editions that they get: FeedStatus in shard.proto.

    readers:  how many readers have an edition or wait for one
    version:  the newest edition's version; None if there is no edition
    age:      the age of the newest edition in seconds: see FeedStatus.age_duration
    behind:   updates that the newest edition lacks
    nbytes:   bytes of the editions in memory
    sent:     bytes of elements sent to readers, whole or as changes
    elements: the bytes of these editions if all had been sent whole
    trouble:  why no newer edition comes; empty: no reason is known
    refused:  on a shard, how many editions it has not made, by reason; not in any message
    mapped:   how many readers of this host map the server's memory
    held:     bytes of it that only these readers still use
    relays:   the relays among the readers
    """

    readers: int = 0
    version: int | None = None
    age: float = 0.0
    behind: int = 0
    nbytes: int = 0
    sent: int = 0
    elements: int = 0
    trouble: str = ""
    refused: Mapping[str, int] = field(default_factory=dict)
    mapped: int = 0
    held: int = 0
    relays: AllRelays = field(default_factory=AllRelays)


def of_all_wires(figures: Sequence[FeedFigures]) -> FeedFigures:
    """Returns the figures of a job that is read in several wire formats.

    Versions, ages and distances are the largest of all wire formats; everything else is summed. Relays are
    recorded for the whole job, whatever their wire format, so their figures are not summed.
    """
    return FeedFigures(
        sum(each.readers for each in figures),
        max((each.version for each in figures if each.version is not None), default=None),
        max((each.age for each in figures), default=0.0),
        max((each.behind for each in figures), default=0),
        sum(each.nbytes for each in figures),
        sum(each.sent for each in figures),
        sum(each.elements for each in figures),
        next((each.trouble for each in figures if each.trouble), ""),
        mapped=sum(each.mapped for each in figures),
        held=sum(each.held for each in figures),
        relays=max((each.relays for each in figures), key=lambda relays: relays.count, default=AllRelays()),
    )
