"""Ids of rows: their hash, and the shard of a row.

The hash, called mix, is a bijection of 64 bits made of shifts and multiplications. Servers and workers compute it
alike. Its high half selects the shard, so each shard has a range of mixed ids, and a checkpoint that is sorted by them
can be cut for any other number of shards.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

ID_BYTES, COUNT_BYTES = 8, 4  # sizes of an id and of its count in messages

Ids = npt.NDArray[np.int64]
Mixed = npt.NDArray[np.uint64]
Which = slice | npt.NDArray[np.int64]  # a selection of ids: a range, or indices

_FACTOR = np.uint64(0xD6E8FEB86659FD93)
_HALF = np.uint64(32)


def mix(ids: Ids) -> Mixed:
    """Returns the hashes of ids: [n] to [n]. It is a bijection, so different ids have different hashes."""
    mixed = ids.astype(np.uint64)  # a copy; -1 becomes 2**64 - 1
    half = mixed >> _HALF
    mixed ^= half
    mixed *= _FACTOR
    np.right_shift(mixed, _HALF, out=half)
    mixed ^= half
    mixed *= _FACTOR
    np.right_shift(mixed, _HALF, out=half)
    mixed ^= half
    return mixed


def chance_order(ids: Ids) -> Mixed:
    """Returns a sort key for each id, which selects a pseudo-random subset of ids, always the same.

    It is the mix with its halves exchanged. The high half of the mix selects the shard, so the ids that are first by
    the mix alone would all be on the first shards.
    """
    mixed = mix(ids)
    return (mixed << _HALF) | (mixed >> _HALF)


def shards_of(ids: Ids, shards: int) -> npt.NDArray[np.int64]:
    """Returns the shard of each row: [n], each below `shards`, which is 1 to 2**31."""
    place = mix(ids)
    place >>= _HALF
    place *= np.uint64(shards)
    place >>= _HALF
    return place.astype(np.int64)


def by_shard(ids: Ids, shards: int, ends: npt.NDArray[np.int64] | None = None) -> list[Which]:
    """Returns, for each shard, the indices of its ids, in their order. They are slices if the ids are sorted by shard.

    ends: if the ids are sorted by shard: for each shard, where its ids end; None: unknown
    """
    if shards == 1:
        return [slice(0, len(ids))]
    if ends is not None and len(ends) == shards:
        stops = ends.tolist()
        return [slice(start, stop) for start, stop in zip([0, *stops], stops, strict=False)]
    of = shards_of(ids, shards)
    is_ordered = bool((of[1:] >= of[:-1]).all())
    cuts = np.searchsorted(of, np.arange(shards + 1)).tolist() if is_ordered else []
    return [slice(cuts[n], cuts[n + 1]) if is_ordered else np.flatnonzero(of == n) for n in range(shards)]
