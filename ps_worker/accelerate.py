"""Accelerate on parameter servers: a `connect` that shows Accelerate a single process. Needs `accelerate`.

    session = ps_torch.accelerate.connect()                                  # before Accelerator()
    accelerator = Accelerator(gradient_accumulation_steps=4)
    model, optimizer, loader = session.prepare(model, optimizer, loader)      # first ours: the plain objects
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)  # then Accelerate's

Under torchrun Accelerate would start torch.distributed and wrap the model in DistributedDataParallel. Gradients would
then be reduced twice, and async would wait at every step. Therefore Accelerate sees only the rank of this launch, which
`accelerator.is_main_process`, `print` and `save` need.
"""

from __future__ import annotations

import logging
import weakref
from typing import Any

from accelerate import accelerator as accelerators
from accelerate.state import AcceleratorState, PartialState

from ps_protocol.errors import InvalidRequest
from ps_runtime.rank import hide_launcher_variables
from ps_worker.connecting import connect as connect_session
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

    The launcher's variables are removed from os.environ, except in mode ddp, where Accelerate works as usual. Call it
    before Accelerator or TrainingArguments are made. A loader that only `accelerator.prepare` gets is not divided among
    the workers: the log warns of it, once.

    Args:
        arguments, settings: As for `ps_torch.connect`.

    Raises:
        InvalidRequest: Accelerate has started already, or as in `ps_torch.connect`.
    """
    session = connect_session(*arguments, **settings)
    if session.mode != "ddp":
        hide_launcher(session)
        _watched.watch(session)
    return session


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
            log.warning(
                "accelerator.prepare got a loader that session.prepare has not had: each of the %d workers goes "
                "through all of its data. Hand a loader of training data to session.prepare first; for an evaluation "
                "on each worker this is right",
                session.world_size,
            )
        return self._plain(loader, *arguments, **options)


_watched = _UndividedLoaders()


def divides_itself() -> None:
    """Declares that the caller of `accelerator.prepare` divides the data itself: loaders are not warned of."""
    _watched.trust()
