"""The distinct ids of a batch, and checks of the ids in a message: that they are distinct, and of this shard.

The distinct ids are found by hashing: twice as fast as by sorting (measured: 0.5 beside 1.1 ms for 26,624 ids).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ps_protocol.row_ids import Ids, mix, shards_of
from ps_tables.native import in_use
from ps_tables.native.loops import MOST_IDS, MOST_SHARDS, Longs


class Distinct(NamedTuple):
    """The ids of a batch, once each.

    ids:    [m], by shard, and then in the order of the batch
    positions: [n], the index in `ids` of each id of the batch
    counts: [m], how often each occurs in the batch
    ends:   [shards], where the ids of each shard end
    """

    ids: Ids
    positions: Longs
    counts: Longs
    ends: Longs


def distinct(ids: Ids, salt: int = 0, shards: int = 1) -> Distinct:
    """Returns the distinct ids of a batch: [n].

    salt: changes the slots of ids, so that an attacker cannot choose ids that share a slot
    """
    loops = in_use.loops()
    if loops is not None and len(ids) <= MOST_IDS and shards <= MOST_SHARDS:
        return Distinct(*loops.distinct(ids, salt, shards))
    slots_count = 1 << (2 * len(ids) + 2).bit_length()
    mask = np.int64(slots_count - 1)
    slots = mix(ids ^ np.int64(salt)).view(np.int64) & mask
    owner = np.full(slots_count, -1, np.int32)  # by slot, the position in the batch of the id that has it
    first = np.empty(len(ids), np.int64)  # by position in the batch, the position of the id's first occurrence
    waiting = np.arange(len(ids))
    while len(waiting):
        at = slots[waiting]
        free = owner.take(at) < 0
        owner[at[free][::-1]] = waiting[free][::-1]  # the first of several ids at a slot gets it: written last
        owners = owner.take(at)
        same = ids.take(owners) == ids.take(waiting)
        first[waiting[same]] = owners[same]
        waiting = waiting[~same]
        slots[waiting] = (slots[waiting] + 1) & mask
    firsts = np.flatnonzero(first == np.arange(len(ids)))  # the position of the first occurrence of each id
    ends = np.array([len(firsts)])
    if shards > 1:
        of = shards_of(ids.take(firsts), shards)
        firsts = firsts.take(np.argsort(of, kind="stable"))
        ends = np.cumsum(np.bincount(of, minlength=shards))
    number = np.empty(len(ids), np.int64)
    number[firsts] = np.arange(len(firsts))
    positions = number.take(first)
    return Distinct(ids.take(firsts), positions, np.bincount(positions, minlength=len(firsts)), ends)


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
