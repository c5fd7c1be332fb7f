"""Data connections share threads. One that is silent has none; one whose request comes slowly delays no other."""

from __future__ import annotations

import errno
import logging
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from types import SimpleNamespace

import pytest
import torch

from ps_frames import reading
from ps_frames.frames import Kind
from ps_frames.reading import ReadingThreads
from ps_protocol.errors import TryLater
from ps_runtime.troubles import Troubles
from tests.tools.cluster import Cluster, until
from tests.tools.frame_client import FrameClient, push_parts, ticket
from tests.tools.raw_worker import joined, vector_job

log = logging.getLogger("ps_server")
SECONDS = 20.0
MESSAGE = b"question"


class Echo:
    """An end of a connection that reads a message of eight bytes as the data port does, and sends it back."""

    def __init__(self, threads: ReadingThreads) -> None:
        self.here, self.there = socket.socketpair()
        self.there.settimeout(SECONDS)
        self.has_ended = threading.Event()
        threads.add(self.here.fileno(), self.ready, self.ended)

    def ready(self) -> bool:
        try:
            if not self.here.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT):
                return False
        except BlockingIOError:
            return True
        message = b""
        while len(message) < len(MESSAGE):  # waits, as for the body of a request
            piece = self.here.recv(len(MESSAGE) - len(message))
            if not piece:
                return False
            message += piece
        self.here.sendall(message)
        return True

    def ended(self) -> None:
        self.here.close()
        self.has_ended.set()

    def ask(self) -> bytes:
        self.there.sendall(MESSAGE)
        return self.there.recv(len(MESSAGE))


@pytest.fixture
def threads() -> Iterator[ReadingThreads]:
    made = ReadingThreads("reading", Troubles(log, None))
    yield made
    until(lambda: not made._readers, "the end of all connections")
    made.stop()
    assert not running()


def running() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "reading"]


@pytest.fixture
def connect(threads: ReadingThreads) -> Iterator[Callable[[], Echo]]:
    with ExitStack() as stack:

        def make() -> Echo:
            echo = Echo(threads)
            stack.callback(echo.there.close)
            return echo

        yield make


def test_connections_that_are_silent_take_no_thread_each(connect: Callable[[], Echo]) -> None:
    echoes = [connect() for _ in range(200)]
    for echo in echoes:
        assert echo.ask() == MESSAGE
    assert len(running()) < 20, "one asks at a time"


def test_requests_that_arrive_slowly_keep_no_other_waiting(connect: Callable[[], Echo]) -> None:
    slow, quick = [connect() for _ in range(30)], connect()
    for echo in slow:
        echo.there.sendall(MESSAGE[:1])
    assert quick.ask() == MESSAGE
    for echo in slow:
        echo.there.sendall(MESSAGE[1:])
        assert echo.there.recv(len(MESSAGE)) == MESSAGE


def test_a_connection_that_comes_while_all_threads_have_a_request_does_not_wait(connect: Callable[[], Echo]) -> None:
    for _ in range(3):
        connect().there.sendall(MESSAGE[:1])
        assert connect().ask() == MESSAGE


def test_threads_that_find_at_once_that_another_is_needed_start_one_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first to find it is held back until another, which finds it too, has started one."""
    found, goes_on = threading.Event(), threading.Event()
    real = ReadingThreads._start_another

    def held_back(self: ReadingThreads) -> None:
        if threading.current_thread().name == "reading":
            found.set()
            assert goes_on.wait(SECONDS)
        real(self)

    monkeypatch.setattr(ReadingThreads, "_start_another", held_back)
    threads = ReadingThreads("reading", Troubles(log, None), most=2)
    echoes = [Echo(threads) for _ in range(3)]
    echoes[0].there.sendall(MESSAGE)  # takes the first thread, which finds that connections are without one
    assert found.wait(SECONDS)
    echoes.append(Echo(threads))
    goes_on.set()
    assert [echoes[0].there.recv(len(MESSAGE)), *(echo.ask() for echo in echoes[1:])] == [MESSAGE] * 4
    assert len(running()) == 2
    for echo in echoes:
        echo.there.close()
    threads.stop()
    assert not running()


def test_connections_whose_end_takes_long_keep_no_other_waiting(
    threads: ReadingThreads, connect: Callable[[], Echo]
) -> None:
    goes_on, ending = threading.Event(), threading.Semaphore(0)

    class SlowEnd(Echo):
        def ended(self) -> None:
            ending.release()
            goes_on.wait(5 * SECONDS)
            super().ended()

    slow = [SlowEnd(threads) for _ in range(3)]
    for echo in slow:
        echo.there.close()
        assert ending.acquire(timeout=SECONDS)
    try:
        connect().there.sendall(MESSAGE[:1])
        assert connect().ask() == MESSAGE
    finally:
        goes_on.set()


def test_a_connection_that_the_kernel_does_not_watch_is_refused(
    threads: ReadingThreads, connect: Callable[[], Echo], monkeypatch: pytest.MonkeyPatch
) -> None:
    full = SimpleNamespace(register=raises_no_space, poll=threads._epoll.poll)
    with monkeypatch.context() as patch:
        patch.setattr(threads, "_epoll", full)
        with pytest.raises(TryLater, match="No space left"):
            threads.add(0, lambda: True, lambda: None)
    assert connect().ask() == MESSAGE


def raises_no_space(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_threads_that_are_not_needed_end(connect: Callable[[], Echo], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "IDLE_SECONDS", 0.05)
    slow, quick = [connect() for _ in range(30)], connect()
    for echo in slow:
        echo.there.sendall(MESSAGE[:1])
    until(lambda: len(running()) >= 30, "a thread for each of the slow ones")
    for echo in slow:
        echo.there.sendall(MESSAGE[1:])
        assert echo.there.recv(len(MESSAGE)) == MESSAGE
    until(lambda: len(running()) <= reading.KEPT, "the end of those that have nothing to do")
    assert quick.ask() == MESSAGE


def test_without_another_thread_connections_wait_for_those_that_there_are(
    connect: Callable[[], Echo], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    slow, quick = connect(), connect()
    assert quick.ask() == MESSAGE
    before = len(running())
    monkeypatch.setattr(threading.Thread, "start", fails)
    more = [connect() for _ in range(before)]
    for echo in more:
        echo.there.sendall(MESSAGE[:1])
    until(lambda: "wait for the threads that there are" in caplog.text, "a line in the log")
    slow.there.sendall(MESSAGE)
    for echo in more:
        echo.there.sendall(MESSAGE[1:])
        assert echo.there.recv(len(MESSAGE)) == MESSAGE
    assert slow.there.recv(len(MESSAGE)) == MESSAGE


def fails(thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def test_without_a_thread_at_all_no_connection_is_taken(
    threads: ReadingThreads, connect: Callable[[], Echo], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fails)
        with pytest.raises(TryLater, match="can't start new thread"):
            threads.add(0, lambda: True, lambda: None)
    assert connect().ask() == MESSAGE


def test_an_error_of_a_connection_ends_that_one(connect: Callable[[], Echo], caplog: pytest.LogCaptureFixture) -> None:
    other, broken = connect(), connect()
    assert broken.ask() == MESSAGE
    broken.here.setblocking(False)  # it raises where it would wait for the rest
    broken.there.sendall(MESSAGE[:1])
    assert broken.has_ended.wait(SECONDS)
    assert "'reading' met an error" in caplog.text
    assert other.ask() == MESSAGE


def test_workers_that_are_silent_take_no_thread_of_a_shard(make_cluster: Callable[..., Cluster]) -> None:
    cluster = make_cluster(shards=1, lease=600.0)  # nobody sends a heartbeat
    count = 32
    with ExitStack() as stack:
        workers = stack.enter_context(joined(cluster.address, vector_job("job", "async", 16, count)))
        clients = []
        for worker in workers:
            found = ticket(cluster.address, worker)
            clients.append(stack.enter_context(FrameClient(found.port, found.ticket)))
        for worker, client in zip(workers, clients, strict=True):
            assert client.ask(Kind.PUSH, push_parts(worker.message(0, 1, torch.ones(16).numpy().tobytes())))
        assert sum(thread.name == "data" for thread in threading.enumerate()) < count // 2
