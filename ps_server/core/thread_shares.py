"""Divides the threads that a process may have between the pools for calls and the data connections.

The shares are fixed when the process starts. So an attack that takes all threads of one kind leaves those of the other.
"""

from __future__ import annotations

from dataclasses import dataclass

MOST_OF_A_POOL = 1024
LEAST_OF_A_POOL, LEAST_CONNECTIONS = 16, 16
POOLS_OF_EACH, POOLS_OF_A_SHARD, POOLS_OF_A_COORDINATOR = 2, 6, 2  # of calls: of each server, and what comes to them


@dataclass(frozen=True)
class ThreadShares:
    """How many threads each pool of calls has at most, and how many data connections there are: each may need one."""

    pool: int
    connections: int


def thread_shares(most: int | None, reserved: int, pools: int, connections: int) -> ThreadShares:
    """Divides a process's threads. The pools get two thirds; what they do not need goes to data connections.

    most:        the threads that the process may have; None: unlimited
    reserved:    threads for everything else
    pools:       the number of pools
    connections: the data connections that are allowed
    """
    if most is None:
        return ThreadShares(MOST_OF_A_POOL, connections)
    free = max(0, most - reserved)
    pool = min(MOST_OF_A_POOL, max(LEAST_OF_A_POOL, free * 2 // 3 // pools))
    return ThreadShares(pool, min(connections, max(LEAST_CONNECTIONS, free - pool * pools)))
