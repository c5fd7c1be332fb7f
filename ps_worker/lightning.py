"""Lightning on parameter servers: a strategy for Trainer, and one for Fabric. Needs the package `lightning`.

    trainer = Trainer(strategy="ps", ...)                             # after `import ps_torch.lightning`
    trainer = Trainer(strategy=ParameterServerGroupStrategy(...))     # in place of ModelParallelStrategy
    fabric = Fabric(strategy=FabricParameterServerStrategy(), ...)

With the first and the last each worker is one process with one device, started by `ps-worker run`, torchrun or another
launcher; with the second a worker is a group of processes. Lightning's own collectives become those of the session, so
that metrics logged with `sync_dist=True` are means over all workers.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.environments import TorchElasticEnvironment
from lightning.fabric.strategies.strategy import Strategy as FabricStrategy
from lightning.fabric.strategies.strategy import _BackwardSyncControl
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch.strategies import ModelParallelStrategy, ParallelStrategy, StrategyRegistry
from lightning.pytorch.strategies import Strategy as TrainerStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from ps_protocol.errors import InvalidRequest, Unsupported
from ps_runtime.launch_id import launched_group_size
from ps_runtime.rank import TORCHRUN
from ps_worker.connecting import connect, refuse_elastic
from ps_worker.data.loaders import shard_loader
from ps_worker.model.optimizer import ServerOptimizer
from ps_worker.session import Session

NAME = "ps"


def _refuse_group(instead: str) -> None:
    """Raises Unsupported if a launcher has started this process as one of several that are a worker."""
    if launched_group_size() > 1:
        raise Unsupported(
            f"the launcher has started {launched_group_size()} processes as this worker, and this strategy trains one "
            f"process a worker: take {instead}"
        )


def _say_steps(session: Session, trainer: Any) -> None:
    """Tells those who watch how many steps there will be, where one optimizer makes a known number of them."""
    steps = trainer.estimated_stepping_batches - trainer.global_step
    if len(trainer.optimizers) == 1 and 0 < steps < math.inf:
        session.progress(total=session.clock + int(steps))


class _EarlyLoaders:
    """Loaders that Lightning makes before the worker has joined, because `configure_optimizers` reads
    `trainer.estimated_stepping_batches`. Lightning would train with them, so it makes them anew once the optimizers are
    there. The early ones have the length of the share.
    """

    def __init__(self) -> None:
        # By id of a divided loader: that loader, and the original one
        self._undivided: dict[int, tuple[Any, DataLoader[Any]]] = {}

    def divided(self, loader: Any, rank: int, count: int) -> Any:
        """Returns a loader with part `rank` of `count` of the data. Raises Unsupported, InvalidRequest."""
        if count == 1 or not isinstance(loader, DataLoader):
            return loader
        divided = shard_loader(loader, lambda: (rank, count), seed=0)
        self._undivided[id(divided)] = divided, loader
        return divided

    def forget(self, trainer: Any) -> None:
        """Has Lightning make the loaders of `fit` anew, from those of the user."""
        combined = trainer.fit_loop._combined_loader
        if combined is not None:  # it may be the user's own, whose loaders Lightning has replaced
            combined.flattened = [self._undivided.get(id(each), (None, each))[1] for each in combined.flattened]
            trainer.fit_loop._combined_loader = None
        self._undivided.clear()


def _is_fitting(module: Any) -> bool:
    """Whether Lightning is in `fit`, with this module."""
    return module is not None and module.trainer.state.fn == TrainerFn.FITTING


class _OnSession:
    """The methods of both strategies that use a session. Before `prepare` collectives return the worker's own value."""

    def __init__(self, session: Session | None, options: Mapping[str, Any]) -> None:
        self.session = connect() if session is None else session
        refuse_elastic(self.session, "Lightning")
        self._options = options
        self._joined = False
        # It decides which worker logs; Lightning itself reads launchers' variables.
        rank_zero_only.rank = self.session.rank

    def _prepare(self, *things: Any, **more: Any) -> tuple[Any, ...]:
        if self._joined:
            raise InvalidRequest(
                "this strategy's session has its models already, and a session has them once: train again with a new "
                "strategy, over connect(job=...) with another name. Of several models hand all to session.prepare "
                "first, with their optimizers; Fabric's setup takes them then as they are"
            )
        prepared = self.session.prepare(*things, **self._options, **more)
        self._joined = True
        rank_zero_only.rank = self.session.rank
        return prepared  # type: ignore[no-any-return]

    @property
    def root_device(self) -> torch.device:
        """The session's device."""
        return self.session.device

    @property
    def is_distributed(self) -> bool:
        """Whether data is divided, and metrics are computed over several workers: not if nothing is trained."""
        return self._joined and self.session.world_size > 1

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int] | None:
        """This worker's share of the data, for the DistributedSampler that Lightning puts into loaders."""
        return {"num_replicas": self.session.world_size, "rank": self.session.rank} if self.is_distributed else None

    @property
    def is_global_zero(self) -> bool:
        """Whether this is the worker that writes files."""
        return self.session.is_main if self._joined else self.session.rank == 0

    @property
    def global_rank(self) -> int:
        """The session's rank."""
        return self.session.rank

    @property
    def local_rank(self) -> int:
        """This worker's number among those of its host."""
        return self.session.local_rank

    @property
    def world_size(self) -> int:
        """How many workers take part."""
        return self.session.world_size

    def process_dataloader(self, dataloader: Any) -> Any:
        """Returns a loader of batches on the session's device; the loader itself if nothing is trained."""
        if not self._joined or not isinstance(dataloader, DataLoader):
            return dataloader
        return self.session.prepare(dataloader)

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Returns the mean over workers, or the sum, the largest, the smallest; other values than tensors are returned
        unchanged.

        Raises Unsupported for other operations.
        """
        if not self._joined or not isinstance(tensor, torch.Tensor):
            return tensor
        name = "mean" if reduce_op is None else str(reduce_op).rpartition(".")[2].lower()
        if name in ("mean", "avg"):
            return self.session.mean(tensor.detach())
        every = torch.stack(self.session.gather(tensor.detach()))
        match name:
            case "sum":
                return every.sum(0)
            case "max":
                return every.amax(0)
            case "min":
                return every.amin(0)
        raise Unsupported(f"over workers there are mean, sum, max and min, got reduce_op={reduce_op!r}")

    all_reduce = reduce  # Fabric's name

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Returns one decision for all workers: whether all of them decided so, or any."""
        if not self._joined:
            return decision
        decided = [bool(each) for each in self.session.gather(bool(decision))]
        return False not in decided if all else True in decided

    def all_gather(self, tensor: torch.Tensor, group: Any = None, sync_grads: bool = False) -> torch.Tensor:
        """Returns the tensors of all workers, stacked in the order of ranks: (workers, *shape). Raises Unsupported.

        sync_grads: gradients do not flow back to other workers
        """
        if not self._joined:
            return tensor
        if sync_grads and tensor.requires_grad:
            raise Unsupported(
                "all_gather(sync_grads=True): gradients do not flow between workers; use sync_grads=False"
            )
        return torch.stack(self.session.gather(tensor.detach()))

    def barrier(self, name: str | None = None) -> None:
        """Returns when every worker has called it."""
        if self._joined:
            self.session.barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Returns the value of one worker, for all. Raises Unsupported for a value that a session cannot send."""
        if not self._joined:
            return obj
        if isinstance(obj, os.PathLike):
            return type(obj)(self.session.broadcast(os.fspath(obj), src))  # type: ignore[call-arg]
        return self.session.broadcast(obj, src)


class ParameterServerStrategy(_OnSession, ParallelStrategy):
    """Trains a LightningModule in the session's mode: `Trainer(strategy="ps")`, or an object of this class.

    A strategy serves one `fit`; `validate`, `test` and `predict` may come before or after it. Rank 0 writes
    checkpoints, which contain the weights and the whole optimizer state.

    Args:
        session: From `ps_torch.connect`; by default a new one.
        options: Options of `Session.prepare`, such as bucket_bytes, gradient_wire and seed.
    """

    strategy_name = NAME
    optimizers: Any  # these are Lightning's
    lr_scheduler_configs: Any

    def __init__(self, session: Session | None = None, **options: Any) -> None:
        _refuse_group("ParameterServerGroupStrategy, which is Lightning's ModelParallelStrategy on servers")
        _OnSession.__init__(self, session, options)
        ParallelStrategy.__init__(self, parallel_devices=[self.session.device])
        self._early = _EarlyLoaders()

    @property
    def is_distributed(self) -> bool:
        """Whether data is divided: in `fit`, of several workers, and in what comes after it."""
        return (self._joined or _is_fitting(self.lightning_module)) and self.session.world_size > 1

    def process_dataloader(self, dataloader: Any) -> Any:
        """Returns a loader of batches on the session's device; the loader itself if nothing is trained."""
        if not self._joined and _is_fitting(self.lightning_module):
            return self._early.divided(dataloader, self.session.rank, self.session.world_size)
        return super().process_dataloader(dataloader)

    def model_to_device(self) -> None:
        """Moves the module to the session's device."""
        self.model.to(self.root_device)

    def setup_optimizers(self, trainer: Any) -> None:
        """Makes the module's optimizers and schedulers, and joins the job with them. Raises PSError."""
        if self._layer_sync is not None:  # Trainer(sync_batchnorm=True); `prepare` refuses it where it is impossible
            self._layer_sync.apply(self.lightning_module)
        super().setup_optimizers(trainer)
        self._early.forget(trainer)
        schedulers = [config.scheduler for config in self.lr_scheduler_configs]
        prepared = self._prepare(self.lightning_module, *self.optimizers, *schedulers)
        self.model = prepared[0]
        self.optimizers = list(prepared[1 : 1 + len(self.optimizers)])
        for callback in trainer.checkpoint_callbacks:  # decided by each worker for itself so far
            if getattr(callback, "dirpath", None) is not None:
                callback.dirpath = self.session.broadcast(os.fspath(callback.dirpath))

    def on_train_start(self) -> None:
        """Announces the number of steps, for status, if one optimizer makes a known number of them."""
        super().on_train_start()
        _say_steps(self.session, self.lightning_module.trainer)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Returns the weights of the job, with every acknowledged update, on the worker that writes checkpoints."""
        if not self._joined or not self.is_global_zero:
            state: dict[str, Any] = super().lightning_module_state_dict()
            return state
        return self.session.global_weights(self.lightning_module)

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Returns the whole state on the worker that writes checkpoints; the others need not fetch it."""
        return super().optimizer_state(optimizer) if self.is_global_zero else {}

    def block_backward_sync(self) -> AbstractContextManager[None]:
        """Returns a context in which backward only adds to the gradients: for accumulation."""
        return self.session.no_sync()

    def teardown(self) -> None:
        """Moves the module back to the host. The session stays open: `test` may follow."""
        TrainerStrategy.teardown(self)


class ParameterServerGroupStrategy(ModelParallelStrategy):
    """Lightning's ModelParallelStrategy where its processes are one worker: a group, as `ps-worker run --group` starts.

    `configure_model` cuts the module over `self.device_mesh`, as without servers. `trainer.global_rank`, `world_size`
    and `device_mesh` are those of this group. A metric with `sync_dist` is reduced over the processes of all groups;
    decisions (to stop, for example) and the paths of checkpoints are agreed among them. Only group 0 writes
    checkpoints.

    Args:
        arguments, more: As for ModelParallelStrategy: data_parallel_size, tensor_parallel_size,
            save_distributed_checkpoint. `devices` of the Trainer need not be given.
        session: From `ps_torch.connect`; by default a new one.
        prepare_options: Options of `Session.prepare`, such as bucket_bytes and gradient_wire.

    Raises:
        InvalidRequest: No launcher has started this process as a member of a group.
    """

    optimizers: Any  # these are Lightning's
    lr_scheduler_configs: Any

    def __init__(
        self,
        *arguments: Any,
        session: Session | None = None,
        prepare_options: Mapping[str, Any] | None = None,
        **more: Any,
    ) -> None:
        if TORCHRUN.count_given() < 2:
            raise InvalidRequest(
                "ParameterServerGroupStrategy trains in processes that are started as a group: by ps-worker run "
                "--group N, or by a torchrun for each group (docs/groups.md)"
            )
        super().__init__(*arguments, **more)
        self._everyone = _OnSession(session, prepare_options or {})
        self._early = _EarlyLoaders()
        self._is_alone = False  # whether this group does something that the others do not
        self.session = self._everyone.session
        self.cluster_environment = environment = TorchElasticEnvironment()  # it reads the variables of a group
        self.parallel_devices = [self.session.device] * environment.world_size()

    @property
    def root_device(self) -> torch.device:
        """The session's device."""
        return self.session.device

    @property
    def is_global_zero(self) -> bool:
        """Whether this is the process that writes what one process writes: the first one of group 0."""
        return self.global_rank == 0 and self.session.rank == 0

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """This process' share of the data, for the DistributedSampler that Lightning puts into loaders."""
        self._join()
        own = super().distributed_sampler_kwargs
        count, rank = own["num_replicas"], own["rank"]
        # `validate` before `fit`: the group goes through all of the data.
        if not self._everyone._joined and not _is_fitting(self.lightning_module):
            return {"num_replicas": count, "rank": rank}
        return {"num_replicas": self.session.world_size * count, "rank": self.session.rank * count + rank}

    def set_world_ranks(self) -> None:
        """Tells Lightning the process' place in its group, and which process logs."""
        super().set_world_ranks()
        rank_zero_only.rank = self.session.rank * self.world_size + self.global_rank

    def load_checkpoint(self, checkpoint_path: Any, **more: Any) -> dict[str, Any]:
        """Loads the group's pieces of a checkpoint: before it joins, as an optimizer on servers has no state to load
        into."""
        if self._everyone._joined:
            raise InvalidRequest("a group loads a checkpoint before it joins: give fit(..., ckpt_path=...)")
        loaded: dict[str, Any] = super().load_checkpoint(checkpoint_path, **more)
        return loaded

    def setup_optimizers(self, trainer: Any) -> None:
        """Makes the module's optimizers and schedulers."""
        super().setup_optimizers(trainer)
        self._early.forget(trainer)

    def _join(self) -> None:
        """Joins the job, once. Lightning makes loaders ready after it has loaded a checkpoint: no hook is between."""
        if self._everyone._joined or not self.optimizers:
            return
        schedulers = [config.scheduler for config in self.lr_scheduler_configs]
        things = self.lightning_module, *self.optimizers, *schedulers
        prepared = self._everyone._prepare(*things, group=self.device_mesh)
        self.optimizers = list(prepared[1 : 1 + len(self.optimizers)])
        self.set_world_ranks()
        for callback in self.lightning_module.trainer.checkpoint_callbacks:  # decided by each group for itself so far
            if getattr(callback, "dirpath", None) is not None:
                callback.dirpath = self.session.broadcast(os.fspath(callback.dirpath))

    def on_train_start(self) -> None:
        """Says how many steps there will be, for those who watch, where one optimizer makes a known number of them."""
        self._join()
        super().on_train_start()
        _say_steps(self.session, self.lightning_module.trainer)

    def process_dataloader(self, dataloader: Any) -> Any:
        """Returns a loader of batches on the session's device; the loader itself if nothing is trained."""
        self._join()
        if not self._everyone._joined and _is_fitting(self.lightning_module):
            share = self.distributed_sampler_kwargs
            return self._early.divided(dataloader, share["rank"], share["num_replicas"])
        return self._everyone.process_dataloader(dataloader)

    def block_backward_sync(self) -> AbstractContextManager[None]:
        """Returns a context in which backward only adds to the gradients: for accumulation."""
        return self.session.no_sync()

    # -- over all processes of all groups, once they have joined -------------------------------------------------------

    @property
    def _is_with_all(self) -> bool:
        return self._everyone._joined and not self._is_alone

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """A `with` block in which collectives are those of this group."""
        self._is_alone = True
        try:
            yield
        finally:
            self._is_alone = False

    def barrier(self, name: str | None = None) -> None:
        """Returns when every process has called it."""
        if self._is_with_all:
            self.session.barrier()
        else:
            super().barrier(name)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Returns the value of one process, for all. Raises Unsupported for a value that a session cannot send."""
        return self._everyone.broadcast(obj, src) if self._is_with_all else super().broadcast(obj, src)

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Returns the mean over processes, or the sum, the largest, the smallest. Raises Unsupported for others."""
        if self._is_with_all:
            return self._everyone.reduce(tensor, group, reduce_op)
        return super().reduce(tensor, group, reduce_op)

    def all_gather(self, tensor: torch.Tensor, group: Any = None, sync_grads: bool = False) -> torch.Tensor:
        """Returns the tensors of all processes, stacked by group and then by member. Raises Unsupported."""
        if self._is_with_all:
            return self._everyone.all_gather(tensor, group, sync_grads)
        gathered: torch.Tensor = super().all_gather(tensor, group, sync_grads)
        return gathered

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Returns one decision for all processes: whether all of them decided so, or any."""
        if self._is_with_all:
            return self._everyone.reduce_boolean_decision(decision, all)
        decided: bool = super().reduce_boolean_decision(decision, all)
        return decided

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Returns the weights of the job: DTensors, or whole tensors where one file is written."""
        if not self._everyone._joined:
            state: dict[str, Any] = super().lightning_module_state_dict()
            return state
        weights = self.session.global_weights(self.lightning_module)
        if self._save_distributed_checkpoint:
            return weights
        whole = {name: each.full_tensor() if isinstance(each, DTensor) else each for name, each in weights.items()}
        return {name: each.cpu() for name, each in whole.items()} if self.global_rank == 0 else {}

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Writes a checkpoint, by the processes of group 0."""
        path = Path(self.broadcast(os.fspath(filepath)))
        if self.session.rank == 0:
            with self._alone():
                super().save_checkpoint(checkpoint, path, storage_options)


class FabricParameterServerStrategy(_OnSession, FabricStrategy):
    """Trains with Fabric in the session's mode: `Fabric(strategy=FabricParameterServerStrategy())`.

    Call `fabric.setup` before `fabric.setup_dataloaders`: a worker learns its share of the data when it joins. The
    strategy accepts one model with its optimizers. For several models call `strategy.session.prepare` with all of them
    first.

    Args:
        session: From `ps_torch.connect`; by default a new one.
        options: Options of `Session.prepare`, such as bucket_bytes, gradient_wire and seed.
    """

    def __init__(self, session: Session | None = None, **options: Any) -> None:
        _refuse_group("a loop of your own, with session.prepare(..., group=mesh)")
        _OnSession.__init__(self, session, options)
        FabricStrategy.__init__(self)
        self._trained: list[nn.Module] = []  # the script's own modules that the session has prepared
        self._backward_sync_control = _NoSync(self.session)

    def process_dataloader(self, dataloader: Any) -> Any:
        """Returns a loader of batches on the session's device. Raises InvalidRequest before `fabric.setup`."""
        if not self._joined and self.world_size > 1:
            raise InvalidRequest(
                "call fabric.setup(model, optimizer) before fabric.setup_dataloaders: joining tells the share of data"
            )
        return super().process_dataloader(dataloader)

    def module_to_device(self, module: nn.Module) -> None:
        """Moves the module to the session's device."""
        module.to(self.root_device)

    def setup_module_and_optimizers(self, module: nn.Module, optimizers: list[Optimizer], scheduler: Any = None) -> Any:
        """Joins the job with a model and its optimizers; optimizers that a session has prepared already stay
        unchanged.
        """
        if all(isinstance(optimizer, ServerOptimizer) for optimizer in optimizers):
            self._joined = True
            self._trained.append(self.session.unwrap(module))
            return module, optimizers, scheduler
        things = (module, *optimizers) if scheduler is None else (module, *optimizers, scheduler)
        prepared = self._prepare(*things)
        self._trained.append(self.session.unwrap(prepared[0]))
        return prepared[0], list(prepared[1 : 1 + len(optimizers)]), scheduler

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Accepts only an optimizer that `session.prepare` has prepared; otherwise raises InvalidRequest."""
        if not isinstance(optimizer, ServerOptimizer):
            raise InvalidRequest("set up the model together with its optimizers: fabric.setup(model, optimizer)")
        return optimizer

    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        """Returns the state of the user's own module; on the worker that writes checkpoints with the weights of the
        job, with every acknowledged update."""
        own = self.session.unwrap(module)
        if not self.is_global_zero or not any(own is each for each in self._trained):
            state: dict[str, Any] = own.state_dict()
            return state
        return self.session.global_weights(own, copy=False)

    def load_module_state_dict(self, module: nn.Module, state_dict: Mapping[str, Any], strict: bool = True) -> None:
        """Loads into the user's own module."""
        self.session.unwrap(module).load_state_dict(state_dict, strict=strict)


class _NoSync(_BackwardSyncControl):
    """Implements `fabric.no_backward_sync`: gradients add up and leave with the next step."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        """Returns a context in which backward only adds to the gradients."""
        return self._session.no_sync() if enabled else nullcontext()


StrategyRegistry.register(NAME, ParameterServerStrategy, description="parameter servers of ps-torch", override=True)
