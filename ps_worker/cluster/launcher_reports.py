"""The calls of launchers to a coordinator. Above all they report ended processes, which they notice at once.

Without a report, the other workers wait for a dead worker until its lease has run out. And a process at another address
can take the index of a dead shard only after that shard has been silent for some time (Timing.shard_lost). A report
about a process that another one has replaced changes nothing. So a report may be repeated, and may come late.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import grpc

from ps_protocol.errors import NotFound
from ps_protocol.v1 import cluster_pb2, membership_pb2
from ps_protocol.v1.cluster_pb2_grpc import ClusterServiceStub
from ps_protocol.v1.membership_pb2_grpc import MembershipServiceStub
from ps_runtime.channel import open_channel
from ps_runtime.credentials import PLAINTEXT, Access
from ps_runtime.retry import Peer

REPORT_SECONDS = 5.0
AGAIN_SECONDS = 0.5


def report_worker_end(
    server: str,
    job: str,
    launch: str,
    pid: int,
    host: str | None = None,
    incarnation: int = 0,
    access: Access = PLAINTEXT,
) -> tuple[int, ...]:
    """Reports that a worker's process has ended. Returns the removed ranks; none if no worker of the process was live.

    server:      HOST:PORT of the coordinator
    launch, pid: the process's PS_LAUNCH_ID, and its process id. If containers give successive processes the same pid,
                 the launcher must give each a launch of its own
    host:        the host name that the process saw; None: this host's
    incarnation: that of the worker, if it is known; 0: any
    access:      its role must be that of a worker of the job, of an admin, or of the cluster

    Waits for up to 5 s. Raises NotFound if there is no such job, and other PSErrors.
    """
    request = membership_pb2.ReportWorkerEndRequest(
        job=job, launch=launch, host=socket.gethostname() if host is None else host, pid=pid, incarnation=incarnation
    )
    response = _ask(server, access, lambda channel: MembershipServiceStub(channel).ReportWorkerEnd, request)
    return tuple(response.ranks)


def report_shard_end(server: str, index: int, process: int, access: Access = PLAINTEXT) -> bool:
    """Reports that a shard's process has ended: another process may take its index at once, at any address.

    server:  HOST:PORT of the coordinator
    process: the number that the process chose: ps_server.server.Server.process
    access:  its role must be that of the cluster, or of an admin

    Returns whether the process had the index. Waits for up to 5 s. Raises PSError.
    """
    request = cluster_pb2.ReportShardEndRequest(index=index, process=process)
    return bool(_ask(server, access, lambda channel: ClusterServiceStub(channel).ReportShardEnd, request).known)


def await_job_end(server: str, job: str, patience: float, access: Access = PLAINTEXT) -> bool:
    """Waits until a job has ended, or its coordinator stops. Returns at once if there is no such job.

    patience: seconds for which the coordinator may be unreachable, as during a restart
    Returns False if it was unreachable for longer, otherwise True. Raises PSError if it refuses the call.
    """
    silent_since = time.monotonic()
    with open_channel(server, access) as channel:
        while True:
            try:
                for _ in MembershipServiceStub(channel).Watch(membership_pb2.WatchRequest(job=job)):
                    silent_since = time.monotonic()
                return True
            except grpc.RpcError as call:
                error = Peer("coordinator", server, access).error(call)
                if isinstance(error, NotFound):
                    return True
                if not error.retryable:
                    raise error from None
                if time.monotonic() > silent_since + patience:
                    return False
            threading.Event().wait(AGAIN_SECONDS)


def _ask(server: str, access: Access, method: Callable[[grpc.Channel], Any], request: Any) -> Any:
    with open_channel(server, access) as channel:
        try:
            return method(channel)(request, timeout=REPORT_SECONDS)
        except grpc.RpcError as error:
            raise Peer("coordinator", server, access).error(error) from None
