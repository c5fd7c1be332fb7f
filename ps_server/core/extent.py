"""Checks the size of a job, and that its parts fit together: all of a registration but its hyper-parameters.

Hyper-parameters need torch, this file does not: so `ps-server plan` refuses what a coordinator would refuse.
"""

from __future__ import annotations

from ps_protocol.errors import LimitExceeded
from ps_protocol.job import JobSpec, validate
from ps_protocol.layout import ALIGNMENT_BYTES
from ps_server.core.limits import Limits

# A bucket costs a shard 5 KiB and 30 us, whatever its size. So the number of buckets that a job may have depends on its
# bytes: otherwise a small request could make a shard allocate very many.
FREE_BUCKETS, BYTES_OF_A_BUCKET = 1_024, 16 * 2**10


def check_extent(spec: JobSpec, limits: Limits) -> None:
    """Raises InvalidRequest or LimitExceeded that names a job's first error. Allocates nothing in proportion to the
    job.
    """
    _check_counts(spec, limits)
    validate(spec)
    _check_sizes(spec, limits)


def _check_counts(spec: JobSpec, limits: Limits) -> None:
    """Checks the counts first: the other checks take time in proportion to them."""
    if len(spec.parameters) > limits.parameters:
        raise LimitExceeded(f"max-parameters is {limits.parameters}, got a job of {len(spec.parameters)}")
    if len(spec.param_groups) > limits.groups:
        raise LimitExceeded(f"max-groups is {limits.groups}, got a job of {len(spec.param_groups)} parameter groups")


def _check_sizes(spec: JobSpec, limits: Limits) -> None:
    for name in [parameter.name for parameter in spec.parameters] + [table.rows.name for table in spec.tables]:
        if len(name) > limits.name_length:
            raise LimitExceeded(f"max-name-length is {limits.name_length}, got a name of {len(name)}")
    if spec.world_size > limits.workers:
        raise LimitExceeded(f"max-workers is {limits.workers}, got a world_size of {spec.world_size}")
    # An upper bound: the alignment, and the ends of the spaces, add less than ALIGNMENT_BYTES for each parameter.
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
