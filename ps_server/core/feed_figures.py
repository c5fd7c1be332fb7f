"""How a job's weights are read on a shard, or from a relay, for people who watch. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class FeedFigures:
    """How a job's weights are read: FeedStatus in shard.proto.

    readers:  that have an edition or wait for one
    version:  of the newest edition; None: there is none
    age:      seconds, see FeedStatus.age_duration
    behind:   updates that the newest edition lacks
    nbytes:   of editions in memory
    sent:     bytes that readers were sent of elements, or of what changed in them; elements: as if all had come whole
    trouble:  why no newer edition comes; empty: nothing is known to be in the way
    refused:  editions that this process has not taken, by why: of a shard; no message has them
    mapped:   readers that have a relay's memory mapped; held: bytes of it that the relay keeps no more
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


def of_all_wires(figures: Sequence[FeedFigures]) -> FeedFigures:
    """Returns the figures of a job that is read in several wire formats: of versions, ages and distances the largest,
    of all else the sum."""
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
    )
