"""Calls between simulated processes, over links that lose, delay, repeat and reorder, and that can be cut.

A call suspends the thread that makes it until the answer is there, or its deadline has passed. It raises what the real
clients raise: the server's own error, or TryLater where there is no answer. The server runs it in a thread of its own.
"""

from __future__ import annotations

import contextlib
import math
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

from ps_protocol.errors import PSError, TryLater
from ps_protocol.messages.data import PulledBucket
from ps_protocol.messages.rows import PulledRows, PulledTable
from ps_server.shard.outbox import Answer, Lent, Outbox
from tests.simulation.processes import Host
from tests.simulation.world import Task, World

KEEPALIVE_SECONDS = 30.0  # after which a connection to a machine that says nothing breaks: ps_runtime.channel
LATE = 0.5  # of the calls that arrive after their caller has given up; they are carried out all the same
END = object()


@dataclass(frozen=True)
class Weather:
    """What happens on every link: chances that a message is lost, and that a call comes twice; its seconds."""

    loss: float = 0.0
    repeat: float = 0.0
    mean: float = 0.003
    longest: float = 0.01


class Call:
    """A call under way, as its caller has it."""

    def __init__(
        self, world: World, caller: Host, server: Host | None, method: str, address: str, streams: bool
    ) -> None:
        self.caller, self.server, self.streams = caller, server, streams
        self._method, self._address = method, address
        self.over = False
        self.arrives = 0.0  # when the last message of its answer arrives: they keep their order
        self.lacks_one = False  # a message of its answer was lost: none of those behind it arrives
        self.outbox: SentBeside | None = None  # at the server
        self._world = world
        self._inbox: deque[tuple[Any, PSError | None]] = deque()
        self._waiting: Task | None = None

    @property
    def name(self) -> str:
        """Returns what is called."""
        return f"{self._method} at {self._address}"

    def deliver(self, value: Any, error: PSError | None) -> None:
        """Takes an answer that has arrived; one that comes after the end is ignored."""
        if not self.over:
            self._inbox.append((value, error))
            self.over = not self.streams or error is not None or value is END
            if self._waiting is not None:
                self._world.wake(self._waiting)

    def _is_heard(self) -> bool:
        return self.server is None or (self.server.alive and not self.server.stopped)

    def take(self, until: float) -> Any:
        """Returns the next answer. Raises TryLater at the deadline, or when the server's machine says nothing."""
        since = self._world.now
        while not self._inbox:
            self._waiting = self._world.current
            left = until - self._world.now
            silent = self._world.now >= since + KEEPALIVE_SECONDS
            if left <= 0 or (silent and not self._is_heard()):
                self.over = True
                raise TryLater(f"{self.name} does not answer ({'UNAVAILABLE' if left > 0 else 'DEADLINE_EXCEEDED'})")
            since = self._world.now if silent else since
            self._world.block(min(left, since + KEEPALIVE_SECONDS - self._world.now))
        self._waiting = None
        value, error = self._inbox.popleft()
        if error is not None:
            raise error
        return value


class Network:
    """All links. Who listens where; the weather; what is cut."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.weather = Weather()
        self.unexpected: list[tuple[str, Exception]] = []  # what servers raised that is no PSError
        self._listeners: dict[str, Host] = {}
        self._cut: dict[frozenset[Host], float] = {}
        self._open: dict[Host, dict[int, Call]] = {}  # by server
        self._streams: dict[Host, dict[int, tuple[Host, Call]]] = {}  # by caller

    def listen(self, host: Host) -> None:
        """Has calls to the host's address answered by it."""
        self._listeners[host.address] = host
        self._open[host] = {}
        self.connect(host)

    def listener(self, address: str) -> Host | None:
        """Returns the process that listens at an address, or did last."""
        return self._listeners.get(address)

    def connect(self, host: Host) -> None:
        """Has both ends of a process's connections hear of its death, unless its machine goes down with it."""
        host.on_death.append(lambda: self._died(host))

    @property
    def is_calm(self) -> bool:
        """Whether nothing is cut, and no message is lost."""
        return not self.weather.loss and all(until <= self.world.now for until in self._cut.values())

    def cut(self, one: Host, other: Host, seconds: float) -> None:
        """Nothing passes between two for so long; what is sent meanwhile arrives afterwards."""
        self.world.trace(f"nothing passes between {one.name} and {other.name} for {seconds:.1f} s")
        self._cut[frozenset((one, other))] = self.world.now + seconds

    def is_cut(self, one: Host, other: Host) -> bool:
        """Whether nothing passes between two now."""
        return self._cut.get(frozenset((one, other)), 0.0) > self.world.now

    def _died(self, host: Host) -> None:
        calls, self._open[host] = self._open.get(host, {}), {}
        streams = self._streams.pop(host, {})
        if not host.lost_power:
            for call in calls.values():
                self._break(call)
            for server, call in streams.values():
                self._hang_up(server, call)

    # -- the caller's side -------------------------------------------------------------------------------------------

    def call(
        self, address: str, method: str, *arguments: Any, seconds: float, ready: bool = False, repeats: bool = True
    ) -> Any:
        """Makes a call and returns its answer. ready: waits for a server that is not there yet; repeats: it may come
        twice, as if the answer to its first attempt had been lost."""
        until = self.world.now + seconds
        while ready and not self._is_served(address, method):
            if self.world.now >= until:
                raise TryLater(f"{address} does not answer (DEADLINE_EXCEEDED)")
            self.world.let_pass(0.1)
        call = self._begin(address, method, arguments, False, repeats)
        return call.take(until)

    def stream(
        self, address: str, method: str, *arguments: Any, seconds: float, begun: Callable[[Call], object]
    ) -> Iterator[Any]:
        """Makes a call and yields its answers. begun: takes the call, which may be broken off through it."""
        until = self.world.now + seconds
        call = self._begin(address, method, arguments, True, False)
        begun(call)
        server = self._listeners.get(address)
        try:
            while True:
                value = call.take(until)
                if value is END:
                    return
                yield value
        finally:
            call.over = True
            if server is not None:
                self._streams.get(call.caller, {}).pop(id(call), None)
                if call.caller.alive:
                    self._hang_up(server, call)

    def _is_served(self, address: str, method: str) -> bool:
        host = self._listeners.get(address)
        return host is not None and method in host.methods

    def _begin(self, address: str, method: str, arguments: tuple[Any, ...], streams: bool, repeats: bool) -> Call:
        task = self.world.current
        assert task is not None
        caller = task.host
        caller.check_alive()
        server = self._listeners.get(address)
        call = Call(self.world, caller, server, method, address, streams)
        if server is None or not server.alive:
            refused = partial(call.deliver, None, TryLater(f"{address}: connection refused"))
            self.world.at(self._seconds(), refused, caller)
            return call
        self._open[server][id(call)] = call
        if streams:
            self._streams.setdefault(caller, {})[id(call)] = server, call
        arrive = partial(self._arrive, server, call, method, arguments)
        if repeats and self.world.random.random() < self.weather.repeat:
            self._send(caller, server, arrive, call)
        self._send(caller, server, arrive, call)
        return call

    def _send(self, sender: Host, receiver: Host, arrive: Callable[[], object], call: Call) -> None:
        delay = self._delay(sender, receiver)
        if delay is not None:
            self.world.at(delay, arrive, receiver)
        else:
            self._break(call)

    def _break(self, call: Call) -> None:
        """Has a caller hear that its connection broke."""
        error = TryLater(f"{call.name} does not answer (connection reset)")
        self.world.at(self._seconds(), partial(call.deliver, None, error), call.caller)

    def _delay(self, one: Host, other: Host) -> float | None:
        """Returns when a message arrives; None if it is lost."""
        if self.weather.loss and self.world.random.random() < self.weather.loss:
            return None
        seconds = self._seconds()
        if self._cut:
            seconds += max(0.0, self._cut.get(frozenset((one, other)), 0.0) - self.world.now)
        return seconds

    def _seconds(self) -> float:
        return min(self.weather.longest, -math.log(1.0 - self.world.random.random()) * self.weather.mean)

    # -- the server's side -------------------------------------------------------------------------------------------

    def _arrive(self, server: Host, call: Call, method: str, arguments: tuple[Any, ...]) -> None:
        if call.over and self.world.random.random() >= LATE:
            return
        if method not in server.methods:
            self._answer(server, call, None, TryLater(f"{call.name}: connection refused"))
            return
        if call.streams:
            call.outbox = SentBeside(self, server, call)
            arguments = (*arguments, call.outbox)
        server.spawn(method, partial(self._serve, server, call, method, arguments))

    def _serve(self, server: Host, call: Call, method: str, arguments: tuple[Any, ...]) -> None:
        value, error = None, None
        try:
            value = server.methods[method](*arguments)
        except PSError as raised:
            error = type(raised)(str(raised))
            error.retry_after = raised.retry_after
        except Exception as raised:
            self.unexpected.append((call.name, raised))
            self.world.trace(f"{server.name}: {call.name} raises {type(raised).__name__}: {raised}")
            error = PSError("internal error; the server's log says more")
        if error is not None or not call.streams:
            self._answer(server, call, value, error)

    def _answer(self, server: Host, call: Call, value: Any, error: PSError | None) -> None:
        self._open.get(server, {}).pop(id(call), None)
        self._send(server, call.caller, partial(call.deliver, value, error), call)

    def send_message(self, server: Host, call: Call, value: Any, error: PSError | None) -> None:
        """Sends a message of a stream, after those before."""
        over = error is not None or value is END
        if over:
            self._open.get(server, {}).pop(id(call), None)
        if call.lacks_one:
            return
        delay = self._delay(server, call.caller)
        if delay is None:
            call.lacks_one = True
            self._break(call)
            return
        call.arrives = max(call.arrives, self.world.now + delay)
        self.world.at(call.arrives - self.world.now, partial(call.deliver, value, error), call.caller)

    def _hang_up(self, server: Host, call: Call) -> None:
        """Has the server hear that a stream's caller takes no more."""

        def close() -> None:
            self._open.get(server, {}).pop(id(call), None)
            if call.outbox is not None:
                call.outbox.close()

        self.world.at(self._delay(call.caller, server) or self.weather.longest, close, server)


class SentBeside(Outbox):
    """Where a shard's answers to a pull go: sent by a thread beside all others."""

    def __init__(self, network: Network, host: Host, call: Call) -> None:
        self._network, self._host, self._call = network, host, call
        self._queue: deque[Callable[[], tuple[Any, PSError | None]]] = deque()
        self._sending = False
        self._closed = False
        self._on_close: Callable[[], None] | None = None

    def tell(self, answer: Answer) -> None:
        """Sends an answer."""
        self._put(lambda: (_copied(answer), None))

    def lend(self, lent: Callable[[], AbstractContextManager[Lent]], is_small: bool = False) -> None:
        """Sends an answer that is made when its turn has come."""

        def make() -> tuple[Any, PSError | None]:
            with lent() as (answer, _):
                return _copied(answer), None

        self._put(make)

    def finish(self) -> None:
        """Ends the stream."""
        self._put(lambda: (END, None))

    def fail(self, error: PSError) -> None:
        """Ends the stream with an error."""
        self._put(lambda: (None, type(error)(str(error))))

    def on_close(self, callback: Callable[[], None]) -> None:
        """Has a thread call back when the stream is over."""
        if self._closed:
            self._host.spawn("send", callback)
        else:
            self._on_close = callback

    def close(self) -> None:
        """Notes that the stream is over."""
        if not self._closed:
            self._closed = True
            self._queue.clear()
            if self._on_close is not None and self._host.alive:
                self._host.spawn("send", self._on_close)

    def _put(self, make: Callable[[], tuple[Any, PSError | None]]) -> None:
        if self._closed:
            return
        self._queue.append(make)
        if not self._sending:
            self._sending = True
            self._host.spawn("send", self._drain)

    def _drain(self) -> None:
        while self._queue:
            value, error = self._queue.popleft()()
            self._network.send_message(self._host, self._call, value, error)
            if error is not None or value is END:
                self._closed = True
                self._queue.clear()
                if self._on_close is not None:
                    self._on_close()
        self._sending = False


def _copied(answer: Answer) -> Answer:
    if isinstance(answer, PulledBucket | PulledRows | PulledTable) and answer.payload is not None:
        with contextlib.suppress(AttributeError):
            return answer._replace(payload=memoryview(bytes(answer.payload)))
    return answer
