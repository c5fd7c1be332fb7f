"""The stream of a call that is over: nothing more is sent, and what waits for its end hears of it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from ps_server.rpc.streams import ResponseStream


class EndedCall:
    """A call that has ended, or ends at the moment in which it is told whom to call back: gRPC does so on a thread."""

    def __init__(self, ends_now: bool) -> None:
        self._ends_now = ends_now

    def add_callback(self, callback: Callable[[], None]) -> bool:
        if self._ends_now:
            callback()
        return self._ends_now


@pytest.mark.parametrize("ends_now", [True, False])
def test_a_stream_whose_call_ends_while_it_is_made_is_over(ends_now: bool) -> None:
    sent: list[Any] = []
    heard = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        outbox = ResponseStream(sent.append, EndedCall(ends_now), pool)  # type: ignore[arg-type]
        outbox.on_close(heard.set)
        outbox.put(lambda: "too late")
        assert heard.wait(10.0)
    assert sent == []


def test_what_a_stream_holds_is_given_back_before_its_end_is_told() -> None:
    told: list[Any] = []
    with ThreadPoolExecutor(1) as pool:
        outbox = ResponseStream(told.append, EndedCall(ends_now=False), pool)  # type: ignore[arg-type]
        outbox.closed = False  # its call goes on
        outbox.on_close(lambda: told.append("given back"))
        outbox.put(lambda: "a message")
        outbox.finish()
    assert told == ["a message", "given back", None]
