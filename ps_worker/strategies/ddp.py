"""Training with PyTorch's own DistributedDataParallel: the baseline, not weakened."""

from __future__ import annotations

import atexit
import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset

from ps_protocol.errors import InvalidRequest, Unsupported
from ps_worker.data.loaders import PreparedLoader, ShareSampler, prepared_loader, shard_loader, warning_once
from ps_worker.data.pass_position import SharePass
from ps_worker.metrics import ModelNumbers, WorkerMetrics
from ps_worker.model.optimizer import watch_steps
from ps_worker.strategies.strategy import Prepared
from ps_worker.tables.modules import looked_up, prepare_tables
from ps_worker.values import PrepareOptions

log = logging.getLogger("ps_worker")


class Ddp:
    """One process of a DDP group: NCCL when every worker of this host has a GPU of its own, gloo otherwise.

    MASTER_ADDR and MASTER_PORT must be set, as `torchrun` and `ps-worker run` do.
    """

    def __init__(self, rank: int, world_size: int, metrics: WorkerMetrics, device: torch.device) -> None:
        self.rank = self.exchange_rank = rank
        self.world_size = world_size
        self.clock = 0
        self._metrics = metrics
        self._device = device
        self._models: list[DistributedDataParallel] = []
        self._held: list[nn.Module] = []
        # By id, the parameters that there were when the models were wrapped. Held: no id becomes another's.
        self._parameters: dict[int, nn.Parameter] = {}
        self._frozen: set[int] = set()  # the ids of those that needed no gradient then
        _join_process_group(rank, world_size, device)
        self._end_watching = watch_steps(self._before_step)

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    @property
    def round(self) -> int:
        """Steps finished."""
        return self.clock

    def refresh(self) -> None:
        """Does nothing: the model has the only weights."""

    def global_values(self) -> Mapping[int, torch.Tensor]:
        """Returns an empty mapping: the model has the only weights."""
        return {}

    def prepare(
        self, models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer], options: PrepareOptions
    ) -> Prepared:
        """Wraps each model with parameters that train in DistributedDataParallel, with its default bucketing."""
        if options.group is not None:
            raise Unsupported("mode ddp has workers of one process: train a model in pieces in mode sync, or in single")
        tables = prepare_tables(models, optimizers, self.exchange, self.rank)
        self._metrics.watch_model(ModelNumbers(lambda: looked_up(tables)))
        wrapped = [self._wrapped(model, {"gradient_as_bucket_view": True, **options.ddp}) for model in models]
        self._parameters = {id(parameter): parameter for model in models for parameter in model.parameters()}
        self._frozen = {key for key, parameter in self._parameters.items() if not parameter.requires_grad}
        self._held = list(models)
        self._watch(optimizers)
        return wrapped, optimizers

    def begin_stage(
        self, models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer]
    ) -> Sequence[torch.optim.Optimizer]:
        """Returns the optimizers unchanged. The optimizers of earlier stages may step, too."""
        self._watch(optimizers)
        return optimizers

    def _watch(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        for optimizer in optimizers:
            self._metrics.watch_optimizer(optimizer, self._stepped)

    def _before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Raises InvalidRequest for a parameter that DDP does not know: it was frozen, or not there, when its model was
        wrapped.
        """
        if self.world_size == 1:
            return
        stepped = [each for group in optimizer.param_groups for each in group["params"] if each.grad is not None]
        others, unknown = {id(each) for each in stepped} - self._parameters.keys(), ""
        if any(id(each) in self._frozen for each in stepped):
            unknown = "was frozen"
        elif others and any(id(each) in others for model in self._held for each in model.parameters()):
            unknown = "was not there"
        if unknown:
            raise InvalidRequest(
                f"{type(optimizer).__name__} steps a parameter that {unknown} when prepare wrapped the model, and DDP "
                "averages the gradients of the others alone: each process would train it alone. Unfreeze all before "
                "prepare, put new layers into the model before it, and keep those that do not train yet out of the "
                "optimizer"
            )

    def _wrapped(self, model: nn.Module, options: dict[str, Any]) -> nn.Module:
        if not any(parameter.requires_grad for parameter in model.parameters()):
            return model  # a frozen teacher, say: DDP refuses what needs no gradient
        devices = {parameter.device for parameter in model.parameters()}
        # Of a model over several devices DDP wants to be told none.
        own = [self._device] if self._device.type == "cuda" and len(devices) == 1 else None
        self._models.append(DistributedDataParallel(model, device_ids=own, **options))
        return self._models[-1]

    def _stepped(self) -> int:
        self.clock += 1
        if self.clock == 1:
            self._warn_unless_run()
        return self.clock

    def _warn_unless_run(self) -> None:
        if self.world_size > 1 and self._models and not any(_has_run(model) for model in self._models):
            log.warning(
                "the first step was made, and no model that prepare returned has run: DDP averages the gradients of "
                "those, so this process trains alone. Write model, optimizer = session.prepare(model, optimizer), and "
                "call that model"
            )

    def prepare_loader(self, loader: DataLoader[Any], seed: int) -> PreparedLoader:
        """Returns the loader with this rank's share of its data."""
        share = shard_loader(loader, self._share, seed)
        if isinstance(share.sampler, ShareSampler):
            position = SharePass(share, share.sampler)
            return prepared_loader(share, self._device, self._metrics.timer, position.batches, position)
        begin: Callable[[], Iterator[Any]] = share.__iter__
        if isinstance(loader.dataset, IterableDataset):
            begin = warning_once(loader, self._share, begin)
        return prepared_loader(share, self._device, self._metrics.timer, begin)

    def _share(self) -> tuple[int, int]:
        return self.rank, self.world_size

    def keep(self, things: Sequence[Any], own: Sequence[Any] = ()) -> None:
        """Does nothing: there is no checkpoint to go back to."""

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """A `with` block in which backward passes communicate nothing."""
        with contextlib.ExitStack() as stack:
            for model in self._models:
                stack.enter_context(model.no_sync())
            yield

    def exchange(self, value: bytes, what: str) -> dict[int, bytes]:
        """Returns the values of all ranks, over the process group."""
        own = torch.from_numpy(np.frombuffer(bytearray(value), np.uint8)).to(self._device)
        sizes = [torch.zeros(1, dtype=torch.int64, device=self._device) for _ in range(self.world_size)]
        dist.all_gather(sizes, torch.tensor([len(value)], device=self._device))
        counts = [int(size) for size in sizes]
        padded = torch.zeros(max(counts), dtype=torch.uint8, device=self._device)
        padded[: len(own)] = own
        values = [torch.empty_like(padded) for _ in counts]
        dist.all_gather(values, padded)
        return {rank: values[rank][:count].cpu().numpy().tobytes() for rank, count in enumerate(counts)}

    def close(self) -> None:
        """Forgets the models. The process group stays until the process ends."""
        self._end_watching()
        self._models.clear()
        self._held.clear()
        self._parameters.clear()
        self._frozen.clear()


def _has_run(model: DistributedDataParallel) -> bool:
    """Whether a model has run forward. torch notes it for itself; a hook would go into what torch.compile compiles."""
    return bool(getattr(model, "_lazy_init_ran", True))


def _join_process_group(rank: int, world_size: int, device: torch.device) -> None:
    """Makes the process group, unless there is one. Raises InvalidRequest for one of another place, and if none can be
    made.
    """
    if dist.is_initialized():  # by the script, or by an earlier session of this process
        there = dist.get_rank(), dist.get_world_size()
        if there != (rank, world_size):
            raise InvalidRequest(
                f"the script's process group has rank {there[0]} of {there[1]}, and the session is rank {rank} of "
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


def _leave_process_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
