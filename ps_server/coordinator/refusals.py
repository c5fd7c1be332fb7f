"""The errors for a process that cannot join now: TryLater, or JobInUse, which names the other launch's workers."""

from __future__ import annotations

from datetime import datetime, timezone

from ps_protocol.errors import JobInUse, PSError, TryLater
from ps_protocol.messages.workers import JoinRequest
from ps_runtime.quantities import ranks_text
from ps_server.core.membership import LiveWorker, Rivals

HOSTS_NAMED = 4  # in an error; further hosts are counted
PIDS_NAMED = 4
ASK_AGAIN_PER_LEASE = 16  # four times as often as a heartbeat comes
LONGEST_ASK_AGAIN_SECONDS = 1.0
HANGS_SECONDS = 30.0  # a join that takes longer waits for a disk or for a shard, and not for a crowd before it
SOON_SECONDS = 0.05  # the pause before the caller tries again, if the cause passes quickly


def try_soon(text: str) -> TryLater:
    """Returns a TryLater for a cause that passes within a moment."""
    later = TryLater(text)
    later.retry_after = SOON_SECONDS
    return later


def still_joining(job: str, rank: int, seconds: float) -> TryLater:
    """Returns the error for a repeat of a request to join that has been carried out for so many seconds.

    A pause in an error restarts the caller's time limit. So an error for a join that hangs has none, and says what the
    join may wait for.
    """
    if seconds < HANGS_SECONDS:
        return try_soon(f"worker {rank} is joining job {job!r} at this moment")
    return TryLater(
        f"worker {rank} has been joining job {job!r} for {seconds:.0f} s: the coordinator writes its state file, or a "
        "shard does not answer"
    )


def refusal(job: str, rivals: Rivals, request: JoinRequest, lease: float) -> PSError:
    """Returns the error for a worker whose rank or job is in use: JobInUse if a rival is known to be live, otherwise
    TryLater.

    The TryLater has the time after which to ask again. lease: seconds
    """
    in_use = f"job {job!r} is in use: {_described(rivals.workers)}"
    if not rivals.live:
        later = TryLater(
            f"{in_use}. Waiting for a sign of life from there, or for the end of the lease, "
            f"{rivals.seconds:.1f} s at most"
        )
        later.retry_after = min(LONGEST_ASK_AGAIN_SECONDS, lease / ASK_AGAIN_PER_LEASE)
        return later
    if request.take_over:
        return JobInUse(f"{in_use}. That launch took over from this one, which therefore does not take over in turn")
    return JobInUse(
        f"{in_use}. Either give this job another name: --job NAME (PS_JOB, connect(job=...)); "
        "or replace those workers: --take-over (PS_TAKE_OVER=1, connect(take_over=True))"
    )


def _described(workers: tuple[LiveWorker, ...]) -> str:
    """Describes workers for an error: their ranks, hosts, pids and the time since when they are live."""
    hosts: dict[str, list[LiveWorker]] = {}
    for worker in workers:
        hosts.setdefault(worker.host or "unknown", []).append(worker)
    groups = [
        f"{ranks_text(m.rank for m in there)} on host {host} ({_pids(there)})"
        for host, there in list(hosts.items())[:HOSTS_NAMED]
    ]
    if len(hosts) > HOSTS_NAMED:
        groups.append(f"others on {len(hosts) - HOSTS_NAMED} more hosts")
    verb = "trains" if len(workers) == 1 else "train"
    since = min(worker.since for worker in workers)
    when = datetime.fromtimestamp(since, timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")
    return f"{', '.join(groups)} {verb} it since {when}, of another launch"


def _pids(workers: list[LiveWorker]) -> str:
    named = ", ".join(str(worker.pid) for worker in workers[:PIDS_NAMED])
    more = len(workers) - PIDS_NAMED
    return f"pid{'s' if len(workers) > 1 else ''} {named}{f' and {more} more' if more > 0 else ''}"
