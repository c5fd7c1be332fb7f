"""A real network, of network namespaces on a switch, and a cable in it that is pulled and plugged in again.

Unlike a connection that is reset, a cut cable says nothing: packets are lost, both ends wait, and connections that are
older than the cut may live on after it. Its twin that runs everywhere is test_rejoin.py's
`test_a_worker_that_was_cut_off_takes_its_place_again_and_goes_on`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.chaos.ledger import Ledgers, Record
from tests.chaos.oracle import Rules, Shape, judge, unexplained
from tests.chaos.worker import Task
from tests.tools.cluster import until
from tests.tools.forkserver import ROOT, Forked, Nursery, address_in
from tests.tools.network import Network, network_of

SHAPE = Shape(buckets=4, rows=4, columns=7)
LEASE = 5.0
WORKERS = 2
WORKER = ROOT / "tests" / "chaos" / "worker.py"
READ = """
import json, pathlib, sys
from safetensors.torch import save_file
from tests.chaos.cluster import read_weights
from tests.chaos.worker import Task
folder = pathlib.Path(sys.argv[1])
save_file({"view": read_weights(Task.read(folder))[0]}, folder / "view.safetensors")
"""


@pytest.fixture
def network() -> Iterator[Network]:
    """One host for the servers, and one for each worker."""
    with network_of(1 + WORKERS) as made:
        yield made


@pytest.fixture
def processes() -> Iterator[list[Forked]]:
    """Those that are in it are killed at the test's end."""
    found: list[Forked] = []
    yield found
    for process in found:
        process.kill()


@pytest.mark.long
@pytest.mark.netns
def test_a_worker_whose_cable_was_pulled_for_longer_than_its_lease_comes_back_and_nothing_is_lost(
    request: pytest.FixtureRequest,
    network: Network,
    nursery: Nursery,
    processes: list[Forked],
    tmp_path: Path,
) -> None:
    words = ["shard", "--with-coordinator", "--shards=1", "--index=0", f"--lease={LEASE}", "--insecure"]
    ports = [f"--host={network.address(0)}", "--port=0", "--metrics-port=0"]
    log = tmp_path / "server.log"
    processes.append(nursery.serve([*words, *ports], log, network=network.name(0)))
    server = address_in(log)
    task = Task("sync", "default", server, WORKERS, 0.02, SHAPE, transports=("grpc",))
    (tmp_path / "task.json").write_text(json.dumps(asdict(task)))
    for rank in range(WORKERS):
        words, log_of = [tmp_path, rank], tmp_path / f"worker-{rank}.log"
        processes.append(nursery.run(WORKER, words, log_of, network=network.name(1 + rank), PS_INSECURE="1"))
    rules = Rules.of("sync", WORKERS, SHAPE)
    ledgers = Ledgers(tmp_path / "lives", rules.averaged)
    request.addfinalizer(ledgers.close)

    def records() -> dict[int, Record]:
        return {record.life.rank: record for record in ledgers.read()}

    def steps_since(rank: int, when: float) -> Callable[[], int]:
        return lambda: sum(at > when for at in records()[rank].steps) if rank in records() else 0

    for rank in range(WORKERS):
        until(lambda rank=rank: steps_since(rank, 0.0)() > 10, "the first steps")
    cut = time.monotonic()
    network.cut(1 + 1)
    until(lambda: "worker 1 (pid" in log.read_text(), "the end of the lease")
    fenced = time.monotonic()
    until(lambda: steps_since(0, fenced)() > 20, "the other's going on")
    healed = time.monotonic()
    assert not [at for at in records()[1].steps if cut + 1.0 < at < healed], "nothing was acknowledged through it"
    network.heal(1 + 1)
    until(lambda: records()[1].has("joined again"), "its return")
    until(lambda: steps_since(1, healed)() > 20, "its steps")

    clock = max(max(record.life.done.values()) for record in records().values()) + 50
    (tmp_path / "stop.new").write_text(str(clock))
    (tmp_path / "stop.new").rename(tmp_path / "stop")
    until(lambda: all(record.has("held") for record in records().values()), "the end")
    (tmp_path / "read.py").write_text(READ)
    read = nursery.run(
        tmp_path / "read.py", [tmp_path], tmp_path / "read.log", network=network.name(0), PS_INSECURE="1"
    )
    assert read.wait(60) == 0, (tmp_path / "read.log").read_text()
    (tmp_path / "leave").touch()
    view, found = load_file(tmp_path / "view.safetensors")["view"], list(records().values())
    lives = [record.life for record in found]
    assert unexplained([violation for record in found for violation in record.violations], lives, rules) == []
    assert judge(view, lives, rules) == []
    assert [process.wait(30) for process in processes[1:]] == [0] * WORKERS
