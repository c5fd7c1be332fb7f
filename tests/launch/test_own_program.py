"""The programs of this project run as they are installed, whatever modules lie in the folder where they are started."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ps_launch.one_server import OneServer
from ps_runtime import own_program
from tests.tools.launching import environment, python
from tests.tools.planted import plant

READY_SECONDS = 60.0
TRAINS = """
import torch
import ps_worker
model = torch.nn.Linear(2, 1)
session = ps_worker.connect()
model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
model(torch.ones(1, 2)).sum().backward()
optimizer.step()
session.barrier()
"""


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a module for each name that servers and launchers import."""
    folder = tmp_path_factory.mktemp("planted")
    plant(folder)
    return folder


def test_a_module_of_the_current_folder_would_run(planted: Path) -> None:
    """Otherwise the tests below would prove nothing."""
    done = python("-m", "ps_server", "--version", folder=planted, PYTHONSAFEPATH="")
    assert "planted" in done.stderr
    (ran,) = (planted / "ran").iterdir()
    ran.unlink()


@pytest.mark.long
def test_servers_and_workers_run_no_module_of_the_folder_they_are_started_in(planted: Path, tmp_path: Path) -> None:
    script = tmp_path / "trains.py"
    script.write_text(TRAINS)
    run = own_program.own_program("ps_worker", "run", "--shards", "2", "--workers", "2", "--mode", "sync", str(script))
    done = python(*run, folder=planted)
    assert done.returncode == 0, done.stderr
    assert "planted" not in done.stderr
    assert not list((planted / "ran").iterdir())


def test_a_server_of_another_kind_of_parent_runs_none_either(planted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the actors of Ray start theirs."""
    flags = ("--shards", "1", "--port", "0", "--metrics-port", "0")
    monkeypatch.chdir(planted)
    server = OneServer(("coordinator", *flags), environment(PYTHONSAFEPATH=""))
    try:
        assert server.await_ready(READY_SECONDS) is not None, server.last_words()
    finally:
        server.stop(READY_SECONDS)
    assert not list((planted / "ran").iterdir())


def test_before_python_3_11_too(planted: Path) -> None:
    run = ["-c", own_program._FOR_3_10, "ps_server", "--version"]
    done = subprocess.run([sys.executable, *run], cwd=planted, env=environment(), capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("ps-server ")
    assert not list((planted / "ran").iterdir())
