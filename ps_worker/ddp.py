"""Training with PyTorch's own DistributedDataParallel: the baseline, not weakened."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ps_protocol.errors import InvalidRequest


class Ddp:
    """One process of a DDP group: NCCL when every worker of this host has a GPU of its own, gloo otherwise.

    MASTER_ADDR and MASTER_PORT must be set, as `torchrun` and `ps-worker run` do.
    """

    def __init__(self, rank: int, world_size: int, device: torch.device) -> None:
        self.rank = rank
        self.world_size = world_size
        self._device = device
        self.options: Mapping[str, Any] = {}
        self.model: DistributedDataParallel | None = None
        backend = "nccl" if device.type == "cuda" else "gloo"
        try:
            dist.init_process_group(backend, rank=rank, world_size=world_size)
        except (ValueError, dist.DistError) as error:
            raise InvalidRequest(
                f"DDP cannot start ({error}); launch with `ps-worker run --mode ddp`, or torchrun"
            ) from None

    def share(self) -> tuple[int, int]:
        """The rank's share."""
        return self.rank, self.world_size

    def prepare(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Wraps the model; its usual bucketing, with gradients as views into the buckets."""
        devices = [self._device] if self._device.type == "cuda" else None
        options = {"gradient_as_bucket_view": True, **self.options}
        self.model = DistributedDataParallel(model, device_ids=devices, **options)
        return self.model, optimizer

    @property
    def is_main(self) -> bool:
        """Rank 0."""
        return self.rank == 0

    def exchange(self, value: bytes, what: str) -> dict[int, bytes]:
        """The values of all ranks, over the process group."""
        mine = torch.frombuffer(bytearray(value), dtype=torch.uint8).to(self._device)
        sizes = [torch.zeros(1, dtype=torch.int64, device=self._device) for _ in range(self.world_size)]
        dist.all_gather(sizes, torch.tensor([len(value)], device=self._device))
        counts = [int(size) for size in sizes]
        padded = torch.zeros(max(counts), dtype=torch.uint8, device=self._device)
        padded[: len(mine)] = mine
        found = [torch.empty_like(padded) for _ in counts]
        dist.all_gather(found, padded)
        return {rank: found[rank][:count].cpu().numpy().tobytes() for rank, count in enumerate(counts)}

    def close(self) -> None:
        """Leaves the process group."""
        if dist.is_initialized():
            dist.destroy_process_group()
