"""The example with a table learns what can be learnt: its data, and where it ends."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.tools import launching
from tests.tools.launching import ROOT

SCRIPT = ROOT / "examples" / "clicks.py"
SAMPLES = 60_000
clicks = launching.load(SCRIPT)


def test_the_same_seed_makes_the_same_samples_and_popularity_moves_on_if_it_is_told_to() -> None:
    one, other = (clicks.Clicks(5_000, seed=1) for _ in range(2))
    assert torch.equal(one.ids, other.ids)
    assert torch.equal(one.clicks, other.clicks)
    assert not torch.equal(one.ids, clicks.Clicks(5_000, seed=2).ids)
    assert 0.2 < float(one.clicks.mean()) < 0.4
    moved = clicks.Clicks(5_000, seed=1, start=10**6, drift=0.1)
    assert not np.isin(moved.ids, one.ids).any(), "all that was popular is forgotten"
    ids, labels = one.__getitems__([3, 7])
    assert torch.equal(ids[1], one[7][0])
    assert labels.tolist() == [float(one[3][1]), float(one[7][1])]


def test_the_auc_is_how_often_a_click_scores_higher() -> None:
    scores, labels = torch.tensor([0.1, 0.4, 0.35, 0.8]), torch.tensor([0.0, 0.0, 1.0, 1.0])
    assert clicks.auc(scores, labels) == pytest.approx(0.75)
    assert clicks.auc(labels, labels) == 1.0


def reference() -> float:
    """The AUC of the same model with torch's own embedding, whose rows have been counted beforehand."""
    data, test = clicks.Clicks(SAMPLES, 0), clicks.Clicks(clicks.TEST_SAMPLES, 1, SAMPLES)
    every, places = torch.unique(torch.cat([data.ids, test.ids]), return_inverse=True)
    torch.manual_seed(0)
    rows, bias = nn.Embedding(len(every), 9), nn.Parameter(torch.zeros(1))
    nn.init.normal_(rows.weight, std=0.02)
    optimizer = torch.optim.Adagrad([rows.weight, bias], lr=0.05, initial_accumulator_value=1e-8)

    def scores(ids: torch.Tensor) -> torch.Tensor:
        found = rows(ids)
        vectors = found[:, :, 1:]
        return bias + found[:, :, 0].sum(1) + 0.5 * (vectors.sum(1).square() - vectors.square().sum(1)).sum(1)  # type: ignore[no-any-return]

    for first in range(0, SAMPLES - 511, 512):
        part = slice(first, first + 512)
        optimizer.zero_grad()
        F.binary_cross_entropy_with_logits(scores(places[part]), data.clicks[part]).backward()
        optimizer.step()
    with torch.no_grad():
        return float(clicks.auc(scores(places[SAMPLES:]), test.clicks))


@pytest.mark.long
def test_it_ends_where_torchs_embedding_does_and_leaves_its_rows(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    flags = [f"--samples={SAMPLES}", "--batch-size=512", f"--out={tmp_path}", "--goal=0.62"]
    launching.run_here(monkeypatch, SCRIPT, *flags, PS_MODE="single")
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["auc"] == pytest.approx(reference(), abs=0.01)
    assert 0.62 < result["auc"] < result["best_auc"] < 0.9
    assert 20_000 < result["rows"] < 8 * clicks.POPULAR
    assert (tmp_path / "model.safetensors").stat().st_size > result["rows"] * 4 * 9
    few = ["--samples=2048", "--goal=0.99", f"--out={tmp_path}"]
    with pytest.raises(SystemExit, match=r"the AUC should be at least 0.99, and is 0\.\d+"):
        launching.run_here(monkeypatch, SCRIPT, *few, PS_MODE="single")
