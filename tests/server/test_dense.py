"""One bucket's weights are what the real optimizer makes of the mean of what was pushed."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from ps_protocol.job import HyperParameters, JobSpec
from ps_protocol.layout import ParameterSpec, bucket_layout
from ps_protocol.modes import Consistency
from ps_protocol.optimizers import ELEMENTWISE
from ps_protocol.tensors import bytes_of, tensor_from
from ps_server.core.dense import DenseBucket, Gradient, Scratch

# The shards run torch's fused kernels where there are some, and on slices; a plain loop runs others on whole tensors.
# They add in another order within an element's update, which costs a few units in the last place of a float32 a step.
TOLERANCE = {"rtol": 1e-5, "atol": 1e-6}

HYPER: dict[str, HyperParameters] = {
    "SGD": {"lr": 0.1, "momentum": 0.9, "dampening": 0.0, "weight_decay": 0.01, "nesterov": True},
    "Adam": {"lr": 0.01, "betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.01, "amsgrad": True},
    "AdamW": {"lr": 0.01, "betas": (0.9, 0.99), "eps": 1e-6, "weight_decay": 0.1, "maximize": True},
    "Adagrad": {"lr": 0.1, "lr_decay": 0.1, "eps": 1e-6, "initial_accumulator_value": 0.5},
    "RMSprop": {"lr": 0.01, "alpha": 0.9, "centered": True, "momentum": 0.5, "eps": 1e-4},
    "Adadelta": {"lr": 0.5, "rho": 0.8},
    "Adamax": {"lr": 0.01, "betas": (0.8, 0.9)},
    "NAdam": {"lr": 0.01, "momentum_decay": 0.01},
    "RAdam": {"lr": 0.01, "weight_decay": 0.01},
}

SHAPES = {"a": (40,), "b": (3, 8), "c": (5,)}


class Shard:
    """All buckets of a small model: `a` and `b` in group 0, `c` in group 1."""

    def __init__(
        self,
        optimizer: str = "SGD",
        hyper: HyperParameters | None = None,
        *,
        bucket_bytes: int = 128,
        dtype: str = "float32",
    ) -> None:
        values = hyper if hyper is not None else {"lr": 1.0}
        specs = tuple(ParameterSpec(name, shape, dtype, int(name == "c")) for name, shape in SHAPES.items())
        lr = values["lr"]
        assert isinstance(lr, float)
        self.groups: tuple[HyperParameters, ...] = (values, {**values, "lr": lr / 2})
        self.spec = JobSpec("job", specs, optimizer, self.groups, Consistency(0, aggregate=True), bucket_bytes, 0)
        scratch = Scratch()
        layout = bucket_layout(specs, bucket_bytes)
        self.buckets = [DenseBucket(self.spec, bucket, scratch) for bucket in layout.buckets]

    def gradients(self, gradient: dict[str, torch.Tensor | None], groups: Sequence[HyperParameters]) -> list[Gradient]:
        """What a worker pushes of a step's gradients, bucket by bucket."""
        found = []
        for weights in self.buckets:
            flat = torch.zeros_like(weights.flat)
            absent = set()
            for position, segment in enumerate(weights.bucket.slices):
                whole = gradient[self.spec.parameters[segment.parameter].name]
                if whole is None:
                    absent.add(position)
                else:
                    part = whole.reshape(-1)[segment.start : segment.start + segment.length]
                    flat[segment.offset : segment.offset + segment.length] = part
            values = None if len(absent) == len(weights.bucket.slices) else flat
            found.append(Gradient(values, frozenset(absent), dict(enumerate(groups))))
        return found

    def update(
        self, *workers: dict[str, torch.Tensor | None], groups: Sequence[Sequence[HyperParameters]] | None = None
    ) -> None:
        """One update with one gradient of each worker, in their order."""
        for rank, gradient in enumerate(workers):
            sent = self.gradients(gradient, groups[rank] if groups else self.groups)
            for weights, part in zip(self.buckets, sent, strict=True):
                weights.add(part)
        for weights in self.buckets:
            weights.step()

    def load(self, model: dict[str, torch.Tensor]) -> None:
        for weights, part in zip(self.buckets, self.gradients(dict(model), ()), strict=True):
            assert part.values is not None
            weights.load(part.values)

    def model(self) -> dict[str, torch.Tensor]:
        """The weights, in the parameters' shapes."""
        found = {spec.name: torch.empty(spec.numel, dtype=self.buckets[0].flat.dtype) for spec in self.spec.parameters}
        for weights in self.buckets:
            for segment in weights.bucket.slices:
                part = weights.flat[segment.offset : segment.offset + segment.length]
                found[self.spec.parameters[segment.parameter].name][segment.start :][: segment.length] = part
        return {name: flat.view(SHAPES[name]) for name, flat in found.items()}


def random_gradient(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor | None]:
    return {name: torch.randn(shape).to(dtype) for name, shape in SHAPES.items()}


def full(value: float, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor | None]:
    return {name: torch.full(shape, value, dtype=dtype) for name, shape in SHAPES.items()}


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_buckets_end_where_one_optimizer_over_whole_tensors_ends(name: str, dtype: str) -> None:
    """Two workers, 20 steps, a scheduler, parameters that miss gradients, tensors that are split over buckets."""
    shard = Shard(name, HYPER[name], dtype=dtype)
    kind: torch.dtype = getattr(torch, dtype)
    plain = {key: torch.randn(shape).to(kind) for key, shape in SHAPES.items()}
    shard.load(plain)
    optimizer = ELEMENTWISE[name](
        [
            {"params": [plain["a"], plain["b"]], **shard.groups[0]},
            {"params": [plain["c"]], **shard.groups[1]},
        ],
        **HYPER[name],  # type: ignore[arg-type]
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


def test_the_sum_is_made_in_the_order_of_adding_to_the_bit() -> None:
    shard = Shard()
    workers = [random_gradient() for _ in range(3)]
    shard.update(*workers)
    for key, tensor in shard.model().items():
        one, two, three = (worker[key] for worker in workers)
        assert one is not None
        assert two is not None
        lr = shard.groups[key == "c"]["lr"]
        assert torch.equal(tensor, -lr * ((one + two + three) / 3))  # type: ignore[operator]


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


def test_an_update_without_any_gradient_changes_neither_weights_nor_optimizer_state() -> None:
    shard, twin = (Shard("Adam", HYPER["Adam"]) for _ in range(2))
    nothing: dict[str, torch.Tensor | None] = dict.fromkeys(SHAPES)
    for gradient in (random_gradient(), random_gradient()):
        shard.update(gradient)
        shard.update(nothing, nothing)
        twin.update(gradient)
    assert all(torch.equal(a, b) for a, b in zip(shard.model().values(), twin.model().values(), strict=True))


def test_the_first_contributors_hyper_parameters_count() -> None:
    shard = Shard()
    shard.update(full(1.0), full(1.0), groups=[[{"lr": 3.0}, {"lr": 3.0}], [{"lr": 5.0}, {"lr": 5.0}]])
    assert torch.equal(shard.model()["a"], torch.full((40,), -3.0))


def test_hyper_parameters_stay_until_others_come() -> None:
    shard = Shard()
    shard.update(full(1.0), groups=[[{"lr": 3.0}, {"lr": 3.0}]])
    shard.update(full(1.0), groups=[[]])
    assert torch.equal(shard.model()["a"], torch.full((40,), -6.0))


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_what_came_over_the_wire_is_only_read(name: str, workers: int) -> None:
    shard = Shard(name, HYPER[name], bucket_bytes=4096)
    (weights,) = shard.buckets
    payloads = [bytes(bytes_of(torch.randn(weights.bucket.numel))) for _ in range(workers)]
    copies = [bytearray(payload) for payload in payloads]
    for _ in range(2):
        for payload in payloads:
            weights.add(Gradient(tensor_from(payload, "float32"), frozenset({0})))
        weights.step()
    assert payloads == copies


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


def test_updates_of_different_buckets_do_not_share_their_sums() -> None:
    """The memory of sums is used again, and an update may be open in one bucket while another is stepped."""
    shard = Shard()
    workers = [full(3.0), full(5.0)]
    sent = [shard.gradients(worker, shard.groups) for worker in workers]
    for _ in range(3):
        for part in sent:
            for weights, gradient in zip(shard.buckets, part, strict=True):
                weights.add(gradient)
        for weights in reversed(shard.buckets):
            weights.step()
    assert torch.equal(shard.model()["a"], torch.full((40,), -12.0))
    assert torch.equal(shard.model()["c"], torch.full((5,), -6.0))


def test_a_first_gradient_that_comes_later_than_its_neighbours_starts_its_own_momentum() -> None:
    hyper: HyperParameters = {"lr": 1.0, "momentum": 0.5}
    shard = Shard("SGD", hyper, bucket_bytes=4096)
    shard.update({**full(1.0), "a": None})
    shard.update(full(1.0))
    assert torch.equal(shard.model()["a"], torch.full((40,), -1.0))
    assert torch.equal(shard.model()["b"], torch.full((3, 8), -2.5))


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
    segments = sum(len(weights.bucket.slices) for weights in shard.buckets)
    elements = sum(spec.numel for spec in shard.spec.parameters)
    assert sum(weights.optimizer_bytes for weights in shard.buckets) == 4 * (2 * elements + segments)


def test_what_no_optimizer_steps_only_keeps_what_it_was_given() -> None:
    spec = JobSpec("job", (ParameterSpec("n", (3,), "int64", None),), "SGD", ({"lr": 1.0},), Consistency(None), 64, 0)
    (bucket,) = bucket_layout(spec.parameters, 64).buckets
    weights = DenseBucket(spec, bucket, Scratch())
    weights.load(torch.arange(8))
    weights.step()
    assert weights.flat.tolist() == list(range(8))
    assert weights.optimizer_bytes == 0
