"""Pushes, pulls and feeds of rows, and the answers of shards: as values, with functions that write and read their
messages.

As in data.py, the code that uses a request's content checks it.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ps_protocol.batches import DataRange
from ps_protocol.convert import (
    AnsweringShard,
    Awaited,
    Request,
    data_range_messages,
    data_ranges,
    duration,
    hyper_messages,
    hyper_parameters,
    identity,
    identity_message,
    known,
    parse,
    read,
    row_initializer,
    row_initializer_message,
    seconds,
    whole,
    wire_format,
    wire_format_number,
)
from ps_protocol.errors import InvalidRequest
from ps_protocol.framing import Buffer, Parts, message_parts
from ps_protocol.hyper_parameters import HyperParameters
from ps_protocol.identity import Identity
from ps_protocol.messages.data import Notice
from ps_protocol.row_ids import ID_BYTES
from ps_protocol.tables import Beginning, Initializer
from ps_protocol.v1 import feed_pb2, rows_pb2

# -- pushes ------------------------------------------------------------------------------------------------------------


class RowPushKind(enum.Enum):
    """The content of a push of rows."""

    GRADIENT = "gradient"
    NO_GRADIENT = "no_gradient"  # the step has no gradient for the table, which counts as zeros in the mean
    SKIP = "skip"  # the step leaves the table out
    ASSIGN = "assign"  # rows that the script has set, for the step of the same clock


_KINDS: dict[int, RowPushKind] = {
    number: RowPushKind[name.removeprefix("ROW_PUSH_KIND_")] for name, number in rows_pb2.RowPushKind.items() if number
}
_KIND_NUMBERS: dict[RowPushKind, Any] = {kind: number for number, kind in _KINDS.items()}


@dataclass(frozen=True)
class RowsPush:
    """One message of the rows that a worker pushes to a table at its clock.

    table:      the index of the table in the job's list of tables
    payload:    the ids, counts and gradients of `count` rows; for rows that are assigned, the ids and values
    first:      the number of the message's first row among all rows of this kind that the step has on the shard
    total:      the number of all these rows
    values:     hyper-parameters to use from this clock on
    ranges:     the leased data that the step used
    place:      where the payload begins in the worker's segment for rows; None: it is in the message
    assignment: the number of the assignment: of these rows, or the one that the step includes; 0: it includes none
    """

    worker: Identity
    table: int
    clock: int
    kind: RowPushKind
    payload: Buffer
    first: int
    count: int
    total: int
    values: HyperParameters
    ranges: tuple[DataRange, ...] = ()
    wire_format: str = ""
    place: int | None = None
    assignment: int = 0


def write_push(push: RowsPush, more: Sequence[Buffer] = ()) -> Parts:
    """Writes a PushRowsRequest. more: the rest of the payload, where it lies in several places"""
    return message_parts(_push_message(push), push.payload or None, more)


def _push_message(push: RowsPush) -> rows_pb2.PushRowsRequest:
    return rows_pb2.PushRowsRequest(
        worker=identity_message(push.worker),
        table=push.table,
        clock=push.clock,
        kind=_KIND_NUMBERS[push.kind],
        first_row=push.first,
        row_count=push.count,
        total_row_count=push.total,
        hyper_parameters=hyper_messages(push.values),
        ranges=data_range_messages(push.ranges),
        wire_format=wire_format_number(push.wire_format),
        in_segment=None if push.place is None else rows_pb2.RowPlace(offset=push.place),
        assignment=push.assignment,
    )


def read_push(data: Request) -> RowsPush:
    """Reads a PushRowsRequest. The payload is not copied."""
    return _push(*read(rows_pb2.PushRowsRequest, data))


def _push(request: rows_pb2.PushRowsRequest, payload: Buffer | None) -> RowsPush:
    in_segment = request.HasField("in_segment")
    if in_segment and payload is not None:
        raise InvalidRequest("rows are in the segment or in the message, got both")
    return RowsPush(
        worker=identity(request.worker),
        table=request.table,
        clock=request.clock,
        kind=known(_KINDS, request.kind, "kind of push"),
        payload=payload or b"",
        first=request.first_row,
        count=request.row_count,
        total=request.total_row_count,
        values=hyper_parameters(request.hyper_parameters),
        ranges=data_ranges(request.ranges),
        wire_format=wire_format(request.wire_format),
        place=request.in_segment.offset if in_segment else None,
        assignment=request.assignment,
    )


def write_pushed(origin: AnsweringShard, version: int, duplicate: bool) -> bytes:
    """Writes a PushRowsResponse."""
    return rows_pb2.PushRowsResponse(header=origin.header(version), duplicate=duplicate).SerializeToString()


# -- the initial rows of a table ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TablePush:
    """One message with a table's initial content, which rank 0 sends.

    table:     the index of the table in the job's list of tables
    beginning: describes the whole content
    first:     the number of rows and of waiting ids in the messages before
    rows, waiting: how many rows, or ids that wait for admission, are in the payload
    last:      no message follows
    """

    worker: Identity
    table: int
    beginning: Beginning
    first: int
    rows: int
    waiting: int
    last: bool
    payload: Buffer


class TablePushed(NamedTuple):
    """A shard's answer to a TablePush.

    duplicate: the shard had taken this message before
    begun:     the table had begun before with another beginning
    seed:      in this case, the seed of that beginning
    """

    version: int
    duplicate: bool
    begun: bool
    seed: int


def write_table_push(push: TablePush) -> Parts:
    """Writes a PushTableRequest."""
    begins = push.beginning
    request = rows_pb2.PushTableRequest(
        worker=identity_message(push.worker),
        table=push.table,
        beginning=rows_pb2.TableBeginning(
            version=begins.version,
            seed=begins.seed,
            row_count=begins.rows,
            waiting_count=begins.waiting,
            with_state=begins.with_state,
        ),
        first=push.first,
        row_count=push.rows,
        waiting_count=push.waiting,
        last=push.last,
    )
    return message_parts(request, push.payload or None)


def read_table_push(data: Request) -> TablePush:
    """Reads a PushTableRequest, as `read_push`."""
    request, payload = read(rows_pb2.PushTableRequest, data)
    begins = request.beginning
    return TablePush(
        worker=identity(request.worker),
        table=request.table,
        beginning=Beginning(begins.version, begins.seed, begins.row_count, begins.waiting_count, begins.with_state),
        first=request.first,
        rows=request.row_count,
        waiting=request.waiting_count,
        last=request.last,
        payload=payload or b"",
    )


def write_table_pushed(origin: AnsweringShard, answer: TablePushed) -> bytes:
    """Writes a PushTableResponse."""
    header = origin.header(answer.version)
    response = rows_pb2.PushTableResponse(
        header=header, duplicate=answer.duplicate, begun=answer.begun, seed=answer.seed
    )
    return response.SerializeToString()


def read_table_pushed(data: bytes) -> TablePushed:
    """Reads a PushTableResponse."""
    response = rows_pb2.PushTableResponse.FromString(data)
    return TablePushed(response.header.version, response.duplicate, response.begun, response.seed)


# -- pulls -------------------------------------------------------------------------------------------------------------


class PullOffsets(NamedTuple):
    """The offsets of a pull's ids and rows in the worker's segment for rows.

    ids:      the offset of the ids; id_count: their number
    rows:     the offset at which the shard writes the rows
    """

    ids: int
    id_count: int
    rows: int


@dataclass(frozen=True)
class RowsPull:
    """The rows of a table that a worker or a reader pulls at its clock.

    payload: the ids of the rows
    places:  the offsets of ids and rows in the worker's segment; None: they are in messages
    """

    worker: Identity
    table: int
    clock: int
    payload: Buffer
    places: PullOffsets | None = None


@dataclass(frozen=True)
class TablePull:
    """A pull of a whole table at the worker's clock. count_only: only the number of its rows is wanted"""

    worker: Identity
    table: int
    clock: int
    count_only: bool


def write_pull(pull: RowsPull) -> Parts:
    """Writes a PullRowsRequest."""
    request = rows_pb2.PullRowsRequest(worker=identity_message(pull.worker), table=pull.table, clock=pull.clock)
    _name_places(request, pull.places)
    return message_parts(request, pull.payload if pull.places is None else None)


def _name_places(request: rows_pb2.PullRowsRequest | rows_pb2.ExchangeRowsRequest, places: PullOffsets | None) -> None:
    if places is not None:
        request.ids_in_segment.offset, request.row_count = places.ids, places.id_count
        request.rows_in_segment.offset = places.rows


def read_pull(data: Request) -> RowsPull:
    """Reads a PullRowsRequest, as `read_push`."""
    request, payload = read(rows_pb2.PullRowsRequest, data)
    return RowsPull(identity(request.worker), request.table, request.clock, payload or b"", _places(request, payload))


def _places(
    request: rows_pb2.PullRowsRequest | rows_pb2.ExchangeRowsRequest, payload: Buffer | None
) -> PullOffsets | None:
    if request.HasField("ids_in_segment"):
        if payload is not None or not request.HasField("rows_in_segment"):
            got = "no place for its rows" if payload is None else f"a payload of {len(payload)} bytes"
            raise InvalidRequest(
                f"a pull names places in the segment for both its ids and its rows, and has no payload, got {got}"
            )
        return PullOffsets(request.ids_in_segment.offset, request.row_count, request.rows_in_segment.offset)
    if request.HasField("rows_in_segment") or request.row_count:
        raise InvalidRequest("expected rows_in_segment and row_count only with ids_in_segment, got one without")
    return None


def write_exchange(
    push: RowsPush, places: PullOffsets | None, wanted: Buffer = b"", more: Sequence[Buffer] = ()
) -> Parts:
    """Writes an ExchangeRowsRequest: a push of all rows of a step, and a pull of rows of the same table.

    places: as in RowsPull; the pushed rows are in the segment then
    wanted: without `places`, the ids of the pull, of 8 bytes each
    more:   as in `write_push`
    """
    request = rows_pb2.ExchangeRowsRequest(push=_push_message(push))
    _name_places(request, places)
    parts = [part for part in (wanted, push.payload, *more) if len(part)]
    if not parts:
        return message_parts(request)
    request.row_count = len(wanted) // ID_BYTES
    return message_parts(request, parts[0], parts[1:])


def read_exchange(data: Request) -> tuple[RowsPush, RowsPull]:
    """Reads an ExchangeRowsRequest: the push and the pull. The pushed rows are not copied. Raises InvalidRequest if it
    has not all rows of the step, or rows and ids are neither all in the segment nor all in the message.
    """
    request, payload = read(rows_pb2.ExchangeRowsRequest, data)
    size = 0 if payload is None else ID_BYTES * request.row_count
    if payload is not None and size > len(payload):
        raise InvalidRequest(f"expected {request.row_count} ids in the message, got {len(payload)} bytes")
    push = _push(request.push, None if payload is None else payload[size:])
    inner = len(request.push.payload)
    if inner or push.count != push.total or push.kind is RowPushKind.ASSIGN:
        raise InvalidRequest(
            "an exchange pushes all rows of a step, and its push has no payload of its own, got "
            f"{push.count} of {push.total} rows and {inner} bytes in the push"
        )
    if payload is None:
        return push, RowsPull(push.worker, push.table, push.clock, b"", _places(request, None))
    if request.HasField("ids_in_segment") or request.HasField("rows_in_segment"):
        raise InvalidRequest("the ids of an exchange are in the segment or in the message, got both")
    # A copy: a pull that waits must not keep the memory of the pushed rows.
    return push, RowsPull(push.worker, push.table, push.clock, bytes(payload[:size]))


def write_table_pull(pull: TablePull) -> bytes:
    """Writes a PullTableRequest."""
    return rows_pb2.PullTableRequest(
        worker=identity_message(pull.worker), table=pull.table, clock=pull.clock, count_only=pull.count_only
    ).SerializeToString()


def read_table_pull(data: Request) -> TablePull:
    """Reads a PullTableRequest."""
    request = parse(rows_pb2.PullTableRequest, whole(data))
    return TablePull(identity(request.worker), request.table, request.clock, request.count_only)


# -- answers to pulls --------------------------------------------------------------------------------------------------


class PulledRows(NamedTuple):
    """One part of the rows of a pull: consecutive rows, in the order of the pull's ids.

    first:      the position of the part's first row among the ids of the pull
    rows:       the number of rows in the part
    trained:    how many of these have been trained
    in_segment: the rows lie in the worker's segment
    waited, waiting, save_state, payload, wire_format: as in PulledBucket
    """

    version: int = 0
    first: int = 0
    rows: int = 0
    trained: int = 0
    waited: float = 0.0
    waiting: Awaited | None = None
    save_state: bool = False
    payload: memoryview | None = None
    wire_format: str = ""
    in_segment: bool = False


class PulledTable(NamedTuple):
    """A piece of a pulled table.

    rows:    the number of rows that the shard has
    seed:    the seed of rows that are not trained
    waiting: as in PulledBucket
    payload: the next bytes of a safetensors file; None: only the number of rows was asked for
    """

    version: int = 0
    rows: int = 0
    seed: int = 0
    waiting: Awaited | None = None
    payload: memoryview | None = None


def write_pulled(origin: AnsweringShard, answer: PulledRows) -> Parts:
    """Writes a PullRowsResponse: rows, or the reason why they do not come yet."""
    response = _pulled_message(answer)
    response.header.CopyFrom(origin.header(answer.version))
    return message_parts(response, answer.payload)


def _pulled_message(answer: PulledRows) -> rows_pb2.PullRowsResponse:
    if answer.waiting is not None:
        return rows_pb2.PullRowsResponse(waiting=_notice(answer.waiting))
    response = rows_pb2.PullRowsResponse(
        first_row=answer.first,
        row_count=answer.rows,
        trained_count=answer.trained,
        wire_format=wire_format_number(answer.wire_format),
        state_wanted=answer.save_state,
        in_segment=answer.in_segment,
    )
    if answer.waited:
        response.wait_duration.CopyFrom(duration(answer.waited))
    return response


def read_pulled(fields: bytes, payload: memoryview | None) -> PulledRows:
    """Reads one message of the answer to a pull."""
    return _pulled(rows_pb2.PullRowsResponse.FromString(fields), payload)


def _pulled(response: rows_pb2.PullRowsResponse, payload: memoryview | None) -> PulledRows:
    return PulledRows(
        response.header.version,
        response.first_row,
        response.row_count,
        response.trained_count,
        seconds(response.wait_duration),
        _awaited(response.waiting) if response.HasField("waiting") else None,
        response.state_wanted,
        payload,
        wire_format(response.wire_format),
        response.in_segment,
    )


def write_exchanged(origin: AnsweringShard, answer: PulledRows | Notice) -> Parts:
    """Writes an ExchangeRowsResponse: rows, as `write_pulled`, or a notice that the push is staged."""
    if isinstance(answer, PulledRows):
        header = origin.header(answer.version)
        return message_parts(
            rows_pb2.ExchangeRowsResponse(header=header, pulled=_pulled_message(answer)), answer.payload
        )
    response = rows_pb2.ExchangeRowsResponse(header=origin.header(0))
    response.staged_duration.CopyFrom(duration(answer.staged_seconds or 0.0))
    return message_parts(response)


def read_exchanged(fields: bytes) -> tuple[float, PulledRows | None]:
    """Reads one message of the answer to an exchange. Returns the seconds for which the push has been staged, and what
    is said of rows, without their payload; None: nothing is.
    """
    response = rows_pb2.ExchangeRowsResponse.FromString(fields)
    pulled = _pulled(response.pulled, None) if response.HasField("pulled") else None
    return seconds(response.staged_duration), pulled


def write_pulled_table(origin: AnsweringShard, answer: PulledTable) -> Parts:
    """Writes a PullTableResponse: a piece of a table, or the reason why it does not come yet."""
    response = rows_pb2.PullTableResponse(header=origin.header(answer.version))
    if answer.waiting is not None:
        response.waiting.CopyFrom(_notice(answer.waiting))
        return message_parts(response)
    response.row_count, response.seed = answer.rows, answer.seed
    return message_parts(response, answer.payload)


def read_pulled_table(fields: bytes, payload: memoryview | None) -> PulledTable:
    """Reads one message of the answer to a pull of a table."""
    response = rows_pb2.PullTableResponse.FromString(fields)
    waiting = _awaited(response.waiting) if response.HasField("waiting") else None
    return PulledTable(response.header.version, response.row_count, response.seed, waiting, payload)


def _notice(waiting: Awaited) -> rows_pb2.RowWaitNotice:
    return rows_pb2.RowWaitNotice(awaited_ranks=waiting.ranks, reason=waiting.reason)


def _awaited(notice: rows_pb2.RowWaitNotice) -> Awaited:
    return Awaited(tuple(notice.awaited_ranks), notice.reason)


# -- feeds -------------------------------------------------------------------------------------------------------------

PERIOD_SECONDS = 1.0  # between two rounds of a feed, for a reader that names none


@dataclass(frozen=True)
class RowsWatch:
    """The request of a reader that follows a table.

    table:  the table's name
    cursor: the cursor of an earlier round; empty: all rows are wanted
    period: the least time between two rounds, in seconds
    """

    job: str
    table: str
    cursor: bytes
    period: float


class FeedRoundBegin(NamedTuple):
    """The beginning of a round of a feed.

    full:    the round has all rows; False: only those that changed
    version: the number of updates that the table had when the round began
    shards:  the number of shards that share the table
    """

    full: bool
    version: int
    shards: int
    dim: int
    initializer: Initializer


class RowsMessage(NamedTuple):
    """A part of a round of a feed.

    version: that of the round
    begin:   set in the first part of a round
    removed, rows: how many ids of removed rows, and how many rows, are in the payload
    cursor:  set in the last part of a round
    """

    version: int = 0
    begin: FeedRoundBegin | None = None
    removed: int = 0
    rows: int = 0
    wire_format: str = ""
    cursor: bytes = b""
    payload: Buffer | None = None


def write_watch(watch: RowsWatch) -> bytes:
    """Writes a WatchRowsRequest."""
    return feed_pb2.WatchRowsRequest(
        job=watch.job, table=watch.table, cursor=watch.cursor, period_duration=duration(watch.period)
    ).SerializeToString()


def read_watch(data: bytes) -> RowsWatch:
    """Reads a WatchRowsRequest."""
    message = parse(feed_pb2.WatchRowsRequest, data)
    period = seconds(message.period_duration) if message.HasField("period_duration") else PERIOD_SECONDS
    return RowsWatch(message.job, message.table, message.cursor, period)


def write_feed_part(origin: AnsweringShard, part: RowsMessage) -> Parts:
    """Writes a WatchRowsResponse."""
    response = feed_pb2.WatchRowsResponse(
        header=origin.header(part.version),
        removed_count=part.removed,
        row_count=part.rows,
        wire_format=wire_format_number(part.wire_format),
        cursor=part.cursor,
    )
    if part.begin is not None:
        begin = part.begin
        response.begin.full, response.begin.version, response.begin.shard_count = (
            begin.full,
            begin.version,
            begin.shards,
        )
        response.begin.dim = begin.dim
        response.begin.initializer.CopyFrom(row_initializer_message(begin.initializer))
    return message_parts(response, part.payload)


def read_feed_part(fields: bytes, payload: Buffer | None) -> RowsMessage:
    """Reads a WatchRowsResponse."""
    response = feed_pb2.WatchRowsResponse.FromString(fields)
    begin = None
    if response.HasField("begin"):
        sent = response.begin
        initializer = row_initializer(sent.initializer, "of the feed")
        begin = FeedRoundBegin(sent.full, sent.version, sent.shard_count, sent.dim, initializer)
    return RowsMessage(
        response.header.version,
        begin,
        response.removed_count,
        response.row_count,
        wire_format(response.wire_format),
        response.cursor,
        payload,
    )
