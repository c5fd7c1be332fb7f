"""`freeze`: a copy of a model for serving, in which modules of torch replace tables."""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ps_protocol.errors import InvalidRequest, Unsupported
from ps_worker.tables.frozen import FrozenEmbedding, FrozenEmbeddingBag, IdMap
from ps_worker.tables.modules import Embedding, EmbeddingBag


def freeze(model: nn.Module) -> nn.Module:
    """Returns a copy of a model for serving, in eval mode, in which plain torch modules replace the tables.

    An Embedding becomes an nn.Embedding and an EmbeddingBag an nn.EmbeddingBag, each behind a search among the ids that
    have a row. If all ids have a row, the copy returns what the model returns in eval mode. An id without a row gets
    the mean of all first values: zeros, or `scale` with `initial="constant"`. That vector is the last row of the plain
    module's weight, where a script may change it. No row requires a gradient.

    Args:
        model: The model, or what `prepare` returned for it. Rows on servers are fetched, as by `state_dict`.

    Raises:
        Unsupported: The class of a table overrides `forward`.

    Example:
        plain = ps_torch.freeze(torch.nn.Sequential(ps_torch.Embedding(8), torch.nn.Linear(8, 1)))
    """
    plain = model.module if isinstance(model, DistributedDataParallel) else model
    if not isinstance(plain, nn.Module):
        raise InvalidRequest(f"freeze takes a model, got {type(plain).__name__}")
    # deepcopy's memo: with an entry for each table it copies no table, nor the optimizer state within.
    replaced = {id(each): _frozen(name, each) for name, each in plain.named_modules() if isinstance(each, Embedding)}
    return copy.deepcopy(plain, replaced).eval()


def _frozen(name: str, module: Embedding) -> nn.Module:
    if type(module).forward not in (Embedding.forward, EmbeddingBag.forward):
        raise Unsupported(
            f"{name or 'the table'}: {type(module).__name__} has a forward of its own, which a plain module has not"
        )
    handle, settings = module.weight.detach(), module.settings
    rows = module.local.snapshot() or {"ids": torch.empty(0, dtype=torch.int64), "weights": handle.float().cpu()}
    ids, weights = rows["ids"], rows["weights"]
    if module.padding_idx is not None:  # a row of zeros: an id without a row may have another value
        kept = ids != module.padding_idx
        ids = torch.cat([ids[kept], torch.tensor([module.padding_idx])])
        weights = torch.cat([weights[kept], torch.zeros(1, handle.shape[1])])
    ids, order = ids.sort()
    weight = torch.empty(len(ids) + 1, handle.shape[1], dtype=torch.float32, device="cpu")
    torch.index_select(weights, 0, order, out=weight[:-1])
    weight[-1] = settings.scale if settings.initial == "constant" else 0.0
    places = IdMap(ids).to(handle.device)
    weight = weight.to(handle.device, handle.dtype)
    if isinstance(module, EmbeddingBag):
        padding = None if module.padding_idx is None else int((ids == module.padding_idx).nonzero()[0])
        return FrozenEmbeddingBag(places, weight, module.mode, module.include_last_offset, padding)
    return FrozenEmbedding(places, weight)
