"""One server process for a parent of any kind: it says where it is, why it cannot start, and ends with its parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from typing import Any

import psutil
import pytest

from ps_launch.one_server import OneServer
from tests.tools.launching import environment

READY_SECONDS = 60.0
FREE = ("--port", "0", "--metrics-port", "0")
COORDINATOR = ("coordinator", "--shards", "1", *FREE)
# A parent that has a server, says which process that is, and stays until it is killed.
PARENT = """
import sys, threading
from ps_launch.one_server import OneServer
server = OneServer(sys.argv[1:], dict(__import__("os").environ))
assert server.await_ready(60.0)
print(server.pid, flush=True)
threading.Event().wait()
"""


@pytest.fixture
def start() -> Any:
    started: list[OneServer] = []

    def begin(*arguments: str) -> OneServer:
        started.append(OneServer(arguments, environment()))
        return started[-1]

    yield begin
    for server in reversed(started):
        server.stop(READY_SECONDS)


def test_servers_say_where_they_are_and_one_that_was_killed_is_told_from_one_that_ended_by_itself(
    start: Callable[..., OneServer],
) -> None:
    first = start(*COORDINATOR)
    coordinator = first.await_ready(READY_SECONDS)
    assert coordinator is not None
    second = start("shard", "--index", "0", "--coordinator", coordinator["address"], *FREE)
    shard = second.await_ready(READY_SECONDS)
    assert shard is not None
    assert int(shard["process"]) > 0
    assert shard["address"] != coordinator["address"]
    assert second.stop(READY_SECONDS), "it ended by itself"
    assert second.await_end() == 0
    assert second.has_ended()
    os.kill(first.pid, signal.SIGSTOP)
    assert first.stop(0.1) is False, "it was killed"
    assert first.await_end() == -signal.SIGKILL


def test_one_that_cannot_start_leaves_its_reason(start: Callable[..., OneServer]) -> None:
    server = start("shard", "--index", "0", "--coordinator", "nowhere")
    assert server.await_ready(READY_SECONDS) is None
    assert server.await_end() != 0
    assert "expected HOST:PORT" in server.last_words()


@pytest.mark.long
def test_it_ends_with_a_parent_that_is_killed() -> None:
    command = [sys.executable, "-c", PARENT, *COORDINATOR]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment()) as parent:
        assert parent.stdout is not None
        with closing(parent.stdout):
            server = psutil.Process(int(parent.stdout.readline()))
        os.kill(parent.pid, signal.SIGKILL)
        parent.wait()
    psutil.wait_procs([server], timeout=READY_SECONDS)
    assert not server.is_running()
