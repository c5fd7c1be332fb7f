"""Checks of the ids that come in a message: that they are distinct, and of this shard."""

from __future__ import annotations

import numpy as np

from ps_protocol.row_ids import Ids, shards_of
from ps_tables.native import in_use
from ps_tables.native.loops import MOST_IDS


def are_of_shard(ids: Ids, shards: int, shard: int) -> bool:
    """Returns whether all ids are of one shard, which is below `shards`."""
    if shards == 1:
        return True
    loops = in_use.loops()
    if loops is not None:
        return loops.are_of_shard(ids, shards, shard)
    return bool((shards_of(ids, shards) == shard).all())


def are_distinct(ids: Ids, salt: int = 0) -> bool:
    """Returns whether no id comes twice.

    salt: changes the slots of ids, so that an attacker cannot choose ids that share a slot
    """
    loops = in_use.loops()
    if loops is not None and len(ids) <= MOST_IDS:
        return loops.are_distinct(ids, salt)
    ordered = np.sort(ids)  # several times as fast as hashing them here
    return not (ordered[1:] == ordered[:-1]).any()
