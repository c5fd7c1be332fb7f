"""`connect`: the start of a script, and the sessions that this process has open.

connect    The settings become a WorkerConfig, and an earlier session of the same worker is closed.
exit       A session that the script leaves open is closed when the script ends, also by SIGTERM.
"""

from __future__ import annotations

import atexit
import logging
import multiprocessing.util
import os
import signal
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from types import FrameType

from ps_protocol.errors import InvalidRequest, PSError, Unsupported
from ps_runtime.signals import end_by_signal, process_ends
from ps_worker.config import WorkerConfig, resolve
from ps_worker.launched import report_errors_in_one_line, speak_as, warn_of_unknown_variables
from ps_worker.session import Session

log = logging.getLogger("ps_worker")


def connect(
    server: str | None = None,
    mode: str | None = None,
    job: str | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    *,
    elastic: bool | None = None,
    quorum: str | int | None = None,
    quorum_grace: float | None = None,
    connect_timeout: float | None = None,
    metrics_host: str | None = None,
    metrics_port: int | None = None,
    transport: str | None = None,
    shared_directory: str | None = None,
    tls_cert: str | None = None,
    tls_key: str | None = None,
    tls_ca: str | None = None,
    token_file: str | None = None,
    insecure: bool | None = None,
    metrics_insecure: bool | None = None,
    take_over: bool | None = None,
    timeline: str | None = None,
    timeline_first: int | None = None,
    timeline_steps: int | None = None,
) -> Session:
    """Makes this worker's session. It calls no server before `prepare`.

    Every argument is optional. A setting that is left out comes from its PS_* variable, then from the launcher's
    variables, then from the default. The same script therefore trains alone, with DDP or on servers, as it is launched.

    An open session of this process with the same server, job, rank and launch is closed first, so that a notebook's
    cell can be run again. An elastic session has no rank and stays open.

    Args:
        server: HOST:PORT of the coordinator (PS_SERVER).
        mode: "single", "ddp", "sync", "ssp:K", "async" or "local:H" (PS_MODE). By default "sync" with a server,
            otherwise "ddp" under a launcher of several processes, otherwise "single".
        job: The job's name (PS_JOB); "default" by default.
        rank: This worker's rank, from 0 (PS_RANK, or the launcher's: torchrun, srun, mpirun, an Indexed Job of
            Kubernetes).
        world_size: The number of workers of the job (PS_WORLD_SIZE, or the launcher's).
        elastic: Whether workers may come and go (PS_ELASTIC). The coordinator then gives out the ranks, and the job has
            no world size.
        quorum: In sync, how many live workers an update waits for (PS_QUORUM): 3, or "all-1" for all but one. A
            gradient that arrives later counts in the next update. By default all.
        quorum_grace: Seconds for which an update that has its quorum still waits for the others (PS_QUORUM_GRACE); 0 by
            default.
        connect_timeout: Seconds for which this worker keeps trying servers that do not answer (PS_CONNECT_TIMEOUT); 60
            by default.
        metrics_host, metrics_port: The address at which this worker serves /metrics (PS_METRICS_HOST, PS_METRICS_PORT);
            by default any free port.
        transport: How buckets travel (PS_TRANSPORT): "shm", memory shared with shards on this host; "tcp", data
            connections; or "grpc". "auto", the default, chooses for each shard the first of these that works.
        shared_directory: The directory through which shards on this host find that memory (PS_SHARED_DIRECTORY). It
            must be the shards' own setting; /dev/shm by default.
        tls_cert, tls_key: This worker's certificate and its key (PS_TLS_CERT, PS_TLS_KEY), for servers that ask for
            one.
        tls_ca: The CA file that verifies servers (PS_TLS_CA). Without it the connection is plaintext.
        token_file: A file with this worker's bearer token (PS_TOKEN_FILE), for servers that ask for one.
        insecure: Whether a token may leave this machine in plaintext, and metrics may be served in plaintext
            (PS_INSECURE).
        metrics_insecure: Whether metrics may be served beyond this machine without TLS (PS_METRICS_INSECURE).
        take_over: Whether to replace the live workers of another launch that trains the job (PS_TAKE_OVER). By default
            `prepare` raises JobInUse, which names them.
        timeline: The file of a timeline that is recorded from the first step on (PS_TIMELINE); see `Session.timeline`.
        timeline_first, timeline_steps: The first step that is recorded (1) and the number of steps (50)
            (PS_TIMELINE_FIRST, PS_TIMELINE_STEPS).

    Returns:
        The session. As a context manager it closes itself at the end of the block.

    Raises:
        InvalidRequest: Settings contradict each other, or files do not fit together.

    Example:
        import ps_torch
        import torch

        model = torch.nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with ps_torch.connect() as session:
            model, optimizer = session.prepare(model, optimizer)
            for _ in range(3):
                optimizer.zero_grad()
                model(torch.ones(8, 4, device=session.device)).square().mean().backward()
                optimizer.step()
    """
    arguments = dict(locals())  # only the parameters so far, each named as its setting
    report_errors_in_one_line()
    config = resolve(**arguments)
    speak_as(config.job, config.rank, config.log_level, config.log_format)
    warn_of_unknown_variables()
    _close_earlier(config)
    session = Session(config, _forget)
    opened = _Opened(session, config)
    _close_at_exit(opened)
    with _opening:
        _open.append(opened)
    return session


@dataclass(frozen=True)
class _Opened:
    """A session, and the process and the worker that it belongs to."""

    session: Session
    config: WorkerConfig
    pid: int = field(default_factory=os.getpid)

    def is_of(self, config: WorkerConfig) -> bool:
        """Whether the session is this process's, and of the same worker of the same job."""
        own, other = ((each.server, each.job, each.rank, each.launch.name) for each in (self.config, config))
        return own == other and self.pid == os.getpid()

    def end(self) -> None:
        """Closes the session when its process ends. Python would ignore an error here when it sets the exit code. So an
        error is logged, and ends the process at once.
        """
        process_ends()
        try:
            self.session.close()
        except PSError as error:
            log.critical("%s", error)
            with suppress(PSError):
                close_open_sessions()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)


_open: list[_Opened] = []  # the sessions of this process that are not closed
_opening = threading.Lock()


def _close_earlier(config: WorkerConfig) -> None:
    """Closes a session that an earlier `connect` of this process opened for the same worker."""
    if config.consistency is None or config.rank is None:
        return
    with _opening:
        earlier = [opened.session for opened in _open if opened.is_of(config)]
    for session in earlier:
        log.warning(
            "an earlier session of this process was worker %d of job %s at %s: it is closed, and a new one begins",
            *(config.rank, config.job, config.server),
        )
        try:
            session.close()
        except PSError as error:
            log.warning("%s", error)  # it belongs to that session


def _forget(session: Session) -> None:
    """Removes a session that is closed from those that are open."""
    with _opening:
        for opened in _open:
            if opened.session is session:
                atexit.unregister(opened.end)
        _open[:] = [opened for opened in _open if opened.session is not session]


def refuse_elastic(session: Session, framework: str) -> None:
    """Closes a session of an elastic job that has not joined yet, and raises Unsupported. Each of its workers would be
    rank 0 to the framework, and all would write the same files.
    """
    try:
        _ = session.is_main
    except InvalidRequest:
        session.close()
        raise Unsupported(
            f"an elastic job gives out ranks when it is joined, and {framework} asks for this worker's before: leave "
            "elastic out, or write your own loop"
        ) from None


def close_open_sessions() -> None:
    """Closes the open sessions of this process, then raises the first error.

    Ray Train calls it when a worker's function ends before its process.
    """
    with _opening:
        still_open = [opened.session for opened in _open]
    errors = []
    for session in still_open:
        try:
            session.close()
        except PSError as error:
            errors.append(error)
    if errors:
        raise errors[0]


def _close_at_exit(opened: _Opened) -> None:
    """Leaves the job when the script ends, also by SIGTERM, which would skip atexit."""
    if multiprocessing.parent_process() is None:
        # It keeps the session alive: a script may hold it in a function that has ended.
        atexit.register(opened.end)
    else:
        # A process that multiprocessing forked ends without atexit. And where it does not, as under mp.spawn, an error
        # that ended the worker's function is gone by then, so that the worker would seem to have come to its end.
        multiprocessing.util.Finalize(None, opened.end, exitpriority=0)
    main = threading.current_thread() is threading.main_thread()
    if main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        ending = threading.Event()
        # The function registered last is called first. From then on a SIGTERM comes to a script that is ending already:
        # no exception may interrupt that.
        atexit.register(ending.set)

        def terminate(number: int, frame: FrameType | None) -> None:
            if not ending.is_set():
                end_by_signal(number)

        signal.signal(signal.SIGTERM, terminate)
