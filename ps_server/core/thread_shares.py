"""How the threads that a process may have are divided: pools of calls on one hand, data connections on the other.

The shares are set once, when the process starts: what one kind takes in an attack, another does not lack.
"""

from __future__ import annotations

from dataclasses import dataclass

MOST_OF_A_POOL = 1024
LEAST_OF_A_POOL, LEAST_CONNECTIONS = 16, 16
POOLS_OF_EACH, POOLS_OF_A_SHARD, POOLS_OF_A_COORDINATOR = 2, 6, 2  # of calls: of each server, and what comes to them


@dataclass(frozen=True)
class ThreadShares:
    """How many threads each pool of calls has at most, and how many data connections there are, each with one."""

    pool: int
    connections: int


def thread_shares(most: int | None, reserved: int, pools: int, connections: int) -> ThreadShares:
    """Divides what a process may have. Pools get two thirds, and what they need not goes to data connections.

    most:        of this process; None: as many as it likes
    reserved:    for everything else
    connections: data connections that are allowed
    """
    if most is None:
        return ThreadShares(MOST_OF_A_POOL, connections)
    free = max(0, most - reserved)
    pool = min(MOST_OF_A_POOL, max(LEAST_OF_A_POOL, free * 2 // 3 // pools))
    return ThreadShares(pool, min(connections, max(LEAST_CONNECTIONS, free - pool * pools)))
