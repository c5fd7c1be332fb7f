"""A server dies at each place that has a name, comes back, and training goes on: nothing is lost or doubled.

The servers are processes, started again when they die, as `ps-server up` or a container engine would. The workers are
threads of this process, and stay. In sync the job ends with the weights and the momentum of the undisturbed run, to the
bit; in ssp and async what is missing of what was acknowledged is what the servers count as lost, no more and no less.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import ps_server.cli
from ps_protocol.errors import PSError
from ps_server.failpoints import POINTS
from ps_server.ops import status
from ps_server.storage.checkpoints import CheckpointStore
from tests.chaos.cluster import free_ports
from tests.tools.cluster import scrape, until
from tests.tools.forkserver import ROOT, Nursery
from tests.tools.oracle_run import Run

LEASE = 30.0  # nobody is to lose its place for another reason than a restored shard
EVERY = 5


class Servers:
    """A coordinator and two shards at addresses that stay, each started again when it dies.

    points: what PS_FAILPOINTS says when they are started for the first time
    apart:  the coordinator in a process of its own, instead of in shard 0's
    """

    def __init__(self, nursery: Nursery, folder: Path, points: str, apart: bool, keep: int) -> None:
        self._nursery, self._points, self._apart, self._keep = nursery, points, apart, keep
        self.folder, self.checkpoints = folder, folder / "checkpoints"
        self.port = free_ports(6)
        self.address = f"127.0.0.1:{self.port + 2 * apart}"
        self.log = folder / "servers.log"
        self.pids: dict[str, int] = {}
        self.deaths: list[tuple[str, int]] = []
        self._expected = len(points.split(",")) if points else 0
        self.happened = threading.Event()  # everybody has died who was to
        self._alive = threading.Condition()
        self._ending = False
        for name in ["coordinator"] * apart + ["shard 0", "shard 1"]:
            self._start(name, PS_FAILPOINTS=points)

    def _words(self, name: str) -> list[str]:
        where = ["--checkpoint-dir", str(self.checkpoints)]
        coordinates = ["--shards", "2", "--lease", str(LEASE), "--checkpoint-every", f"{EVERY}steps"]
        coordinates += ["--keep", str(self._keep)] + ["--resume"] * bool(self.deaths)
        if name == "coordinator":
            ports = ["--port", str(self.port + 2), "--metrics-port", str(self.port + 5)]
            return ["coordinator", *ports, *where, *coordinates]
        index = int(name[-1])
        ports = ["--port", str(self.port + index), "--metrics-port", str(self.port + 3 + index), "--index", str(index)]
        leads = not self._apart and index == 0
        lead = ["--with-coordinator", *coordinates] if leads else ["--coordinator", self.address]
        return ["shard", *ports, *where, *lead]

    def _start(self, name: str, **variables: str) -> None:
        with self._alive:
            if self._ending:
                return
            self.pids[name] = self._nursery.start(
                self._words(name), self.log, lambda code: self._ended(name, code), **variables
            )

    def _ended(self, name: str, code: int) -> None:
        with self._alive:
            self.deaths.append((name, code))
            self._alive.notify_all()
        self._start(name)
        if self._expected and len(self.deaths) >= self._expected:
            self.happened.set()

    def fired(self) -> list[str]:
        """The points at which processes killed themselves."""
        lines = self.log.read_text().splitlines()
        return [line.split()[1].rstrip(":") for line in lines if line.startswith("failpoint ")]

    def stop(self) -> None:
        with self._alive:
            self._ending = True
            before = len(self.deaths)
            for pid in self.pids.values():
                os.kill(pid, signal.SIGKILL)
            assert self._alive.wait_for(lambda: len(self.deaths) >= before + len(self.pids), 30)

    def metric(self, name: str) -> float:
        """One of the coordinator's."""
        return scrape(f"127.0.0.1:{self.port + 3 + 2 * self._apart}")[name]


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    with Nursery() as found:
        yield found


Start = Callable[..., tuple[Servers, Run]]


@pytest.fixture
def start(nursery: Nursery, tmp_path: Path) -> Iterator[Start]:
    """start(mode, points): servers, and a job that is not begun."""
    made: list[Servers] = []

    def make(mode: str, points: str, apart: bool = False, keep: int = 3, late: bool = False) -> tuple[Servers, Run]:
        servers = Servers(nursery, tmp_path, points, apart, keep)
        made.append(servers)
        until(lambda: _is_up(servers.address), "the servers")
        store = CheckpointStore(servers.checkpoints)
        return servers, Run(servers.address, mode, servers.happened, store, late)

    yield make
    for servers in made:
        servers.stop()


def _is_up(address: str) -> bool:
    try:
        return sum(process["role"] == "shard" for process in status.fetch(address)["processes"]) == 2
    except PSError:
        return False


@pytest.fixture(scope="module")
def undisturbed(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """The weights that a sync job ends with."""
    servers = Servers(nursery, tmp_path_factory.mktemp("undisturbed"), "", False, 3)
    until(lambda: _is_up(servers.address), "the servers")
    servers.happened.set()  # nothing is to happen
    ended = Run(servers.address, "sync", servers.happened, CheckpointStore(servers.checkpoints), False).to_the_end()
    assert (ended.found, servers.deaths) == ([], [])
    servers.stop()
    return ended.weights


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)


LATER = 80  # times that a place is passed that each push passes: at about the 13th step
KILL = f"push-staged@1={LATER}"


@pytest.mark.parametrize(
    ("points", "who"),
    [
        (f"push-checked@1={LATER}", ["shard 1"]),
        (f"push-staged@0={LATER}", ["shard 0"]),
        (f"contribution-added@1={LATER}", ["shard 1"]),
        (f"update-stepped@1={LATER // 2}", ["shard 1"]),
        (f"pull-half-sent@1={LATER}", ["shard 1"]),
        (f"{KILL},restore-read@0", ["shard 1", "shard 0"]),
        (f"{KILL},restore-half-done@0", ["shard 1", "shard 0"]),
    ],
)
def test_a_sync_job_ends_with_the_weights_of_the_undisturbed_run_wherever_a_server_dies(
    start: Start, undisturbed: dict[str, torch.Tensor], points: str, who: list[str]
) -> None:
    servers, run = start("sync", points)
    ended = run.to_the_end()
    check_deaths(servers, points, who)
    assert ended.found == []
    assert same(ended.weights, undisturbed)
    [job] = ended.status["jobs"]
    assert job["restore_count"] >= 1
    assert job["redone_steps"] >= 1


@pytest.mark.parametrize(
    ("point", "shard"),
    [
        ("shard-file-half-written", 1),
        ("shard-file-written", 1),
        ("manifest-missing", 0),
        ("manifest-half-written", 0),
        ("manifest-unnamed", 0),
    ],
)
def test_a_checkpoint_whose_writing_is_cut_short_is_left_for_the_one_before_it(
    start: Start, undisturbed: dict[str, torch.Tensor], point: str, shard: int
) -> None:
    servers, run = start("sync", f"{point}@{shard}=2")
    ended = run.to_the_end()
    check_deaths(servers, point, [f"shard {shard}"])
    assert ended.found == []
    assert same(ended.weights, undisturbed)
    log = servers.log.read_text()
    back = [line for line in log.splitlines() if "rolled back to checkpoint" in line]
    cut = [line for line in log.splitlines() if "was not completed: it has no manifest" in line]
    assert len(back) == len(cut) == 1
    assert word_after("checkpoint", cut[0]) > word_after("checkpoint", back[0]), "the one before is used"
    assert servers.metric('ps_restores_total{result="unfinished"}') == 1
    assert servers.metric('ps_restores_total{result="restored"}') == 1


def test_a_server_that_dies_while_it_removes_an_old_checkpoint_leaves_none_that_is_half_there(
    start: Start, undisturbed: dict[str, torch.Tensor]
) -> None:
    servers, run = start("sync", "checkpoint-half-removed@0", keep=1)
    ended = run.to_the_end()
    check_deaths(servers, "checkpoint-half-removed", ["shard 0"])
    assert ended.found == []
    assert same(ended.weights, undisturbed)
    [back] = [line for line in servers.log.read_text().splitlines() if "rolled back to checkpoint" in line]
    assert word_after("checkpoint", back) == "000002,"
    assert not (servers.checkpoints / "default" / "000001").exists(), "what was left is removed with the next"


def test_a_coordinator_that_dies_while_it_stops_leaves_the_last_checkpoint_there_was(
    start: Start, undisturbed: dict[str, torch.Tensor]
) -> None:
    servers, run = start("sync", "drain-begun@0")
    told = threading.Event()

    def stop(rank: int, clock: int) -> None:
        if rank == 0 and clock >= 12 and not told.is_set():
            told.set()
            os.kill(servers.pids["shard 0"], signal.SIGTERM)

    run.stepped = stop
    ended = run.to_the_end()
    check_deaths(servers, "drain-begun", ["shard 0"])
    assert ended.found == []
    assert same(ended.weights, undisturbed)


@pytest.mark.parametrize(
    "points",
    [
        "worker-half-added=6",  # the second worker, by the first round
        "worker-half-added=8",  # by the second
        "coordinator-file-half-written=4",
        "coordinator-file-unnamed=5",
    ],
)
def test_a_coordinator_that_dies_over_a_join_comes_back_and_the_worker_joins(
    start: Start, undisturbed: dict[str, torch.Tensor], points: str
) -> None:
    """Nothing is lost with it. Whom a shard counts that never learned of its place is waited for by nobody."""
    servers, run = start("sync", points, apart=True)
    ended = run.to_the_end()
    check_deaths(servers, points, ["coordinator"])
    assert ended.found == []
    assert same(ended.weights, undisturbed)
    [job] = ended.status["jobs"]
    assert (job["restore_count"], job["redone_steps"]) == (0, 0)


@pytest.mark.parametrize("mode", ["sync", "ssp:2", "async"])
def test_a_coordinator_that_dies_over_a_join_holds_up_nobody_who_trains(start: Start, mode: str) -> None:
    servers, run = start(mode, "worker-half-added=9", apart=True, late=True)
    ended = run.to_the_end()
    check_deaths(servers, "worker-half-added", ["coordinator"])
    assert ended.found == []
    assert ended.lost == 0


@pytest.mark.parametrize(
    ("mode", "points", "who"),
    [
        ("ssp:2", f"push-checked@1={LATER}", ["shard 1"]),
        ("async", f"push-staged@1={LATER}", ["shard 1"]),
        ("async", f"contribution-added@0={LATER}", ["shard 0"]),
        ("ssp:2", f"update-stepped@1={LATER}", ["shard 1"]),
        ("ssp:2", f"pull-half-sent@0={LATER}", ["shard 0"]),
        ("async", "shard-file-half-written@1=2", ["shard 1"]),
        ("async", "manifest-unnamed@0=2", ["shard 0"]),
        ("async", f"{KILL},restore-half-done@0", ["shard 1", "shard 0"]),
    ],
)
def test_without_a_common_clock_what_is_missing_is_what_is_counted_as_lost(
    start: Start, mode: str, points: str, who: list[str]
) -> None:
    servers, run = start(mode, points)
    ended = run.to_the_end()
    check_deaths(servers, points, who)
    assert ended.found == []
    [job] = ended.status["jobs"]
    assert ended.lost <= job["lost_steps"] <= ended.missing, "what was acknowledged, and at most the steps at hand"


def check_deaths(servers: Servers, points: str, who: list[str]) -> None:
    """The processes died where they were to, by SIGKILL, and nobody else did."""
    assert servers.deaths == [(name, -signal.SIGKILL) for name in who]
    assert servers.fired() == [entry.partition("@")[0].partition("=")[0] for entry in points.split(",")]


def word_after(word: str, line: str) -> str:
    words = line.split()
    return words[words.index(word) + 1]


# -- the variable ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", [("up", "--shards", "1"), ("coordinator", "--shards", "1")])
@pytest.mark.parametrize("points", ["push-stagd", "push-staged@x", "push-staged=0", "push-staged=1,,nowhere"])
def test_a_name_that_is_none_ends_the_process_at_once_and_says_which_there_are(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], points: str
) -> None:
    monkeypatch.setenv("PS_FAILPOINTS", points)
    monkeypatch.setattr(sys, "argv", ["ps-server", *words, "--port", "0", "--metrics-port", "0"])
    with pytest.raises(SystemExit) as ended:
        ps_server.cli.main()
    said = str(ended.value)
    assert said.startswith("ps-server: PS_FAILPOINTS: expected NAME[@SHARD][=N]")
    assert repr(points.rpartition(",")[2]) in said
    assert all(name in said for name in POINTS)
    assert capsys.readouterr().out == ""


def test_the_docs_name_every_point() -> None:
    text = (ROOT / "docs" / "failpoints.md").read_text()
    assert {line.split("`")[1] for line in text.splitlines() if line.startswith("| `")} == set(POINTS)


def test_every_point_has_a_test() -> None:
    text = Path(__file__).read_text()
    assert [name for name in POINTS if name not in text] == []


def test_what_up_starts_in_place_of_a_shard_that_died_has_no_points(
    tmp_path: Path, undisturbed: dict[str, torch.Tensor]
) -> None:
    """Else it would die again, after as many pushes."""
    flags = ["--port", "0", "--metrics-port", "0", "--lease", str(LEASE), "--checkpoint-every", f"{EVERY}steps"]
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PS_")}
    path = os.pathsep.join([str(ROOT), *sys.path])
    with subprocess.Popen(
        [sys.executable, "-m", "ps_server", "up", *flags, "--checkpoint-dir", str(tmp_path)],
        env={**kept, "PYTHONPATH": path, "PS_FAILPOINTS": "push-staged@1=60"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as up:
        assert up.stdout is not None
        assert up.stderr is not None
        happened, said = threading.Event(), []

        def listen() -> None:
            assert up.stderr is not None
            for line in up.stderr:
                said.append(line.rstrip())
                if line.startswith("ps-server: shard 1 ended"):
                    happened.set()

        listener = threading.Thread(target=listen)
        listener.start()
        try:
            address = up.stdout.readline().removeprefix("ps-server: ready at ").split(" ")[0]
            ended = Run(address, "sync", happened, CheckpointStore(tmp_path), False).to_the_end()
        finally:
            up.terminate()
            up.wait()
            listener.join()
    assert ended.found == []
    assert same(ended.weights, undisturbed)
    warned = [line for line in said if "PS_FAILPOINTS is set: this process kills itself at 'push-staged'" in line]
    assert len(warned) == 1, "by shard 1, in its first life"
    assert [line for line in said if line.startswith("failpoint ")] == [
        "failpoint push-staged: this process kills itself"
    ]
    assert [line for line in said if line.startswith("ps-server: shard")] == [
        "ps-server: shard 1 ended with code -9; starting it again",
        "ps-server: shard 1 is back",
    ]
