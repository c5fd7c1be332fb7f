"""Train an ordinary PyTorch model on a parameter server, with DDP, or alone: the same script, the same loop.

session = ps_worker.connect()
model, optimizer, loader = session.prepare(model, optimizer, loader)
"""

from typing import TYPE_CHECKING, Any

from ps_protocol.errors import (
    Fenced,
    InvalidRequest,
    JobInUse,
    JobMismatch,
    LimitExceeded,
    NonFiniteGradient,
    NotFound,
    PSError,
    UnknownWorker,
    Unreachable,
    Unsupported,
)

if TYPE_CHECKING:
    from ps_worker.session import Session, connect

__all__ = [
    "Fenced",
    "InvalidRequest",
    "JobInUse",
    "JobMismatch",
    "LimitExceeded",
    "NonFiniteGradient",
    "NotFound",
    "PSError",
    "Session",
    "UnknownWorker",
    "Unreachable",
    "Unsupported",
    "connect",
]


def __getattr__(name: str) -> Any:
    """Imports torch when a session is asked for: the launcher and `ps-worker --help` do without."""
    if name in ("Session", "connect"):
        from ps_worker import session

        return getattr(session, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
