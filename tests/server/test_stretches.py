"""A large bucket adds the last contribution and steps SGD stretch by stretch; the bits are those of a whole step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from ps_protocol.hyper_parameters import HyperParameters
from ps_protocol.job import JobSpec
from ps_protocol.layout import ParameterSpec, bucket_layout
from ps_protocol.modes import Consistency
from ps_server.core import dense, sums
from ps_server.core.dense import DenseBucket, Gradient
from ps_server.core.sums import Scratch, Stretch, StretchStep, Sum, stretches_of

STRETCH = 64  # elements, here
SIZES = {
    "first": 40,
    "large": 300,
    "tiny": 1,
    "last": 131,
}  # a stretch may have parts of three
HYPER: dict[str, HyperParameters] = {
    "plain": {"lr": 0.1},
    "momentum": {"lr": 0.1, "momentum": 0.9, "dampening": 0.2},
    "nesterov": {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
    "maximize": {"lr": 0.1, "maximize": True, "weight_decay": 0.1},
}


@pytest.fixture(autouse=True)
def _small_stretches(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (dense, sums):
        monkeypatch.setattr(module, "STRETCH", STRETCH)
    monkeypatch.setattr(stretches_of, "__defaults__", (STRETCH,))


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for each step that was made in stretches."""
    made: list[int] = []
    run = StretchStep.run

    def counting(self: StretchStep, *arguments: Any) -> None:
        made.append(1)
        run(self, *arguments)

    monkeypatch.setattr(StretchStep, "run", counting)
    return made


def bucket(hyper: HyperParameters, optimizer: str = "SGD", dtype: str = "float32") -> DenseBucket:
    """A bucket of four parameters, the last two of which have half the learning rate."""
    groups = (hyper, {**hyper, "lr": float(hyper["lr"]) / 2})  # type: ignore[arg-type]
    parameters = tuple(ParameterSpec(n, (size,), dtype, int(n in "tiny last")) for n, size in SIZES.items())
    spec = JobSpec("job", parameters, optimizer, groups, Consistency(0, aggregate=True), 2**20, 0)
    [described] = bucket_layout(parameters, 2**20).buckets
    made = DenseBucket(spec, described, Scratch())
    made.load(torch.randn(described.numel, generator=torch.Generator().manual_seed(1)).to(made.flat.dtype))
    return made


def both(hyper: HyperParameters, **named: Any) -> tuple[DenseBucket, DenseBucket]:
    """Two alike: one is told which contribution is the last, the other is not."""
    return bucket(hyper, **named), bucket(hyper, **named)


def update(
    buckets: tuple[DenseBucket, DenseBucket],
    workers: int,
    number: int,
    wire: Sequence[torch.dtype] | None = None,
    **named: Any,
) -> None:
    """One update. wire: how the workers' gradients travel; None: as the bucket's own type"""
    seeds = torch.Generator().manual_seed(number)
    numel = buckets[0].flat.numel()
    types = wire or [buckets[0].flat.dtype] * workers
    values = [torch.randn(numel, generator=seeds).to(dtype) for dtype in types]
    for target, told in zip(buckets, (True, False), strict=True):
        lent = []
        for rank, each in enumerate(values):
            before = each.clone()
            target.add(Gradient(each, borrowed=True, **named), told and rank == workers - 1)
            lent.append((each, before))
        target.step()
        assert all(torch.equal(each, before) for each, before in lent), "what a worker lends is only read"


def alike(buckets: tuple[DenseBucket, DenseBucket]) -> bool:
    states = [each.copy_state() for each in buckets]
    same_state = [
        {position: {name: value.tolist() for name, value in state.items()} for position, state in each.items()}
        for each in states
    ]
    return torch.equal(buckets[0].flat, buckets[1].flat) and same_state[0] == same_state[1]


def test_stretches_cover_a_bucket_once_and_know_which_elements_of_which_slice_they_have() -> None:
    described = bucket({"lr": 1.0}).bucket
    made = stretches_of(described, STRETCH)
    assert [(stretch.start, stretch.stop) for stretch in made][:2] == [(0, 64), (64, 128)]
    assert made[-1].stop == described.numel
    covered = torch.zeros(described.numel, dtype=torch.int64)
    for stretch in made:
        for part in stretch.parts:
            begin = described.slices[part.position].offset + part.start
            assert begin == stretch.start + part.offset
            covered[begin : begin + part.stop - part.start] += 1
    for part in described.slices:
        assert covered[part.offset : part.offset + part.length].eq(1).all()
    assert max(len(stretch.parts) for stretch in made) == 3
    assert isinstance(made[0], Stretch)


@pytest.mark.parametrize("workers", [2, 3, 5])
@pytest.mark.parametrize("hyper", HYPER.values(), ids=HYPER)
def test_steps_in_stretches_are_those_of_the_whole_to_the_bit(
    hyper: HyperParameters, workers: int, runs: list[int]
) -> None:
    buckets = both(hyper)
    for number in range(4):
        update(buckets, workers, number)
        assert alike(buckets)
    # The first step makes the momentum, of all elements at once.
    assert len(runs) == 4 - ("momentum" in hyper)


NARROW = {
    "bfloat16": [torch.bfloat16] * 2,
    "three of float16": [torch.float16] * 3,
    "the first alone is narrow": [torch.bfloat16, torch.float32],
    "the last alone is narrow": [torch.float32, torch.float32, torch.bfloat16],
}


@pytest.mark.parametrize("wire", NARROW.values(), ids=NARROW)
def test_narrow_gradients_are_added_as_float32_in_stretches_or_not(wire: list[torch.dtype], runs: list[int]) -> None:
    buckets = both(HYPER["momentum"])
    for number in range(3):
        update(buckets, len(wire), number, wire)
        assert alike(buckets)
    assert len(runs) == 2


@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
def test_the_sum_of_narrow_gradients_is_the_one_of_wide_ones(optimizer: str) -> None:
    narrow, wide = both({"lr": 0.1}, optimizer=optimizer)
    for _ in range(2):
        for values in (torch.randn(narrow.flat.numel()).bfloat16() for _ in range(3)):
            narrow.add(Gradient(values, own=True), is_last=True)
            wide.add(Gradient(values.float()))
        narrow.step()
        wide.step()
        assert alike((narrow, wide))


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("types", [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)])
def test_a_sum_of_mixed_types_is_float32_and_leaves_what_is_lent(types: tuple[torch.dtype, ...], own: bool) -> None:
    terms = [torch.randn(3 * STRETCH + 1).to(dtype) for dtype in (*types, torch.bfloat16)]
    lent, expected = [term.clone() for term in terms], sum(term.float() for term in terms)
    made = Sum(Scratch())
    for term in lent:
        made.add(term, own)
    assert made.total is not None
    assert made.total.dtype == torch.float32
    assert torch.equal(made.total, expected)
    if not own:
        assert all(torch.equal(*pair) for pair in zip(lent, terms, strict=True))


def test_what_turns_out_not_to_be_the_last_is_added_before_the_next(runs: list[int]) -> None:
    buckets = both({"lr": 0.1})
    values = [torch.randn(buckets[0].flat.numel()) for _ in range(3)]
    for target, told in zip(buckets, (True, False), strict=True):
        for each in values:
            target.add(Gradient(each), told)
        target.step()
    assert alike(buckets)
    assert len(runs) == 1


def test_what_a_fenced_worker_lent_is_copied_before_it_may_write_it() -> None:
    buckets = both({"lr": 0.1})
    values = [torch.randn(buckets[0].flat.numel()) for _ in range(2)]
    for target, told in zip(buckets, (True, False), strict=True):
        lent = [each.clone() for each in values]
        for number, each in enumerate(lent):
            target.add(Gradient(each, borrowed=True), told and number == 1)
        target.own()
        for each in lent:
            each.fill_(math.nan)
        target.step()
    assert alike(buckets)
    assert buckets[0].flat.isfinite().all()


@pytest.mark.parametrize(
    "changed",
    [
        pytest.param({"absent": frozenset({1})}, id="a slice without a gradient"),
        pytest.param({"weight": 2.0}, id="weights"),
    ],
)
def test_unusual_contributions_end_at_the_same_bits(changed: dict[str, Any]) -> None:
    buckets = both({"lr": 0.1, "momentum": 0.9})
    for number in range(3):
        update(buckets, 2, number, **changed)
        assert alike(buckets)


def test_hyper_parameters_that_a_script_changes_hold_for_all_stretches(runs: list[int]) -> None:
    buckets = both({"lr": 0.1})
    update(buckets, 2, 0)
    update(buckets, 2, 1, groups={0: {"lr": 0.5}, 1: {"lr": 0.25}})
    update(buckets, 2, 2, groups={0: {"momentum": 0.9}, 1: {"momentum": 0.9}})
    update(buckets, 2, 3)
    assert alike(buckets)
    assert len(runs) == 3, "the third made the momentum"


def test_a_restored_bucket_goes_on_in_stretches(runs: list[int]) -> None:
    buckets = both(HYPER["momentum"])
    update(buckets, 2, 0)
    for each in buckets:
        each.restore(each.flat.clone(), each.copy_state(), each.groups())
    update(buckets, 2, 1)
    assert alike(buckets)
    assert runs == [1]


@pytest.mark.parametrize(("optimizer", "dtype"), [("AdamW", "float32"), ("SGD", "bfloat16"), ("SGD", "float64")])
def test_others_step_as_a_whole(optimizer: str, dtype: str, runs: list[int]) -> None:
    buckets = both({"lr": 0.1}, optimizer=optimizer, dtype=dtype)
    assert not buckets[0].wants_last
    for number in range(2):
        update(buckets, 2, number)
        assert alike(buckets)
    assert not runs


def test_a_bucket_of_one_stretch_steps_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    large = bucket({"lr": 0.1})
    assert large.wants_last
    monkeypatch.setattr(dense, "STRETCH", large.flat.numel())
    assert not bucket({"lr": 0.1}).wants_last
