"""`ps-server up --checkpoint-dir s3://...`, with real processes and a real server that speaks S3."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import psutil
import pytest

from tests.tools.cluster import until
from tests.tools.launching import Commands, python
from tests.tools.object_store import keys, running

END_SECONDS = 120.0
pytestmark = [pytest.mark.remote, pytest.mark.timeout(600)]

# Trains until there is a file `stop`. Argument: its folder.
SCRIPT = """
import os, sys, time
import torch
import ps_worker

with ps_worker.connect() as session:
    model = torch.nn.Linear(64, 64)
    model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
    while not os.path.exists(sys.argv[1] + "/stop"):
        model(torch.ones(1, 64)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        with open(sys.argv[1] + "/clock", "w") as file:
            file.write(str(session.clock))
        time.sleep(0.02)
"""


@pytest.fixture
def place() -> Iterator[Path]:
    with running() as store:
        yield store.place()


def shard_processes(children: list[psutil.Process]) -> dict[int, psutil.Process]:
    """The processes of `ps-server up`, by the index of their shard."""
    words = {process: " ".join(process.cmdline()) for process in children}
    return {
        int(found[1]): each for each, text in words.items() if (found := re.search(r" shard .*--index[ =](\d)", text))
    }


def test_a_cluster_keeps_its_checkpoints_in_a_bucket(place: Path, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    flags = ("--port", "0", "--metrics-port", "0", "--checkpoint-dir", str(place))
    every = ("--checkpoint-every", "5steps")

    def clock() -> int:
        return int((tmp_path / "clock").read_text() or 0) if (tmp_path / "clock").exists() else 0

    with closing(Commands(tmp_path)) as commands:
        up = commands.start("-m", "ps_server", "up", "--shards", "2", *flags, *every)
        [address] = up.says(r"ps-server: ready at (\S+) \(2 shards\)\n")
        run = ("run", "--server", address, "--mode", "sync", "--metrics-host", "127.0.0.1")
        worker = commands.start("-m", "ps_worker", *run, str(tmp_path / "train.py"), str(tmp_path))
        until(lambda: any("manifest.json" in key for key in keys(place)), "a checkpoint", END_SECONDS)

        refused = python("-m", "ps_server", "coordinator", "--shards", "1", *flags)
        assert refused.returncode == 1
        assert f"the checkpoint directory {place} is in use by the coordinator with pid" in refused.stderr

        shard_processes(up.family())[1].send_signal(signal.SIGKILL)
        until(lambda: "ps-server: shard 1 is back" in up.err, "the shard's return", END_SECONDS)
        until(lambda: "rolled back to checkpoint" in up.out + up.err, "the rollback", END_SECONDS)
        before = clock()
        until(lambda: clock() > before + 5, "more steps", END_SECONDS)
        (tmp_path / "stop").touch()
        assert worker.process.wait(END_SECONDS) == 0, worker.err
        last = clock()
        for process in [*up.family(), psutil.Process(up.process.pid)]:
            process.kill()
        up.process.wait()

        said = python("-m", "ps_server", "export", "--checkpoint-dir", str(place), str(tmp_path / "out"))
        assert said.returncode == 0, said.stderr
        assert f"at clock {last} is in" in said.stdout
        again = commands.start("-m", "ps_server", "up", "--shards", "1", *flags, "--restore")
        [address] = again.says(r"ps-server: ready at (\S+) \(1 shard\)\n")
        run = ("run", "--server", address, "--mode", "sync", "--metrics-host", "127.0.0.1")
        worker = commands.start("-m", "ps_worker", *run, str(tmp_path / "train.py"), str(tmp_path))
        assert worker.process.wait(END_SECONDS) == 0, worker.err
        assert re.search(rf"job default: continues from checkpoint \d+, clock {last}\n", again.out + again.err)
