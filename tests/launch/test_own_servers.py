"""`ps-worker run --shards N`: one command starts servers and workers, and ends them in order whatever happens."""

from __future__ import annotations

import contextlib
import re
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file

from ps_server.ops import requests
from tests.chaos.cluster import free_ports
from tests.tools.cases import cases
from tests.tools.cluster import until
from tests.tools.launching import END_SECONDS, ROOT, START_SECONDS, Command, Commands, Refusal, Start, run, script

SCRIPT = ROOT / "tests" / "scripts" / "train_everything.py"
FOR_EVER = "1000000000"
READY = r"ps-server: ready at (\S+) \("


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts launches that end with the test: start("--shards=1", SCRIPT, ...)."""
    with closing(Commands(tmp_path)) as commands:
        yield lambda *words, **variables: commands.start("-m", "ps_worker", "run", *words, **variables)


def address_of(command: Command) -> str:
    """Where the servers of a launch are, once they are ready."""
    found = until(lambda: re.findall(READY, command.err), "servers that are ready", START_SECONDS)
    return str(found[0])


def await_clock(address: str, clock: int) -> None:
    """Waits until a worker has come so far."""

    def reached() -> bool:
        workers = [worker for job in requests.fetch(address)["jobs"] for worker in job["workers"]]
        return any(worker["clock"] >= clock for worker in workers)

    until(reached, f"a worker at clock {clock}", START_SECONDS)


def kill_shard(address: str, index: int) -> None:
    """Kills a shard's process, once the shard has answered which one that is."""

    def process() -> int | None:
        [shard] = [each for each in requests.fetch(address)["shards"] if each["index"] == index]
        return int(shard["pid"]) if shard["reachable"] else None

    psutil.Process(until(process, f"an answer of shard {index}", START_SECONDS)).kill()


def whole_checkpoints(directory: Path) -> list[Path]:
    return sorted(directory.glob("default/*/manifest.json"))


def end(command: Command, number: int) -> int:
    """Sends a signal; the exit code, when nothing of the launch is left."""
    family = command.family()
    command.process.send_signal(number)
    code = command.process.wait(END_SECONDS)
    _, left = psutil.wait_procs(family, timeout=END_SECONDS)
    assert not left
    return code


@pytest.mark.long
def test_one_command_trains_and_leaves_nothing_but_a_checkpoint(start: Start, tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    flags = ("--shards", "2", "--workers", "2", "--mode", "ssp:4", "--checkpoint-dir", str(kept))
    command = start(*flags, str(SCRIPT), str(tmp_path), "3")
    address_of(command)
    family = command.family()
    assert command.process.wait(START_SECONDS) == 0, command.err
    for rank in range(2):
        assert f"worker {rank} of 2: ssp:4 Everything AdamW\n" in command.out
    assert "ps-server:" not in command.out, "what the script writes has its stdout alone"
    assert whole_checkpoints(kept)
    _, left = psutil.wait_procs(family, timeout=END_SECONDS)
    assert not left


@pytest.mark.long
def test_a_launch_whose_servers_fail_at_its_end_fails_too(tmp_path: Path) -> None:
    """Its workers have come to their end, and the servers die before their last checkpoint."""
    flags = ("--shards", "1", "--checkpoint-dir", str(tmp_path / "kept"))
    done = run(*flags, script(tmp_path, "say(os.environ['PS_RANK'])"), PS_FAILPOINTS="drain-begun")
    assert done.returncode == 1, done.stderr
    assert done.stdout.splitlines() == ["0"]
    assert "the coordinator ended with code -9: last checkpoints may be missing" in done.stderr
    assert "ps-worker: the servers ended with code 1" in done.stderr


@pytest.mark.long
def test_local_steps_train_in_processes(start: Start, tmp_path: Path) -> None:
    command = start("--shards", "1", "--workers", "2", "--mode", "local:8", str(SCRIPT), str(tmp_path), "5")
    assert command.process.wait(START_SECONDS) == 0, command.err
    for rank in range(2):
        assert f"worker {rank} of 2: local:8 Everything AdamW\n" in command.out
    first, second = (load_file(tmp_path / f"local:8-{rank}.safetensors") for rank in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first), "in the warm-up each step is averaged"


@pytest.mark.long
def test_a_second_run_goes_on_from_the_checkpoint_of_the_first(start: Start, tmp_path: Path) -> None:
    flags = ("--shards", "1", "--checkpoint-dir", str(tmp_path / "kept"), "--restore")
    for _ in range(2):
        command = start(*flags, str(SCRIPT), str(tmp_path), "3")
        assert command.process.wait(START_SECONDS) in (0, 1)
    assert "assert session.clock == steps" in command.err, "it began at the clock of the first run"


@pytest.mark.long
def test_a_worker_is_told_where_its_servers_are_and_its_exit_code_is_that_of_the_launch(tmp_path: Path) -> None:
    """The servers are told of no worker."""
    text = (
        "say(os.environ['PS_SERVER'], os.environ['PS_MODE'], os.environ.get('PS_LEASE'))\n"
        "sys.exit(7 * int(os.environ['PS_RANK']))"
    )
    done = run(
        *("--shards", "1", "--workers", "2", script(tmp_path, text)),
        PS_LEASE="77",  # a variable of servers
        PS_METRICS_PORT="0",
        PS_TLS_CERT="",
    )
    assert done.returncode == 7, done.stderr
    assert "worker 1 failed with code 7" in done.stderr
    [address] = re.findall(READY, done.stderr)
    assert sorted(done.stdout.splitlines()) == [f"[{rank}] {address} sync 77" for rank in range(2)]


@pytest.mark.long
@pytest.mark.parametrize("number", cases([signal.SIGTERM], [signal.SIGINT]))
def test_a_signal_ends_workers_and_then_servers_with_a_last_checkpoint(
    start: Start, tmp_path: Path, number: int
) -> None:
    kept = tmp_path / "kept"
    flags = ("--shards", "2", "--workers", "2", "--checkpoint-dir", str(kept))
    command = start(*flags, str(SCRIPT), str(tmp_path), FOR_EVER)
    await_clock(address_of(command), 2)
    assert end(command, number) == 128 + number
    assert whole_checkpoints(kept)
    lines = command.err
    assert lines.index("worker 0 leaves") < lines.index("INFO stopping"), "the workers ended first"
    assert "Traceback" not in lines


@pytest.mark.long
def test_a_launch_that_is_killed_leaves_nothing_behind(start: Start, tmp_path: Path) -> None:
    command = start("--shards", "1", "--workers", "2", str(SCRIPT), str(tmp_path), FOR_EVER)
    await_clock(address_of(command), 1)
    assert end(command, signal.SIGKILL) == -signal.SIGKILL


@pytest.mark.long
def test_a_second_signal_ends_all_at_once(commands: Commands, tmp_path: Path) -> None:
    """With one signal the launch would wait for its worker for longer than this test does."""
    stays = (
        "import signal\nsignal.signal(signal.SIGTERM, lambda *_: say('told'))\nsay('here')\nwhile True: time.sleep(600)"
    )
    patient = "import ps_launch.worker_launch as l; l.STOP_SECONDS = 600; import ps_worker.cli as c; c.main()"
    command = commands.start("-c", patient, "run", "--shards", "1", script(tmp_path, stays))
    command.says("here")
    family = command.family()
    command.process.send_signal(signal.SIGINT)
    command.says("told")
    command.process.send_signal(signal.SIGINT)
    assert command.process.wait(END_SECONDS) == 128 + signal.SIGINT
    _, left = psutil.wait_procs(family, timeout=END_SECONDS)
    assert not left


@pytest.mark.long
def test_the_first_signal_lets_a_launch_end_in_order_that_ends_anyway(start: Start, tmp_path: Path) -> None:
    """A worker has failed, so the others are stopped, and then the servers."""
    text = f"""
import signal
from pathlib import Path
ready, goes_on = Path({str(tmp_path / "ready")!r}), Path({str(tmp_path / "goes_on")!r})

def await_file(path):
    while not path.exists():
        time.sleep(0.05)

def told(*_):
    say("told")
    await_file(goes_on)
    say("left in order")
    sys.exit(0)

if os.environ["PS_RANK"] == "1":
    await_file(ready)
    sys.exit(3)
signal.signal(signal.SIGTERM, told)
ready.touch()
time.sleep(600)
"""
    flags = ("--shards", "1", "--workers", "2", "--stop-on-failure", "--checkpoint-dir", str(tmp_path / "kept"))
    command = start(*flags, script(tmp_path, text))
    command.says("told")
    command.process.send_signal(signal.SIGTERM)
    with pytest.raises(subprocess.TimeoutExpired):  # else it would end now
        command.process.wait(2.0)
    (tmp_path / "goes_on").touch()
    command.says("left in order")
    assert command.process.wait(END_SECONDS) == 3
    assert "INFO stopping" in command.err


@pytest.mark.long
def test_a_shard_that_dies_comes_back_and_the_workers_go_on(start: Start, tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    flags = ("--shards", "2", "--workers", "2", "--checkpoint-dir", str(kept), "--checkpoint-every", "1s")
    command = start(*flags, str(SCRIPT), str(tmp_path), FOR_EVER)
    address = address_of(command)
    until(lambda: whole_checkpoints(kept), "a checkpoint", START_SECONDS)
    [job] = requests.fetch(address)["jobs"]
    kill_shard(address, 1)
    until(lambda: "shard 1 is back (restart 1)" in command.err, "the shard", START_SECONDS)
    await_clock(address, max(worker["clock"] for worker in job["workers"]) + 5)
    assert end(command, signal.SIGTERM) == 128 + signal.SIGTERM


@pytest.mark.long
def test_workers_are_stopped_when_their_servers_end(start: Start, tmp_path: Path) -> None:
    command = start(
        *("--shards", "1", "--workers", "2", "--server-options", "--max-shard-restarts 0"),
        script(tmp_path, "say('here'); time.sleep(600)"),
    )
    command.says("here", count=2)
    kill_shard(address_of(command), 0)
    assert command.process.wait(START_SECONDS) == 1
    assert "ps-worker: the servers ended with code 1, so the workers are stopped" in command.err


@pytest.mark.long
def test_servers_that_cannot_start_end_all_at_once(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = run("--shards", "1", "--port", port, script(tmp_path, "say('here')"))
        assert done.returncode == 1
        assert done.stdout == "", "no worker was started"
        assert port in done.stderr
        assert "ps-worker: the servers did not start, so no worker is started" in done.stderr
    done = run("--shards", "1", "--server-options", "--laese 3", script(tmp_path, "say('here')"))
    assert done.returncode == 1
    assert "ps-server up: unknown option --laese, did you mean --lease?" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_text_that_looks_like_a_flag_is_refused_with_the_way_to_write_it(refusal: Refusal) -> None:
    code, said = refusal("--shards", "1", "--server-options", "--own-disk", __file__)
    assert code == 2
    assert "argument --server-options: expected one argument; if --own-disk is meant as its value, write" in said
    assert " --server-options=--own-disk (see ps-worker run --help)" in said


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        (("--shards=1", "--server=h:1"), "--shards starts servers here, and --server names some elsewhere"),
        (("--shards=1", "--mode=ddp"), "mode ddp has no servers: leave --shards out"),
        (("--checkpoint-dir=x",), "--checkpoint-dir is for servers that are started here: give --shards too"),
        (("--server=h:1", "--port=7"), "--port is for servers that are started here: give --shards too"),
        (("--shards=1", "--server-options='--lease"), "--server-options: No closing quotation"),
    ],
)
def test_flags_that_contradict_each_other_are_refused(refusal: Refusal, flags: tuple[str, ...], error: str) -> None:
    code, said = refusal(*flags, __file__)
    assert code == 1
    assert f"ps-worker: {error}" in said


def test_a_variable_for_servers_starts_none_where_a_launch_needs_none(tmp_path: Path) -> None:
    variables = {"PS_SHARDS": "2", "PS_CHECKPOINT_DIR": "elsewhere"}
    for flags in (("--mode=ddp", "--workers=2"), ("--mode=single",), ("--server=h:1",)):
        done = run(*flags, script(tmp_path, "say(os.environ.get('PS_SERVER') or 'none')"), **variables)
        assert done.returncode == 0, done.stderr
        assert "ps-server" not in done.stderr


# -- a shard beside the workers of each machine ----------------------------------------------------------------------


def start_nodes(start: Start, count: int, *words: str) -> list[Command]:
    """Starts a launch for each of several nodes, all on this machine: the last node first."""
    server = f"127.0.0.1:{free_ports(1)}"
    flags = ("--shards-with-workers", "--server", server, "--nnodes", str(count))
    nodes = [start(*flags, "--node-rank", str(rank), *words) for rank in reversed(range(count))]
    return nodes[::-1]


@pytest.mark.long
def test_each_node_holds_a_shard_until_the_job_has_ended_also_one_that_is_done_first(
    start: Start, tmp_path: Path
) -> None:
    text = (
        "import os, sys, torch, ps_worker\nfrom pathlib import Path\nwith ps_worker.connect() as session:\n"
        "    model = torch.nn.Linear(64, 64)\n"
        "    model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), bucket_bytes=256)\n"
        "    while session.clock < 3 or (session.rank == 0 and not Path(sys.argv[1]).exists()):\n"
        "        model(torch.ones(1, 64)).sum().backward()\n        optimizer.step()\n        optimizer.zero_grad()\n"
    )
    (tmp_path / "train.py").write_text(text)
    first, second = start_nodes(start, 2, "--mode", "async", str(tmp_path / "train.py"), str(tmp_path / "enough"))
    address = address_of(first)
    assert f"ps-server: ready at {address} (the coordinator, and shard 0 of 2)\n" in first.err
    until(lambda: "worker 1 leaves" in first.err, "the end of the worker of node 1", START_SECONDS)
    [own] = re.findall(rf"ps-server: shard 1 of 2 ready at (\S+); the coordinator is at {address}\n", second.err)
    assert f"INFO shard 1 at {own}\n" in first.err, "where the coordinator knows it"
    families = [process for node in (first, second) for process in node.family()]
    await_clock(address, 200)
    assert second.process.poll() is None

    def waits(each: psutil.Process) -> bool:
        with contextlib.suppress(psutil.NoSuchProcess):  # it has ended since the family was listed
            return "await-end" in each.cmdline()
        return False

    [waiting] = until(lambda: [each for each in second.family() if waits(each)], "a wait for the end")
    waiting.kill()
    until(lambda: "cannot learn when the job ends: the servers go on" in second.err, "the launcher's word")
    until(lambda: all(shard["reachable"] for shard in requests.fetch(address)["shards"]), "an answer of both shards")
    (tmp_path / "enough").touch()
    assert [node.process.wait(START_SECONDS) for node in (first, second)] == [0, 0], first.err + second.err
    _, left = psutil.wait_procs(families, timeout=END_SECONDS)
    assert not left, "each shard and each worker has ended"


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        ((), "--shards-with-workers needs --server HOST:PORT"),
        (("--server=h:1", "--nnodes=2", "--node-rank=2"), "--node-rank is below --nnodes 2, got 2"),
        (("--server=h:1", "--shards=2"), "--shards follows from --nnodes and --node-rank: leave it out"),
        (("--server=h:1", "--world-size=2"), "--world-size follows from --nnodes and --node-rank: leave it out"),
        (("--server=h:1", "--mode=ddp"), "mode ddp has no servers: leave --shards-with-workers out"),
    ],
)
def test_nodes_that_contradict_themselves_are_refused(refusal: Refusal, flags: tuple[str, ...], error: str) -> None:
    code, said = refusal("--shards-with-workers", *flags, __file__)
    assert code == 1
    assert f"ps-worker: {error}" in said
