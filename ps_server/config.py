"""The settings of a server process: `ServerConfig`, and the declaration of each setting in it."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable
from dataclasses import Field, dataclass, fields
from pathlib import Path
from typing import Any

from ps_protocol.errors import InvalidRequest
from ps_runtime.channel import DEFAULT_PORT
from ps_runtime.credentials import Tls, is_loopback, require_encryption, tls
from ps_runtime.logs import log_settings
from ps_runtime.settings import (
    DEFAULT_SHARED_DIRECTORY,
    NATIVE,
    Setting,
    access_settings,
    amount,
    count,
    host_port,
    index,
    path,
    port_number,
    seconds,
    seconds_or_none,
    whole_number,
)
from ps_server.coordinator.checkpoint_policy import CheckpointPolicy
from ps_server.coordinator.timing import (
    DEFAULT_DRAIN_SECONDS,
    DEFAULT_LEASE_SECONDS,
    DEFAULT_SERVER_CALL_SECONDS,
    DEFAULT_TIMING,
    Timing,
)
from ps_server.core.limits import DEFAULTS, Limits
from ps_server.storage.files import parse_path

DEFAULT_METRICS_PORT = 9100


@dataclass(frozen=True)
class ServerConfig:
    """The settings of one server process.

    shard_count: the number of shards of the cluster; set if this process is the coordinator, otherwise None
    index:       this process's shard; None if it is the coordinator alone
    coordinator: HOST:PORT of the coordinator; None if this process is the coordinator
    host, port:  where to listen; port 0 lets the system choose
    data_port:   where workers open data connections, at `host`; 0 lets the system choose
    no_data_port: no data connections over TCP
    advertise:   HOST:PORT under which other processes reach this one; None: the address where it listens
    lease:       seconds for which a worker counts as live without a heartbeat
    server_call_seconds: deadline of a call between servers
    job_timeout: seconds after which a job ends whose workers are all gone
    absence_seconds: how long a job waits at its end for a worker that was removed as silent
    apply_threads: threads that apply updates
    shared_directory: where workers on this host hand over the memory that they share
    cold_rows_dir: directory for rows of tables that do not fit into a shard's memory; None if there is none
    native:      auto or off: whether a shard uses the library for tables
    tls:         certificates to serve with, and to call the other servers with; None: plaintext, on loopback
    tokens:      file that says which caller may do what; None: every caller may do everything
    insecure:    plaintext may be served beyond this machine; metrics_insecure: plaintext metrics may
    limits:      the limits for callers
    checkpoint_dir: where checkpoints are, the same place for all shards and the coordinator, unless shards have an
                 own_disk; None if there are none
    own_disk:    a shard keeps its files of checkpoints below checkpoint_dir on a disk of its own
    checkpoint_every: `100steps` or `60s`; None: only when asked to, at a job's end, and when the server stops
    full_checkpoint_every: one of so many checkpoints has all rows of tables
    keep:        how many checkpoints of a job are kept
    restore:     jobs continue from their checkpoints in checkpoint_dir
    resume:      the coordinator resumes the jobs that ran when the last coordinator ended
    drain_seconds: how long workers have to reach the last checkpoint before the servers end
    timing:      the coordinator's intervals and timeouts
    restart_count: how often `ps-server up` has restarted this shard
    health_port: port of the pages for probes, at `host`, in plaintext; None: no such pages
    """

    shard_count: int | None = None
    index: int | None = None
    coordinator: str | None = None
    host: str = "127.0.0.1"
    port: int = 0
    data_port: int = 0
    no_data_port: bool = False
    advertise: str | None = None
    metrics_host: str = "127.0.0.1"
    metrics_port: int = 0
    lease: float = DEFAULT_LEASE_SECONDS
    server_call_seconds: float = DEFAULT_SERVER_CALL_SECONDS
    job_timeout: float = DEFAULT_TIMING.deserted
    absence_seconds: float = DEFAULT_TIMING.absence
    apply_threads: int = 1
    shared_directory: Path = DEFAULT_SHARED_DIRECTORY
    cold_rows_dir: Path | None = None
    native: str = NATIVE.default
    tls: Tls | None = None
    tokens: Path | None = None
    insecure: bool = False
    metrics_insecure: bool = False
    limits: Limits = DEFAULTS
    checkpoint_dir: Path | None = None
    own_disk: bool = False
    checkpoint_every: str | None = None
    full_checkpoint_every: int = CheckpointPolicy.full_every
    keep: int = CheckpointPolicy.keep
    restore: bool = False
    resume: bool = False
    drain_seconds: float = DEFAULT_DRAIN_SECONDS
    timing: Timing = DEFAULT_TIMING
    restart_count: int = 0
    health_port: int | None = None

    def shows_page(self) -> bool:
        """Returns whether the metrics port serves the page, which shows everything to every user of this machine."""
        return self.shard_count is not None and is_loopback(self.metrics_host) and self.tokens is None

    def is_exposed(self) -> bool:
        """Returns whether calls travel in plaintext beyond this machine.

        Raises InvalidRequest if they, or metrics, would and that is not permitted.
        """
        encrypted, metrics_insecure = self.tls is not None, self.metrics_insecure or self.insecure
        exposed = require_encryption(self.host, encrypted, self.insecure, "this server", "--insecure")
        require_encryption(self.metrics_host, encrypted, metrics_insecure, "metrics", "--metrics-insecure")
        return exposed

    def checkpoint_policy(self, address: str = "") -> CheckpointPolicy | None:
        """Returns the coordinator's policy of checkpoints; None if it makes none. Raises InvalidRequest for settings
        that contradict each other.

        address: of the coordinator
        """
        if self.checkpoint_dir is not None:
            steps, every = parse_every(self.checkpoint_every) if self.checkpoint_every else (None, None)
            when = steps, every, self.keep, self.restore, self.resume
            return CheckpointPolicy(self.checkpoint_dir, *when, address, self.full_checkpoint_every)
        if self.checkpoint_every or self.restore or self.resume or self.own_disk:
            raise InvalidRequest("--checkpoint-every, --restore, --resume and --own-disk need --checkpoint-dir")
        return None


def parse_every(text: str) -> tuple[int | None, float | None]:
    """Returns `100steps` or `60s` as (steps, seconds). Raises InvalidRequest for other texts."""
    for unit, kind in (("steps", int), ("s", float)):
        if text.endswith(unit):
            with contextlib.suppress(ValueError):
                value = kind(text.removesuffix(unit))
                if 0 < value < 1e9:
                    return (int(value), None) if unit == "steps" else (None, float(value))
    raise InvalidRequest(f"expected a number of steps or of seconds, such as 100steps or 60s, got {text!r}")


def every(text: str) -> str:
    """Checks a text such as 100steps or 60s."""
    try:
        parse_every(text)
    except InvalidRequest as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def checkpoints_at(text: str) -> Path | None:
    """Parses a directory, or a path in an object store."""
    try:
        return parse_path(text)
    except InvalidRequest as error:
        raise argparse.ArgumentTypeError(str(error)) from None


# -- settings: those of a cluster, of a process, of its checkpoints; and limits --------------------------------------

SHARDS = Setting("shards", "how many shards the cluster has", count, 2, "N")
MAX_SHARD_RESTARTS = Setting(
    "max_shard_restarts",
    "how often a shard may end in a row and be started again; not given: for ever",
    index,
    None,
    "N",
)
SHARD_START_TIMEOUT = Setting(
    "shard_start_timeout", "seconds until a shard that is not ready is killed and started again", seconds, 60.0
)
INDEX = Setting("index", "which shard this is, from 0", index, metavar="I", required=True)
COORDINATOR = Setting("coordinator", "where the coordinator is", host_port, metavar="HOST:PORT")
ADVERTISE = Setting("advertise", "how others reach this process", host_port, metavar="HOST:PORT")

HEALTH_PORT = Setting(
    "health_port", "port of /livez and /readyz, in plaintext, for probes; not given: none", port_number, metavar="PORT"
)

PROCESS = (
    Setting("host", "address to listen on", default=ServerConfig.host),
    Setting("port", "port to listen on, 0: any free one; shard i of `up` has it plus i", port_number, DEFAULT_PORT),
    Setting(
        "data_port", "port at which workers open data connections, 0: any free one; shard i, likewise", port_number, 0
    ),
    Setting("no_data_port", "take no data connections over TCP: what cannot share memory uses gRPC", bool),
    Setting("metrics_host", "address to serve metrics on", default=ServerConfig.metrics_host),
    Setting("metrics_port", "port of /metrics, likewise", port_number, DEFAULT_METRICS_PORT),
    Setting("lease", "seconds for which a silent worker counts as live", seconds, ServerConfig.lease),
    Setting(
        "server_call_seconds",
        "seconds for which a call between servers waits for its answer",
        seconds,
        ServerConfig.server_call_seconds,
    ),
    Setting(
        "job_timeout", "seconds after which a job ends whose workers are all gone", seconds, ServerConfig.job_timeout
    ),
    Setting(
        "absence_seconds",
        "seconds for which a job waits at its end for a worker that was taken off as silent and may come back",
        seconds_or_none,
        ServerConfig.absence_seconds,
    ),
    Setting(
        "shared_directory",
        "where processes on this host hand over the memory that they share",
        Path,
        DEFAULT_SHARED_DIRECTORY,
    ),
    Setting("cold_rows_dir", "where a shard keeps rows of tables that its memory has no room for", path, metavar="DIR"),
    NATIVE,
    Setting("apply_threads", "threads that a shard applies updates with", count, ServerConfig.apply_threads),
    *access_settings(serves=True),
    Setting(
        "tokens",
        "what callers may do: lines ROLE[:JOB] TOKEN [name=NAME] [until=DATE] and cn:NAME ROLE[:JOB]",
        path,
        metavar="FILE",
    ),
    Setting("metrics_insecure", "serve metrics beyond this machine without TLS", bool),
    Setting("audit_log", "write the audit log to this file, one JSON object a line; - is stderr", metavar="FILE"),
    *log_settings("info"),
)
CHECKPOINTS = (
    Setting(
        "checkpoint_dir",
        "where checkpoints are; one directory or s3://BUCKET/PATH for all",
        checkpoints_at,
        metavar="DIR",
    ),
    Setting("own_disk", "a shard keeps its files below checkpoint-dir on a disk of its own, which others lack", bool),
    Setting("checkpoint_every", "how often to make one, as in 100steps or 60s", every, metavar="EVERY"),
    Setting(
        "full_checkpoint_every",
        "of so many checkpoints one has all rows of tables, the others what changed since the one before",
        count,
        ServerConfig.full_checkpoint_every,
        "N",
    ),
    Setting("keep", "how many checkpoints of a job to keep", count, ServerConfig.keep, "N"),
    Setting(
        "drain_seconds",
        "seconds that workers have to end their steps when the servers are told to stop",
        seconds,
        ServerConfig.drain_seconds,
    ),
    Setting("restore", "start jobs from their last checkpoints", bool),
    Setting("resume", "resume the jobs that ran when the coordinator ended, and no others", bool),
)


def _kind(limit: Field[Any]) -> Callable[[str], Any]:
    if limit.type == "float":
        return seconds if limit.name.endswith("_seconds") else amount
    return whole_number(limit.metadata["least"], limit.metadata["largest"])


LIMITS = tuple(
    Setting(f"max_{limit.name}", limit.metadata["text"], _kind(limit), limit.default, "N") for limit in fields(Limits)
)
# Settings that are the same for every server process of a cluster.
SETTINGS = (*PROCESS, *CHECKPOINTS, *LIMITS)


def config_of(
    arguments: argparse.Namespace, shard_count: int | None, index: int | None, coordinator: str | None
) -> ServerConfig:
    """Returns the settings in the flags of a server process. Raises InvalidRequest if a file of TLS cannot be used."""
    given = vars(arguments)
    names = given.keys() & ServerConfig.__dataclass_fields__.keys() - {"index", "coordinator"}
    return ServerConfig(
        shard_count=shard_count,
        index=index,
        coordinator=coordinator,
        tls=tls(arguments.tls_cert, arguments.tls_key, arguments.tls_ca),
        limits=Limits(**{limit.name: given[f"max_{limit.name}"] for limit in fields(Limits)}),
        **{name: given[name] for name in names},
    )
