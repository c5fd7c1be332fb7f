"""The contract is enough to write a worker: one that knows nothing else trains, is refused, and meets a script's."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from ps_protocol.versions import VERSION
from ps_server.storage.export import export
from tests.tools import contract_client
from tests.tools.buf import image
from tests.tools.cluster import Cluster, until
from tests.tools.contract_client import Connection, Contract, Model, Refused, Worker
from tests.tools.imports import imports

LR = {"weight": 0.5, "head": 0.5, "scale": 0.25, "bias": 0.25}  # exact in binary, as all numbers here
MOMENTUM = {"weight": 0.0, "head": 0.0, "scale": 0.5, "bias": 0.5}
INITIAL: Model = {
    "scale": [2.0],
    "weight": [float(i % 7) for i in range(48)],
    "bias": [1.0, -1.0, 0.5],
    "head": [i / 4 for i in range(20)],
    "seen": [2**40 + 1],  # no float32 holds it
}
SPEC: dict[str, Any] = {
    "parameters": [
        {"name": "scale", "shape": [], "data_type": "DATA_TYPE_FLOAT32", "group": 1},
        {"name": "weight", "shape": [6, 8], "data_type": "DATA_TYPE_FLOAT32", "group": 0},
        {"name": "bias", "shape": [3], "data_type": "DATA_TYPE_FLOAT32", "group": 1},
        {"name": "head", "shape": [4, 5], "data_type": "DATA_TYPE_FLOAT64", "group": 0},
        {"name": "seen", "shape": [], "data_type": "DATA_TYPE_INT64", "frozen": True},
    ],
    "optimizers": ["SGD"],
    "groups": [
        {"hyper_parameters": [{"name": "lr", "number": 0.5}]},
        {"hyper_parameters": [{"name": "lr", "number": 0.25}, {"name": "momentum", "number": 0.5}]},
    ],
    "consistency": {"max_staleness": 0, "aggregate": True},
    "bucket_bytes": 128,  # the weight lies in three buckets
    "world_size": 2,
}


class Script(nn.Module):
    """The same model as a script of PyTorch has it."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(()))
        self.weight = nn.Parameter(torch.zeros(6, 8))
        self.bias = nn.Parameter(torch.zeros(3))
        self.head = nn.Parameter(torch.zeros(4, 5, dtype=torch.float64))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))


class Reference:
    """What SGD makes of the same gradients, by the formula in PyTorch's documentation."""

    def __init__(self) -> None:
        self.model = copy.deepcopy(INITIAL)
        self._momentum: Model = {}

    def step(self, *gradients: Model) -> Model:
        """Makes a step with the mean of gradients, and returns a copy of the model."""
        for name, values in self.model.items():
            if name == "seen":
                continue
            mean = [sum(each) / len(gradients) for each in zip(*(g[name] for g in gradients), strict=True)]
            before = self._momentum.get(name)
            moved = mean if before is None else [MOMENTUM[name] * b + g for b, g in zip(before, mean, strict=True)]
            self._momentum[name] = moved
            self.model[name] = [v - LR[name] * m for v, m in zip(values, moved, strict=True)]
        return copy.deepcopy(self.model)


def gradients(clock: int, rank: int) -> Model:
    return {
        name: [((i + 3 * clock + rank) % 5 - 2) / 2 for i in range(len(values))] for name, values in INITIAL.items()
    }


def empty() -> Model:
    return {name: [0] * len(values) for name, values in INITIAL.items()}


@pytest.fixture(scope="module")
def contract() -> Contract:
    return Contract(image())


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Two shards. No lease runs out: these workers send a heartbeat only where a test is about it."""
    running = Cluster(lease=120.0)
    yield running
    running.stop()


Start = Callable[..., list[Worker]]


@pytest.fixture
def start(contract: Contract, job: str) -> Iterator[Start]:
    """Starts all workers of a job: start(address, **fields of the JobSpec)."""
    connections = []

    def all_workers(address: str, **other: Any) -> list[Worker]:
        spec = {**SPEC, "name": job, **other}
        workers = []
        for rank in range(spec["world_size"]):
            connections.append(Connection(contract, address))
            workers.append(Worker(connections[-1], spec, rank))
            assert workers[-1].register() == (rank == 0)
            workers[-1].join()
        workers[0].initialise(INITIAL)
        for worker in workers:
            worker.await_started()
        return workers

    yield all_workers
    for connection in connections:
        connection.close()


def test_it_knows_nothing_of_this_project() -> None:
    known = {each.split(".")[0] for each in imports(Path(contract_client.__file__))}
    assert known == {
        "__future__",
        "math",
        "secrets",
        "struct",
        "collections",
        "dataclasses",
        "typing",
        "grpc",
        "google",
    }


def test_two_ranks_train_and_the_export_has_their_weights_by_name(
    make_cluster: Callable[..., Cluster], start: Start, tmp_path: Path, job: str
) -> None:
    cluster = make_cluster(checkpoint_dir=tmp_path / "checkpoints", lease=120.0)
    workers = start(cluster.address)
    reference, history = Reference(), {0: copy.deepcopy(INITIAL)}
    models = [empty(), empty()]
    for worker, model in zip(workers, models, strict=True):
        worker.pull(model, range(len(worker.layout)))
        assert model == INITIAL

    made: list[Any] = []
    request = workers[0].make("CheckpointJobRequest", job=job)
    other = Connection(workers[0].connection.contract, cluster.address)
    asked = threading.Thread(target=lambda: made.append(other.call("JobService", "CheckpointJob", request).checkpoint))
    asked.start()

    def step() -> None:
        clock = workers[0].clock + 1
        for worker in workers:
            worker.push_step(gradients(clock, worker.rank))
        history[clock] = reference.step(gradients(clock, 0), gradients(clock, 1))
        for worker, model in zip(workers, models, strict=True):
            worker.pull(model)
            assert model == history[clock]
            assert worker.heartbeat() == 2

    until(lambda: (step(), made)[1], "the checkpoint")
    asked.join()
    other.close()
    [checkpoint] = made
    # An attempt before it may have begun too late at one of the shards.
    assert [worker.saved[-1] for worker in workers] == [checkpoint.clock] * 2

    export(tmp_path / "checkpoints", job, checkpoint.name, tmp_path / "out")
    exported = load_file(tmp_path / "out" / "model.safetensors")
    shapes = {name: tuple(tensor.shape) for name, tensor in Script().state_dict().items()}
    assert {name: tuple(tensor.shape) for name, tensor in exported.items()} == shapes
    assert {name: tensor.flatten().tolist() for name, tensor in exported.items()} == history[checkpoint.clock]
    assert not workers[0].leave()
    assert workers[1].leave()


def rows(first: int, member: int) -> dict[str, Any]:
    """Three rows of the weight, which a member holds."""
    piece = {"whole_shape": [6, 8], "offsets": [first, 0]}
    return {**SPEC["parameters"][1], "shape": [3, 8], "member": member, "piece": piece}


def test_workers_that_are_groups_train_and_the_export_has_whole_tensors(
    make_cluster: Callable[..., Cluster], contract: Contract, job: str, tmp_path: Path
) -> None:
    """Two groups of two. Each member holds half of the weight. A group leaves with the last of its members."""
    cluster = make_cluster(checkpoint_dir=tmp_path / "checkpoints", lease=120.0)
    scale, _, bias, head, seen = SPEC["parameters"]
    parameters = [scale, rows(0, 0), rows(3, 1), {**bias, "member": 1}, {**head, "member": 1}, seen]
    spec = {**SPEC, "name": job, "parameters": parameters, "group_size": 2}
    with closing(Connection(contract, cluster.address)) as connection:
        groups = [[Worker(connection, spec, rank, member) for member in (0, 1)] for rank in (0, 1)]
        for first, second in groups:
            assert first.register() == (first.rank == 0)
            assert not second.register()
            first.join()
            second.take_place(first)
        members = [member for group in groups for member in group]
        assert {bucket for member in groups[0] for bucket in member.own} == set(range(len(members[0].layout)))
        for member in groups[0]:
            member.initialise(INITIAL)
        reference, models = Reference(), [empty(), empty()]
        for member in members:
            member.await_started()
            member.pull(models[member.rank], member.own)
        assert models == [INITIAL, INITIAL]
        for clock in (1, 2, 3):
            for member in members:
                member.push_step(gradients(clock, member.rank))
            expected = reference.step(gradients(clock, 0), gradients(clock, 1))
            for member in members:
                member.pull(models[member.rank])
                assert member.heartbeat() == 2
            assert models == [expected, expected]
        assert [member.leave(done=True) for member in members] == [False, False, False, True]
    export(tmp_path / "checkpoints", job, None, tmp_path / "out")
    exported = load_file(tmp_path / "out" / "model.safetensors")
    assert {name: tensor.flatten().tolist() for name, tensor in exported.items()} == expected


def test_a_script_of_pytorch_takes_the_place_of_one_rank(cluster: Cluster, start: Start, job: str) -> None:
    """The registration names lr and momentum alone; the script names every hyper-parameter."""
    stays, leaves = start(cluster.address)
    reference, model = Reference(), empty()
    for worker in (stays, leaves):
        worker.push_step(gradients(1, worker.rank))
    expected = reference.step(gradients(1, 0), gradients(1, 1))
    stays.pull(model)
    assert not leaves.leave()

    def train() -> None:
        session = cluster.connect("sync", rank=1, world_size=2, job=job)
        net = Script()
        groups = [{"params": [net.weight, net.head], "lr": 0.5}]
        groups.append({"params": [net.scale, net.bias], "lr": 0.25, "momentum": 0.5})
        prepared, optimizer = session.prepare(net, torch.optim.SGD(groups, lr=1.0))
        began.append({name: tensor.flatten().tolist() for name, tensor in prepared.state_dict().items()})
        joined.set()
        for name, parameter in prepared.named_parameters():
            parameter.grad = torch.tensor(gradients(2, 1)[name], dtype=parameter.dtype).reshape(parameter.shape)
        optimizer.step()
        ended.append({name: tensor.flatten().tolist() for name, tensor in prepared.state_dict().items()})
        session.close()

    began: list[Model] = []
    ended: list[Model] = []
    joined = threading.Event()
    script = threading.Thread(target=train, daemon=True)
    script.start()
    assert joined.wait(30)
    assert began == [expected]
    stays.exchange(gradients(2, 0), model)
    script.join(30)
    expected = reference.step(gradients(2, 0), gradients(2, 1))
    assert ended == [expected]
    assert {**model, "seen": INITIAL["seen"]} == expected


@pytest.mark.parametrize("wire", ["WIRE_FORMAT_FLOAT16", "WIRE_FORMAT_UNSPECIFIED"])
def test_what_it_sends_and_gets_in_half_the_bytes_is_understood(cluster: Cluster, start: Start, wire: str) -> None:
    [worker] = start(cluster.address, world_size=1, gradient_wire=wire, weight_wire=wire)
    reference, model = Reference(), empty()
    for clock in (1, 2):
        worker.exchange(gradients(clock, 0), model)
        assert {**model, "seen": INITIAL["seen"]} == reference.step(gradients(clock, 0))


def test_a_repeated_push_is_acknowledged_and_applied_once(cluster: Cluster, start: Start) -> None:
    [worker] = start(cluster.address, world_size=1)
    worker.push_step(gradients(1, 0))
    for bucket in worker.trained:
        assert worker.push(bucket, 1, "GRADIENT", worker.encoded(bucket, gradients(1, 0))) == 1
    model = empty()
    worker.pull(model)
    assert {**model, "seen": INITIAL["seen"]} == Reference().step(gradients(1, 0))


def test_a_pull_that_waits_says_for_which_rank(cluster: Cluster, start: Start) -> None:
    first, second = start(cluster.address)
    first.push_step(gradients(1, 0))
    notices: list[Any] = []

    def told(notice: Any) -> None:
        if not notices:
            second.push_step(gradients(1, 1))
        notices.append(notice)

    model = empty()
    first.pull(model, waits=told)
    assert {tuple(notice.awaited_ranks) for notice in notices} == {(1,)}
    assert {**model, "seen": INITIAL["seen"]} == Reference().step(gradients(1, 0), gradients(1, 1))


INFINITE: Model = {**gradients(1, 0), "bias": [0.0, float("nan"), 0.0]}


def refused(call: Callable[[], object]) -> tuple[str, str]:
    with pytest.raises(Refused) as caught:
        call()
    return caught.value.code.name, caught.value.reason


def test_what_is_wrong_is_refused_for_a_reason_that_it_knows(cluster: Cluster, start: Start, job: str) -> None:
    [worker] = start(cluster.address, world_size=1)
    before = cluster.state(job)
    names = [{worker.parameters[part.parameter].name for part in bucket.slices} for bucket in worker.layout]
    bucket = next(index for index in worker.trained if "bias" in names[index])
    right = worker.encoded(bucket, gradients(1, 0))
    forged = worker.make("WorkerIdentity")
    forged.CopyFrom(worker.identity)
    forged.lease_key = bytes(16)
    other = [{"name": "other", "data_type": "DATA_TYPE_FLOAT32"}]
    for call, expected in (
        (lambda: worker.push(bucket, 1, "GRADIENT", right[:-1]), ("INVALID_ARGUMENT", "INVALID_REQUEST")),
        (lambda: worker.push(bucket, 1, "GRADIENT"), ("INVALID_ARGUMENT", "INVALID_REQUEST")),
        (lambda: worker.push(bucket, 1, "UNSPECIFIED", right), ("INVALID_ARGUMENT", "INVALID_REQUEST")),
        (lambda: worker.push(bucket, 2, "GRADIENT", right), ("FAILED_PRECONDITION", "OUT_OF_ORDER")),
        (
            lambda: worker.push(bucket, 1, "GRADIENT", worker.encoded(bucket, INFINITE)),
            ("INVALID_ARGUMENT", "NON_FINITE_GRADIENT"),
        ),
        (lambda: worker.push(bucket, 1, "GRADIENT", right, worker=forged), ("PERMISSION_DENIED", "FORBIDDEN")),
        (lambda: worker.register(version=VERSION + 1), ("FAILED_PRECONDITION", "VERSION_MISMATCH")),
        (lambda: worker.register(parameters=other), ("FAILED_PRECONDITION", "JOB_MISMATCH")),
        (lambda: worker.register(name="other", optimizers=["LBFGS"]), ("INVALID_ARGUMENT", "INVALID_REQUEST")),
    ):
        assert refused(call) == expected
    assert cluster.state(job) == before


def test_a_worker_that_lost_its_rank_or_whose_run_ended_is_told_so(cluster: Cluster, start: Start, job: str) -> None:
    [old] = start(cluster.address, world_size=1)
    new = Worker(old.connection, old.spec, 0)
    assert not new.register()
    new.join()
    assert refused(old.heartbeat) == ("FAILED_PRECONDITION", "FENCED")
    assert refused(lambda: old.push_step(gradients(1, 0))) == ("FAILED_PRECONDITION", "FENCED")
    new.coordinator("JobService", "EndJob", new.make("EndJobRequest", job=job))
    assert refused(new.heartbeat) == ("NOT_FOUND", "NOT_FOUND")
    later = Worker(old.connection, old.spec, 0)
    assert later.register()
    assert later.run > new.run
    for call in (new.heartbeat, new.join, lambda: new.push_step(gradients(1, 0))):
        assert refused(call) == ("NOT_FOUND", "RUN_ENDED")


def test_it_shows_a_token_where_the_cluster_asks_for_one(
    make_cluster: Callable[..., Cluster], contract: Contract, tmp_path: Path, job: str
) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text(f"worker:{job} the-token-of-a-worker\nreader the-token-of-a-reader\ncluster the-servers-token\n")
    tokens.chmod(0o600)
    cluster = make_cluster(tokens=tokens, lease=120.0)
    for token, expected in (
        ("", ("UNAUTHENTICATED", "UNAUTHENTICATED")),
        ("a-token-of-another-cluster", ("UNAUTHENTICATED", "UNAUTHENTICATED")),
        ("the-token-of-a-reader", ("PERMISSION_DENIED", "FORBIDDEN")),
    ):
        with closing(Connection(contract, cluster.address, token)) as connection:
            assert refused(Worker(connection, {**SPEC, "name": job}, 0).register) == expected
    with closing(Connection(contract, cluster.address, "the-token-of-a-worker")) as connection:
        worker = Worker(connection, {**SPEC, "name": job, "world_size": 1}, 0)
        assert worker.register()
        worker.join()
        worker.initialise(INITIAL)
        model = empty()
        worker.exchange(gradients(1, 0), model)
        assert {**model, "seen": INITIAL["seen"]} == Reference().step(gradients(1, 0))
        assert worker.leave()
