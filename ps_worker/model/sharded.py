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
from torch import nn

from ps_protocol.errors import InvalidRequest, Unsupported
from ps_protocol.layout import ParameterSpec, PiecePlace
from ps_protocol.tensors import DTYPE_NAMES


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


def data_share(models: Iterable[nn.Module]) -> tuple[int, int]:
    """Returns the share of a group's data that this process has, as (index, how many shares). Processes between which
    `fully_shard` cuts a model have different batches; processes of tensor parallelism have the same.
    """
    found: list[Any] = [p for each in _fsdp_modules(models) for p in each.parameters() if is_sharded(p)]
    if not found:
        return 0, 1
    tensor = max(found, key=lambda each: each.device_mesh.ndim)
    # The first dimension of the mesh. Of HSDP with one replica the second.
    dimension = 0 if _is_cut(tensor.placements[0]) or tensor.device_mesh.ndim == 1 else 1
    return tensor.device_mesh.get_local_rank(dimension), tensor.device_mesh.shape[dimension]


def piece_of(key: str, tensor: Any, ranks: Sequence[int]) -> ParameterSpec | None:
    """Returns the piece of a DTensor in this process, with no group yet; the whole parameter if all of it is here, None
    if nothing is.

    ranks: the group's processes
    Raises Unsupported for a DTensor of HSDP, or one whose position in the whole is unknown; InvalidRequest for another
    mesh.
    """
    mesh = [int(rank) for rank in tensor.device_mesh.mesh.flatten()]
    # A mesh of some of them: the same parameter is in the meshes of the others, too.
    if not set(mesh) <= set(ranks) or len(ranks) % len(mesh):
        raise InvalidRequest(
            f"{key} is sharded over the processes {mesh}, and the group that prepare got has {list(ranks)}: hand over "
            "the mesh that the model is sharded over"
        )
    if tensor.dtype not in DTYPE_NAMES:
        raise Unsupported(
            f"{key} is a DTensor of {tensor.dtype}, and pieces have one of {', '.join(DTYPE_NAMES.values())}"
        )
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
    each = list(enumerate(_over_mesh(tensor)))
    for mesh_dimension, (count, placement) in sorted(each, key=lambda e: type(e[1][1]).__name__ == "_StridedShard"):
        if not _is_cut(placement):
            continue
        cut = placement.dim
        size = -(-shape[cut] // count)
        first = min(shape[cut], size * tensor.device_mesh.get_local_rank(mesh_dimension))
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
