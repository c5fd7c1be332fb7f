"""The processes under chaos: servers on fixed ports, workers that are started again when they die, and who may read."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from bench.chaos.worker import Task
from bench.cluster import ROOT
from bench.oracle import Cells
from ps_protocol.job import NonFinite
from ps_protocol.layout import Bucket, bucket_layout
from ps_protocol.modes import parse_mode
from ps_protocol.tensors import tensor_from
from ps_server.status import fetch
from ps_worker import messages
from ps_worker.client import CoordinatorClient
from ps_worker.describe import describe
from ps_worker.messages import Identity, Pulled
from ps_worker.transports import ShardCalls

START_SECONDS = 60.0
STOP_SECONDS = 30.0
READER = 0  # the incarnation of who only reads


def free_ports(count: int) -> int:
    """The first of so many neighbouring ports that are free now."""
    while True:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            first = int(probe.getsockname()[1])
        if first + count < 65536 and all(_is_free(port) for port in range(first, first + count)):
            return first


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


class Servers:
    """`ps-server up`, with the coordinator in shard 0. Shard i is at `addresses[i]`, however often it is restarted."""

    def __init__(self, shards: int, lease: float, folder: Path, flags: Sequence[str] = ()) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        port = free_ports(shards)
        self.addresses = [f"127.0.0.1:{port + index}" for index in range(shards)]
        self.address = self.addresses[0]
        self.log = folder / "servers.log"
        command = [sys.executable, "-m", "ps_server", "up", "--shards", str(shards), "--lease", str(lease)]
        command += ["--port", str(port), "--metrics-port", "0", *flags]
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log, env=_environment()
            )
        self._await_ready()

    def _await_ready(self) -> None:
        timer = threading.Timer(START_SECONDS, self._process.kill)
        timer.start()
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        timer.cancel()
        if not line.startswith(b"ps-server: ready at "):
            raise RuntimeError(f"the servers did not start:\n{self.log.read_text()}")
        threading.Thread(target=self._process.stdout.read, daemon=True).start()

    def status(self) -> dict[str, Any]:
        """What they say about themselves."""
        return fetch(self.address)

    def shard_pid(self, index: int) -> int:
        """The process of one shard, now."""
        return next(p["pid"] for p in self.status()["processes"] if (p["role"], p["index"]) == ("shard", index))

    def close(self) -> None:
        """Stops them in order."""
        self._process.terminate()
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PS_")}
    path = os.pathsep.join(filter(None, (str(ROOT), kept.get("PYTHONPATH"))))
    return {**kept, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "PYTHONPATH": path}


class Crew:
    """The workers of one job: each is started again when it dies, until `end`."""

    def __init__(self, task: Task, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "task.json").write_text(json.dumps(asdict(task)))
        self.codes: list[tuple[int, int]] = []  # (rank, exit code) of each process that ended
        self._folder = folder
        self._ending = threading.Event()
        self._lock = threading.Lock()
        self._running: dict[int, subprocess.Popen[bytes]] = {}
        self._threads = [threading.Thread(target=self._keep, args=(rank,)) for rank in range(task.workers)]
        for thread in self._threads:
            thread.start()

    def pid(self, rank: int) -> int | None:
        """The rank's process now; None between two."""
        process = self._running.get(rank)
        return None if process is None or process.poll() is not None else process.pid

    def signal(self, rank: int, number: int) -> bool:
        """Sends a signal to a rank's process; False if there is none now."""
        with self._lock:
            process = self._running.get(rank)
            if process is None or process.returncode is not None:
                return False
            process.send_signal(number)
            return True

    def _keep(self, rank: int) -> None:
        command = [sys.executable, "-m", "bench.chaos.worker", str(self._folder), str(rank)]
        with (self._folder / f"worker-{rank}.log").open("wb") as log:
            while not self._ending.is_set():
                with self._lock:
                    process = subprocess.Popen(
                        command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=_environment()
                    )
                    self._running[rank] = process
                code = process.wait()
                self.codes.append((rank, code))
                if code == 0:
                    return

    def end(self, seconds: float) -> bool:
        """Waits until all have ended by themselves; ends the others by force. True if there were none."""
        self._ending.set()
        for thread in self._threads:
            thread.join(seconds)
        stuck = [rank for rank in self._running if self.pid(rank) is not None]
        for rank in stuck:
            self.signal(rank, signal.SIGKILL)
        for thread in self._threads:
            thread.join()
        return not stuck


def read_weights(task: Task) -> torch.Tensor:
    """The weights on the shards as they are, read by one who takes no part: [buckets, rows, 1 + columns]."""
    model, rule = Cells(task.shape), parse_mode(task.mode)
    assert rule is not None
    spec, _ = describe(
        model,
        model.optimizer(),
        name=task.job,
        consistency=rule,
        bucket_bytes=task.shape.bucket_bytes,
        world_size=task.workers,
        non_finite=NonFinite.REFUSE,
        gradient_wire="float32",
        weight_wire="float32",
    )
    coordinator = CoordinatorClient(task.server, START_SECONDS)
    found = coordinator.register(spec)
    coordinator.close()
    buckets = bucket_layout(spec.parameters, spec.bucket_bytes).buckets
    view = torch.zeros(task.shape.buckets, task.shape.rows, 1 + task.shape.columns)

    def land(bucket: Bucket, pulled: Pulled) -> None:
        values = tensor_from(pulled.payload, "float32")
        view[bucket.index] = values[: view[0].numel()].view(view[0].shape)

    for shard, address in found.addresses.items():
        mine = [bucket for bucket in buckets if found.bucket_shards[bucket.index] == shard]
        if mine:
            calls = ShardCalls(shard, address, START_SECONDS)
            calls.pull("Pull", Identity(task.job, 0, READER), 0, mine, lambda m: [messages.pulled(m)], land)
            calls.close()
    return view


def errors_in(log: Path) -> list[str]:
    """The errors that servers wrote down, with the lines that explain them."""
    text = log.read_text(errors="replace")
    return re.findall(r"^\S+ \S+ ERROR .*(?:\n(?!\d{4}-\d\d-\d\d ).*)*", text, re.MULTILINE)
