"""The gRPC port of a server process: how it is bound and started, and which threads answer its calls."""

from __future__ import annotations

import contextlib
import logging
import resource
import socket
import threading
from collections.abc import Callable, Iterable

import grpc

from ps_protocol.errors import InvalidRequest, TryLater
from ps_runtime.credentials import Tls, server_credentials
from ps_runtime.thread_limit import thread_limit
from ps_server.core.limits import LEAST_THREADS, Limits
from ps_server.core.thread_shares import ThreadShares, thread_shares

log = logging.getLogger("ps_server")

STOP_GRACE_SECONDS = 2.0
_OTHER_THREADS = 128  # threads outside of pools, sites and connections: gRPC's own, timers, disks, checkpoints

_starting = threading.Lock()  # so that threads which come meanwhile are of one server


def start_grpc(server: grpc.Server) -> list[threading.Thread]:
    """Starts a server of gRPC; returns the thread that hands out its calls.

    That thread ends with any exception in it, and then no call is answered. grpcio has no other way to learn this.
    Raises TryLater if the system has no thread to give.
    """
    with _starting:
        before = set(threading.enumerate())
        try:
            server.start()
        except RuntimeError as error:
            raise TryLater(f"gRPC's thread cannot be had in this process: {error}") from None
        return [thread for thread in threading.enumerate() if thread not in before and "_serve" in thread.name]


def stop_grpc(server: grpc.Server, stops: Iterable[Callable[[], None]], last: Iterable[Callable[[], None]]) -> None:
    """Stops a server: it admits no more calls, and those in flight end.

    stops: called first; they end the waits of calls in flight
    last:  called when all calls are over; they end what calls have used
    """
    stopped = server.stop(STOP_GRACE_SECONDS)
    for stop in stops:
        stop()
    stopped.wait()
    for stop in last:
        stop()


def bind(server: grpc.Server, host: str, port: int, tls: Tls | None) -> int:
    """Makes a server listen; returns the port. port: 0 lets the system choose. Raises InvalidRequest if it cannot."""
    where = f"{host}:{port}"
    try:
        bound = (
            server.add_insecure_port(where) if tls is None else server.add_secure_port(where, server_credentials(tls))
        )
    except RuntimeError:
        bound = 0
    if not bound:
        raise InvalidRequest(
            f"cannot listen on {host}:{port}: the port is in use, or the address is not this machine's"
        )
    return int(bound)


def allow_many_files(wanted: int) -> None:
    """Raises the limit of open files as far as permitted: each connection is one, and shells often allow few."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted += 1024  # for everything else
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(ValueError, OSError):
            most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def reachable(host: str) -> str:
    """Returns an address that other hosts can use: for a server bound to all addresses, this machine's name."""
    return socket.gethostname() if host in ("0.0.0.0", "::", "[::]", "") else host


def shares_of_threads(limits: Limits, pools: int, others: int) -> ThreadShares:
    """Divides the threads that this process may have, and logs the shares.

    pools:  the number of pools for calls
    others: threads beside pools and data connections
    """
    found = thread_limit()
    most, why = limits.threads, "--max-threads"
    if most is None and found is not None:
        most, why = found.threads, found.name
    shares = thread_shares(most, _OTHER_THREADS + others, pools, limits.connections)
    if most is None:
        return shares
    text = "threads: at most %d of this process (%s), %d in each of %d pools for calls, %d for data connections"
    level = logging.INFO if most >= LEAST_THREADS else logging.WARNING
    log.log(level, text, most, why, shares.pool, pools, shares.connections)
    if most < LEAST_THREADS:
        log.warning("threads: give this process at least %d; past its limit it goes on, but more slowly", LEAST_THREADS)
    return shares
