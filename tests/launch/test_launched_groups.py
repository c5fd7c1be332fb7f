"""`ps-worker run --group N`: workers that are groups of processes, started as wholes, and started again as wholes."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import ps_worker.cli
from ps_launch.groups import by_cause
from ps_protocol.errors import InvalidRequest
from ps_server.core.membership import LiveWorker, Membership
from tests.tools.cases import cases
from tests.tools.cluster import Cluster
from tests.tools.forkserver import Nursery, address_in
from tests.tools.launching import Commands, Start, python, run, script
from tests.tools.network import in_network, network_of

GROUPS = ("--server", "127.0.0.1:1", "--mode", "sync", "--workers", "2", "--group", "2")

# -- what a member is told -------------------------------------------------------------------------------------------

NAMES = ("PS_RANK", "PS_WORLD_SIZE", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "PS_LOCAL_RANK")


def test_a_member_is_told_its_place_in_the_group_and_the_groups_in_the_job(tmp_path: Path) -> None:
    names = (*NAMES, "PS_GROUP_SIZE", "MASTER_ADDR", "MASTER_PORT")
    told = script(tmp_path, f"say(*(os.environ[name] for name in {names}))")
    # What is left of another launcher means nothing.
    stale = {"RANK": "9", "WORLD_SIZE": "10", "MASTER_ADDR": "old", "MASTER_PORT": "1", "PS_RANK": "7"}
    done = run(*GROUPS, "--world-size", "5", "--first-rank", "3", told, **stale)
    assert done.returncode == 0, done.stderr
    lines = sorted(done.stdout.splitlines())
    assert [line.rpartition(" ")[0] for line in lines] == [
        "[3.0] 3 5 0 2 0 4 0 2 127.0.0.1",
        "[3.1] 3 5 1 2 1 4 1 2 127.0.0.1",
        "[4.0] 4 5 0 2 2 4 2 2 127.0.0.1",
        "[4.1] 4 5 1 2 3 4 3 2 127.0.0.1",
    ]
    ports = [line.rpartition(" ")[2] for line in lines]
    assert ports[0] == ports[1] != ports[2] == ports[3]
    assert "1" not in ports
    assert "starting 2 groups of 2 processes" in done.stderr


def test_a_group_of_one_process_has_torchs_variables_too(tmp_path: Path) -> None:
    told = script(tmp_path, "say(os.environ['RANK'], os.environ['WORLD_SIZE'], int(os.environ['MASTER_PORT']) > 0)")
    done = run("--mode", "single", "--group", "1", told)
    assert (done.returncode, done.stdout) == (0, "0 1 True\n")


def test_without_a_group_there_is_nothing_of_torchs(tmp_path: Path) -> None:
    told = script(tmp_path, "say(*(name for name in ('RANK', 'MASTER_PORT', 'PS_GROUP_SIZE') if name in os.environ))")
    done = run("--mode", "single", told, PS_GROUP_SIZE="2", RANK="1")
    assert (done.returncode, done.stdout) == (0, "\n")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--mode", "ddp"], "mode ddp has workers of one process: leave --group out, and count them by --workers"),
        (["--elastic"], "an elastic job has workers of one process: leave --elastic or --group out"),
        (["--group", "257"], "--group is up to 256 processes a worker, got 257"),
        (["--group", "0"], "--group: expected a whole number from 1 to 2147483647, got '0'"),
    ],
)
def test_what_does_not_fit_to_groups(
    flags: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["ps-worker", "run", "--server=h:1", "--group=2", *flags, __file__])
    with pytest.raises(SystemExit) as ended:
        ps_worker.cli.main()
    assert said in f"{ended.value.code}{capsys.readouterr().err}"


# -- what a member says of its launch --------------------------------------------------------------------------------


@pytest.fixture
def launch_ranks(monkeypatch: pytest.MonkeyPatch) -> list[range]:
    """The ranks that launches are about to start, as the coordinator hears of them with each worker that joins."""
    heard: list[range] = []
    join = Membership.join

    def hear(self: Membership, member: LiveWorker, launch_ranks: range = range(0), is_back: bool = False) -> None:
        if member.launch:  # at the coordinator; on shards a member names no launch
            heard.append(launch_ranks)
        join(self, member, launch_ranks, is_back)

    monkeypatch.setattr(Membership, "join", hear)
    return heard


OF_TORCHRUN = {"TORCHELASTIC_RUN_ID": "group-0", "RANK": "0", "WORLD_SIZE": "1"}
OF_OURS = {"PS_LAUNCHED": "1", "PS_LAUNCH_ID": "mine", "PS_LAUNCH_RANKS": "0-0"}


@pytest.mark.parametrize(
    ("variables", "in_group", "ranks"),
    [
        (OF_TORCHRUN, False, range(1)),
        (OF_TORCHRUN, True, range(0)),
        (OF_TORCHRUN | {"PS_GROUP_SIZE": "1"}, True, range(0)),
        (OF_OURS | {"PS_GROUP_SIZE": "1"}, True, range(1)),
    ],
    ids=["no group", "group", "group of a size", "ours"],
)
def test_a_torchrun_that_starts_one_group_does_not_speak_for_the_ranks_of_the_job(
    shared: Cluster,
    job: str,
    tmp_path: Path,
    launch_ranks: list[range],
    monkeypatch: pytest.MonkeyPatch,
    variables: dict[str, str],
    in_group: bool,
    ranks: range,
) -> None:
    """Its WORLD_SIZE counts the members of the group. A job of as many groups would refuse it, for the other groups."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # what ours starts sets its own
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    model = torch.nn.Linear(2, 1)
    if in_group:
        fully_shard(model)
    with shared.connect("sync", job=job) as session:
        given: dict[str, Any] = {"group": dist.group.WORLD} if in_group else {}
        session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), **given)
    assert launch_ranks == [ranks]


# -- the end of a member ---------------------------------------------------------------------------------------------

DIES = """
import pathlib, signal
group, member, count = (int(os.environ[name]) for name in ("PS_RANK", "RANK", "PS_RESTART_COUNT"))
here = pathlib.Path(__file__).parent
mark = lambda name: (here / name).touch()
pathlib.Path(os.environ["PS_STARTED_FILE"]).touch()  # all have joined
say("begins", count, os.environ["MASTER_PORT"])
mark(f"{group}-{member}-{count}")
if group == 1 and count == 0:
    if member == 1:
        await_file(here / "deaf")
        raise RuntimeError("no such sample")
    signal.signal(signal.SIGTERM, lambda *_: mark("asked"))
    mark("deaf")
    while True:  # as in a collective: only SIGKILL ends it
        time.sleep(0.05)
for other in (0, 1):
    await_file(here / f"1-{other}-{AGAIN}")
say("ends", count)
"""


# The command, which waits a little less long than five seconds for members that do not end.
IMPATIENT = """
from ps_launch import groups
groups.GROUP_STOP_SECONDS = 3.0
from ps_worker.cli import main
main()
"""


def test_the_group_of_a_member_that_fails_ends_and_starts_again_and_no_other_does(tmp_path: Path) -> None:
    words = (*GROUPS, "--max-restarts", "2", script(tmp_path, DIES.replace("{AGAIN}", "1")))
    done = python("-c", IMPATIENT, "run", *words)
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.findall(r"^\[(\d\.\d)\] (begins|ends) (\d)(?: (\d+))?$", done.stdout, re.MULTILINE)
    lives = sorted((who, what, count) for who, what, count, _ in found)
    assert lives == [
        *(("0.0", "begins", "0"), ("0.0", "ends", "0"), ("0.1", "begins", "0"), ("0.1", "ends", "0")),
        *(("1.0", "begins", "0"), ("1.0", "begins", "1"), ("1.0", "ends", "1")),
        *(("1.1", "begins", "0"), ("1.1", "begins", "1"), ("1.1", "ends", "1")),
    ]
    ports = {(who, count): port for who, what, count, port in found if what == "begins"}
    assert ports["1.0", "1"] == ports["1.1", "1"] != ports["1.0", "0"], "the old one may be in use still"
    assert (tmp_path / "asked").exists(), "a member that can is to end by itself"
    assert (
        "ps-worker: member 1 of group 1 failed with code 1 (RuntimeError: no such sample); its group ends, and is "
        "started again in 0.5 s (restart 1 of 2)\n" in done.stderr
    )
    assert done.stderr.count("member 0 of group 1") == 0, "its end is that of the group"


def test_of_members_that_ended_at_one_time_the_one_that_was_killed_is_the_cause() -> None:
    assert by_cause([(0, 1), (1, -9), (2, 0), (3, -15)]) == [(1, -9), (3, -15), (0, 1), (2, 0)]


def test_a_group_that_is_not_started_again_leaves_the_others_alone(tmp_path: Path) -> None:
    text = DIES.replace("    while True", "    while not (here / 'asked').exists()")
    # The other group runs until the launcher has seen the failure: a member is asked to end after that.
    text = text.replace("""await_file(here / f"1-{other}-{AGAIN}")""", "await_file(here / 'asked')")
    logs = ("--log-dir", str(tmp_path / "logs"), "--show-ranks", "0")
    done = run(*GROUPS, *logs, script(tmp_path, text))
    assert done.returncode == 1
    assert re.sub(r"\d{4,}", "PORT", done.stdout) == "[0.0] begins 0 PORT\n[0.0] ends 0\n"
    assert (
        "ps-worker: member 1 of group 1 failed with code 1 (RuntimeError: no such sample); its group ends; the launch "
        "goes on with 1 of 2 groups\n" in done.stderr
    )
    log = tmp_path / "logs" / "worker-1.1.log"
    last = f"1 of 2 groups failed: member 1 of group 1 failed with code 1 (RuntimeError: no such sample); see {log}\n"
    assert done.stderr.endswith(last)
    assert "[1.1] RuntimeError: no such sample\n" in done.stderr
    assert {path.name for path in (tmp_path / "logs").iterdir()} == {
        *("worker-0.0.log", "worker-0.1.log", "worker-1.0.log", "worker-1.1.log")
    }
    assert "ends 0" in (tmp_path / "logs" / "worker-0.1.log").read_text()


# -- with FSDP2, on servers ------------------------------------------------------------------------------------------

TRAINS = """
import os, pathlib, signal, sys, time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import ps_torch


def say(line):  # in one call: the members of a group may write to one file at a time
    os.write(1, f"{line}\\n".encode())


here = pathlib.Path(__file__).parent
dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
for layer in model[0], model[2]:
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
member, again = dist.get_rank(), os.environ["PS_RESTART_COUNT"] != "0"
while again and not (here / "stands").exists():  # it joins the other group at the clock at which that one waits for it
    time.sleep(0.01)
session = ps_torch.connect()
model, optimizer = session.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2), group=mesh)
if again:
    (here / f"back-{member}").touch()
    say(f"back at clock {session.clock}")
while session.clock < 12:
    if session.rank == 1 and member == ENDS and session.clock == 4 and not again:
        HAPPENS
    while session.rank == 0 and session.clock == WAITS and not all((here / f"back-{each}").exists() for each in (0, 1)):
        (here / "stands").touch()
        time.sleep(0.01)
    x = torch.randn(2, 4, generator=torch.Generator().manual_seed(100 * session.clock + 10 * session.rank + member))
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
weights = [parameter.full_tensor().double().sum().item() for parameter in model.parameters()]
say("ends with " + " ".join(str(weight) for weight in weights))
session.close()
dist.destroy_process_group()
"""


NEVER = -1


def trains(directory: Path, member: int, happens: str, stands: int, launcher: str = "PS") -> str:
    """TRAINS, where something happens to a member of group 1, and group 0 waits for that group at a clock.

    launcher: PS or TORCHELASTIC
    """
    path = directory / "train.py"
    text = TRAINS.replace("PS_RESTART_COUNT", f"{launcher}_RESTART_COUNT").replace("HAPPENS", happens)
    path.write_text(text.replace("ENDS", str(member)).replace("WAITS", str(stands)))
    return str(path)


@pytest.mark.long
def test_a_group_that_lost_a_member_comes_back_as_a_whole_and_the_other_goes_on(tmp_path: Path) -> None:
    """The launcher reports its end: no lease is over before that of this test."""
    path = trains(tmp_path, 1, "os.kill(os.getpid(), signal.SIGKILL)", stands=8)
    servers = ("--shards", "1", "--server-options", "--lease 600")
    done = run(*servers, "--mode", "sync", "--workers", "2", "--group", "2", "--max-restarts", "1", path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"member 1 of group 1 was ended by SIGKILL.*; its group ends, and is started again", done.stderr)
    assert sorted(re.findall(r"^\[(\d\.\d)\] back at clock 8$", done.stdout, re.MULTILINE)) == ["1.0", "1.1"]
    ends = dict(re.findall(r"^\[(\d\.\d)\] ends with (.*)$", done.stdout, re.MULTILINE))
    assert ends.keys() == {"0.0", "0.1", "1.0", "1.1"}
    assert len(set(ends.values())) == 1
    assert "2 groups have joined, training begins" in done.stderr


def of_one_process(groups: int = 2) -> list[float]:
    """What one process trains on what all members of TRAINS have, with no fault."""
    members = [(group, member) for group in range(groups) for member in (0, 1)]
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for clock in range(12):
        for group, member in members:
            own = torch.Generator().manual_seed(100 * clock + 10 * group + member)
            (model(torch.randn(2, 4, generator=own)).square().mean() / len(members)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.double().sum().item() for parameter in model.parameters()]


@pytest.mark.long
@pytest.mark.parametrize("stopped", cases([0], [1]), ids=["the member that keeps the store", "another member"])
def test_a_member_that_is_stopped_for_good_ends_its_group_which_comes_back(tmp_path: Path, stopped: int) -> None:
    """Its neighbour waits for it in a collective of the script. The other group waits for the step of this one."""
    path = trains(tmp_path, stopped, "os.kill(os.getpid(), signal.SIGSTOP)", stands=4)
    servers = ("--shards", "1", "--server-options", "--lease 5", "--group-timeout", "5")
    done = run(*servers, "--mode", "sync", "--workers", "2", "--group", "2", "--max-restarts", "1", path)
    assert done.returncode == 0, done.stdout + done.stderr
    said = (
        rf"member {1 - stopped} of group 1 failed with code 80 \(member {stopped} \(\S+, pid \d+\) of this worker's "
        r"group has given no sign for 5 s \(--group-timeout\): this process ends, .*\); its group ends, and is started"
    )
    assert re.search(said, done.stderr), done.stderr
    assert_back(done.stdout)


def assert_back(output: str) -> None:
    """Group 1 has come back at clock 4, and all members have ended as one process."""
    assert sorted(re.findall(r"^\[(\d\.\d)\] back at clock 4$", output, re.MULTILINE)) == ["1.0", "1.1"]
    ends = dict(re.findall(r"^\[(\d\.\d)\] ends with (.*)$", output, re.MULTILINE))
    assert ends.keys() == {"0.0", "0.1", "1.0", "1.1"}
    for told in ends.values():
        assert [float(each) for each in told.split()] == pytest.approx(of_one_process(), rel=1e-5)


@pytest.mark.long
def test_a_member_whose_training_thread_hangs_ends_its_group_which_comes_back(tmp_path: Path) -> None:
    """Its heartbeats and signs go on, and its neighbour waits for it in a collective of the script."""
    path = trains(tmp_path, 1, "__import__('threading').Event().wait()", stands=4)
    servers = ("--shards", "1", "--server-options", "--lease 30", "--step-timeout", "5")
    done = run(*servers, "--mode", "sync", "--workers", "2", "--group", "2", "--max-restarts", "1", path)
    assert done.returncode == 0, done.stdout + done.stderr
    said = (
        r"member \d of group 1 failed with code 80 \(member 1 \(\S+, pid \d+, at train.py:\d+ in <module>\) of this "
        r"worker's group has made no step and no call of the session for 5 s, while another member waits \(--step-tim"
    )
    assert re.search(said, done.stderr), done.stderr
    assert_back(done.stdout)


@pytest.mark.long
def test_a_torchrun_for_each_group_restarts_its_own_which_comes_back_at_the_jobs_clock(
    make_cluster: Callable[..., Cluster], job: str, tmp_path: Path
) -> None:
    """As docs/groups.md starts them. torchrun reports nothing: the other group goes on once a member has left, or after
    a lease.
    """
    cluster = make_cluster(lease=2.0)
    path = trains(tmp_path, 1, "os.kill(os.getpid(), signal.SIGKILL)", stands=8, launcher="TORCHELASTIC")
    settings = {"PS_SERVER": cluster.address, "PS_JOB": job, "PS_MODE": "sync", "PS_WORLD_SIZE": "2"}
    settings |= {"PS_GROUP_SIZE": "2", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    words = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "1", path)
    commands = Commands(tmp_path)
    try:
        groups = [commands.start(*words, **settings, PS_RANK=str(group)) for group in (0, 1)]
        assert [group.process.wait(120) for group in groups] == [0, 0], groups[0].err + groups[1].err
    finally:
        commands.close()
    assert re.findall(r"^back at clock (\d+)$", groups[1].out, re.MULTILINE) == ["8", "8"]
    assert "back at" not in groups[0].out
    ends = [found for group in groups for found in re.findall(r"^ends with (.*)$", group.out, re.MULTILINE)]
    assert len(ends) == 4
    assert len(set(ends)) == 1


@pytest.mark.long
@pytest.mark.netns
def test_a_group_whose_members_are_on_two_hosts_ends_as_one_process(nursery: Nursery, tmp_path: Path) -> None:
    """A torchrun on each host, as docs/groups.md starts them. The servers are on the first: its member shares memory
    with them, the other one has a link.
    """
    path = trains(tmp_path, NEVER, "pass", stands=NEVER, launcher="TORCHELASTIC")
    with network_of(2) as network, ExitStack() as stack:
        words = ["shard", "--with-coordinator", "--shards=1", "--index=0", "--lease=30", "--insecure"]
        log = tmp_path / "server.log"
        ports = [f"--host={network.address(0)}", "--port=0", "--metrics-port=0"]
        server = nursery.serve([*words, *ports], log, network=network.name(0))
        stack.callback(server.kill)
        settings = {"PS_SERVER": address_in(log), "PS_MODE": "sync", "PS_RANK": "0", "PS_WORLD_SIZE": "1"}
        settings |= {"PS_GROUP_SIZE": "2", "PS_INSECURE": "1", "GLOO_SOCKET_IFNAME": "eth0"}
        commands = Commands(tmp_path)
        stack.callback(commands.close)
        rendezvous = ("--rdzv-backend=c10d", "--rdzv-id=group-0", f"--rdzv-endpoint={network.address(0)}:29400")
        nodes = []
        for host, transport in enumerate(("shm", "tcp")):
            own = (f"--local-addr={network.address(host)}", f"--rdzv-conf=is_host={int(host == 0)}")
            torchrun = ("-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", *rendezvous, *own, path)
            start = partial(commands.start, *torchrun, **settings, PS_TRANSPORT=transport)
            nodes.append(in_network(network.name(host), start))
        codes = [node.process.wait(120) for node in nodes]
        assert codes == [0, 0], nodes[0].err + nodes[1].err + log.read_text()
    ends = [found for node in nodes for found in re.findall(r"^ends with (.*)$", node.out, re.MULTILINE)]
    assert len(ends) == 2
    for told in ends:
        assert [float(each) for each in told.split()] == pytest.approx(of_one_process(groups=1), rel=1e-5)


def test_a_script_that_gives_prepare_no_group_is_told(
    shared: Cluster, job: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {**OF_OURS, "PS_GROUP_SIZE": "2", "RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # what ours starts sets its own
    model = torch.nn.Linear(2, 1)
    said = (
        "the launcher has started 2 processes as this worker (--group 2), and prepare got no group: give it "
        "prepare(..., group=mesh), the mesh of all of them"
    )
    with shared.connect("sync", job=job) as session, pytest.raises(InvalidRequest, match=re.escape(said)):
        session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))


# Member 0 ends at once: the import of torch takes seconds.
LOGS = """
import os
if os.environ["RANK"] == "1":
    import logging, ps_torch
    ps_torch.connect()
    logging.getLogger("ps_worker").warning("here")
"""


def test_lines_of_json_name_the_member(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(LOGS)
    done = run("--mode", "single", "--group", "2", "--log-format", "json", str(path))
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    found = [(line["rank"], line["member"]) for line in lines if line["message"] == "here"]
    assert found == [(0, 1)], done.stderr


def test_the_launcher_is_stopped_with_all_members(start: Start, tmp_path: Path) -> None:
    command = start("-m", "ps_worker", "run", *GROUPS, script(tmp_path, "say('here')\ntime.sleep(600)"))
    command.says("here", count=4)
    assert command.end(15) == 128 + 15
