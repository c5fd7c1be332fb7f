"""`ps-server up`: a cluster on this machine, one process a shard.

A child says on its standard output when it is ready, as one line of JSON. Its standard input tells it where the
coordinator is, and is its lifeline: when it closes, the parent is gone, and the child stops. So nothing is left behind
even if the parent is killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from typing import IO

from ps_protocol.errors import PSError
from ps_server import failpoints
from ps_server.core.limits import DEFAULTS, Limits, limit_flags
from ps_server.ops.glibc import streaming

START_SECONDS = 60.0
STOP_SECONDS = 30.0
# A shard that ends more often than that is not started again.
DEATHS, DEATHS_SECONDS = 5, 60.0


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
    checkpoint_dir: str | None = None
    checkpoint_every: str | None = None
    keep: int = 3
    restore: bool = False
    resume: bool = False
    limits: Limits = DEFAULTS


class Stopped(Exception):
    """A signal asked to stop."""


def up(config: UpConfig) -> int:
    """Runs the cluster until SIGTERM or SIGINT, and starts what dies again. Returns the exit code."""
    children: list[subprocess.Popen[str]] = []
    code = 0
    failpoints.parse(os.environ.get(failpoints.VARIABLE, ""))  # said once here, rather than by each shard

    def stop(number: int, frame: object) -> None:
        raise Stopped

    def stop_now(number: int, frame: object) -> None:
        for child in children:
            child.kill()
        os._exit(128 + number)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    try:
        children += [_start(config, index) for index in range(config.shards)]
        first = _ready(children[0], 0)
        for child in children[1:]:
            _tell(child, first["address"])
        ready = [first, *(_ready(child, index) for index, child in enumerate(children) if index)]
        shards = "1 shard" if config.shards == 1 else f"{config.shards} shards"
        print(f"ps-server: ready at {first['address']} ({shards})", flush=True)
        scheme = "https" if config.tls_cert else "http"
        for process in ready:
            print(f"ps-server: metrics at {scheme}://{process['metrics']}/metrics", flush=True)
        _keep_up(config, children, ready)
    except Stopped:
        pass
    except PSError as error:
        print(f"ps-server: {error}", file=sys.stderr)
        code = 1
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, stop_now)  # told twice, it does not wait
        _stop(children)
    return code


def _keep_up(config: UpConfig, children: list[subprocess.Popen[str]], ready: list[dict[str, str]]) -> None:
    """Starts a shard that ends again, at the same ports. Raises PSError for one that ends again and again."""
    deaths: dict[int, list[float]] = {index: [] for index in range(config.shards)}
    while True:
        index = _first_to_end(children)
        found = None
        while found is None:
            now = time.monotonic()
            deaths[index] = [at for at in deaths[index] if now - at < DEATHS_SECONDS] + [now]
            said = f"shard {index} ended with code {children[index].returncode}"
            if len(deaths[index]) > DEATHS:
                raise PSError(f"{said} for the {len(deaths[index])}th time in {DEATHS_SECONDS:g} s; stopping")
            print(f"ps-server: {said}; starting it again", file=sys.stderr, flush=True)
            _close(children[index])
            children[index] = _start(config, index, ready[index])
            with contextlib.suppress(BrokenPipeError):
                _tell(children[index], ready[0]["address"])
            # It may end before it is ready: if somebody's outgoing connection has its port for a moment, say.
            found = _said(children[index])
        if found != ready[index]:
            raise PSError(f"shard {index} came back at another address")
        print(f"ps-server: shard {index} is back", file=sys.stderr, flush=True)


def _start(config: UpConfig, index: int, before: dict[str, str] | None = None) -> subprocess.Popen[str]:
    """Starts a shard; `before` is what an earlier process of the same index had said when it was ready."""
    port = config.port and config.port + index
    metrics_port = config.metrics_port and config.metrics_port + index
    if before is not None:
        port, metrics_port = (int(before[name].rpartition(":")[2]) for name in ("address", "metrics"))
    command = [sys.executable, "-m", "ps_server", "shard", "--supervised", "--index", str(index)]
    command += ["--host", config.host, "--port", str(port)]
    command += ["--metrics-host", config.metrics_host, "--metrics-port", str(metrics_port)]
    command += ["--apply-threads", str(config.apply_threads), "--shared-directory", config.shared_directory]
    for flag in ("tls_cert", "tls_key", "tls_ca", "tokens", "checkpoint_dir"):
        if getattr(config, flag):
            command += ["--" + flag.replace("_", "-"), getattr(config, flag)]
    command += ["--insecure"] * config.insecure + ["--metrics-insecure"] * config.metrics_insecure
    command += limit_flags(config.limits)
    if index == 0:
        command += ["--with-coordinator", "--shards", str(config.shards), "--lease", str(config.lease)]
        command += ["--keep", str(config.keep)]
        command += ["--checkpoint-every", config.checkpoint_every] if config.checkpoint_every else []
        command += ["--restore"] * config.restore
        # One that comes back takes up what ran; whoever starts the cluster says whether to.
        command += ["--resume"] * (config.checkpoint_dir is not None and (config.resume or before is not None))
    # What a parent was told by its environment is in the flags; a variable must not tell a child otherwise.
    hidden = {"PS_ADVERTISE", "PS_COORDINATOR"} | ({failpoints.VARIABLE} if before is not None else set())
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=streaming(environment),
        # Ctrl-C on a terminal reaches the parent alone, which then stops the children in order.
        start_new_session=True,
    )


def _tell(child: subprocess.Popen[str], address: str) -> None:
    assert child.stdin is not None
    child.stdin.write(address + "\n")
    child.stdin.flush()


def _ready(child: subprocess.Popen[str], index: int) -> dict[str, str]:
    """What a child says when it is ready. Raises PSError if it ends first or takes too long."""
    found = _said(child)
    if found is None:
        raise PSError(f"shard {index} did not start (exit code {child.returncode})")
    return found


def _said(child: subprocess.Popen[str]) -> dict[str, str] | None:
    """The line in which a child says that it is ready; None if it ends first, or takes too long and was ended."""
    timer = threading.Timer(START_SECONDS, child.kill)
    timer.start()
    try:
        assert child.stdout is not None
        line = child.stdout.readline()
    finally:
        timer.cancel()
    if not line:
        child.wait()
        return None
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
    """Stops the coordinator, and when it has made its last checkpoints with the shards' help, the shards."""
    for some in (children[:1], children[1:]):
        for child in some:
            if child.poll() is None:
                child.terminate()
        for child in some:
            try:
                child.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
            _close(child)


def _close(child: subprocess.Popen[str]) -> None:
    for stream in (child.stdin, child.stdout):
        if stream is not None:
            with contextlib.suppress(BrokenPipeError):
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
