"""`ps-server status`, `health`, `end` and `checkpoint`: what operators ask of a running cluster."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from ps_protocol.errors import PSError, Unreachable
from ps_runtime.credentials import PLAINTEXT, Access
from ps_runtime.retry import Peer
from ps_server.rpc import convert
from ps_server.rpc.coordinator_client import CoordinatorClient, is_serving

__all__ = ["checkpoint_job", "end_job", "fetch", "is_serving", "table"]


def fetch(server: str, access: Access = PLAINTEXT) -> dict[str, Any]:
    """Returns the cluster's state as plain data: `processes`, an object each, and `jobs`.

    Raises Unreachable or PSError.
    """
    with _coordinator(server, access) as coordinator:
        return convert.status_data(coordinator.status())


def end_job(server: str, job: str, access: Access = PLAINTEXT) -> None:
    """Ends a job, also while workers take part in it. Raises Unreachable, NotFound or PSError."""
    with _coordinator(server, access) as coordinator:
        coordinator.end_job(job)


def checkpoint_job(server: str, job: str, access: Access = PLAINTEXT) -> str:
    """Makes a checkpoint of a job, and says which when it is complete. Raises Unreachable, NotFound or PSError."""
    with _coordinator(server, access) as coordinator:
        made = coordinator.checkpoint_job(job)
    return f"job {job}: checkpoint {made.name} at clock {made.clock}, {made.size_bytes} bytes"


@contextlib.contextmanager
def _coordinator(server: str, access: Access) -> Iterator[CoordinatorClient]:
    with CoordinatorClient(Peer("coordinator", server, access)) as coordinator:
        try:
            yield coordinator
        except PSError as error:
            raise (Unreachable(str(error)) if error.retryable else error) from None


def table(status: dict[str, Any]) -> str:
    """Returns the state as a table for a person."""
    rows = [("ROLE", "INDEX", "PID", "ADDRESS", "METRICS", "JOB", "CLOCK", "VERSION", "BYTES", "WAITS FOR")]
    for process in status["processes"]:
        head = (process["role"], str(process["index"]), str(process["pid"]), process["address"], process["metrics"])
        if process["role"] == "shard":
            if not process["reachable"]:
                rows.append((*head, "-", "-", "-", "-", "does not answer"))
                continue
            jobs = process["jobs"] or [None]
            for job in jobs:
                rows.append((*head, *_shard_columns(job)))
        elif process["role"] == "worker":
            rows.append((*head, process["job"], str(process["clock"]), "-", "-", _waits(process["waits"])))
        else:
            rows.append((*head, "-", "-", "-", "-", "-"))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    for job in status["jobs"]:
        joined, size = len(job["ranks"]), job["world_size"]
        who = f"{joined} workers, elastic" if not size else f"{joined} of {size} workers"
        missing = [str(rank) for rank in range(size) if rank not in job["ranks"]]
        waiting = f"; waits for ranks {', '.join(missing)} to join" if missing and not job["started"] else ""
        if job["awaited"]:
            waiting = f"; was set back, and waits for workers {', '.join(map(str, job['awaited']))} to join again"
        lines.append(
            f"job {job['name']}: {job['mode']}, {who}{waiting}; {job['parameter_bytes'] / 1e6:.1f} MB "
            f"in {job['buckets']} buckets, imbalance {job['imbalance']:.2f}{_history(job)}"
        )
        lines += [
            f"  loader {loader['loader']}: pass {loader['pass']}, {loader['committed']} of {loader['samples']} samples "
            f"committed, {loader['leased']} leased; {loader['returned']} came back so far"
            for loader in job["loaders"]
        ]
    return "\n".join(lines)


def _history(job: dict[str, Any]) -> str:
    """Returns what a job went through; empty if there was nothing."""
    text = ""
    if job["checkpoint"]:
        text += f"; last checkpoint {job['checkpoint']['name']} at clock {job['checkpoint']['clock']}"
    if job["restore_count"]:
        text += f"; set back {job['restore_count']} times, {job['redone_steps']} steps made again"
    if job["lost_steps"]:
        text += f"; {job['lost_steps']} steps lost with shards"
    return text


def _shard_columns(job: dict[str, Any] | None) -> tuple[str, ...]:
    if job is None:
        return ("-", "-", "-", "-", "-")
    low, high = job["version_min"], job["version_max"]
    versions = str(low) if low == high else f"{low}-{high}"
    clocks = ",".join(f"{rank}:{clock}" for rank, clock in job["clocks"].items()) or "-"
    return job["job"], clocks, versions, f"{job['parameter_bytes']}+{job['optimizer_bytes']}", "-"


def _waits(waits: list[dict[str, Any]]) -> str:
    if not waits:
        return "-"
    ranks = sorted({rank for wait in waits for rank in wait["waiting_for"]})
    who = f"worker {', '.join(map(str, ranks))}" if ranks else "its shard"
    return f"{who} ({waits[0]['reason']})"
