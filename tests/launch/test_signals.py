"""A main thread hears a signal, also one that came at the wrong moment and interrupts nothing."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from ps_runtime import signals
from ps_runtime.signals import TOGETHER_SECONDS, Ending, SignalEvent, await_all
from tests.tools.launching import END_SECONDS, Commands, script
from tests.tools.lines import before_line


@pytest.fixture(autouse=True)
def _interrupts() -> Iterator[None]:
    """Ctrl-C raises KeyboardInterrupt, whatever a process that runs many tests has set."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


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
sys.stdout.write("waits\\n")  # at once with its end, as the signal may follow
sys.stdout.flush()
"""


@pytest.mark.parametrize("wait", ["await_event(threading.Event())", "await_all([Future()])"])
def test_a_signal_that_interrupts_nothing_is_heard(commands: Commands, wait: str) -> None:
    command = commands.start("-c", WAITING + wait)
    command.says("waits")
    command.process.send_signal(signal.SIGTERM)
    assert command.process.wait(END_SECONDS) == 0
    assert command.out == "waits\nheard\n"


@pytest.mark.parametrize("module", [signals, threading])
def test_a_handler_may_set_an_event_at_any_line_of_the_wait_for_it(module: ModuleType) -> None:
    wanted = 1
    while True:
        event = SignalEvent()
        with before_line(module, wanted, event.set) as has_come:
            assert event.wait(0.01) == has_come()
        if not has_come():
            break
        wanted += 1


def test_futures_are_awaited_until_all_are_done_or_one_has_failed() -> None:
    futures: list[Future[int]] = [Future(), Future(), Future()]
    futures[0].set_result(1)
    futures[1].set_exception(ValueError("wrong"))
    assert await_all(futures) == set(futures[:2])
    futures[2].set_result(3)
    assert await_all(futures) == set(futures)
    assert await_all([]) == set()


# A launcher whose workers have half a second to end, and a worker that takes longer.
STUBBORN = """
import sys
import ps_launch.worker_launch, ps_worker.cli
ps_launch.worker_launch.STOP_SECONDS = 0.5
sys.argv[:] = ["ps-worker", "run", "--mode=single", *sys.argv[1:]]
ps_worker.cli.main()
"""
IGNORES = """
import signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
say("ignores SIGTERM")
while True:
    signal.pause()
"""


def test_the_launcher_says_which_worker_it_has_killed(commands: Commands, tmp_path: Path) -> None:
    launcher = commands.start("-c", STUBBORN, script(tmp_path, IGNORES))
    launcher.says("ignores SIGTERM")
    assert launcher.end(signal.SIGTERM) == 128 + signal.SIGTERM
    assert "worker 0 did not end within 0.5 s and was killed" in launcher.err


# -- blocks that no signal disturbs ------------------------------------------------------------------------------------


def end_at_once(ending: Ending) -> None:
    """Checks that nothing holds signals."""
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    with pytest.raises(SystemExit):
        ending.tell(signal.SIGTERM)


def interrupt() -> None:
    """Ctrl-C."""
    signal.raise_signal(signal.SIGINT)


def test_ctrl_c_at_any_line_is_heard_once_and_leaves_nothing_held() -> None:
    wanted, interrupts = 1, 0
    while True:
        ending = Ending()
        try:
            with before_line(signals, wanted, interrupt) as has_come, ending.hold(), ending.let_through():
                pass
        except KeyboardInterrupt:
            interrupts += 1
        if not has_come():
            break
        assert interrupts == wanted, "each is heard"
        end_at_once(ending)
        wanted += 1
    assert wanted > 20


def test_what_is_held_back_is_known_until_it_acts() -> None:
    ending, seen = Ending(), []

    def interrupted() -> None:
        with ending.hold():
            seen.append(ending.is_held_back)
            signal.raise_signal(signal.SIGINT)
            seen.append(ending.is_held_back)

    def told() -> None:
        with ending.hold():
            ending.tell(signal.SIGTERM)
            seen.append(ending.is_held_back)
            with ending.let_through():
                seen.append("not reached")

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    seen.append(ending.is_held_back)
    with pytest.raises(SystemExit):
        told()
    seen.append(ending.is_held_back)
    assert seen == [False, True, False, True, False]


def test_a_signal_acts_once_and_leaves_later_waits_alone() -> None:
    """Such as those of a script that saves what it has in a `finally`."""
    ending, seen = Ending(), []
    with pytest.raises(SystemExit):
        ending.tell(signal.SIGTERM)
    with ending.hold(), ending.let_through():
        seen.append(ending.is_held_back)
    assert (seen, ending.end_requested) == ([False], True)
    with pytest.raises(SystemExit) as ended:
        ending.exit_if_requested()  # a step, as the first SystemExit was lost
    assert ended.value.code == 128 + signal.SIGTERM


def test_signals_that_come_together_act_once_and_a_later_one_acts_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a scheduler and of a launcher, the second one while the script saves what it has."""
    ending, now = Ending(), 1000.0
    monkeypatch.setattr(signals, "time", SimpleNamespace(monotonic=lambda: now))
    with pytest.raises(SystemExit):
        ending.tell(signal.SIGTERM)
    now += TOGETHER_SECONDS / 2
    ending.tell(signal.SIGTERM)
    with ending.hold():
        ending.tell(signal.SIGTERM)
    with pytest.raises(SystemExit):
        ending.exit_if_requested()  # a step, which ends as the first signal did, and is none itself
    now += TOGETHER_SECONDS / 2
    with pytest.raises(SystemExit):
        ending.tell(signal.SIGTERM)


def test_a_process_that_ends_in_order_takes_two_sigterms_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """But Ctrl-C at once: only a person sends it again."""
    now, acted = 1000.0, list[int]()
    monkeypatch.setattr(signals, "time", SimpleNamespace(monotonic=lambda: now))
    before = signal.getsignal(signal.SIGTERM)
    try:
        signals.on_further_signals(lambda number, _: acted.append(number))
        signal.raise_signal(signal.SIGTERM)
        assert acted == []
        signal.raise_signal(signal.SIGINT)
        now += TOGETHER_SECONDS
        signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert acted == [signal.SIGINT, signal.SIGTERM]


# A child that a script forks while it saves what it has, such as a worker of multiprocessing.Pool.
FORKS = """
import os, signal
from ps_runtime.signals import end_by_signal
signal.signal(signal.SIGTERM, lambda number, _: end_by_signal(number))
try:
    signal.raise_signal(signal.SIGTERM)
finally:
    child = os.fork()
    if child == 0:
        signal.raise_signal(signal.SIGTERM)
        os._exit(0)
    print("child", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_signal_of_a_process_is_none_of_a_child_that_it_forks_then(commands: Commands) -> None:
    """The child's own first signal acts: whoever forked it, and then ends it, waits for its end."""
    command = commands.start("-c", FORKS)
    assert command.process.wait(END_SECONDS) == 128 + signal.SIGTERM
    assert command.out == f"child {128 + signal.SIGTERM}\n"


# A child that another thread forks while the main thread is in a step. multiprocessing.Pool replaces its workers so.
FORKS_IN_A_STEP = """
import os, signal, threading
from ps_runtime.signals import end_by_signal, undisturbed
signal.signal(signal.SIGTERM, lambda number, _: end_by_signal(number))

def fork():
    child = os.fork()
    if child == 0:
        try:
            signal.raise_signal(getattr(signal, NAME))
        except BaseException as error:
            os._exit(7 if isinstance(error, KeyboardInterrupt) else error.code)
        os._exit(0)
    print("child", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

with undisturbed():
    thread = threading.Thread(target=fork)
    thread.start()
    thread.join()
"""


@pytest.mark.parametrize(("name", "code"), [("SIGTERM", 128 + signal.SIGTERM), ("SIGINT", 7)])
def test_a_child_that_another_thread_forks_in_a_step_is_ended_by_a_signal(
    commands: Commands, name: str, code: int
) -> None:
    command = commands.start("-c", FORKS_IN_A_STEP.replace("NAME", repr(name)))
    assert command.process.wait(END_SECONDS) == 0
    assert command.out == f"child {code}\n"


def test_a_signal_at_any_line_acts_once() -> None:
    wanted, ends = 1, 0
    while True:
        ending = Ending()
        end = partial(ending.tell, signal.SIGTERM)
        try:
            with before_line(signals, wanted, end) as has_come, ending.hold(), ending.let_through():
                pass
        except SystemExit:
            ends += 1
        if not has_come():
            break
        assert ends == wanted, "each acts"
        with ending.hold(), ending.let_through():
            pass
        wanted += 1
    assert wanted > 20


def test_a_second_ctrl_c_acts_at_once() -> None:
    ending, seen = Ending(), []

    def interrupted_twice() -> None:
        with ending.hold():
            signal.raise_signal(signal.SIGINT)
            seen.append("held")
            signal.raise_signal(signal.SIGINT)
            seen.append("not reached")

    with pytest.raises(KeyboardInterrupt):
        interrupted_twice()
    assert seen == ["held"]
    end_at_once(ending)
