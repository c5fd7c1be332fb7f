"""How much anyone may take: every limit of a server by name, with its default. Each has a flag, --max-NAME.

Past one, a call ends with RESOURCE_EXHAUSTED or INVALID_ARGUMENT and names it; a connection is closed.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass, fields

from ps_protocol.job import MAX_MESSAGE_BYTES, MAX_NAME_LENGTH, MAX_PARAMETERS
from ps_runtime.settings import CommandLine, add_setting, amount, count, seconds


@dataclass(frozen=True)
class Limits:
    """The limits of one server process.

    message_bytes:  of one message, either way
    parameters:     tensors of a job
    buckets:        of a job
    job_bytes:      of all parameters of a job
    name_length:    characters of a parameter's name
    jobs:           at the same time
    workers:        live ones of a job
    samples:        of one loader, in an elastic job
    leases:         batches of one loader that one worker may have leased
    calls:          in flight of one caller (a token or certificate, from one host)
    staged_bytes:   of a job, pushed to one shard and held back there for other workers; None: derived from its size
    all_calls:      in flight of all callers together, but for health checks
    state_bytes:    of what a worker saves of its own for a checkpoint
    round_bytes:    of all workers' values in one session.gather, mean or broadcast; as many are kept of past ones
    caller_bytes:   pushed by one caller, as whatever workers, and not applied yet, on one shard
    push_norm:      the L2 norm of the gradient in one push, which is one bucket's
    connections:    to one process
    metadata_bytes: of one call
    handshake_seconds: from a connection to its first settings, TLS included
    upload_seconds: from a call to the end of its request
    stall_seconds:  for which a reader may leave an answer lying
    """

    message_bytes: int = MAX_MESSAGE_BYTES
    parameters: int = MAX_PARAMETERS
    buckets: int = 65_536
    job_bytes: int = 2**40
    name_length: int = MAX_NAME_LENGTH
    jobs: int = 64
    workers: int = 4_096
    samples: int = 2**40
    leases: int = 1_024
    calls: int = 512
    staged_bytes: int | None = None
    all_calls: int = 16_384
    state_bytes: int = 16 * 2**20
    round_bytes: int = 16 * 2**20
    caller_bytes: int = 64 * 2**30
    push_norm: float = math.inf
    connections: int = 8_192
    metadata_bytes: int = 16 * 2**10
    handshake_seconds: float = 10.0
    upload_seconds: float = 30.0
    stall_seconds: float = 30.0

    def options(self) -> list[tuple[str, int]]:
        """Those that gRPC itself keeps, as options of a server."""
        return [
            ("grpc.max_receive_message_length", self.message_bytes),
            ("grpc.max_send_message_length", self.message_bytes),
            ("grpc.max_allowed_incoming_connections", self.connections),
            ("grpc.max_concurrent_streams", self.calls),
            ("grpc.max_metadata_size", self.metadata_bytes),
            ("grpc.absolute_max_metadata_size", self.metadata_bytes),
            ("grpc.server_handshake_timeout_ms", int(self.handshake_seconds * 1000)),
        ]


DEFAULTS = Limits()

_TEXTS = {
    "message_bytes": "bytes of one message",
    "parameters": "tensors of a job",
    "buckets": "buckets of a job",
    "job_bytes": "bytes of a job's parameters",
    "name_length": "characters of a parameter's name",
    "jobs": "jobs at the same time",
    "workers": "live workers of a job",
    "samples": "samples of a loader whose data is leased",
    "leases": "batches of one loader that one worker may have leased",
    "calls": "calls in flight of one caller from one host",
    "staged_bytes": "bytes of a job that a shard holds back for others (by default as many as its weights)",
    "all_calls": "calls in flight of all callers together",
    "state_bytes": "bytes of a worker's own part of a checkpoint",
    "round_bytes": "bytes of all workers' values in one session.gather or the like, and of past ones that are kept",
    "caller_bytes": "bytes that one caller has pushed, as whatever workers, and that are not applied yet",
    "push_norm": "L2 norm of the gradient in one push, which is one bucket's",
    "connections": "connections to one process",
    "metadata_bytes": "bytes of a call's metadata",
    "handshake_seconds": "seconds that a connection may take to be made",
    "upload_seconds": "seconds that a request may take to arrive",
    "stall_seconds": "seconds that an answer may lie unread",
}


def add_limits(parser: CommandLine) -> None:
    """Adds a flag for each limit, and --help-limits, which explains them."""
    group = parser.add_hidden_group("limits", "--help-limits")
    for entry in fields(Limits):
        kind = seconds if entry.name.endswith("_seconds") else amount if entry.type == "float" else count
        flag = "--max-" + entry.name.replace("_", "-")
        add_setting(group, flag, _TEXTS[entry.name], default=getattr(DEFAULTS, entry.name), kind=kind, metavar="N")


def limits_of(arguments: argparse.Namespace) -> Limits:
    """The limits that the flags say."""
    return Limits(**{entry.name: getattr(arguments, "max_" + entry.name) for entry in fields(Limits)})


def limit_flags(limits: Limits) -> list[str]:
    """The flags that say these limits: for a parent to hand them on."""
    return [
        part
        for entry in fields(Limits)
        if getattr(limits, entry.name) != getattr(DEFAULTS, entry.name)
        for part in ("--max-" + entry.name.replace("_", "-"), str(getattr(limits, entry.name)))
    ]
