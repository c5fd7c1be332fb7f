"""Which share of its group's data each process has: processes of one context-parallel group have the same one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from ps_protocol.errors import InvalidRequest
from ps_worker.model.job_spec import refused_of
from ps_worker.model.sharded import data_share

Meshes = tuple[DeviceMesh, DeviceMesh]  # of fully_shard, and of the group


def named(*names: str, shape: tuple[int, ...]) -> DeviceMesh:
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def flattened() -> Meshes:
    """As torchtitan folds context parallelism into the mesh of fully_shard."""
    whole = named("dp_shard", "cp", shape=(2, 2))
    return whole["dp_shard", "cp"]._flatten("dp_shard_cp"), named("any", shape=(4,))


def flattened_context_first() -> Meshes:
    whole = named("cp", "dp", shape=(2, 2))
    return whole["cp", "dp"]._flatten("fsdp"), whole


def with_tensor_parallel() -> Meshes:
    whole = named("dp", "context_parallel", "tp", shape=(1, 2, 2))
    return whole["dp", "context_parallel"]._flatten("fsdp"), whole


def by_the_group() -> Meshes:
    return named("fsdp", shape=(4,)), named("dp", "sp", shape=(2, 2))


def by_the_group_of_dp_cp() -> Meshes:
    return named("dp_cp", shape=(4,)), named("dp", "cp", shape=(4, 1))


def context_alone() -> Meshes:
    mesh = named("cp", shape=(4,))
    return mesh, mesh


def beside() -> Meshes:
    """fully_shard cuts each copy of the model that a context-parallel group has."""
    whole = named("dp", "cp", shape=(2, 2))
    return whole["dp"], whole


def without_context() -> Meshes:
    """torchtitan's name for it where context parallelism has one process: that dimension is left out."""
    whole = named("dp_shard", "tp", shape=(2, 2))
    return whole["dp_shard"]._flatten("dp_shard_cp"), whole


def unnamed() -> Meshes:
    mesh = init_device_mesh("cpu", (4,))
    return mesh, mesh


def process(rank: int, make: Callable[[], Meshes]) -> tuple[nn.Module, Any]:
    """The model of one of four processes, and the mesh of its group. Nothing is sent."""
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("fake", rank=rank, world_size=4, store=FakeStore())
    mesh, group = make()
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))
    fully_shard(model, mesh=mesh)
    return model, group


@pytest.mark.parametrize(
    ("make", "shares"),
    [
        (flattened, [(0, 2), (0, 2), (1, 2), (1, 2)]),
        (flattened_context_first, [(0, 2), (1, 2), (0, 2), (1, 2)]),
        (with_tensor_parallel, [(0, 1)] * 4),
        (by_the_group, [(0, 2), (0, 2), (1, 2), (1, 2)]),
        (by_the_group_of_dp_cp, [(0, 4), (1, 4), (2, 4), (3, 4)]),
        (context_alone, [(0, 1)] * 4),
        (beside, [(0, 2), (0, 2), (1, 2), (1, 2)]),
        (without_context, [(0, 2), (0, 2), (1, 2), (1, 2)]),
        (unnamed, [(0, 4), (1, 4), (2, 4), (3, 4)]),
    ],
)
def test_shares_of_the_data(make: Callable[[], Meshes], shares: list[tuple[int, int]]) -> None:
    for rank, expected in enumerate(shares):
        model, group = process(rank, make)
        assert data_share([model], group) == expected, rank


def one_dimension() -> Meshes:
    """Its name is in no other test: torch keeps what it has made for an equal mesh."""
    return named("all_cp", shape=(4,)), named("batch", shape=(4,))


def sliced() -> Meshes:
    whole = named("dp_cp", "tp", shape=(2, 2))
    return whole["dp_cp"], whole


@pytest.mark.parametrize(("make", "name"), [(one_dimension, "all_cp"), (sliced, "dp_cp")])
def test_a_mesh_that_includes_context_parallelism_and_does_not_say_where(make: Callable[[], Meshes], name: str) -> None:
    model, mesh = process(0, make)
    said = rf"a mesh whose dimension is called {name}: .* prepare\(\.\.\., group=mesh\): mesh = init_device_mesh"
    for group in (dist.group.WORLD, mesh):
        with pytest.raises(InvalidRequest, match=said):
            data_share([model], group)
    assert any(name in each for each in refused_of([model], [], mesh))
