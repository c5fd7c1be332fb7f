"""Parameter servers on Ray: for Ray Train, and for plain actors and Tune. Needs the extra `ray`."""

from typing import TYPE_CHECKING

from ps_worker.ray import ActorGroups, ParameterServer, WorkerProcess, WorkerSettings
from ps_worker.ray import __getattr__ as __getattr__  # imports Ray Train when PsConfig is asked for

if TYPE_CHECKING:
    from ps_worker.ray import PsConfig

__all__ = ["ActorGroups", "ParameterServer", "PsConfig", "WorkerProcess", "WorkerSettings"]
