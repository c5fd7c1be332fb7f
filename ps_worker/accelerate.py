"""Accelerate on parameter servers: a `connect` that shows Accelerate a single process. Needs `accelerate`.

    session = ps_torch.accelerate.connect()                                  # before Accelerator()
    accelerator = Accelerator(gradient_accumulation_steps=4)
    model, optimizer, loader = session.prepare(model, optimizer, loader)      # first ours: the plain objects
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)  # then Accelerate's

Under torchrun Accelerate would start torch.distributed and wrap the model in DistributedDataParallel. Gradients would
then be reduced twice, and async would wait at every step. Therefore Accelerate sees only the rank of this launch, which
`accelerator.is_main_process`, `print` and `save` need.

In a process that is a member of a group Accelerate sees the processes of the group, and cuts the model over them. Then
it comes first:

    session = ps_torch.accelerate.connect()
    accelerator = Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))
    model, optimizer = accelerator.prepare(model, optimizer)
    model, optimizer, loader = ps_torch.accelerate.join(session, accelerator, model, optimizer, loader)
"""

from __future__ import annotations

import logging
import weakref
from typing import Any

import torch.distributed as dist
from accelerate import Accelerator
from accelerate import accelerator as accelerators
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler
from accelerate.state import AcceleratorState, PartialState

from ps_protocol.errors import InvalidRequest, Unsupported
from ps_runtime.launch_id import GROUP_SIZE, launched_group_size
from ps_runtime.rank import hide_launcher_variables
from ps_worker.connecting import connect as connect_session
from ps_worker.connecting import refuse_elastic
from ps_worker.session import Session

log = logging.getLogger("ps_worker")

# Any of these variables makes Accelerate start torch.distributed: torchrun's, Intel MPI's, MVAPICH's and Open MPI's.
LAUNCHED = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK", "MASTER_ADDR", "MASTER_PORT"),
    *("PMI_RANK", "PMI_SIZE", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),
    *("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
)


def connect(*arguments: Any, **settings: Any) -> Session:
    """Returns a session as `ps_torch.connect` does. Accelerate then sees one process, of this worker's rank.

    The launcher's variables are removed from os.environ, except in mode ddp, where Accelerate works as usual, and in a
    member of a group, where Accelerate sees the group. Call it before Accelerator or TrainingArguments are made. A
    loader that only `accelerator.prepare` gets is not divided among the workers: the log warns of it, once.

    Args:
        arguments, settings: As for `ps_torch.connect`.

    Raises:
        InvalidRequest: Accelerate has started already, or as in `ps_torch.connect`.
        Unsupported: The job is elastic: Accelerate asks for the rank before such a job gives it out.
    """
    session = connect_session(*arguments, **settings)
    refuse_elastic(session, "Accelerate")
    if session.mode != "ddp":
        if launched_group_size() == 1:
            hide_launcher(session)
        _watched.watch(session)
    return session


def join(session: Session, accelerator: Accelerator, *things: Any, **options: Any) -> Any:
    """Joins the job with what `accelerator.prepare` has cut by FSDP2: the processes of this group are one worker.

    Args:
        session: From `connect`.
        accelerator: It has a FullyShardedDataParallelPlugin(fsdp_version=2).
        things: The model and the optimizers that `accelerator.prepare` has returned, schedulers, and plain loaders: a
            loader gets this process' share of the data.
        options: Those of `Session.prepare`, such as bucket_bytes and gradient_wire.

    Returns:
        The things, in the order given, ready to train. Optimizers and schedulers stay Accelerate's.

    Raises:
        Unsupported: The accelerator cuts the model in a way that groups do not have.
        InvalidRequest: No launcher has started this process as one of several that are a worker.
        PSError: As in `Session.prepare`.
    """
    _refuse_other_cuts(accelerator)
    plain = []
    for thing in things:
        match thing:
            case AcceleratedOptimizer():
                plain.append(thing.optimizer)
            case AcceleratedScheduler():
                plain.append(thing.scheduler)
            case _:
                plain.append(thing)
    made = session.prepare(*plain, group=dist.group.WORLD, **options)
    joined = []
    for thing, prepared in zip(things, made if len(things) > 1 else (made,), strict=True):
        if isinstance(thing, AcceleratedOptimizer):
            thing.optimizer = prepared
        joined.append(thing if isinstance(thing, AcceleratedOptimizer | AcceleratedScheduler) else prepared)
    return joined[0] if len(joined) == 1 else tuple(joined)


def _refuse_other_cuts(accelerator: Accelerator) -> None:
    """Raises Unsupported for what Accelerate does with several processes and a group does not have, and InvalidRequest
    outside of a group."""
    if launched_group_size() == 1:
        raise InvalidRequest(
            f"ps_torch.accelerate.join: {GROUP_SIZE} does not say that several processes are this worker, so `connect` "
            "has hidden the others from Accelerate. Start groups by ps-worker run --group N, or set "
            f"{GROUP_SIZE}=N for the torchrun of each group (docs/groups.md). For a worker of one process take "
            "session.prepare"
        )
    if not accelerator.is_fsdp2:
        raise Unsupported(
            "the processes of a group train a model that Accelerate has cut by FSDP2: give Accelerator a "
            "FullyShardedDataParallelPlugin(fsdp_version=2). Accelerate leaves the plugin out on CPUs. Here it has "
            f"{accelerator.distributed_type.value}"
        )
    plugin, parallel = accelerator.state.fsdp_plugin, accelerator.parallelism_config
    if type(plugin.cpu_offload).__name__ == "CPUOffloadPolicy":
        raise Unsupported("FullyShardedDataParallelPlugin(cpu_offload=True): leave it out, servers hold the moments")
    if accelerator.scaler is not None:
        raise Unsupported('mixed_precision="fp16" has a GradScaler, which groups are not tried with: use "bf16"')
    for name in ("dp_replicate_size", "tp_size", "cp_size", "sp_size"):
        size = 1 if parallel is None else vars(parallel)[name]
        if size > 1:
            raise Unsupported(
                f"ParallelismConfig({name}={size}): with Accelerate the processes of a group cut the model by "
                "dp_shard_size alone. The groups of the job are its replicas; tensor parallel is for a loop of your "
                "own (docs/groups.md)"
            )


def hide_launcher(session: Session) -> None:
    """Hides the launcher from Accelerate. Raises InvalidRequest if Accelerate has started several processes already."""
    hide_launcher_variables(LAUNCHED)
    state = PartialState(cpu=session.device.type == "cpu")
    if state.num_processes > 1:
        raise InvalidRequest(
            "Accelerate has started torch.distributed already: call ps_torch.accelerate.connect() before "
            "Accelerator() and TrainingArguments(), or launch with `ps-worker run`"
        )
    for known in (PartialState._shared_state, AcceleratorState._shared_state):
        if known:  # the latter is a copy, if it is there yet
            known["process_index"], known["local_process_index"] = session.rank, session.local_rank
            known["device"] = session.device  # Accelerate would use the first of several GPUs for all workers


class _UndividedLoaders:
    """Warns of a loader that only Accelerate prepares. It takes this process for the only one and divides nothing, and
    the loaders that a session has prepared are none of torch's: it leaves them as they are.
    """

    def __init__(self) -> None:
        self._session: weakref.ref[Session] | None = None
        self._plain: Any = None  # Accelerate's own function

    def watch(self, session: Session) -> None:
        """Watches from now on, for the session that was made last."""
        self._session = weakref.ref(session)
        if self._plain is None:
            self._plain = accelerators.prepare_data_loader
            accelerators.prepare_data_loader = self._prepare

    def trust(self) -> None:
        """Stops watching: the caller of Accelerate divides the data itself."""
        self._session = None

    def _prepare(self, loader: Any, *arguments: Any, **options: Any) -> Any:
        session = None if self._session is None else self._session()
        if session is not None and session.world_size > 1:
            self._session = None
            in_group = "ps_torch.accelerate.join, and not to accelerator.prepare"
            log.warning(
                "accelerator.prepare got a loader that has no worker's share: each of the %d workers goes through all "
                "of its data. Hand a loader of training data to %s; for an evaluation on each worker this is right",
                session.world_size,
                in_group if launched_group_size() > 1 else "session.prepare first",
            )
        return self._plain(loader, *arguments, **options)


_watched = _UndividedLoaders()


def divides_itself() -> None:
    """Declares that the caller of `accelerator.prepare` divides the data itself: loaders are not warned of."""
    _watched.trust()
