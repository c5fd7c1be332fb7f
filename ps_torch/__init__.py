"""Train an ordinary PyTorch model on a parameter server, with DDP, or alone: the one name that scripts import.

import ps_torch as ps

session = ps.connect()
model, optimizer, loader = session.prepare(model, optimizer, loader)

Each name is the same object as in `ps_worker`, the package that implements it.

accelerate.py   Accelerate on parameter servers: `connect`
engines/        vLLM, SGLang and transformers, which generate with a job's newest weights
huggingface.py  The Trainer of Hugging Face on parameter servers: `PsTrainer`, `OnServers`
lightning.py    Lightning on parameter servers: the strategy "ps", and one for Fabric
ray.py          Parameter servers on Ray: `PsConfig` for Ray Train, `ParameterServer` for actors and Tune
reports.py      Functions by which a launcher of your own reports processes that have ended
"""

from typing import TYPE_CHECKING, Any

import ps_worker
from ps_worker import __all__ as __all__
from ps_worker import __version__ as __version__

if TYPE_CHECKING:
    from ps_worker import *  # noqa: F403  # at run time this would import torch
else:  # hidden from type checkers, which would take any misspelt name for one that this finds

    def __getattr__(name: str) -> Any:
        """Returns what `ps_worker` has under that name, which imports torch if it needs it."""
        if name in __all__:
            return getattr(ps_worker, name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """Lists the names that are imported when they are asked for, too, for completion in a shell or an editor."""
    return sorted({*globals(), *__all__})
