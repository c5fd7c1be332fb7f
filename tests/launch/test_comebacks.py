"""A whole launch dies and is started again, one worker later than the other: none trains alone, and the run ends as one
that nothing has disturbed."""

from __future__ import annotations

import contextlib
import re
import signal
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.tools.cases import cases
from tests.tools.cluster import until
from tests.tools.launching import Command, Commands, kill_family

END_SECONDS = 120.0
GONE = "is gone: no sign of life"
LEASE_SECONDS = "5"  # none is to end while its worker lives, however busy the machine is; the tests wait for the ends
DIES_AT, SAMPLES, PASSES = 13, 48, 2

# Says each sample that it trains, and the weights at the end. Arguments: the clock at which it stands still, for one
# who kills it, a file that worker 1 waits for before it connects, and the mode. In sync it stands later if there is no
# checkpoint then: a busy coordinator has named a clock further ahead. Worker 0 says it, so that both stand at one step.
SCRIPT = f"""
import contextlib, re, sys, threading
from pathlib import Path
import torch
import ps_worker
from ps_worker import launched

stands_at, go, mode = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
while launched.launched_rank() == "1" and not go.exists():
    threading.Event().wait(0.02)

def has_checkpoint():
    for manifest in go.parent.glob("kept/*/*/manifest.json"):
        with contextlib.suppress(FileNotFoundError):  # of an old checkpoint, which goes meanwhile
            if re.search(r'"clock": ?[1-9]', manifest.read_text()):
                return True
    return False

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(1, 4), torch.nn.ReLU(), torch.nn.Linear(4, 1))
data = torch.utils.data.TensorDataset(torch.arange(float({SAMPLES})).reshape(-1, 1))
loader = torch.utils.data.DataLoader(data, batch_size=2, shuffle=True)
session = ps_worker.connect()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
model, optimizer, loader = session.prepare(model, optimizer, loader)
for epoch in range({PASSES}):
    for (x,) in loader:
        if 0 <= stands_at <= session.clock and (mode != "sync" or session.broadcast(has_checkpoint())):
            sys.stdout.write(f"stands at {{stands_at}}\\n")
            threading.Event().wait()
        model(x / {SAMPLES}).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        sys.stdout.write(f"pass {{epoch}} trained {{sorted(map(int, x.flatten()))}}\\n")
weights = torch.cat([p.detach().flatten() for p in model.parameters()])
sys.stdout.write(f"weights {{[each.hex() for each in weights.tolist()]}}\\n")
session.close()
"""


class At:
    """Servers and launches of two workers in one directory."""

    def __init__(self, directory: Path, commands: Commands) -> None:
        self._directory, self._start = directory, commands.start
        self._script = directory / "train.py"
        self._script.write_text(SCRIPT)
        self.go = directory / "go"

    def servers(self, *flags: str, lease: str = LEASE_SECONDS) -> tuple[Command, str]:
        """Starts two shards; returns the command, and where they are."""
        ports = ("--shards", "2", "--port", "0", "--metrics-port", "0", "--lease", lease)
        keeps = ("--checkpoint-dir", str(self._directory / "kept"), "--checkpoint-every", "5steps")
        command = self._start("-m", "ps_server", "up", *ports, *keeps, *flags)
        [address] = command.says(r"ps-server: ready at (\S+) \(2 shards\)\n")
        return command, address

    def launch(self, address: str, mode: str, stands_at: int = -1) -> Command:
        """Starts a launch. stands_at: the clock at which its workers stand still"""
        where = ("--server", address, "--workers", "2", "--mode", mode, "--metrics-host", "127.0.0.1")
        return self._start("-m", "ps_worker", "run", *where, str(self._script), str(stands_at), str(self.go), mode)

    def has_checkpoint(self) -> bool:
        """Whether there is one of trained weights."""
        for manifest in self._directory.glob("kept/*/*/manifest.json"):
            with contextlib.suppress(FileNotFoundError):  # of an old checkpoint, which goes meanwhile
                if re.search(r'"clock": ?[1-9]', manifest.read_text()):
                    return True
        return False


@pytest.fixture
def at(tmp_path: Path) -> Iterator[At]:
    with closing(Commands(tmp_path)) as commands:
        yield At(tmp_path, commands)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The weights of a run in sync that nothing disturbs."""
    directory = tmp_path_factory.mktemp("undisturbed")
    with closing(Commands(directory)) as commands:
        at = At(directory, commands)
        at.go.touch()
        _, address = at.servers()
        launch = at.launch(address, "sync")
        assert launch.process.wait(END_SECONDS) == 0, launch.err
        [weights] = set(re.findall(r"weights (\[.*\])", launch.out))
        return str(weights)


def stands(at: At, launch: Command) -> None:
    """Waits until both workers of a launch stand still, and there is a checkpoint."""
    launch.says(r"stands at", count=2)
    until(lambda: at.has_checkpoint(), "a checkpoint")


def kill(command: Command) -> None:
    """Ends a launch as a crash of its host does: all at once."""
    command.process.send_signal(signal.SIGSTOP)  # a launcher reports the end of its workers
    for process in command.family():
        process.kill()
    command.process.kill()
    command.process.wait(END_SECONDS)


def trained(*launches: Command) -> dict[str, list[int]]:
    """By pass, the samples that the workers of these launches say that they have trained."""
    by_pass: dict[str, list[int]] = {}
    for launch in launches:
        for number, samples in re.findall(r"pass (\d) trained \[(.*)\]", launch.out):
            by_pass.setdefault(number, []).extend(map(int, samples.split(", ")))
    return {number: sorted(samples) for number, samples in by_pass.items()}


EVERYTHING = {str(number): list(range(SAMPLES)) for number in range(PASSES)}


@pytest.mark.long
def test_workers_that_died_together_come_back_one_by_one_and_leave_no_sample_out(at: At, undisturbed: str) -> None:
    servers, address = at.servers()
    at.go.touch()
    first = at.launch(address, "sync", DIES_AT)
    stands(at, first)
    at.go.unlink()
    before = servers.err.count(GONE)
    kill(first)
    until(lambda: servers.err.count(GONE) == before + 2, "the ends of both leases")
    second = at.launch(address, "sync")
    until(lambda: "no worker was left: it waits for worker 1 to join again" in servers.err, "worker 0")
    # Longer than a lease after that, by the coordinator's own words: for those that a launch starts it has no limit.
    until(lambda: "waiting for ranks 1 to join job 'default'" in second.err, "a word of worker 0")
    at.go.touch()
    assert second.process.wait(END_SECONDS) == 0, second.err
    assert "continues without workers" not in servers.err
    assert trained(first, second) == EVERYTHING
    assert set(re.findall(r"weights (\[.*\])", second.out)) == {undisturbed}


@pytest.mark.long
@pytest.mark.parametrize(("how", "mode"), cases([("--restore", "sync"), ("--resume", "ssp:2")], [("--resume", "sync")]))
def test_after_the_death_of_everything_no_worker_trains_alone(at: At, undisturbed: str, how: str, mode: str) -> None:
    servers, address = at.servers()
    at.go.touch()
    first = at.launch(address, mode, DIES_AT)
    stands(at, first)
    at.go.unlink()
    kill(first)
    kill_family(servers.process.pid)
    servers.process.wait(END_SECONDS)
    again, address = at.servers(how)
    second = at.launch(address, mode)
    until(lambda: re.search(r"job default: worker 0 joins at clock \d+", again.err), "worker 0")
    until(lambda: "waiting for ranks 1 to join job 'default'" in second.err, "a word of worker 0")
    assert not trained(second), "it waits"
    at.go.touch()
    assert second.process.wait(END_SECONDS) == 0, second.err
    if mode == "sync":
        assert set(re.findall(r"weights (\[.*\])", second.out)) == {undisturbed}
