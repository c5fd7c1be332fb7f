"""The files of deploy/slurm, under a real Slurm where there is one; and what can be known of them without."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

import ps_server.cli
import ps_worker.cli
from ps_runtime.command_line import CommandLine
from tests.scripts.train_on_slurm import BATCH, SAMPLES
from tests.tools.launching import ROOT
from tests.tools.slurm import FILES, Slurm, missing, until

SCRIPT = str(ROOT / "tests" / "scripts" / "train_on_slurm.py")
SBATCH = sorted(FILES.glob("*.sbatch"))
FOR_EVER = "100000"

# -- without Slurm ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("file", SBATCH, ids=lambda file: file.name)
def test_a_batch_file_is_a_shell_script(file: Path) -> None:
    subprocess.run(["bash", "-n", str(file)], check=True)
    if shutil.which("shellcheck"):
        found = subprocess.run(["shellcheck", str(file)], capture_output=True, text=True, check=False)
        assert found.stdout == ""


def flags_of(program: CommandLine) -> set[str]:
    assert program._commands is not None
    actions = [action for command in program._commands.choices.values() for action in command._actions]
    return {flag for action in actions for flag in action.option_strings}


@pytest.mark.parametrize("file", SBATCH, ids=lambda file: file.name)
def test_a_batch_file_gives_the_commands_flags_that_they_have(file: Path) -> None:
    text = re.sub(r"\\\n", " ", re.sub(r"^#.*", "", file.read_text(), flags=re.MULTILINE))
    known = {"ps-server": flags_of(ps_server.cli.parser()), "ps-worker": flags_of(ps_worker.cli.parser())}
    used = [
        (program, flag)
        for line in text.splitlines()
        for program, words in re.findall(r"\b(ps-server|ps-worker) (.*)", line)
        for flag in re.findall(r"(?<![\w-])--[a-z][a-z-]+", words)
    ]
    assert used
    assert [(program, flag) for program, flag in used if flag not in known[program]] == []


def test_the_files_wait_for_the_signal_that_they_ask_for() -> None:
    for name in ("train.sbatch", "servers.sbatch"):
        text = (FILES / name).read_text()
        assert "#SBATCH --signal=B:TERM@60" in text
        assert "#SBATCH --requeue" in text
        assert "\ntrap told TERM\n" in text


# -- under Slurm -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    reason = missing()
    if reason is not None:
        pytest.skip(reason)
    running = Slurm(tmp_path_factory.mktemp("slurm"))
    yield running
    running.stop()


def steps(folder: Path, rank: int) -> dict[int, list[int]]:
    """By clock, the samples of a worker's step; of one that was made again, the last."""
    path = folder / str(rank)
    lines = path.read_text().splitlines() if path.exists() else []
    return {int(clock): [int(each) for each in ids.split()] for clock, ids in (line.split(": ") for line in lines)}


def begun(log: str) -> list[tuple[int, int, str]]:
    """The workers that began, in order: rank, clock and node."""
    found = re.findall(r"^worker (\d+) begins at clock (\d+) on (\w+)", log, re.MULTILINE)
    return [(int(rank), int(clock), node) for rank, clock, node in found]


def last_checkpoint(log: str) -> int:
    """The clock of the last checkpoint that a log tells of. One made when all are told to end may miss its line."""
    return int(re.findall(r"checkpoint \d+ at clock (\d+),", log)[-1])


def resumed_at(log: str) -> int:
    """The clock of the checkpoint from which a job goes on when it runs again."""
    [clock] = re.findall(r"continues from checkpoint \d+, clock (\d+)", log)
    return int(clock)


@pytest.mark.slurm
@pytest.mark.timeout(600)
def test_a_job_on_two_nodes_that_is_requeued_goes_on_from_its_checkpoint_and_loses_nothing(
    slurm: Slurm, tmp_path: Path
) -> None:
    passes = 40
    words = (SCRIPT, str(passes), "0.1", str(tmp_path))
    job = slurm.submit("train.sbatch", *words, CHECKPOINT_EVERY="5steps")
    log = f"ps-train-{job}"
    until(lambda: len(steps(tmp_path, 0)) >= 12, "steps")
    slurm.run("scontrol", "requeue", job)
    until(lambda: "all certificates are there" in slurm.log(log), "the second start")
    known = last_checkpoint(slurm.log(log))
    assert slurm.await_end(job) == "COMPLETED"

    said = slurm.log(log)
    reached = resumed_at(said)
    assert reached >= known >= 10
    first, second = begun(said)[:2], begun(said)[2:]
    assert {(rank, node) for rank, _, node in first} == {(0, "n0"), (1, "n1")}, "a worker a task, a task a node"
    assert [clock for _, clock, _ in first] == [0, 0]
    assert [clock for _, clock, _ in second] == [reached, reached]
    assert "error:" not in said.rpartition("continues from checkpoint")[2], "a good job ends without such a line"
    # All are told at once, and leave one after the other: one may have made a step more, alone.
    ends = [int(clock) for clock in re.findall(r"^worker \d ends at clock (\d+)", said, re.MULTILINE)]
    per_pass = SAMPLES // BATCH // 2
    assert min(ends) == passes * per_pass
    assert max(ends) <= passes * per_pass + 1
    made = [[samples for _, samples in sorted(steps(tmp_path, rank).items())] for rank in (0, 1)]
    assert [len(each) for each in made] == [passes * per_pass] * 2
    for number in range(passes):
        of_pass = [each[number * per_pass : (number + 1) * per_pass] for each in made]
        used = sorted(sample for each in of_pass for samples in each for sample in samples)
        assert used == list(range(SAMPLES)), f"in pass {number} each sample comes once"


@pytest.mark.slurm
@pytest.mark.timeout(600)
def test_before_the_time_limit_a_last_checkpoint_is_made_and_a_cancelled_job_stays_cancelled(
    slurm: Slurm, tmp_path: Path
) -> None:
    """The limit is set when training has begun: a minute is the shortest that Slurm knows."""
    limits = ("--time=10", "--signal=B:TERM@100")
    words = (SCRIPT, FOR_EVER, "0.1", str(tmp_path))
    job = slurm.submit("train.sbatch", *words, options=limits, CHECKPOINT_EVERY="100000steps")
    log = f"ps-train-{job}"
    until(lambda: len(steps(tmp_path, 0)) >= 12, "steps")
    assert last_checkpoint(slurm.log(log)) < 12
    slurm.run("scontrol", "update", f"JobId={job}", "TimeLimit=2")
    until(lambda: "the time is nearly over" in slurm.log(log), "the signal")
    slurm.await_state(job, "PENDING")
    slurm.run("scontrol", "update", f"JobId={job}", "TimeLimit=10")
    until(lambda: len(begun(slurm.log(log))) == 4, "the second start")
    reached = resumed_at(slurm.log(log))
    assert reached >= 12
    assert [clock for _, clock, _ in begun(slurm.log(log))[2:]] == [reached, reached]
    slurm.run("scancel", job)
    assert slurm.await_end(job) == "CANCELLED"


@pytest.mark.slurm
@pytest.mark.timeout(600)
def test_workers_of_an_array_are_replaced_when_they_are_killed_or_preempted(slurm: Slurm, tmp_path: Path) -> None:
    run = str(tmp_path / "run")
    servers = slurm.submit("servers.sbatch", "--shards", "2", CHECKPOINT_EVERY="20steps", RUN_DIR=run)
    until((tmp_path / "run" / "server").exists, "the servers' address")
    words = (SCRIPT, FOR_EVER, "0.1", str(tmp_path))
    array = slurm.submit("workers.sbatch", *words, options=("--array=0-2%2",), RUN_DIR=run)
    slurm.run("scontrol", "hold", f"{array}_2")
    logs = [f"ps-workers-{array}_{task}" for task in range(3)]
    until(lambda: begun(slurm.log(logs[0])) and begun(slurm.log(logs[1])), "two workers")
    until(lambda: len(steps(tmp_path, 0)) >= 8 and len(steps(tmp_path, 1)) >= 8, "their steps")

    [process] = re.findall(r" in process (\d+)", slurm.log(logs[0]))
    os.kill(int(process), signal.SIGKILL)
    slurm.run("scontrol", "requeue", f"{array}_1")  # as preemption does
    for log in logs[:2]:
        until(lambda log=log: len(begun(slurm.log(log))) == 2, "another worker in its place")  # type: ignore[misc]
    assert "is started again" in slurm.log(logs[0])
    assert all(clock > 0 for log in logs[:2] for _, clock, _ in begun(slurm.log(log))[1:]), "they join what is running"
    (tmp_path / "enough").touch()
    for task in range(3):
        slurm.await_state(f"{array}_{task}", "COMPLETED")
        slurm.run("scontrol", "release", f"{array}_2")
    assert "has seen the end" in slurm.log(logs[2]), "which began when another had ended, and made no job of its own"

    made = [*steps(tmp_path, 0).values(), *steps(tmp_path, 1).values()]
    assert {sample for samples in made for sample in samples} == set(range(SAMPLES))
    slurm.run("scancel", servers)
    assert slurm.await_end(servers) == "CANCELLED"
