"""What groups cannot do is refused with the way out, before anything joins."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn.parallel import DistributedDataParallel

import ps_torch
from ps_protocol.convert import job_spec_data
from ps_protocol.errors import InvalidRequest, JobMismatch, Unsupported
from ps_protocol.job import JobSpec
from ps_protocol.layout import ParameterSpec, PiecePlace
from ps_worker.model.group_spec import described_together
from ps_worker.model.sharded import is_offloaded, piece_of
from tests.tools.cluster import TEST_SECONDS, Cluster
from tests.tools.forkserver import Nursery
from tests.tools.partitions import job_spec
from tests.tools.said import said_by_workers


def sharded(mesh: Any) -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    fully_shard(model, mesh=mesh)
    return model


def in_ddp() -> nn.Module:
    return DistributedDataParallel(nn.Linear(2, 2))


def in_fsdp() -> nn.Module:
    return FullyShardedDataParallel(nn.Linear(2, 2), device_id=torch.device("cpu"))


def in_deepspeed() -> nn.Module:
    class DeepSpeedEngine(nn.Linear):  # the package's has this name
        pass

    return DeepSpeedEngine(2, 2)


def with_table() -> nn.Module:
    return nn.ModuleDict({"rows": ps_torch.Embedding(4), "head": nn.Linear(4, 1)})


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.mark.parametrize(
    ("mode", "more", "said"),
    [
        ("local:30s", {}, "trains in mode sync, ssp:K, async, local:H or local:H/F, and the mode is local:30s"),
        (
            "sync",
            {"elastic": True, "rank": None, "world_size": None},
            "an elastic job has workers of one process: name the number of groups",
        ),
    ],
)
def test_what_groups_cannot_do_yet(
    shared: Cluster, job: str, mesh: Any, mode: str, more: dict[str, Any], said: str
) -> None:
    model = sharded(mesh)
    session = ps_torch.connect(shared.address, mode, **{"job": job, "rank": 0, "world_size": 1, **more})
    with session, pytest.raises(Unsupported, match=said):
        session.prepare(model, sgd(model), group=mesh)
    assert shared.coordinator.jobs().get(job) is None


@pytest.mark.filterwarnings("ignore:FSDP is switching:UserWarning")
@pytest.mark.parametrize(
    ("make", "said"),
    [
        (in_ddp, "the model is wrapped in DistributedDataParallel; hand the plain model to prepare"),
        (in_fsdp, r"the model is sharded by FullyShardedDataParallel; .* with fully_shard \(FSDP2\)"),
        (in_deepspeed, "the model is a DeepSpeedEngine, which steps an optimizer of its own"),
        (with_table, "workers that are groups of processes have no tables of rows, and the model has 'rows'"),
    ],
)
def test_models_that_no_group_trains(
    shared: Cluster, job: str, mesh: Any, make: Callable[[], nn.Module], said: str
) -> None:
    model = make()
    with shared.connect("sync", job=job) as session, pytest.raises(Unsupported, match=said):
        session.prepare(model, sgd(model), group=mesh)
    assert shared.coordinator.jobs().get(job) is None


# One process of two. Arguments: its number, the server, the job. Says what `prepare` says, of a worker that is both
# processes, of one that is this process alone in a process group of both, and of a group of this process in it.
NORMALISED = """
import sys
import torch, torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.device_mesh import init_device_mesh
import ps_torch

member, server, job = int(sys.argv[1]), sys.argv[2], sys.argv[3]
dist.init_process_group("gloo", init_method="file://" + sys.argv[4], rank=member, world_size=2)
both = init_device_mesh("cpu", (2,))
own = [dist.new_group([each]) for each in range(2)][member]

def prepared(what, rank, world_size, group):
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.SyncBatchNorm(2))
    if group is both:
        fully_shard(model, mesh=both)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ps_torch.connect(server, "sync", job=f"{job}-{what}", rank=rank, world_size=world_size) as session:
        try:
            session.prepare(model, optimizer, **({} if group is None else {"group": group}))
            print(what, "is prepared", flush=True)
        except ps_torch.Unsupported as error:
            print(what, "is refused:", error, flush=True)
    with ps_torch.connect(mode="single") as session:
        session.prepare(model, optimizer, **({} if group is None else {"group": group}))

prepared("group", 0, 1, both)
prepared("alone", member, 2, None)
prepared("within", member, 2, own)
"""


def test_statistics_that_a_group_would_synchronise_over_its_own_members(
    shared: Cluster, job: str, nursery: Nursery, tmp_path: Path
) -> None:
    """Those over other processes too are the script's own matter."""
    script = tmp_path / "train.py"
    script.write_text(NORMALISED)
    logs = [tmp_path / f"out-{member}" for member in range(2)]
    words: list[list[object]] = [[member, shared.address, job, tmp_path / "store"] for member in range(2)]
    processes = [nursery.run(script, words[member], log) for member, log in enumerate(logs)]
    codes = [process.wait(TEST_SECONDS) for process in processes]
    for text in (log.read_text() for log in logs):
        assert codes == [0, 0], text
        said = "1 is a SyncBatchNorm over the processes of this worker's group: each group would have statistics"
        assert f"group is refused: {said}" in text
        assert text.count(said) == 2, "in the dry run, too"
        assert "alone is prepared" in text
        assert "within is prepared" in text
    assert shared.coordinator.jobs().get(f"{job}-group") is None


def test_mode_ddp_has_no_groups(mesh: Any) -> None:
    model = sharded(mesh)
    with (
        ps_torch.connect(mode="ddp", rank=0, world_size=1) as session,
        pytest.raises(Unsupported, match="mode ddp has workers of one process: train a model in pieces in mode sync"),
    ):
        session.prepare(model, sgd(model), group=mesh)


def test_a_parameter_that_is_not_sharded(shared: Cluster, job: str, mesh: Any) -> None:
    model = nn.Sequential(fully_shard(nn.Linear(3, 2), mesh=mesh), nn.Linear(2, 1))
    with shared.connect("sync", job=job) as session, pytest.raises(Unsupported, match=r"1\.weight is whole in each"):
        session.prepare(model, sgd(model), group=mesh)
    assert shared.coordinator.jobs().get(job) is None


@pytest.mark.parametrize("given", [object(), "mesh"])
def test_a_group_that_is_none(shared: Cluster, job: str, mesh: Any, given: object) -> None:
    model = sharded(mesh)
    with shared.connect("sync", job=job) as session, pytest.raises(InvalidRequest, match="takes a DeviceMesh or a"):
        session.prepare(model, sgd(model), group=given)


@pytest.mark.parametrize(("size", "said"), [("2", "a group of 1"), ("1", None)])
def test_a_group_of_another_size_than_the_launcher_started(
    shared: Cluster, job: str, mesh: Any, size: str, said: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PS_GROUP_SIZE", size)
    model = sharded(mesh)
    with shared.connect("sync", job=job) as session:
        if said is None:
            session.prepare(model, sgd(model), group=mesh)
            return
        with pytest.raises(InvalidRequest, match=rf"has started 2 processes .* \(--group 2\), and prepare got {said}:"):
            session.prepare(model, sgd(model), group=mesh)
    assert shared.coordinator.jobs().get(job) is None


def test_a_group_without_a_process_group(shared: Cluster, job: str) -> None:
    model = nn.Linear(2, 1)
    with shared.connect("sync", job=job) as session, pytest.raises(InvalidRequest, match="init_process_group"):
        session.prepare(model, sgd(model), group=object())


def test_what_an_optimizer_trains_stays_as_it_is(shared: Cluster, job: str, mesh: Any) -> None:
    model = sharded(mesh)
    with shared.connect("sync", job=job) as session:
        model, optimizer = session.prepare(model, sgd(model), group=mesh)
        with pytest.raises(Unsupported, match="trains with the optimizers that it began with"):
            session.prepare(torch.optim.Adam(model.parameters()))
        with pytest.raises(Unsupported, match="trains the parameters that it began with"):
            optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        assert session.clock == 1


class Mesh:
    """A mesh of processes, as far as a piece depends on it."""

    device_type = "cpu"

    def __init__(self, *shape: int, at: int = 0) -> None:
        self.mesh, self.shape, self._at = torch.arange(int(torch.tensor(shape).prod())).view(shape), shape, at

    def get_coordinate(self) -> tuple[int, ...]:
        return (self._at,) * len(self.shape)


def dtensor(mesh: Mesh, placements: list[Placement], whole: tuple[int, ...], here: tuple[int, ...]) -> Any:
    """A DTensor, as far as a piece depends on it: its class is found by its name."""
    made = type("DTensor", (), {})()
    made.__dict__.update(device_mesh=mesh, placements=placements, shape=whole, dtype=torch.float32)
    made._local_tensor = torch.zeros(here)
    return made


@pytest.mark.parametrize(
    ("placements", "shape", "whole", "here", "at", "piece"),
    [
        ([Shard(0)], (2,), (5, 4), (3, 4), 0, PiecePlace((5, 4), (0, 0))),
        ([Shard(0)], (2,), (5, 4), (2, 4), 1, PiecePlace((5, 4), (3, 0))),
        ([Shard(1)], (2,), (5, 4), (5, 2), 1, PiecePlace((5, 4), (0, 2))),
        ([Shard(0)], (4,), (5,), (1,), 2, PiecePlace((5,), (4,))),
        ([Shard(0)], (4,), (5,), (0,), 3, None),
        ([Replicate(), Shard(0)], (1, 2), (5, 4), (2, 4), 1, PiecePlace((5, 4), (3, 0))),
        ([Replicate()], (2,), (5, 4), (5, 4), 1, None),
        ([Shard(0), Replicate()], (2, 2), (5, 4), (2, 4), 1, PiecePlace((5, 4), (3, 0))),
        ([Shard(0), Shard(1)], (2, 2), (5, 4), (2, 2), 1, PiecePlace((5, 4), (3, 2))),
        ([_StridedShard(0, split_factor=2), Shard(0)], (2, 2), (11,), (2,), 1, PiecePlace((11,), (9,))),
    ],
)
def test_where_a_piece_lies(
    placements: list[Placement],
    shape: tuple[int, ...],
    whole: tuple[int, ...],
    here: tuple[int, ...],
    at: int,
    piece: Any,
) -> None:
    mesh = Mesh(*shape, at=at)
    found = piece_of("w", dtensor(mesh, placements, whole, here), range(mesh.mesh.numel()))
    assert (None if found is None else found.piece) == piece


@pytest.mark.parametrize(
    ("placements", "shape", "said"),
    [
        ([Partial()], (2,), "a group trains parameters that are sharded or replicated"),
        ([Replicate(), Shard(0)], (2, 3), r"for HSDP have each of its 2 replicas .* \(.* --workers 2 --group 3\)"),
        ([Replicate(), Shard(0), Replicate()], (3, 2, 1), r"for HSDP .* --workers 3 --group 2"),
    ],
)
def test_a_parameter_that_is_placed_otherwise(placements: list[Placement], shape: tuple[int, ...], said: str) -> None:
    mesh = Mesh(*shape)
    with pytest.raises(Unsupported, match=rf"w is placed .*{said}"):
        piece_of("w", dtensor(mesh, placements, (8, 8), (4, 8)), range(mesh.mesh.numel()))


def test_a_parameter_keeps_an_equal_mesh_of_a_process_group_that_has_ended(tmp_path: Path) -> None:
    """torch gives DTensors with equal meshes one of these: the first, also when its process group has ended."""
    for own in (True, False):
        dist.init_process_group("gloo", init_method=f"file://{tmp_path}/{own}", rank=0, world_size=1)
        mesh = DeviceMesh.from_group(dist.new_group([0]), "cpu") if own else init_device_mesh("cpu", (1,))
        weight = sharded(mesh)[0].weight  # type: ignore[index]
        dist.destroy_process_group()
    with pytest.raises(RuntimeError, match="process group"):
        weight.device_mesh.get_local_rank()  # type: ignore[union-attr, operator]
    found = piece_of("weight", weight, [0])
    assert found is not None
    assert found.piece == PiecePlace((2, 3), (0, 0))


def test_a_piece_of_a_type_that_servers_do_not_have() -> None:
    cut = dtensor(Mesh(2), [Shard(0)], (8, 8), (4, 8))
    cut.dtype = torch.float8_e4m3fn
    with pytest.raises(Unsupported, match=r"w is a DTensor of torch\.float8_e4m3fn, and pieces have one of float32, "):
        piece_of("w", cut, range(2))


def test_a_shard_that_is_not_where_its_placement_says() -> None:
    with pytest.raises(Unsupported, match=r"has \(4, 8\) of its \(8, 8\), and its local shard has \(3, 8\)"):
        piece_of("w", dtensor(Mesh(2), [Shard(0)], (8, 8), (3, 8)), range(2))


def test_a_shard_that_fully_shard_keeps_on_cpus_for_a_mesh_of_gpus() -> None:
    mesh = Mesh(2)
    cut = dtensor(mesh, [Shard(0)], (8, 8), (4, 8))
    model: Any = SimpleNamespace(parameters=lambda: [cut])
    assert piece_of("w", cut, range(2)) is not None
    assert not is_offloaded([model])
    mesh.device_type = "cuda"
    assert is_offloaded([model])  # prepare leaves it there
    with pytest.raises(Unsupported, match=r"w is on cpu, and its mesh is of cuda: .* Leave CPUOffloadPolicy out of"):
        piece_of("w", cut, range(2))
    cut._local_tensor = cut._local_tensor.to("meta")  # has no values, which is refused by itself
    assert not is_offloaded([model])


def test_a_parameter_over_other_processes() -> None:
    with pytest.raises(InvalidRequest, match=r"w is sharded over the processes \[0, 1\], and the group"):
        piece_of("w", dtensor(Mesh(2), [Shard(0)], (4,), (2,)), [0, 1, 2])


def changed(model: nn.Module, change: Callable[[Any], object]) -> None:
    with torch.no_grad():
        change(model[0].weight)  # type: ignore[index]


@pytest.mark.parametrize(
    "change",
    [lambda w: w.mul_(2), lambda w: w.data.mul_(2), lambda w: w.to_local().mul_(2)],
    ids=["op", "data", "local"],
)
def test_weights_that_a_script_changes_count(
    shared: Cluster, job: str, mesh: Any, change: Callable[[DTensor], object]
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 2, bias=False))
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with shared.connect("sync", job=job) as session:
        model, optimizer = session.prepare(model, optimizer, group=mesh)
        expected = model[0].weight.full_tensor().detach().clone()
        for _ in range(2):
            model(torch.ones(1, 3)).sum().backward()
            changed(model, change)
            optimizer.step()
            optimizer.zero_grad()
            expected = 2 * expected - 0.5
        assert torch.equal(model[0].weight.full_tensor(), expected)


class Told:
    """A group of two members, of which the other one describes another job, and has the same values."""

    size, member, pipeline_stages = 2, 0, (0, 0)

    def __init__(self, other: JobSpec) -> None:
        self._others = [json.dumps(job_spec_data(other)).encode()]

    def all_through(self, make: Callable[[], Any]) -> Any:
        return make()

    def gather(self, own: bytes) -> list[bytes]:
        return [own, self._others.pop() if self._others else own]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"dtype": "bfloat16"}, "dtype is 'float32' and 'bfloat16'"),
        ({"param_group": 1}, "param_group is 0 and 1"),
        ({"piece": PiecePlace((6, 3), (2, 0))}, r"whole_shape=\(4, 3\).* and .*whole_shape=\(6, 3\)"),
    ],
)
def test_a_piece_that_members_hold_alike_and_describe_in_unlike_ways(more: dict[str, Any], said: str) -> None:
    """As both tensor parallelism and `fully_shard` leave it to processes of unlike scripts."""
    piece = ParameterSpec("up.weight", (2, 3), "float32", 0, piece=PiecePlace((4, 3), (2, 0)))
    spec = replace(job_spec(), world_size=1, parameters=(piece,))
    other: Any = Told(replace(spec, group_size=2, parameters=(replace(piece, **more),)))
    with pytest.raises(JobMismatch, match=f"members 0 and 1 .* hold the same of up.weight, .*: .*{said}"):
        described_together(other, lambda: (spec, [torch.zeros(2, 3)]))
    alike: Any = Told(replace(spec, group_size=2))
    combined, _ = described_together(alike, lambda: (spec, [torch.zeros(2, 3)]))
    assert combined.parameters == (piece,)


# -- what mode single says of it ---------------------------------------------------------------------------------------


def test_single_says_nothing_of_a_group_that_servers_would_train(mesh: Any, caplog: pytest.LogCaptureFixture) -> None:
    model = sharded(mesh)
    with ps_torch.connect(mode="single") as session:
        session.prepare(model, sgd(model), group=mesh)
    assert said_by_workers(caplog) == []


def test_single_says_what_servers_would_refuse_of_a_group(
    shared: Cluster, job: str, mesh: Any, caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    fully_shard(model[0], mesh=mesh)
    with ps_torch.connect(mode="single") as session:
        session.prepare(model, sgd(model), group=mesh)
    [record] = said_by_workers(caplog)
    with shared.connect("sync", job=job) as session, pytest.raises(Unsupported) as refused:
        session.prepare(model, sgd(model), group=mesh)
    assert record.getMessage() == f"in sync, ssp and async this is refused: {refused.value}"
    assert str(refused.value).startswith("1.weight is whole in each process of the group")


def test_single_says_that_a_group_is_not_initialised_or_goes_on_with_other_optimizers(
    mesh: Any, caplog: pytest.LogCaptureFixture
) -> None:
    model = sharded(mesh)
    with ps_torch.connect(mode="single") as session:
        model, _ = session.prepare(model, sgd(model), group=mesh)
        session.prepare(torch.optim.Adam(model.parameters()))
    [record] = said_by_workers(caplog)
    assert "is refused: a worker that is a group of processes trains with the optimizers that it" in record.getMessage()
    caplog.clear()
    dist.destroy_process_group()
    plain = nn.Linear(3, 2)
    with ps_torch.connect(mode="single") as session:
        session.prepare(plain, sgd(plain), group=mesh)
    [record] = said_by_workers(caplog)
    assert "is refused: prepare(..., group=...) needs a process group" in record.getMessage()
