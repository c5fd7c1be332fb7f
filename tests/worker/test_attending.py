"""A thread that waits for answers receives them itself; what no thread waits for, the shared threads receive."""

from __future__ import annotations

import os
import random
import select
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import nn

import ps_worker
from ps_frames import attending as attending_module
from ps_frames import client
from ps_frames.attending import Attending
from ps_frames.client import ClientConnection, EachAnswer, OneAnswer, reading_threads
from ps_frames.frames import HEADER_BYTES, Kind, frames_over, read_header, write_header
from ps_frames.reading import ReadingThreads
from ps_protocol.framing import Parts
from ps_runtime.grpc_status import CallFailed
from tests.tools.cases import cases
from tests.tools.cluster import Cluster, until
from tests.tools.lines import before_line

SECONDS = 20.0


class Read(OneAnswer):
    """An answer, and the name of the thread that has received it."""

    def __init__(self) -> None:
        super().__init__()
        self.by = ""

    def take(self, payload: memoryview | None) -> bool:
        self.by = threading.current_thread().name
        return super().take(payload)


class Coming(EachAnswer):
    """Answers with payloads, and whether one is coming."""

    def __init__(self) -> None:
        self.event = threading.Event()
        self.found: list[tuple[bytes, bytes]] = []
        super().__init__(lambda head, payload: self.found.append((head, bytes(payload or b""))))

    def place(self, head: bytes, payload_bytes: int) -> memoryview | None:
        self.event.set()
        return super().place(head, payload_bytes)


class Shard:
    """A connection, and the shard's end of it."""

    def __init__(self, reading: ReadingThreads) -> None:
        ours, self.end = socket.socketpair()
        self.end.settimeout(SECONDS)
        self.connection = ClientConnection(frames_over(ours), reading)

    def ask(self, answers: Any = None) -> client.ClientCall:
        return self.connection.call(Kind.PULL, Parts(b"request"), answers or Read(), SECONDS)

    def asked(self) -> int:
        """The number of the next call that the shard hears of."""
        header = read_header(self.end.recv(HEADER_BYTES, socket.MSG_WAITALL), 2**20)
        self.end.recv(header.size, socket.MSG_WAITALL)
        return header.call

    def answer(self, number: int | None = None, content: bytes = b"answer") -> None:
        """Answers a call, by default the next."""
        number = self.asked() if number is None else number
        self.end.sendall(write_header(number, Kind.LAST, len(content)) + content)

    def is_read(self) -> bool:
        """Whether a thread receives, or has taken that over."""
        return self.connection._watched.reader != 0

    def is_looked_at(self) -> bool:
        """Whether a shared thread has been here, as it is once at the beginning, and waits for bytes."""
        return not self.is_read() and self.connection._watched.events == select.EPOLLIN | select.EPOLLONESHOT

    def rest(self) -> None:
        """Has a call answered of which this thread has said before that it would wait for the answer."""
        attending = Attending()
        attending.begin([self.connection])
        call = self.ask()
        self.answer()
        wait([call], self, attending=attending)
        assert self.is_quiet()

    def is_quiet(self) -> bool:
        """Whether nobody is there and no thread would be woken for bytes."""
        return not self.is_read() and not self.connection._watched.events & select.EPOLLIN


def made(seconds: float, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], Shard]]:
    """Yields what makes connections of one worker. Threads look each so many seconds whether something is unread."""
    monkeypatch.setattr(client, "_LOOK_SECONDS", seconds)
    reading, shards = reading_threads(), []

    def shard() -> Shard:
        shards.append(Shard(reading))
        until(shards[-1].is_looked_at, "the first look of a shared thread")
        return shards[-1]

    yield shard
    reading.close()
    for each in shards:
        each.connection.close()
        each.end.close()
    for thread in reading.threads:
        thread.join(SECONDS)
        assert not thread.is_alive()


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], Shard]]:
    """Makes connections of one worker. No thread comes by to look whether something is left unread."""
    yield from made(60.0, monkeypatch)


@pytest.fixture
def make_looking(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], Shard]]:
    """As `make`, but threads come by often."""
    yield from made(0.05, monkeypatch)


@pytest.fixture
def make_as_is(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], Shard]]:
    """As `make`, but threads come by as often as in use: no busy machine is silent for so long."""
    yield from made(client._LOOK_SECONDS, monkeypatch)


def wait(calls: list[client.ClientCall], *shards: Shard, attending: Attending | None = None) -> None:
    (attending or Attending()).wait([call.done for call in calls], [shard.connection for shard in shards])


def in_thread(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work)
    thread.start()
    return thread


def has_result(call: client.ClientCall, seconds: float) -> bool:
    return bool(wait_for([call.done], seconds).done)


ME = threading.main_thread().name

# -- who receives ------------------------------------------------------------------------------------------------------


def test_a_thread_that_waits_receives_its_answers_and_wakes_no_other(make: Callable[[], Shard]) -> None:
    shard, attending = make(), Attending()
    for _ in range(3):
        answer = Read()
        attending.begin([shard.connection])
        call = shard.ask(answer)
        shard.answer()
        wait([call], shard, attending=attending)
        assert (answer.message, answer.by) == (b"answer", ME)
        assert not shard.is_read()
    assert shard.is_quiet(), "no thread is woken for a connection of which nothing is expected"


def test_no_other_thread_is_woken_for_what_one_has_taken_over_without_a_word(make: Callable[[], Shard]) -> None:
    shard, attending = make(), Attending()
    call = shard.ask()
    assert shard.is_looked_at()
    attending._take_over(shard.connection)
    assert not shard.connection._watched.events & select.EPOLLIN
    shard.answer()
    wait([call], shard, attending=attending)
    assert shard.is_quiet()


def test_what_is_not_its_own_is_handed_out(make: Callable[[], Shard]) -> None:
    shard, answers = make(), [Read(), Read()]
    calls = [shard.ask(each) for each in answers]
    numbers = [shard.asked(), shard.asked()]

    def answer() -> None:
        until(shard.is_read, "the thread that waits")
        shard.answer(numbers[0])
        calls[0].done.result(SECONDS)
        shard.answer(numbers[1])

    other = in_thread(answer)
    wait([calls[1]], shard)
    other.join(SECONDS)
    assert [each.by for each in answers] == [ME, ME]


def test_what_is_under_way_when_it_leaves_a_shared_thread_receives(make: Callable[[], Shard]) -> None:
    shard, left = make(), Read()
    later, call = shard.ask(left), shard.ask()
    number = shard.asked()
    shard.answer()
    wait([call], shard)
    shard.answer(number)
    later.done.result(SECONDS)
    assert left.by == "receive"


def test_a_call_that_nobody_waits_for_is_received_also_where_none_was_expected(make: Callable[[], Shard]) -> None:
    shard = make()
    shard.rest()
    answer = Read()
    call = shard.ask(answer)
    shard.answer()
    call.done.result(SECONDS)
    assert answer.by == "receive"


def test_what_was_to_be_waited_for_and_is_not_is_received_at_the_end(make: Callable[[], Shard]) -> None:
    shard, attending = make(), Attending()
    attending.begin([shard.connection])
    call = shard.ask()
    shard.answer()
    attending.end()
    call.done.result(SECONDS)


def test_what_nobody_comes_to_receive_is_received_a_little_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "_LOOK_SECONDS", 0.02)
    reading, attending = reading_threads(), Attending()
    shard = Shard(reading)
    reading.close()
    until(shard.is_looked_at, "the first look")
    shard.rest()
    attending.begin([shard.connection])  # and then it is interrupted
    call = shard.ask()
    shard.answer()
    call.done.result(SECONDS)
    shard.end.close()
    until(lambda: not shard.connection.is_open, "the end")


def test_one_thread_receives_from_several_shards_in_any_order(make: Callable[[], Shard]) -> None:
    shards, answers, attending = [make(), make()], [Read(), Read()], Attending()
    attending.begin([shard.connection for shard in shards])
    calls = [shard.ask(answer) for shard, answer in zip(shards, answers, strict=True)]

    def answer_both() -> None:
        shards[1].answer()
        calls[1].done.result(SECONDS)
        shards[0].answer()

    others = in_thread(answer_both)
    wait(calls, *shards, attending=attending)
    others.join(SECONDS)
    assert {answer.by for answer in answers} == {ME}


def test_what_another_thread_completes_ends_the_wait(make: Callable[[], Shard]) -> None:
    shard, beside = make(), Future[None]()
    call = shard.ask()
    number = shard.asked()

    def complete() -> None:
        until(shard.is_read, "the thread that waits")
        beside.set_exception(CallFailed(0, "by gRPC"))

    other = in_thread(complete)
    Attending().wait([call.done, beside], [shard.connection])
    other.join(SECONDS)
    assert not call.done.done(), "one that has failed is enough"
    shard.answer(number)
    call.done.result(SECONDS)


def test_a_second_thread_that_waits_has_its_answers_while_the_first_receives(make: Callable[[], Shard]) -> None:
    shard, answers = make(), [Read(), Read()]
    calls = [shard.ask(each) for each in answers]
    numbers = [shard.asked(), shard.asked()]
    first = in_thread(lambda: wait([calls[0]], shard))
    until(shard.is_read, "the first")
    second = in_thread(lambda: wait([calls[1]], shard))
    shard.answer(numbers[1])
    second.join(SECONDS)
    shard.answer(numbers[0])
    first.join(SECONDS)
    assert not any(thread.is_alive() for thread in (first, second))
    assert answers[1].message == b"answer"


class Several(OneAnswer):
    """Answers of which each is noted."""

    def __init__(self, note: Callable[[], object]) -> None:
        super().__init__()
        self._note = note

    def take(self, payload: memoryview | None) -> bool:
        self._note()
        return False


def test_a_shard_with_many_answers_leaves_the_others_their_turn(make: Callable[[], Shard]) -> None:
    shards, seen, calls = [make(), make()], [], []
    Attending().begin([shard.connection for shard in shards])
    for name, shard in zip("ab", shards, strict=True):
        calls.append(shard.ask(Several(lambda name=name: seen.append(name))))
        number = shard.asked()
        answers = [write_header(number, kind, 1) + b"x" for kind in [Kind.ANSWER] * 39 + [Kind.LAST]]
        shard.end.sendall(b"".join(answers))
    wait(calls, *shards)
    assert len(seen) == 80
    assert set(seen[:40]) == {"a", "b"}


@pytest.mark.parametrize("how", ["stalls", "trickles"])
def test_an_answer_that_takes_long_does_not_keep_other_shards_answers(
    make_looking: Callable[[], Shard], how: str
) -> None:
    slow, quick = make_looking(), make_looking()
    comes, answer, payload, others = Coming(), Read(), bytes(2**16), []
    calls = [slow.ask(comes), quick.ask(answer)]
    number = slow.asked()

    def send() -> None:
        until(lambda: slow.is_read() and quick.is_read(), "the thread that waits")
        slow.end.sendall(write_header(number, Kind.LAST, 4, len(payload)) + b"head")
        assert comes.event.wait(SECONDS)
        quick.answer()
        sent = 0
        while how == "trickles" and sent < 500 and not has_result(calls[1], 0.01):
            slow.end.sendall(payload[sent : sent + 1])
            sent += 1
        others.append(has_result(calls[1], 0 if sent else SECONDS / 4))
        slow.end.sendall(payload[sent:])

    other = in_thread(send)
    wait(calls, slow, quick)
    other.join(SECONDS)
    assert others == [True]
    assert answer.by == "receive"
    assert comes.found == [(b"head", payload)]


# -- ends --------------------------------------------------------------------------------------------------------------


def test_a_connection_that_ends_fails_its_calls_and_others_go_on(make: Callable[[], Shard]) -> None:
    shards = [make(), make()]
    calls = [shard.ask() for shard in shards]
    shards[0].end.close()
    wait(calls, *shards)
    with pytest.raises(CallFailed):
        calls[0].done.result(0)
    assert not shards[0].connection.is_open
    shards[1].answer()
    wait(calls[1:], *shards)
    calls[1].done.result(0)


@pytest.mark.parametrize("who", ["shard", "worker"])
def test_the_end_of_a_connection_of_which_nothing_is_expected_is_noticed(make: Callable[[], Shard], who: str) -> None:
    shard = make()
    shard.rest()
    if who == "shard":
        shard.end.close()
    else:
        shard.connection.close()
    until(lambda: not shard.connection.is_open, "the end")


def test_a_shard_that_does_not_answer_is_given_up_while_a_thread_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "_LOOK_SECONDS", 0.02)
    reading = reading_threads()
    shard = Shard(reading)
    reading.close()
    call = shard.connection.call(Kind.PULL, Parts(b""), OneAnswer(), 0.1)
    wait([call], shard)
    with pytest.raises(CallFailed, match="no answer"):
        call.done.result(0)
    shard.end.close()


@pytest.mark.parametrize("then", ["another wait", "the end of attending", "the end of the connection"])
def test_what_an_interrupt_has_left_taken_over_is_read(make: Callable[[], Shard], then: str) -> None:
    shard, attending = make(), Attending()
    call = shard.ask()
    attending._take_over(shard.connection)
    assert shard.is_read()
    if then == "another wait":
        shard.answer()
        wait([call], shard)
    elif then == "the end of attending":
        shard.answer()
        attending.end()
        call.done.result(SECONDS)
    else:
        shard.connection.close()
        until(lambda: not shard.connection.is_open, "the end")


class Interrupted(BaseException):
    """As of a handler of a signal that `undisturbed` does not hold."""


def break_off() -> None:
    raise Interrupted


def test_an_interrupt_at_any_line_leaves_no_connection_that_nobody_reads(make: Callable[[], Shard]) -> None:
    wanted = 0
    while True:
        wanted += 1
        shard, attending = make(), Attending()
        shard.rest()  # so that no other thread is woken for the answer
        attending.begin([shard.connection])
        call = shard.ask()
        shard.answer()
        with suppress(Interrupted), before_line(attending_module, wanted, break_off) as has_come:
            wait([call], shard, attending=attending)
        attending.end()
        until(lambda shard=shard: not shard.is_read() or not shard.connection.is_open, "that it is given back")
        shard.connection.close()
        until(lambda shard=shard: not shard.connection.is_open, "the end")
        if not has_come():
            break
    assert wanted > 50


# -- interrupted -------------------------------------------------------------------------------------------------------


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_ends_a_wait_at_once_and_the_answer_is_received_all_the_same(make: Callable[[], Shard]) -> None:
    shard, answer, attending = make(), Read(), Attending()
    attending.begin([shard.connection])
    call = shard.ask(answer)

    def interrupt_it() -> None:
        until(shard.is_read, "the thread that waits")
        interrupt()

    other = in_thread(interrupt_it)
    with pytest.raises(KeyboardInterrupt):
        wait([call], shard, attending=attending)
    other.join(SECONDS)
    shard.answer()
    call.done.result(SECONDS)
    assert answer.by == "receive"


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_in_the_middle_of_an_answer_waits_for_its_end(make: Callable[[], Shard]) -> None:
    """Half an answer that was thrown away would make all that follows unreadable."""
    shard, payload, comes = make(), bytes(range(256)) * 4096, Coming()
    call = shard.ask(comes)
    number = shard.asked()

    def send() -> None:
        until(shard.is_read, "the thread that waits")
        shard.end.sendall(write_header(number, Kind.LAST, 4, len(payload)) + b"head" + payload[:1000])
        assert comes.event.wait(SECONDS)
        interrupt()
        shard.end.sendall(payload[1000:])

    other = in_thread(send)
    with pytest.raises(KeyboardInterrupt):
        wait([call], shard)
    other.join(SECONDS)
    call.done.result(SECONDS)
    assert comes.found == [(b"head", payload)]
    after = shard.ask()
    shard.answer()
    wait([after], shard)
    after.done.result(0)


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_in_the_middle_of_an_answer_whose_rest_does_not_come_is_heard(
    make_looking: Callable[[], Shard],
) -> None:
    shard, comes = make_looking(), Coming()
    call = shard.ask(comes)
    number = shard.asked()

    def send() -> None:
        until(shard.is_read, "the thread that waits")
        shard.end.sendall(write_header(number, Kind.LAST, 4, 100) + b"head" + bytes(50))
        assert comes.event.wait(SECONDS)
        interrupt()

    other = in_thread(send)
    with pytest.raises(KeyboardInterrupt):
        wait([call], shard)
    other.join(SECONDS)
    with pytest.raises(CallFailed, match="a signal came"):
        call.done.result(0)
    assert not shard.connection.is_open


@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.parametrize("is_skipped", [False, True])
def test_ctrl_c_in_the_middle_of_an_answer_that_comes_in_slowly_is_heard(
    make_as_is: Callable[[], Shard], monkeypatch: pytest.MonkeyPatch, is_skipped: bool
) -> None:
    """Although bytes come all the time. is_skipped: the answer is to a call that needs it no more"""
    monkeypatch.setattr(client, "_HELD_SECONDS", 0.2)
    shard, ended = make_as_is(), threading.Event()
    call = shard.ask()
    number = shard.asked()

    def send() -> None:
        until(shard.is_read, "the thread that waits")
        shard.end.sendall(write_header(number + is_skipped, Kind.LAST, 4, 2**20) + b"head")
        until(lambda: shard.connection._is_reading, "the middle of the answer")
        interrupt()
        with suppress(OSError):
            while not ended.wait(0.001):
                shard.end.sendall(bytes(100))

    other = in_thread(send)
    try:
        with pytest.raises(KeyboardInterrupt):
            wait([call], shard)
    finally:
        ended.set()
    other.join(SECONDS)
    with pytest.raises(CallFailed, match="a signal came"):
        call.done.result(0)
    assert not shard.connection.is_open


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_between_answers_is_heard_although_more_have_come(make: Callable[[], Shard]) -> None:
    shard, seen = make(), []

    def note() -> None:
        seen.append(threading.current_thread().name)
        if len(seen) == 5:
            interrupt()

    call = shard.ask(Several(note))
    number = shard.asked()

    def send() -> None:
        until(shard.is_read, "the thread that waits")
        answers = [write_header(number, kind, 1) + b"x" for kind in [Kind.ANSWER] * 11 + [Kind.LAST]]
        shard.end.sendall(b"".join(answers))

    other = in_thread(send)
    with pytest.raises(KeyboardInterrupt):
        wait([call], shard)
    other.join(SECONDS)
    call.done.result(SECONDS)
    assert seen == [ME] * 5 + ["receive"] * 7


def test_an_exception_in_the_middle_of_an_answer_ends_the_connection(make: Callable[[], Shard]) -> None:
    """As of a handler of another signal: no call waits for what cannot be read any more."""
    shard = make()

    class Breaks(OneAnswer):
        def take(self, payload: memoryview | None) -> bool:
            raise Interrupted

    call = shard.ask(Breaks())
    number, other = shard.asked(), shard.ask()

    def answer() -> None:
        until(shard.is_read, "the thread that waits")
        shard.answer(number)

    answering = in_thread(answer)
    with pytest.raises(Interrupted):
        wait([call, other], shard)
    answering.join(SECONDS)
    with pytest.raises(CallFailed, match="its reader was interrupted"):
        other.done.result(0)
    assert not shard.connection.is_open


# -- many threads ------------------------------------------------------------------------------------------------------


class Echoing:
    """A shard that answers each call with its request, a few of them at a time, in any order."""

    def __init__(self, shard: Shard, seed: int) -> None:
        self._shard, self._random = shard, random.Random(seed)
        self.thread = in_thread(self._run)

    def _run(self) -> None:
        kept: list[tuple[int, bytes]] = []
        end, most = self._shard.end, self._random.choice([1, 2, 5])
        while True:
            header = end.recv(HEADER_BYTES, socket.MSG_WAITALL)
            if len(header) < HEADER_BYTES:
                return
            found = read_header(header, 2**20)
            kept.append((found.call, end.recv(found.size, socket.MSG_WAITALL)))
            self._random.shuffle(kept)
            while len(kept) >= most or (kept and not _has_bytes(end)):
                number, content = kept.pop()
                kind = self._random.choice([Kind.LAST, Kind.ANSWER])
                frames = write_header(number, kind, len(content)) + content
                end.sendall(frames + (write_header(number, Kind.END, 0) if kind is Kind.ANSWER else b""))


def _has_bytes(end: socket.socket) -> bool:
    return bool(select.select([end], [], [], 0)[0])


@pytest.mark.parametrize("seed", cases(range(2), range(2, 8)))
def test_many_threads_have_their_answers_whoever_receives(make: Callable[[], Shard], seed: int) -> None:
    """Two that attend to both connections, one that waits for nothing but its own answers, interrupted or not."""
    shards = [make(), make()]
    echoes = [Echoing(shard, seed) for shard in shards]
    wrong: list[object] = []

    def trains(number: int) -> None:
        own, attending = random.Random(f"{seed} {number}"), Attending()
        for step in range(60):
            if own.random() < 0.7:
                attending.begin([shard.connection for shard in shards])
            made = []
            for shard in shards:
                answer, request = OneAnswer(), f"{number} {step}".encode()
                for _ in range(own.choice([1, 1, 3])):
                    made.append((shard.connection.call(Kind.PULL, Parts(request), answer, SECONDS), answer, request))
            if own.random() < 0.1:
                attending.end()  # as where it is interrupted
            else:
                attending.wait([call.done for call, *_ in made], [shard.connection for shard in shards])
            for call, answer, request in made:
                call.done.result(SECONDS)
                wrong.extend([answer.message] if answer.message != request else [])

    def pushes() -> None:
        for step in range(200):
            request = f"push {step}".encode()
            found = shards[step % 2].connection.unary(Kind.PUSH, Parts(request), SECONDS)
            wrong.extend([found] if found != request else [])

    threads = [in_thread(lambda: trains(1)), in_thread(lambda: trains(2)), in_thread(pushes)]
    for thread in threads:
        thread.join(2 * SECONDS)
    assert not any(thread.is_alive() for thread in threads)
    assert not wrong
    assert not any(shard.connection._calls for shard in shards)
    for shard, echo in zip(shards, echoes, strict=True):
        shard.connection.close()
        echo.thread.join(SECONDS)


# -- a whole step ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_the_training_thread_receives_what_its_steps_wait_for(
    shared: Cluster, job: str, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "_LOOK_SECONDS", 60.0)  # no thread comes by meanwhile and has an answer read
    received: list[str] = []
    real = ClientConnection._take

    def noted(connection: ClientConnection, header: Any) -> None:
        received.append(threading.current_thread().name)
        real(connection, header)

    with shared.connect("sync", job=job, transport=transport) as session:
        torch.manual_seed(0)
        module = nn.Linear(4, 4)
        model, optimizer = session.prepare(module, torch.optim.SGD(module.parameters(), lr=0.1), overlap=False)
        for step in range(8):
            if step == 3:
                monkeypatch.setattr(ClientConnection, "_take", noted)
            optimizer.zero_grad()
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
        monkeypatch.undo()
    assert received.count(ME) >= 5
    if transport == "shm":
        assert set(received) == {ME}, "no other thread is woken"


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_the_training_thread_receives_the_rows_that_it_looks_up(
    shared: Cluster, job: str, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "_LOOK_SECONDS", 60.0)
    received: list[str] = []
    woken: list[str] = []  # the threads that have asked for another one to be woken when bytes come
    take, watch = ClientConnection._take, ReadingThreads._watch

    def noted(connection: ClientConnection, header: Any) -> None:
        received.append(threading.current_thread().name)
        take(connection, header)

    def watched(reading: ReadingThreads, connection: Any, events: int) -> None:
        if reading._name == "receive" and events & select.EPOLLIN:
            woken.append(threading.current_thread().name)
        watch(reading, connection, events)

    with shared.connect("sync", job=job, transport=transport) as session:
        table = ps_worker.Embedding(4)
        model, optimizer = session.prepare(table, torch.optim.SGD(table.parameters(), lr=0.1))
        with monkeypatch.context() as patch:
            for step in range(6):
                if step == 2:
                    patch.setattr(ClientConnection, "_take", noted)
                    patch.setattr(ReadingThreads, "_watch", watched)
                optimizer.zero_grad()
                model(torch.arange(step, step + 40)).sum().backward()
                optimizer.step()
    assert len(received) >= 16, "of each step two for what is looked up, and two for its end"
    assert set(received) == {ME}
    assert not woken
