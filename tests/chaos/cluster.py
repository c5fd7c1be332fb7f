"""The processes under chaos: servers on fixed ports, workers that are started again when they die, and who may read."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench.cluster import ROOT
from ps_protocol.errors import PSError
from ps_protocol.layout import BucketSpec, bucket_layout
from ps_protocol.modes import parse_mode
from ps_protocol.tensors import tensor_from
from ps_server.ops.status import fetch
from ps_worker.cluster import convert
from ps_worker.cluster.calls import ShardCalls
from ps_worker.cluster.coordinator import CoordinatorClient
from ps_worker.model.job_spec import describe
from ps_worker.values import Identity, PrepareOptions, PulledBucket
from tests.chaos.oracle import Cells
from tests.chaos.worker import Task

START_SECONDS = 60.0
STOP_SECONDS = 30.0
LOOK_SECONDS = 0.05
SAVING_SECONDS = 1.0  # since its file changed last: an older one without a manifest is what an earlier fault has left
READER = 0  # the incarnation of who only reads


def free_ports(count: int) -> int:
    """The first of so many neighbouring ports that are free now.

    Below those that systems give to outgoing connections: one of these could take a server's port while it is down.
    """
    while True:
        first = random.randrange(15_000, 32_000)
        if all(_is_free(port) for port in range(first, first + count)):
            return first


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


class Kept:
    """A process that is started again whenever it dies, until it ends by itself with code 0 or `end` is called.

    command: how to start it, given how many times it was started before
    """

    def __init__(self, command: Callable[[int], list[str]], log: Path) -> None:
        self._command = command
        self._log = log.open("ab")
        self._lock = threading.Lock()
        self._ending = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self.started = 0
        self._thread = threading.Thread(target=self._keep)
        self._thread.start()

    def _keep(self) -> None:
        while not self._ending.is_set():
            with self._lock:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", *self._command(self.started)],
                    cwd=ROOT,
                    stdin=subprocess.DEVNULL,
                    stdout=self._log,
                    stderr=self._log,
                    env=_environment(),
                )
                self.started += 1
            if self._process.wait() == 0:
                return

    @property
    def pid(self) -> int | None:
        """The process now; None between two."""
        return None if self._process is None or self._process.returncode is not None else self._process.pid

    def signal(self, number: int) -> bool:
        """Sends it a signal; False if there is no process now."""
        with self._lock:
            if self.pid is None or self._process is None:
                return False
            self._process.send_signal(number)
            return True

    def end(self, seconds: float) -> bool:
        """Waits until it ends by itself; False if it had to be forced to."""
        self._ending.set()
        self._thread.join(seconds)
        stuck = self._thread.is_alive()
        if stuck:
            self.signal(signal.SIGKILL)
            self._thread.join()
        self._log.close()
        return not stuck


@dataclass(frozen=True)
class ServerFlags:
    """What the servers are started with; `apart`: the coordinator in a process of its own, instead of in shard 0."""

    shards: int
    lease: float
    checkpoints: Path
    every: str
    apart: bool

    @property
    def shard(self) -> list[str]:
        """For a shard."""
        return ["--metrics-port", "0", "--checkpoint-dir", str(self.checkpoints)]

    @property
    def coordinator(self) -> list[str]:
        """For a coordinator."""
        keep = ["--shards", str(self.shards), "--lease", str(self.lease), "--checkpoint-every", self.every]
        return [*keep, "--metrics-port", "0", "--checkpoint-dir", str(self.checkpoints)]


class Servers:
    """A coordinator and shards at addresses that stay the same, however often one is started again.

    `ps-server up` starts them again, or, where the coordinator is apart, this does, as a container engine would.
    """

    def __init__(self, flags: ServerFlags, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._flags = flags
        self.log = folder / "servers.log"
        port = free_ports(flags.shards + 1)
        self.addresses = [f"127.0.0.1:{port + index}" for index in range(flags.shards + flags.apart)]
        self.address = self.addresses[0]
        if not flags.apart:
            up = ["ps_server", "up", "--port", str(port), *flags.coordinator]
            self._kept = [Kept(lambda _: up, self.log)]
        else:
            self._kept = [Kept(self._coordinator, self.log)]
            self._kept += [Kept(partial(self._shard, index), self.log) for index in range(flags.shards)]
        self._await_ready()

    def _coordinator(self, started: int) -> list[str]:
        port = self.address.rpartition(":")[2]
        again = ["--restore"] if started else []
        return ["ps_server", "coordinator", "--port", port, *self._flags.coordinator, *again]

    def _shard(self, index: int, started: int) -> list[str]:
        port = self.addresses[1 + index].rpartition(":")[2]
        where = ["--index", str(index), "--port", port, "--coordinator", self.address]
        return ["ps_server", "shard", *where, *self._flags.shard]

    def _await_ready(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            with contextlib.suppress(PSError):
                if len(self.status()["shards"]) == self._flags.shards:
                    return
            time.sleep(LOOK_SECONDS)
        self.close()
        raise RuntimeError(f"the servers did not start:\n{self.log.read_text()}")

    def status(self) -> dict[str, Any]:
        """What they say about themselves. Raises PSError."""
        return fetch(self.address)

    def is_saving(self, shard: int) -> bool:
        """Whether a shard is writing a checkpoint, or has just written it and the manifest is not there yet."""
        with contextlib.suppress(FileNotFoundError):
            for file in self._flags.checkpoints.glob(f"*/*/shard-{shard}.safetensors"):
                if time.time() - file.stat().st_mtime < SAVING_SECONDS and not (file.parent / "manifest.json").exists():
                    return True
        return False

    def pid(self, shard: int | None) -> int | None:
        """The process of a shard, or of the coordinator (None); None if there is none now."""
        if self._flags.apart:
            return self._kept[0 if shard is None else 1 + shard].pid
        parent = self._kept[0].pid
        return next((pid for pid in _children(parent) if _argument(pid, "--index") == str(shard or 0)), None)

    def signal(self, shard: int | None, number: int) -> bool:
        """Sends a shard or the coordinator a signal; False if there is no such process now."""
        pid = self.pid(shard)
        with contextlib.suppress(ProcessLookupError):
            if pid is not None:
                os.kill(pid, number)
                return True
        return False

    def close(self) -> None:
        """Stops them in order: shards last."""
        for kept in self._kept:
            kept.signal(signal.SIGTERM)
            kept.end(STOP_SECONDS)


def _children(parent: int | None) -> list[int]:
    with contextlib.suppress(OSError):
        if parent is not None:
            return [int(pid) for pid in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()]
    return []


def _argument(pid: int, flag: str) -> str | None:
    """What follows a flag in a process' command line."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
        return words[words.index(flag) + 1]
    return None


def _environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PS_")}
    path = os.pathsep.join(filter(None, (str(ROOT), kept.get("PYTHONPATH"))))
    known = {"PS_LAUNCH_ID": "chaos"}  # what is started again takes its place at once, as under `ps-worker run`
    return {**kept, **known, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "PYTHONPATH": path}


class Crew:
    """The workers of one job: each is started again when it dies, until `end`."""

    def __init__(self, task: Task, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "task.json").write_text(json.dumps(asdict(task)))

        def worker(rank: int) -> Kept:
            command = ["tests.chaos.worker", str(folder), str(rank)]
            return Kept(lambda _: command, folder / f"worker-{rank}.log")

        self._kept = [worker(rank) for rank in range(task.workers)]

    def signal(self, rank: int, number: int) -> bool:
        """Sends a signal to a rank's process; False if there is none now."""
        return self._kept[rank].signal(number)

    def end(self, seconds: float) -> bool:
        """Waits until all have ended by themselves; ends the others by force. True if there were none."""
        ended = [kept.end(seconds) for kept in self._kept]
        return all(ended)


def read_weights(task: Task) -> tuple[torch.Tensor, tuple[int, ...]]:
    """The weights on the shards as they are, read by one who takes no part: [buckets, rows, 1 + columns]; and for each
    of these buckets, the shard that holds it."""
    model, rule = Cells(task.shape), parse_mode(task.mode)
    assert rule is not None
    options = PrepareOptions(task.shape.bucket_bytes)
    spec, _ = describe([model], [model.optimizer()], options, name=task.job, consistency=rule, world_size=task.workers)
    coordinator = CoordinatorClient(task.server, START_SECONDS)
    found = coordinator.register(spec).shard_map
    coordinator.close()
    buckets = bucket_layout(spec.parameters, spec.bucket_bytes).buckets
    view = torch.zeros(task.shape.buckets, task.shape.rows, 1 + task.shape.columns)

    def land(bucket: BucketSpec, pulled: PulledBucket) -> int:
        values = tensor_from(pulled.payload, "float32")
        view[parameter_of(bucket)] = values[: view[0].numel()].view(view[0].shape)
        return len(pulled.payload)

    def ask(left: list[int]) -> bytes:
        return convert.pull_request(Identity(task.job, 0, READER), 0, left)

    for shard, address in found.addresses.items():
        mine = [bucket for bucket in buckets if found.bucket_shards[bucket.index] == shard]
        if mine:
            calls = ShardCalls(shard, address, START_SECONDS)
            calls.pull("Pull", ask, 0, mine, lambda m: convert.pulled(m, lambda index: buckets[index].nbytes), land)
            calls.close()
    shards = {parameter_of(bucket): found.bucket_shards[bucket.index] for bucket in buckets}
    return view, tuple(shard for _, shard in sorted(shards.items()))


def parameter_of(bucket: BucketSpec) -> int:
    """Which of the model's tensors a bucket is: they are laid out in another order."""
    return bucket.slices[0].parameter


def errors_in(log: Path) -> list[str]:
    """The errors that nobody foresaw: those that servers wrote down with a traceback."""
    text = log.read_text(errors="replace")
    found = re.findall(r"^\S+ \S+ ERROR .*(?:\n(?!\d{4}-\d\d-\d\d ).*)*", text, re.MULTILINE)
    return [error[:2000] for error in found if "Traceback" in error]
