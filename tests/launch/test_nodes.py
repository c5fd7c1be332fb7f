"""`ps-worker run --shards-with-workers` on machines that share no directory, of which one is lost and comes back.

Each machine has a shard, a worker and a disk of its own. They are network namespaces with certificates; and, so that it
runs everywhere, launches on loopback.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from ps_server.ops import dev_certs
from tests.chaos.cluster import free_ports
from tests.tools.cluster import until
from tests.tools.launching import END_SECONDS, START_SECONDS, Command, Commands
from tests.tools.network import Network, in_network, network_of

NODES = 2
TRAIN = """
import sys
from pathlib import Path
import torch, ps_worker
with ps_worker.connect() as session:
    model = torch.nn.Linear(64, 64)
    model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), bucket_bytes=256)
    while not Path(sys.argv[1]).exists():
        model(torch.ones(1, 64)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if session.clock % 50 == 0:
            print(f"clock {session.clock}", flush=True)
"""

StartNode = Callable[[int], Command]


def words_of(rank: int, server: str, folder: Path, tls: str = "", *more: str) -> list[str]:
    """The command line of a node."""
    servers = shlex.join(["--own-disk", "--lease=5", *tls.split()])
    own = ["--checkpoint-dir", str(folder / f"machine-{rank}"), "--checkpoint-every=1s", f"--server-options={servers}"]
    where = ["--server", server, "--nnodes", str(NODES), "--node-rank", str(rank)]
    script = [str(folder / "train.py"), str(folder / "enough")]
    return ["-m", "ps_worker", "run", "--shards-with-workers", *where, *own, *more, "--mode=async", *script]


@pytest.fixture
def on_loopback(commands: Commands, tmp_path: Path) -> StartNode:
    server = f"127.0.0.1:{free_ports(1)}"
    return lambda rank: commands.start(*words_of(rank, server, tmp_path))


@pytest.fixture
def in_namespaces(network: Network, commands: Commands, tmp_path: Path) -> StartNode:
    certs = tmp_path / "certs"
    dev_certs.write(certs, [network.address(rank) for rank in range(NODES)])

    def tls(role: str) -> str:
        return f"--tls-cert={certs}/{role}.pem --tls-key={certs}/{role}.key --tls-ca={certs}/ca.pem"

    def start(rank: int) -> Command:
        of_servers = f"{tls('server')} --tokens={certs}/roles"
        words = words_of(rank, f"{network.address(0)}:50051", tmp_path, of_servers, *tls("worker").split())
        return in_network(network.name(rank), lambda: commands.start(*words))

    return start


@pytest.fixture
def network() -> Iterator[Network]:
    with network_of(NODES) as made:
        yield made


def last_of(checkpoints: Path) -> str:
    """The name of the last one that is whole. How many there are says nothing: old ones go."""
    return max((manifest.parent.name for manifest in checkpoints.glob("*/manifest.json")), default="")


@pytest.mark.long
@pytest.mark.parametrize(
    ("place", "which"),
    [
        ("on_loopback", 1),
        pytest.param("on_loopback", 0, marks=pytest.mark.repeat),
        pytest.param("in_namespaces", 1, marks=pytest.mark.netns),
    ],
)
def test_a_machine_that_was_lost_goes_on_from_its_own_disk(
    request: pytest.FixtureRequest, tmp_path: Path, place: str, which: int
) -> None:
    start: StartNode = request.getfixturevalue(place)
    (tmp_path / "train.py").write_text(TRAIN)
    nodes = [start(rank) for rank in range(NODES)]
    for node in nodes:
        node.says("clock 100")
    checkpoints = tmp_path / "machine-0" / "default"
    before = last_of(checkpoints)
    until(lambda: last_of(checkpoints) > before, "a checkpoint of all", START_SECONDS)
    # Not by rglob: it fails where an old checkpoint goes meanwhile.
    files = [file for _, _, names in os.walk(checkpoints) for file in names]
    assert not [file for file in files if file.startswith("shard-")], "each shard's file is on its own machine"

    lost = nodes[which]
    for process in [psutil.Process(lost.process.pid), *lost.family()]:
        process.kill()
    lost.process.wait(END_SECONDS)
    nodes[which] = start(which)
    nodes[which].says("clock ")
    until(lambda: "rolled back to checkpoint" in nodes[0].err, "the return to the checkpoint", START_SECONDS)
    (tmp_path / "enough").touch()
    # All are done at one moment, and each asks whether the job is over: the coordinator is there until all have heard.
    assert [node.process.wait(START_SECONDS) for node in nodes] == [0] * NODES, "\n".join(node.err for node in nodes)
    if which:  # otherwise the coordinator was away in between
        assert not any("coordinator at" in node.err.rpartition("rolled back")[2] for node in nodes)
