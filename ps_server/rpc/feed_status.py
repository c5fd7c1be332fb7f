"""FeedFigures of shards and relays, as values and as messages. Needs no torch."""

from __future__ import annotations

from ps_protocol.convert import duration, seconds
from ps_protocol.v1 import shard_pb2
from ps_server.core.feed_figures import AllRelays, FeedFigures, RelayFigures


def feed_message(figures: FeedFigures) -> shard_pb2.FeedStatus:
    """Returns the message of the measurements of a job's readers."""
    return shard_pb2.FeedStatus(
        reader_count=figures.readers,
        edition_version=figures.version,
        age_duration=None if figures.version is None else duration(figures.age),
        behind=figures.behind,
        size_bytes=figures.nbytes,
        sent_bytes=figures.sent,
        element_bytes=figures.elements,
        trouble=figures.trouble,
        mapped_reader_count=figures.mapped,
        held_bytes=figures.held,
        relays=[_relay_message(each) for each in figures.relays.shown],
        relay_count=figures.relays.count,
        relayed_reader_count=figures.relays.readers,
    )


def _relay_message(relay: RelayFigures) -> shard_pb2.RelayStatus:
    return shard_pb2.RelayStatus(
        name=relay.name, reader_count=relay.readers, edition_version=relay.version, behind=relay.behind
    )


def feed_figures(message: shard_pb2.FeedStatus) -> FeedFigures:
    """Reads the measurements of a job's readers from a message."""
    relays = tuple(_relay_figures(each) for each in message.relays)
    return FeedFigures(
        message.reader_count,
        message.edition_version if message.HasField("edition_version") else None,
        seconds(message.age_duration),
        message.behind,
        message.size_bytes,
        message.sent_bytes,
        message.element_bytes,
        message.trouble,
        mapped=message.mapped_reader_count,
        held=message.held_bytes,
        relays=AllRelays(relays, message.relay_count, message.relayed_reader_count),
    )


def _relay_figures(message: shard_pb2.RelayStatus) -> RelayFigures:
    version = message.edition_version if message.HasField("edition_version") else None
    return RelayFigures(message.name, message.reader_count, version, message.behind)
