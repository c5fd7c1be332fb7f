"""In ddp each rank has a replica of a table, and all replicas are trained alike."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file

from tests.chaos.cluster import free_ports
from tests.tools.forkserver import ROOT, Nursery

SCRIPT = ROOT / "tests" / "scripts" / "train_tables.py"


def test_replicas_are_alike_to_the_bit_and_end_where_one_process_does(nursery: Nursery, tmp_path: Path) -> None:
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_ports(1)), "PYTHONWARNINGS": "error"}
    runs = [("single", 0, 1), ("ddp", 0, 2), ("ddp", 1, 2)]
    words, log = [tmp_path, "earlier"], tmp_path / "log"
    processes = [
        nursery.run(SCRIPT, words, log, PS_MODE=mode, PS_RANK=str(rank), PS_WORLD_SIZE=str(of), **where)
        for mode, rank, of in runs
    ]
    assert [process.wait(100) for process in processes] == [0] * 3, (tmp_path / "log").read_text()
    alone, *ranks = (load_file(tmp_path / f"{mode}-{rank}.safetensors") for mode, rank, _ in runs)
    assert alone["counts"].tolist() == ranks[0]["counts"].tolist()
    assert 0 < int(alone["counts"][1]) < 200, "some ids are not admitted yet"
    for name, expected in alone.items():
        assert torch.equal(ranks[0][name], ranks[1][name]), name
        assert torch.allclose(ranks[0][name].float(), expected.float(), atol=1e-5), name


def test_gradients_are_zeroed_in_every_way_that_torch_has(nursery: Nursery, tmp_path: Path) -> None:
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_ports(1)), "PYTHONWARNINGS": "error"}
    script, result = ROOT / "tests" / "scripts" / "zero_gradients.py", tmp_path / "found.json"
    processes = [
        nursery.run(script, [result], tmp_path / "log", PS_MODE="ddp", PS_RANK=str(rank), PS_WORLD_SIZE="2", **where)
        for rank in range(2)
    ]
    assert [process.wait(100) for process in processes] == [0] * 2, (tmp_path / "log").read_text()
    found = json.loads(result.read_text())
    assert len(found) == 6
    assert found == {name: [0.0, -1.0] for name in found}
