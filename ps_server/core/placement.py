"""How a job is cut and placed: how large its buckets are, and which shard holds which of them.

**Size.** The fixed cost of a bucket speaks for few large buckets. Overlap speaks for many small ones: weights can only
come back once a bucket is complete, so nothing overlaps the first bucket's way to the shard and the last one's way
back. Between hosts the overlap counts more. With 4 worker and 4 shard hosts on links of 200 Mbit/s, and 32 MB of
weights, a step took 0.70 of DDP's time with buckets of 256 KiB, 0.84 with 1 MiB, 1.16 with 4 MiB. On one machine the
fixed cost counts more. A round took, in ms:

    weights, transport      buckets of 4 MiB   8 MiB  16 MiB
    256 MiB, TCP                         561     486     363
    256 MiB, shared memory                90      92      84
    256 MiB, gRPC                       1045    1095    1042
    64 MiB, TCP                           85      70      63
    64 MiB, shared memory                 16      15      14

Larger buckets take more memory of a shard: with four workers over TCP, and 97 MiB of weights, 1.99, 2.10 and 2.37 times
the bytes of weights and state.

**Place.** By bytes, largest first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ps_protocol.job import JobSpec
from ps_protocol.layout import bucket_layout

if TYPE_CHECKING:
    from ps_tables.cold import ColdFile  # it imports torch, and `ps-server plan` places buckets without torch


import math
from dataclasses import replace

from ps_protocol.job import MAX_BUCKET_BYTES
from ps_protocol.layout import ALIGNMENT_BYTES, DEFAULT_BUCKET_BYTES


def place(sizes: Sequence[int], shard_count: int) -> list[int]:
    """Returns the index of the shard of each bucket.

    sizes: bytes of each bucket. The longest-processing-time rule (Graham, "Bounds on Multiprocessing Timing Anomalies",
    1969): each bucket, largest first, goes to the shard with the fewest bytes; at most 4/3 of the best possible.
    Ties go to the lower index, so equal arguments give equal placements.
    """
    loads = [0] * shard_count
    placement = [0] * len(sizes)
    for bucket in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        shard = min(range(shard_count), key=loads.__getitem__)
        placement[bucket] = shard
        loads[shard] += sizes[bucket]
    return placement


def imbalance(sizes: Sequence[int], placement: Sequence[int], shard_count: int) -> float:
    """Returns the most bytes on a shard over the mean of all shards: 1.0 is perfectly even."""
    loads = [0] * shard_count
    for size, shard in zip(sizes, placement, strict=True):
        loads[shard] += size
    return max(loads) * shard_count / sum(loads) if sum(loads) else 1.0


@dataclass(frozen=True)
class TableShare:
    """A shard's number among the shards that share each table, and its memory and disk for each table.

    shard, shards: the shard's number, and the count of shards
    table_bytes: bytes of memory for the rows of each table
    salt:        a secret of the process, on which the hash index depends
    file_bytes:  bytes of disk for each table; 0: all rows are in memory
    open_file:   makes a table's file, given the numbers in a record and the count of records; None: there are no files
    """

    shard: int = 0
    shards: int = 1
    table_bytes: int = 2**40
    salt: int = 0
    file_bytes: int = 0
    open_file: Callable[[int, int], ColdFile] | None = None


@dataclass(frozen=True)
class PlacedJob:
    """A job with its buckets placed on shards.

    run:       tells this job from earlier ones of its name; later runs sort after earlier ones
    continues: the run and the checkpoint with which this run began; None if it began anew
    placement: for each bucket, the index of its shard
    nbytes, trained_bytes: bytes of all buckets, and of those that an optimizer steps
    imbalance: most bytes on a shard over the mean of all shards
    """

    spec: JobSpec
    run: str
    placement: tuple[int, ...]
    nbytes: int
    imbalance: float
    trained_bytes: int
    continues: tuple[str, str] | None = None

    def owns(self, run: str, checkpoint: str) -> bool:
        """Whether a checkpoint belongs to this run, or to the part of the earlier run from which this run continued."""
        if self.continues is not None and run == self.continues[0]:
            return int(checkpoint) <= int(self.continues[1])
        return run == self.run

    def buckets_of(self, shard: int) -> list[int]:
        """Returns the buckets that a shard holds."""
        return [bucket for bucket, index in enumerate(self.placement) if index == shard]


def place_job(spec: JobSpec, shard_count: int, run: str) -> PlacedJob:
    """Returns a job with each of its buckets on a shard."""
    layout = bucket_layout(spec.parameters, spec.bucket_bytes)
    sizes = [bucket.nbytes for bucket in layout.buckets]
    placement = place(sizes, shard_count)
    trained = sum(bucket.nbytes for bucket in layout.buckets if not bucket.frozen)
    return PlacedJob(spec, run, tuple(placement), layout.nbytes, imbalance(sizes, placement, shard_count), trained)


LEAST_BYTES = 256 * 2**10  # the least bucket between hosts: smaller ones cost more than their overlap gains
BUCKETS = 128  # between hosts, trained parameters are cut into about so many
# The least number on one machine, because the way back of the last bucket overlaps nothing. There are fewer if so many
# would be smaller than DEFAULT_BUCKET_BYTES.
BUCKETS_OF_ONE_MACHINE = 8
MOST_BUCKETS = 2048  # between hosts, with frozen parameters: they are cut into buckets too, and travel only once


def sized(spec: JobSpec, one_machine: bool, limit: int) -> JobSpec:
    """Returns the job with a bucket size: its own, or else a chosen one.

    one_machine: shards and workers are all on one machine
    limit:       the most buckets that a job may have. A chosen size respects it, unless buckets of DEFAULT_BUCKET_BYTES
                 would already be too many
    """
    if spec.bucket_bytes:
        return spec
    # Sizes are bytes on the wire: with half types both ways, a bucket has twice as many bytes as its message.
    wide = 1 if "float32" in (spec.gradient_wire, spec.weight_wire) else 2
    trained = sum(parameter.nbytes for parameter in spec.parameters if parameter.param_group is not None)
    if one_machine:
        size = 2 ** int(math.log2(max(trained // (wide * BUCKETS_OF_ONE_MACHINE), 1)))
        size = min(max(size, DEFAULT_BUCKET_BYTES), MAX_BUCKET_BYTES // wide)
    else:
        everything = sum(parameter.nbytes + ALIGNMENT_BYTES for parameter in spec.parameters)
        size = max(2 ** round(math.log2(max(trained // (wide * BUCKETS), 1))), LEAST_BYTES)
        while size < DEFAULT_BUCKET_BYTES and everything // (size * wide) > min(MOST_BUCKETS, limit):
            size *= 2
        size = min(size, DEFAULT_BUCKET_BYTES)
    return replace(spec, bucket_bytes=size * wide)
