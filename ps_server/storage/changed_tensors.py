"""Tensors of a model that no optimizer steps and that training has changed, such as buffers.

Shards have the values with which the job began. Changed values are in each worker's own file of a checkpoint.
"""

from __future__ import annotations

import safetensors.torch
import torch

from ps_protocol.errors import CheckpointDamaged, InvalidRequest
from ps_protocol.job import JobSpec
from ps_protocol.layout import FROZEN
from ps_protocol.messages.workers import member_states
from ps_protocol.tensors import TORCH_DTYPES
from ps_server.storage.checkpoints import CheckpointStore
from ps_server.storage.manifest import Manifest


def changed_tensors(store: CheckpointStore, job: str, manifest: Manifest, spec: JobSpec) -> dict[int, torch.Tensor]:
    """Returns the frozen tensors that training has changed, by parameter, from the worker of the lowest rank.

    spec: the job of the checkpoint
    Raises CheckpointDamaged if they do not fit the job.
    """
    rank = min(manifest.workers, default=None)
    if rank is None:
        return {}
    frozen: dict[int, torch.Tensor] = {}
    try:
        content = store.read_worker(job, manifest.name, manifest.workers[rank].part)
        # In reverse, so that of several members' values those of the first member count.
        for state in reversed(member_states(content)) if spec.group_size > 1 else [content]:
            saved = safetensors.torch.load(state)
            frozen |= {int(key.removeprefix(FROZEN)): saved[key] for key in saved if key.startswith(FROZEN)}
        for index, tensor in frozen.items():
            parameter = spec.parameters[index]
            if tensor.shape != parameter.shape or tensor.dtype != TORCH_DTYPES[parameter.dtype]:
                raise ValueError(f"{parameter.name}: found {tuple(tensor.shape)} {tensor.dtype}")
    except (safetensors.SafetensorError, ValueError, IndexError, InvalidRequest) as error:
        raise CheckpointDamaged(f"the state of worker {rank} in checkpoint {manifest.name}: {error}") from None
    return frozen
