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

from typing import Any

from accelerate.state import AcceleratorState, PartialState

from ps_protocol.errors import InvalidRequest
from ps_runtime.rank import hide_launcher_variables
from ps_worker.connecting import connect as connect_session
from ps_worker.session import Session

# Any of these variables makes Accelerate start torch.distributed: torchrun's, Intel MPI's, MVAPICH's and Open MPI's.
LAUNCHED = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK", "MASTER_ADDR", "MASTER_PORT"),
    *("PMI_RANK", "PMI_SIZE", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),
    *("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
)


def connect(*arguments: Any, **settings: Any) -> Session:
    """Returns a session as `ps_torch.connect` does. Accelerate then sees one process, of this worker's rank.

    The launcher's variables are removed from os.environ, except in mode ddp, where Accelerate works as usual. Call it
    before Accelerator or TrainingArguments are made.

    Args:
        arguments, settings: As for `ps_torch.connect`.

    Raises:
        InvalidRequest: Accelerate has started already, or as in `ps_torch.connect`.
    """
    session = connect_session(*arguments, **settings)
    if session.mode != "ddp":
        hide_launcher(session)
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
            known["device"] = session.device  # of several GPUs Accelerate would take the first for all workers
