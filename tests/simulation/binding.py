"""Puts the simulated threads, time and chance in the place of the real ones in the servers' modules.

The real code asks a module by a name: `threading.Lock()`, `secrets.token_bytes(16)`, `failpoint("worker-half-added")`.
Inside `bound` these names stand for what the world has. So the real locks, condition waits and background threads run
as they are written, in virtual time; and each failpoint is a place where time passes, and where a process may die.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import secrets
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import ps_server.coordinator.coordinator
import ps_server.shard.shard  # noqa: F401
from ps_runtime import background, pools
from ps_server import failpoints
from tests.simulation import threads
from tests.simulation.world import Killed, World

ROOMS = (
    *("ps_server.coordinator.", "ps_server.shard.", "ps_server.storage.", "ps_server.core.", "ps_runtime.background"),
    *("ps_feed.", "ps_server.relay.", "ps_server.rpc.data_service"),
    *("ps_worker.followed_model", "ps_worker.cluster.reader_buffers"),
)


def simulated_threading(world: World) -> SimpleNamespace:
    """Returns the replacement of the module `threading`."""
    names = ("Lock", "RLock", "Condition", "Event", "Thread")
    return SimpleNamespace(
        **{name: simulated_here(getattr(threading, name), partial(getattr(threads, name), world)) for name in names},
        current_thread=threading.current_thread,
    )


def simulated_here(real: Callable[..., Any], stand_in: Callable[..., Any]) -> Callable[..., Any]:
    """Returns what calls the stand-in in this thread of the operating system, which runs the world, and the real one in
    others: they belong to servers that other tests have running in this process."""
    here = threading.get_ident()
    return lambda *arguments, **named: (stand_in if threading.get_ident() == here else real)(*arguments, **named)


def simulated_secrets(world: World) -> SimpleNamespace:
    """Returns the replacement of the module `secrets`."""
    draw = world.random
    return SimpleNamespace(
        token_hex=lambda size=8: draw.randbytes(size).hex(),
        token_bytes=lambda size=8: draw.randbytes(size),
        randbits=draw.getrandbits,
        randbelow=draw.randrange,
    )


def simulated_time(world: World) -> SimpleNamespace:
    """Returns the replacement of the module `time`."""
    return SimpleNamespace(
        monotonic=lambda: world.now,
        time=lambda: world.now + 1.7e9,
        time_ns=lambda: int((world.now + 1.7e9) * 1e9),
        sleep=world.let_pass,
    )


def simulated_failpoint(world: World, pace: dict[str, float]) -> Callable[..., None]:
    """Returns what stands for `failpoint`: it takes the mean seconds that `pace` has by its name."""

    def failpoint(name: str) -> None:
        task = world.current
        if task is None:
            return
        host = task.host
        if name in host.dies_at:
            host.dies_at[name] -= 1
            if not host.dies_at[name]:
                host.kill(f" at {name}")
                raise Killed
        seconds = pace.get(name, 0.0)
        if seconds:
            world.let_pass(world.random.expovariate(1 / seconds))

    return failpoint


@contextlib.contextmanager
def bound(world: World, pace: dict[str, float], more: Sequence[tuple[Any, Any]] = ()) -> Iterator[None]:
    """Binds the servers' modules, and those of readers, to a world. more: what stands for what besides"""
    replacements: list[tuple[Any, Any]] = [
        (threading, simulated_threading(world)),
        (secrets, simulated_secrets(world)),
        (sys.modules["time"], simulated_time(world)),
        (background.note_error, simulated_here(background.note_error, world.round_failed)),
        (failpoints.failpoint, simulated_failpoint(world, pace)),
        (failpoints.armed, {"all of them"}),
        (concurrent.futures.ThreadPoolExecutor, partial(threads.ThreadPoolExecutor, world)),
        (pools.Pool, partial(threads.ThreadPoolExecutor, world)),
        (concurrent.futures.Future, partial(threads.Future, world)),
        *more,
    ]
    before: list[tuple[dict[str, Any], str, Any]] = []
    for name, module in list(sys.modules.items()):
        if not name.startswith(ROOMS):
            continue
        names = vars(module)
        for attribute, value in list(names.items()):
            for real, stand_in in replacements:
                if value is real:
                    before.append((names, attribute, real))
                    names[attribute] = stand_in
    try:
        yield
    finally:
        for names, attribute, real in before:
            names[attribute] = real
