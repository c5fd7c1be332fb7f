"""The messages for editions of weights: the requests of readers, and the answers of shards and relays."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from ps_protocol.convert import (
    AnsweringShard,
    duration,
    job_spec,
    job_spec_message,
    parse,
    seconds,
    wire_format,
    wire_format_number,
)
from ps_protocol.errors import InvalidRequest
from ps_protocol.framing import Buffer, Parts, message_parts
from ps_protocol.handover import MappingOffer
from ps_protocol.job import JobSpec
from ps_protocol.v1 import feed_pb2

LEAST_PART_BYTES = 2**16  # the least payload of a message: each message costs both ends some time
MOST_REPORTED_READERS = 1_000_000  # the highest number of readers that a relay may report
_RELAY_NAME = re.compile(r"[A-Za-z0-9.:_%\[\]-]{1,128}")


class RelayReport(NamedTuple):
    """What a relay says of itself. Nobody checks it.

    name:    the address at which readers reach it, or one with the name of its host
    readers: its own, and those of relays behind it, up to MOST_REPORTED_READERS
    version: that of its newest edition; None if there is none of the job's present run and timeline
    """

    name: str
    readers: int
    version: int | None = None


class WeightsAsked(NamedTuple):
    """A reader's question about a job's weights.

    run:       the run of the job; empty: any
    with_spec: the answer must have the job's spec
    wire:      the type in which float32 elements are to travel later: relays pull these
    follows:   keep the last weights of `buckets` when the job ends
    buckets:   the indices of the buckets that the reader will ask for; empty: all
    relay:     what the reader says of itself if it is a relay
    """

    job: str
    run: str = ""
    with_spec: bool = False
    wire: str = "float32"
    follows: bool = False
    buckets: tuple[int, ...] = ()
    relay: RelayReport | None = None


class WeightsHere(NamedTuple):
    """The description of a job's weights on a shard or a relay.

    lowest, highest: the versions of the buckets that an optimizer steps
    timeline: a number that changes when the job is rolled back to a checkpoint
    shards:   the number of shards that share the job
    buckets:  the indices of the buckets on this shard or relay
    has_one_version: all buckets of an edition are of one version
    editions: the versions of the editions that are kept, or that readers wait for
    spec:     the job; None: the request did not ask for it
    ended:    the job has ended: these are its last weights
    age:      for a relay: the seconds since it last knew that `lowest`, the version of its edition, is the newest;
              None: a shard answers
    buffers:  by bucket that no optimizer steps, the number of steps of rank 0 after which it last sent the content
    """

    run: str
    lowest: int
    highest: int
    timeline: int
    shards: int
    buckets: tuple[int, ...]
    has_one_version: bool
    editions: tuple[int, ...]
    spec: JobSpec | None = None
    ended: bool = False
    age: float | None = None
    buffers: Mapping[int, int] = MappingProxyType({})

    @property
    def is_relayed(self) -> bool:
        """Whether a relay answers. A relay sends an edition of the version that it is asked for, or of a later one."""
        return self.age is not None

    def may_have(self, version: int) -> bool:
        """Whether the shard has an edition of this version, or can still take one."""
        return version in self.editions or version >= self.highest


class EditionCall(NamedTuple):
    """A reader's request for an edition of a job's weights on a shard.

    run:      the run of the job; empty: the current run
    timeline: the timeline to which `version` belongs
    version:  the number of updates of each bucket, if editions are of one version; otherwise the least number
    wire:     the type in which float32 elements travel
    buckets:  the indices of the wanted buckets; empty: all
    bases:    by bucket, the version that the reader has, on this timeline and in this type: the shard may send only the
              change since then
    part_bytes: the most bytes of a payload in one message; 0: no limit
    sparse:   changes may be sparse
    mapping:  the offer to map the edition's memory, for a relay of this host; None: send payloads
    """

    job: str
    run: str
    timeline: int
    version: int
    wire: str
    buckets: tuple[int, ...]
    bases: Mapping[int, int] = MappingProxyType({})
    part_bytes: int = 0
    mapping: MappingOffer | None = None
    sparse: bool = False


class BucketOffset(NamedTuple):
    """The position of a bucket's elements in memory that a relay has handed over: the file, and the offset in it in
    bytes.
    """

    file: int
    offset: int


class EditionBegin(NamedTuple):
    """The beginning of an edition: its lowest version, the timeline to which this belongs, and the number of its
    buckets.
    """

    version: int
    timeline: int
    buckets: int


class EditionBucket(NamedTuple):
    """A bucket of an edition, by its index, with the number of its updates and the CRC-32 of its elements.

    wire_format: that of the elements; empty: the bucket's own type
    payload:     the elements; if there is a base, the change since it
    base:        the version of the base; None if the bucket is sent whole
    payload_bytes: the bytes of the whole payload, if `payload` is its beginning; None: `payload` is complete
    lies:        the position of the elements in memory that is handed over, without a payload; None: there is a payload
    sparse:      the payload is a sparse change
    """

    bucket: int
    version: int
    wire_format: str
    checksum: int
    payload: Buffer
    base: int | None = None
    payload_bytes: int | None = None
    lies: BucketOffset | None = None
    sparse: bool = False


class EditionMessage(NamedTuple):
    """One message of an edition: its beginning, a bucket, or more of a payload. With none of these, the message only
    shows that the sender is alive.

    now: the lowest version of the job's buckets on the shard
    age: for a relay, see WeightsHere
    more: the continuation of the payload of the bucket before
    """

    now: int
    begin: EditionBegin | None = None
    bucket: EditionBucket | None = None
    age: float | None = None
    more: Buffer | None = None


def is_relay_name(name: str) -> bool:
    """Whether a relay may have this name."""
    return _RELAY_NAME.fullmatch(name) is not None


def _relay_message(report: RelayReport | None) -> feed_pb2.RelayReport | None:
    if report is None:
        return None
    readers = min(report.readers, MOST_REPORTED_READERS)
    return feed_pb2.RelayReport(name=report.name, reader_count=readers, edition_version=report.version)


def _relay_report(message: feed_pb2.RelayReport) -> RelayReport:
    """Reads what a relay says of itself. Raises InvalidRequest for a name that no relay may have."""
    if not is_relay_name(message.name):
        raise InvalidRequest("the name of a relay must be an address of 1 to 128 characters")
    version = message.edition_version if message.HasField("edition_version") else None
    return RelayReport(message.name, min(message.reader_count, MOST_REPORTED_READERS), version)


def write_weights_asked(asked: WeightsAsked) -> bytes:
    """Writes a DescribeWeightsRequest."""
    return feed_pb2.DescribeWeightsRequest(
        job=asked.job,
        run=asked.run,
        with_spec=asked.with_spec,
        wire_format=wire_format_number(asked.wire),
        follows=asked.follows,
        buckets=asked.buckets,
        relay=_relay_message(asked.relay),
    ).SerializeToString()


def read_weights_asked(data: bytes) -> WeightsAsked:
    """Reads a DescribeWeightsRequest."""
    message = parse(feed_pb2.DescribeWeightsRequest, data)
    wire, buckets = _cast(message.wire_format), tuple(message.buckets)
    relay = _relay_report(message.relay) if message.HasField("relay") else None
    return WeightsAsked(message.job, message.run, message.with_spec, wire, message.follows, buckets, relay)


def write_weights_here(origin: AnsweringShard, here: WeightsHere) -> bytes:
    """Writes a DescribeWeightsResponse."""
    return feed_pb2.DescribeWeightsResponse(
        header=origin.of(here.run).header(here.lowest),
        highest_version=here.highest,
        timeline=here.timeline,
        shard_count=here.shards,
        buckets=here.buckets,
        has_one_version=here.has_one_version,
        edition_versions=here.editions,
        spec=None if here.spec is None else job_spec_message(here.spec),
        ended=here.ended,
        relayed=here.is_relayed,
        age_duration=None if here.age is None else duration(here.age),
        buffer_versions=here.buffers,
    ).SerializeToString()


def read_weights_here(data: bytes) -> WeightsHere:
    """Reads a DescribeWeightsResponse."""
    answer = parse(feed_pb2.DescribeWeightsResponse, data)
    return WeightsHere(
        answer.header.run,
        answer.header.version,
        answer.highest_version,
        answer.timeline,
        answer.shard_count,
        tuple(answer.buckets),
        answer.has_one_version,
        tuple(answer.edition_versions),
        job_spec(answer.spec) if answer.HasField("spec") else None,
        answer.ended,
        seconds(answer.age_duration) if answer.relayed else None,
        dict(answer.buffer_versions),
    )


def write_edition_call(call: EditionCall) -> bytes:
    """Writes a PullEditionRequest."""
    offer = call.mapping
    mapping = None if offer is None else feed_pb2.MappingOffer(**vars(offer))
    return feed_pb2.PullEditionRequest(
        job=call.job,
        run=call.run,
        timeline=call.timeline,
        version=call.version,
        wire_format=wire_format_number(call.wire),
        buckets=call.buckets,
        base_versions=call.bases,
        part_bytes=call.part_bytes,
        mapping=mapping,
        sparse_changes=call.sparse,
    ).SerializeToString()


def read_edition_call(data: bytes) -> EditionCall:
    """Reads a PullEditionRequest."""
    message = parse(feed_pb2.PullEditionRequest, data)
    wire = _cast(message.wire_format)
    what = message.job, message.run, message.timeline, message.version
    most = message.part_bytes and max(message.part_bytes, LEAST_PART_BYTES)
    offer = message.mapping
    of_offer = offer.location, offer.socket_inode, offer.nonce, offer.reader
    mapping = MappingOffer(*of_offer) if message.HasField("mapping") else None
    bases = dict(message.base_versions)
    return EditionCall(*what, wire, tuple(message.buckets), bases, most, mapping, message.sparse_changes)


def in_messages(bucket: EditionBucket, most: int) -> tuple[EditionBucket, list[Buffer]]:
    """Returns the bucket for its first message, and the rest of its payload for later messages, the last one first.

    most: bytes of a payload in one message; 0: no limit
    """
    size = len(bucket.payload)
    if not most or size <= most:
        return bucket, []
    whole = memoryview(bucket.payload)
    later: list[Buffer] = [whole[start : start + most] for start in reversed(range(most, size, most))]
    return bucket._replace(payload=whole[:most], payload_bytes=size), later


def _cast(number: int) -> str:
    return wire_format(number, "wire format of an edition") or "float32"


def write_edition_part(origin: AnsweringShard, part: EditionMessage) -> Parts:
    """Writes a PullEditionResponse."""
    age = None if part.age is None else duration(part.age)
    response, payload = feed_pb2.PullEditionResponse(header=origin.header(part.now), age_duration=age), part.more
    if part.begin is not None:
        begin = part.begin
        sent = feed_pb2.EditionBegin(version=begin.version, timeline=begin.timeline, bucket_count=begin.buckets)
        response.begin.CopyFrom(sent)
    elif part.bucket is not None:
        bucket, payload = part.bucket, part.bucket.payload
        response.bucket.bucket, response.bucket.version = bucket.bucket, bucket.version
        response.bucket.checksum = bucket.checksum
        response.bucket.wire_format = wire_format_number(bucket.wire_format)
        if bucket.base is not None:
            response.bucket.base_version = bucket.base
        response.bucket.payload_bytes = bucket.payload_bytes or 0
        if bucket.lies is not None:
            response.bucket.file, response.bucket.offset = bucket.lies
        response.bucket.sparse = bucket.sparse
    return message_parts(response, payload)


def read_edition_part(fields: bytes, payload: Buffer | None) -> EditionMessage:
    """Reads a PullEditionResponse."""
    message = parse(feed_pb2.PullEditionResponse, fields)
    now, age = message.header.version, seconds(message.age_duration) if message.HasField("age_duration") else None
    if message.HasField("begin"):
        begin = message.begin
        return EditionMessage(now, EditionBegin(begin.version, begin.timeline, begin.bucket_count), age=age)
    if not message.HasField("bucket"):
        return EditionMessage(now, age=age, more=payload)
    sent = message.bucket
    bucket = EditionBucket(
        sent.bucket,
        sent.version,
        wire_format(sent.wire_format),
        sent.checksum,
        b"" if payload is None else payload,
        sent.base_version if sent.HasField("base_version") else None,
        sent.payload_bytes or None,
        BucketOffset(sent.file, sent.offset) if sent.HasField("file") else None,
        sent.sparse,
    )
    return EditionMessage(now, bucket=bucket, age=age)
