"""The world that simulated clusters live in: its threads, locks, processes and links behave as real ones do."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial

import pytest

from ps_protocol.errors import PSError, TryLater
from ps_runtime.background import Background
from ps_server.shard import threads as shard_threads
from tests.simulation.binding import bound
from tests.simulation.network import Network, Weather
from tests.simulation.processes import Host
from tests.simulation.threads import Condition, Event, Lock, RLock, Thread, ThreadPoolExecutor
from tests.simulation.world import World

SERVER = "10.0.0.9:7000"


def in_threads(world: World, *works: Callable[[], object]) -> Host:
    """Runs each in a thread of one process, until nothing happens any more."""
    host = Host(world, "process")
    for number, work in enumerate(works):
        host.spawn(f"thread {number}", work)
    world.run(lambda: False, 1000.0)
    return host


# -- threads ---------------------------------------------------------------------------------------------------------


def test_a_lock_lets_one_in_and_time_passes_for_the_others_alone() -> None:
    world, said = World("lock"), []
    lock = Lock(world)

    def hold(name: str) -> None:
        with lock:
            said.append((name, "in", world.now - 1000))
            world.let_pass(2.0)
        said.append((name, "out", world.now - 1000))

    in_threads(world, partial(hold, "a"), partial(hold, "b"))
    assert [(what, when) for _, what, when in said] == [("in", 0), ("out", 2), ("in", 2), ("out", 4)]


def test_a_lock_is_waited_for_no_longer_than_its_timeout_and_an_rlock_lets_its_owner_in_again() -> None:
    world = World("timeout")
    lock, again = Lock(world), RLock(world)
    found: list[object] = []

    def owner() -> None:
        with lock:
            world.let_pass(5.0)
        with again, again:
            found.append("twice")

    def other() -> None:
        found.append(lock.acquire(blocking=False))
        found.append((lock.acquire(timeout=1.0), world.now - 1000))

    in_threads(world, owner, other)
    assert found == [False, (False, 1.0), "twice"]
    assert not lock.locked()
    assert not again.locked()


def test_a_condition_wakes_those_that_wait_and_its_wait_ends_in_time() -> None:
    world = World("condition")
    changed, state, found = Condition(world), {"there": False}, []

    def wait(seconds: float) -> None:
        with changed:
            found.append((changed.wait_for(lambda: state["there"], seconds), world.now - 1000))

    def tell() -> None:
        world.let_pass(3.0)
        with changed:
            state["there"] = True
            changed.notify_all()

    in_threads(world, partial(wait, 1.0), partial(wait, 9.0), tell)
    assert found == [(False, 1.0), (True, 3.0)]


def test_an_exception_ends_its_thread_alone_and_is_kept() -> None:
    world, done = World("exception"), Event(World("other"))

    def main() -> None:
        thread = Thread(world, target=lambda: 1 / 0, name="leases")
        thread.start()
        thread.join()
        assert not thread.is_alive()
        done.set()

    host = in_threads(world, main)
    assert done.is_set()
    assert [(of, name, type(error)) for of, name, error in world.dead_threads] == [(host, "leases", ZeroDivisionError)]


def test_a_pool_runs_no_more_calls_at_once_than_it_has_threads() -> None:
    world, found = World("pool"), []

    def main() -> None:
        with ThreadPoolExecutor(world, 2) as pool:
            futures = [pool.submit(world.let_pass, 1.0) for _ in range(5)]
            failing = pool.submit(lambda: 1 / 0)
            assert isinstance(failing.exception(), ZeroDivisionError)
            for future in futures:
                future.result()
        found.append(world.now - 1000)

    in_threads(world, main)
    assert found == [3.0]


def test_the_real_background_threads_run_in_virtual_time_and_only_while_they_are_bound() -> None:
    world, calls = World("background"), []

    def main() -> None:
        background = Background()
        background.start()
        background.repeat("leases", 10.0, lambda: calls.append(world.now - 1000))
        world.let_pass(35.0)
        background.stop()

    with bound(world, {}):
        assert shard_threads.threading is not threading
        in_threads(world, main)
    assert calls == [10.0, 20.0, 30.0]
    assert shard_threads.threading is threading


# -- processes and links ---------------------------------------------------------------------------------------------


def test_a_process_that_is_killed_does_nothing_more_not_even_in_its_finally() -> None:
    world, said = World("kill"), []
    network, lock = Network(world), Lock(world)

    def main() -> None:
        try:
            with lock:
                world.let_pass(10.0)
        finally:
            said.append("finally")
            network.call(SERVER, "say", 1, seconds=1.0)
            said.append("called")

    host = Host(world, "victim")
    host.spawn("main", main)
    world.at(1.0, host.kill)
    world.run(lambda: False, 100.0)
    assert said == ["finally"]
    assert world.dead_threads == []


def serving(world: World, network: Network) -> tuple[Host, list[int]]:
    """A process that answers `say` with what it is sent, and what it has heard."""
    host, heard = Host(world, "server", SERVER), list[int]()

    def say(number: int) -> int:
        heard.append(number)
        return number

    host.methods = {"say": say}
    network.listen(host)
    return host, heard


def calls(world: World, network: Network, count: int, seconds: float = 5.0) -> list[object]:
    """So many calls at once: what each was answered with, and when."""
    answers: list[object] = []

    def call(number: int) -> None:
        try:
            answers.append((network.call(SERVER, "say", number, seconds=seconds), world.now - 1000))
        except PSError as error:
            answers.append((type(error), world.now - 1000))

    host = Host(world, "caller")
    for number in range(count):
        host.spawn("call", partial(call, number))
    world.run(lambda: len(answers) == count, 100.0)
    return answers


def test_links_delay_reorder_repeat_and_lose_as_the_weather_says() -> None:
    world = World("links")
    network = Network(world)
    _, heard = serving(world, network)
    assert sorted(number for number, _ in calls(world, network, 50)) == [*range(50)]  # type: ignore[misc]
    assert heard != sorted(heard), "messages overtake each other"
    heard.clear()
    network.weather = Weather(repeat=1.0)
    calls(world, network, 20)
    world.run(lambda: False, 5.0)
    assert {*heard} == {*range(20)}
    assert len(heard) > 25, "many came twice, some of those when their caller had its answer"
    network.weather = Weather(loss=1.0)
    assert {error for error, _ in calls(world, network, 20)} == {TryLater}  # type: ignore[misc]


def test_what_is_sent_over_a_cut_link_arrives_when_it_heals_and_to_a_stopped_process_when_it_goes_on() -> None:
    world = World("cut")
    network = Network(world)
    server, _ = serving(world, network)
    caller = Host(world, "caller")
    answers: list[float] = []

    def call() -> None:
        network.call(SERVER, "say", 1, seconds=60.0)
        answers.append(world.now - 1000)

    network.cut(caller, server, 4.0)
    caller.spawn("call", call)
    world.run(lambda: bool(answers), 50.0)
    server.stop(6.0)
    caller.spawn("call", call)
    world.run(lambda: len(answers) == 2, 50.0)
    assert 4.0 <= answers[0] <= 4.1
    assert 10.0 <= answers[1] <= 10.2


def test_a_call_ends_at_its_deadline_while_the_server_hangs_and_soon_after_the_server_dies() -> None:
    world = World("hang")
    network = Network(world)
    server, _ = serving(world, network)
    server.stop(30.0)
    [(error, when)] = calls(world, network, 1, seconds=2.0)  # type: ignore[misc]
    assert (error, when) == (TryLater, 2.0)
    world.at(1.0, server.kill)
    [(error, when)] = calls(world, network, 1, seconds=60.0)  # type: ignore[misc]
    assert error is TryLater
    assert when < 40.0


def test_a_server_that_raises_what_is_no_error_of_ours_says_nothing_of_it_and_the_world_keeps_it() -> None:
    world = World("internal")
    network = Network(world)
    server, _ = serving(world, network)
    server.methods = {"say": lambda number: {}[number]}
    [(error, _)] = calls(world, network, 1)  # type: ignore[misc]
    assert error is PSError
    assert [type(error) for _, error in network.unexpected] == [KeyError]


@pytest.mark.parametrize("point", ["worker-half-added", "manifest-missing"])
def test_a_failpoint_is_a_place_where_time_passes_and_a_process_may_die(point: str) -> None:
    world, said = World("failpoint"), []
    with bound(world, {point: 1.0}):
        from ps_server.coordinator import job_workers

        def main() -> None:
            job_workers.failpoint(point)
            said.append(world.now > 1000)
            job_workers.failpoint(point)
            said.append("still alive")

        host = Host(world, "process")
        host.dies_at = {point: 2}
        host.spawn("main", main)
        world.run(lambda: False, 100.0)
    assert said == [True]
    assert not host.alive
