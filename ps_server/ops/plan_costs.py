"""The processor time of a step, for `ps-server plan`: seconds of a core, as the benchmarks measured them.

The measured machine is 2 cores of AMD EPYC (docs/benchmarks.md). Cores of other machines are faster or slower, but the
plan only needs to tell whether the processor or the link is the limit.
"""

from __future__ import annotations

from ps_protocol.errors import InvalidRequest
from ps_protocol.optimizer_state import FUSED_ON_CPU

MIB = 2**20
# Milliseconds of a core at one end for 1 MiB of gradients and 1 MiB of weights, both as float32: half of what both ends
# use of it in `python -m bench round` and `bench round --tls`, with 256 MiB.
MS_A_MIB = {"shm": 0.11, "tcp": 0.59, "grpc": 1.55, "tcp+tls": 1.65, "grpc+tls": 2.2}
# Further milliseconds of a core at one end: for a bucket's push with its pull, whatever its size (docs/data-path.md,
# small buckets), and for a worker's step, whatever is in it (the rest of the time that `python -m bench crowd` takes).
MS_A_BUCKET, MS_A_STEP = 0.24, 0.12
# Milliseconds of a core for an optimizer's step on 1 MiB of weights: once for the weights, and once for each tensor of
# its state. torch has fused kernels for some optimizers. The others take UNFUSED times as long, because they make a
# pass over memory for each operation.
APPLY_MS, UNFUSED = 0.1, 3.5
# Milliseconds of a core for a heartbeat, measured with 1500 of one worker, one after the other. Each worker sends four
# in a lease.
HEARTBEAT_MS = 0.45
HEARTBEATS_A_LEASE = 4

TRANSPORTS = ("auto", "shm", "tcp", "grpc")


def way(transport: str, tls: bool, one_machine: bool) -> str:
    """Returns how buckets travel, as a key of MS_A_MIB. `auto` is resolved as workers do.

    Raises InvalidRequest for an unknown transport, or an impossible combination.
    """
    if transport not in TRANSPORTS:
        raise InvalidRequest(f"expected a transport out of {', '.join(TRANSPORTS)}, got {transport!r}")
    if transport == "auto":
        transport = "shm" if one_machine else "tcp"
    if transport == "shm":
        if not one_machine:
            raise InvalidRequest("shared memory is for one machine: it does not go with --link")
        return "shm"
    return f"{transport}+tls" if tls else transport


def travel_seconds(way: str, wire_bytes: int, buckets: int, steps: int) -> float:
    """Returns the seconds of a core that one end uses.

    wire_bytes: of gradients; as many go the other way as weights
    steps:      one of each worker at a shard, one at each shard of a worker
    """
    return (MS_A_MIB[way] * wire_bytes / MIB + MS_A_BUCKET * buckets + MS_A_STEP * steps) / 1e3


def apply_seconds(optimizer: str, states: int, weight_bytes: int) -> float:
    """Returns the seconds of a core of an optimizer's step. states: tensors that it keeps of each weight"""
    slower = 1.0 if optimizer in FUSED_ON_CPU else UNFUSED
    return slower * APPLY_MS * (1 + states) * weight_bytes / MIB / 1e3


def coordinator_load(workers: int, lease: float) -> float:
    """Returns the fraction of a core that heartbeats use while a job trains. lease: seconds"""
    return HEARTBEAT_MS / 1e3 * HEARTBEATS_A_LEASE * workers / lease
