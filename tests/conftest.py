"""Fixtures and rules of all tests."""

from __future__ import annotations

import gc
import logging
import os
import re
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import tests.tools.claims  # noqa: F401
from ps_runtime import free_ports
from ps_server.core.limits import DEFAULTS
from ps_server.rpc import shard_client
from ps_worker.cluster.heartbeat_process import HeartbeatProcess
from tests.tools.cluster import Cluster, until
from tests.tools.forkserver import Nursery
from tests.tools.launching import Commands


def pytest_configure() -> None:
    """Has each of the processes that run tests choose ports of its own: two of them may look for one at a time.

    Collections of garbage wait until all tests are collected.
    """
    gc.disable()
    name, count = os.environ.get("PYTEST_XDIST_WORKER"), int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    if name is not None:
        number, outside_of = int(name.removeprefix("gw")), free_ports._outside_of
        free_ports._outside_of = lambda first, last: outside_of(first, last)[number::count]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests that take minutes run only when they are asked for."""
    if "slow" not in str(config.option.markexpr):
        for item in items:
            if item.get_closest_marker("slow") is not None:
                item.add_marker(pytest.mark.skip(reason="slow: runs with -m slow"))


def pytest_collection_finish() -> None:
    """Leaves what is imported and collected out of collections of garbage, which would walk through it each time.

    With CPython's own thresholds collections take 9 % of the tests' CPU time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)
    gc.enable()


def pytest_sessionfinish() -> None:
    """Has the collections with which pytest ends, ten of them, find nothing: this one has found what tests left."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """SIGINT raises KeyboardInterrupt, also where it is ignored, as in a run in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(autouse=True)
def _signals_as_before() -> Iterator[None]:
    """Takes back the handlers that a test leaves: a command that runs here sets its own, and so does a session."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """No variable of the caller's shell reaches a test, and each starts from the same random state."""
    launchers = ("PS_", "SLURM_", "OMPI_", "MASTER_")
    others = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "JOB_COMPLETION_INDEX"]
    for name in [name for name in os.environ if name.startswith(launchers)] + others:
        monkeypatch.delenv(name, raising=False)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _patient_status(monkeypatch: pytest.MonkeyPatch) -> None:
    """A status has each shard in it, also one that gets no processor for seconds on a busy machine."""
    monkeypatch.setattr(shard_client, "STATUS_SECONDS", 10.0)


@pytest.fixture(autouse=True)
def _few_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """No session of this process starts another one that beats for it while it cannot: a thousand do, at 40 ms each.

    Those of other processes do: see tests/cluster/test_heartbeats.py.
    """
    monkeypatch.setattr(HeartbeatProcess, "_start", lambda _: None)


@pytest.fixture(autouse=True)
def _no_surprises(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails a test in which a server of this process logged an error: something happened that nobody foresaw.

    A test that takes `caplog` looks at what is logged by itself.
    """
    found: list[str] = []

    class Errors(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(logging.Formatter().format(record))

    handler = Errors(logging.ERROR)
    loggers = [logging.getLogger(name) for name in ("ps_server", "ps_runtime")]  # background threads are the latter's
    for logger in loggers:
        logger.addHandler(handler)
    yield
    for logger in loggers:
        logger.removeHandler(handler)
    assert not found or "caplog" in request.fixturenames, "\n".join(found)


@pytest.fixture(autouse=True)
def _no_session_left() -> Iterator[None]:
    """Fails a test that leaves a session open: its threads would go on calling servers beside all later tests."""

    def threads() -> set[threading.Thread]:
        return {thread for thread in threading.enumerate() if thread.name in ("heartbeat", "watch")}

    before = threads()
    yield
    until(lambda: threads() <= before, "the end of all sessions of this test")


@pytest.fixture(autouse=True)
def _no_process_group_left() -> Iterator[None]:
    """Ends torch's default process group with the test: a session in mode ddp leaves it for the next session."""
    yield
    if dist.is_initialized():
        # torch joins a gloo group's threads, with the GIL held, where its last reference goes. One of them may need the
        # GIL then, to free the work of the last collective. So the group outlives its test, until the next one ends.
        _ended_groups[:] = [dist.group.WORLD]
        dist.destroy_process_group()


_ended_groups: list[object] = []


@pytest.fixture(scope="session")
def shared() -> Iterator[Cluster]:
    """Two shards that tests share, each with a job of its own (see `job`); stopped after the last.

    Some tests register jobs that no worker joins: there may be more of them than a server takes by default. Some kill
    workers, and no launcher reports it: their jobs do not wait for those. Raw workers send no heartbeats: on a busy
    machine a test of them may take longer than the lease that servers have by default.
    """
    running = Cluster(limits=replace(DEFAULTS, jobs=1024), absence_seconds=0.0, lease=30.0)
    yield running
    running.stop()


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    """Starts servers and scripts as processes, without waiting for their imports."""
    with Nursery() as found:
        yield found


@pytest.fixture
def job(request: pytest.FixtureRequest) -> str:
    """A job's name that no other test has."""
    return re.sub(r"[^A-Za-z0-9._-]+", ".", f"{request.module.__name__}.{request.node.name}")[-128:]


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """Two shards."""
    running = Cluster()
    yield running
    running.stop()


@pytest.fixture
def make_cluster() -> Iterator[Callable[..., Cluster]]:
    """Clusters to order: make_cluster(shards=3, lease=1.0)."""
    made: list[Cluster] = []

    def make(**options: object) -> Cluster:
        made.append(Cluster(**options))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for running in made:
        running.stop()


@pytest.fixture
def commands(tmp_path: Path) -> Iterator[Commands]:
    """Starts commands as a user does; ends those that still run."""
    started = Commands(tmp_path)
    yield started
    started.close()


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a launcher sets for a group of one."""
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
