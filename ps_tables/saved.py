"""Rows in the state_dict of a model: one format, for modules that save themselves and for exports of the servers."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import safetensors.torch
import torch


def saved_rows(rows: Mapping[str, torch.Tensor], seed: int) -> bytes:
    """Returns rows as a safetensors file.

    rows: see Table.snapshot
    seed: the seed of rows without training
    """
    return safetensors.torch.save({**rows, "seed": torch.from_numpy(np.array([seed], np.uint64).view(np.int64))})
