"""What a shard's restore from a checkpoint takes: memory and time, beside `cp` of the same file.

The job is stepped by Adam. First a shard that has nothing restores it, then the shard once more, while it holds the
job: as every shard of a sync job does when another one dies. The memory is the peak of the restore, less that of the
process before its first job, divided by weights and optimizer state. The file is in the page cache, for both."""

from __future__ import annotations

import argparse
import multiprocessing
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
from prometheus_client import CollectorRegistry

from bench import options
from bench.machine import memory
from bench.pictures import Bar, bars
from bench.results import MIB, Result, median_ms, result
from ps_protocol.convert import job_spec_data
from ps_protocol.job import JobSpec
from ps_protocol.layout import ParameterSpec, bucket_layout
from ps_protocol.modes import Consistency
from ps_server.core.snapshot import BucketSnapshot, RestoreRequest
from ps_server.ops.glibc import share_memory_pool
from ps_server.shard.metrics import ShardMetrics
from ps_server.shard.shard import Shard
from ps_server.storage.checkpoints import CheckpointStore
from ps_server.storage.manifest import Manifest

SHORT = {"mib": 64}
NAME = "000001"


def flags(parser: argparse.ArgumentParser) -> None:
    """The command line of `python -m bench restore`."""
    options.add(parser, mib=256, bucket_kib=4096, rounds=3)
    parser.add_argument("--folder-of-files", type=Path, help="where the checkpoint is written (a temporary folder)")


def run(arguments: argparse.Namespace) -> list[Result]:
    """Measures: a shard without the job, one that has it, and cp."""
    with tempfile.TemporaryDirectory(dir=arguments.folder_of_files) as folder:
        spec = _spec(arguments.mib * MIB, arguments.bucket_kib * 1024)
        size = _write(CheckpointStore(Path(folder)), spec)
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
            found = process.submit(_restore, Path(folder), spec, arguments.rounds).result()
        seconds = _copy(Path(folder) / spec.name / NAME / "shard-0.safetensors", arguments.rounds)
    copied = median_ms(seconds)
    lines = [_line("cp", arguments, copied, size)]
    for system, (ms, peak, held) in found.items():
        ratios = {"cp": ms / copied, "weights + optimizer state": peak / held}
        lines.append(_line(system, arguments, ms, size, ratios, peak_bytes=peak, held_bytes=held))
    return lines


def _line(
    system: str,
    arguments: argparse.Namespace,
    ms: float,
    size: int,
    ratios: dict[str, float] | None = None,
    **more: Any,
) -> Result:
    rate = round(size / 1e6 / ms, 2)
    weights = arguments.mib * MIB
    return result(
        "restore",
        system,
        workers=0,
        shards=1,
        size=weights,
        ms=ms,
        ratios=ratios,
        gigabytes_per_second=rate,
        file_bytes=size,
        **more,
    )


def _spec(nbytes: int, bucket_bytes: int) -> JobSpec:
    parameters = (ParameterSpec("w", (nbytes // 4,), "float32", 0),)
    return JobSpec("job", parameters, "Adam", ({"lr": 0.1},), Consistency(0, aggregate=True), bucket_bytes, 1)


def _write(store: CheckpointStore, spec: JobSpec) -> int:
    """Writes a checkpoint of random numbers; returns the bytes of its file."""
    buckets = bucket_layout(spec.parameters, spec.bucket_bytes).buckets
    store.begin(spec.name, NAME)

    def state(numel: int) -> dict[str, torch.Tensor]:
        return {"step": torch.tensor(3.0), "exp_avg": torch.rand(numel), "exp_avg_sq": torch.rand(numel)}

    part = store.write_shard(
        spec.name,
        NAME,
        0,
        [BucketSnapshot(b.index, 3, {0: 3}, torch.rand(b.numel), {0: state(b.numel)}) for b in buckets],
    )
    store.commit(
        spec.name,
        Manifest(
            name=NAME,
            job=job_spec_data(spec),
            run="1",
            mode="sync",
            clock=3,
            placement=(0,) * len(buckets),
            shards={0: part},
            workers={},
            versions=(3, 3),
            clocks={0: 3},
            last_incarnation=1,
            restore_count=0,
        ),
    )
    return part.bytes


def _restore(folder: Path, spec: JobSpec, rounds: int) -> dict[str, tuple[float, int, int]]:
    """Restores in this process; returns by system the median in ms, the peak and what the job holds, in bytes."""
    share_memory_pool()
    torch.set_num_threads(1)
    torch.optim.Adam([torch.zeros(1)])  # what torch imports late is no part of a job
    shard = Shard(ShardMetrics(CollectorRegistry()), checkpoints=CheckpointStore(folder))
    buckets = range(len(bucket_layout(spec.parameters, spec.bucket_bytes).buckets))
    _forget_peak()
    before = memory()["peak"]
    found: dict[str, tuple[list[float], int]] = {"shard": ([], 0), "shard that has the job": ([], 0)}
    for incarnation, system in _order(rounds):
        if system == "shard":
            shard.drop_job(spec.name)
        _forget_peak()
        began = time.perf_counter()
        request = RestoreRequest(spec, tuple(buckets), NAME, incarnation)
        while shard.restore_job(request, seconds=1.0).extent is None:
            pass
        seconds, peak = found[system]
        found[system] = [*seconds, time.perf_counter() - began], max(peak, memory()["peak"] - before)
    job = shard.statistics().jobs[spec.name]
    held = job.parameter_bytes + job.optimizer_bytes
    shard.stop()
    return {system: (median_ms(seconds), peak, held) for system, (seconds, peak) in found.items()}


def _order(rounds: int) -> Iterator[tuple[int, str]]:
    for turn in range(rounds):
        yield 2 * turn + 1, "shard"
        yield 2 * turn + 2, "shard that has the job"


def _forget_peak() -> None:
    """Has the kernel begin anew with this process' peak."""
    Path("/proc/self/clear_refs").write_text("5")


def _copy(path: Path, rounds: int) -> list[float]:
    """Seconds that cp takes."""
    found = []
    for _ in range(rounds):
        copy = path.with_name("copy")
        began = time.perf_counter()
        subprocess.run([shutil.which("cp") or "cp", str(path), str(copy)], check=True)
        found.append(time.perf_counter() - began)
        copy.unlink()
    return found


def draw(lines: list[Result], path: Path) -> None:
    """How long a restore takes beside cp, and its peak beside what it restores."""
    ours = [line for line in lines if line["system"] != "cp"]
    bars(
        path,
        "ms; times weights and optimizer state",
        {
            "Time": [Bar(line["system"], line["ms"], line["system"] != "cp") for line in lines],
            "Memory": [Bar(line["system"], line["ratios"]["weights + optimizer state"], True) for line in ours],
        },
    )
