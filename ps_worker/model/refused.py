"""Checks for models that servers cannot train, before a worker joins a job, and in a dry run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ps_protocol.errors import InvalidRequest, Unsupported
from ps_worker.model.sharded import is_sharded

_WHOLE = (
    "hand the plain model to prepare. Each worker holds the whole model, maybe over several GPUs, and the servers hold "
    "the optimizer's state"
)
# By the name of a class (its package need not be installed): what it does to the model, and what to do instead.
_WRAPPERS = {
    "DistributedDataParallel": "is wrapped in DistributedDataParallel; hand the plain model to prepare",
    "FullyShardedDataParallel": (
        f"is sharded by FullyShardedDataParallel; {_WHOLE}. A group of processes may shard it with fully_shard (FSDP2)"
    ),
    "DeepSpeedEngine": f"is a DeepSpeedEngine, which steps an optimizer of its own; {_WHOLE}",
}


def refuse_lazy(model: nn.Module) -> None:
    """Raises InvalidRequest for a parameter without a shape."""
    for key, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if nn.parameter.is_lazy(tensor):
            owner = model.get_submodule(key.rpartition(".")[0])
            raise InvalidRequest(
                f"{key} of a {type(owner).__name__} has no shape yet: run one batch through the model before prepare"
            )


def refuse_meta(model: nn.Module) -> None:
    """Raises InvalidRequest for a parameter or buffer without memory."""
    for key, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.is_meta:
            raise InvalidRequest(
                f"{key} is on the meta device, without values: call model.to_empty(device=session.device) and set its "
                "values before prepare, the same in all members that hold it"
            )


LATER_IN_GROUP = "a worker that is a group of processes trains with the optimizers that it began with"
_SHARDED = (
    f"{_WHOLE}. If a worker is to be a group of processes, name them: prepare(..., group=mesh), see docs/groups.md"
)


def refuse_wrapped(model: nn.Module, in_group: bool = False) -> None:
    """Raises Unsupported for a model that another training library has wrapped: it would reduce gradients twice, or not
    all its parameters are in this process. in_group: the worker is a group of processes, so they need not be
    """
    for module in model.modules():
        for kind in type(module).__mro__:
            if kind.__name__ in _WRAPPERS:
                raise Unsupported(f"the model {_WRAPPERS[kind.__name__]}")
            if kind.__name__ == "FSDPModule" and not in_group:
                raise Unsupported(f"the model is sharded by fully_shard (FSDP2); {_SHARDED}")
    for key, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if is_sharded(tensor) and not in_group:
            raise Unsupported(f"{key} is a DTensor, of which each process has a piece; {_SHARDED}")


def refuse_sparse(model: nn.Module) -> None:
    """Raises Unsupported for layers with sparse gradients."""
    for key, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise Unsupported(f"{key} makes sparse gradients; use sparse=False, or mode local:H")


def has_scaler(things: Sequence[Any]) -> bool:
    """Whether a GradScaler that is not switched off is among things that `prepare` got."""
    return any(isinstance(each, torch.amp.GradScaler) and each.is_enabled() for each in things)


def refuse_scaler() -> None:
    """Raises Unsupported for a GradScaler in a pipeline: each process finds infinities in its own stage alone, so some
    would leave out a step for which the others wait."""
    raise Unsupported(
        "prepare got a GradScaler, and the members of this worker's group hold stages of a pipeline: it finds "
        "infinities in the gradients of one stage alone, and members would leave out unlike steps. Train in bfloat16 "
        'without it, or have all members leave out such a step: prepare(..., non_finite="skip")'
    )


def refuse_sync_batch_norm(model: nn.Module, members: int = 1) -> None:
    """Raises Unsupported for SyncBatchNorm, unless it averages over other processes than those of this worker.

    members: the processes that are this worker
    """
    for key, module in model.named_modules():
        named = any(kind.__name__ == "SyncBatchNorm" for kind in type(module).__mro__)  # torch's own, and Apex's
        if not named or _processes_of(module) > members:
            continue
        if members > 1:
            raise Unsupported(
                f"{key or 'the model'} is a SyncBatchNorm over the processes of this worker's group: each group would "
                "have statistics of its own. Use GroupNorm, or give it a process group of all workers' processes "
                "(convert_sync_batchnorm(model, process_group))"
            )
        raise Unsupported(
            f"{key or 'the model'} is a SyncBatchNorm, which needs a process group, and there is none: it would be "
            "a BatchNorm with each worker's own statistics. Leave convert_sync_batchnorm out if that will do, use "
            "GroupNorm, or train in mode ddp"
        )


def _processes_of(module: nn.Module) -> int:
    """Returns the number of processes over which a SyncBatchNorm averages."""
    if not (dist.is_available() and dist.is_initialized()):
        return 1
    return dist.get_world_size(getattr(module, "process_group", None))
