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
from dataclasses import replace
from typing import Any

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
from ps_protocol.v1 import data_pb2, job_pb2, jobs_pb2
from ps_server.config import ServerConfig
from ps_server.server import Server
from tests.tools.cluster import Cluster, in_parallel, scrape, until
from tests.tools.raw_worker import RawWorker, joined, vector_job

INF, NAN = float("inf"), float("nan")


# -- pushes and pulls ------------------------------------------------------------------------------------------------


@pytest.fixture
def worker(shared: Cluster, job: str) -> Iterator[RawWorker]:
    """Rank 0 of a running sync job: two buckets of 16 cells that train, one that is held."""
    with joined(shared.address, vector_job(job, "sync", cells=32, world_size=1, frozen=16)) as [found]:
        found.step(torch.ones(32))
        found.pull()
        yield found


LR_BELOW_ZERO = job_pb2.GroupUpdate(group=0, hyper_parameters=[job_pb2.HyperParameter(name="lr", number=-1.0)])
GONE_WRONG = torch.tensor([1.0] * 15 + [INF]).numpy().tobytes()
# One of each kind of refusal; test_partition.py, test_framing.py and test_optimizers.py have all the reasons.
BAD_PUSHES: dict[str, tuple[dict[str, Any], type[PSError], str]] = {
    "payload of another dtype": (
        {"payload": bytes(128)},
        InvalidRequest,
        r"expected 64 bytes \(16 x float32\), got 128",
    ),
    "bucket that does not exist": ({"bucket": 77}, NotFound, "holds no bucket 77"),
    "bucket that no optimizer steps": ({"bucket": 2}, InvalidRequest, "bucket 2 holds what no optimizer"),
    "job that does not exist": ({"job": "another"}, NotFound, "knows no job 'another'"),
    "clock with a gap": ({"clock": 3}, OutOfOrder, "pushed clock 3 where 2 comes next"),
    "hyper-parameter out of range": ({"groups": [LR_BELOW_ZERO]}, InvalidRequest, "SGD refuses.*learning rate: -1"),
    "kind that does not exist": ({"kind": 9}, InvalidRequest, "expected one of.*got 9"),
    "infinity": ({"payload": GONE_WRONG}, NonFiniteGradient, "gradient of cells from worker 0 is not finite"),
}


@pytest.mark.parametrize("what", BAD_PUSHES)
def test_a_bad_push_is_refused_and_changes_nothing(shared: Cluster, worker: RawWorker, what: str) -> None:
    changes, error, text = BAD_PUSHES[what]
    fields = {"bucket": 0, "clock": 2, **changes}
    if "job" in fields:
        fields["worker"] = worker.identity(job=fields.pop("job"))
    before = shared.state(worker.spec.name)
    with pytest.raises(error, match=text) as caught:
        worker.send(worker.message(**fields))
    assert type(caught.value) is error
    assert "\n" not in str(caught.value), "an error is one line"
    assert shared.state(worker.spec.name) == before
    worker.step(torch.ones(32))  # and the same worker goes on
    assert worker.pull().tolist() == [-2.0] * 32


def _scaled(scale: float) -> bytes:
    """16 elements in int4 with this scale."""
    return torch.tensor([scale], dtype=torch.bfloat16).view(torch.uint8).numpy().tobytes() + bytes(8)


BAD_BLOCKS: dict[str, tuple[dict[str, Any], type[PSError], str]] = {
    "as float32": ({"payload": bytes(64), "wire_format": 0}, InvalidRequest, "elements as int4, got float32"),
    "as another format of blocks": ({"payload": bytes(18), "wire_format": 4}, InvalidRequest, "as int4, got int8"),
    "as no format": ({"wire_format": 77}, InvalidRequest, "wire format: expected one of.*got 77"),
    "a byte more": ({"payload": bytes(11)}, InvalidRequest, r"expected 10 bytes \(16 x int4\), got 11"),
    "a byte less": ({"payload": bytes(9)}, InvalidRequest, r"expected 10 bytes \(16 x int4\), got 9"),
    "nothing": ({"payload": b""}, InvalidRequest, "expected 10 bytes.*got 0"),
    "an infinite scale": ({"payload": _scaled(INF)}, NonFiniteGradient, "a block of bucket 0 from worker 0 is not"),
    "a scale that is no number": ({"payload": _scaled(NAN)}, NonFiniteGradient, "a block of bucket 0 from worker 0"),
    "a scale below zero": ({"payload": _scaled(-1.0)}, NonFiniteGradient, "a block of bucket 0 from worker 0"),
    "a scale past all codes": ({"payload": _scaled(3e38)}, NonFiniteGradient, "a block of bucket 0 from worker 0"),
}


@pytest.mark.parametrize("what", BAD_BLOCKS)
@pytest.mark.parametrize("kind", ["GRADIENT", "DRAFT"])
def test_bad_blocks_are_refused_and_change_nothing(shared: Cluster, job: str, what: str, kind: str) -> None:
    changes, error, text = BAD_BLOCKS[what]
    spec = replace(vector_job(job, "sync", cells=16, world_size=1), gradient_wire="int4")
    good = {"payload": _scaled(1.0)[:2] + bytes([0x79] * 8), "wire_format": 5}  # -7 and 7
    with joined(shared.address, spec) as [worker]:
        worker.send(worker.message(0, 1, **good))
        worker.clock = 1
        assert worker.pull().tolist() == [7.0] * 8 + [-7.0] * 8
        before = shared.state(job)
        with pytest.raises(error, match=text) as caught:
            worker.send(worker.message(0, 2, kind=data_pb2.PushKind.Value(f"PUSH_KIND_{kind}"), **{**good, **changes}))
        assert type(caught.value) is error
        assert shared.state(job) == before
        worker.send(worker.message(0, 2, **good))
        worker.clock = 2
        assert worker.pull().tolist() == [14.0] * 8 + [-14.0] * 8


def test_a_push_to_the_wrong_shard_is_refused(shared: Cluster, worker: RawWorker) -> None:
    before = shared.state(worker.spec.name)
    with pytest.raises(NotFound, match="holds no bucket 0"):
        worker.send(worker.message(0, 2), shard=1 - worker.shard_of[0])
    assert shared.state(worker.spec.name) == before


@pytest.mark.parametrize(
    ("buckets", "error", "text"),
    [([0, 0], InvalidRequest, "each bucket at most once, got 0 twice"), ([0, 77], NotFound, "holds no bucket 77")],
)
def test_a_bad_pull_is_refused(
    shared: Cluster, worker: RawWorker, buckets: list[int], error: type[PSError], text: str
) -> None:
    before = shared.state(worker.spec.name)
    with pytest.raises(error, match=text):
        list(worker.answers(worker.ask(1, buckets)))
    assert shared.state(worker.spec.name) == before


# -- jobs ------------------------------------------------------------------------------------------------------------

# One of each place that refuses; test_job.py and test_optimizers.py have all the reasons.
BAD_JOBS: dict[str, tuple[Callable[[job_pb2.JobSpec], object], type[PSError], str]] = {
    "no element type": (lambda s: setattr(s.parameters[0], "data_type", 99), InvalidRequest, "expected one of.*got 99"),
    "name with a slash": (lambda s: setattr(s, "name", "a/b"), InvalidRequest, "job's name.*'a/b'"),
    "optimizer": (lambda s: s.optimizers.__setitem__(0, "LBFGS"), InvalidRequest, "expected an optimizer.*'LBFGS'"),
    "larger than the machines": (lambda s: s.parameters[0].shape.append(2**45), LimitExceeded, "bytes|buckets"),
}


@pytest.mark.parametrize("what", BAD_JOBS)
def test_a_bad_job_is_refused_and_no_shard_hears_of_it(shared: Cluster, job: str, what: str) -> None:
    change, error, text = BAD_JOBS[what]
    spec = job_spec_message(vector_job(job, "sync", cells=16, world_size=1))
    change(spec)
    with pytest.raises(error, match=text) as caught:
        RawWorker.register(shared.address, jobs_pb2.RegisterJobRequest(spec=spec))
    assert type(caught.value) is error
    # Jobs of other tests may end at any time, with the lease of a worker that they have left there.
    assert all(spec.name not in known for known in (shared.coordinator.jobs(), *(s.jobs() for s in shared.shards)))


def test_a_rank_beyond_the_world_size_is_refused(shared: Cluster, job: str) -> None:
    spec = vector_job(job, "sync", cells=16, world_size=2)
    with RawWorker(shared.address, spec, 0):
        before = shared.state(job)
        with pytest.raises(InvalidRequest, match="rank must be below the job's world_size 2, got 2"):
            RawWorker(shared.address, spec, 2)
        assert shared.state(job) == before


# -- models and optimizers -------------------------------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.first = nn.Linear(3, width)
        self.second = nn.Linear(width, 2)


def sgd(model: nn.Module, **more: object) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), **{"lr": 0.1, **more})  # type: ignore[arg-type]


def test_an_optimizer_that_shards_cannot_run_is_refused_and_the_model_left_as_it_is(shared: Cluster, job: str) -> None:
    with shared.connect("sync", job=job) as session:
        model = Net()
        before = copy.deepcopy(model.state_dict())
        with pytest.raises(Unsupported, match=r"optimizer Rprop cannot run on a parameter server: .*use RMSprop"):
            session.prepare(model, torch.optim.Rprop(model.parameters()))
        assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    assert job not in shared.coordinator.jobs()


# Some of the differences that test_job.py has.
DIFFERENT: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], str]] = {
    "shape": (lambda: Net(5), {}, r"parameter 'first.weight' has shape \(4, 3\) in the registered job and \(5, 3\)"),
    "mode": (Net, {"mode": "ssp:1"}, "the mode is sync in the registered job and ssp:1 in this one"),
    "world size": (Net, {"world_size": 3}, "the world_size is 2 in the registered job and 3 in this one"),
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
    until(lambda: job in shared.coordinator.jobs() and shared.coordinator.jobs()[job].workers.all())
    buckets = [bucket for shard in shared.shards for bucket in shard.jobs()[job].buckets.values()]
    until(lambda: all(bucket.rule.initialised and not bucket.waiters for bucket in buckets))
    yield
    session.close()
    thread.join(20)
    assert not thread.is_alive()


@pytest.mark.parametrize("what", DIFFERENT)
@pytest.mark.usefixtures("waiting_rank_0")
def test_a_model_that_differs_from_the_registered_one_is_refused(shared: Cluster, job: str, what: str) -> None:
    make, changes, text = DIFFERENT[what]
    given = {"mode": "sync", "world_size": 2, **changes}
    before = shared.state(job)
    with shared.connect(given.pop("mode"), 1, given.pop("world_size"), job=job) as session:
        model = make()
        with pytest.raises(JobMismatch, match=f"job '{re.escape(job)}' exists and differs: .*{text}"):
            session.prepare(model, sgd(model), **given)
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
    "dtype": (
        lambda: nn.ParameterList([torch.zeros(2).to(torch.float8_e5m2)]),
        sgd,
        "0 has dtype torch.float8_e5m2, and servers step plain tensors of float",
    ),
    "strange optimizer": (Net, lambda _: sgd(nn.Linear(1, 1)), "hold 2 parameters of no model that was handed"),
    "optimizer whose state does not fit": (Net, misfit_optimizer, "lacks exp_avg_sq, which AdamW needs"),
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


def test_a_gradient_that_is_not_finite_is_refused_named_and_counted(shared: Cluster, job: str) -> None:
    with shared.connect("sync", job=job) as session:
        model = Net()
        model, optimizer = session.prepare(model, sgd(model), bucket_bytes=64)
        before = shared.state(job)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        model.second.bias.grad[1] = NAN
        with pytest.raises(NonFiniteGradient, match=r"gradient of second.bias is not finite; it was not pushed"):
            optimizer.step()
        assert session.clock == 0
        assert shared.state(job) == before
        assert scrape(session.metrics_address)["ps_worker_non_finite_total"] == 1
        model.second.bias.grad.fill_(1.0)
        optimizer.step()  # the same clock, with another gradient
        assert session.clock == 1


@pytest.mark.parametrize("transport", ["shm", "tcp", "grpc"])
def test_a_step_that_is_half_out_when_it_goes_wrong_counts_for_nothing_and_training_goes_on(
    shared: Cluster, job: str, transport: str
) -> None:
    def work(rank: int) -> torch.Tensor:
        with shared.connect("sync", rank, 2, job=job, transport=transport) as session:
            model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
            model, optimizer = session.prepare(model, sgd(model, lr=0.01), bucket_bytes=256, overlap=True)
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
    with joined(shared.address, vector_job(job, "sync", cells=16, world_size=1, non_finite=NonFinite.SKIP)) as [worker]:
        worker.send(worker.message(0, 1, torch.full((16,), NAN).numpy().tobytes()))
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
    assert time.monotonic() - begun < 20.0, "it was to try for half a second"


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


def test_a_port_in_use_is_named(shared: Cluster) -> None:
    with pytest.raises(InvalidRequest, match="in use"):  # by gRPC, which would share it if it were let
        Server(ServerConfig(shard_count=1, index=0, port=int(shared.address.rpartition(":")[2])))
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(InvalidRequest, match=f"cannot listen on 127.0.0.1:{port}: the port is in use"):
            Server(ServerConfig(shard_count=1, index=0, port=port))
        with pytest.raises(InvalidRequest, match=f"cannot serve metrics on 127.0.0.1:{port} .*another --metrics-port"):
            Server(ServerConfig(shard_count=1, index=0, metrics_port=port))
        with pytest.raises(InvalidRequest, match=f"cannot serve metrics on 127.0.0.1:{port}"):
            ps_worker.connect(mode="single", metrics_port=port)


COORDINATOR = ["ps-server", "coordinator", "--port", "0", "--metrics-port", "0"]
COMMANDS: dict[str, tuple[list[str], str]] = {
    "script that does not exist": (["ps-worker", "run", "no/such/train.py"], "there is no script no/such/train.py"),
    "script that is a directory": (["ps-worker", "run", "/"], "there is no script /"),
    "mode without a server": (
        ["ps-worker", "run", "--mode", "ssp:1", __file__],
        "mode ssp:1 needs --server HOST:PORT, or --shards N",
    ),
    "several in single": (["ps-worker", "run", "--workers", "2", __file__], "mode single is one worker, got.* 2"),
    "world size": (
        ["ps-worker", "run", "--server", "h:1", "--workers", "2", "--first-rank", "1", "--world-size", "2", __file__],
        "ranks 1 to 2 do not fit into --world-size 2",
    ),
    "shards": (["ps-server", "up", "--shards", "no"], "a whole number from 1.*'no'"),
    "shard without a coordinator": (["ps-server", "shard", "--index", "0"], "needs --coordinator HOST:PORT"),
    "shard without an index": (["ps-server", "shard", "--coordinator", "h:1"], "required: --index"),
    "plaintext on the network": ([*COORDINATOR, "--host", "0.0.0.0"], "--insecure"),
    "plaintext metrics on the network": ([*COORDINATOR, "--metrics-host", "0.0.0.0"], "--metrics-insecure"),
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
