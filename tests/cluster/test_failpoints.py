"""A server dies at each place that has a name, comes back, and training goes on: nothing is lost or doubled.

The servers are processes, started again when they die, as `ps-server up` or a container engine would. The workers are
threads of this process, and stay. In sync the job ends with the weights and the momentum of the undisturbed run, to the
bit; in ssp and async what is missing of what was acknowledged is what the servers count as lost, no more and no less.

One place of each kind is here, with real processes, disks and sessions. tests/simulation has every place, in every
mode, together with whatever else goes wrong.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import ps_server.cli
import ps_torch as ps
from ps_protocol.errors import NotFound, PSError
from ps_server import failpoints
from ps_server.failpoints import POINTS
from ps_server.ops import requests
from ps_server.storage.checkpoints import CheckpointStore
from tests.chaos.cluster import free_ports
from tests.simulation.faults import AT_SHARDS, AT_THE_COORDINATOR
from tests.tools.cases import cases
from tests.tools.cluster import TEST_SECONDS, scrape, until
from tests.tools.forkserver import ROOT, Forked, Nursery
from tests.tools.launching import Command
from tests.tools.oracle_run import STEPS, Ended, Run

LEASE = 30.0  # a worker loses its place because a shard was restored, and for no other reason
EVERY = 5


class Servers:
    """A coordinator and two shards at addresses that stay, each started again when it dies.

    points: what PS_FAILPOINTS says when they are started for the first time
    apart:  the coordinator in a process of its own, instead of in shard 0's
    """

    def __init__(self, nursery: Nursery, folder: Path, points: str = "", apart: bool = False, keep: int = 3) -> None:
        self._nursery, self._folder, self._apart, self._keep = nursery, folder, apart, keep
        self.port = free_ports(6)
        self.address = f"127.0.0.1:{self.port + 2 * apart}"
        self.processes: dict[str, Forked] = {}
        self.deaths: list[tuple[str, int]] = []
        self._expected = len(points.split(",")) if points else 0
        self.happened = threading.Event()  # everybody has died who was to
        self._alive = threading.Condition()
        self._ending = False
        for name in ["coordinator"] * apart + ["shard 0", "shard 1"]:
            self._start(name, PS_FAILPOINTS=points)
        until(self._are_up, "the servers")

    @property
    def checkpoints(self) -> Path:
        return self._folder / "checkpoints"

    def _are_up(self) -> bool:
        try:
            return len(requests.fetch(self.address)["shards"]) == 2
        except PSError:
            return False

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
            log = self._folder / "servers.log"
            self.processes[name] = self._nursery.serve(
                self._words(name), log, lambda code: self._ended(name, code), **variables
            )

    def _ended(self, name: str, code: int) -> None:
        with self._alive:
            self.deaths.append((name, code))
            self._alive.notify_all()
        self._start(name)
        if self._expected and len(self.deaths) >= self._expected:
            self.happened.set()

    def lines(self, text: str) -> list[str]:
        """What the servers have written that holds a text."""
        return [line for line in (self._folder / "servers.log").read_text().splitlines() if text in line]

    def stop(self) -> None:
        with self._alive:
            self._ending = True
            before = len(self.deaths)
            for process in self.processes.values():
                process.kill()
            assert self._alive.wait_for(lambda: len(self.deaths) >= before + len(self.processes), 30)

    def metric(self, name: str) -> float:
        """One of the coordinator's."""
        return scrape(f"127.0.0.1:{self.port + 3 + 2 * self._apart}")[name]


Start = Callable[..., tuple[Servers, Run]]


@pytest.fixture
def start(nursery: Nursery, tmp_path: Path) -> Iterator[Start]:
    """start(mode, points): servers, and a job that is not begun."""
    made: list[Servers] = []

    def make(mode: str, points: str, late: bool = False, **more: Any) -> tuple[Servers, Run]:
        folder = tmp_path / str(len(made))
        folder.mkdir()
        servers = Servers(nursery, folder, points, **more)
        made.append(servers)
        return servers, Run(servers.address, mode, servers.happened, CheckpointStore(servers.checkpoints), late)

    yield make
    for servers in made:
        servers.stop()


@pytest.fixture(scope="module")
def undisturbed(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """The weights that a sync job ends with."""
    servers = Servers(nursery, tmp_path_factory.mktemp("undisturbed"))
    ended = Run(servers.address, "sync").to_the_end()
    assert (ended.found, servers.deaths) == ([], [])
    servers.stop()
    return ended.weights


def same(weights: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> bool:
    return weights.keys() == others.keys() and all(torch.equal(weights[name], others[name]) for name in weights)


def to_the_end(servers: Servers, run: Run, points: str, who: list[str]) -> Ended:
    """How the job ends, whose servers died where they were to, by SIGKILL, and nowhere else."""
    ended = run.to_the_end()
    assert servers.deaths == [(name, -signal.SIGKILL) for name in who]
    fired = [line.split()[1].rstrip(":") for line in servers.lines("failpoint ") if line.startswith("failpoint ")]
    assert fired == [entry.partition("@")[0].partition("=")[0] for entry in points.split(",")]
    assert ended.found == []
    return ended


LATER = 80  # times that a place is passed that each push passes: at about the 13th step
KILL = f"push-staged@1={LATER}"


@pytest.mark.parametrize(
    ("points", "who"),
    cases(
        [
            (f"pull-half-sent@1={LATER}", ["shard 1"]),
            (f"{KILL},restore-read@0", ["shard 1", "shard 0"]),
        ],
        [
            (f"update-stepped@0={LATER // 2}", ["shard 0"]),
            (f"{KILL},restore-half-read@0", ["shard 1", "shard 0"]),
        ],
    ),
)
def test_a_sync_job_ends_with_the_weights_of_the_undisturbed_run_wherever_a_server_dies(
    start: Start, undisturbed: dict[str, torch.Tensor], points: str, who: list[str]
) -> None:
    servers, run = start("sync", points)
    ended = to_the_end(servers, run, points, who)
    assert same(ended.weights, undisturbed)
    [job] = ended.status["jobs"]
    assert job["restore_count"] >= 1
    assert job["redone_step_count"] >= 1


@pytest.mark.parametrize(
    ("point", "shard"),
    cases([("shard-file-half-written", 1)], [("manifest-half-written", 0)]),
)
def test_a_checkpoint_whose_writing_is_cut_short_is_left_for_the_one_before_it(
    start: Start, undisturbed: dict[str, torch.Tensor], point: str, shard: int
) -> None:
    ended = None
    while ended is None:
        servers, run = start("sync", f"{point}@{shard}=2")
        # Unless it died over its second file, and the first belongs to no checkpoint, because the other shard was past
        # its clock when it was asked for its part.
        with contextlib.suppress(NotFound):
            ended = to_the_end(servers, run, point, [f"shard {shard}"])
        assert ended is not None or not CheckpointStore(servers.checkpoints).names("default")
    assert same(ended.weights, undisturbed)
    [back], [cut] = servers.lines("rolled back to checkpoint"), servers.lines("not completed: it has no manifest")
    assert word_after("checkpoint", cut) > word_after("checkpoint", back), "the one before is used"
    assert servers.metric('ps_restores_total{result="unfinished"}') == 1
    assert servers.metric('ps_restores_total{result="restored"}') == 1


def test_a_server_that_dies_while_it_removes_an_old_checkpoint_leaves_none_that_is_half_there(
    start: Start, undisturbed: dict[str, torch.Tensor]
) -> None:
    servers, run = start("sync", "checkpoint-half-removed@0", keep=1)
    ended = to_the_end(servers, run, "checkpoint-half-removed", ["shard 0"])
    assert same(ended.weights, undisturbed)
    [back] = servers.lines("rolled back to checkpoint")
    # The first stays until a later one has every worker's state, which need not be the second.
    assert word_after("checkpoint", back) > "000001,"
    assert not (servers.checkpoints / "default" / "000001").exists(), "what was left is removed with the next"


def test_a_shard_that_dies_while_it_sends_an_edition_costs_its_reader_a_rollback(
    start: Start, undisturbed: dict[str, torch.Tensor]
) -> None:
    servers, run = start("sync", "edition-half-sent@1=2")
    feeds: list[ps.WeightFeed] = []

    def follow(rank: int, clock: int) -> None:
        if rank == 0 and not feeds and CheckpointStore(servers.checkpoints).names("default"):
            feeds.append(ps.subscribe(servers.address, "default"))
            feeds[0].wait_for()  # the next step makes the second edition
        elif feeds and rank == 0 and clock >= STEPS - 5:
            assert servers.happened.wait(TEST_SECONDS), "before the job is at its end"

    run.stepped = follow
    ended = to_the_end(servers, run, "edition-half-sent@1=2", ["shard 1"])
    with feeds[0] as feed:
        until(lambda: feed.ended, "the job's last weights")
        last = feed.wait_for().state_dict()
    assert same(ended.weights, undisturbed)
    assert same({name: last[name] for name in undisturbed}, undisturbed)


def test_a_coordinator_that_dies_while_it_stops_leaves_the_last_checkpoint_there_was(
    start: Start, undisturbed: dict[str, torch.Tensor]
) -> None:
    servers, run = start("sync", "drain-begun@0")
    told = threading.Event()

    def stop(rank: int, clock: int) -> None:
        if rank == 0 and clock >= 12 and not told.is_set():
            told.set()
            servers.processes["shard 0"].send_signal(signal.SIGTERM)

    run.stepped = stop
    ended = to_the_end(servers, run, "drain-begun", ["shard 0"])
    assert same(ended.weights, undisturbed)


@pytest.mark.parametrize(
    "points",
    cases(
        ["worker-half-added=6"],  # the second worker, by the first round
        ["coordinator-file-unnamed=5"],
    ),
)
def test_a_coordinator_that_dies_over_a_join_comes_back_and_the_worker_joins(
    start: Start, undisturbed: dict[str, torch.Tensor], points: str
) -> None:
    """Nothing is lost with it. Whom a shard counts that never learned of its place is waited for by nobody."""
    servers, run = start("sync", points, apart=True)
    ended = to_the_end(servers, run, points, ["coordinator"])
    assert same(ended.weights, undisturbed)
    [job] = ended.status["jobs"]
    assert (job["restore_count"], job["redone_step_count"]) == (0, 0)


def test_a_coordinator_that_dies_over_a_join_holds_up_nobody_who_trains(start: Start) -> None:
    servers, run = start("ssp:2", "worker-half-added=9", apart=True, late=True)
    ended = to_the_end(servers, run, "worker-half-added", ["coordinator"])
    assert ended.lost == 0


@pytest.mark.parametrize(
    ("mode", "points", "who"),
    cases(
        [("ssp:2", f"contribution-added@1={LATER}", ["shard 1"])],
        [
            ("async", f"{KILL},restore-half-done@0", ["shard 1", "shard 0"]),
            ("async", "manifest-unnamed@0=2", ["shard 0"]),
        ],
    ),
)
def test_without_a_common_clock_what_is_missing_is_what_is_counted_as_lost(
    start: Start, mode: str, points: str, who: list[str]
) -> None:
    servers, run = start(mode, points)
    ended = to_the_end(servers, run, points, who)
    [job] = ended.status["jobs"]
    assert ended.lost <= job["lost_step_count"] <= ended.missing, "what was acknowledged, and at most the steps at hand"


def word_after(word: str, line: str) -> str:
    words = line.split()
    return words[words.index(word) + 1]


# -- the variable ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", [("up", "--shards", "1"), ("coordinator", "--shards", "1")])
@pytest.mark.parametrize(
    "points", ["push-stagd", "push-staged@x", "push-staged=0", "push-staged=delay:soon", "push-staged=1,,nowhere"]
)
def test_a_name_that_is_none_ends_the_process_at_once_and_says_which_there_are(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], points: str
) -> None:
    monkeypatch.setenv("PS_FAILPOINTS", points)
    monkeypatch.setattr(sys, "argv", ["ps-server", *words, "--port", "0", "--metrics-port", "0"])
    with pytest.raises(SystemExit) as ended:
        ps_server.cli.main()
    said = str(ended.value)
    assert said.startswith("ps-server: PS_FAILPOINTS: expected NAME[@SHARD][=N] or NAME[@SHARD]=delay:SECONDS")
    assert repr(points.rpartition(",")[2]) in said
    assert all(name in said for name in POINTS)
    assert capsys.readouterr().out == ""


def test_a_delay_takes_its_time_at_each_passage_of_its_place_on_its_shard_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PS_FAILPOINTS", "push-checked=delay:0.05,push-staged@1=delay:60,restore-read=7")
    for name, nothing in (("armed", set()), ("_left", {}), ("_delays", {})):
        monkeypatch.setattr(failpoints, name, nothing)
    failpoints.arm(0)
    begun = time.monotonic()
    for name in ("push-checked", "push-staged", "restore-read", "push-checked"):
        failpoints.failpoint(name)
    assert 0.1 <= time.monotonic() - begun < 60


def test_the_docs_name_every_point() -> None:
    text = (ROOT / "docs" / "failpoints.md").read_text()
    assert {line.split("`")[1] for line in text.splitlines() if line.startswith("| `")} == set(POINTS)


def test_every_point_is_simulated_or_has_a_test_here() -> None:
    text = Path(__file__).read_text() + (ROOT / "tests" / "feed" / "test_relay_process.py").read_text()
    assert [name for name in POINTS if name not in (*AT_SHARDS, *AT_THE_COORDINATOR) and name not in text] == []


@pytest.mark.long
def test_what_up_starts_in_place_of_a_shard_that_died_has_its_delays_alone(
    tmp_path: Path, undisturbed: dict[str, torch.Tensor]
) -> None:
    """Else it would die again, after as many pushes; but its disk is as slow as before."""
    flags = ["--port=0", "--metrics-port=0", f"--lease={LEASE}", f"--checkpoint-every={EVERY}steps"]
    checkpoints, happened = tmp_path / "checkpoints", threading.Event()
    words = ["-m", "ps_server", "up", *flags, f"--checkpoint-dir={checkpoints}"]
    up = Command(tmp_path, *words, PS_FAILPOINTS="push-staged@1=60,shard-file-half-written@1=delay:0.01")
    try:
        [address] = up.says(r"ps-server: ready at (\S+) ")
        run = Run(address, "sync", happened, CheckpointStore(checkpoints))
        run.stepped = lambda rank, clock: "ps-server: shard 1 is back" in up.err and happened.set()
        ended = run.to_the_end()
        up.end(signal.SIGTERM)
    finally:
        up.clean_up()
    assert ended.found == []
    assert same(ended.weights, undisturbed)
    lines = up.err.splitlines()
    warned = [line for line in lines if "PS_FAILPOINTS is set: this process kills itself at 'push-staged'" in line]
    assert len(warned) == 1, "by shard 1, in its first life"
    slowed = [line for line in lines if "waits 0.01 s each time at 'shard-file-half-written'" in line]
    assert len(slowed) == 2, "by shard 1, in both of its lives"
    assert [line for line in lines if line.startswith(("failpoint ", "ps-server: shard"))] == [
        "failpoint push-staged: this process kills itself",
        "ps-server: shard 1 ended with code -9; starting it again (restart 1)",
        "ps-server: shard 1 is back (restart 1)",
    ]
