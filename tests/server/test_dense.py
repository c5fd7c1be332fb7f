"""One bucket's weights are what the real optimizer makes of the mean of what was pushed."""

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
from ps_protocol.optimizers import ELEMENTWISE
from ps_protocol.tensors import bytes_of, tensor_from
from ps_server.core.dense import DenseBucket, Gradient
from ps_server.core.sums import Scratch
from tests.tools.optimizers import UNUSUAL

# The shards run torch's fused kernels where there are some, and on slices; a plain loop runs others on whole tensors.
# They add in another order within an element's update, which costs a few units in the last place of a float32 a step.
TOLERANCE = {"rtol": 1e-5, "atol": 1e-6}

SHAPES = {"a": (40,), "b": (3, 8), "c": (5,)}


Model = dict[str, torch.Tensor | None]  # by parameter; a gradient that is None is absent


class Shard:
    """All buckets of a small model: `a` and `b` in group 0, `c` in group 1, which has half the learning rate."""

    def __init__(
        self, optimizer: str = "SGD", hyper: Any = None, *, bucket_bytes: int = 128, dtype: str = "float32"
    ) -> None:
        values = hyper or {"lr": 1.0}
        self.groups: tuple[HyperParameters, ...] = (values, {**values, "lr": values["lr"] / 2})
        parameters = tuple(ParameterSpec(name, shape, dtype, int(name == "c")) for name, shape in SHAPES.items())
        spec = JobSpec("job", parameters, optimizer, self.groups, Consistency(0, aggregate=True), bucket_bytes, 0)
        self.layout = bucket_layout(parameters, bucket_bytes)
        scratch = Scratch()
        self.buckets = [DenseBucket(spec, bucket, scratch) for bucket in self.layout.buckets]

    def parts(self, model: Model) -> list[torch.Tensor]:
        """What lies in each bucket; zeros where a tensor is absent."""
        flat = torch.zeros(self.layout.space_sizes[self.layout.buckets[0].space], dtype=self.buckets[0].flat.dtype)
        for tensor, offset in zip(model.values(), self.layout.offsets, strict=True):
            if tensor is not None:
                flat[offset : offset + tensor.numel()] = tensor.reshape(-1)
        return list(flat.split([bucket.numel for bucket in self.layout.buckets]))

    def gradients(self, gradient: Model, groups: Sequence[HyperParameters]) -> list[Gradient]:
        """What a worker pushes of a step's gradients, bucket by bucket."""
        missing = [tensor is None for tensor in gradient.values()]
        found = []
        for bucket, values in zip(self.layout.buckets, self.parts(gradient), strict=True):
            absent = frozenset(position for position, part in enumerate(bucket.slices) if missing[part.parameter])
            nothing = len(absent) == len(bucket.slices)
            found.append(Gradient(None if nothing else values, absent, dict(enumerate(groups))))
        return found

    def update(self, *workers: Model, groups: Sequence[Sequence[HyperParameters]] | None = None) -> None:
        """One update with one gradient of each worker, in their order."""
        for rank, gradient in enumerate(workers):
            sent = self.gradients(gradient, groups[rank] if groups else self.groups)
            for weights, part in zip(self.buckets, sent, strict=True):
                weights.add(part)
        for weights in self.buckets:
            weights.step()

    def load(self, model: Model) -> None:
        for weights, part in zip(self.buckets, self.parts(model), strict=True):
            weights.load(part)

    def model(self) -> dict[str, torch.Tensor]:
        """The weights, in the parameters' shapes."""
        flat = torch.cat([weights.flat for weights in self.buckets])
        offsets = zip(SHAPES.items(), self.layout.offsets, strict=True)
        return {name: flat[offset:][: math.prod(shape)].view(shape) for (name, shape), offset in offsets}


def random_gradient(dtype: torch.dtype = torch.float32) -> Model:
    return {name: torch.randn(shape).to(dtype) for name, shape in SHAPES.items()}


def full(value: float, dtype: torch.dtype = torch.float32) -> Model:
    return {name: torch.full(shape, value, dtype=dtype) for name, shape in SHAPES.items()}


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_buckets_end_where_one_optimizer_over_whole_tensors_ends(name: str, dtype: str) -> None:
    """Two workers, 20 steps, a scheduler, parameters that miss gradients, tensors that are split over buckets."""
    shard = Shard(name, UNUSUAL[name], dtype=dtype)
    kind: torch.dtype = getattr(torch, dtype)
    plain = {key: torch.randn(shape).to(kind) for key, shape in SHAPES.items()}
    shard.load(plain)
    optimizer = ELEMENTWISE[name](
        [
            {"params": [plain["a"], plain["b"]], **shard.groups[0]},
            {"params": [plain["c"]], **shard.groups[1]},
        ],
        **UNUSUAL[name],  # type: ignore[arg-type]
    )
    for step in range(20):
        workers = [random_gradient(kind) for _ in range(2)]
        if step % 3 == 1:
            workers[1]["b"] = None  # one worker did not use it: a zero in the mean
        if step % 4 == 0:
            workers[0]["c"] = workers[1]["c"] = None  # nobody did: left alone, with its state
        groups: list[HyperParameters] = [{**group, "lr": 0.9**step * group["lr"]} for group in shard.groups]  # type: ignore[operator]
        shard.update(*workers, groups=[groups, groups])
        for group, values in zip(optimizer.param_groups, groups, strict=True):
            group.update(values)
        for key, tensor in plain.items():
            parts = [worker[key] for worker in workers]
            if all(part is None for part in parts):
                tensor.grad = None
            else:
                terms = [torch.zeros_like(tensor) if part is None else part for part in parts]
                tensor.grad = ((terms[0].to(torch.float64) + terms[1]) / 2).to(kind)
        optimizer.step()
    tolerance = {"rtol": 0.05, "atol": 0.02} if dtype == "bfloat16" else TOLERANCE  # 8 bits, and 20 roundings
    for key, tensor in shard.model().items():
        torch.testing.assert_close(tensor, plain[key], **tolerance)


@pytest.mark.parametrize("bucket_bytes", [64, 128, 4096])
def test_a_mean_does_not_depend_on_the_bucket_that_a_parameter_lies_in(bucket_bytes: int) -> None:
    """The last worker has no gradient for `c`: a zero in the mean, whether `c` is alone in its bucket or not."""
    for workers, mean in (([full(4.0), full(2.0)], 2.0), ([full(4.0), full(2.0), full(3.0)], 2.0)):
        shard = Shard(bucket_bytes=bucket_bytes)
        shard.update(*workers[:-1], {**workers[-1], "c": None})
        assert torch.equal(shard.model()["a"], torch.full((40,), -3.0))
        assert torch.equal(shard.model()["c"], torch.full((5,), -mean / 2))  # group 1 has half the learning rate


def test_a_step_that_was_left_out_is_no_term_of_the_mean() -> None:
    shard = Shard()
    for weights, part in zip(shard.buckets, shard.gradients(full(4.0), shard.groups), strict=True):
        weights.add(Gradient(None))
        weights.add(part)
        weights.step()
    assert torch.equal(shard.model()["a"], torch.full((40,), -4.0))


def test_the_first_contributors_hyper_parameters_count_until_others_come() -> None:
    shard = Shard()
    shard.update(full(1.0), full(1.0), groups=[[{"lr": 3.0}, {"lr": 3.0}], [{"lr": 5.0}, {"lr": 5.0}]])
    assert torch.equal(shard.model()["a"], torch.full((40,), -3.0))
    shard.update(full(1.0), groups=[[]])
    assert torch.equal(shard.model()["a"], torch.full((40,), -6.0))


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_what_came_over_the_wire_is_only_read(name: str, workers: int) -> None:
    shard = Shard(name, UNUSUAL[name], bucket_bytes=4096)
    (weights,) = shard.buckets
    payloads = [bytes(bytes_of(torch.randn(weights.bucket.numel))) for _ in range(workers)]
    copies = [bytearray(payload) for payload in payloads]
    for _ in range(2):
        for payload in payloads:
            weights.add(Gradient(tensor_from(payload, "float32"), frozenset({0})))
        weights.step()
    assert payloads == copies


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_a_sum_in_the_memory_of_the_first_gradient_is_the_same_to_the_bit(name: str, workers: int) -> None:
    (own,), (others,) = (Shard(name, UNUSUAL[name], bucket_bytes=4096).buckets for _ in range(2))
    for step in range(3):
        for rank in range(workers):
            values, absent = torch.randn(own.bucket.numel), frozenset({0} if rank == step else ())
            own.add(Gradient(values.clone(), absent, own=True))
            others.add(Gradient(values, absent))
        own.step()
        others.step()
    assert torch.equal(own.flat, others.flat)
    assert not own._scratch._free, "no more memory is taken"


def test_half_precision_is_summed_in_float32() -> None:
    """256 + 1 + 1 is 256 in bfloat16."""
    shard = Shard(dtype="bfloat16")
    shard.update(*(full(value, torch.bfloat16) for value in (256.0, 1.0, 1.0)))
    assert torch.equal(shard.model()["a"], torch.full((40,), -86.0, dtype=torch.bfloat16))


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_narrow_gradients_of_float32_weights_are_widened_before_they_are_summed(workers: int) -> None:
    shard = Shard(bucket_bytes=4096)
    (weights,) = shard.buckets
    narrow = torch.full((weights.bucket.numel,), 1 / 3).to(torch.bfloat16)
    for _ in range(workers):
        weights.add(Gradient(narrow))
    weights.step()
    torch.testing.assert_close(shard.model()["a"], -narrow.float()[:40])


def test_a_borrowed_gradient_can_be_made_our_own_before_its_owner_writes_again() -> None:
    shard = Shard(bucket_bytes=4096)
    (weights,) = shard.buckets
    lent = torch.ones(weights.bucket.numel)
    waiting = Gradient(lent, borrowed=True).owned()
    weights.add(Gradient(lent, borrowed=True))
    weights.own()
    lent.fill_(100.0)
    weights.add(waiting)
    weights.step()
    assert shard.model()["a"][0].item() == -1.0
    assert not waiting.borrowed


def test_optimizer_bytes_are_those_of_its_state() -> None:
    shard = Shard("Adam", {"lr": 0.1})
    assert sum(weights.optimizer_bytes for weights in shard.buckets) == 0
    shard.update(full(1.0))
    slices = sum(len(bucket.slices) for bucket in shard.layout.buckets)
    elements = sum(math.prod(shape) for shape in SHAPES.values())
    assert sum(weights.optimizer_bytes for weights in shard.buckets) == 4 * (2 * elements + slices)


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize("optimizer", ["SGD", "Adagrad"])
def test_a_mean_is_that_of_the_weights_of_what_is_in_it(optimizer: str, dtype: str) -> None:
    """In every order of arrival. The mean of one contribution alone is that contribution, whatever its weight."""
    weights = {0: 3.0, 1: 1.0, 2: 4.0}
    for ranks in ([0, 1, 2], [1, 0], [1, 2, 0], [2]):
        shard = Shard(optimizer, {"lr": 1.0}, dtype=dtype)
        plain = Shard(optimizer, {"lr": 1.0}, dtype=dtype)
        for index, (bucket, expected) in enumerate(zip(shard.buckets, plain.buckets, strict=True)):
            values = {
                rank: torch.randn(bucket.bucket.numel, generator=torch.Generator().manual_seed(10 * index + rank))
                for rank in ranks
            }
            rounded = {rank: each.to(bucket.flat.dtype) for rank, each in values.items()}
            for rank in ranks:
                bucket.add(Gradient(rounded[rank].clone(), weight=weights[rank]))
            bucket.step()
            total = sum(weights[rank] for rank in ranks)
            mean = sum(weights[rank] / total * rounded[rank].double() for rank in ranks)
            assert isinstance(mean, torch.Tensor)
            expected.add(Gradient(mean.to(bucket.flat.dtype)))
            expected.step()
            tolerance = {"rtol": 0.02, "atol": 0.02} if dtype == "bfloat16" else TOLERANCE
            torch.testing.assert_close(bucket.flat, expected.flat, **tolerance)
