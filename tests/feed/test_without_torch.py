"""`ps_feed.subscribe` in a process that has no torch: the arrays have the bits of the trainer's tensors."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import ps_feed
from ps_protocol.errors import InvalidRequest
from tests.tools.cluster import TEST_SECONDS, Cluster
from tests.tools.launching import NO_TORCH, environment
from tests.tools.remembering_trainer import RememberingTrainer

# Its words: the wire format, the version to wait for, and the file for the arrays. Server and job come by variables.
READER = f"""{NO_TORCH}
import json, numpy, ps_feed

with ps_feed.subscribe(wire=sys.argv[1]) as subscription:
    edition = subscription.wait(int(sys.argv[2]))
    numpy.savez(sys.argv[3], **{{name: tensor.values for name, tensor in edition.items()}})
    print(json.dumps([edition.version, {{name: tensor.dtype for name, tensor in edition.items()}}]))
"""


class Model(nn.Module):
    """Parameters of two types, one without elements, and a buffer of integers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.first, self.last = nn.Linear(20, 40), nn.Linear(40, 1, dtype=torch.float64)
        self.none = nn.Parameter(torch.empty(0, 3))
        self.register_buffer("seen", torch.tensor([7], dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.first(x)).double())  # type: ignore[no-any-return]


@pytest.mark.parametrize("wire", ["float32", "bfloat16"])
def test_arrays_have_the_bits_of_the_trainers_tensors(shared: Cluster, job: str, wire: str, tmp_path: Path) -> None:
    with shared.connect("sync", job=job) as session:
        trainer = RememberingTrainer(session, Model(), lambda model: model(torch.randn(4, 20)).square().mean())
        clock, file = trainer.steps(3), tmp_path / "arrays.npz"
        words = [sys.executable, "-c", READER, wire, str(clock), str(file)]
        variables = environment() | {"PS_SERVER": shared.address, "PS_JOB": job}
        ran = subprocess.run(words, stdout=subprocess.PIPE, check=True, env=variables, timeout=TEST_SECONDS)
    version, types = json.loads(ran.stdout)
    assert version == clock
    wanted = trainer.past[clock]
    with np.load(file) as arrays:
        assert {*arrays} == {*wanted} == {*types}
        for name, tensor in wanted.items():
            is_narrow = wire == "bfloat16" and tensor.dtype == torch.float32
            there = tensor.bfloat16().view(torch.uint16) if is_narrow else tensor
            assert types[name] == (wire if is_narrow else str(tensor.dtype).removeprefix("torch."))
            assert arrays[name].dtype == there.numpy().dtype
            assert arrays[name].shape == there.shape
            assert arrays[name].tobytes() == there.numpy().tobytes()


def test_settings_are_those_of_the_feed_with_torch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("PS_SERVER", raising=False)
    with pytest.raises(InvalidRequest, match="needs a server: the argument server='HOST:PORT', or PS_SERVER"):
        ps_feed.subscribe()
    monkeypatch.setenv("PS_SERVER", "nowhere")
    with pytest.raises(InvalidRequest, match="PS_SERVER: expected HOST:PORT"):
        ps_feed.subscribe()
    with pytest.raises(InvalidRequest, match="wire must be one of"):
        ps_feed.subscribe("127.0.0.1:1", wire="int8")
    with pytest.raises(InvalidRequest, match="missing"):
        ps_feed.subscribe("127.0.0.1:1", token_file=str(tmp_path / "missing"))


def test_it_follows_until_the_job_ends(shared: Cluster, job: str) -> None:
    with ps_feed.subscribe(shared.address, job) as subscription:
        with shared.connect("sync", job=job) as session:
            trainer = RememberingTrainer(session, Model(), lambda model: model(torch.randn(4, 20)).square().mean())
            subscription.wait(trainer.steps(5))
        last = [*subscription][-1]
        assert last.version == 5
        assert np.array_equal(last.tensor("first.weight").values, trainer.past[5]["first.weight"].numpy())
