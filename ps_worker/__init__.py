"""Train an ordinary PyTorch model on a parameter server, with DDP, or alone: the same script, the same loop.

session = ps_worker.connect()
model, optimizer, loader = session.prepare(model, optimizer, loader)
"""

from ps_protocol.errors import (
    Fenced,
    InvalidRequest,
    JobMismatch,
    LimitExceeded,
    NonFiniteGradient,
    NotFound,
    PSError,
    UnknownWorker,
    Unreachable,
    Unsupported,
)
from ps_worker.session import Session, connect

__all__ = [
    "Fenced",
    "InvalidRequest",
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
