"""A copy of a model for serving, with plain modules of torch in place of tables."""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ps_protocol.errors import InvalidRequest, Unsupported
from ps_worker.tables.frozen import FrozenEmbedding, FrozenEmbeddingBag, IdMap
from ps_worker.tables.modules import Embedding, EmbeddingBag


def freeze(model: nn.Module) -> nn.Module:
    """Returns a copy of a model for serving, in eval mode, whose tables are plain modules of torch.

    Each Embedding becomes an nn.Embedding, each EmbeddingBag an nn.EmbeddingBag, behind a search for the place of an id
    among those that have a row. It gives what the model gives in eval mode, as long as all ids have a row. An id that
    has none gets the mean of all first values: zeros, or with `initial="constant"` its `scale`. That row is the last
    one of the plain module's weight, and can be changed there. The rows need no gradient.

    model: also as `prepare` returned it. Rows on servers are fetched, as by `state_dict`
    Raises Unsupported for a table whose class has a forward of its own.
    """
    plain = model.module if isinstance(model, DistributedDataParallel) else model
    if not isinstance(plain, nn.Module):
        raise InvalidRequest(f"freeze takes a model, got {type(plain).__name__}")
    # What `deepcopy` takes for copies that it has made already: so no table is copied with its optimizer's state.
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
    if module.padding_idx is not None:  # it reads as zeros, and not as an id without a row
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
