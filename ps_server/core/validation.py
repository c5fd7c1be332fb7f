"""Checks registrations, addresses and names before a coordinator or a shard uses them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence

from ps_protocol.addresses import is_host, is_host_port
from ps_protocol.errors import InvalidRequest, LimitExceeded
from ps_protocol.job import JobSpec, validate
from ps_protocol.layout import ALIGNMENT_BYTES
from ps_protocol.optimizers import check_hyper_parameters
from ps_protocol.row_optimizers import check_row_optimizer
from ps_server.core.limits import Limits

MAX_LAUNCH_LENGTH = 255
MAX_PLACE_LENGTH = 128  # of a memory place
# A bucket costs a shard 5 KiB and 30 us, whatever it holds: a job of few bytes may not have a shard make very many.
FREE_BUCKETS, BYTES_OF_A_BUCKET = 1_024, 16 * 2**10


def check_job_spec(spec: JobSpec, limits: Limits) -> None:
    """Raises InvalidRequest or LimitExceeded naming the first thing wrong with a job. Makes nothing of its size."""
    _check_counts(spec, limits)
    validate(spec)
    _check_sizes(spec, limits)
    checked = set()
    for index, group in enumerate(spec.groups):
        kind = spec.optimizer_of(index), tuple(sorted(group.items()))
        if kind not in checked:
            check_hyper_parameters(spec.optimizer_of(index), group)
            checked.add(kind)
    for table in spec.tables:
        check_row_optimizer(table.optimizer, table.values)


def _check_counts(spec: JobSpec, limits: Limits) -> None:
    """What takes time by its number alone comes first."""
    if len(spec.parameters) > limits.parameters:
        raise LimitExceeded(f"max-parameters is {limits.parameters}, got a job of {len(spec.parameters)}")
    if len(spec.groups) > limits.groups:
        raise LimitExceeded(f"max-groups is {limits.groups}, got a job of {len(spec.groups)} parameter groups")


def _check_sizes(spec: JobSpec, limits: Limits) -> None:
    for name in [parameter.name for parameter in spec.parameters] + [table.rows.name for table in spec.tables]:
        if len(name) > limits.name_length:
            raise LimitExceeded(f"max-name-length is {limits.name_length}, got a name of {len(name)}")
    if spec.world_size > limits.workers:
        raise LimitExceeded(f"max-workers is {limits.workers}, got a world_size of {spec.world_size}")
    # One more for each parameter is more than alignment and the ends of spaces can add.
    size = sum(parameter.nbytes + ALIGNMENT_BYTES for parameter in spec.parameters)
    if size > limits.job_bytes:
        raise LimitExceeded(f"max-job-bytes is {limits.job_bytes}, got a job of {size}")
    buckets = size // spec.bucket_bytes
    if buckets > limits.buckets:
        raise LimitExceeded(f"max-buckets is {limits.buckets}, got a job of about {buckets}; use larger bucket_bytes")
    allowed = FREE_BUCKETS + size // BYTES_OF_A_BUCKET
    if buckets > allowed:
        raise LimitExceeded(
            f"a job of {size} bytes may have {allowed} buckets, because each costs a shard 5 KiB; got about "
            f"{buckets}: use larger bucket_bytes"
        )


def check_once(values: Sequence[Hashable], what: str) -> None:
    """Raises InvalidRequest, naming it, if one of these comes twice. what: as in "a push names each bucket"."""
    if len(set(values)) != len(values):
        [(twice, _)] = Counter(values).most_common(1)
        raise InvalidRequest(f"{what} at most once, got {twice!r} twice")


def check_address(address: str, what: str) -> None:
    """Raises InvalidRequest unless this is HOST:PORT."""
    if not is_host_port(address):
        raise InvalidRequest(f"{what} must be HOST:PORT, got {address[:80]!r}")


def check_host(host: str) -> None:
    """Raises InvalidRequest unless this can be a host's name, or is empty."""
    if not is_host(host):
        raise InvalidRequest(f"a host's name has up to 255 letters, digits, '.', '_', ':' and '-', got {host[:80]!r}")


def check_memory_place(place: str) -> None:
    """Raises InvalidRequest unless this can say where a process shares memory, or is empty."""
    if len(place) > MAX_PLACE_LENGTH or not place.isascii() or not place.isprintable():
        raise InvalidRequest(
            f"memory_place has up to {MAX_PLACE_LENGTH} printable ASCII characters, got {place[:80]!r}"
        )


def check_launch(launch: str) -> None:
    """Raises InvalidRequest unless this can name a launch, or is empty."""
    if len(launch) > MAX_LAUNCH_LENGTH or not launch.isascii() or not launch.isprintable():
        raise InvalidRequest(f"a launch's name has up to 255 printable ASCII characters, got {launch[:80]!r}")
