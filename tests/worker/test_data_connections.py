"""A worker's data connections: which it opens, and what it does when one ends in the middle of whatever."""

from __future__ import annotations

import itertools
import logging
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
import torch
from google.rpc import code_pb2
from torch import nn

from ps_frames import client
from ps_frames.client import ClientConnection, EachAnswer, OneAnswer, reading_threads
from ps_frames.frames import HEADER_BYTES, ConnectionOffer, Kind, frames_over, read_header, write_header
from ps_frames.server import FrameSender
from ps_protocol.errors import InvalidRequest, Unreachable
from ps_protocol.framing import Buffer, Parts
from ps_runtime.grpc_status import CallFailed
from ps_server.ops import requests, status_text
from ps_worker import Session
from ps_worker.cluster import calls
from tests.tools.cases import cases
from tests.tools.cluster import Cluster, scrape, until
from tests.tools.lines import before_line


def connections(session: Session) -> list[ClientConnection | None]:
    """Of each shard, the session's data connection."""
    training: Any = session._strategy._training  # type: ignore[attr-defined]
    links = [each._link for each in training.participation.connection._calls.values()]
    return [link and link._data for link in links]


def trained(session: Session, steps: int, each: Callable[[int], None] = lambda step: None) -> torch.Tensor:
    """The weights after steps of a model with several buckets, all of which have the same gradients."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 4))
    model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01), bucket_bytes=4096)
    for step in range(steps):
        each(step)
        torch.manual_seed(step)
        optimizer.zero_grad()
        model(torch.randn(8, 64)).square().mean().backward()
        optimizer.step()
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def trained_by_grpc(shared: Cluster, job: str, steps: int) -> torch.Tensor:
    """The weights of `trained` without data connections."""
    with shared.connect("sync", job=f"{job}-grpc", transport="grpc") as session:
        return trained(session, steps)


# -- which is opened -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("transport", "opened"), [("shm", True), ("tcp", True), ("auto", True), ("grpc", False)])
def test_every_transport_trains_the_same_model(shared: Cluster, job: str, transport: str, opened: bool) -> None:
    with shared.connect("sync", job=f"{job}-{transport}", transport=transport) as session:
        found = trained(session, 3)
        assert [each is not None and each.is_open for each in connections(session)] == [opened] * 2
    with shared.connect("sync", job=f"{job}-{transport}-by-grpc", transport="grpc") as session:
        assert torch.equal(found, trained(session, 3))


def test_where_the_port_is_closed_off_grpc_is_used_and_status_says_so(
    make_cluster: Callable[..., Cluster], tmp_path: Any, caplog: pytest.LogCaptureFixture
) -> None:
    cluster = make_cluster(no_data_port=True, shared_directory=tmp_path)
    with pytest.raises(Unreachable, match="takes no data connection: it has no port for them"):
        trained(cluster.connect("sync", job="tcp", transport="tcp"), 1)
    caplog.set_level(logging.INFO)
    with cluster.connect("sync", job="auto", shared_directory="/dev/shm") as session:
        trained(session, 1)
        assert connections(session) == [None, None]
        assert "buckets travel by gRPC (ranks 0)" in status_text.table(requests.fetch(cluster.address))
    assert "it has no port for them (--no-data-port); buckets travel by gRPC" in caplog.text


def test_status_metrics_and_the_workers_log_say_how_buckets_travel(
    shared: Cluster, job: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    for transport, says in (("shm", "in shared memory"), ("tcp", "over data connections"), ("grpc", "by gRPC")):
        with shared.connect("sync", job=f"{job}-{transport}", transport=transport) as session:
            trained(session, 1)
            assert f"buckets travel {says} to shards 0-1" in caplog.text
            assert f"  buckets travel {says} (ranks 0)" in status_text.table(requests.fetch(shared.address))
            for server in shared.servers:
                counted = 'ps_shard_workers{{job="{}",transport="{}"}}'.format
                samples = scrape(server.metrics_address)
                found = {each: samples[counted(f"{job}-{transport}", each)] for each in ("shm", "tcp", "grpc")}
                assert found == {each: each == transport for each in found}


def test_a_port_that_is_closed_at_first_is_tried_again(
    shared: Cluster, job: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As where a firewall opens it later, or the shard had too many connections."""
    monkeypatch.setattr(client, "AGAIN_SECONDS", 0.0)
    monkeypatch.setattr(client, "AGAIN_AT_MOST_SECONDS", 0.0)
    open_there, is_open = calls.open_data_connection, threading.Event()

    def opened(offer: ConnectionOffer, *more: Any) -> ClientConnection:
        if not is_open.is_set():
            offer = replace(offer, port=1)  # no process listens on it
        return open_there(offer, *more)

    monkeypatch.setattr(calls, "open_data_connection", opened)
    with shared.connect("sync", job=job, shared_directory=tmp_path) as session:

        def wait(step: int) -> None:
            if step == 0:
                assert connections(session) == [None, None]
                is_open.set()
            if step == 2:
                until(lambda: None not in connections(session), "connections")

        trained(session, 3, wait)
        assert "over data connections" in status_text.table(requests.fetch(shared.address))


# -- what ends -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_connections_that_break_between_steps_are_opened_again(
    shared: Cluster, job: str, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "AGAIN_SECONDS", 0.0)
    expected = trained_by_grpc(shared, job, 6)
    with shared.connect("sync", job=job, transport=transport) as session:
        seen: list[ClientConnection | None] = []

        def breaking(step: int) -> None:
            seen[:] = connections(session) if step == 2 else seen
            there = [each for each in connections(session) if each is not None] if step in (2, 4) else []
            for each in there:
                each.close()
            until(lambda: not any(each.is_open for each in there), "their end")

        assert torch.equal(expected, trained(session, 6, breaking))
        until(lambda: all(now is not None and now.is_open for now in connections(session)), "others")
        assert not set(map(id, seen)) & set(map(id, connections(session)))


@pytest.mark.parametrize("transport", cases(["tcp"], ["shm"]))
def test_connections_that_break_in_the_middle_of_steps_lose_nothing(
    shared: Cluster, job: str, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread breaks them all the time, and none is opened again for a while: gRPC takes over."""
    monkeypatch.setattr(client, "AGAIN_SECONDS", 0.05)
    expected = trained_by_grpc(shared, job, 20)
    with shared.connect("sync", job=job, transport=transport) as session:
        over, broken = threading.Event(), 0

        def break_them() -> None:
            nonlocal broken
            while not over.wait(0.01):
                for each in connections(session) if session.clock else []:
                    if each is not None:
                        broken += each.is_open
                        each.close()

        breaking = threading.Thread(target=break_them)
        breaking.start()
        try:
            assert torch.equal(expected, trained(session, 20))
        finally:
            over.set()
            breaking.join()
    assert broken


def test_a_worker_receives_from_many_shards_with_few_threads(make_cluster: Callable[..., Cluster]) -> None:
    cluster = make_cluster(shards=client.MOST_READERS + 2)
    before = {*threading.enumerate()}  # a thread of a session of another test may be about to end
    with cluster.connect("sync", job="many", transport="tcp") as session:
        trained(session, 3)
        assert all(each is not None and each.is_open for each in connections(session))
        receiving = [thread for thread in threading.enumerate() if thread.name == "receive" and thread not in before]
        assert 1 <= len(receiving) <= client.MOST_READERS
    assert not any(thread.is_alive() for thread in receiving), "they end with the session"


# -- one connection --------------------------------------------------------------------------------------------------


def connection_over(ours: socket.socket) -> ClientConnection:
    """A connection with threads of its own, which end with it."""
    reading = reading_threads()
    connection = ClientConnection(frames_over(ours), reading)
    reading.close()
    return connection


@pytest.fixture
def ends() -> Iterator[tuple[ClientConnection, socket.socket]]:
    """A connection, and the shard's end of it."""
    ours, theirs = socket.socketpair()
    connection = connection_over(ours)
    yield connection, theirs
    connection.close()
    theirs.close()


def request_of(shard: socket.socket) -> int:
    """The number of the next call that a shard hears of; its message is thrown away."""
    header = read_header(shard.recv(HEADER_BYTES, socket.MSG_WAITALL), 2**30)
    shard.recv(header.size, socket.MSG_WAITALL)
    return header.call


def test_answers_find_their_calls_in_any_order(ends: tuple[ClientConnection, socket.socket]) -> None:
    connection, shard = ends
    answers = [OneAnswer(), OneAnswer()]
    made = [connection.call(Kind.PUSH, Parts(b"request"), answer, 20.0) for answer in answers]
    for number, content in reversed([(request_of(shard), b"first"), (request_of(shard), b"second")]):
        shard.sendall(write_header(number, Kind.LAST, len(content)) + content)
    for each in made:
        each.done.result(20.0)
    assert [answer.message for answer in answers] == [b"first", b"second"]


def test_a_payload_is_put_where_the_call_wants_it(ends: tuple[ClientConnection, socket.socket]) -> None:
    connection, shard = ends
    target = bytearray(8)

    class Placed(EachAnswer):
        def place(self, head: bytes, payload_bytes: int) -> memoryview:
            super().place(head, payload_bytes)
            return memoryview(target)

    seen: list[tuple[bytes, Any]] = []
    call = connection.call(Kind.PULL, Parts(b""), Placed(lambda *answer: seen.append(answer)), 20.0)
    number = request_of(shard)
    shard.sendall(write_header(number, Kind.ANSWER, 4, 8) + b"head" + b"elements" + write_header(number, Kind.END, 0))
    call.done.result(20.0)
    assert (bytes(target), seen[0][0]) == (b"elements", b"head")


@pytest.mark.parametrize("ends_there", [False, True], ids=["read", "closed"])
def test_a_thread_that_must_not_wait_leaves_the_rest_of_a_payload_to_another(
    ends: tuple[ClientConnection, socket.socket], ends_there: bool
) -> None:
    connection, shard = ends
    payload, small = bytes(range(256)) * 2**15, Parts(b"small")
    call = connection.call_now(Kind.PUSH, Parts(b"head", payload), OneAnswer(), 20.0)
    assert call is not None, "of 8 MiB, which no socket takes, some are sent"
    assert connection.call_now(Kind.PULL, small, OneAnswer(), 20.0) is None, "it would wait for the rest"
    [thread] = connection.threads
    if ends_there:
        shard.close()
        with pytest.raises(CallFailed, match="the data connection ended"):
            call.done.result(20.0)
    else:
        header = read_header(shard.recv(HEADER_BYTES, socket.MSG_WAITALL), 2**30)
        assert shard.recv(header.size, socket.MSG_WAITALL) == b"head" + payload
        shard.sendall(write_header(header.call, Kind.LAST, 0))
        call.done.result(20.0)
        until(lambda: connection.call_now(Kind.PULL, small, OneAnswer(), 20.0) is not None, "that others may send")
        connection.close()
    thread.join(20.0)
    assert not thread.is_alive()


def test_where_no_thread_can_send_the_rest_of_a_request_the_connection_ends(
    ends: tuple[ClientConnection, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    connection, _ = ends

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    call = connection.call_now(Kind.PUSH, Parts(b"head", bytes(2**23)), OneAnswer(), 20.0)
    assert call is not None
    with pytest.raises(CallFailed, match="the data connection ended"):
        call.done.result(20.0)
    assert connection.threads == []


class Interrupted(BaseException):
    """What a signal's handler raises."""


class Interrupts:
    """A connection whose sender is interrupted, and the shard, which reads all that comes."""

    def __init__(self) -> None:
        ours, shard = socket.socketpair()
        self.connection, self._came = connection_over(ours), bytearray()
        self._reading = threading.Thread(target=self._read, args=[shard])
        self._reading.start()

    def _read(self, shard: socket.socket) -> None:
        with shard:
            self._came.extend(b"".join(iter(lambda: shard.recv(2**20), b"")))

    def ended(self) -> list[bytes]:
        """Sends another request, if the connection goes on, and ends it. The messages that the shard got."""

        def send() -> None:
            with suppress(CallFailed):
                self.connection.call(Kind.PULL, Parts(b"small"), OneAnswer(), 20.0)

        sending = threading.Thread(target=send, daemon=True)
        sending.start()
        sending.join(20.0)
        assert not sending.is_alive(), "it has its turn"
        self.connection.close()
        self._reading.join(20.0)
        assert not self._reading.is_alive(), "the connection is closed"
        return list(messages_in(bytes(self._came)))


@pytest.mark.parametrize("size", [8, 2**23], ids=["whole", "in parts"])
def test_a_request_that_is_interrupted_at_any_line_is_sent_whole_or_ends_the_connection(size: int) -> None:
    """Half a frame would be completed by the bytes of the next one."""
    payload = bytes(size)

    def interrupts() -> None:
        raise Interrupted

    for wanted in itertools.count(1):
        ends = Interrupts()
        with suppress(Interrupted), before_line(client, wanted, interrupts, ["_sent_now"]) as has_come:
            ends.connection.call_now(Kind.PUSH, Parts(b"head", payload), OneAnswer(), 20.0)
        messages = ends.ended()
        assert b"small" not in messages or messages in ([b"small"], [b"head" + payload, b"small"])
        if not has_come():
            break
    assert messages == [b"head" + payload, b"small"]
    assert wanted > 5


@pytest.mark.parametrize("size", [8, 2**21], ids=["whole", "in parts"])
def test_a_signal_that_interrupts_a_request_leaves_the_turn_to_others(size: int) -> None:
    """Unlike a trace, a signal acts only where Python handles signals, and so not between a lock and its `with`."""
    payload, has_come = bytes(size), False

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal has_come
        has_come = True
        raise Interrupted  # which is lost in callbacks of the interpreter

    before, left = signal.signal(signal.SIGALRM, interrupt), signal.getitimer(signal.ITIMER_REAL)
    try:
        for microseconds in range(1, 100):
            ends, has_come = Interrupts(), False
            with suppress(Interrupted):
                signal.setitimer(signal.ITIMER_REAL, 1e-6 * microseconds)
                ends.connection.call_now(Kind.PUSH, Parts(b"head", payload), OneAnswer(), 20.0)
                while not has_come:
                    pass
            messages = ends.ended()
            assert b"small" not in messages or messages in ([b"small"], [b"head" + payload, b"small"])
    finally:
        signal.signal(signal.SIGALRM, before)
        signal.setitimer(signal.ITIMER_REAL, *left)  # pytest's own


def test_a_signal_at_the_end_of_a_turn_leaves_it_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """While the thread that has sent waits for the lock with which it wakes them."""
    ends, held, over = Interrupts(), threading.Event(), threading.Event()
    connection, send_now = ends.connection, ends.connection._frames.send_now

    def hold() -> None:
        with connection._turn:
            held.set()
            over.wait(20.0)

    holding = threading.Thread(target=hold, daemon=True)

    def sent_while_another_holds_the_lock(parts: Sequence[Buffer]) -> list[memoryview]:
        left = send_now(parts)
        holding.start()
        assert held.wait(20.0)
        return left

    def interrupt(number: int, frame: FrameType | None) -> None:
        if held.is_set() and not over.is_set() and frame is not None and frame.f_code.co_name == "call_now":
            over.set()
            raise Interrupted

    monkeypatch.setattr(connection._frames, "send_now", sent_while_another_holds_the_lock)
    before, left = signal.signal(signal.SIGALRM, interrupt), signal.getitimer(signal.ITIMER_REAL)
    signal.setitimer(signal.ITIMER_REAL, 0.05, 0.05)
    try:
        with pytest.raises(Interrupted):
            connection.call_now(Kind.PUSH, Parts(b"head"), OneAnswer(), 20.0)
    finally:
        signal.setitimer(signal.ITIMER_REAL, *left)  # pytest's own
        signal.signal(signal.SIGALRM, before)
    assert ends.ended() == [b"head", b"small"]


def messages_in(stream: bytes) -> Iterator[bytes]:
    """The messages of whole frames in a stream, up to its end."""
    while len(stream) >= HEADER_BYTES:
        size = read_header(stream[:HEADER_BYTES], 2**30).size
        yield stream[HEADER_BYTES : HEADER_BYTES + size]
        stream = stream[HEADER_BYTES + size :]


def test_what_one_call_cannot_read_fails_that_call_alone(ends: tuple[ClientConnection, socket.socket]) -> None:
    connection, shard = ends

    class Refuses(OneAnswer):
        def place(self, head: bytes, payload_bytes: int) -> memoryview | None:
            raise InvalidRequest("not what was asked for")

    refused = connection.call(Kind.PULL, Parts(b""), Refuses(), 20.0)
    shard.sendall(write_header(request_of(shard), Kind.ANSWER, 4, 2**17) + b"head" + bytes(2**17))
    with pytest.raises(InvalidRequest, match="not what was asked for"):
        refused.done.result(20.0)
    other = OneAnswer()
    call = connection.call(Kind.PUSH, Parts(b""), other, 20.0)
    shard.sendall(write_header(request_of(shard), Kind.LAST, 4) + b"good")
    call.done.result(20.0)
    assert other.message == b"good"


def test_a_shard_that_does_not_answer_is_given_up(
    ends: tuple[ClientConnection, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, shard = socket.socketpair()
    monkeypatch.setattr(client, "_LOOK_SECONDS", 0.02)
    connection = connection_over(ours)
    call = connection.call(Kind.PUSH, Parts(b""), OneAnswer(), 0.1)
    with pytest.raises(CallFailed) as caught:
        call.done.result(20.0)
    assert caught.value.code == code_pb2.DEADLINE_EXCEEDED
    assert not connection.is_open
    shard.close()


def test_a_connection_of_which_a_shard_reads_nothing_ends_with_its_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that sends is stuck in the kernel until then."""
    ours, shard = socket.socketpair()
    monkeypatch.setattr(client, "_LOOK_SECONDS", 0.02)
    connection = connection_over(ours)
    call = connection.call(Kind.PUSH, Parts(b"", bytes(64 * 2**20)), OneAnswer(), 0.1)
    with pytest.raises(CallFailed):
        call.done.result(20.0)
    shard.close()


class Clock:
    """Time, as connections made from here on read it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(client, "_LOOK_SECONDS", 0.02)
        monkeypatch.setattr(client, "time", SimpleNamespace(monotonic=lambda: self.now))

    def nearly_over(self, call: client.ClientCall, seconds: float) -> None:
        """Waits until a call's time has begun anew, and lets nearly all of it go by."""
        until(lambda: call.due == self.now + seconds, "a part of it")
        self.now += 0.9 * seconds


PART = 2**20


def test_a_request_that_leaves_slowly_is_not_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    ours, shard = socket.socketpair()
    connection = connection_over(ours)
    made: list[client.ClientCall] = []
    connection_call = client.ClientCall
    monkeypatch.setattr(client, "ClientCall", lambda *given: made.append(connection_call(*given)) or made[-1])
    request = Parts(b"", bytes(6 * PART))
    answers = [OneAnswer(), OneAnswer()]
    threads = [threading.Thread(target=connection.call, args=(Kind.PUSH, request, each, 10.0)) for each in answers]
    threads[0].start()
    header = read_header(shard.recv(HEADER_BYTES, socket.MSG_WAITALL), 2**30)
    threads[1].start()
    until(lambda: len(made) == 2, "another that waits for its turn")
    for _ in range(4):
        clock.nearly_over(made[0], 10.0)
        assert len(shard.recv(PART, socket.MSG_WAITALL)) == PART
    shard.recv(header.size - 4 * PART, socket.MSG_WAITALL)
    numbers = [header.call, request_of(shard)]
    for number in numbers:
        shard.sendall(write_header(number, Kind.LAST, 0))
    for each in made:
        each.done.result(20.0)
    for thread in threads:
        thread.join()
    connection.close()
    shard.close()


def test_an_answer_that_comes_slowly_is_not_given_up_nor_is_what_waits_behind_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock(monkeypatch)
    ours, shard = socket.socketpair()
    connection = connection_over(ours)
    slow = connection.call(Kind.PULL, Parts(b""), EachAnswer(lambda *_: None), 10.0)
    behind = connection.call(Kind.PUSH, Parts(b""), OneAnswer(), 10.0)
    numbers = [request_of(shard), request_of(shard)]
    shard.sendall(write_header(numbers[0], Kind.ANSWER, 4, 4 * PART) + b"head")
    for _ in range(4):
        clock.nearly_over(slow, 10.0)
        shard.sendall(bytes(PART))
    shard.sendall(write_header(numbers[0], Kind.END, 0))
    slow.done.result(20.0)
    until(lambda: behind.due > clock.now, "its time has not gone by")
    shard.sendall(write_header(numbers[1], Kind.LAST, 0))
    behind.done.result(20.0)
    connection.close()
    shard.close()


@pytest.mark.parametrize(
    "content",
    [b"\xff" * 40, write_header(1, Kind.PUSH, 0), b"HTTP/1.1 400 Bad Request\r\n"],
    ids=["garbage", "request", "HTTP"],
)
def test_what_is_no_answer_ends_the_connection(ends: tuple[ClientConnection, socket.socket], content: bytes) -> None:
    connection, shard = ends
    call = connection.call(Kind.PULL, Parts(b""), OneAnswer(), 20.0)
    shard.sendall(content)
    with pytest.raises(CallFailed):
        call.done.result(20.0)


def test_each_call_on_a_connection_that_ends_raises_an_error_of_its_own(
    ends: tuple[ClientConnection, socket.socket],
) -> None:
    """Threads that raise the same one would share its traceback."""
    connection, shard = ends
    made = [connection.call(Kind.PULL, Parts(b""), OneAnswer(), 20.0) for _ in range(2)]
    shard.sendall(b"garbage that is longer than the header of a frame")
    errors = [call.done.exception(20.0) for call in made]
    until(lambda: not connection.is_open, "the end of the connection")
    for make in (connection.call, connection.call_now, connection.call):
        with pytest.raises(CallFailed) as caught:
            make(Kind.PULL, Parts(b""), OneAnswer(), 20.0)
        errors.append(caught.value)
    assert len({id(error) for error in errors}) == 5
    [said] = {(type(error), error.code, str(error)) for error in errors if isinstance(error, CallFailed)}
    assert said[:2] == (CallFailed, code_pb2.UNAVAILABLE)
    assert said[2].startswith("the data connection ended: ")


def test_no_other_thread_of_a_shard_sends_small_weights(
    shared: Cluster, job: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that has made the update sends them to each worker whose connection takes them."""
    submitted: list[FrameSender] = []
    submit = FrameSender._submit
    monkeypatch.setattr(FrameSender, "_submit", lambda sender: submitted.append(sender) or submit(sender))
    with shared.connect("sync", job=job, transport="tcp") as session:
        torch.manual_seed(0)
        made = nn.Linear(4, 4)
        model, optimizer = session.prepare(made, torch.optim.SGD(made.parameters(), lr=0.1))
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
    assert submitted == []
