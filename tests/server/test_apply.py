"""Who runs what is to be applied: threads of their own, or who has just brought it."""

from __future__ import annotations

import threading

import pytest

from ps_server.shard.threads import ApplyThreads

SECONDS = 20.0


@pytest.mark.parametrize("count", [1, 3])
def test_everything_is_run_by_no_more_threads_than_there_are(count: int) -> None:
    threads, lock = ApplyThreads(count), threading.Lock()
    done: list[int] = []
    running: list[int] = []
    most: list[int] = []

    def task(number: int) -> None:
        with lock:
            running.append(number)
            most.append(len(running))
        with lock:
            running.remove(number)
            done.append(number)

    def bring(first: int) -> None:
        for number in range(first, first + 100, 2):
            threads.submit(lambda number=number: task(number))  # type: ignore[misc]
            threads.run_here([lambda number=number: task(number + 1)])  # type: ignore[misc]

    bringing = [threading.Thread(target=bring, args=(100 * n,)) for n in range(4)]
    for thread in bringing:
        thread.start()
    for thread in bringing:
        thread.join(SECONDS)
    threads.stop()
    assert sorted(done) == list(range(400))
    assert max(most) <= count


def test_who_finds_enough_at_work_returns_at_once_and_its_tasks_are_run() -> None:
    threads, begun, go_on, done = ApplyThreads(1), threading.Event(), threading.Event(), threading.Event()

    def long() -> None:
        begun.set()
        assert go_on.wait(SECONDS)

    threads.submit(long)
    assert begun.wait(SECONDS)
    threads.run_here([done.set])
    assert not done.is_set(), "the one thread is still at the first"
    go_on.set()
    assert done.wait(SECONDS)
    threads.stop()


def test_stopping_waits_for_what_others_run() -> None:
    threads, begun, go_on = ApplyThreads(1), threading.Event(), threading.Event()
    done: list[str] = []

    def long() -> None:
        begun.set()
        assert go_on.wait(SECONDS)
        done.append("task")

    lending = threading.Thread(target=lambda: threads.run_here([long]))
    lending.start()
    assert begun.wait(SECONDS)
    stopping = threading.Thread(target=lambda: (threads.stop(), done.append("stop")))
    stopping.start()
    go_on.set()
    for thread in (lending, stopping):
        thread.join(SECONDS)
    assert done == ["task", "stop"]


def test_a_task_that_comes_after_the_end_is_run_by_who_brings_it() -> None:
    """A call may have found the task before the shard stopped."""
    threads, ran = ApplyThreads(1), list[int]()
    threads.stop()
    threads.submit(lambda: ran.append(threading.get_ident()))
    assert ran == [threading.get_ident()]
    threads.stop()
