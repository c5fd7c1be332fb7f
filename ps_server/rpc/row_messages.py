"""Where the messages of rows become the server's values, and back; see data_messages.py."""

from __future__ import annotations

from ps_protocol.convert import (
    data_ranges,
    duration,
    hyper_parameters,
    known,
    wire_format,
    wire_format_number,
)
from ps_protocol.errors import InvalidRequest
from ps_protocol.framing import Buffer, Parts, message_parts
from ps_protocol.tables import Beginning
from ps_protocol.v1 import rows_pb2
from ps_server.core.commands import Staged
from ps_server.core.consistency import Admission
from ps_server.core.requests import PullPlaces, RowPushKind, RowsPull, RowsPush, TablePull, TablePush
from ps_server.rpc.data_messages import Answers, Request, parse, read, whole
from ps_server.shard.waiting import Answer, Notice, PulledRows, PulledTable

_KINDS: dict[int, RowPushKind] = {
    number: RowPushKind[name.removeprefix("ROW_PUSH_KIND_")] for name, number in rows_pb2.RowPushKind.items() if number
}


def push(data: Request) -> RowsPush:
    """Reads a PushRowsRequest; its payload is a view into the bytes, or the part that came."""
    return _push(*read(rows_pb2.PushRowsRequest, data))


def _push(request: rows_pb2.PushRowsRequest, payload: Buffer | None) -> RowsPush:
    worker, in_segment = request.worker, request.HasField("in_segment")
    if in_segment and payload is not None:
        raise InvalidRequest("rows are in the segment or in the message, got both")
    return RowsPush(
        job=worker.job,
        rank=worker.rank,
        incarnation=worker.incarnation,
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
        key=worker.lease_key,
        run=worker.run,
        place=request.in_segment.offset if in_segment else None,
        assignment=request.assignment,
    )


def pull(data: Request) -> RowsPull:
    """Reads a PullRowsRequest, as `push`."""
    return _pull(*read(rows_pb2.PullRowsRequest, data))


def _pull(request: rows_pb2.PullRowsRequest, payload: Buffer | None) -> RowsPull:
    worker = request.worker
    identity = worker.job, worker.rank, worker.incarnation
    places = None
    if request.HasField("ids_in_segment"):
        if payload is not None or not request.HasField("rows_in_segment"):
            got = "no place for its rows" if payload is None else f"a payload of {len(payload)} bytes"
            raise InvalidRequest(
                f"a pull names places in the segment for both its ids and its rows, and has no payload, got {got}"
            )
        places = PullPlaces(request.ids_in_segment.offset, request.row_count, request.rows_in_segment.offset)
    elif request.HasField("rows_in_segment") or request.row_count:
        raise InvalidRequest("expected rows_in_segment and row_count only with ids_in_segment, got one without")
    return RowsPull(*identity, request.table, request.clock, payload or b"", worker.lease_key, worker.run, places)


def exchange(data: Request) -> tuple[RowsPush, RowsPull]:
    """Reads an ExchangeRowsRequest: what is pushed, and what is pulled."""
    request = parse(rows_pb2.ExchangeRowsRequest, whole(data))
    push = _push(request.push, request.push.payload or None)
    if push.payload or push.count != push.total or push.kind is RowPushKind.ASSIGN:
        raise InvalidRequest(
            "an exchange pushes all rows of a step, and they are in the segment, got "
            f"{push.count} of {push.total} rows and {len(push.payload)} bytes in the message"
        )
    wanted = rows_pb2.PullRowsRequest(worker=request.push.worker, table=push.table, clock=push.clock)
    if request.HasField("ids_in_segment"):
        wanted.ids_in_segment.CopyFrom(request.ids_in_segment)
    if request.HasField("rows_in_segment"):
        wanted.rows_in_segment.CopyFrom(request.rows_in_segment)
    wanted.row_count = request.row_count
    return push, _pull(wanted, None)


def pull_table(data: Request) -> TablePull:
    """Reads a PullTableRequest."""
    request = parse(rows_pb2.PullTableRequest, whole(data))
    worker = request.worker
    identity = worker.job, worker.rank, worker.incarnation
    return TablePull(*identity, request.table, request.clock, request.count_only, worker.lease_key, worker.run)


def push_table(data: Request) -> TablePush:
    """Reads a PushTableRequest, as `push`."""
    request, payload = read(rows_pb2.PushTableRequest, data)
    worker, begins = request.worker, request.beginning
    return TablePush(
        job=worker.job,
        rank=worker.rank,
        incarnation=worker.incarnation,
        table=request.table,
        beginning=Beginning(begins.version, begins.seed, begins.row_count, begins.waiting_count, begins.with_state),
        first=request.first,
        rows=request.row_count,
        waiting=request.waiting_count,
        last=request.last,
        payload=payload or b"",
        key=worker.lease_key,
        run=worker.run,
    )


def begun(answers: Answers, staged: Staged) -> bytes:
    """Returns the bytes of a PushTableResponse."""
    header, had_begun = answers.header(staged.version), staged.duplicate and not staged.kept
    duplicate = staged.duplicate and staged.kept
    response = rows_pb2.PushTableResponse(header=header, duplicate=duplicate, begun=had_begun, seed=staged.seed)
    return response.SerializeToString()


def pushed(answers: Answers, staged: Staged) -> bytes:
    """Returns the bytes of a PushRowsResponse."""
    header = answers.header(staged.version)
    return rows_pb2.PushRowsResponse(header=header, duplicate=staged.duplicate).SerializeToString()


def pulled(answers: Answers, answer: Answer) -> Parts:
    """Returns a PullRowsResponse: rows that are here, or why they do not come yet."""
    assert isinstance(answer, PulledRows)
    response = _pulled(answer)
    response.header.CopyFrom(answers.header(answer.version))
    return message_parts(response, answer.payload)


def exchanged(answers: Answers, answer: Answer) -> Parts:
    """Returns an ExchangeRowsResponse, as `pulled`; or one that says that the push is staged."""
    if isinstance(answer, PulledRows):
        header = answers.header(answer.version)
        return message_parts(rows_pb2.ExchangeRowsResponse(header=header, pulled=_pulled(answer)))
    assert isinstance(answer, Notice)
    response = rows_pb2.ExchangeRowsResponse(header=answers.header(0))
    response.staged_duration.CopyFrom(duration(answer.staged_seconds or 0.0))
    return message_parts(response)


def _pulled(answer: PulledRows) -> rows_pb2.PullRowsResponse:
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


def pulled_table(answers: Answers, answer: Answer) -> Parts:
    """Returns a PullTableResponse: a piece of a table, or why it does not come yet."""
    assert isinstance(answer, PulledTable)
    response = rows_pb2.PullTableResponse(header=answers.header(answer.version))
    if answer.waiting is not None:
        response.waiting.CopyFrom(_notice(answer.waiting))
        return message_parts(response)
    response.row_count, response.seed = answer.rows, answer.seed
    return message_parts(response, answer.payload)


def _notice(waiting: Admission) -> rows_pb2.RowWaitNotice:
    return rows_pb2.RowWaitNotice(awaited_ranks=waiting.waiting_for, reason=waiting.reason)
