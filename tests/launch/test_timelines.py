"""`ps-worker run --timeline`: one file for all workers, whatever ends the launch."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.tools.cluster import Cluster
from tests.tools.launching import Commands, Refusal, run

TRAIN = """
import sys
import torch
import ps_worker

session = ps_worker.connect()
model = torch.nn.Linear(4, 4)
model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
for step in range(int(sys.argv[1])):
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    if step == 3:
        print("rank", session.rank, "is under way", flush=True)
        FAIL
session.close()
"""


def training(directory: Path, fail: str = "pass") -> str:
    path = directory / "train.py"
    path.write_text(TRAIN.replace("FAIL", fail))
    return str(path)


def flags(shared: Cluster, job: str, *more: str) -> tuple[str, ...]:
    return "--server", shared.address, "--job", job, "--metrics-host", "127.0.0.1", *more


def steps(path: Path) -> dict[int, list[int]]:
    """By rank, the steps that a file has: of the only bucket."""
    found: dict[int, list[int]] = {}
    for event in json.loads(path.read_text())["traceEvents"]:
        if "bucket" in event["args"]:
            found.setdefault(event["args"]["rank"], []).append(event["args"]["clock"])
    return found


@pytest.mark.long
def test_one_file_has_all_workers_and_nothing_else_is_left(shared: Cluster, job: str, tmp_path: Path) -> None:
    where = flags(shared, job, "--workers", "2", "--timeline", str(tmp_path / "all.json"), "--timeline-first", "2")
    done = run(*where, "--timeline-steps", "3", training(tmp_path), "6")
    assert done.returncode == 0, done.stderr
    assert f"ps-worker: the timeline is in {tmp_path / 'all.json'}\n" in done.stderr
    assert steps(tmp_path / "all.json") == {0: [2, 3, 4], 1: [2, 3, 4]}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["all.json", "train.py"]


GROUP = """
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
import ps_torch

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
model = fully_shard(torch.nn.Linear(4, 4), mesh=mesh)
with ps_torch.connect() as session:
    model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), group=mesh)
    for step in range(3):
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
dist.destroy_process_group()
"""


@pytest.mark.long
def test_one_file_has_each_member_of_each_group(shared: Cluster, job: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(GROUP)
    where = flags(shared, job, "--workers", "2", "--group", "2", "--timeline", str(tmp_path / "all.json"))
    done = run(*where, "--timeline-steps", "2", str(tmp_path / "train.py"))
    assert done.returncode == 0, done.stderr
    events = json.loads((tmp_path / "all.json").read_text())["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    clocks: dict[str, set[int]] = {}
    for event in events:
        if "bucket" in event["args"]:
            clocks.setdefault(names[event["pid"]], set()).add(event["args"]["clock"])
    members = {name: each for name, each in clocks.items() if name.startswith("member")}
    assert members == {f"member {member} of group {group}": {1, 2} for group in (0, 1) for member in (0, 1)}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["all.json", "train.py"]


@pytest.mark.long
def test_a_launch_that_is_ended_by_a_signal_leaves_what_there_is(
    shared: Cluster, job: str, tmp_path: Path, commands: Commands
) -> None:
    where = flags(
        shared, job, "--workers", "2", "--timeline", str(tmp_path / "all.json"), "--timeline-steps", "9999999"
    )
    command = commands.start("-m", "ps_worker", "run", *where, training(tmp_path), "9999999")
    command.says(r"rank \d is under way", count=2)
    assert command.end(signal.SIGTERM) == 128 + signal.SIGTERM
    found = steps(tmp_path / "all.json")
    assert found.keys() == {0, 1}
    assert all(clocks[:4] == [1, 2, 3, 4] for clocks in found.values())


@pytest.mark.long
def test_a_worker_that_is_started_again_has_a_part_of_each_process(shared: Cluster, job: str, tmp_path: Path) -> None:
    fail = "import os; assert os.environ['PS_RESTART_COUNT'] != '0'"
    where = flags(shared, job, "--mode", "async", "--max-restarts", "1", "--timeline", str(tmp_path / "all.json"))
    run(*where, training(tmp_path, fail), "6")
    # Alone in its job, it ended the job with its exit: the second process begins anew.
    assert steps(tmp_path / "all.json") == {0: [1, 2, 3, 4, 1, 2, 3, 4, 5, 6]}


@pytest.mark.long
def test_where_no_bucket_travels_it_is_said_that_there_is_none(tmp_path: Path) -> None:
    done = run("--mode", "single", "--timeline", str(tmp_path / "all.json"), training(tmp_path), "6")
    assert done.returncode == 0
    assert "mode single has no timeline: no bucket travels to a shard" in done.stderr
    assert "ps-worker: there is no timeline: no worker has recorded a step" in done.stderr
    assert not (tmp_path / "all.json").exists()


@pytest.mark.parametrize("value", ["no/such/folder/t.json", "/"])
def test_a_file_that_cannot_be_is_refused_before_anything_starts(refusal: Refusal, value: str) -> None:
    code, said = refusal("--timeline", value, __file__)
    assert code == 2
    assert f"argument --timeline: expected a file in a directory that is there, got '{value}'" in said


@pytest.mark.long
def test_a_folder_that_goes_meanwhile_is_one_line(shared: Cluster, job: str, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    where: Any = flags(shared, job, "--timeline", str(folder / "all.json"))
    done = run(*where, training(tmp_path, f"import os; os.rmdir({str(folder)!r})"), "6")
    assert done.returncode == 0
    assert f"the timeline cannot be written to {folder / 'all.json'} (No such file or directory)" in done.stderr
