"""Requests of operators to a running cluster: `ps-server status`, `end`, `checkpoint` and `report`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from ps_protocol.errors import PSError, Unreachable
from ps_runtime.credentials import PLAINTEXT, Access
from ps_runtime.retry import Peer
from ps_server.rpc.operator_client import OperatorClient
from ps_server.rpc.plain import plain


def fetch(server: str, access: Access = PLAINTEXT) -> dict[str, Any]:
    """Returns the cluster's state: a GetStatusResponse in the form of plain(). Raises Unreachable or PSError."""
    with _coordinator(server, access) as coordinator:
        return plain(coordinator.status())


def end_job(server: str, job: str, access: Access = PLAINTEXT) -> None:
    """Ends a job, even while workers train it. Raises Unreachable, NotFound or PSError."""
    with _coordinator(server, access) as coordinator:
        coordinator.end_job(job)


def report_shard_end(server: str, index: int, process: int, access: Access = PLAINTEXT) -> str:
    """Reports the end of a shard's process; returns the result as text. Raises Unreachable or PSError."""
    with _coordinator(server, access) as coordinator:
        known = coordinator.report_shard_end(index, process)
    return f"shard {index}: its end is noted" if known else f"process {process} is not shard {index}: nothing changed"


def checkpoint_job(server: str, job: str, access: Access = PLAINTEXT) -> str:
    """Makes a checkpoint of a job; returns its description as text once it is complete. Raises Unreachable, NotFound or
    PSError.
    """
    with _coordinator(server, access) as coordinator:
        made = coordinator.checkpoint_job(job)
    missing = f", without the state of workers {list(made.missing_ranks)}" if made.missing_ranks else ""
    return f"job {job}: checkpoint {made.name} at clock {made.clock}, {made.size_bytes} bytes{missing}"


@contextlib.contextmanager
def _coordinator(server: str, access: Access) -> Iterator[OperatorClient]:
    with OperatorClient(Peer("coordinator", server, access)) as coordinator:
        try:
            yield coordinator
        except PSError as error:
            raise (Unreachable(str(error)) if error.retryable else error) from None
