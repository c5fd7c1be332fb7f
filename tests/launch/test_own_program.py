"""The programs of this project run as they are installed, whatever modules lie in the folder where they are started."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from ps_runtime import own_program
from tests.tools.launching import environment, python

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

IMPORTED = ("ps_server.cli", "ps_server.server", "ps_worker.cli", "ps_launch.local_cluster", "torch")


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a module for each name that servers and launchers import: each says that it ran, and ends.

    Names that the tests import are there, too: asking a process of its own would take seconds.
    """
    for name in IMPORTED:
        importlib.import_module(name)
    names = {name.partition(".")[0] for name in sys.modules} - {"__main__", "sitecustomize", "usercustomize"}
    assert {"grpc", "torch", "google", "ps_server", "ps_worker", "numpy", "queue"} <= names
    folder = tmp_path_factory.mktemp("planted")
    (folder / "ran").mkdir()
    for name in names:
        text = f"open({str(folder / 'ran' / name)!r}, 'w').close()\nraise SystemExit('planted {name}')\n"
        (folder / f"{name}.py").write_text(text)
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


def test_before_python_3_11_too(planted: Path) -> None:
    run = ["-c", own_program._FOR_3_10, "ps_server", "--version"]
    done = subprocess.run([sys.executable, *run], cwd=planted, env=environment(), capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("ps-server ")
    assert not list((planted / "ran").iterdir())
