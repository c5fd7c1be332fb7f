"""Tensors that the processes of a group hold in pieces: DTensors, as `fully_shard` and tensor parallelism make of a
model's parameters.

This process trains the local shard of a DTensor, which is a piece in the job: ps_protocol/pieces.py. Several
processes may hold a piece, or the whole tensor, alike: where a dimension of the mesh replicates it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import device_mesh

from ps_protocol.errors import InvalidRequest, Unsupported
from ps_protocol.layout import ParameterSpec, PiecePlace
from ps_protocol.tensors import DTYPE_NAMES

# Names of a mesh's dimension whose processes have the same samples, and each a part of their positions.
CONTEXT_PARALLEL = ("cp", "sp", "context_parallel", "sequence_parallel")


def is_sharded(tensor: Any) -> bool:
    """Whether a tensor is a DTensor."""
    return _is_dtensor(type(tensor))  # type: ignore[arg-type]  # classes are hashable


@cache  # asked of each parameter in each step
def _is_dtensor(kind: type) -> bool:
    return any(each.__name__ == "DTensor" for each in kind.__mro__)


def local(tensor: Any) -> Any:
    """Returns the local shard of a DTensor; any other tensor itself."""
    return tensor._local_tensor if is_sharded(tensor) else tensor


def like(tensor: Any, values: torch.Tensor) -> torch.Tensor:
    """Returns values of the shape of a tensor's local shard as a tensor of its kind: a DTensor that is cut alike."""
    if not is_sharded(tensor) or values.shape != tensor._local_tensor.shape:
        return values
    made: torch.Tensor = type(tensor.detach()).from_local(
        values, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )
    return made


def is_cut_alike(tensor: Any, other: Any) -> bool:
    """Whether two DTensors have one shape, and are cut in the same way."""
    return tensor.shape == other.shape and tuple(tensor.placements) == tuple(other.placements)


def cuts_of(tensor: Any, mesh: Any) -> list[int | None]:
    """Returns, for each dimension of a mesh, the dimension of a DTensor that is cut over it, or None.

    Raises Unsupported for a DTensor of another mesh, for partial sums and for strided shards.
    """
    kinds = {type(each).__name__ for each in tensor.placements}
    if tensor.device_mesh != mesh or not kinds <= {"Shard", "Replicate"}:
        placed = f"{tuple(tensor.placements)} over the mesh {tensor.device_mesh.mesh.tolist()}"
        raise Unsupported(f"a DTensor is placed {placed}: only shards and replicas over its parameter's mesh are kept")
    return [each.dim if _is_cut(each) else None for each in tensor.placements]


def cut_again(other: Any, here: torch.Tensor, cuts: Sequence[int | None], shape: Sequence[int]) -> torch.Tensor:
    """Returns the DTensor over another one's mesh that has this local shard, shape and `cuts_of`."""
    from torch.distributed.tensor import Replicate, Shard

    made: torch.Tensor = type(other.detach()).from_local(
        here,
        other.device_mesh,
        [Replicate() if dimension is None else Shard(dimension) for dimension in cuts],
        run_check=False,
        shape=torch.Size(shape),
        stride=torch.empty(tuple(shape), device="meta").stride(),
    )
    return made


def as_placed(tensor: Any) -> None:
    """Redistributes the gradient of a DTensor to the DTensor's placements: on a replicated one it may be a partial sum.
    A collective of its mesh, in all processes at the same point of backward.
    """
    gradient = tensor.grad
    if is_sharded(gradient) and tuple(gradient.placements) != tuple(tensor.placements):
        tensor.grad = gradient.redistribute(placements=tensor.placements)


def uses_fsdp(models: Iterable[nn.Module]) -> bool:
    """Whether `fully_shard` was called on any module."""
    return next(_fsdp_modules(models), None) is not None


def _fsdp_modules(models: Iterable[nn.Module]) -> Iterator[nn.Module]:
    for model in models:
        yield from (each for each in model.modules() if any(k.__name__ == "FSDPModule" for k in type(each).__mro__))


def is_offloaded(models: Iterable[nn.Module]) -> bool:
    """Whether a parameter's local shard is not on the devices of its mesh: `fully_shard` with CPUOffloadPolicy."""
    return any(is_sharded(each) and _is_elsewhere(each) for model in models for each in model.parameters())


def _is_elsewhere(tensor: Any) -> bool:
    here = local(tensor)
    return not here.is_meta and here.device.type != tensor.device_mesh.device_type


def data_share(models: Iterable[nn.Module], group: Any = None) -> tuple[int, int]:
    """Returns the share of a group's data that this process has, as (index, how many shares). Processes between which
    `fully_shard` cuts a model have different batches; processes of tensor or context parallelism have the same.

    group: as `prepare` takes it. A DeviceMesh may name a dimension of context parallelism
    Raises InvalidRequest if the mesh of `fully_shard` includes context parallelism, and no mesh has its dimension.
    """
    found: list[Any] = [p for each in _fsdp_modules(models) for p in each.parameters() if is_sharded(p)]
    if not found:
        return 0, 1
    tensor = max(found, key=lambda each: each.device_mesh.ndim)
    # The first dimension of the mesh. Of HSDP with one replica the second.
    dimension = 0 if _is_cut(tensor.placements[0]) or tensor.device_mesh.ndim == 1 else 1
    mesh = tensor.device_mesh
    first = _first_of_context(mesh, dimension, group)
    own = dist.get_rank()
    lines = mesh.mesh.movedim(dimension, -1).reshape(-1, mesh.shape[dimension]).tolist()
    line = next(each for each in lines if own in each)
    shares = list(dict.fromkeys(first.get(rank, rank) for rank in line))
    return shares.index(first.get(own, own)), len(shares)


def _first_of_context(mesh: Any, dimension: int, group: Any) -> dict[int, int]:
    """Returns by rank the lowest rank of its context-parallel group, which has the same samples. Empty: no mesh has a
    dimension of context parallelism. Only the dimension's name tells it from one of data parallelism.
    """
    root = _root_of(mesh)
    for each in (group, root):
        names = getattr(each, "mesh_dim_names", None) or ()
        over = [index for index, name in enumerate(names) if name in CONTEXT_PARALLEL]
        if over:
            lowest = each.mesh.amin(over, keepdim=True).expand_as(each.mesh)
            return dict(zip(each.mesh.flatten().tolist(), lowest.flatten().tolist(), strict=True))
    name = (mesh.mesh_dim_names or ("",) * mesh.ndim)[dimension]
    # Without context parallelism torchtitan flattens its one dimension dp_shard to one that it calls dp_shard_cp, too.
    is_flattened = name not in (root.mesh_dim_names or ())
    if not is_flattened and mesh.shape[dimension] > 1 and set(name.split("_")) & set(CONTEXT_PARALLEL):
        raise InvalidRequest(
            f"fully_shard cuts the model over a mesh whose dimension is called {name}: processes of one "
            "context-parallel group have the same samples, and the mesh does not say which these are. Hand over a "
            "DeviceMesh of the group that has the dimension by itself, prepare(..., group=mesh): mesh = "
            'init_device_mesh(..., (shares, size), mesh_dim_names=("dp", "cp")); size is 1 without context parallelism'
        )
    return {}


def _root_of(mesh: Any) -> Any:
    """Returns the mesh that a mesh was sliced or flattened from, or the mesh itself."""
    ask = getattr(mesh, "_get_root_mesh", None)
    if ask is not None:
        return ask()
    known: Any = getattr(device_mesh, "_mesh_resources", None)  # until torch 2.8
    return known.get_root_mesh(mesh) if hasattr(known, "get_root_mesh") else mesh


def piece_of(key: str, tensor: Any, ranks: Sequence[int]) -> ParameterSpec | None:
    """Returns the piece of a DTensor in this process, with no group yet; the whole parameter if all of it is here, None
    if nothing is.

    ranks: the group's processes
    Raises Unsupported for a DTensor of HSDP, one that is not on its mesh's devices, or one whose position in the whole
    is unknown; InvalidRequest for another mesh.
    """
    mesh = [int(rank) for rank in tensor.device_mesh.mesh.flatten()]
    # The mesh may have only some of the group's processes: the others then form meshes with the same parameter.
    if not set(mesh) <= set(ranks) or len(ranks) % len(mesh):
        raise InvalidRequest(
            f"{key} is sharded over the processes {mesh}, and the group that prepare got has {list(ranks)}: hand over "
            "the mesh that the model is sharded over"
        )
    if tensor.dtype not in DTYPE_NAMES:
        raise Unsupported(
            f"{key} is a DTensor of {tensor.dtype}, and pieces have one of {', '.join(DTYPE_NAMES.values())}"
        )
    _refuse_elsewhere(key, tensor)
    whole, shape = tuple(tensor.shape), tuple(tensor._local_tensor.shape)
    place = _place(key, tensor)
    if place.shape != shape:
        raise Unsupported(
            f"{key} is placed {tuple(tensor.placements)} over its mesh of {tuple(tensor.device_mesh.shape)}. There "
            f"this process has {place.shape} of its {whole}, and its local shard has {shape}"
        )
    if tensor._local_tensor.numel() == 0:
        return None
    is_cut = any(size > 1 and _is_cut(each) for size, each in _over_mesh(tensor)) or len(ranks) == 1
    piece = PiecePlace(whole, place.offsets) if is_cut and whole else None
    return ParameterSpec(key, shape, DTYPE_NAMES[tensor.dtype], None, piece=piece)


def _over_mesh(tensor: Any) -> list[tuple[int, Any]]:
    """Returns the size of each dimension of a DTensor's mesh, with its placement there."""
    return list(zip(tensor.device_mesh.shape, tensor.placements, strict=True))


def _is_cut(placement: Any) -> bool:
    return type(placement).__name__ in ("Shard", "_StridedShard")


@dataclass(frozen=True)
class _Place:
    """The position of a box in a tensor."""

    offsets: tuple[int, ...]
    shape: tuple[int, ...]


def _place(key: str, tensor: Any) -> _Place:
    """Returns the box of a DTensor in this process, cut as by torch.chunk: the last boxes may be shorter, or empty.

    `fully_shard` cuts the shard that tensor parallelism has made. If both cut the same dimension, torch calls its
    placement `_StridedShard`; it is applied last.
    """
    _refuse_replicas(key, tensor)
    offsets, shape = [0] * len(tensor.shape), list(tensor.shape)
    # `get_local_rank` would look for the process group. torch 2.13 gives DTensors with equal meshes one of these, whose
    # process group may have ended.
    coordinate = tensor.device_mesh.get_coordinate()
    each = list(enumerate(_over_mesh(tensor)))
    for mesh_dimension, (count, placement) in sorted(each, key=lambda e: type(e[1][1]).__name__ == "_StridedShard"):
        if not _is_cut(placement):
            continue
        cut = placement.dim
        size = -(-shape[cut] // count)
        first = min(shape[cut], size * coordinate[mesh_dimension])
        offsets[cut] += first
        shape[cut] = min(size, shape[cut] - first)
    return _Place(tuple(offsets), tuple(shape))


def _refuse_replicas(key: str, tensor: Any) -> None:
    """Raises Unsupported for parameters of HSDP, and for partial sums."""
    over = [(size, each) for size, each in _over_mesh(tensor) if size > 1]
    placed = f"{key} is placed {tuple(tensor.placements)} over its mesh of {tuple(tensor.device_mesh.shape)}"
    if any(not _is_cut(each) and type(each).__name__ != "Replicate" for _, each in over):
        raise Unsupported(f"{placed}, and a group trains parameters that are sharded or replicated")
    if len(over) > 1 and not _is_cut(over[0][1]) and _is_cut(over[1][1]):
        (replicas, _), (shards, _) = over[:2]
        raise Unsupported(
            f"{placed}: for HSDP have each of its {replicas} replicas be a group, which calls fully_shard over a mesh "
            f"of one dimension with its {shards} processes, as the servers combine the groups (ps-worker run --workers "
            f"{replicas} --group {shards})"
        )


def _refuse_elsewhere(key: str, tensor: Any) -> None:
    """Raises Unsupported for a shard that is not on its mesh's devices. `fully_shard` copies gradients to CPUs beside
    the computation, and a hook may get one whose copy is not finished.
    """
    if _is_elsewhere(tensor):
        raise Unsupported(
            f"{key} is on {local(tensor).device.type}, and its mesh is of {tensor.device_mesh.device_type}: a group "
            "trains shards that are on the devices of their mesh. Leave CPUOffloadPolicy out of fully_shard. If there "
            "is none, make the mesh of session.device.type, where prepare moves models"
        )
