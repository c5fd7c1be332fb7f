"""Tensors that the processes of a group hold in pieces: DTensors, as `fully_shard` makes of a model's parameters.

What this process trains of one is its local shard. A parameter of a job is then a piece: ps_protocol/pieces.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

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
    """Returns what of a tensor is in this process: the local shard of a DTensor, any other tensor itself."""
    return tensor._local_tensor if is_sharded(tensor) else tensor


def like(tensor: Any, values: torch.Tensor) -> torch.Tensor:
    """Returns values of the shape of a tensor's local shard as a tensor of its kind: a DTensor that is cut alike."""
    if not is_sharded(tensor) or values.shape != tensor._local_tensor.shape:
        return values
    made: torch.Tensor = type(tensor.detach()).from_local(
        values, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )
    return made


def piece_of(key: str, tensor: Any, ranks: Sequence[int]) -> ParameterSpec | None:
    """Returns the piece of a DTensor that is here, with no group yet; None: none of it is.

    ranks: of the group's processes
    Raises Unsupported for one that is not cut along one dimension over all of the group, InvalidRequest for another
    mesh.
    """
    mesh = [int(rank) for rank in tensor.device_mesh.mesh.flatten()]
    if sorted(mesh) != sorted(ranks):
        raise InvalidRequest(
            f"{key} is sharded over the processes {mesh}, and the group that prepare got has {list(ranks)}: hand over "
            "the mesh that the model is sharded over"
        )
    if tensor.dtype not in DTYPE_NAMES:
        raise Unsupported(
            f"{key} is a DTensor of {tensor.dtype}, and pieces have one of {', '.join(DTYPE_NAMES.values())}"
        )
    sizes = tensor.device_mesh.shape
    cuts = [(d, each) for d, each in enumerate(tensor.placements) if sizes[d] > 1 or each.is_shard()]
    is_cut = len(cuts) == 1 and type(cuts[0][1]).__name__ == "Shard"
    if not is_cut and len(ranks) > 1:
        raise Unsupported(
            f"{key} is placed {tuple(tensor.placements)} over its mesh of {tuple(sizes)}, and a group trains "
            f"parameters that are cut along one dimension over all of its processes: {_way_out(tensor)}"
        )
    whole, shape = tuple(tensor.shape), tuple(tensor._local_tensor.shape)
    offsets = [0] * len(whole)
    if is_cut:
        mesh_dimension, placement = cuts[0]
        cut, count = placement.dim, sizes[mesh_dimension]
        size = -(-whole[cut] // count)  # as torch.chunk cuts: the last pieces may be shorter, or empty
        offsets[cut] = min(whole[cut], size * tensor.device_mesh.get_local_rank(mesh_dimension))
    if tensor._local_tensor.numel() == 0:
        return None
    return ParameterSpec(key, shape, DTYPE_NAMES[tensor.dtype], None, piece=PiecePlace(whole, tuple(offsets)))


def _way_out(tensor: Any) -> str:
    """Returns what to do in place of the way in which a DTensor is placed."""
    dimensions = zip(tensor.device_mesh.shape, tensor.placements, strict=True)
    over = [(size, type(each).__name__) for size, each in dimensions if size > 1]
    if [name for _, name in over] == ["Replicate", "Shard"]:
        (replicas, _), (shards, _) = over
        return (
            f"for HSDP have each of its {replicas} replicas be a group, which calls fully_shard over a mesh of one "
            f"dimension with its {shards} processes, as the servers combine the groups (ps-worker run --workers "
            f"{replicas} --group {shards})"
        )
    return (
        "in place of tensor parallel, alone or with FSDP, call fully_shard over a mesh of one dimension with all "
        "processes of the group"
    )
