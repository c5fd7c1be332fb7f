"""Where rows of a pull over a data connection are received, and what counts of an answer that does not come whole."""

from __future__ import annotations

import logging
import socket
from functools import partial
from typing import Any

import pytest
import torch

from ps_frames.client import ClientConnection, reading_threads
from ps_frames.frames import HEADER_BYTES, Kind, frame, frames_over, read_header
from ps_protocol.convert import AnsweringShard
from ps_protocol.errors import InvalidRequest
from ps_protocol.framing import Parts, split_message
from ps_protocol.messages import rows
from ps_protocol.messages.rows import PulledRows
from ps_protocol.tensors import PLAIN, bytes_of
from ps_runtime.grpc_status import CallFailed
from ps_runtime.troubles import Troubles
from ps_worker.cluster.landing import RowLanding
from ps_worker.cluster.row_transport import _land

COUNT, DIM = 6, 4
ROWS = torch.arange(COUNT * DIM, dtype=torch.float32).view(COUNT, DIM)


class Landed:
    """A pull of rows, and where they belong."""

    def __init__(self, wire: str = "float32") -> None:
        self.out = torch.full((COUNT, DIM), -1.0)
        land = partial(_land, self.out, slice(0, COUNT))
        troubles = Troubles(logging.getLogger("ps_worker"), None)
        request = Parts(b"request")
        self.landing = RowLanding("shard 0", request, COUNT, DIM, PLAIN[wire], land, None, troubles, self.out)


def answer(first: int, count: int, wire: str = "float32", other: dict[str, Any] | None = None) -> Parts:
    payload = bytes_of(PLAIN[wire].encode(ROWS[first : first + count].reshape(-1)))
    wire_format = "" if wire == "float32" else wire
    pulled = PulledRows(1, first, count, payload=payload, wire_format=wire_format)._replace(**other or {})
    return rows.write_pulled(AnsweringShard(0, 1), pulled)


def test_rows_are_received_where_they_belong(monkeypatch: pytest.MonkeyPatch) -> None:
    pull, copied = Landed(), []
    monkeypatch.setattr(torch.Tensor, "copy_", lambda to, rows: copied.append(rows))
    for first, count in ((2, 4), (0, 2)):
        part = answer(first, count)
        assert part.payload is not None
        place = pull.landing.place(part.head, len(part.payload))
        assert place is not None
        place[:] = part.payload
        is_over = pull.landing.take(place)
    assert is_over
    assert torch.equal(pull.out, ROWS)
    assert copied == []


def test_rows_of_another_type_are_received_elsewhere_and_converted() -> None:
    pull, part = Landed("bfloat16"), answer(0, COUNT, "bfloat16")
    assert part.payload is not None
    assert pull.landing.place(part.head, len(part.payload)) is None
    assert pull.landing.take(memoryview(part.payload))
    assert torch.equal(pull.out, ROWS)


@pytest.mark.parametrize(
    "other", [{"first": 3}, {"rows": 5}, {"first": 2**40}, {"wire_format": "bfloat16"}, {"in_segment": True}]
)
def test_what_was_not_asked_for_is_refused_and_written_nowhere(other: dict[str, Any]) -> None:
    pull, part = Landed(), answer(0, 4, other=other)
    assert part.payload is not None
    assert pull.landing.place(part.head, len(part.payload)) is None
    with pytest.raises(InvalidRequest, match="expected 6 rows of 4 x float32"):
        pull.landing.take(memoryview(part.payload))
    assert pull.out.eq(-1.0).all()


def test_rows_of_which_a_part_came_are_missing_until_the_pull_is_repeated() -> None:
    ours, shard = socket.socketpair()
    reading, pull = reading_threads(), Landed()
    connection = ClientConnection(frames_over(ours), reading)
    reading.close()
    call = connection.call(Kind.PULL_ROWS, pull.landing.request(), pull.landing, 20.0)
    header = read_header(shard.recv(HEADER_BYTES, socket.MSG_WAITALL), 2**30)
    assert shard.recv(header.size, socket.MSG_WAITALL) == b"request"
    half = b"".join(frame(header.call, Kind.ANSWER, answer(0, COUNT)))[:-DIM]
    shard.sendall(half)
    shard.close()
    with pytest.raises(CallFailed):
        call.done.result(20.0)
    assert not pull.landing.is_done
    pull.landing.begin()
    pull.landing.message(*split_message(answer(0, COUNT).whole()))
    assert pull.landing.is_done
    assert torch.equal(pull.out, ROWS)
