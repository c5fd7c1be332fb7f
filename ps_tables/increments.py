"""The difference between two copies of a table, called an increment; and how to restore a table from a copy and
increments.

An increment has, by the names of Table.snapshot, the rows that were trained after a version, and the ids that have
occurred after it and wait for admission. In addition it has

    since            this version
    oldest           rows whose last training is before this version have been removed
    removed          ids of rows that were removed, apart from those that `oldest` describes
    waiting.oldest   the same for ids that wait for admission
    waiting.removed  the same for ids that waited, and were admitted or removed

Rows are mostly removed in the order of their last training, so one number describes most removals.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from ps_protocol.row_ids import chance_order, mix

_OWN = (
    "since",
    "oldest",
    "removed",
    "waiting.oldest",
    "waiting.removed",
    "version",
)  # tensors of a table, not of its rows

Tensors = dict[str, torch.Tensor]


def in_order(tensors: Tensors) -> Tensors:
    """Returns a snapshot with its rows, and its waiting ids, sorted by their hashes (`row_ids.mix`)."""
    ordered = dict(tensors)
    for prefix in ("", "waiting."):
        if f"{prefix}ids" in tensors:
            order = torch.from_numpy(np.argsort(mix(tensors[f"{prefix}ids"].numpy())))
            for name in _of(tensors, prefix):
                ordered[name] = tensors[name][order]
    return ordered


def newest(tensors: Mapping[str, torch.Tensor], most: int) -> Mapping[str, torch.Tensor]:
    """Returns a snapshot with at most `most` rows: without those that would be removed first to make room."""
    count = len(tensors.get("ids", ()))
    names = _of(tensors, "")
    if count <= most or "last" not in names or any(len(tensors[name]) != count for name in names):
        return tensors  # `Table.restore` refuses tensors that do not fit together
    order = np.lexsort((chance_order(tensors["ids"].numpy()), tensors["last"].numpy()))
    kept = torch.from_numpy(np.sort(order[count - most :]))
    return {name: tensor[kept] if name in names else tensor for name, tensor in tensors.items()}


def merged(chain: Sequence[Tensors]) -> Tensors:
    """Returns a table from a copy of all rows and its increments, oldest first, with its rows in any order.

    Each tensor is removed from `chain` after use, as a table may fill half of the memory.

    Raises ValueError if an increment does not follow the one before, KeyError if something is missing.
    """
    if "since" in chain[0]:
        raise ValueError(f"expected all rows, got changes since version {int(chain[0]['since'])}")
    for before, after in itertools.pairwise(chain):
        if int(after["since"]) != int(before["version"]):
            raise ValueError(f"expected changes since version {int(before['version'])}, got {int(after['since'])}")
    if len(chain) == 1:
        return chain[0]
    result = {"version": chain[-1]["version"]}
    for prefix in ("", "waiting."):
        if any(f"{prefix}ids" in part for part in chain):
            counts = [len(part[f"{prefix}ids"]) for part in chain]
            for part, count in zip(chain, counts, strict=True):
                if len(part[f"{prefix}last"]) != count:
                    raise ValueError(f"expected {prefix}last of {count}, got {len(part[f'{prefix}last'])}")
            kept = _kept(chain, prefix)
            for name in sorted(_of(chain[-1], prefix)):
                result[name] = _selected(name, [part.pop(name) for part in chain], counts, kept)
    return result


def _of(tensors: Mapping[str, torch.Tensor], prefix: str) -> list[str]:
    """Returns the names of the tensors of rows, or with the prefix `waiting.` those of ids that wait for admission."""
    return [name for name in tensors if name not in _OWN and name.startswith("waiting.") == bool(prefix)]


def _kept(chain: Sequence[Tensors], prefix: str) -> list[torch.Tensor]:
    """Returns, for each copy of a chain, the indices of its rows that are in the result: rows that no later copy has
    replaced or removed.
    """
    kept: list[torch.Tensor] = []
    later: np.ndarray = np.empty(0, np.int64)  # ids that a later copy has, or has removed
    oldest = 0
    for part in reversed(chain):
        ids, last = part[f"{prefix}ids"].numpy(), part[f"{prefix}last"].numpy()
        stays = (last >= oldest) & ~np.isin(ids, later)
        kept.append(torch.from_numpy(np.flatnonzero(stays)))
        removed = [part[f"{prefix}removed"].numpy()] if f"{prefix}removed" in part else []
        later = np.concatenate([later, ids, *removed])
        oldest = max(oldest, int(part[f"{prefix}oldest"]) if f"{prefix}oldest" in part else 0)
    return kept[::-1]


def _selected(
    name: str, tensors: list[torch.Tensor], counts: Sequence[int], kept: Sequence[torch.Tensor]
) -> torch.Tensor:
    """Returns selected rows of several tensors in one tensor. Frees each tensor as soon as it is copied.

    counts: the number of rows from each
    """
    shape, dtype = tensors[0].shape[1:], tensors[0].dtype
    for tensor, count in zip(tensors, counts, strict=True):
        if tensor.shape != (count, *shape) or tensor.dtype != dtype:
            expected = f"{(count, *shape)} of {dtype}"
            raise ValueError(f"expected {name} to be {expected}, got {tuple(tensor.shape)} of {tensor.dtype}")
    out = torch.empty((sum(map(len, kept)), *shape), dtype=dtype, device="cpu")
    first = 0
    while tensors:
        tensor = tensors.pop()
        which = kept[len(tensors)]
        torch.index_select(tensor, 0, which, out=out[first : first + len(which)])
        first += len(which)
    return out
