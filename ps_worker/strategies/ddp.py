"""Training with PyTorch's own DistributedDataParallel: the baseline, not weakened."""

from __future__ import annotations

import atexit
import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ps_protocol.errors import InvalidRequest
from ps_worker.strategies.strategy import Prepared


class Ddp:
    """One process of a DDP group: NCCL when every worker of this host has a GPU of its own, gloo otherwise.

    MASTER_ADDR and MASTER_PORT must be set, as `torchrun` and `ps-worker run` do.
    """

    def __init__(self, rank: int, world_size: int, device: torch.device) -> None:
        self.rank = rank
        self.world_size = world_size
        self._device = device
        self.options: Mapping[str, Any] = {}
        self.models: list[DistributedDataParallel] = []
        if dist.is_initialized():  # by the script, or by an earlier session of this process
            found = dist.get_rank(), dist.get_world_size()
            if found != (rank, world_size):
                raise InvalidRequest(
                    f"the script's process group has rank {found[0]} of {found[1]}, and the session is rank {rank} of "
                    f"{world_size}: leave init_process_group to the session, or give both the same"
                )
            return
        backend = "nccl" if device.type == "cuda" else "gloo"
        try:
            dist.init_process_group(backend, rank=rank, world_size=world_size)
        except (ValueError, dist.DistError) as error:
            raise InvalidRequest(
                f"DDP cannot start ({error}); launch with `ps-worker run --mode ddp`, or torchrun"
            ) from None
        # Not when the session ends: a group cannot be made twice at one address, and another session may follow.
        atexit.register(_leave_process_group)

    def share(self) -> tuple[int, int]:
        """The rank's share."""
        return self.rank, self.world_size

    def prepare(self, models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer]) -> Prepared:
        """Wraps each model that trains; its usual bucketing, with gradients as views into the buckets."""
        options = {"gradient_as_bucket_view": True, **self.options}
        made: list[nn.Module] = []
        for model in models:
            if not any(parameter.requires_grad for parameter in model.parameters()):
                made.append(model)  # a frozen teacher, say: DDP refuses what needs no gradient
                continue
            devices = {parameter.device for parameter in model.parameters()}
            # Of a model over several devices DDP wants to be told none.
            own = [self._device] if self._device.type == "cuda" and len(devices) == 1 else None
            wrapped = DistributedDataParallel(model, device_ids=own, **options)
            self.models.append(wrapped)
            made.append(wrapped)
        return made, optimizers

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside communicate nothing."""
        with contextlib.ExitStack() as stack:
            for model in self.models:
                stack.enter_context(model.no_sync())
            yield

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
        """Lets go of the models. The process group stays until the process ends."""
        self.models.clear()


def _leave_process_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
