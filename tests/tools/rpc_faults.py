"""Calls that go wrong, by real gRPC interceptors on every channel that this process makes, and on data connections.

    lost      the request never reaches the handler; the client sees UNAVAILABLE
    unheard   the handler ran, but the reply is lost; of a stream, some messages came before it broke
    repeated  the call is made twice at the same time: two handlers run side by side

What happens to the n-th call of a method depends on the seed alone.
"""

from __future__ import annotations

import contextlib
import random
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from typing import Any

import grpc
import pytest
from google.rpc import code_pb2

from ps_frames.client import Answers, ClientCall, ClientConnection, EachAnswer
from ps_frames.frames import METHODS, Kind
from ps_protocol.framing import Parts
from ps_runtime import retry
from ps_runtime.grpc_status import CallFailed

KINDS = ("lost", "unheard", "repeated")


class Broken(grpc.RpcError):  # type: ignore[misc]  # grpcio ships no types
    """What a client sees of a call whose connection broke."""

    def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.UNAVAILABLE

    def details(self) -> str:
        return "a test broke this call"

    def trailing_metadata(self) -> None:
        return None


class RpcFaults(grpc.UnaryUnaryClientInterceptor, grpc.UnaryStreamClientInterceptor):  # type: ignore[misc]
    """Makes calls go wrong, each kind with the same chance.

    chance: of each kind; may be changed on the way. At 1 every call is lost.
    only:   the methods that may fail; None: all
    """

    def __init__(self, seed: int, chance: float = 0.25, only: Collection[str] | None = None) -> None:
        self._seed = seed
        self.chance = chance
        self._only = only
        self._lock = threading.Lock()
        self._calls: Counter[str] = Counter()
        self._repeats: list[threading.Thread] = []
        self.counts: Counter[tuple[str, str]] = Counter()  # by method and kind

    def intercept_unary_unary(self, continuation: Callable[..., Any], details: Any, request: Any) -> Any:
        kind, _ = self.draw(details.method.rpartition("/")[2])
        if kind == "lost":
            raise Broken
        if kind == "repeated":
            self._beside(lambda: continuation(details, request).result())
        call = continuation(details, request)
        if kind == "unheard":
            call.result()  # an error of the server's own reaches the client: this one it did hear
            raise Broken
        return call

    def intercept_unary_stream(self, continuation: Callable[..., Any], details: Any, request: Any) -> Any:
        kind, heard = self.draw(details.method.rpartition("/")[2])
        if kind == "lost":
            return _Stream(None, 0)
        if kind == "repeated":
            self._beside(lambda: list(continuation(details, request)))
        return _Stream(continuation(details, request), heard if kind == "unheard" else None)

    def draw(self, method: str) -> tuple[str, int]:
        """What happens to the next call of a method, and after how many messages if it is a stream."""
        with self._lock:
            self._calls[method] += 1
            draw = random.Random(f"{self._seed} {method} {self._calls[method]}")
            point = draw.random()
            place = int(point / self.chance) if self.chance else len(KINDS)
            fails = place < len(KINDS) and (self._only is None or method in self._only)
            kind = KINDS[place] if fails else "none"
            self.counts[method, kind] += 1
            return kind, draw.randrange(4)

    def _beside(self, call: Callable[[], object]) -> None:
        def run() -> None:
            with contextlib.suppress(grpc.RpcError, ValueError):  # the channel may be closed meanwhile
                call()

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        with self._lock:
            self._repeats.append(thread)

    def finish(self) -> None:
        """Waits for the calls beside others."""
        for thread in self._repeats:
            thread.join(60)


class _Stream:
    """A call's messages; with `heard`, it breaks after so many."""

    def __init__(self, call: Any, heard: int | None) -> None:
        self._call = call
        self._heard = heard

    def __iter__(self) -> Iterator[Any]:
        count = 0
        while self._heard is None or count < self._heard:
            try:
                message = next(self._call)
            except StopIteration:
                break
            yield message
            count += 1
        if self._heard is not None:
            self.cancel()
            raise Broken

    def cancel(self) -> None:
        if self._call is not None:
            self._call.cancel()


class _Heard:
    """The answers of a call on a data connection that breaks after so many."""

    def __init__(self, answers: Answers, heard: int) -> None:
        self._answers, self._left = answers, heard

    def place(self, head: bytes, payload_bytes: int) -> memoryview | None:
        return self._answers.place(head, payload_bytes) if self._left else None

    def take(self, payload: memoryview | None) -> bool:
        if not self._left:
            raise _broken()
        self._left -= 1
        return self._answers.take(payload)


def _broken() -> CallFailed:
    return CallFailed(code_pb2.UNAVAILABLE, Broken().details())


def _on_data_connections(monkeypatch: pytest.MonkeyPatch, faults: RpcFaults, name: str) -> None:
    """Makes calls by this method of ClientConnection go wrong."""
    real = getattr(ClientConnection, name)

    def broken(
        connection: ClientConnection, kind: Kind, request: Parts, answers: Answers, seconds: float
    ) -> ClientCall | None:
        what, heard = faults.draw(METHODS[kind])
        if what == "lost":
            call = ClientCall(answers, seconds)
            call.done.set_exception(_broken())
            return call
        if what == "repeated":
            real(connection, kind, request, EachAnswer(lambda *_: None), seconds)
        if what == "unheard":
            answers = _Heard(answers, 0 if METHODS[kind] == "Push" else heard)
        return real(connection, kind, request, answers, seconds)  # type: ignore[no-any-return]

    monkeypatch.setattr(ClientConnection, name, broken)


def break_calls(monkeypatch: pytest.MonkeyPatch, faults: RpcFaults) -> None:
    """Every channel that is made from now on goes through `faults`: of workers, coordinator and shards alike. So do the
    calls on data connections. What failed is soon tried again."""
    monkeypatch.setattr(retry, "FIRST_PAUSE_SECONDS", 0.001)
    monkeypatch.setattr(retry, "LONGEST_PAUSE_SECONDS", 0.02)
    real = grpc.insecure_channel

    def broken(*arguments: Any, **options: Any) -> Any:
        return grpc.intercept_channel(real(*arguments, **options), faults)

    monkeypatch.setattr(grpc, "insecure_channel", broken)
    for name in ("call", "call_now"):
        _on_data_connections(monkeypatch, faults, name)
