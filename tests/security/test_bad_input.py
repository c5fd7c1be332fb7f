"""Each bad input gets one clear error, which says what was expected and what came, and changes nothing on any shard."""

from __future__ import annotations

import copy
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path

import grpc
import pytest
import torch
from torch import nn

import ps_server.cli
import ps_worker
import ps_worker.cli
from ps_protocol.convert import job_spec_message
from ps_protocol.errors import (
    InvalidRequest,
    JobMismatch,
    LimitExceeded,
    NonFiniteGradient,
    NotFound,
    OutOfOrder,
    PSError,
    Unreachable,
    Unsupported,
)
from ps_protocol.job import NonFinite
from ps_protocol.v1 import data_pb2, job_pb2, jobs_pb2, types_pb2
from ps_server.config import ServerConfig
from ps_server.server import Server
from tests.tools.cluster import Cluster, in_parallel, scrape, until
from tests.tools.raw_worker import RawWorker, vector_job

INF, NAN = float("inf"), float("nan")


# -- pushes and pulls ------------------------------------------------------------------------------------------------


@pytest.fixture
def worker(shared: Cluster, job: str) -> Iterator[RawWorker]:
    """Rank 0 of a running sync job: two buckets of 16 cells that train, one that is held."""
    with RawWorker(shared.address, vector_job(job, "sync", cells=32, world_size=1, frozen=16), 0) as found:
        found.initialise()
        found.step(torch.ones(32))
        found.pull()
        yield found


def number(name: str, value: float) -> job_pb2.HyperParameter:
    return job_pb2.HyperParameter(name=name, number=value)


def group(index: int, *values: job_pb2.HyperParameter) -> dict[str, object]:
    return {"groups": [job_pb2.GroupUpdate(group=index, hyper_parameters=values)]}


def floats(*values: float) -> bytes:
    return torch.tensor(values).numpy().tobytes()


Change = Callable[[RawWorker], data_pb2.PushRequest]

BAD_PUSHES: dict[str, tuple[Change, type[PSError], str]] = {
    "payload of another shape": (lambda w: w.message(0, 2, bytes(60)), InvalidRequest, "expected 64 bytes.*got 60"),
    "payload of another dtype": (
        lambda w: w.message(0, 2, torch.zeros(16, dtype=torch.float64).numpy().tobytes()),
        InvalidRequest,
        r"expected 64 bytes \(16 x float32\), got 128",
    ),
    "no payload": (lambda w: w.message(0, 2, b""), InvalidRequest, "expected 64 bytes.*got 0"),
    "payload where none belongs": (
        lambda w: w.message(0, 2, kind=data_pb2.PUSH_KIND_SKIP),
        InvalidRequest,
        "expected 0 bytes.*got 64",
    ),
    "bucket that does not exist": (lambda w: w.message(77, 2), NotFound, "holds no bucket 77"),
    "bucket that no optimizer steps": (lambda w: w.message(2, 2), InvalidRequest, "bucket 2 holds what no optimizer"),
    "job that does not exist": (
        lambda w: w.message(0, 2, worker=w.identity(job="another")),
        NotFound,
        "knows no job 'another'",
    ),
    "clock with a gap": (lambda w: w.message(0, 3), OutOfOrder, "pushed clock 3 where 2 comes next"),
    "segment that does not exist": (
        lambda w: w.message(0, 2, absent_slices=[5]),
        InvalidRequest,
        "has 1 slices, got slice 5",
    ),
    "group that does not exist": (lambda w: w.message(0, 2, **group(1)), InvalidRequest, "group below 1, got 1"),
    "group that comes twice": (
        lambda w: w.message(0, 2, groups=[job_pb2.GroupUpdate(group=0)] * 2),
        InvalidRequest,
        "group 0 comes twice",
    ),
    "hyper-parameter out of range": (
        lambda w: w.message(0, 2, **group(0, number("lr", -1.0))),
        InvalidRequest,
        "SGD refuses.*Invalid learning rate: -1",
    ),
    "hyper-parameter of another optimizer": (
        lambda w: w.message(0, 2, **group(0, number("betas", 0.9))),
        InvalidRequest,
        "SGD takes lr, momentum.*got 'betas'",
    ),
    "hyper-parameter of another type": (
        lambda w: w.message(
            0, 2, **group(0, job_pb2.HyperParameter(name="lr", numbers=job_pb2.NumberList(values=[1.0, 2.0])))
        ),
        InvalidRequest,
        "'lr' of SGD must be a number, got .1.0, 2.0.",
    ),
    "hyper-parameter that is no number": (
        lambda w: w.message(0, 2, **group(0, number("lr", NAN))),
        InvalidRequest,
        "lr.*nan",
    ),
    "hyper-parameter without a value": (
        lambda w: w.message(0, 2, **group(0, job_pb2.HyperParameter(name="lr"))),
        InvalidRequest,
        "lr.*None",
    ),
    "hyper-parameter that comes twice": (
        lambda w: w.message(0, 2, **group(0, number("lr", 1.0), number("lr", 2.0))),
        InvalidRequest,
        "'lr' comes twice",
    ),
    "kind that is not set": (
        lambda w: w.message(0, 2, kind=data_pb2.PUSH_KIND_UNSPECIFIED),
        InvalidRequest,
        r"kind of push: expected one of \[1, 2, 3, 4, 5, 6, 7\], got 0",
    ),
    "kind that does not exist": (lambda w: w.message(0, 2, kind=9), InvalidRequest, "expected one of.*got 9"),
    "infinity": (
        lambda w: w.message(0, 2, floats(*[1.0] * 15, INF)),
        NonFiniteGradient,
        "gradient of cells from worker 0 is not finite",
    ),
    "not a number": (lambda w: w.message(1, 2, floats(NAN, *[1.0] * 15)), NonFiniteGradient, "not finite"),
}


@pytest.mark.parametrize("what", BAD_PUSHES)
def test_a_bad_push_is_refused_and_changes_nothing(shared: Cluster, worker: RawWorker, what: str) -> None:
    make, error, text = BAD_PUSHES[what]
    before = shared.state(worker.spec.name)
    with pytest.raises(error, match=text) as caught:
        worker.send(make(worker))
    assert type(caught.value) is error
    assert "\n" not in str(caught.value), "an error is one line"
    assert shared.state(worker.spec.name) == before
    worker.step(torch.ones(32))  # and the same worker goes on
    assert worker.pull().tolist() == [-2.0] * 32


def test_a_push_to_the_wrong_shard_is_refused(shared: Cluster, worker: RawWorker) -> None:
    before = shared.state(worker.spec.name)
    with pytest.raises(NotFound, match="holds no bucket 0"):
        worker.send(worker.message(0, 2), shard=1 - worker.shard_of[0])
    assert shared.state(worker.spec.name) == before


def test_bytes_that_are_no_message_are_refused(shared: Cluster, worker: RawWorker) -> None:
    before = shared.state(worker.spec.name)
    with grpc.insecure_channel(shared.address) as channel:
        for method in ("Push", "Pull"):
            send = (channel.unary_unary if method == "Push" else channel.unary_stream)(
                f"/ps_protocol.v1.DataService/{method}"
            )
            for junk in (b"", b"\x00", b"hello", b"\xff" * 100, b"\x0a\xff\xff\xff\xff\x0f"):
                with pytest.raises(grpc.RpcError) as caught:
                    list(send(junk, timeout=10)) if method == "Pull" else send(junk, timeout=10)
                assert caught.value.code() in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND), junk
    assert shared.state(worker.spec.name) == before


def test_a_push_before_the_initial_weights_is_refused(shared: Cluster, job: str) -> None:
    with RawWorker(shared.address, vector_job(job, "sync", cells=16, world_size=1), 0) as early:
        before = shared.state(job)
        with pytest.raises(InvalidRequest, match="bucket 0 has no initial value yet"):
            early.send(early.message(0, 1))
        assert shared.state(job) == before


def test_initial_weights_of_another_than_rank_0_are_refused(shared: Cluster, job: str) -> None:
    with RawWorker(shared.address, vector_job(job, "sync", cells=16, world_size=2), 1) as other:
        before = shared.state(job)
        with pytest.raises(InvalidRequest, match="rank 0's to send, got them from rank 1"):
            other.initialise()
        assert shared.state(job) == before


@pytest.mark.parametrize(
    ("buckets", "error", "text"),
    [([0, 0], InvalidRequest, "each bucket at most once"), ([0, 77], NotFound, "holds no bucket 77")],
)
def test_a_bad_pull_is_refused(
    shared: Cluster, worker: RawWorker, buckets: list[int], error: type[PSError], text: str
) -> None:
    before = shared.state(worker.spec.name)
    with pytest.raises(error, match=text):
        list(worker.answers(worker.ask(1, buckets)))
    assert shared.state(worker.spec.name) == before


# -- jobs ------------------------------------------------------------------------------------------------------------

SpecChange = Callable[[job_pb2.JobSpec], object]

BAD_JOBS: dict[str, tuple[SpecChange, type[PSError], str]] = {
    "name with a slash": (lambda s: setattr(s, "name", "a/b"), InvalidRequest, "job's name.*'a/b'"),
    "no name": (lambda s: setattr(s, "name", ""), InvalidRequest, "job's name"),
    "no groups": (lambda s: s.ClearField("groups"), InvalidRequest, "at least one parameter group"),
    "no parameters": (lambda s: s.ClearField("parameters"), InvalidRequest, "at least one parameter"),
    "parameter twice": (lambda s: s.parameters.append(s.parameters[0]), InvalidRequest, "'cells' twice"),
    "parameter without a name": (lambda s: setattr(s.parameters[0], "name", ""), InvalidRequest, "1 to 512"),
    "no dtype": (lambda s: setattr(s.parameters[0], "data_type", 0), InvalidRequest, "data type of 'cells'.*got 0"),
    "unknown dtype": (lambda s: setattr(s.parameters[0], "data_type", 99), InvalidRequest, "expected one of.*got 99"),
    "integers to train": (
        lambda s: setattr(s.parameters[0], "data_type", types_pb2.DATA_TYPE_INT64),
        InvalidRequest,
        "cells: an optimizer steps floating-point parameters, got int64",
    ),
    "group out of range": (lambda s: setattr(s.parameters[0], "group", 3), InvalidRequest, "group below 1, got 3"),
    "shape beyond reason": (
        lambda s: s.parameters[0].shape.__setitem__(slice(None), [2**40, 2**40]),
        LimitExceeded,
        "cells: a parameter may have",
    ),
    "shape larger than the machines": (
        lambda s: s.parameters[0].shape.__setitem__(slice(None), [2**49]),
        LimitExceeded,
        "bytes|buckets",
    ),
    "unknown optimizer": (
        lambda s: s.optimizers.__setitem__(0, "LBFGS"),
        InvalidRequest,
        "expected an optimizer.*'LBFGS'",
    ),
    "hyper-parameter out of range": (
        lambda s: s.groups[0].hyper_parameters.add(name="momentum", number=-0.5),
        InvalidRequest,
        "Invalid momentum value: -0.5",
    ),
    "unknown hyper-parameter": (
        lambda s: s.groups[0].hyper_parameters.add(name="params", number=1.0),
        InvalidRequest,
        "SGD takes lr.*got 'params'",
    ),
    "averaging with staleness": (
        lambda s: setattr(s.consistency, "max_staleness", 3),
        InvalidRequest,
        "averaging needs max_staleness 0",
    ),
    "staleness beyond reason": (
        lambda s: s.consistency.CopyFrom(job_pb2.Consistency(max_staleness=2**31)),
        InvalidRequest,
        "staleness must be from 0 to 1000000, got 2147483648",
    ),
    "buckets that are not aligned": (lambda s: setattr(s, "bucket_bytes", 100), InvalidRequest, "of 64, got 100"),
    "buckets beyond the limit": (lambda s: setattr(s, "bucket_bytes", 2**40), LimitExceeded, "bucket_bytes may be up"),
    "world size beyond reason": (lambda s: setattr(s, "world_size", 2**31), LimitExceeded, "world_size 2147483648"),
    "unknown policy": (lambda s: setattr(s, "non_finite", 7), InvalidRequest, "not finite: expected one of"),
}


@pytest.mark.parametrize("what", BAD_JOBS)
def test_a_bad_job_is_refused_and_no_shard_hears_of_it(shared: Cluster, job: str, what: str) -> None:
    change, error, text = BAD_JOBS[what]
    spec = job_spec_message(vector_job(job, "sync", cells=16, world_size=1))
    change(spec)
    known = set(shared.coordinator.jobs())
    with pytest.raises(error, match=text) as caught:
        RawWorker.register(shared.address, jobs_pb2.RegisterJobRequest(spec=spec))
    assert type(caught.value) is error
    assert set(shared.coordinator.jobs()) == known
    assert all(set(shard.jobs()) == known for shard in shared.shards)


@pytest.mark.parametrize("rank", [2, 99])
def test_a_rank_beyond_the_world_size_is_refused(shared: Cluster, job: str, rank: int) -> None:
    with RawWorker(shared.address, vector_job(job, "sync", cells=16, world_size=2), 0):
        before = shared.state(job)
        with pytest.raises(InvalidRequest, match=f"rank must be below the job's world_size 2, got {rank}"):
            RawWorker(shared.address, vector_job(job, "sync", cells=16, world_size=2), rank)
        assert shared.state(job) == before


# -- models and optimizers -------------------------------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.first = nn.Linear(3, width)
        self.second = nn.Linear(width, 2)


class MySGD(torch.optim.SGD):
    """A class that no shard knows."""


def sgd(model: nn.Module, **more: object) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), **{"lr": 0.1, **more})  # type: ignore[arg-type]


OPTIMIZERS: dict[str, tuple[Callable[[nn.Module], torch.optim.Optimizer], str]] = {
    "LBFGS": (lambda m: torch.optim.LBFGS(m.parameters()), "evaluates the loss several times"),
    "Rprop": (lambda m: torch.optim.Rprop(m.parameters()), "use RMSprop"),
    "ASGD": (lambda m: torch.optim.ASGD(m.parameters()), "use SGD"),
    "Adafactor": (lambda m: torch.optim.Adafactor(m.parameters()), "use AdamW"),
    "SparseAdam": (lambda m: torch.optim.SparseAdam(list(m.parameters())), "use Adam or Adagrad"),
    "MySGD": (lambda m: MySGD(m.parameters(), lr=0.1), "torch.optim's own classes"),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_that_shards_cannot_run_is_refused_by_name(shared: Cluster, job: str, name: str) -> None:
    make, text = OPTIMIZERS[name]
    with shared.connect("sync", job=job) as session:
        model = Net()
        before = copy.deepcopy(model.state_dict())
        with pytest.raises(
            Unsupported, match=f"optimizer {name} cannot run on a parameter server: .*{text}.*known: SGD"
        ):
            session.prepare(model, make(model))
        assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    assert job not in shared.coordinator.jobs()


def two_layers(first: str, second: str) -> nn.Module:
    """Net's layers under other names, or in another order."""
    layers = {"first": nn.Linear(3, 4), "second": nn.Linear(4, 2), "last": nn.Linear(4, 2)}
    return nn.ModuleDict({name: layers[name] for name in (first, second)})


DIFFERENT: dict[str, tuple[Callable[[], nn.Module], dict[str, object], str]] = {
    "shape": (lambda: Net(5), {}, r"parameter 'first.weight' has shape \(4, 3\) in the registered job and \(5, 3\)"),
    "dtype": (lambda: Net().double(), {}, "'first.weight' has dtype float32 in the registered job and float64 in this"),
    "name": (lambda: two_layers("first", "last"), {}, "'second.*' that this one lacks"),
    "more": (lambda: nn.ModuleDict({**Net()._modules, "more": nn.Linear(1, 1)}), {}, "'more.*' that the registered"),
    "order": (lambda: two_layers("second", "first"), {}, "parameters are registered in another order"),
    "mode": (Net, {"mode": "ssp:1"}, "the mode is sync in the registered job and ssp:1 in this one"),
    "world size": (Net, {"world_size": 3}, "the world_size is 2 in the registered job and 3 in this one"),
    "optimizer": (Net, {"optimizer": torch.optim.Adam}, "the optimizer is SGD in the registered job and Adam"),
    "buckets": (Net, {"bucket_bytes": 128}, "the bucket_bytes is 4194304 in the registered job and 128 in this one"),
    "policy": (Net, {"non_finite": "skip"}, "not finite is refuse in the registered job and skip in this one"),
}


@pytest.fixture
def waiting_rank_0(shared: Cluster, job: str) -> Iterator[None]:
    """Rank 0 of a sync job of two, which has joined with a Net and waits for rank 1."""
    model = Net()
    session = shared.connect("sync", 0, 2, job=job)

    def prepare() -> None:
        with suppress(PSError):
            session.prepare(model, sgd(model))

    thread = threading.Thread(target=prepare, daemon=True)
    thread.start()
    until(lambda: job in shared.coordinator.jobs() and shared.coordinator.jobs()[job].members.all())
    buckets = [bucket for shard in shared.shards for bucket in shard.jobs()[job].buckets.values()]
    until(lambda: all(bucket.rule.initialised and not bucket.waiters for bucket in buckets))
    yield
    session.close()
    thread.join(20)
    assert not thread.is_alive()


@pytest.mark.parametrize("what", DIFFERENT)
@pytest.mark.usefixtures("waiting_rank_0")
def test_a_model_that_differs_from_the_registered_one_is_refused(shared: Cluster, job: str, what: str) -> None:
    make, other, text = DIFFERENT[what]
    given = {"mode": "sync", "world_size": 2, "optimizer": torch.optim.SGD, **other}
    mode, world_size, optimizer = str(given.pop("mode")), given.pop("world_size"), given.pop("optimizer")
    before = shared.state(job)
    with shared.connect(mode, 1, world_size, job=job) as session:  # type: ignore[arg-type]
        model = make()
        with pytest.raises(JobMismatch, match=f"job '{re.escape(job)}' exists and differs: .*{text}"):
            session.prepare(model, optimizer(model.parameters(), lr=0.1), **given)  # type: ignore[operator]
    assert shared.state(job) == before


def misfit_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    for state in optimizer.state.values():
        del state["exp_avg_sq"]
    return optimizer


UNFIT: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], torch.optim.Optimizer], str]] = {
    "sparse gradients": (lambda: nn.Embedding(4, 2, sparse=True), sgd, "makes sparse gradients; use sparse=False"),
    "dtype": (lambda: nn.Linear(2, 2, dtype=torch.complex64), sgd, "weight has dtype torch.complex64; known are float"),
    "strange optimizer": (Net, lambda _: sgd(nn.Linear(1, 1)), "hold 2 parameters of no model that was handed"),
    "optimizer whose state does not fit": (Net, misfit_optimizer, "lacks exp_avg_sq, which AdamW needs"),
    "nothing to train": (
        lambda: nn.BatchNorm1d(2, affine=False),
        lambda _: sgd(nn.Linear(1, 1)),
        "hold 2 parameters of no model that was handed",
    ),
}


@pytest.mark.parametrize("what", UNFIT)
def test_a_model_that_cannot_be_trained_here_is_refused(shared: Cluster, job: str, what: str) -> None:
    make_model, make_optimizer, text = UNFIT[what]
    with shared.connect("sync", job=job) as session:
        model = make_model()
        with pytest.raises((Unsupported, InvalidRequest), match=text):
            session.prepare(model, make_optimizer(model))
    assert job not in shared.coordinator.jobs()


def test_what_prepare_does_not_take_is_named(shared: Cluster, job: str) -> None:
    model, other = Net(), Net()
    with shared.connect("sync", job=job) as session:
        for things, text in (
            (
                (model, sgd(model), "a string"),
                "prepare takes a model, its optimizer, DataLoaders, and what has a state_dict .*, got str",
            ),
            ((model,), "models together with their optimizers, all in one call, got 1 models and 0 optimizers"),
            ((sgd(model),), "got 0 models and 1 optimizers"),
            ((model, sgd(model), sgd(other)), "hold 4 parameters of no model"),
        ):
            with pytest.raises(InvalidRequest, match=text):
                session.prepare(*things)
        with pytest.raises(InvalidRequest, match="non_finite must be 'refuse', 'skip' or 'allow', got 'ignore'"):
            session.prepare(model, sgd(model), non_finite="ignore")
        for size in (0, 100, -64):
            with pytest.raises(InvalidRequest, match=f"bucket_bytes must be a positive multiple of 64, got {size}"):
                session.prepare(model, sgd(model), bucket_bytes=size)
        assert job not in shared.coordinator.jobs()
        model, optimizer = session.prepare(model, sgd(model))
        with pytest.raises(InvalidRequest, match="has its models already"):
            session.prepare(other, sgd(other))
        with pytest.raises(Unsupported, match="of the models that were handed to prepare"):
            optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
        with pytest.raises(ValueError, match="different number of parameter groups"):
            optimizer.load_state_dict(torch.optim.SGD([{"params": [p]} for p in other.parameters()]).state_dict())


def test_a_hyper_parameter_gone_wrong_is_refused_at_the_next_step(shared: Cluster, job: str) -> None:
    with shared.connect("sync", job=job) as session:
        model = Net()
        model, optimizer = session.prepare(model, sgd(model))
        before = shared.state(job)
        weights = copy.deepcopy(model.state_dict())
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        for value, text in ((-1.0, "learning rate: -1"), ("fast", "must be a number.*'fast'"), (NAN, "lr.*nan")):
            optimizer.param_groups[0]["lr"] = value
            with pytest.raises(InvalidRequest, match=text):
                optimizer.step()
            assert shared.state(job) == before
            assert session.clock == 0
        assert all(torch.equal(weights[key], value) for key, value in model.state_dict().items())
        optimizer.param_groups[0]["lr"] = 1.0
        optimizer.step()
        assert torch.equal(model.first.bias, weights["first.bias"] - 1)


# -- gradients that are not finite -----------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [INF, -INF, NAN])
def test_a_gradient_that_is_not_finite_is_refused_named_and_counted(shared: Cluster, job: str, bad: float) -> None:
    with shared.connect("sync", job=job) as session:
        model = Net()
        model, optimizer = session.prepare(model, sgd(model))
        before = shared.state(job)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        model.second.bias.grad[1] = bad
        with pytest.raises(NonFiniteGradient, match=r"gradient of second.bias is not finite; it was not pushed"):
            optimizer.step()
        assert session.clock == 0
        assert shared.state(job) == before
        assert scrape(session.metrics_address)["ps_worker_non_finite_total"] == 1
        model.second.bias.grad.fill_(1.0)
        optimizer.step()  # the same clock, with another gradient
        assert session.clock == 1


def test_one_layer_that_goes_wrong_in_backward_keeps_the_whole_step_from_leaving(shared: Cluster, job: str) -> None:
    with shared.connect("sync", job=job) as session:
        model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
        model, optimizer = session.prepare(model, sgd(model), bucket_bytes=64, overlap=False)
        for step in range(5):
            hook = model[0].weight.register_hook(lambda gradient: gradient * NAN) if step == 3 else None
            before = shared.state(job)
            model(torch.ones(16)).sum().backward()  # finishes the last layer first
            if hook:
                with pytest.raises(NonFiniteGradient, match=r"gradient of 0\.weight"):
                    optimizer.step()
                assert shared.state(job) == before
                hook.remove()
            else:
                optimizer.step()
            optimizer.zero_grad()
        assert session.clock == 4


@pytest.mark.parametrize("transport", ["shm", "grpc"])
def test_a_step_that_is_half_out_when_it_goes_wrong_counts_for_nothing_and_training_goes_on(
    shared: Cluster, job: str, transport: str
) -> None:
    def work(rank: int) -> torch.Tensor:
        with shared.connect("sync", rank, 2, job=job, transport=transport) as session:
            model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
            model, optimizer = session.prepare(model, sgd(model, lr=0.01), bucket_bytes=64, overlap=True)
            for step in range(7 if rank == 1 else 6):
                bad = rank == 1 and step == 3
                hook = model[0].weight.register_hook(lambda gradient: gradient * NAN) if bad else None
                model(torch.ones(16)).sum().backward()  # the last layer's buckets leave here
                if hook:
                    with pytest.raises(NonFiniteGradient, match=r"gradient of 0\.weight"):
                        optimizer.step()
                    hook.remove()
                    assert session.clock == step
                else:
                    optimizer.step()
                optimizer.zero_grad()
            assert session.clock == 6
            return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])

    first, second = in_parallel(2, work)
    assert torch.equal(first, second)
    assert first.isfinite().all()


def test_a_gradient_that_is_large_is_finite(shared: Cluster, job: str) -> None:
    with shared.connect("sync", job=job) as session:
        model = nn.Linear(64, 1, bias=False)
        model, optimizer = session.prepare(model, sgd(model, lr=1e-38))
        model.weight.grad = torch.full_like(model.weight, 3e38)  # the sum of these overflows
        optimizer.step()
        assert session.clock == 1


def test_with_the_policy_skip_the_step_is_left_out_and_counted(shared: Cluster, job: str) -> None:
    def work(rank: int) -> tuple[torch.Tensor, float]:
        with shared.connect("sync", rank, 3, job=job) as session:
            model = nn.Linear(4, 1, bias=False)
            model.weight.data.zero_()
            model, optimizer = session.prepare(model, sgd(model, lr=1.0), non_finite="skip")
            for gradients in ([1.0, 2.0, NAN], [INF, NAN, INF], [1.0, 2.0, 3.0]):
                model.weight.grad = torch.full_like(model.weight, gradients[rank])
                optimizer.step()
            assert session.clock == 3
            return model.weight.detach().clone(), scrape(session.metrics_address)["ps_worker_non_finite_total"]

    for rank, (weights, count) in enumerate(in_parallel(3, work)):
        # First the mean of the two that are finite, then nothing, then the mean of all.
        assert weights.tolist() == [[-1.5 - 2.0] * 4]
        assert count == [1, 1, 2][rank]


def test_a_shard_skips_for_a_client_that_does_not_look(shared: Cluster, job: str) -> None:
    spec = vector_job(job, "sync", cells=16, world_size=1, non_finite=NonFinite.SKIP)
    with RawWorker(shared.address, spec, 0) as worker:
        worker.initialise()
        worker.send(worker.message(0, 1, floats(*[NAN] * 16)))
        worker.clock = 1
        assert worker.pull().tolist() == [0.0] * 16
        samples = scrape(shared.servers[worker.shard_of[0]].metrics_address)
        assert samples[f'ps_push_total{{job="{job}",result="skipped"}}'] == 1


# -- addresses, ports, settings --------------------------------------------------------------------------------------


def assert_unreachable(address: str, text: str) -> None:
    begun = time.monotonic()
    with ps_worker.connect(address, "sync", connect_timeout=0.5) as session:
        model = Net()
        with pytest.raises(Unreachable, match=text) as caught:
            session.prepare(model, sgd(model))
    assert address in str(caught.value)
    assert "\n" not in str(caught.value)
    assert time.monotonic() - begun < 5.0, "it was to try for half a second"


def test_an_address_where_nobody_is() -> None:
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
        assert_unreachable(address, "gave up after 0.5 s: coordinator at .* does not answer")


@pytest.mark.parametrize("says", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n"])
def test_an_address_where_something_else_listens(says: bytes) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        held = []

        def answer() -> None:
            with suppress(OSError):
                while True:
                    connection, _ = listener.accept()
                    connection.sendall(says)
                    held.append(connection)

        threading.Thread(target=answer, daemon=True).start()
        try:
            assert_unreachable(f"127.0.0.1:{listener.getsockname()[1]}", "gave up after 0.5 s: coordinator at")
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            for connection in held:
                connection.close()


def test_an_address_of_a_shard_is_not_that_of_the_coordinator(shared: Cluster) -> None:
    assert_unreachable(shared.servers[1].address, "something else answers gRPC there")


def test_a_port_in_use_is_named() -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(InvalidRequest, match=f"cannot listen on 127.0.0.1:{port}: the port is in use"):
            Server(ServerConfig(shard_count=1, index=0, port=port))
        with pytest.raises(InvalidRequest, match=f"cannot serve metrics on 127.0.0.1:{port} .*another --metrics-port"):
            Server(ServerConfig(shard_count=1, index=0, metrics_port=port))
        with pytest.raises(InvalidRequest, match=f"cannot serve metrics on 127.0.0.1:{port}"):
            ps_worker.connect(mode="single", metrics_port=port)


def test_a_port_that_a_server_has_is_not_shared(shared: Cluster) -> None:
    with pytest.raises(InvalidRequest, match="in use"):
        Server(ServerConfig(shard_count=1, index=0, port=int(shared.address.rpartition(":")[2])))


@pytest.mark.parametrize(
    "mode", ["bsp", "ssp", "ssp:", "ssp:-1", "ssp:x", "ssp:1.5", "ssp:²", "SYNC", " sync", "ssp:99999999"]
)
def test_a_mode_that_does_not_exist(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = "staleness must be from 0 to 1000000, got 99999999|mode must be single, ddp, sync, ssp:K .* or async"
    with pytest.raises(InvalidRequest, match=expected) as caught:
        ps_worker.connect("127.0.0.1:1", mode)
    assert mode in str(caught.value) or "99999999" in str(caught.value)
    monkeypatch.setenv("PS_MODE", mode)
    with pytest.raises(InvalidRequest, match=expected):
        ps_worker.connect("127.0.0.1:1")


COMMANDS: dict[str, tuple[list[str], str]] = {
    "script that does not exist": (["ps-worker", "run", "no/such/train.py"], "there is no script no/such/train.py"),
    "script that is a directory": (["ps-worker", "run", "/"], "there is no script /"),
    "mode": (["ps-worker", "run", "--mode", "bsp", __file__], "mode must be single.*got 'bsp'"),
    "mode without a server": (["ps-worker", "run", "--mode", "ssp:1", __file__], "mode ssp:1 needs --server HOST:PORT"),
    "several in single": (["ps-worker", "run", "--workers", "2", __file__], "mode single is one worker, got.* 2"),
    "no workers": (["ps-worker", "run", "--workers", "0", __file__], "expected a whole number from 1.*'0'"),
    "world size": (
        ["ps-worker", "run", "--server", "h:1", "--workers", "2", "--first-rank", "1", "--world-size", "2", __file__],
        "ranks 1 to 2 do not fit into --world-size 2",
    ),
    "server": (["ps-worker", "run", "--server", "nowhere", __file__], "expected HOST:PORT, got 'nowhere'"),
    "timeout": (["ps-worker", "run", "--connect-timeout", "-1", __file__], "positive number of seconds, got '-1'"),
    "port": (["ps-server", "up", "--port", "70000"], "a whole number from 0 to 65535, got '70000'"),
    "shards": (["ps-server", "up", "--shards", "no"], "a whole number from 1.*'no'"),
    "shard without a coordinator": (["ps-server", "shard", "--index", "0"], "needs --coordinator HOST:PORT"),
    "shard without an index": (["ps-server", "shard", "--coordinator", "h:1"], "required: --index"),
    "status of nobody": (
        ["ps-server", "status", "--server", "127.0.0.1:1"],
        "coordinator at 127.0.0.1:1 does not answer",
    ),
    "end of nothing": (["ps-server", "end", "--server", "SHARED", "--job", "no-such"], "no job 'no-such' here"),
}


@pytest.mark.parametrize("what", COMMANDS)
def test_a_command_gone_wrong_says_so_in_one_line_and_exits_with_an_error(
    shared: Cluster, what: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments, text = COMMANDS[what]
    command = [shared.address if word == "SHARED" else word for word in arguments]
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit) as caught:
        (ps_worker if command[0] == "ps-worker" else ps_server).cli.main()
    code = caught.value.code
    line = code if isinstance(code, str) else capsys.readouterr().err.strip().splitlines()[-1]
    assert code not in (0, None)
    assert re.search(text, line), line
    assert line.startswith(command[0])


def test_a_variable_gone_wrong_is_refused_like_a_flag(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "argv", ["ps-server", "up"])
    monkeypatch.setenv("PS_PORT", "many")
    with pytest.raises(SystemExit):
        ps_server.cli.main()
    for name, value, text in (
        ("PS_RANK", "first", "PS_RANK: expected a whole number from 0 .*, got 'first'"),
        ("PS_WORLD_SIZE", "-2", "PS_WORLD_SIZE: expected a whole number from 1 .*, got '-2'"),
        ("PS_ELASTIC", "maybe", "PS_ELASTIC: expected 1 or 0, got 'maybe'"),
        ("PS_SERVER", "nowhere", "PS_SERVER: expected HOST:PORT, got 'nowhere'"),
        ("PS_CONNECT_TIMEOUT", "soon", "PS_CONNECT_TIMEOUT: .*'soon'"),
    ):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            with pytest.raises(InvalidRequest, match=text):
                ps_worker.connect(mode=None if name == "PS_SERVER" else "single")
