"""A relay is a process that needs no torch; one that is killed costs its readers nothing but the way to another."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import ps_torch as ps
from ps_server import cli
from tests.chaos.cluster import free_ports
from tests.tools.cluster import Cluster
from tests.tools.followed_trainer import FollowedTrainer
from tests.tools.launching import NO_TORCH, Command, Commands, resident

# As a machine has it that only hands on: who imports torch meets what is not there.
WITHOUT_TORCH = f"""{NO_TORCH}
from ps_server.cli import main
main()
"""
MOST_BYTES = 80 * 2**20


@pytest.fixture
def commands(tmp_path: Path) -> Iterator[Commands]:
    started = Commands(tmp_path)
    yield started
    started.close()


def start(commands: Commands, upstream: str, *more: str) -> tuple[Command, str]:
    words = ("relay", "--upstream", upstream, "--port", "0", "--metrics-port", "0", *more)
    command = commands.start("-c", WITHOUT_TORCH, *words)
    [address] = command.says(r"ready at (\S+)")
    return command, address


def test_a_relay_that_is_killed_costs_its_readers_a_reconnect(shared: Cluster, job: str, commands: Commands) -> None:
    first, second = start(commands, shared.address), start(commands, shared.address)
    with shared.connect("sync", job=job) as session, ps.subscribe(f"{first[1]},{second[1]}", job) as feed:
        trainer = FollowedTrainer(session)
        last = trainer.steps(2)
        feed.wait_for(last)
        os.kill(first[0].process.pid, signal.SIGKILL)
        first[0].process.wait()
        last = trainer.steps(2)
        edition = feed.wait_for(last)
        assert trainer.has(edition.state_dict(), last)
        assert (feed.restores, feed.trouble) == (0, None)
        assert resident(second[0].process.pid) < MOST_BYTES
    second[0].process.send_signal(signal.SIGTERM)
    assert second[0].process.wait(30) == 0
    assert "Traceback" not in second[0].err


def test_a_relay_that_dies_while_it_sends_an_edition_costs_its_readers_a_reconnect(
    shared: Cluster, job: str, commands: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = free_ports(1)
    monkeypatch.setenv("PS_FAILPOINTS", "edition-half-relayed")
    first = start(commands, shared.address)
    monkeypatch.delenv("PS_FAILPOINTS")
    both = f"{first[1]},127.0.0.1:{port}"
    with shared.connect("sync", job=job) as session, ps.subscribe(both, job) as feed:
        trainer = FollowedTrainer(session)
        last = trainer.steps(2)
        assert first[0].process.wait(30) == -signal.SIGKILL
        assert feed.version == -1, "half of an edition is none"
        start(commands, shared.address, "--port", str(port))
        assert trainer.has(feed.wait_for(last).state_dict(), last)
        assert (feed.restores, feed.trouble) == (0, None)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--upstream", "http://a:1"], "expected HOST:PORT, without http://, got 'http://a:1'"),
        (["--upstream", "a:1", "--jobs", "x=int8"], "expected one of float32, bfloat16, float16 behind =, got 'int8'"),
        (["--upstream", "a:1", "--period", "4000"], "expected 0 to 3600 seconds, got '4000'"),
        ([], "the following arguments are required: --upstream"),
        (["--upstream", "a:1", "--host", "0.0.0.0"], "--insecure"),
    ],
    ids=["upstream", "wire", "period", "nothing", "host"],
)
def test_a_relay_says_in_one_line_what_is_wrong_with_its_settings(
    words: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["ps-server", "relay", "--port", "0", "--metrics-port", "0", *words])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    code = ended.value.code
    assert code not in (0, None)
    told = code if isinstance(code, str) else capsys.readouterr().err
    assert said in told
    assert len(told.strip().splitlines()) <= 2, told


@pytest.mark.usefixtures("ctrl_c")  # a run in the background has it ignored, and so would the command
def test_control_c_ends_what_follows_a_job_in_a_terminal(shared: Cluster, job: str, commands: Commands) -> None:
    with shared.connect("sync", job=job) as session:
        FollowedTrainer(session)
        command = commands.start("-c", WITHOUT_TORCH, "feed", shared.address, job, "--json")
        command.says('"version": 0')
        command.process.send_signal(signal.SIGINT)
        assert command.process.wait(30) == 0
        assert "Traceback" not in command.err
