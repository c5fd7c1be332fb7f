"""examples/serve.py as actors of a real Ray: what is killed comes back, and the others go on meanwhile."""

from __future__ import annotations

import os
import re
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.tools.launching import ROOT, Command, Commands
from tests.tools.rays import needs_ray, until
from tests.tools.served_model import SHAPE, TEXT, ask

pytest.importorskip("fastapi", reason="needs the extra `examples`")
pytestmark = needs_ray

START_SECONDS = 240.0  # Ray, then servers, then actors, each of which imports torch
SERVING = r"\(Service pid=(\d+)\)\S* serving version \d+ at (http://\S+)\n"
COMES_BACK = r"job default: worker \d joins at clock [1-9]\d*"


@pytest.fixture
def commands(tmp_path: Path) -> Iterator[Commands]:
    started = Commands(tmp_path)
    yield started
    started.close()


def services(service: Command) -> dict[int, str]:
    """The addresses of the services that have told theirs, by process id."""
    return {int(pid): address for pid, address in re.findall(SERVING, service.out)}


def rises(address: str) -> None:
    """Waits until a service answers with weights that are newer than those it has now."""
    code, before, _ = ask(address, "/healthz")
    assert code == 200
    until(lambda: ask(address, "/generate", {"length": 1})[1] > before + 2, "newer weights")


@pytest.mark.timeout(2 * START_SECONDS + 120)
def test_a_service_and_a_trainer_that_are_killed_come_back(commands: Commands, tmp_path: Path) -> None:
    shape = [f"--{name}={value}" for name, value in SHAPE.items()]
    flags = ["--ray", "--port=0", f"--out={tmp_path}", *shape, "--batch-size=8", "--lr=0.01", "--steps=1000000"]
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as short:
        own = {"RAY_ADDRESS": "local", "RAY_TMPDIR": short, "HOME": str(tmp_path)}
        command = commands.start(str(ROOT / "examples" / "serve.py"), *flags, **own)
        command.says(SERVING, count=2, seconds=START_SECONDS)
        (killed, _), (_, other) = services(command).items()
        code, _, first = ask(other, "/score", {"text": TEXT})
        assert code == 200

        os.kill(killed, signal.SIGKILL)
        rises(other)
        command.says(SERVING, count=3, seconds=START_SECONDS)
        added = list(services(command).values())[2]
        rises(added)
        until(lambda: ask(added, "/score", {"text": TEXT})[2]["loss"] < first["loss"] - 0.5, "what has learnt since")

        trainers = [each for each in command.family() if each.cmdline()[:1] == ["ray::Trainer.train"]]
        assert len(trainers) == 2
        trainers[0].kill()
        until(lambda: re.search(COMES_BACK, command.err), "the trainer's coming back", START_SECONDS)
        rises(other)
        assert command.end(signal.SIGINT) == 130
