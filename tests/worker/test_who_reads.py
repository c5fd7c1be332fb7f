"""A connection has one reader at a time: a thread that waits for an answer, or else one of the connection's own."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from ps_frames import client
from ps_frames.client import ClientConnection, EachAnswer, OneAnswer, attend
from ps_frames.sender import FrameSender
from ps_frames.sockets import frames_over
from ps_frames.wire import HEADER_BYTES, Kind, read_header, write_header
from ps_protocol.framing import Parts
from ps_runtime.grpc_status import CallFailed
from ps_runtime.signals import HeldBack
from tests.tools.cases import cases
from tests.tools.cluster import Cluster, until

SECONDS = 20.0


class Shard:
    """A connection, and the shard's end of it."""

    def __init__(self) -> None:
        ours, self.end = socket.socketpair()
        self.connection = ClientConnection(frames_over(ours))

    def ask(self, answers: Any = None) -> client.ClientCall:
        """Makes a call."""
        return self.connection.call(Kind.PULL, Parts(b"request"), answers or OneAnswer(), SECONDS)

    def asked(self) -> int:
        """The number of the next call that the shard hears of."""
        header = read_header(self.end.recv(HEADER_BYTES, socket.MSG_WAITALL), 2**20)
        self.end.recv(header.size, socket.MSG_WAITALL)
        return header.call

    def answer(self, content: bytes = b"answer") -> None:
        """Answers the next call."""
        self.end.sendall(write_header(self.asked(), Kind.LAST, len(content)) + content)

    def is_read(self) -> bool:
        """Whether a thread reads."""
        return self.connection._turn.locked()

    def close(self) -> None:
        self.connection.close()
        self.end.close()
        self.connection.thread.join(SECONDS)


@pytest.fixture
def make() -> Iterator[Callable[[], Shard]]:
    """Connections that read what nobody waits for when they are asked to, and not before."""
    made: list[Shard] = []

    def shard() -> Shard:
        made.append(Shard())
        return made[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(client, "_LOOK_SECONDS", 60.0)
        yield shard
        for each in made:
            each.close()


class Read(OneAnswer):
    """An answer, with the thread that took it. began: its fields are there"""

    def __init__(self) -> None:
        super().__init__()
        self.by: threading.Thread | None = None
        self.began = threading.Event()

    def place(self, head: bytes, payload_bytes: int) -> memoryview | None:
        self.began.set()
        return super().place(head, payload_bytes)

    def take(self, payload: memoryview | None) -> bool:
        self.by = threading.current_thread()
        return super().take(payload)


def in_thread(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work)
    thread.start()
    return thread


# -- who reads ---------------------------------------------------------------------------------------------------------


def test_a_thread_that_waits_for_an_answer_reads_it(make: Callable[[], Shard]) -> None:
    shard, answer = make(), Read()
    call = shard.ask(answer)
    shard.answer()
    shard.connection.finish(call)
    assert (answer.by, answer.message) == (threading.current_thread(), b"answer")
    assert not shard.is_read(), "it has given the turn back"


def test_a_thread_reads_the_answers_of_others_and_then_one_of_these_goes_on(make: Callable[[], Shard]) -> None:
    shard = make()
    answers = [Read(), Read(), Read()]
    calls = [shard.ask(each) for each in answers]
    first = in_thread(lambda: shard.connection.finish(calls[1]))
    until(shard.is_read, "the first that waits")
    second = in_thread(lambda: shard.connection.finish(calls[2]))
    until(lambda: bool(shard.connection._waiting), "the second")
    shard.answer()
    calls[0].done.result(SECONDS)
    shard.answer()
    first.join(SECONDS)
    shard.answer()
    second.join(SECONDS)
    assert [each.by for each in answers] == [first, first, second]


def test_what_nobody_waits_for_is_read_by_a_thread_of_the_connection(make: Callable[[], Shard]) -> None:
    shard, answer = make(), Read()
    call = shard.ask(answer)
    shard.connection.read_beside()
    shard.answer()
    call.done.result(SECONDS)
    assert answer.by is shard.connection.thread


def test_what_nobody_asks_to_have_read_is_read_a_little_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "_LOOK_SECONDS", 0.02)
    shard = Shard()
    call = shard.ask()
    shard.answer()
    call.done.result(SECONDS)
    shard.end.close()
    until(lambda: not shard.connection.is_open, "the end, of which nobody asked either")
    shard.close()


def test_a_call_that_is_under_way_when_its_reader_leaves_is_read_beside(make: Callable[[], Shard]) -> None:
    shard, announced = make(), Read()
    call, waited = shard.ask(announced), shard.ask()
    number = shard.asked()
    shard.answer()
    shard.connection.finish(waited)
    shard.end.sendall(write_header(number, Kind.LAST, 2) + b"it")
    call.done.result(SECONDS)
    assert announced.by is shard.connection.thread


def test_the_thread_of_a_connection_leaves_the_turn_to_one_that_waits(make: Callable[[], Shard]) -> None:
    shard, answers = make(), [Read(), Read()]
    calls = [shard.ask(each) for each in answers]
    shard.connection.read_beside()
    until(shard.is_read, "the connection's thread")
    waits = in_thread(lambda: shard.connection.finish(calls[1]))
    until(lambda: bool(shard.connection._waiting), "one that waits")
    shard.answer()
    calls[0].done.result(SECONDS)
    until(lambda: not shard.connection._waiting, "its turn")
    shard.answer()
    waits.join(SECONDS)
    assert [each.by for each in answers] == [shard.connection.thread, waits]


def test_one_thread_reads_what_several_shards_answer_in_any_order(make: Callable[[], Shard]) -> None:
    shards, answers = [make(), make()], [Read(), Read()]
    calls = [shard.ask(answer) for shard, answer in zip(shards, answers, strict=True)]

    def answer_both() -> None:
        shards[1].answer()
        calls[1].done.result(SECONDS)
        shards[0].answer()

    others = in_thread(answer_both)
    attend([shard.connection for shard in shards], lambda: all(call.done.done() for call in calls))
    others.join(SECONDS)
    assert {answer.by for answer in answers} == {threading.current_thread()}


def test_a_thread_that_reads_for_several_shards_goes_on_where_one_has_ended(make: Callable[[], Shard]) -> None:
    shards = [make(), make()]
    calls = [shard.ask() for shard in shards]
    shards[0].end.close()
    shards[1].answer()
    attend([shard.connection for shard in shards], lambda: all(call.done.done() for call in calls))
    calls[1].done.result(0)
    with pytest.raises(CallFailed):
        calls[0].done.result(0)


# -- interrupted -------------------------------------------------------------------------------------------------------


class Interrupted(BaseException):
    """What the handler of a signal raises."""


@pytest.fixture
def _interrupts() -> Iterator[None]:
    def interrupt(number: int, frame: object) -> None:
        raise Interrupted

    before = signal.signal(signal.SIGUSR1, interrupt)
    yield
    signal.signal(signal.SIGUSR1, before)


def signal_here() -> None:
    os.kill(os.getpid(), signal.SIGUSR1)


@pytest.mark.usefixtures("_interrupts")
def test_a_signal_ends_a_wait_at_once_and_the_answer_is_read_all_the_same(make: Callable[[], Shard]) -> None:
    shard, answer = make(), Read()
    call = shard.ask(answer)

    def interrupt() -> None:
        until(shard.is_read, "the reader")
        signal_here()

    other = in_thread(interrupt)
    with pytest.raises(Interrupted):
        shard.connection.finish(call)
    other.join(SECONDS)
    shard.answer()
    call.done.result(SECONDS)
    assert answer.by is shard.connection.thread


@pytest.mark.usefixtures("_interrupts")
def test_a_signal_in_the_middle_of_a_frame_waits_for_its_end(make: Callable[[], Shard]) -> None:
    """Half a frame that was thrown away would make all that follows unreadable."""
    shard, payload, seen = make(), bytes(range(256)) * 4096, []

    class Coming(EachAnswer):
        def place(self, head: bytes, payload_bytes: int) -> memoryview | None:
            comes.set()
            return super().place(head, payload_bytes)

    comes = threading.Event()
    call, after = shard.ask(Coming(lambda *found: seen.append(found))), shard.ask()

    def send() -> None:
        number = shard.asked()
        shard.end.sendall(write_header(number, Kind.LAST, 4, len(payload)) + b"head" + payload[:1000])
        assert comes.wait(SECONDS)
        signal_here()
        shard.end.sendall(payload[1000:])

    other = in_thread(send)
    with pytest.raises(Interrupted):
        shard.connection.finish(call)
    other.join(SECONDS)
    shard.answer()
    shard.connection.finish(after)
    call.done.result(0)
    [(head, found)] = seen
    assert (head, bytes(found)) == (b"head", payload)


@pytest.mark.usefixtures("_interrupts")
def test_a_reader_that_is_interrupted_hands_the_reading_to_one_that_waits(make: Callable[[], Shard]) -> None:
    shard, answers = make(), [Read(), Read()]
    calls = [shard.ask(each) for each in answers]
    waits = []

    def interrupt() -> None:
        until(shard.is_read, "the reader")
        waits.append(in_thread(lambda: shard.connection.finish(calls[1])))
        until(lambda: bool(shard.connection._waiting), "one that waits")
        signal_here()

    other = in_thread(interrupt)
    with pytest.raises(Interrupted):
        shard.connection.finish(calls[0])
    other.join(SECONDS)
    shard.answer()
    shard.answer()
    waits[0].join(SECONDS)
    assert {answer.by for answer in answers} == {waits[0]}


def test_an_exception_in_the_middle_of_a_frame_ends_the_connection_and_no_call_waits_on(
    make: Callable[[], Shard],
) -> None:
    shard = make()

    class Breaks(OneAnswer):
        def take(self, payload: memoryview | None) -> bool:
            raise Interrupted

    call, other = shard.ask(Breaks()), shard.ask()
    errors: list[BaseException] = []

    def wait() -> None:
        try:
            shard.connection.finish(other)
        except CallFailed as error:
            errors.append(error)

    def break_it() -> None:
        until(shard.is_read, "the reader")
        waits = in_thread(wait)
        until(lambda: bool(shard.connection._waiting), "one that waits")
        shard.answer()
        waits.join(SECONDS)

    breaks = in_thread(break_it)
    with pytest.raises(Interrupted):
        shard.connection.finish(call)
    breaks.join(SECONDS)
    assert [str(error) for error in errors] == ["the data connection ended: its reader was interrupted"]
    assert not shard.connection.is_open


# -- signals that are held back ----------------------------------------------------------------------------------------


@pytest.mark.usefixtures("_interrupts")
def test_signals_are_held_back_until_a_wait_or_the_end() -> None:
    handler, seen = signal.getsignal(signal.SIGUSR1), []

    def until_a_wait() -> None:
        with HeldBack() as signals:
            signal.raise_signal(signal.SIGUSR1)
            seen.append("held back")
            signals.waiting(lambda: seen.append("not reached"))

    def until_the_end() -> None:
        with HeldBack():
            signal.raise_signal(signal.SIGUSR1)
            seen.append("until the end")

    def in_a_wait() -> None:
        with HeldBack() as signals:
            signals.waiting(lambda: signal.raise_signal(signal.SIGUSR1))
            seen.append("not reached")

    for each in (until_a_wait, until_the_end, in_a_wait):
        with pytest.raises(Interrupted):
            each()
        assert signal.getsignal(signal.SIGUSR1) is handler
    assert seen == ["held back", "until the end"]


@pytest.mark.usefixtures("_interrupts")
def test_a_handler_that_a_handler_sets_stays() -> None:
    def once(number: int, frame: object) -> None:
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)

    signal.signal(signal.SIGUSR1, once)
    with HeldBack() as signals:
        signals.waiting(lambda: signal.raise_signal(signal.SIGUSR1))
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN


# -- a whole step ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("transport", cases(["shm"], ["tcp"]))
def test_the_training_thread_reads_the_answers_to_its_steps(
    shared: Cluster, job: str, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[threading.Thread] = []
    real = ClientConnection._read_frame

    def noted(connection: ClientConnection) -> None:
        read.append(threading.current_thread())
        real(connection)

    with shared.connect("sync", job=job, transport=transport) as session:
        torch.manual_seed(0)
        made = nn.Linear(4, 4)
        model, optimizer = session.prepare(made, torch.optim.SGD(made.parameters(), lr=0.1), overlap=False)
        monkeypatch.setattr(ClientConnection, "_read_frame", noted)
        for _ in range(5):
            optimizer.zero_grad()
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
        monkeypatch.undo()
        mine = [thread for thread in read if thread is threading.current_thread()]
        assert len(mine) >= 5
        assert all(thread.name != "data" for thread in read), "no other thread had to be woken"


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
