"""`ps-server up` with real processes: it brings back whatever dies or hangs, and ends at once when it cannot start."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import nn

import ps_worker
from ps_protocol.errors import PSError
from ps_server.ops import requests, status_text
from ps_server.storage.checkpoints import CheckpointStore
from tests.chaos.cluster import free_ports
from tests.tools.cases import cases
from tests.tools.cluster import scrape, until
from tests.tools.launching import END_SECONDS, START_SECONDS, Command, Commands, Start, environment

# A start in vain may come before the one that brings a shard back.
RETURN_SECONDS = 2 * START_SECONDS
# For an end at once; less than the grace of a cluster that served.
PROMPT_SECONDS = 15.0


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts clusters that end with the test: start("--shards=3")."""
    with closing(Commands(tmp_path)) as commands:
        yield lambda *flags, **variables: commands.start("-m", "ps_server", "up", *flags, **variables)


@pytest.fixture
def up(start: Start) -> Start:
    """The same, at ports that the system chooses."""
    return lambda *flags, **variables: start("--port=0", "--metrics-port=0", *flags, **variables)


def ready(command: Command) -> str:
    """The cluster's address, once all shards are ready."""
    [address] = command.says(r"ps-server: ready at (\S+) \(\d shards?\)\n")
    return address


def process(command: Command, index: int, *not_these: int) -> psutil.Process:
    """The process of a shard, once there is one that is none of these."""

    def look() -> psutil.Process | None:
        for child in command.family():
            with suppress(psutil.Error):
                words = child.cmdline()
                if (
                    child.pid not in not_these
                    and "shard" in words  # and not a report of its end
                    and "--index" in words
                    and words[words.index("--index") + 1] == str(index)
                ):
                    return child
        return None

    found = until(look, f"a process of shard {index}", RETURN_SECONDS)
    assert found is not None
    return found


def shards_of(address: str) -> dict[int, dict[str, Any]]:
    """The shards that answer, by index; none while the coordinator does not."""
    with suppress(PSError):
        return {shard["index"]: shard for shard in requests.fetch(address)["shards"] if shard["reachable"]}
    return {}


def all_shards(address: str, count: int) -> dict[int, dict[str, Any]]:
    """All shards of a cluster, once each has answered: on a busy machine one may need longer than a status waits."""

    def all_of_them() -> dict[int, dict[str, Any]] | None:
        found = shards_of(address)
        return found if len(found) == count else None

    return until(all_of_them, f"{count} shards that answer", START_SECONDS) or {}


def await_return(address: str, before: dict[int, dict[str, Any]], *indices: int) -> dict[int, dict[str, Any]]:
    """Waits until all shards answer, these from new processes, each where it was; what the status says of each."""

    def back() -> dict[int, dict[str, Any]] | None:
        now = shards_of(address)
        if now.keys() == before.keys() and all(now[index]["pid"] != before[index]["pid"] for index in indices):
            return now
        return None

    after = until(back, f"the return of shards {indices}", RETURN_SECONDS)
    assert after is not None
    for index, shard in before.items():
        assert (after[index]["address"], after[index]["metrics_address"]) == (
            shard["address"],
            shard["metrics_address"],
        )
    return after


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def has_imported_torch(shard: psutil.Process) -> bool:
    """Whether a shard's process is that far in its start; it handles signals from before that on."""
    return any("libtorch" in mapped.path for mapped in shard.memory_maps())


# -- what died comes back --------------------------------------------------------------------------------------------


@pytest.mark.long
def test_the_coordinator_dies_while_another_shard_is_being_brought_back(up: Start) -> None:
    """The shard that starts waits for a coordinator that is gone, and the supervisor waits for neither of them."""
    command = up("--shards=2")
    address = ready(command)
    before = all_shards(address, 2)
    kill(before[1]["pid"])
    process(command, 1, before[1]["pid"])
    kill(before[0]["pid"])
    await_return(address, before, 0, 1)
    assert command.end(signal.SIGTERM) == 0


@pytest.mark.long
def test_all_shards_die_at_once_and_the_log_and_the_status_say_how_often(up: Start) -> None:
    command = up("--shards=2")
    address = ready(command)
    before = all_shards(address, 2)
    assert [shard["restart_count"] for shard in before.values()] == [0, 0]
    for shard in before.values():
        kill(shard["pid"])
    after = await_return(address, before, 0, 1)
    assert [shard["restart_count"] for shard in after.values()] == [1, 1]
    kill(after[1]["pid"])
    last = await_return(address, after, 1)
    assert [shard["restart_count"] for shard in last.values()] == [1, 2]
    assert [scrape(shard["metrics_address"])["ps_shard_restarts_total"] for shard in last.values()] == [1, 2]
    head, *rows = [row.split() for row in status_text.table(requests.fetch(address)).splitlines()]
    column = head.index("RESTARTS")
    assert [row[column] for row in rows if row[0] in ("coordinator", "shard")] == ["-", "1", "2"]

    def said(text: str) -> list[str]:
        return [line for line in command.err.splitlines() if line.startswith("ps-server:") and text in line]

    until(lambda: len(said("is back")) == 3, "a line for each return", START_SECONDS)
    for index in range(2):
        assert said(f"shard {index} ended")[0] == (
            f"ps-server: shard {index} ended with code -9; starting it again (restart 1)"
        )
        assert said(f"shard {index} is")[0] == f"ps-server: shard {index} is back (restart 1)"
    # Where the others took half a minute to come back, it has run well in between, and is started again at once.
    [again] = said("shard 1 ended")[1:]
    assert re.fullmatch(r"ps-server: shard 1 ended with code -9; starting it again( in 1 s)? \(restart 2\)", again)
    assert said("shard 1 is")[1:] == ["ps-server: shard 1 is back (restart 2)"]
    assert command.end(signal.SIGTERM) == 0


@pytest.mark.long
def test_a_shard_that_hangs_in_its_start_is_killed_and_the_others_come_back_meanwhile(up: Start) -> None:
    """A shard that waits for a coordinator which hangs is not late: its time begins when the coordinator is back.

    In one cluster shard 1 hangs and in another one the coordinator: they wait for the same time.
    """
    clusters = [up("--shards=2", "--shard-start-timeout=30") for _ in range(2)]
    addresses = [ready(command) for command in clusters]
    before = [all_shards(address, 2) for address in addresses]
    for command, shards, hung in zip(clusters, before, (1, 0), strict=True):
        kill(shards[hung]["pid"])
        process(command, hung, shards[hung]["pid"]).suspend()
        kill(shards[1 - hung]["pid"])
    for address, shards in zip(addresses, before, strict=True):
        await_return(address, shards, 0, 1)
    killed = [
        re.search(rf"shard {hung} is not ready after \d+ s: killing it\n", command.err)
        for command, hung in zip(clusters, (1, 0), strict=True)
    ]
    assert killed[0]
    assert clusters[0].err.index("shard 0 is back") < killed[0].start()
    assert killed[1]
    assert "shard 1 is not ready" not in clusters[1].err
    for command in clusters:
        assert command.end(signal.SIGTERM) == 0


@pytest.mark.long
def test_a_shard_whose_port_is_taken_for_a_moment_is_started_until_it_is_free(up: Start) -> None:
    """The system may give an outgoing connection of another process that port."""
    command = up("--shards=1")
    address = ready(command)
    before = all_shards(address, 1)
    kill(before[0]["pid"])
    until(lambda: "shard 0 ended with code -9; starting it again" in command.err, "its end", START_SECONDS)
    with closing(socket.create_server(("127.0.0.1", int(address.rpartition(":")[2])))):
        until(
            lambda: "shard 0 ended with code 1; starting it again in 1 s (restart 2)" in command.err,
            "a start in vain",
            START_SECONDS,
        )
    await_return(address, before, 0)
    assert command.end(signal.SIGINT) == 0


@pytest.mark.long
def test_a_shard_is_brought_back_though_the_reader_of_the_log_is_gone(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "ps_server", "up", "--shards=1", "--port=0", "--metrics-port=0"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(words, env=environment(PYTHONUNBUFFERED="1"), text=True, **pipes) as command:
        try:
            assert command.stdout is not None
            assert command.stderr is not None
            address = command.stdout.readline().split()[3]
            command.stdout.close()
            command.stderr.close()
            before = all_shards(address, 1)
            kill(before[0]["pid"])
            await_return(address, before, 0)
            command.send_signal(signal.SIGTERM)
            assert command.wait(END_SECONDS) == 0
        finally:
            command.kill()


# -- and is given up only as often as was said ----------------------------------------------------------------------


@pytest.mark.long
def test_a_shard_that_dies_in_a_row_is_given_up_after_as_many_restarts_as_were_asked_for(up: Start) -> None:
    command = up("--shards=2", "--max-shard-restarts=2")
    ready(command)
    killed: list[int] = []
    for _ in range(3):
        shard = process(command, 1, *killed)
        killed.append(shard.pid)
        shard.kill()
    assert command.process.wait(RETURN_SECONDS) == 1
    said = [line for line in command.err.splitlines() if line.startswith("ps-server:")]
    assert said == [
        "ps-server: starting 2 shards",
        "ps-server: shard 1 ended with code -9; starting it again (restart 1)",
        "ps-server: shard 1 ended with code -9; starting it again in 1 s (restart 2)",
        "ps-server: shard 1 ended with code -9 after 2 restarts in a row, which is all that --max-shard-restarts "
        "allows; stopping",
    ]


# -- a start that cannot be, and the end ------------------------------------------------------------------------------


@pytest.mark.parametrize("which", cases([1], [0]))
def test_a_port_in_use_ends_up_at_once_with_one_clear_line(start: Start, which: int) -> None:
    """The other shard waits for the coordinator then, or serves already."""
    first = free_ports(2)
    port = first + which
    with socket.create_server(("127.0.0.1", port)):
        command = start("--shards=2", f"--port={first}", "--metrics-port=0")
        line = f"ps-server: cannot listen on 127.0.0.1:{port}: the port is in use"
        until(lambda: line in command.err, "the reason", RETURN_SECONDS)
        assert command.process.wait(PROMPT_SECONDS) == 1
    assert f"ps-server: shard {which} did not start (exit code 1)\n" in command.err
    assert "Traceback" not in command.err
    assert "ready" not in command.out


def test_what_every_shard_would_refuse_is_said_once_and_starts_none(start: Start, tmp_path: Path) -> None:
    for flags, reason in (
        (["--host=0.0.0.0"], "this server on 0.0.0.0 would be open to the network in plaintext: "),
        (["--metrics-host=0.0.0.0"], "metrics on 0.0.0.0 would be open to the network in plaintext: "),
        (["--restore"], "--checkpoint-every, --restore, --resume and --own-disk need --checkpoint-dir"),
    ):
        command = start("--shards=2", *flags)
        assert command.process.wait(END_SECONDS) == 1
        assert command.err.startswith(f"ps-server: {reason}")
        assert command.err.count("\n") == 1


@pytest.mark.long
def test_a_checkpoint_directory_that_cannot_be_made_ends_up_at_once(up: Start, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    command = up("--shards=2", f"--checkpoint-dir={tmp_path}/file")
    until(lambda: "file cannot be made: File exists" in command.err, "the reason", RETURN_SECONDS)
    assert command.process.wait(PROMPT_SECONDS) == 1


@pytest.mark.long
def test_servers_whose_parent_is_killed_make_a_last_checkpoint(up: Start, tmp_path: Path) -> None:
    """The coordinator makes it, and both shards stay until then."""
    command = up("--shards=2", f"--checkpoint-dir={tmp_path / 'kept'}")
    with ps_worker.connect(ready(command), job="kept", mode="async", connect_timeout=1.0) as session:
        model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
        model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for _ in range(3):
            model(torch.ones(64)).sum().backward()
            optimizer.step()
        family = command.family()
        command.process.kill()
        _, left = psutil.wait_procs(family, timeout=END_SECONDS)
        assert not left
        store = CheckpointStore(tmp_path / "kept")
        name = store.names("kept")[-1]  # each server asks for one
        manifest = store.manifest("kept", name)
        assert manifest.versions == (3, 3)
        assert set(manifest.shards) == {0, 1}


@pytest.mark.parametrize("number", cases([signal.SIGTERM], [signal.SIGINT]))
def test_a_signal_during_the_start_ends_up_at_once(up: Start, number: int) -> None:
    """Shard 1 waits to be told where the coordinator is, and the coordinator stands still."""
    command = up("--shards=2")
    process(command, 0).suspend()
    shard = process(command, 1)
    until(lambda: has_imported_torch(shard), "its imports", RETURN_SECONDS)
    family = command.family()
    command.process.send_signal(number)
    assert command.process.wait(PROMPT_SECONDS) == 0
    _, left = psutil.wait_procs(family, timeout=END_SECONDS)
    assert not left
    assert "Traceback" not in command.err


def test_a_supervised_shard_that_waits_for_its_line_ends_with_its_parent() -> None:
    words = [sys.executable, "-m", "ps_server", "shard", "--supervised", "--index=1", "--port=0", "--metrics-port=0"]
    with subprocess.Popen(words, env=environment(), stdin=subprocess.PIPE) as shard:
        try:
            assert shard.stdin is not None
            until(lambda: has_imported_torch(psutil.Process(shard.pid)), "its imports", RETURN_SECONDS)
            shard.stdin.close()
            assert shard.wait(PROMPT_SECONDS) == 0
        finally:
            shard.kill()


def test_a_coordinator_that_waits_for_the_shard_of_another_node_is_not_killed(tmp_path: Path) -> None:
    """The other node asks it whether the job is over, and then ends its shard."""
    hurried = "import ps_launch.local_cluster as s; s.WRITE_SECONDS = 0; import ps_server.cli as c; c.main()"
    words, ports = ["--shards=2", "--drain-seconds=0.1"], ["--port=0", "--metrics-port=0"]
    with closing(Commands(tmp_path)) as commands:
        first = commands.start("-c", hurried, "up", "--only=0", *words, *ports)
        [address] = first.says(r"ps-server: ready at (\S+) \(the coordinator, and shard 0 of 2\)\n")
        second = commands.start("-m", "ps_server", "up", "--only=1", f"--coordinator={address}", *words, *ports)
        second.says(r"ps-server: shard 1 of 2 ready at ")
        first.process.send_signal(signal.SIGTERM)
        assert second.end(signal.SIGTERM) == 0
        assert first.process.wait(END_SECONDS) == 0, first.err
        assert "was killed" not in first.err


@pytest.mark.long
def test_shards_that_stand_still_are_killed_when_the_grace_is_over(tmp_path: Path) -> None:
    """One grace for all of them, and not one for each in turn."""
    hurried = "import ps_launch.local_cluster as s; s.WRITE_SECONDS, s.SHARDS_STOP_SECONDS = 1, 2"
    run = f"{hurried}; import ps_server.cli as c; c.main()"
    command = Command(tmp_path, "-c", run, "up", "--shards=2", "--port=0", "--metrics-port=0", "--drain-seconds=1")
    try:
        ready(command)
        for index in range(2):
            process(command, index).suspend()
        assert command.end(signal.SIGTERM) == 1, "the coordinator has made no last checkpoints"
        assert "the coordinator did not end within 2 s and was killed" in command.err
    finally:
        command.clean_up()


@pytest.mark.long
def test_a_coordinator_that_dies_while_it_stops_is_told_of(up: Start, tmp_path: Path) -> None:
    """It would make the last checkpoints."""
    command = up("--shards=2", f"--checkpoint-dir={tmp_path / 'kept'}", PS_FAILPOINTS="drain-begun")
    ready(command)
    family = command.family()
    assert command.end(signal.SIGTERM) == 1
    assert "the coordinator ended with code -9: last checkpoints may be missing" in command.err
    _, left = psutil.wait_procs(family, timeout=END_SECONDS)
    assert not left
