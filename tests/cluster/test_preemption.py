"""Workers that are all told to stop go on with `--restore`: each sample of the pass is used once."""

from __future__ import annotations

import json
import signal
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ps_protocol.errors import UnknownWorker
from ps_protocol.messages.data import PushCall
from ps_server.core.commands import Staged
from ps_server.shard.shard import Shard
from ps_server.storage.checkpoints import CheckpointStore
from tests.tools.cases import cases
from tests.tools.cluster import Cluster, until
from tests.tools.forkserver import Forked, Nursery

SAMPLES, WORKERS, WAIT_SECONDS = 600, 2, 120
LEASE = 120.0

# Each sample has a cell of the model, which a step with that sample raises.
SCRIPT = """
import json, pathlib, sys, threading, torch, ps_worker

directory, samples = pathlib.Path(sys.argv[1]), int(sys.argv[2])
session = ps_worker.connect()
model = torch.nn.ParameterList([torch.zeros(samples)])
loader = torch.utils.data.DataLoader(range(samples), shuffle=True)
model, optimizer, loader = session.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0), loader)
with open(directory / f"began-{session.rank}", "a", buffering=1) as began:
    for batch in loader:
        print(batch.item(), file=began)
        optimizer.zero_grad()
        (-model[0][batch]).sum().backward()
        optimizer.step()
(directory / f"cells-{session.rank}").write_text(json.dumps(model[0].tolist()))
"""


def start(nursery: Nursery, cluster: Cluster, mode: str, directory: Path) -> list[Forked]:
    directory.mkdir()
    script, words = directory / "script.py", [directory, SAMPLES]
    script.write_text(SCRIPT)
    variables = {"PS_SERVER": cluster.address, "PS_MODE": mode, "PS_WORLD_SIZE": str(WORKERS)}
    return [
        nursery.run(script, words, directory / f"log-{rank}", PS_RANK=str(rank), **variables) for rank in range(WORKERS)
    ]


def began(directory: Path) -> list[list[int]]:
    """By rank, the samples of the steps that were begun."""
    files = [directory / f"began-{rank}" for rank in range(WORKERS)]
    return [[int(line) for line in file.read_text().split()] if file.exists() else [] for file in files]


# Where the script of a worker is told to stop: between what is done of a step and the note of it.
PLACES = {
    "sent": ("ps_worker.cluster.connection", "Connection", "push_pull", "after", 5),
    "finished": ("ps_worker.state.checkpoint", "WorkerCheckpoint", "stepped", "before", 5),
    "leaving": ("ps_worker.cluster.own_membership", "OwnMembership", "close", "before", 1),
    "in its next place": ("ps_worker.cluster.participation", "Participation", "_enter", "before", 2),
}
TOLD = """
import importlib, os, signal, sys

def tell(module, holder, name, when, call):
    holder = getattr(importlib.import_module(module), holder)
    method = getattr(holder, name)
    calls = 0

    def told(*arguments, **named):
        nonlocal calls
        calls += 1
        stops = calls == int(call)
        if stops and when == "before":
            os.kill(os.getpid(), signal.SIGTERM)
        result = method(*arguments, **named)
        if stops and when == "after":
            os.kill(os.getpid(), signal.SIGTERM)
        return result

    setattr(holder, name, told)

for at in range(3, len(sys.argv), 5):
    tell(*sys.argv[at : at + 5])
"""
# Before its last steps the script waits: its lease is to end while there are some left, however fast it is.
HELD_SCRIPT = SCRIPT.replace(
    "        optimizer.zero_grad()\n",
    """
        begun = len(pathlib.Path(began.name).read_text().split())
        while begun == samples - 5 and not (directory / "lease is over").exists():
            threading.Event().wait(0.01)
        optimizer.zero_grad()
""",
)


@pytest.mark.parametrize("place", cases(["in its next place"], ["sent", "finished"]))
def test_a_worker_that_is_told_to_stop_amid_a_step_counts_it_once(
    make_cluster: Callable[..., Cluster], nursery: Nursery, tmp_path: Path, place: str
) -> None:
    samples, kept, script = 40, tmp_path / "checkpoints", tmp_path / "script.py"
    script.write_text(TOLD + HELD_SCRIPT)
    first = make_cluster(checkpoint_dir=kept, lease=LEASE)
    alone = {"PS_MODE": "async", "PS_RANK": "0", "PS_WORLD_SIZE": "1"}
    words, log = [tmp_path, samples, *PLACES[place]], tmp_path / "log"
    running = nursery.run(script, words, log, PS_SERVER=first.address, **alone)
    if place == "in its next place":
        until(lambda: len(began(tmp_path)[0]) > 5, "training")
        first.lose_place(0)
    (tmp_path / "lease is over").touch()
    assert running.wait(WAIT_SECONDS) == 128 + signal.SIGTERM
    until(lambda: not first.coordinator.jobs(), "the job's end", WAIT_SECONDS)
    first.stop()
    second = make_cluster(checkpoint_dir=kept, restore=True, lease=LEASE)
    running = nursery.run(script, [*words[:-1], 0], log, PS_SERVER=second.address, **alone)
    assert running.wait(WAIT_SECONDS) == 0, log.read_text()
    assert set(json.loads((tmp_path / "cells-0").read_text())) == {1.0}


def in_a_with_block(script: str) -> str:
    """The script, whose session is closed at the end of a `with` block, before the interpreter ends."""
    before, connects, after = script.partition("session = ps_worker.connect()\n")
    assert connects
    return before + "with ps_worker.connect() as session:\n" + textwrap.indent(after, "    ")


def test_a_second_signal_acts_when_the_worker_has_left(
    make_cluster: Callable[..., Cluster], nursery: Nursery, tmp_path: Path
) -> None:
    """As of Slurm, which signals all processes of a job: the workers have one of it and one of their launcher."""
    samples, kept, script, log = 40, tmp_path / "checkpoints", tmp_path / "script.py", tmp_path / "log"
    script.write_text(TOLD + in_a_with_block(SCRIPT))
    first = make_cluster(checkpoint_dir=kept, lease=LEASE)
    alone = {"PS_MODE": "async", "PS_RANK": "0", "PS_WORLD_SIZE": "1"}
    words = [tmp_path, samples]
    running = nursery.run(script, [*words, *PLACES["sent"], *PLACES["leaving"]], log, PS_SERVER=first.address, **alone)
    assert running.wait(WAIT_SECONDS) == 128 + signal.SIGTERM, log.read_text()
    until(lambda: not first.coordinator.jobs(), "the job's end", LEASE / 4)
    first.stop()
    second = make_cluster(checkpoint_dir=kept, restore=True, lease=LEASE)
    running = nursery.run(script, words, log, PS_SERVER=second.address, **alone)
    assert running.wait(WAIT_SECONDS) == 0, log.read_text()
    assert set(json.loads((tmp_path / "cells-0").read_text())) == {1.0}


SAVING = """
import pathlib, signal, sys, torch, ps_worker

session = ps_worker.connect()
model = torch.nn.Linear(4, 4)
model, optimizer = session.prepare(model, torch.optim.Adam(model.parameters()))
try:
    for step in range(3):
        optimizer.zero_grad()
        model(torch.ones(1, 4)).sum().backward()
        if step == 2:
            signal.raise_signal(signal.SIGTERM)
        optimizer.step()
finally:
    signal.raise_signal(signal.SIGTERM)  # as of Slurm and of the worker's launcher, which both signal it
    torch.save([session.global_weights(), optimizer.state_dict()], sys.argv[1])
"""


@pytest.mark.parametrize("transport", cases(["tcp"], ["shm", "grpc"]))
def test_a_script_that_is_told_to_stop_makes_its_own_last_save(
    make_cluster: Callable[..., Cluster], nursery: Nursery, tmp_path: Path, transport: str
) -> None:
    script, saved, log = tmp_path / "script.py", tmp_path / "saved.pt", tmp_path / "log"
    script.write_text(SAVING)
    alone = {"PS_MODE": "async", "PS_RANK": "0", "PS_WORLD_SIZE": "1", "PS_TRANSPORT": transport}
    running = nursery.run(script, [saved], log, PS_SERVER=make_cluster().address, **alone)
    assert running.wait(WAIT_SECONDS) == 128 + signal.SIGTERM, log.read_text()
    assert [state["step"] for state in torch.load(saved)[1]["state"].values()] == [2.0, 2.0]


@pytest.mark.parametrize("transport", cases(["tcp"], ["shm", "grpc"]))
def test_a_step_counts_whose_answer_was_lost_with_the_place(
    make_cluster: Callable[..., Cluster], nursery: Nursery, tmp_path: Path, transport: str
) -> None:
    """It was staged; then the lease ended, and the worker heard of that alone. It is told to stop in its next place."""
    samples, kept, script = 40, tmp_path / "checkpoints", tmp_path / "script.py"
    script.write_text(TOLD + SCRIPT)
    first = make_cluster(checkpoint_dir=kept, lease=LEASE)
    for shard in first.shards:
        loses_an_answer(first, shard)
    alone = {"PS_MODE": "async", "PS_RANK": "0", "PS_WORLD_SIZE": "1", "PS_TRANSPORT": transport}
    words, log = [tmp_path, samples, *PLACES["in its next place"]], tmp_path / "log"
    running = nursery.run(script, words, log, PS_SERVER=first.address, **alone)
    assert running.wait(WAIT_SECONDS) == 128 + signal.SIGTERM, log.read_text()
    until(lambda: not first.coordinator.jobs(), "the job's end", WAIT_SECONDS)
    first.stop()
    second = make_cluster(checkpoint_dir=kept, restore=True, lease=LEASE)
    running = nursery.run(script, [*words[:-1], 0], log, PS_SERVER=second.address, **alone)
    assert running.wait(WAIT_SECONDS) == 0, log.read_text()
    assert set(json.loads((tmp_path / "cells-0").read_text())) == {1.0}


def loses_an_answer(cluster: Cluster, shard: Shard) -> None:
    """Has a shard take the push of clock 6, and end the worker's lease instead of saying so."""
    push, exchange = shard.push, shard.exchange

    def lose(clock: int) -> None:
        if clock == 6:
            cluster.end_lease(0)
            raise UnknownWorker("a test has lost the answer")

    def pushing(call: PushCall, principal: str = "") -> list[Staged]:
        staged = push(call, principal)
        lose(call.clock)
        return staged

    def exchanging(call: PushCall, *more: Any) -> None:
        exchange(call, *more)
        lose(call.clock)

    shard.push, shard.exchange = pushing, exchanging  # type: ignore[method-assign]


@pytest.mark.long
@pytest.mark.parametrize("mode", cases(["sync"], ["async"]))
def test_workers_that_are_told_to_stop_go_on_where_they_were(
    make_cluster: Callable[..., Cluster], nursery: Nursery, tmp_path: Path, mode: str
) -> None:
    kept = tmp_path / "checkpoints"
    first = make_cluster(checkpoint_dir=kept, lease=LEASE)
    running = start(nursery, first, mode, tmp_path / "first")
    try:
        until(lambda: all(len(samples) > 20 for samples in began(tmp_path / "first")), "training", WAIT_SECONDS)
        for process in running:
            process.send_signal(signal.SIGTERM)
        assert [process.wait(WAIT_SECONDS) for process in running] == [128 + signal.SIGTERM] * WORKERS
        until(lambda: not first.coordinator.jobs(), "the job's end", WAIT_SECONDS)
        store = CheckpointStore(kept)
        manifest = store.manifest("default", store.names("default")[-1])
        assert (sorted(manifest.workers), manifest.without) == ([0, 1], ())
        first.stop()
        second = make_cluster(checkpoint_dir=kept, restore=True, lease=LEASE)
        running += start(nursery, second, mode, tmp_path / "second")
        assert [process.wait(WAIT_SECONDS) for process in running[WORKERS:]] == [0] * WORKERS
    finally:
        for process in running:
            process.kill()
    before, after = began(tmp_path / "first"), began(tmp_path / "second")
    cells = [json.loads((tmp_path / "second" / f"cells-{rank}").read_text()) for rank in range(WORKERS)]
    steps = [max(cell) for cell in zip(*cells, strict=True)]
    assert {sample for samples in before + after for sample in samples} == set(range(SAMPLES))
    assert min(steps) > 0, "a sample was lost"
    for rank in range(WORKERS):
        assert len(set(after[rank])) == len(after[rank])
        again = set(before[rank]) & set(after[rank])
        assert again <= set(before[rank][-1:]), "only a step that had no effect is made again"
        assert all(steps[sample] == (0.5 if mode == "sync" else 1.0) for sample in again)
