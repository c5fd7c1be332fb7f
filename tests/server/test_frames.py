"""What data connections are made of: headers, sockets, memory for payloads, and what sends."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from ps_frames.frames import (
    HEADER_BYTES,
    MAX_HEAD_BYTES,
    Header,
    Kind,
    PlainSocket,
    frames_over,
    read_header,
    write_header,
)
from ps_frames.loans import Loans
from ps_frames.server import FrameSender, LentFrame, ReceiveBuffers
from ps_protocol.errors import InvalidRequest
from ps_protocol.framing import Buffer, Parts, message_parts, split_head, split_message
from ps_protocol.v1 import data_pb2
from tests.tools.cluster import until

SECONDS = 20.0


# -- messages ----------------------------------------------------------------------------------------------------------


def test_a_header_comes_back_as_it_was_written() -> None:
    written = write_header(7, Kind.PUSH, 30, 2**32)
    assert len(written) == HEADER_BYTES
    header = read_header(written, 2**33)
    assert header == Header(7, 30 + 2**32, 30, Kind.PUSH)
    assert header.payload_bytes == 2**32


@pytest.mark.parametrize(
    ("size", "head", "says"),
    [(101, 1, "may have 100 bytes here, and a frame announces 101"), (5, 6, "up to 5 before its payload, got 6")],
)
def test_sizes_that_cannot_be_are_refused(size: int, head: int, says: str) -> None:
    written = bytearray(write_header(1, Kind.PULL, head))
    written[4:12] = size.to_bytes(8, "little")
    with pytest.raises(InvalidRequest, match=says):
        read_header(written, 100)
    with pytest.raises(InvalidRequest, match="before its payload"):
        read_header(write_header(1, Kind.PULL, MAX_HEAD_BYTES + 1), 2**40)


def test_the_fields_of_a_message_are_known_before_its_payload_is_there() -> None:
    header = data_pb2.PushHeader(clock=3)
    parts = message_parts(data_pb2.PushRequest(header=header), b"elements")
    assert data_pb2.PushRequest.FromString(parts.whole()).payload == b"elements"
    fields = split_head(parts.head, len(b"elements"))
    assert fields == split_message(parts.whole())[0] == data_pb2.PushRequest(header=header).SerializeToString()
    empty = message_parts(data_pb2.PushRequest(header=header), b"")
    assert split_head(empty.whole(), 0) == fields
    assert message_parts(data_pb2.PushRequest(header=header)) == Parts(fields)


@pytest.mark.parametrize(
    ("head", "size", "says"),
    [
        (b"\x0a\x00", 3, "does not end with a payload of the 3 bytes"),
        (b"\x0a\x00\x7a\x04", 3, "does not end with a payload of the 3 bytes"),
        (b"\x7a\x01x\x7a\x03", 3, "its payload twice"),
        (b"\x7a\x01x", 0, "a payload of 1 bytes where none was announced"),
        (b"", 3, "does not end with"),
    ],
)
def test_a_head_that_announces_another_payload_is_refused(head: bytes, size: int, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        split_head(head, size)


# -- memory ------------------------------------------------------------------------------------------------------------


def test_memory_comes_back_when_nothing_refers_to_it() -> None:
    buffers = ReceiveBuffers(1000)
    lent = buffers.take(100)
    where = torch.frombuffer(lent, dtype=torch.uint8).data_ptr()
    part = torch.frombuffer(lent[10:20], dtype=torch.uint8)[2:]
    other = buffers.take(100)
    assert torch.frombuffer(other, dtype=torch.uint8).data_ptr() != where
    del lent
    part.fill_(7)  # a tensor over a part of it keeps all
    del other
    assert torch.frombuffer(buffers.take(100), dtype=torch.uint8).data_ptr() != where
    del part
    assert torch.frombuffer(buffers.take(100), dtype=torch.uint8).data_ptr() == where


def test_no_more_is_kept_than_there_is_room_for() -> None:
    buffers = ReceiveBuffers(250)
    lent = [buffers.take(100) for _ in range(5)]
    lent.clear()
    assert buffers._kept == 2 * 104
    kept = [buffers.take(100) for _ in range(2)]
    assert buffers._kept == 0
    assert len(kept) == 2


def test_sizes_that_do_not_come_again_take_the_room_of_no_others() -> None:
    buffers = ReceiveBuffers(250)
    for size in (16, 32, 64, 128):
        buffers.take(size)
    lent = buffers.take(200)
    where = torch.frombuffer(lent, dtype=torch.uint8).data_ptr()
    del lent
    assert torch.frombuffer(buffers.take(200), dtype=torch.uint8).data_ptr() == where
    assert buffers._kept <= 250
    assert len(buffers._free) == 1, "a size of which nothing is kept is forgotten"


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 100, 4097, 2**20 + 1, 8 * 2**20])
def test_memory_is_lent_in_the_size_that_was_asked_for_and_serves_sizes_near_it(size: int) -> None:
    buffers = ReceiveBuffers(2**24)
    assert len(buffers.take(size)) == size
    assert size <= buffers._kept <= size * 9 / 8
    assert len(buffers.take(size)) == size
    assert len(buffers._free) == 1


def test_rows_of_nearly_as_many_bytes_lie_in_the_same_memory() -> None:
    buffers = ReceiveBuffers(2**24)
    where = {torch.frombuffer(buffers.take(size), dtype=torch.uint8).data_ptr() for size in (10_100, 10_200, 10_050)}
    assert len(where) == 1


# -- sending -----------------------------------------------------------------------------------------------------------


class Ends:
    """Both ends of a connection: ours sends through a FrameSender, theirs is read by hand."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        ours, self.theirs = socket.socketpair()
        self.theirs.settimeout(SECONDS)
        self.frames = PlainSocket(ours)
        self.limited = 0
        self.sender = FrameSender(self.frames, pool, self._limit)

    @contextlib.contextmanager
    def _limit(self) -> Iterator[None]:
        self.limited += 1
        yield

    def read(self, count: int) -> bytes:
        received = b""
        while len(received) < count:
            piece = self.theirs.recv(count - len(received))
            assert piece
            received += piece
        return received

    def close(self) -> None:
        """Ends both; the pool's threads leave them alone then."""
        self.sender.end()
        self.frames.abort()
        self.theirs.close()
        self.sender.close()


@pytest.fixture
def ends() -> Iterator[Ends]:
    with ThreadPoolExecutor(2) as pool:
        found = Ends(pool)
        yield found
        found.close()


def test_small_frames_leave_in_the_thread_that_puts_them(ends: Ends) -> None:
    here: list[int] = []
    for _ in range(3):
        ends.sender.put([b"frame", b""], lambda: here.append(threading.get_ident()))
    assert here == [threading.get_ident()] * 3
    assert ends.read(15) == b"frame" * 3
    assert ends.limited == 0


def test_what_is_put_together_leaves_in_one_piece(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    pieces: list[int] = []
    send_now = ends.frames.send_now

    def counted(parts: Sequence[Buffer]) -> list[memoryview]:
        pieces.append(sum(map(len, parts)))
        return send_now(parts)

    monkeypatch.setattr(ends.frames, "send_now", counted)
    here: list[str] = []
    with ends.sender.together():
        ends.sender.put([b"answer", b"payload"], lambda: here.append("answer"))
        ends.sender.put([b"end"], lambda: here.append("end"))
        assert not here
    assert (here, pieces) == (["answer", "end"], [16])
    assert ends.read(16) == b"answerpayloadend"
    with ends.sender.together():
        for _ in range(3):
            ends.sender.put([bytes(2**15), b"."])
    assert pieces[1:] == [2 * (2**15 + 1), 2**15 + 1], "large ones go by themselves"
    with ends.sender.together():
        for _ in range(1000):
            ends.sender.put([b"x", b"y"])
    assert max(pieces[3:]) < 300, "of fewer parts than the kernel takes"
    ends.read(3 * (2**15 + 1) + 2000)


def test_what_is_put_together_and_does_not_fit_is_called_back_once_it_is_gone(ends: Ends) -> None:
    sent = threading.Event()
    with ends.sender.together():
        ends.sender.put([bytes(2**22)])
        ends.sender.put([b"end"], sent.set)
        ends.sender.lend(lambda: contextlib.nullcontext(([b"lent"], None)))
    assert not sent.is_set()
    ends.read(2**22)
    assert ends.read(7) == b"endlent"
    assert sent.wait(SECONDS)


def test_an_end_while_frames_are_held_together_drops_them(ends: Ends) -> None:
    with ends.sender.together():
        ends.sender.put([b"frame"])
        ends.sender.end()
    ends.theirs.setblocking(False)
    with pytest.raises(BlockingIOError):
        ends.theirs.recv(1)
    ends.theirs.settimeout(SECONDS)


def test_frames_keep_their_order_whatever_fits(ends: Ends) -> None:
    large = bytes(range(256)) * 2**14
    sent = threading.Event()
    ends.sender.put([b"first", large])
    ends.sender.put([b"second"])
    ends.sender.lend(lambda: contextlib.nullcontext(([b"third", large], None)))
    ends.sender.put([b"last"], sent.set)
    assert not sent.is_set()
    assert ends.read(5) + ends.read(len(large)) == b"first" + large
    assert ends.read(6) == b"second"
    assert ends.read(5) + ends.read(len(large)) == b"third" + large
    assert ends.read(4) == b"last"
    assert sent.wait(SECONDS)
    assert ends.limited, "somebody watches over what waits"


def test_lent_memory_is_copied_only_if_its_owner_wants_it_back_before_the_other_end_has_read(ends: Ends) -> None:
    memory = bytearray(b"x" * 2**22)
    loans, lent, sent = Loans(), threading.Event(), threading.Event()

    @contextlib.contextmanager
    def lender() -> Iterator[LentFrame]:
        with loans.lend() as loan:
            lent.set()
            yield [memoryview(memory)], loan
        sent.set()

    for turn, changes in enumerate((True, False, True), 1):
        ends.sender.lend(lender)
        assert lent.wait(SECONDS)
        until(lambda turn=turn: ends.limited == turn, "that the kernel takes no more")  # type: ignore[misc]
        if changes:
            loans.recall()
            memory[:] = b"y" * len(memory)  # as an update would
        assert not sent.is_set(), "more than the kernel takes at once"
        assert set(ends.read(len(memory))) == set(b"x")
        assert sent.wait(SECONDS)
        assert not loans._open
        memory[:] = b"x" * len(memory)
        lent.clear()
        sent.clear()
    assert ends.limited == 3, "one limit for a whole frame, however often the sender waits"


def test_each_of_several_that_read_slowly_gets_the_memory_as_it_was_when_it_was_lent() -> None:
    memory, loans = bytearray(2**22), Loans()

    @contextlib.contextmanager
    def lender() -> Iterator[LentFrame]:
        with loans.lend() as loan:
            yield [memoryview(memory)], loan

    with ThreadPoolExecutor(8) as pool, contextlib.ExitStack() as to_close:
        several = [Ends(pool) for _ in range(8)]
        for each in several:
            to_close.callback(each.close)
        for version, each in enumerate(several):
            each.sender.lend(lender)
            until(lambda version=version: len(loans._open) == 1, f"loan {version}")  # type: ignore[misc]
            loans.recall()
            memory[:] = bytes([version + 1]) * len(memory)
        for version, each in enumerate(several):
            assert set(each.read(len(memory))) == {version}


def test_a_loan_ends_with_its_connection(ends: Ends) -> None:
    loans, lent, ended = Loans(), threading.Event(), threading.Event()

    @contextlib.contextmanager
    def lender() -> Iterator[LentFrame]:
        try:
            with loans.lend() as loan:
                lent.set()
                yield [bytes(2**22)], loan
        finally:
            ended.set()

    ends.sender.lend(lender)
    assert lent.wait(SECONDS)
    ends.frames.abort()
    assert ended.wait(SECONDS)
    loans.recall()
    assert not loans._open


def test_a_connection_that_ends_drops_what_is_queued(ends: Ends) -> None:
    ends.sender.put([bytes(2**22)])
    ends.theirs.close()
    until(lambda: ends.sender._is_over, "its end")
    ends.sender.put([b"more"])
    assert not ends.sender._queue
    with pytest.raises(BrokenPipeError):
        ends.frames.send([b"more"])


def test_both_directions_move_at_once(ends: Ends) -> None:
    ours, theirs = socket.socketpair()
    one, other = frames_over(ours), frames_over(theirs)
    content = torch.arange(2**20, dtype=torch.int32).numpy().tobytes()
    received = [bytearray(len(content)) for _ in range(2)]
    with ThreadPoolExecutor(4) as pool:
        work = [pool.submit(end.receive_into, memoryview(to)) for end, to in zip((one, other), received, strict=True)]
        work += [pool.submit(end.send, [content[:7], content[7:]]) for end in (one, other)]
        for each in work:
            each.result(SECONDS)
    one.close()
    other.close()
    assert received == [content, content]
