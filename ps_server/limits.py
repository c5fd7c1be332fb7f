"""How much anyone may take: every limit of a server by name, with its default. Each has a flag, --max-NAME.

Past one, a call ends with RESOURCE_EXHAUSTED or INVALID_ARGUMENT and names it; a connection is closed.
"""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass, fields

from ps_protocol.channel import MAX_BUCKET_BYTES, MAX_MESSAGE_BYTES
from ps_protocol.errors import InvalidRequest, LimitExceeded
from ps_protocol.job import MAX_NAME_LENGTH, MAX_PARAMETERS, JobSpec, validate
from ps_protocol.layout import ALIGNMENT_BYTES
from ps_protocol.optimizers import check_hyper_parameters
from ps_protocol.settings import add_setting, count, seconds


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
    calls:          in flight of one caller (a token or certificate, from one host)
    staged_bytes:   pushed by one worker of a job and not applied yet, on one shard
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
    calls: int = 512
    staged_bytes: int = 64 * 2**30
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
    "calls": "calls in flight of one caller from one host",
    "staged_bytes": "bytes that one worker has pushed and that are not applied yet",
    "connections": "connections to one process",
    "metadata_bytes": "bytes of a call's metadata",
    "handshake_seconds": "seconds that a connection may take to be made",
    "upload_seconds": "seconds that a request may take to arrive",
    "stall_seconds": "seconds that an answer may lie unread",
}


def check_job_spec(spec: JobSpec, limits: Limits) -> None:
    """Raises InvalidRequest or LimitExceeded naming the first thing wrong with a job. Makes nothing of its size."""
    validate(spec, MAX_BUCKET_BYTES)
    _check_sizes(spec, limits)
    for group in spec.groups:
        check_hyper_parameters(spec.optimizer, group)


def _check_sizes(spec: JobSpec, limits: Limits) -> None:
    if len(spec.parameters) > limits.parameters:
        raise LimitExceeded(f"max-parameters is {limits.parameters}, got a job of {len(spec.parameters)}")
    for parameter in spec.parameters:
        if len(parameter.name) > limits.name_length:
            raise LimitExceeded(f"max-name-length is {limits.name_length}, got a name of {len(parameter.name)}")
    if spec.world_size > limits.workers:
        raise LimitExceeded(f"max-workers is {limits.workers}, got a world_size of {spec.world_size}")
    # One more for each parameter is more than alignment and the ends of spaces can add.
    size = sum(parameter.nbytes + ALIGNMENT_BYTES for parameter in spec.parameters)
    if size > limits.job_bytes:
        raise LimitExceeded(f"max-job-bytes is {limits.job_bytes}, got a job of {size}")
    buckets = size // spec.bucket_bytes
    if buckets > limits.buckets:
        raise LimitExceeded(f"max-buckets is {limits.buckets}, got a job of about {buckets}; use larger bucket_bytes")


_ADDRESS = re.compile(r"[A-Za-z0-9._\[\]:-]{1,255}:[0-9]{1,5}")
_HOST = re.compile(r"[A-Za-z0-9._:-]{0,255}")


def check_address(address: str, what: str) -> None:
    """Raises InvalidRequest unless this is HOST:PORT: it is shown to people and handed to Prometheus."""
    if not _ADDRESS.fullmatch(address):
        raise InvalidRequest(f"{what} must be HOST:PORT, got {address[:80]!r}")


def check_host(host: str) -> None:
    """Raises InvalidRequest unless this can be a host's name, or is empty."""
    if not _HOST.fullmatch(host):
        raise InvalidRequest(f"a host's name has up to 255 letters, digits, '.', '_', ':' and '-', got {host[:80]!r}")


def add_limits(parser: argparse.ArgumentParser) -> None:
    """Adds a flag for each limit."""
    group = parser.add_argument_group("limits")
    for entry in fields(Limits):
        kind = seconds if entry.name.endswith("_seconds") else count
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
