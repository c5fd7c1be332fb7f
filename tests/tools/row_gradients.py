"""What a step contributes to a table, from a gradient for each occurrence of an id."""

from __future__ import annotations

import torch

from ps_protocol.row_ids import Ids
from ps_tables.contributions import RowGradients
from ps_tables.distinct import distinct
from ps_tables.row_sums import add_rows


def summed(ids: Ids, gradients: torch.Tensor) -> RowGradients:
    """Returns what one gradient for each occurrence of an id comes to: [n] any int64, [n, dim]."""
    each, places, counts, _ = distinct(ids)
    sums = torch.zeros(len(each), gradients.shape[1], dtype=torch.float32, device="cpu")
    add_rows(sums, places, gradients)
    return RowGradients(each, counts, sums)
