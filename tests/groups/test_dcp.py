"""Groups and torch.distributed.checkpoint (DCP): scripts save and load as plain FSDP2 scripts do, with any cut, and a
checkpoint of the servers is exported for them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file

from ps_server.storage.export import export
from tests.scripts.train_with_dcp import Options
from tests.tools.cluster import Cluster
from tests.tools.forkserver import ROOT, Nursery

SCRIPT = ROOT / "tests" / "scripts" / "train_with_dcp.py"
WAIT_SECONDS = 90
LEASE = 30.0

Tensors = dict[str, torch.Tensor]


def run(
    nursery: Nursery, address: str, job: str, directory: Path, options: Options, groups: int = 1
) -> tuple[Tensors, Tensors]:
    """What the processes of a job began with, and what they ended with: the same in all.

    Each group is started as a torchrun of its own starts it.
    """
    directory.mkdir()
    processes = {
        (group, member): nursery.run(
            SCRIPT,
            [directory, group, groups, member, json.dumps(options.__dict__)],
            directory / f"log-{group}-{member}",
            PS_SERVER=address,
            JOB=job,
            **({"RANK": str(member), "WORLD_SIZE": str(options.members)} if options.members else {}),
            **({"PS_GROUP_SIZE": str(options.members)} if options.members else {}),
        )
        for group in range(groups)
        for member in range(max(1, options.members))
    }
    codes = [process.wait(WAIT_SECONDS) for process in processes.values()]
    assert codes == [0] * len(codes), "\n".join(path.read_text()[-2000:] for path in sorted(directory.glob("log-*")))
    found = []
    for when in ("begin", "end"):
        first, *others = [load_file(directory / f"{when}-{group}-{member}.safetensors") for group, member in processes]
        assert all(same(each, first) for each in others)
        found.append(first)
    return found[0], found[1]


def same(found: Tensors, expected: Tensors) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


def test_what_a_group_saves_is_loaded_with_another_cut_to_the_bit(
    nursery: Nursery, shared: Cluster, job: str, tmp_path: Path
) -> None:
    """By larger groups, and by a plain script of one process, without servers."""
    folder = str(tmp_path / "folder")
    first = Options(2, saves=folder)
    _, end = run(nursery, shared.address, f"{job}.1", tmp_path / "first", first, groups=2)
    begin, _ = run(nursery, shared.address, f"{job}.2", tmp_path / "second", Options(4, loads=folder))
    assert same(begin, end)
    assert "optimizer/0/exp_avg" in begin
    begin, _ = run(nursery, "", "", tmp_path / "third", Options(0, loads=folder))
    assert same(begin, end)


def test_a_checkpoint_of_the_servers_is_exported_for_scripts_that_load_it(
    nursery: Nursery, make_cluster: Callable[..., Cluster], job: str, tmp_path: Path
) -> None:
    cluster = make_cluster(checkpoint_dir=tmp_path / "kept", lease=LEASE)
    _, end = run(nursery, cluster.address, job, tmp_path / "first", Options(2))
    for _ in range(2):  # over what is there, too
        export(tmp_path / "kept", job, None, tmp_path / "out", dcp=True)
    folder = str(tmp_path / "out" / "dcp")
    begin, _ = run(nursery, cluster.address, f"{job}.2", tmp_path / "second", Options(3, loads=folder))
    assert same(begin, end)
    begin, _ = run(nursery, "", "", tmp_path / "third", Options(0, loads=folder))
    assert same(begin, end)
