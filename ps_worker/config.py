"""What a worker is told: arguments first, then PS_* variables, then torchrun's, then defaults."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from ps_protocol.credentials import PLAINTEXT, Access, access
from ps_protocol.errors import InvalidRequest
from ps_protocol.modes import Consistency, parse_mode
from ps_protocol.settings import DEFAULT_SHARED_DIRECTORY
from ps_worker.launch_id import UNKNOWN, LaunchId, launch_id

T = TypeVar("T")

DEFAULT_CONNECT_SECONDS = 60.0
TRANSPORTS = ("auto", "shm", "grpc")


@dataclass(frozen=True)
class WorkerConfig:
    """One worker's place.

    server:          HOST:PORT of the coordinator; None in single and ddp
    mode:            single, ddp, sync, ssp:K or async
    consistency:     the rule that the mode stands for; None in single and ddp
    rank:            this worker's rank; None: the coordinator gives one
    world_size:      how many workers the job has; 0: elastic
    connect_timeout: seconds to keep trying an address that does not answer
    transport:       auto, shm or grpc: how buckets travel to shards on the same host
    shared_directory: where segments are made when shards cannot open this process' memory files
    access:          certificates and token that servers are called with
    metrics_insecure: metrics may be served beyond this machine without TLS
    mode_said:       the mode was given, by an argument or PS_MODE; else it follows from the rest
    launch:          what started this worker, and whether it takes over from another launch
    """

    server: str | None
    mode: str
    consistency: Consistency | None
    job: str
    rank: int | None
    world_size: int
    local_rank: int
    connect_timeout: float
    metrics_host: str | None
    metrics_port: int
    transport: str
    shared_directory: Path
    access: Access = PLAINTEXT
    metrics_insecure: bool = False
    mode_said: bool = False
    launch: LaunchId = UNKNOWN


def resolve(
    server: str | None = None,
    mode: str | None = None,
    job: str | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    elastic: bool | None = None,
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
) -> WorkerConfig:
    """Puts arguments and environment together. Raises InvalidRequest naming what is wrong and where it came from."""
    server = _first(server, str, "PS_SERVER")
    elastic = _first(elastic, _switch, "PS_ELASTIC") or False
    rank = None if elastic else _first(rank, _whole, "PS_RANK", "RANK")
    world_size = 0 if elastic else _first(world_size, _whole, "PS_WORLD_SIZE", "WORLD_SIZE")
    launched_several = (world_size or 1) > 1
    default = "sync" if server else "ddp" if launched_several else "single"
    said = _first(mode, str, "PS_MODE")
    mode = said or default
    consistency = parse_mode(mode)
    if consistency is not None and server is None:
        raise InvalidRequest(f"mode {mode} needs a server: connect(server='HOST:PORT'), PS_SERVER, or --server")
    if server is not None and not re.fullmatch(r".+:\d{1,5}", server):
        raise InvalidRequest(f"a server's address is HOST:PORT, got {server!r}")
    if mode == "single":
        rank, world_size = 0, 1
    elif not elastic:
        world_size = 1 if world_size is None else world_size
        if rank is None:
            if world_size > 1:
                raise InvalidRequest(f"world_size is {world_size}, but no rank was given (rank=, PS_RANK or RANK)")
            rank = 0
        if not 0 <= rank < world_size:
            raise InvalidRequest(f"rank must be from 0 to world_size - 1 = {world_size - 1}, got {rank}")
    elif consistency is None:
        raise InvalidRequest(f"an elastic job needs a server; mode {mode} has a fixed world size")
    transport = _first(transport, str, "PS_TRANSPORT") or "auto"
    if transport not in TRANSPORTS:
        raise InvalidRequest(f"transport must be one of {', '.join(TRANSPORTS)}, got {transport!r}")
    insecure = _first(insecure, _switch, "PS_INSECURE") or False
    found = access(
        _first(tls_cert, str, "PS_TLS_CERT"),
        _first(tls_key, str, "PS_TLS_KEY"),
        _first(tls_ca, str, "PS_TLS_CA"),
        _first(token_file, str, "PS_TOKEN_FILE"),
        insecure,
    )
    return WorkerConfig(
        server=server,
        mode=mode,
        consistency=consistency,
        job=_first(job, str, "PS_JOB") or "default",
        rank=rank,
        world_size=world_size or 0,
        local_rank=_first(None, _whole, "LOCAL_RANK") or 0,
        connect_timeout=_first(connect_timeout, float, "PS_CONNECT_TIMEOUT") or DEFAULT_CONNECT_SECONDS,
        metrics_host=_first(metrics_host, str, "PS_METRICS_HOST"),
        metrics_port=_first(metrics_port, _whole, "PS_METRICS_PORT") or 0,
        transport=transport,
        shared_directory=Path(_first(shared_directory, str, "PS_SHARED_DIRECTORY") or DEFAULT_SHARED_DIRECTORY),
        access=found,
        metrics_insecure=insecure or _first(metrics_insecure, _switch, "PS_METRICS_INSECURE") or False,
        mode_said=bool(said),
        launch=launch_id(world_size or 0, _first(take_over, _switch, "PS_TAKE_OVER") or False),
    )


def _first(argument: T | None, kind: Callable[[str], T], *variables: str) -> T | None:
    """The argument, or the first of the variables that is set and not empty."""
    if argument is not None:
        return argument
    for name in variables:
        text = os.environ.get(name)
        if text:
            try:
                return kind(text)
            except ValueError as error:
                raise InvalidRequest(f"{name}: {error}") from None
    return None


def _whole(text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise ValueError(f"expected a whole number, got {text!r}")
    return int(text)


def _switch(text: str) -> Any:
    if text.lower() not in ("0", "1", "true", "false"):
        raise ValueError(f"expected 1 or 0, got {text!r}")
    return text.lower() in ("1", "true")
