"""What workers have of a bucket whose weights travel in blocks follows the weights, and goes on from a checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ps_protocol.job import JobSpec
from ps_protocol.layout import ParameterSpec
from ps_protocol.modes import Consistency
from ps_protocol.tensors import BLOCKS
from ps_server.core.budget import room_for
from ps_server.core.dense import Assignment, Gradient
from ps_server.core.partition import JobPartition
from ps_server.core.unit import Bucket
from ps_server.storage.checkpoints import CheckpointStore
from tests.tools.checkpoint_files import read_buckets, write_checkpoint

NUMEL = 96
SYNC = Consistency(0, aggregate=True)


def spec(wire: str) -> JobSpec:
    parameters = (ParameterSpec("w", (NUMEL,), "float32", 0),)
    return JobSpec("job", parameters, "SGD", ({"lr": 0.1, "momentum": 0.9},), SYNC, 4096, 1, weight_wire=wire)


def bucket(wire: str) -> Bucket:
    job = spec(wire)
    return JobPartition(job, [0]).buckets[0]


def stepped(made: Bucket, number: int, assignment: Assignment | None = None) -> torch.Tensor | None:
    """Makes one update with gradients that follow from its number; returns its codes."""
    values = torch.randn(NUMEL, generator=torch.Generator().manual_seed(number))
    made.weights.add(Gradient(values, assignment=assignment))
    made.weights.step()
    assert made.weights.sent is not None
    return made.weights.sent.codes


@pytest.mark.parametrize("wire", BLOCKS)
def test_what_workers_have_follows_the_weights_and_what_is_rounded_off_comes_later(wire: str) -> None:
    made, codec = bucket(wire), BLOCKS[wire]
    has = torch.randn(NUMEL, generator=torch.Generator().manual_seed(99))
    made.weights.load(has)
    for number in range(30):
        before = made.weights.flat - has
        codes = stepped(made, number)
        assert codes is not None
        has = has + codec.values(codes, NUMEL)
        assert made.weights.sent is not None
        assert torch.equal(made.weights.sent.flat, has)
        wanted = before + (made.weights.flat - has)
        assert (made.weights.flat - has).abs().max() <= wanted.abs().max() + 1.0
    for _ in range(30):  # with nothing new, what is left comes
        made.weights.add(Gradient(None, frozenset({0})))
        made.weights.step()
    torch.testing.assert_close(made.weights.sent.flat, made.weights.flat, rtol=1e-6, atol=1e-7)


def test_an_update_with_weights_that_a_script_has_set_comes_whole() -> None:
    made = bucket("int4")
    assert stepped(made, 1) is not None
    assert stepped(made, 2, Assignment(reset=frozenset({0}))) is not None, "state alone sets no weights"
    assert stepped(made, 3, Assignment({0: torch.ones(NUMEL)})) is None
    assert made.weights.sent is not None
    assert torch.equal(made.weights.sent.flat, made.weights.flat)
    assert stepped(made, 4) is not None


def test_it_goes_on_from_a_checkpoint_to_the_bit(tmp_path: Path) -> None:
    made = bucket("int4")
    for number in range(5):
        stepped(made, number)
    made.rule.version = 5
    store = CheckpointStore(tmp_path)
    manifest = write_checkpoint(store, spec("int4"), [made.snapshot()])
    [snapshot] = read_buckets(store, manifest, [made.spec]).values()
    again = bucket("int4")
    again.restore(snapshot)
    assert again.weights.sent is not None
    assert again.weights.sent.codes is None, "the first version comes whole"
    for number in range(5, 10):
        mine, others = stepped(made, number), stepped(again, number)
        assert mine is not None
        assert others is not None
        assert torch.equal(mine, others)


def test_it_takes_room_beside_the_weights() -> None:
    assert bucket("bfloat16").weights.sent is None
    plain, narrowed = (room_for(spec(wire), [0]) for wire in ("bfloat16", "int4"))
    assert narrowed.weights == 2 * plain.weights
