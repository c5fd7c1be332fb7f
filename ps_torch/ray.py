"""Parameter servers on Ray: for Ray Train, and for plain actors and Tune. Needs the extra `ray`."""

from typing import TYPE_CHECKING, Any

from ps_worker.ray import ParameterServer, WorkerProcess, WorkerSettings

if TYPE_CHECKING:
    from ps_worker.ray import PsConfig

__all__ = ["ParameterServer", "PsConfig", "WorkerProcess", "WorkerSettings"]


def __getattr__(name: str) -> Any:
    """Imports Ray Train, and pandas with it, when its backend is asked for: plain actors do without."""
    if name == "PsConfig":
        from ps_worker.ray import PsConfig

        return PsConfig
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
