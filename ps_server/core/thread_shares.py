"""Divides the threads that a process may have between the pools for calls and the data connections.

The shares are fixed when the process starts. So an attack that uses up the threads of one kind leaves those of the
other kind free.
"""

from __future__ import annotations

from dataclasses import dataclass

MOST_OF_A_POOL = 1024
LEAST_OF_A_POOL, LEAST_CONNECTIONS = 16, 16
# Numbers of thread pools for calls: those of each server, and further ones of a shard and of a coordinator.
POOLS_OF_EACH, POOLS_OF_A_SHARD, POOLS_OF_A_COORDINATOR = 2, 6, 2


@dataclass(frozen=True)
class ThreadShares:
    """The most threads of each pool for calls, and the most data connections: each of these may need a thread."""

    pool: int
    connections: int


def thread_shares(most: int | None, reserved: int, pools: int, connections: int) -> ThreadShares:
    """Divides a process's threads. The pools get two thirds; the threads that they do not need go to data connections.

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
