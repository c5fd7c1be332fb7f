"""Servers and workers for a benchmark, as the processes that users start."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import torch

ROOT = Path(__file__).resolve().parent.parent
START_SECONDS = 60


def environment(**more: str) -> dict[str, str]:
    """What every process of a benchmark runs with: one thread for computing, unless `more` says otherwise."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **more}


@contextlib.contextmanager
def servers(shards: int, *flags: str) -> Iterator[str]:
    """`ps-server up` with this many shards, on free ports; yields the coordinator's address."""
    command = [sys.executable, "-m", "ps_server", "up", "--shards", str(shards), "--port", "0", "--metrics-port", "0"]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            [*command, *flags], env=environment(), stdout=subprocess.PIPE, stderr=log, text=True, cwd=ROOT
        )
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            if "ready at" not in line:
                log.seek(0)
                raise RuntimeError(f"the servers did not start: {line}{log.read()}")
            yield line.split("ready at ")[1].split()[0]
        finally:
            process.terminate()
            process.wait(START_SECONDS)


def workers(module: str, count: int, options: dict[str, Any], timeout: float, **more: str) -> list[dict[str, Any]]:
    """Runs `python -m module OPTIONS` once for each rank, as one torch.distributed group; returns rank 0's JSON lines."""
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "results"
        running = [
            subprocess.Popen(
                [sys.executable, "-m", module, json.dumps({**options, "output": str(output)})],
                env=environment(
                    RANK=str(rank), WORLD_SIZE=str(count), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), **more
                ),
                cwd=ROOT,
            )
            for rank in range(count)
        ]
        try:
            codes = [process.wait(timeout) for process in running]
        finally:
            for process in running:
                process.kill()
        if any(codes):
            raise RuntimeError(f"workers ended with codes {codes}")
        return [json.loads(line) for line in output.read_text().splitlines()]


def free_port() -> int:
    """A port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def versions() -> dict[str, str]:
    """What was measured with."""
    return {"torch": torch.__version__, "grpcio": grpc.__version__, "python": platform.python_version()}


def median_ms(seconds: list[float]) -> float:
    """The median in milliseconds."""
    return round(statistics.median(seconds) * 1e3, 2)
