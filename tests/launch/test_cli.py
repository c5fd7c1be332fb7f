"""The commands, as processes: what they print, what they leave behind, and how they end."""

from __future__ import annotations

import builtins
import json
import os
import re
import signal
import socket
import subprocess
import sys
from argparse import Namespace
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import ps_server.cli
import ps_worker.cli
from ps_launch.lifeline import OTHERS_END_SECONDS
from ps_runtime.launch_id import FINISHED_WITHOUT_CODE
from ps_runtime.quantities import counted, size_text
from ps_server.ops import requests
from ps_server.rpc.health_client import is_serving
from tests.tools.cluster import Cluster, scrape, until
from tests.tools.launching import (
    END_SECONDS,
    ROOT,
    START_SECONDS,
    Command,
    Refusal,
    Start,
    python,
    run,
    run_here,
    script,
)

SCRIPT = ROOT / "tests" / "scripts" / "train_everything.py"
FOR_EVER = "1000000000"

WORKERS = ("-m", "ps_worker", "run", "--server", "h:1")


def start_up(start: Start, shards: int = 1) -> tuple[Command, str]:
    """A cluster of real processes, and its address."""
    command = start("-m", "ps_server", "up", PS_SHARDS=str(shards), PS_PORT="0", PS_METRICS_PORT="0")
    [address] = command.says(r"ps-server: ready at (\S+) \(\d shards?\)\n")
    return command, address


def shards_of(address: str) -> dict[int, dict[str, Any]]:
    """The shards that `ps-server status` knows, by index."""
    return {shard["index"]: shard for shard in requests.fetch(address)["shards"]}


def answered(found: dict[str, Any]) -> dict[str, Any] | None:
    """A status in which all shards have answered in time, on whichever machine."""
    return found if all(shard["reachable"] for shard in found["shards"]) else None


def assert_quiet(command: Command) -> None:
    assert "Traceback" not in command.err
    assert "Exception" not in command.err


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Command, str]]:
    """A cluster that several tests share."""
    flags = ("--shards", "2", "--port", "0", "--metrics-port", "0")
    command = Command(tmp_path_factory.mktemp("up"), "-m", "ps_server", "up", *flags)
    [address] = command.says(r"ps-server: ready at (\S+) \(2 shards\)\n")
    command.says(r"ps-server: the page, for a browser on this machine: (\S+)\n")
    yield command, address
    try:
        assert command.end(signal.SIGTERM) == 0, "the third of the signals that end a cluster cleanly"
        assert_quiet(command)
    finally:
        command.clean_up()


def main(monkeypatch: pytest.MonkeyPatch, *command: str) -> int | str | None:
    """Runs a command in this process; its exit code, or the message that it exits with."""
    monkeypatch.setattr(sys, "argv", list(command))
    with pytest.raises(SystemExit) as caught:
        (ps_server if command[0] == "ps-server" else ps_worker).cli.main()
    return caught.value.code


# -- a cluster -------------------------------------------------------------------------------------------------------


def test_up_prints_where_to_point_workers_and_prometheus(up: tuple[Command, str]) -> None:
    command, address = up
    assert is_serving(address)
    pages = command.says(r"ps-server: metrics at http://(\S+)/metrics\n", count=2)
    assert scrape(pages[0])["ps_shards"] == 2
    assert "ps_shards" not in scrape(pages[1])
    assert command.says(r"ps-server: the page, for a browser on this machine: (\S+)\n") == [f"http://{pages[0]}/"]
    assert command.out.count("\n") == 4, "four lines, and nothing else"
    found = until(lambda: answered(requests.fetch(address)), "an answer of all shards")
    assert [shard["index"] for shard in found["shards"]] == [0, 1]
    assert {p["pid"] for p in (found["coordinator"], *found["shards"])} == {child.pid for child in command.family()}
    assert [shard["metrics_address"] for shard in found["shards"]] == pages


@pytest.mark.long
def test_torchrun_and_variables_start_the_same_script(up: tuple[Command, str], start: Start, tmp_path: Path) -> None:
    _, address = up
    torchrun = start(
        *("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(SCRIPT), str(tmp_path), "3"),
        PS_SERVER=address,
        PS_MODE="ssp:1",
        PS_JOB="torchrun",
        OMP_NUM_THREADS="1",
    )
    assert torchrun.process.wait(START_SECONDS) == 0, torchrun.err
    for rank in range(2):
        assert f"worker {rank} of 2: ssp:1 Everything AdamW\n" in torchrun.out
        assert (tmp_path / f"ssp:1-{rank}.safetensors").exists()
    until(lambda: not requests.fetch(address)["jobs"])


@pytest.mark.long
def test_ctrl_c_ends_workers_and_takes_them_off_the_job(up: tuple[Command, str], start: Start, tmp_path: Path) -> None:
    _, address = up
    flags = ("--server", address, "--workers", "2", "--job", "interrupted", "--metrics-host", "127.0.0.1")
    workers = start("-m", "ps_worker", "run", *flags, str(SCRIPT), str(tmp_path), FOR_EVER)

    def training() -> bool:
        assert workers.process.poll() is None, workers.err
        held = [job for shard in shards_of(address).values() for job in shard["jobs"] if job["job"] == "interrupted"]
        return len(held) == 2 and all(job["versions"]["min_version"] > 3 for job in held)

    until(training)
    assert workers.end(signal.SIGINT) == 128 + signal.SIGINT
    assert_quiet(workers)
    until(lambda: not requests.fetch(address)["jobs"])  # at once, not when the lease is over
    assert is_serving(address), "the cluster is there for the next job"


@pytest.mark.long
def test_a_cluster_that_is_killed_leaves_no_process_behind(start: Start) -> None:
    command, _ = start_up(start)
    assert command.end(signal.SIGKILL) == -signal.SIGKILL
    assert_quiet(command)


# -- looking in ------------------------------------------------------------------------------------------------------


def test_status_tells_of_every_process_what_programs_need(
    shared: Cluster, job: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with shared.connect("ssp:2", job=job) as session:
        model = nn.Linear(100, 1, bias=False)
        model, optimizer = session.prepare(model, torch.optim.Adam(model.parameters()), bucket_bytes=64)
        for _ in range(3):
            model(torch.ones(100)).backward()
            optimizer.step()
        assert main(monkeypatch, "ps-server", "status", "--server", shared.address, "--json") == 0
        found = json.loads(capsys.readouterr().out)
        coordinator, shards = found["coordinator"], found["shards"]
        [known] = [j for j in found["jobs"] if j["name"] == job]
        [worker] = known["workers"]
        assert {process["pid"] for process in (coordinator, worker, *shards)} == {os.getpid()}
        assert coordinator["address"] == shared.address
        assert [shard["index"] for shard in shards] == [0, 1]
        of_shards = [held for shard in shards for held in shard["jobs"] if held["job"] == job]
        for shard, server in zip(shards, shared.servers, strict=True):
            assert (shard["address"], shard["metrics_address"]) == (server.address, server.metrics_address)
            [held] = [j for j in shard["jobs"] if j["job"] == job]
            assert held["versions"] == {"min_version": 3, "max_version": 3, "clocks": {"0": 3}}
            assert held["parameter_bytes"] > 0
            assert held["optimizer_bytes"] >= 2 * held["parameter_bytes"] - 2 * 64
        assert (worker["rank"], worker["metrics_address"]) == (0, session.metrics_address)
        assert 0 < worker["lease_duration"] <= shared.coordinator.lease
        rule = {"max_staleness": 2, "aggregate": False, "quorum": None, "quorum_grace": 0.0}
        assert known["consistency"] == rule
        assert (known["world_size"], known["bucket_count"], known["last_checkpoint"]) == (1, 7, None)

        assert main(monkeypatch, "ps-server", "status", "--server", shared.address) == 0
        table = capsys.readouterr().out
        head, *rows = table.splitlines()
        assert head.split()[:5] == ["ROLE", "INDEX", "PID", "ADDRESS", "METRICS"]
        assert len([row for row in rows if row.startswith(("coordinator", "shard", "worker"))]) >= 4
        sizes = [(size_text(held["parameter_bytes"]), size_text(held["optimizer_bytes"])) for held in of_shards]
        places = head.index("WEIGHTS"), head.index("OPTIMIZER")
        in_table = [tuple(row[place:].split("  ")[0] for place in places) for row in rows if row.startswith("shard")]
        assert set(sizes) <= set(in_table)
        assert f"job {job}: ssp:2, 1 of 1 workers" in table


def test_quantities_are_in_units_that_people_read() -> None:
    sizes = {0: "0 B", 999: "999 B", 1000: "1 kB", 5_774_336: "5.77 MB", 11_548_732: "11.5 MB", 25 * 10**11: "2.5 TB"}
    assert {size: size_text(size) for size in sizes} == sizes
    assert [counted(count, "bucket") for count in (0, 1, 2)] == ["0 buckets", "1 bucket", "2 buckets"]


def test_health_tells_by_its_exit_code(shared: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    for server in shared.servers:
        assert main(monkeypatch, "ps-server", "health", "--server", server.address) == 0
    assert main(monkeypatch, "ps-server", "health", "--server", "127.0.0.1:1") == 1


def test_a_probe_does_not_load_torch(shared: Cluster, tmp_path: Path) -> None:
    """Containers are probed every few seconds: seconds of a core for each probe starve what it asks about."""
    check = (
        "import atexit, sys; from ps_server.__main__ import program; "
        "atexit.register(lambda: print({'torch', 'numpy'} & sys.modules.keys())); "
        f"sys.argv[1:] = ['health', '--server', '{shared.address}']; program()"
    )
    told = python("-c", check, folder=tmp_path)
    assert (told.returncode, told.stdout.strip()) == (0, "set()")


def test_end_ends_a_job(shared: Cluster, job: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with shared.connect("sync", job=job) as session:
        model = nn.Linear(1, 1)
        session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        monkeypatch.setenv("PS_SERVER", shared.address)
        monkeypatch.setenv("PS_JOB", job)
        assert main(monkeypatch, "ps-server", "end") == 0
        assert job not in shared.coordinator.jobs()


COMMANDS = [
    *(
        ("ps-server", command, "--help")
        for command in ("up", "coordinator", "shard", "status", "page", "health", "end", "relay")
    ),
    ("ps-server", "up", "--help-limits"),
    ("ps-worker", "run", "--help"),
]


# Flags that no variable stands for.
UNNAMED = {"-h,", "-m,", "--json", "--with-coordinator", "--help-limits", "--watch", "--config"}
# Their variables are those of other commands, where they say something else.
UNNAMED_OF_COMMANDS = {
    ("ps-server", "up", "--only"),
    ("ps-server", "up", "--coordinator"),
    ("ps-worker", "run", "--port"),
}


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_help_explains_every_flag_and_names_its_variable(
    command: tuple[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    assert main(monkeypatch, *command) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"usage: {command[0]} {command[1]}")
    flags = [" ".join(entry.split()) for entry in re.split(r"^  (?=-)", text, flags=re.MULTILINE)[1:]]
    for entry in flags:
        flag, _, words = entry.partition(" ")
        assert len(words.split()) >= 3, f"{flag} is not explained"
        if flag not in UNNAMED and (*command[:2], flag) not in UNNAMED_OF_COMMANDS:
            assert f"[PS_{flag[2:].replace('-', '_').upper()}" in entry, entry
    limits = [
        entry
        for entry in flags
        if entry.startswith("--max-") and not entry.startswith(("--max-restarts", "--max-shard-restarts"))
    ]
    assert len(limits) == (36 if command[2] == "--help-limits" else 0)


def test_help_is_there_at_once() -> None:
    check = (
        "import sys, ps_server.cli, ps_worker.cli; ps_server.cli.parser(); ps_worker.cli.parser();"
        "print('torch' in sys.modules)"
    )
    found = subprocess.run(
        [sys.executable, "-c", check], capture_output=True, text=True, cwd=ROOT, timeout=60, check=True
    )
    assert found.stdout == "False\n", "torch takes seconds to import"


@pytest.mark.parametrize("module", ["ps_server.cli", "ps_server.server", "ps_worker.cli", "ps_worker.connecting"])
def test_what_grpc_reads_from_the_environment_is_set_when_it_is_imported(module: str) -> None:
    check = (
        "import os, sys\n"
        "class Watch:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'grpc':\n"
        "            print(os.environ.get('GRPC_ENABLE_FORK_SUPPORT'), os.environ.get('GRPC_VERBOSITY'), flush=True)\n"
        "            os._exit(0)\n"
        f"sys.meta_path.insert(0, Watch())\nimport {module}, grpc"
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GRPC_")}
    command = [sys.executable, "-c", check]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=60, check=True)
    assert done.stdout == "0 ERROR\n"


# -- starting workers ------------------------------------------------------------------------------------------------


def test_each_worker_is_told_its_place_and_the_scripts_arguments(tmp_path: Path) -> None:
    told = script(tmp_path, "say(*(os.environ[name] for name in sys.argv[2:]), sys.argv[1])")
    names = ["PS_SERVER", "PS_MODE", "PS_JOB", "PS_RANK", "PS_WORLD_SIZE", "PS_LOCAL_RANK"]
    flags = ["--server", "h:1", "--workers", "2", "--mode", "ssp:4", "--job", "j", "--first-rank", "3"]
    done = run(*flags, "--world-size", "8", told, "--lr=3", *names)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [
        f"[{3 + local}] h:1 ssp:4 j {3 + local} 8 {local} --lr=3" for local in range(2)
    ]


def test_flags_of_run_have_variables_too(tmp_path: Path) -> None:
    told = script(tmp_path, "say(os.environ['PS_MODE'], os.environ['PS_JOB'], os.environ['PS_ELASTIC'])")
    done = run(told, PS_SERVER="h:1", PS_WORKERS="3", PS_MODE="async", PS_JOB="j", PS_ELASTIC="1")
    assert sorted(done.stdout.splitlines()) == [f"[{local}] async j 1" for local in range(3)]


@pytest.mark.parametrize("mode", ["single", "sync", "ssp:2", "async"])
def test_the_same_script_trains_in_every_mode(
    shared: Cluster, job: str, mode: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # ddp: see tests/worker/test_ddp.py.
    where = {"PS_SERVER": shared.address, "PS_JOB": job, "PS_MODE": mode}
    run_here(monkeypatch, SCRIPT, str(tmp_path), "3", **where)
    assert (tmp_path / f"{mode}-0.safetensors").exists()
    assert job not in shared.coordinator.jobs()


FAILS = """
count, begun = int(os.environ["PS_RESTART_COUNT"]), __file__ + ".begun"
say("worker", os.environ["PS_RANK"], "start", count)
if os.environ["PS_RANK"] == "0":
    open(begun, "w").close()
await_file(begun)  # or worker 0 may be ended before it says anything
if os.environ["PS_RANK"] == "1" and count < 2:
    os.kill(os.getpid(), 9) if count else sys.exit(7)
"""


def test_a_worker_that_fails_is_started_again_alone_as_often_as_was_asked_for(tmp_path: Path) -> None:
    done = run("--server", "h:1", "--workers", "2", "--max-restarts", "2", script(tmp_path, FAILS))
    assert done.returncode == 0, "it came to its end after all"
    assert sorted(done.stdout.splitlines()) == [
        "[0] worker 0 start 0",
        "[1] worker 1 start 0",
        "[1] worker 1 start 1",
        "[1] worker 1 start 2",
    ]
    assert done.stderr.splitlines() == [
        "ps-worker: starting 2 workers",
        "ps-worker: worker 1 failed with code 7; it is started again in 0.5 s (restart 1 of 2)",
        "ps-worker: worker 1 was ended by SIGKILL; it is started again in 1 s (restart 2 of 2)",
        "ps-worker: worker 1 ended with code 0, and had failed before: worker 1 was ended by SIGKILL",
    ]


def test_a_worker_that_fails_too_often_is_not_started_again(tmp_path: Path) -> None:
    done = run("--server", "h:1", "--workers", "2", script(tmp_path, FAILS), PS_MAX_RESTARTS="1")
    assert done.returncode == 128 + signal.SIGKILL
    assert sorted(done.stdout.splitlines()) == ["[0] worker 0 start 0", "[1] worker 1 start 0", "[1] worker 1 start 1"]


def test_a_worker_whose_job_has_finished_without_it_is_not_started_again(tmp_path: Path) -> None:
    """Another process would be told that there is nothing to do, and end with 0."""
    ends = f"say('begun'); sys.exit({FINISHED_WITHOUT_CODE})"
    done = run("--server", "h:1", "--max-restarts", "2", script(tmp_path, ends))
    assert done.returncode == FINISHED_WITHOUT_CODE
    assert done.stdout == "begun\n"
    assert f"worker 0 failed with code {FINISHED_WITHOUT_CODE}; it is not started again" in done.stderr


def test_a_signal_ends_workers_that_wait_to_be_started_again(start: Start, tmp_path: Path) -> None:
    fails = script(tmp_path, "sys.exit(3)")
    command = start(*WORKERS, "--max-restarts", "60", fails)
    until(lambda: "restart 3 of 60" in command.err)
    command.process.send_signal(signal.SIGTERM)
    assert command.process.wait(END_SECONDS) == 128 + signal.SIGTERM


def test_in_ddp_no_worker_is_started_again_alone(refusal: Refusal) -> None:
    assert refusal("--mode", "ddp", "--workers", "2", "--max-restarts", "1", __file__) == (
        1,
        "ps-worker: --max-restarts does not work with --mode ddp, because a DDP worker cannot come back alone; "
        "use torchrun, which restarts all workers\n",
    )


def test_in_ddp_nobody_goes_on_alone(tmp_path: Path) -> None:
    """The other worker waits for a signal, which only the launcher sends."""
    fails = """
import signal
assert os.environ["MASTER_PORT"]
sys.exit(7) if os.environ["RANK"] == "1" else signal.pause()
"""
    assert run("--mode", "ddp", "--workers", "2", script(tmp_path, fails)).returncode == 7


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_worker_outlives_its_launcher(start: Start, tmp_path: Path, number: int) -> None:
    patient = script(tmp_path, "say('here')\ntime.sleep(600)")
    command = start(*WORKERS, "--workers", "2", patient)
    command.says("here", count=2)
    code = command.end(number)
    assert code == (-signal.SIGKILL if number == signal.SIGKILL else 128 + number)
    assert "Traceback" not in command.err


@pytest.mark.long
def test_an_address_where_nobody_answers_is_one_line_and_an_error(tmp_path: Path) -> None:
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
        done = run("--server", address, "--connect-timeout", "1.5", str(SCRIPT), str(tmp_path))
    assert done.returncode == 1
    assert done.stdout == ""
    *said, last = [line for line in done.stderr.splitlines() if line]
    assert last == "ps-worker: worker 0 failed with code 1"
    assert re.fullmatch(rf"worker 0: gave up after 1.5 s: coordinator at {address} does not answer \(.*\)", said[-1])
    assert sum("WARNING" in line for line in said) <= 1, "at most one word on the way that it is still trying"


def test_a_server_imports_nothing_at_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its package may have been upgraded before it is stopped. The files are then those of another version."""
    done: list[object] = []
    server: Any = SimpleNamespace(drain=done.append, outlive=done.append, stop=lambda: done.append("stopped"))
    flags = {"command": "shard", "with_coordinator": True, "drains": False, "ends_last": True, "drain_seconds": 15.0}

    def refuse(name: str, *_: object) -> None:
        raise ModuleNotFoundError(name=name)

    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        with monkeypatch.context() as patch:
            patch.setattr(builtins, "__import__", refuse)
            ps_server.cli._finish(server, Namespace(**flags), None)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert done == [15.0, OTHERS_END_SECONDS, "stopped"]
