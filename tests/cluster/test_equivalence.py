"""Training on the parameter server ends at the weights of plain PyTorch.

TOLERANCE is for float32. One process sums the gradient over the combined batch in one kernel; the shards sum three
gradients that were each rounded once, and divide by three. That differs by a few units in the last place, 1e-7 of the
gradient's largest terms. Where terms cancel, the rest is small and its relative error large; optimizers that divide by
the gradient's own size (Adam and its kin) hand that error on, up to the learning rate in the worst case. Measured over
20 steps: at most 3e-7 for every optimizer, on weights of up to 3. The tolerance leaves room for the kernels of
other machines. In float64 the same runs agree to 1e-13, so rounding is all there is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ConstantLR, ExponentialLR, LRScheduler, OneCycleLR

from ps_protocol.optimizers import ELEMENTWISE
from ps_worker import Session
from tests.scripts.models import Everything, batch, combined, loss_of
from tests.tools.cases import cases
from tests.tools.cluster import Cluster, in_parallel, until

TOLERANCE = 1e-5
WORKERS = 3
STEPS = 8
BUCKET_BYTES = 256  # 64 floats: the embedding, the convolution and the head's tie are cut over buckets and shards

Make = Callable[[nn.Module], tuple[Optimizer, LRScheduler]]
MakeGradients = Callable[[nn.Module, int, int], None]  # of a rank's step
State = dict[str, torch.Tensor]

OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "SGD": lambda groups: torch.optim.SGD(groups, lr=0.1),
    "SGD-momentum": lambda groups: torch.optim.SGD(groups, lr=0.05, momentum=0.9, dampening=0.1, weight_decay=0.01),
    "SGD-nesterov": lambda groups: torch.optim.SGD(groups, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
    "Adam": lambda groups: torch.optim.Adam(groups, lr=0.01, weight_decay=0.01),
    "Adam-amsgrad": lambda groups: torch.optim.Adam(groups, lr=0.01, betas=(0.8, 0.95), amsgrad=True),
    "AdamW": lambda groups: torch.optim.AdamW(groups, lr=0.01, weight_decay=0.1),
    "Adagrad": lambda groups: torch.optim.Adagrad(groups, lr=0.05, lr_decay=0.01, initial_accumulator_value=0.1),
    "RMSprop": lambda groups: torch.optim.RMSprop(groups, lr=0.005),
    "RMSprop-centered": lambda groups: torch.optim.RMSprop(groups, lr=0.005, momentum=0.5, centered=True),
    "Adadelta": lambda groups: torch.optim.Adadelta(groups, lr=0.5),
    "Adamax": lambda groups: torch.optim.Adamax(groups, lr=0.01),
    "NAdam": lambda groups: torch.optim.NAdam(groups, lr=0.01),
    "RAdam": lambda groups: torch.optim.RAdam(groups, lr=0.01),
}


def maker(name: str) -> Make:
    """An optimizer over the model's two groups, and a scheduler that moves both learning rates at every step."""

    def make(model: nn.Module) -> tuple[Optimizer, LRScheduler]:
        optimizer = OPTIMIZERS[name](model.groups())
        return optimizer, ExponentialLR(optimizer, gamma=0.95)

    return make


def alone(make: Make, dtype: torch.dtype = torch.float32) -> State:
    """The weights of one process that trains on the combined batches."""
    model = Everything(seed=0).to(dtype)
    optimizer, scheduler = make(model)
    for step in range(STEPS):
        loss_of(model, combined(WORKERS, step)).backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return model.state_dict()


def on_own_batch(model: nn.Module, rank: int, step: int) -> None:
    loss_of(model, batch(rank, step)).backward()


def together(
    cluster: Cluster,
    job: str,
    make: Make,
    make_model: Callable[[int], nn.Module] = Everything,
    make_gradients: MakeGradients = on_own_batch,
    transport: str = "auto",
) -> list[State]:
    """The weights of each of WORKERS workers in sync mode. Only rank 0 begins with the weights that count."""
    models = [make_model(rank) for rank in range(WORKERS)]

    def work(rank: int) -> State:
        model = models[rank]
        with cluster.connect("sync", rank, WORKERS, job=job, transport=transport) as session:
            optimizer, scheduler = make(model)
            model, optimizer = session.prepare(model, optimizer, bucket_bytes=BUCKET_BYTES)
            for step in range(STEPS):
                make_gradients(model, rank, step)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            return {name: tensor.clone() for name, tensor in model.state_dict().items()}

    return in_parallel(WORKERS, work)


def distance(left: State, right: State) -> float:
    """The largest difference between two weights of the same name."""
    assert left.keys() == right.keys()
    return max(float((left[name] - right[name]).abs().max()) for name in left)


def assert_identical(left: State, right: State) -> None:
    assert left.keys() == right.keys()
    for name in left:
        assert torch.equal(left[name], right[name]), f"{name} differs by {(left[name] - right[name]).abs().max()}"


EVERY_RUN = ("SGD-momentum", "AdamW", "NAdam")


@pytest.mark.parametrize("name", cases(EVERY_RUN, [name for name in OPTIMIZERS if name not in EVERY_RUN]))
def test_sync_with_three_workers_equals_one_process(shared: Cluster, job: str, name: str) -> None:
    first, *others = together(shared, job, maker(name))
    assert distance(first, alone(maker(name))) < TOLERANCE
    assert distance(first, Everything(seed=0).state_dict()) > 0.01, "nothing was learnt, so nothing was compared"
    for other in others:
        assert_identical(first, other)


def test_every_supported_optimizer_is_compared() -> None:
    assert {name.partition("-")[0] for name in OPTIMIZERS} == set(ELEMENTWISE)


def test_in_float64_only_rounding_is_left(shared: Cluster, job: str) -> None:
    first = together(shared, job, maker("AdamW"), lambda rank: Everything(rank).double())[0]
    assert distance(first, alone(maker("AdamW"), torch.float64)) < 1e-12


def test_shared_memory_and_the_network_give_the_same_bits(shared: Cluster, job: str) -> None:
    through_memory = together(shared, f"{job}-shm", maker("Adam"), transport="shm")
    for rank, over_the_network in enumerate(together(shared, f"{job}-grpc", maker("Adam"), transport="grpc")):
        assert_identical(through_memory[rank], over_the_network)


def test_a_scheduler_moves_every_hyper_parameter_that_it_owns(shared: Cluster, job: str) -> None:
    def one_cycle(model: nn.Module) -> tuple[Optimizer, LRScheduler]:
        optimizer = torch.optim.AdamW(model.groups(), lr=0.01)
        return optimizer, OneCycleLR(optimizer, max_lr=[0.02, 0.01], total_steps=STEPS + 1)  # moves betas too

    assert distance(together(shared, job, one_cycle)[0], alone(one_cycle)) < TOLERANCE


def test_a_scheduler_may_be_made_after_prepare(shared: Cluster, job: str) -> None:
    model = Everything(seed=0)
    with shared.connect("sync", job=job) as session:
        model, optimizer = session.prepare(model, torch.optim.SGD(model.groups(), lr=0.1), bucket_bytes=BUCKET_BYTES)
        scheduler = ExponentialLR(optimizer, gamma=0.95)
        for step in range(STEPS):
            loss_of(model, combined(WORKERS, step)).backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    assert distance(model.state_dict(), alone(maker("SGD"))) < TOLERANCE


@pytest.mark.parametrize("mode", ["sync", "ssp:0", "ssp:3", "async"])
def test_one_worker_trains_as_plain_torch_to_the_bit(shared: Cluster, job: str, mode: str) -> None:
    def make(model: nn.Module) -> Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)  # what the shards run too

    plain, model = Everything(seed=0), Everything(seed=0)
    reference = make(plain)
    with shared.connect(mode, job=job) as session:
        model, optimizer = session.prepare(model, make(model), bucket_bytes=BUCKET_BYTES)
        for step in range(STEPS):
            for net, stepper in ((plain, reference), (model, optimizer)):
                loss_of(net, batch(0, step)).backward()
                stepper.step()
                stepper.zero_grad()
            assert_identical(plain.state_dict(), model.state_dict())


# -- reproducible ----------------------------------------------------------------------------------------------------


def staged_everywhere(cluster: Cluster, job: str, rank: int, clock: int) -> bool:
    """Whether every shard has taken all that a worker pushes up to a clock."""
    return all(
        bucket.unit.spec.frozen or bucket.rule.staged.get(rank, 0) >= clock
        for shard in cluster.shards
        for bucket in shard.jobs()[job].buckets.values()
    )


def test_two_runs_agree_to_the_bit_whoever_comes_first(shared: Cluster, job: str) -> None:
    def run(name: str, order: Callable[[int], list[int]]) -> State:
        """Trains with workers that push one after the other: step s in the order order(s)."""

        def in_turn(model: nn.Module, rank: int, step: int) -> None:
            on_own_batch(model, rank, step)
            for earlier in order(step)[: order(step).index(rank)]:
                until(lambda rank=earlier: staged_everywhere(shared, name, rank, step + 1))

        return together(shared, name, maker("Adam"), make_gradients=in_turn)[0]

    backwards = run(f"{job}-backwards", lambda step: [2, 1, 0])
    assert_identical(backwards, run(f"{job}-mixed", lambda step: [(step + k) % 3 for k in range(3)]))


# -- how it starts ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", cases([2], [0, 1]))
def test_initial_weights_and_buffers_are_those_of_rank_0_whoever_joins_first(
    shared: Cluster, job: str, first: int
) -> None:
    models = [Everything(seed=rank, norm=True) for rank in range(WORKERS)]
    for rank, model in enumerate(models):
        model.norm.running_mean.fill_(rank)
        model.norm.num_batches_tracked.fill_(rank + 7)
    expected = {name: tensor.clone() for name, tensor in models[0].state_dict().items()}

    def joined() -> bool:
        found = shared.coordinator.jobs().get(job)
        return found is not None and first in found.workers.roster()[0]

    def work(rank: int) -> State:
        if rank != first:
            until(joined)
        with shared.connect("sync", rank, WORKERS, job=job) as session:
            optimizer = torch.optim.SGD(models[rank].groups(), lr=0.1)
            session.prepare(models[rank], optimizer, bucket_bytes=BUCKET_BYTES)
            return {name: tensor.clone() for name, tensor in models[rank].state_dict().items()}

    for found in in_parallel(WORKERS, work):
        assert_identical(found, expected)


# -- what one worker's loop may do -----------------------------------------------------------------------------------

Loop = Callable[[nn.Module, Optimizer, "Session | None"], None]
Change = Callable[[nn.Module, Optimizer, int], object]


def between_backward_and_step(change: Change, steps: int = 8, zero: bool = True) -> Loop:
    """The usual loop, with something done in the middle of each step."""

    def loop(model: nn.Module, optimizer: Optimizer, session: Session | None) -> None:
        for step in range(steps):
            loss_of(model, batch(0, step)).backward()
            change(model, optimizer, step)
            optimizer.step()
            if zero:
                optimizer.zero_grad()

    return loop


def with_a_closure(model: nn.Module, optimizer: Optimizer, session: Session | None) -> None:
    for step in range(8):

        def closure(step: int = step) -> torch.Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, batch(0, step))
            loss.backward()
            return loss

        assert optimizer.step(closure).item() == pytest.approx(loss_of(model, batch(0, step)).item(), abs=0.5)


def with_gradients_zeroed_in_place(model: nn.Module, optimizer: Optimizer, session: Session | None) -> None:
    for step in range(8):
        loss_of(model, batch(0, step)).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)


def with_two_backwards_a_step(model: nn.Module, optimizer: Optimizer, session: Session | None) -> None:
    for step in range(8):
        with session.no_sync() if session and step % 2 else contextlib.nullcontext():
            (loss_of(model, batch(0, step)) / 2).backward()
        (loss_of(model, batch(1, step)) / 2).backward()
        optimizer.step()
        model.zero_grad()


def with_a_grad_scaler(model: nn.Module, optimizer: Optimizer, session: Session | None) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for step in range(8):
        loss = loss_of(model, batch(0, step))
        scaler.scale(loss * float("inf") if step == 3 else loss).backward()
        if step % 2:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert scaler.get_scale() == 2.0**9, "the step with the infinite loss was to halve the scale"


def clip(model: nn.Module, optimizer: Optimizer, step: int) -> None:
    assert nn.utils.clip_grad_norm_(model.parameters(), 0.05) > 0.05


def set_gradients_by_hand(model: nn.Module, optimizer: Optimizer, step: int) -> None:
    for parameter in model.parameters():
        if parameter.requires_grad:
            turned = torch.full(parameter.shape[::-1], 0.1 * step + 0.1)
            parameter.grad = turned.permute(*reversed(range(parameter.ndim)))  # not contiguous


def set_the_learning_rate(model: nn.Module, optimizer: Optimizer, step: int) -> None:
    for group in optimizer.param_groups:
        group["lr"] = 0.01 * (step + 1)


def take_some_gradients_away(model: nn.Module, optimizer: Optimizer, step: int) -> None:
    for name, parameter in model.named_parameters():
        if (step + len(name)) % 3 == 0:
            parameter.grad = None


def with_a_layer_thawed_and_one_frozen(model: nn.Module, optimizer: Optimizer, session: Session | None) -> None:
    for step in range(12):
        model.frozen.requires_grad_(step >= 4)
        model.conv.requires_grad_(step < 8)
        loss_of(model, batch(0, step)).backward()
        optimizer.step()
        optimizer.zero_grad()


LOOPS: dict[str, Loop] = {
    "a closure": with_a_closure,
    "gradients that are zeroed in place": with_gradients_zeroed_in_place,
    "gradients that are never zeroed": between_backward_and_step(lambda *_: None, steps=4, zero=False),
    "two backwards a step": with_two_backwards_a_step,
    "clipped gradients": between_backward_and_step(clip),
    "gradients set by hand": between_backward_and_step(set_gradients_by_hand),
    "a learning rate set after backward": between_backward_and_step(set_the_learning_rate),
    "no gradient in some steps": between_backward_and_step(take_some_gradients_away, steps=12),
    "a grad scaler": with_a_grad_scaler,
}


def assert_loop_equals_plain(cluster: Cluster, job: str, make: Callable[[nn.Module], Optimizer], loop: Loop) -> None:
    """Runs a loop in plain torch and as the one worker of a sync job."""
    plain, model = Everything(seed=0), Everything(seed=0)
    loop(plain, make(plain), None)
    with cluster.connect("sync", job=job) as session:
        model, optimizer = session.prepare(model, make(model), bucket_bytes=BUCKET_BYTES)
        loop(model, optimizer, session)
        assert session.clock > 0
    assert distance(plain.state_dict(), model.state_dict()) < TOLERANCE


@pytest.mark.parametrize("what", LOOPS)
def test_a_loop_does_what_it_does_in_plain_torch(shared: Cluster, job: str, what: str) -> None:
    assert_loop_equals_plain(shared, job, lambda model: torch.optim.Adam(model.groups(), lr=0.01), LOOPS[what])


def test_a_grad_scaler_unscales_for_a_fused_optimizer_too(shared: Cluster, job: str) -> None:
    # A fused optimizer asks the scaler to leave unscaling to its own step; that step is not run here.
    assert_loop_equals_plain(
        shared, job, lambda model: torch.optim.SGD(model.groups(), lr=0.1, fused=True), with_a_grad_scaler
    )


def test_a_layer_may_be_thawed_and_another_frozen_on_the_way(shared: Cluster, job: str) -> None:
    def make(model: nn.Module) -> Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)  # the frozen layer's too

    assert_loop_equals_plain(shared, job, make, with_a_layer_thawed_and_one_frozen)


# -- what several workers add up to ----------------------------------------------------------------------------------


def mean_of_workers(model: nn.Module, make: Make, make_gradients: MakeGradients) -> State:
    """What sync promises, written down in plain torch: each step with the mean of the workers' gradients.

    A worker that has none for a parameter counts as zero, as in DDP; a parameter without any gradient is left alone.
    """
    optimizer, scheduler = make(model)
    for step in range(STEPS):
        each = []
        for rank in range(WORKERS):
            model.zero_grad()
            make_gradients(model, rank, step)
            each.append([parameter.grad for parameter in model.parameters()])
        for parameter, *gradients in zip(model.parameters(), *each, strict=True):
            present = [gradient.float() for gradient in gradients if gradient is not None]
            # Added up in float32 and rounded once, as the shards promise: bfloat16 would lose the small terms.
            parameter.grad = (sum(present) / WORKERS).to(parameter.dtype) if present else None
        optimizer.step()
        scheduler.step()
    return model.state_dict()


def assert_workers_equal_their_mean(cluster: Cluster, job: str, make_gradients: MakeGradients) -> None:
    plain = mean_of_workers(Everything(seed=0), maker("Adam"), make_gradients)
    for state in together(cluster, job, maker("Adam"), make_gradients=make_gradients):
        assert distance(state, plain) < TOLERANCE


def test_each_worker_clips_its_own_gradient(shared: Cluster, job: str) -> None:
    def make_gradients(model: nn.Module, rank: int, step: int) -> None:
        on_own_batch(model, rank, step)
        nn.utils.clip_grad_norm_(model.parameters(), 0.02 * (rank + 1))

    assert_workers_equal_their_mean(shared, job, make_gradients)


def test_workers_that_accumulate_equal_one_process_that_does(shared: Cluster, job: str) -> None:
    def make_gradients(model: nn.Module, rank: int, step: int) -> None:
        for part in range(2 + rank):  # not even as often as the others
            with getattr(model, "no_sync", contextlib.nullcontext)():
                loss_of(model, batch(rank, 100 * part + step)).backward()

    assert_workers_equal_their_mean(shared, job, make_gradients)


def test_who_has_no_gradient_for_a_parameter_counts_as_zero_and_if_nobody_has_it_stays(
    shared: Cluster, job: str
) -> None:
    def make_gradients(model: nn.Module, rank: int, step: int) -> None:
        on_own_batch(model, rank, step)
        if step % 2 and rank == step % 3:
            model.embed.weight.grad = None  # fills whole buckets: such a worker has nothing at all to push there
        if step % 3 == 0 and rank:
            model.conv.bias.grad = None
        if step % 4 == 0:
            model.conv.weight.grad = None

    assert_workers_equal_their_mean(shared, job, make_gradients)


def test_a_bfloat16_model_equals_plain_torch_on_the_mean_gradient(shared: Cluster, job: str) -> None:
    def make_model(seed: int) -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).bfloat16()

    def make_gradients(model: nn.Module, rank: int, step: int) -> None:
        generator = torch.Generator().manual_seed(1000 * rank + step)
        model(torch.randn(4, 8, generator=generator).bfloat16()).float().square().mean().backward()

    def make(model: nn.Module) -> tuple[Optimizer, LRScheduler]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        return optimizer, ConstantLR(optimizer, factor=1.0)

    plain = mean_of_workers(make_model(0), make, make_gradients)
    for state in together(shared, job, make, make_model, make_gradients):
        assert_identical(state, plain)
