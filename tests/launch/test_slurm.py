"""The files of deploy/slurm, under a real Slurm where there is one; and what can be known of them without."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import ps_server.cli
import ps_worker.cli
from ps_runtime.command_line import CommandLine
from tests.scripts.train_on_slurm import BATCH, SAMPLES
from tests.tools.launching import ROOT, environment, script
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


def as_task(number: int, count: int) -> dict[str, str]:
    """What Slurm tells one of some tasks on one node."""
    names = {"SLURM_PROCID": number, "SLURM_NTASKS": count, "SLURM_LOCALID": number, "SLURM_JOB_ID": 4711}
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return {"PATH": path, "SLURM_STEP_ID": "0", **{name: str(value) for name, value in names.items()}}


TOLD = "say(*(os.environ[name] for name in ('PS_RANK', 'PS_WORLD_SIZE', 'RANK', 'WORLD_SIZE', 'PS_GROUP_SIZE')))"


def test_a_task_of_the_batch_file_is_a_launcher_of_a_group_that_starts_it_again_as_a_whole(tmp_path: Path) -> None:
    """With GROUP_SIZE set: the twin of the test below, which needs a Slurm."""
    text = (FILES / "train.sbatch").read_text()
    [command] = re.findall(r"bash -c '(exec \S+ -m ps_worker run .*?)' group\)", text, re.DOTALL)
    fails_once = """
said = os.environ["PS_RESTART_COUNT"] == "0"
if said and os.environ["RANK"] == "1":
    sys.exit("no such sample")
while said:
    time.sleep(0.01)
"""
    path = script(tmp_path, fails_once + TOLD)
    python = tmp_path / "python-of-the-script"
    python.write_text(f'#!/bin/bash\ntouch {tmp_path}/is-used\nexec {sys.executable} "$@"\n')
    python.chmod(0o700)
    # GROUP: tcsh exports the name of the user's group.
    told = {"GROUP_SIZE": "2", "GROUP": "users", "PYTHON": str(python)}
    own = environment(**as_task(1, 3), **told, PS_SERVER="127.0.0.1:1", PS_MODE="sync", PS_STARTED_FILE="")
    words = ["bash", "-c", command, "group", path]
    done = subprocess.run(words, env=own, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["[1.0] 1 3 0 2 2", "[1.1] 1 3 1 2 2"]
    assert (tmp_path / "is-used").exists()
    assert "member 1 of group 1 failed" in done.stderr
    assert "is started again" in done.stderr


@pytest.mark.parametrize(
    ("told", "threads"),
    [
        ({"SLURM_CPUS_PER_TASK": "8", "GROUP": "users"}, "8"),
        ({"SLURM_CPUS_PER_TASK": "8", "GROUP_SIZE": "4"}, "2"),
        ({"SLURM_CPUS_PER_TASK": "2", "GROUP_SIZE": "4"}, "1"),
        ({"SLURM_CPUS_PER_TASK": "8", "GROUP_SIZE": "4", "OMP_NUM_THREADS": "3"}, "3"),
        ({}, "1"),
    ],
)
def test_the_processes_of_a_task_share_its_cores(told: dict[str, str], threads: str) -> None:
    text = (FILES / "train.sbatch").read_text()
    [command] = re.findall(r"^threads=.*\nexport OMP_NUM_THREADS=.*$", text, re.MULTILINE)
    words = ["bash", "-euc", command + '; echo "$OMP_NUM_THREADS"']
    done = subprocess.run(words, env={"PATH": os.environ["PATH"], **told}, capture_output=True, text=True, check=True)
    assert done.stdout == f"{threads}\n"


def test_the_script_of_the_page_tells_each_task_which_member_of_which_group_it_is(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "groups.md").read_text()
    [member] = re.findall(r"\$ cat member\.sh\n(.*?exec python \"\$@\"\n)", page, re.DOTALL)
    (tmp_path / "member.sh").write_text(member)
    path = script(tmp_path, TOLD + "\nsay(os.environ['MASTER_ADDR'], os.environ['MASTER_PORT'])")
    found = []
    for number in range(4):
        words = ["bash", str(tmp_path / "member.sh"), path]
        done = subprocess.run(
            words, env=environment(**as_task(number, 4)), capture_output=True, text=True, timeout=60, check=True
        )
        found.append(done.stdout.splitlines())
    assert [told for told, _ in found] == ["0 2 0 2 2", "0 2 1 2 2", "1 2 0 2 2", "1 2 1 2 2"]
    meetings = [where for _, where in found]
    assert meetings[0] == meetings[1] != meetings[2] == meetings[3]


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
def test_a_group_of_which_a_process_is_killed_is_started_again_and_the_job_goes_on(
    slurm: Slurm, tmp_path: Path
) -> None:
    job = slurm.submit("train.sbatch", SCRIPT, "60", "0.1", str(tmp_path), GROUP_SIZE="2", GROUP="users")
    log = f"ps-train-{job}"
    until(lambda: (tmp_path / "1-1").exists() and len((tmp_path / "1-1").read_text().splitlines()) >= 5, "steps")
    first = dict(re.findall(r"^\[(\d\.\d)\] worker \d begins .* in process (\d+)", slurm.log(log), re.MULTILINE))
    assert first.keys() == {"0.0", "0.1", "1.0", "1.1"}
    os.kill(int(first["1.1"]), signal.SIGKILL)
    assert slurm.await_end(job) == "COMPLETED"
    said = slurm.log(log)
    assert "its group ends, and is started again" in said
    begins = re.findall(r"^\[(\d\.\d)\] worker \d begins at clock (\d+)", said, re.MULTILINE)
    assert [member for member, _ in begins].count("0.0") == 1, "the other group went on"
    assert [int(clock) > 0 for member, clock in begins if member == "1.0"] == [False, True]
    assert len(set(re.findall(r"worker \d ends at clock \d+ with (\w+)", said))) == 1


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
