"""Models that the modes with servers refuse, each with what to do instead. Nothing has joined a job then."""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
from torch import nn

from ps_protocol.errors import InvalidRequest, Unsupported
from ps_protocol.tensors import BYTES_NAMES, DTYPE_NAMES


def refuse_lazy(model: nn.Module) -> None:
    """Raises InvalidRequest for a tensor that has no shape yet."""
    for key, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if nn.parameter.is_lazy(tensor):
            owner = model.get_submodule(key.rpartition(".")[0])
            raise InvalidRequest(
                f"{key} of a {type(owner).__name__} has no shape yet: run one batch through the model before prepare"
            )


def refuse_wrapped(model: nn.Module) -> None:
    """Raises Unsupported for a model in DistributedDataParallel."""
    for module in model.modules():
        if isinstance(module, nn.parallel.DistributedDataParallel):
            raise Unsupported("the model is wrapped in DistributedDataParallel; hand the plain model to prepare")


def refuse_sharded(model: nn.Module) -> None:
    """Raises Unsupported for a model of FSDP or with DTensors, of which this process has a part."""
    fsdp = _class_if_imported("torch.distributed.fsdp", "FullyShardedDataParallel")
    name = next((type(module).__name__ for module in model.modules() if fsdp and isinstance(module, fsdp)), None)
    distributed = _class_if_imported("torch.distributed.tensor", "DTensor")
    for key, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if distributed is not None and isinstance(tensor, distributed):
            name = f"{key} is a DTensor"
            break
    if name is not None:
        raise Unsupported(
            f"the model is sharded over a process group ({name}), and a worker of a parameter server holds the whole "
            "model: hand the plain model to prepare, before fully_shard, FSDP or parallelize_module; in place of the "
            "sharding, activation checkpointing and smaller batches save memory"
        )


def _class_if_imported(module: str, name: str) -> type | None:
    """Returns a class if something has imported its module: otherwise no object is of that class."""
    return getattr(sys.modules.get(module), name, None)


def refuse_synchronised(model: nn.Module) -> None:
    """Raises Unsupported for a SyncBatchNorm, which would silently be a BatchNorm: it needs a process group."""
    for key, module in model.named_modules():
        if isinstance(module, nn.SyncBatchNorm):
            raise Unsupported(
                f"{key or 'the model'} is a SyncBatchNorm, which takes its statistics over a process group, and there "
                "is none with servers: each worker would silently use those of its own batch. Leave "
                "convert_sync_batchnorm out (BatchNorm: statistics of each worker), use GroupNorm, or train in mode ddp"
            )


def refuse_sparse(model: nn.Module) -> None:
    """Raises Unsupported for an embedding with sparse gradients. In local:H no gradient leaves, and it may train."""
    for key, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise Unsupported(f"{key} makes sparse gradients; use sparse=False, or mode local:H")


def refuse_elements(key: str, tensor: torch.Tensor, is_trained: bool) -> None:
    """Raises Unsupported for a tensor whose elements a server cannot hold, or cannot train."""
    if hasattr(type(tensor), "__tensor_flatten__"):
        raise Unsupported(
            f"{key} is a {type(tensor).__name__}, a tensor made of others: hand the model to prepare as it was before "
            "it was quantized or packed, and convert what stays frozen afterwards: it does not travel again"
        )
    if tensor.layout is not torch.strided or tensor.dtype not in _KNOWN:
        raise Unsupported(
            f"{key}: expected a dense tensor of a plain type, got {tensor.dtype}, {tensor.layout}: make it one before "
            "prepare, or keep it out of the model's parameters and buffers (a plain attribute)"
        )
    if is_trained and tensor.dtype.is_complex:
        raise Unsupported(
            f"{key} is {tensor.dtype} and trained, and servers step real numbers: keep it as its real view, "
            "nn.Parameter(torch.view_as_real(w)), and take torch.view_as_complex(...) of that in forward"
        )
    if is_trained and tensor.dtype in BYTES_NAMES:
        raise Unsupported(
            f"{key} is {tensor.dtype} and in an optimizer, and servers step float32, bfloat16, float16 and float64: "
            "leave it out of the optimizer, or keep it in one of these and convert it in forward"
        )


_KNOWN = DTYPE_NAMES.keys() | BYTES_NAMES.keys()
REFUSALS: tuple[Callable[[nn.Module], None], ...] = (
    refuse_lazy,
    refuse_wrapped,
    refuse_sharded,
    refuse_synchronised,
    refuse_sparse,
)
