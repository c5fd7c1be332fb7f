"""A main thread hears a signal, also one that came at the wrong moment and interrupts nothing."""

from __future__ import annotations

import signal
from concurrent.futures import Future

import pytest

from ps_runtime.signals import await_all
from tests.tools.launching import END_SECONDS, Commands

# The system gives the signal to another thread, so nothing wakes the main thread: as with a signal that comes just
# before the wait begins.
WAITING = """
import signal, sys, threading
from concurrent.futures import Future
from ps_runtime.signals import await_all, await_event
def end(*_):
    print("heard", flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, end)
threading.Thread(target=threading.Event().wait, daemon=True).start()
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
print("waits", flush=True)
"""


@pytest.mark.parametrize("wait", ["await_event(threading.Event())", "await_all([Future()])"])
def test_a_signal_that_interrupts_nothing_is_heard(commands: Commands, wait: str) -> None:
    command = commands.start("-c", WAITING + wait)
    command.says("waits")
    command.process.send_signal(signal.SIGTERM)
    assert command.process.wait(END_SECONDS) == 0
    assert command.out == "waits\nheard\n"


def test_futures_are_awaited_until_all_are_done_or_one_has_failed() -> None:
    futures: list[Future[int]] = [Future(), Future(), Future()]
    futures[0].set_result(1)
    futures[1].set_exception(ValueError("wrong"))
    assert await_all(futures) == set(futures[:2])
    futures[2].set_result(3)
    assert await_all(futures) == set(futures)
    assert await_all([]) == set()
