"""Modules for serving: torch's plain embeddings, with a map from ids to rows.

They hold only tensors, and their forward uses only torch's operations. So `torch.export` and `torch.jit.script` accept
them, and the result runs without this package.
"""

# Without `from __future__ import annotations`: TorchScript reads the annotations of attributes, and no text for them.

import torch
from torch import Tensor, nn

LARGEST = torch.iinfo(torch.int64).max


class IdMap(nn.Module):
    """The map from ids to row numbers: [...] of int64 or int32, to [...] int64; unknown ids get the last row.

    ids: [n + 1], ascending, with the largest int64 as a sentinel at the end. If that number is an id itself, a search
         finds the id first.
    """

    ids: Tensor

    def __init__(self, ids: Tensor) -> None:
        super().__init__()
        self.register_buffer("ids", torch.cat([ids, ids.new_full((1,), LARGEST)]))

    def forward(self, input: Tensor) -> Tensor:
        """Returns row numbers. Raises TypeError for other types."""
        if input.dtype != torch.int64 and input.dtype != torch.int32:
            raise TypeError("ids are a tensor of int64 or int32")
        wanted = input.long().contiguous()
        found = torch.searchsorted(self.ids, wanted)
        return torch.where(self.ids[found] == wanted, found, len(self.ids) - 1)


class FrozenEmbedding(nn.Module):
    """An Embedding whose rows are fixed.

    places: maps ids to row numbers of `table`
    table:  a plain nn.Embedding, [n + 1, dim]: the rows in the order of their ids; unknown ids share the last row
    """

    def __init__(self, places: IdMap, weight: Tensor) -> None:
        super().__init__()
        self.places = places
        self.table = nn.Embedding.from_pretrained(weight)

    def forward(self, input: Tensor) -> Tensor:
        """Returns rows: [...] ids to [..., dim]."""
        return self.table(self.places(input))  # type: ignore[no-any-return]


class FrozenEmbeddingBag(nn.Module):
    """An EmbeddingBag whose rows are fixed.

    places: maps ids to row numbers of `table`
    table:  a plain nn.EmbeddingBag, [n + 1, dim]: the rows in the order of their ids; unknown ids share the last row
    """

    def __init__(
        self, places: IdMap, weight: Tensor, mode: str, include_last_offset: bool, padding: int | None = None
    ) -> None:
        """padding: the row number of the id that is left out of bags"""
        super().__init__()
        self.places = places
        self.table = nn.EmbeddingBag.from_pretrained(
            weight, mode=mode, include_last_offset=include_last_offset, padding_idx=padding
        )

    def forward(self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None) -> Tensor:
        """Returns one row a bag: [bags, n] ids, or [n] ids and [bags] offsets, to [bags, dim]."""
        return self.table(self.places(input), offsets, per_sample_weights)  # type: ignore[no-any-return]
