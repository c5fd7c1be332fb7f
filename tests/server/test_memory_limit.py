"""How much memory is free, and that a job which needs more is refused instead of killing the shard."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ps_protocol.convert import job_spec_message
from ps_protocol.errors import LimitExceeded
from ps_protocol.v1 import jobs_pb2
from ps_runtime.memory import free_bytes
from tests.tools.cluster import Cluster
from tests.tools.raw_worker import RawWorker, vector_job

MEMINFO = "MemTotal:  2000 kB\nMemFree:  10 kB\nMemAvailable:  1000 kB\nHugePages_Total:  0\n"


def system(root: Path, groups: dict[str, tuple[str, str, str]], group: str = "/") -> Path:
    """A machine's files: meminfo, and memory.max, memory.current and memory.stat of control groups."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(MEMINFO)
    (root / "proc/self/cgroup").write_text(f"1:name=other:/elsewhere\n0::{group}\n")
    for name, files in groups.items():
        folder = root / "sys/fs/cgroup" / name
        folder.mkdir(parents=True, exist_ok=True)
        for file, text in zip(("memory.max", "memory.current", "memory.stat"), files, strict=True):
            (folder / file).write_text(text)
    return root


@pytest.mark.parametrize(
    ("groups", "group", "free"),
    [
        ({}, "/", 1_024_000),
        ({"": ("max\n", "5000\n", "file 100\n")}, "/", 1_024_000),
        ({"": ("500000\n", "300000\n", "anon 1\nfile 50000\n")}, "/", 250_000),
        ({"": ("500000\n", "300000\n", "file 50000\nshmem 20000\n")}, "/", 230_000),
        ({"": ("9000000\n", "0\n", ""), "a/b": ("max\n", "7\n", ""), "a": ("4000\n", "1000\n", "")}, "/a/b", 3000),
        ({"": ("1000\n", "3000\n", "")}, "/", 0),
    ],
    ids=[
        "no groups",
        "no limit",
        "a limit, and files that can go",
        "files of which some are memory",
        "the limit of a group above",
        "over the limit",
    ],
)
def test_the_least_that_machine_and_control_groups_leave_is_free(
    tmp_path: Path, groups: dict[str, tuple[str, str, str]], group: str, free: int
) -> None:
    assert free_bytes(system(tmp_path, groups, group)) == free


def test_where_nothing_tells_nothing_is_known(tmp_path: Path) -> None:
    assert free_bytes(tmp_path) is None


def test_a_job_larger_than_memory_is_refused_and_the_shards_live(shared: Cluster) -> None:
    if free_bytes() is None:
        pytest.skip("this system does not say how much memory is free")
    huge = replace(vector_job("huge", "sync", 2**37, 1), bucket_bytes=16 * 2**20)  # 512 GiB
    with pytest.raises(LimitExceeded, match=r"'huge' does not fit into this shard's memory: its weights here are \d+"):
        RawWorker.register(shared.address, jobs_pb2.RegisterJobRequest(spec=job_spec_message(huge)))
    assert shared.state("huge") == {"known": False}
    with RawWorker(shared.address, vector_job("after", "sync", 64, 1), 0) as worker:
        worker.initialise()
        assert worker.pull().tolist() == [0.0] * 64
