"""How large a job's buckets are where its workers do not say.

What a bucket costs besides its bytes speaks for few large ones, what may overlap for many small ones: weights can only
come back once a bucket is complete, and on a link that is the limit the first bucket's way there and the last one's way
back overlap nothing. On one machine the first counts more, between hosts the second: with 4 worker and 4 shard hosts on
links of 200 Mbit/s and 32 MB of weights a step took 0.70 of DDP's with 256 KiB, 0.84 with 1 MiB, 1.16 with 4 MiB. On
one machine a round of 256 MiB over TCP took 561 ms with 4 MiB, 486 with 8, 363 with 16 (shared memory: 90, 92, 84;
gRPC: 1045, 1095, 1042), and one of 64 MiB 85, 70 and 63 ms (shared memory: 16, 15 and 14). Larger buckets take more
memory of a shard: with four workers over TCP, and 97 MiB of weights, 1.99, 2.10 and 2.37 times weights and state.
"""

from __future__ import annotations

import math
from dataclasses import replace

from ps_protocol.job import MAX_BUCKET_BYTES, JobSpec
from ps_protocol.layout import ALIGNMENT_BYTES, DEFAULT_BUCKET_BYTES

LEAST_BYTES = 256 * 2**10  # between hosts; smaller ones cost more than they let overlap
BUCKETS = 128  # of what is trained between hosts, about
BUCKETS_OF_ONE_MACHINE = 8  # at least, unless they are as small as DEFAULT_BUCKET_BYTES: the last overlaps nothing
MOST_BUCKETS = 2048  # between hosts, with what is not trained: it is cut alike, and only travels once


def sized(spec: JobSpec, one_machine: bool, limit: int) -> JobSpec:
    """Returns the job with the size of its buckets, where that was left open.

    one_machine: whether shards and workers are all on it
    limit:       buckets that a job may have; kept where buckets of DEFAULT_BUCKET_BYTES keep it
    """
    if spec.bucket_bytes:
        return spec
    # Sizes on the wire: with half types both ways, as many bytes of weights make two of a message's.
    wide = 1 if "float32" in (spec.gradient_wire, spec.weight_wire) else 2
    trained = sum(parameter.nbytes for parameter in spec.parameters if parameter.group is not None)
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
