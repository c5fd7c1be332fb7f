"""`ps-server up`: a cluster on this machine, one process a shard.

A child says on its standard output when it is ready, as one line of JSON. Its standard input tells it where the
coordinator is, and is its lifeline: when it closes, the parent is gone, and the child stops. So nothing is left behind
even if the parent is killed.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from dataclasses import dataclass
from typing import IO

from ps_protocol.errors import PSError
from ps_server.limits import DEFAULTS, Limits, limit_flags

START_SECONDS = 60.0
STOP_SECONDS = 20.0


@dataclass(frozen=True)
class UpConfig:
    """The cluster to start; ports of shard i are `port` + i and `metrics_port` + i, unless 0."""

    shards: int
    host: str
    port: int
    metrics_host: str
    metrics_port: int
    lease: float
    apply_threads: int
    shared_directory: str
    tls_cert: str | None = None
    tls_key: str | None = None
    tls_ca: str | None = None
    tokens: str | None = None
    insecure: bool = False
    metrics_insecure: bool = False
    limits: Limits = DEFAULTS


class Stopped(Exception):
    """A signal asked to stop."""


def up(config: UpConfig) -> int:
    """Runs the cluster until SIGTERM or SIGINT, or until a shard ends by itself. Returns the exit code."""
    children: list[subprocess.Popen[str]] = []
    code = 0

    def stop(number: int, frame: object) -> None:
        raise Stopped

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    try:
        children += [_start(config, index) for index in range(config.shards)]
        first = _ready(children[0], 0)
        for child in children[1:]:
            _tell(child, first["address"])
        rest = [_ready(child, index) for index, child in enumerate(children) if index]
        shards = "1 shard" if config.shards == 1 else f"{config.shards} shards"
        print(f"ps-server: ready at {first['address']} ({shards})", flush=True)
        scheme = "https" if config.tls_cert else "http"
        for process in (first, *rest):
            print(f"ps-server: metrics at {scheme}://{process['metrics']}/metrics", flush=True)
        index = _first_to_end(children)
        print(f"ps-server: shard {index} ended with code {children[index].returncode}; stopping", file=sys.stderr)
        code = 1
    except Stopped:
        pass
    except PSError as error:
        print(f"ps-server: {error}", file=sys.stderr)
        code = 1
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        _stop(children)
    return code


def _start(config: UpConfig, index: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "ps_server", "shard", "--supervised", "--index", str(index)]
    command += ["--host", config.host, "--port", str(config.port and config.port + index)]
    command += ["--metrics-host", config.metrics_host]
    command += ["--metrics-port", str(config.metrics_port and config.metrics_port + index)]
    command += ["--apply-threads", str(config.apply_threads), "--shared-directory", config.shared_directory]
    for flag in ("tls_cert", "tls_key", "tls_ca", "tokens"):
        if getattr(config, flag):
            command += ["--" + flag.replace("_", "-"), getattr(config, flag)]
    command += ["--insecure"] * config.insecure + ["--metrics-insecure"] * config.metrics_insecure
    command += limit_flags(config.limits)
    if index == 0:
        command += ["--with-coordinator", "--shards", str(config.shards), "--lease", str(config.lease)]
    # What a parent was told by its environment is in the flags; a variable must not tell a child otherwise.
    environment = {name: value for name, value in os.environ.items() if name not in ("PS_ADVERTISE", "PS_COORDINATOR")}
    # A session of its own: Ctrl-C on a terminal reaches the parent alone, which then stops the children in order.
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, start_new_session=True
    )


def _tell(child: subprocess.Popen[str], address: str) -> None:
    assert child.stdin is not None
    child.stdin.write(address + "\n")
    child.stdin.flush()


def _ready(child: subprocess.Popen[str], index: int) -> dict[str, str]:
    """The line in which a child says that it is ready. Raises PSError if it ends first or takes too long."""
    timer = threading.Timer(START_SECONDS, child.kill)
    timer.start()
    try:
        assert child.stdout is not None
        line = child.stdout.readline()
    finally:
        timer.cancel()
    if not line:
        raise PSError(f"shard {index} did not start (exit code {child.wait()})")
    found: dict[str, str] = json.loads(line)
    return found


def _first_to_end(children: list[subprocess.Popen[str]]) -> int:
    """Waits for any child to end."""
    while True:
        pid, status = os.waitpid(-1, 0)
        for index, child in enumerate(children):
            if child.pid == pid:
                child.returncode = os.waitstatus_to_exitcode(status)
                return index


def _stop(children: list[subprocess.Popen[str]]) -> None:
    for child in reversed(children):
        if child.poll() is None:
            child.terminate()
    for child in children:
        try:
            child.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
        for stream in (child.stdin, child.stdout):
            if stream is not None:
                stream.close()


def await_coordinator(stdin: IO[str]) -> str:
    """In a child: the coordinator's address, from the parent."""
    return stdin.readline().strip()


def watch_lifeline(stdin: IO[str], stop: threading.Event) -> None:
    """In a child: sets `stop` when the parent is gone."""

    def watch() -> None:
        while stdin.read(1):
            pass
        stop.set()

    threading.Thread(target=watch, name="lifeline", daemon=True).start()
