"""int8 and int4 on the wire: what they lose is fed back, so results are nearly those of float32, and exactly the same
on each run, whatever is lost, repeated or sent early on the way.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import ps_worker
from ps_protocol.errors import InvalidRequest, JobMismatch, Unsupported
from ps_protocol.tensors import BLOCKS
from ps_protocol.v1 import types_pb2
from ps_worker import NonFiniteGradient
from tests.tools.cases import cases
from tests.tools.cluster import Cluster, in_parallel, scrape
from tests.tools.raw_worker import joined, vector_job
from tests.tools.rpc_faults import KINDS, RpcFaults, break_calls
from tests.tools.small_models import filled, same

WORKERS, STEPS, BUCKET_BYTES = 2, 6, 256
LARGEST = {"int8": 127.0, "int4": 7.0}  # a gradient of that size, and any smaller whole number, is sent as it is


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> RpcFaults:
    """Half of all calls fail, and a quarter is made twice; those that fail are soon made again."""
    faults = RpcFaults(seed=3)
    break_calls(monkeypatch, faults)
    return faults


# -- exactly once ----------------------------------------------------------------------------------------------------


class Cells(nn.Module):
    """A cell for each step of each worker, in several buckets."""

    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.Parameter(torch.zeros(WORKERS * STEPS, 16))


@pytest.mark.parametrize(
    ("mode", "transport", "wire"),
    cases(
        [("sync", "tcp", "int4"), ("async", "grpc", "int8,bfloat16")],
        [("sync", "grpc", "int8"), ("ssp:2", "tcp", "int4,float32")],
    ),
)
def test_with_calls_lost_unheard_and_repeated_every_push_counts_once(
    make_cluster: Callable[..., Cluster],
    monkeypatch: pytest.MonkeyPatch,
    broken: RpcFaults,
    mode: str,
    transport: str,
    wire: str,
) -> None:
    monkeypatch.setenv("PS_WIRE", wire)
    cluster = make_cluster(lease=60.0)
    top, workers = LARGEST[wire.partition(",")[0]], WORKERS if mode == "sync" else 1

    def work(rank: int) -> torch.Tensor:
        with cluster.connect(mode, rank, WORKERS, transport=transport) as session:
            model = Cells()
            optimizer = torch.optim.SGD(model.parameters(), lr=workers)
            model, optimizer = session.prepare(model, optimizer, bucket_bytes=BUCKET_BYTES)
            for step in range(STEPS):
                gradient = torch.zeros_like(model.cells)
                gradient[rank * STEPS + step] = -top
                model.cells.grad = gradient
                optimizer.step()
                seen = model.cells.detach().view(WORKERS, STEPS, 16)[rank]
                assert torch.equal(seen[:, 0], top * (torch.arange(STEPS) <= step)), "its own steps, each once"
            session.gather(None)  # the last step of each is in
            optimizer.zero_grad()
            optimizer.step()
            return model.cells.detach().clone()

    for found in in_parallel(WORKERS, work):
        assert torch.equal(found, torch.full_like(found, top))
    broken.finish()
    assert all(broken.counts[method, kind] for method in ("Push", "Pull") for kind in KINDS), broken.counts


# -- results ---------------------------------------------------------------------------------------------------------

DATA = torch.randn(40, WORKERS, 16, 8, generator=torch.Generator().manual_seed(5))


def trained(
    cluster: Cluster, job: str, wire: str, transport: str = "auto", steps: int = len(DATA), **options: Any
) -> tuple[list[list[torch.Tensor]], float]:
    """The weights that each of two workers ends with, and the loss of the first over all data."""

    def target(x: torch.Tensor) -> torch.Tensor:
        return (x[:, :4] * x[:, 4:]).sum(dim=1, keepdim=True).tanh()

    def work(rank: int) -> tuple[list[torch.Tensor], float]:
        with cluster.connect("sync", rank, WORKERS, job=job, transport=transport) as session:
            model = filled(nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1)))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
            push, _, pull = wire.partition(",")
            model, optimizer = session.prepare(
                *(model, optimizer), bucket_bytes=8192, gradient_wire=push, weight_wire=pull or push, **options
            )
            for batch in DATA[:steps]:
                optimizer.zero_grad()
                nn.functional.mse_loss(model(batch[rank]), target(batch[rank])).backward()
                optimizer.step()
            with torch.no_grad():
                x = DATA.flatten(0, 2)
                loss = nn.functional.mse_loss(model(x), target(x)).item()
            return [parameter.detach().clone() for parameter in model.parameters()], loss

    results = in_parallel(WORKERS, work)
    return [weights for weights, _ in results], results[0][1]


@pytest.mark.parametrize("wires", cases([["int8", "int4"]], [["int8,float32", "int4,float32"]]), ids=str)
def test_the_loss_is_that_of_float32_within_a_percent(shared: Cluster, job: str, wires: list[str]) -> None:
    exact, *losses = [trained(shared, f"{job}-{number}", wire)[1] for number, wire in enumerate(["float32", *wires])]
    assert losses == pytest.approx([exact] * len(losses), rel=0.01)
    assert len({exact, *losses}) == 1 + len(wires)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_what_is_too_small_for_a_step_of_the_format_comes_with_later_ones(shared: Cluster, job: str, mode: str) -> None:
    gradient = torch.tensor([7.0, *[0.2] * 63])  # the codes of int4 are 7 and zeros
    model = nn.Module()
    model.weights = nn.Parameter(torch.zeros(64))
    with shared.connect(mode, job=job) as session:
        model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0), gradient_wire="int4")
        for steps in range(1, 36):
            model.weights.grad = gradient.clone()
            optimizer.step()
            assert (model.weights + steps * gradient).abs().max() <= 0.51
    assert model.weights[1:].max() < -6


@pytest.mark.parametrize("wire", cases(["int4"], ["int8,bfloat16"]))
def test_sync_runs_agree_to_the_bit_over_every_transport_and_however_early_gradients_leave(
    shared: Cluster, job: str, wire: str
) -> None:
    steps = 12
    [first, second], _ = trained(shared, job, wire, "grpc", steps, overlap=False)
    assert same(first, second)
    for number, (transport, overlap) in enumerate([("grpc", True), ("tcp", None), ("auto", True)]):
        again, _ = trained(shared, f"{job}-{number}", wire, transport, steps, overlap=overlap)
        assert same(first, again[0]), transport
        assert same(first, again[1]), transport


def test_what_a_script_does_between_backward_and_step_counts_as_without_overlap(shared: Cluster, job: str) -> None:
    """Drafts that do not count leave what was lost before as it was: clipped, skipped and refused steps alike."""

    def run(overlap: bool) -> list[torch.Tensor]:
        with shared.connect("sync", job=f"{job}-{overlap}", transport="tcp") as session:
            model = filled(nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1)))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            model, optimizer = session.prepare(
                *(model, optimizer), bucket_bytes=512, overlap=overlap, gradient_wire="int4"
            )
            for number, batch in enumerate(DATA[:24, 0]):
                optimizer.zero_grad()
                model(batch).square().mean().backward()
                if number % 4 == 1:
                    nn.utils.clip_grad_norm_(model.parameters(), 0.01)
                elif number % 4 == 2:
                    continue  # the script skips this step
                elif number % 8 == 3:
                    model[0].bias.grad[0] = torch.nan
                    with pytest.raises(NonFiniteGradient):
                        optimizer.step()
                    continue
                elif number % 8 == 7:
                    model[2].weight.grad = None
                optimizer.step()
            return [parameter.detach().clone() for parameter in model.parameters()]

    assert same(run(True), run(False))


def test_gradients_of_half_types_travel_in_blocks_too(shared: Cluster, job: str) -> None:
    model = nn.Linear(64, 64, dtype=torch.bfloat16)
    plain = nn.Linear(64, 64, dtype=torch.bfloat16)
    plain.load_state_dict(model.state_dict())
    with shared.connect("sync", job=job) as session:
        ours, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5), gradient_wire="int8")
        reference = torch.optim.SGD(plain.parameters(), lr=0.5)
        for _ in range(10):
            for net, stepper in ((ours, optimizer), (plain, reference)):
                stepper.zero_grad()
                net(torch.ones(4, 64, dtype=torch.bfloat16)).float().square().mean().backward()
                stepper.step()
        sent = scrape(session.metrics_address)["ps_worker_push_bytes_total"]
    torch.testing.assert_close(model.weight, plain.weight, rtol=0.02, atol=0.02)
    assert 10 * 64 * 65 < sent < 10 * 1.1 * 64 * 65


# -- weights ---------------------------------------------------------------------------------------------------------


def test_a_newcomer_has_the_bits_of_the_others(shared: Cluster, job: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PS_WIRE", "int4")
    alone, is_there = threading.Event(), threading.Event()

    def work(number: int) -> list[torch.Tensor]:
        if number:
            assert alone.wait(60)
        with ps_worker.connect(shared.address, "sync", job, elastic=True) as session:
            model = filled(nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1)))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
            model, optimizer = session.prepare(model, optimizer, bucket_bytes=512)
            if number:
                is_there.set()
            while session.clock < 16:
                optimizer.zero_grad()
                model(DATA[session.clock, number]).square().mean().backward()
                optimizer.step()
                if not number and session.clock == 5:
                    alone.set()
                    assert is_there.wait(60)
            session.barrier()
            return [parameter.detach().clone() for parameter in model.parameters()]

    first, second = in_parallel(2, work)
    assert same(first, second)


def test_weights_that_a_script_sets_arrive_as_they_were_set(shared: Cluster, job: str) -> None:
    """Also where the others had set others: in sync those of the lowest rank count."""

    def work(rank: int) -> list[torch.Tensor]:
        seen = []
        with shared.connect("sync", rank, WORKERS, job=job) as session:
            model = filled(nn.Linear(64, 16, bias=False))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
            model, optimizer = session.prepare(model, optimizer, bucket_bytes=512, weight_wire="int4")
            for step in range(4):
                model.weight.grad = torch.ones_like(model.weight)
                if step == rank + 1:
                    model.weight.data[3:9] = 0.1 + rank
                optimizer.step()
                seen.append(model.weight.detach().clone())
        return seen

    first, second = in_parallel(WORKERS, work)
    assert same(first, second)
    before = filled(nn.Linear(64, 16, bias=False)).weight.detach()
    changed = before.clone()
    changed[3:9] = 0.1
    assert same(first, [before, changed, changed, changed])


def test_what_comes_whole_is_what_codes_add_up_to(shared: Cluster, job: str) -> None:
    codec, spec = BLOCKS["int4"], replace(vector_job(job, "sync", cells=16, world_size=1), weight_wire="int4")
    with joined(shared.address, spec) as [worker]:
        has = torch.zeros(16)
        for clock in range(1, 6):
            worker.step(torch.randn(16, generator=torch.Generator().manual_seed(clock)))
            [codes] = worker.answers(worker.ask(clock, [0]))
            [whole] = worker.answers(worker.ask(clock, [0], whole=[0]))
            assert codes.buckets[0].wire_format == types_pb2.WIRE_FORMAT_INT4
            assert len(codes.payload) == codec.size(16)
            has += codec.decode(codes.payload, 16)
            assert not whole.buckets[0].wire_format
            assert whole.payload == has.numpy().tobytes()
        before = shared.state(job)
        with pytest.raises(InvalidRequest, match="wants bucket 1 whole, and does not ask for it"):
            list(worker.answers(worker.ask(5, [0], whole=[0, 1])))
        assert shared.state(job) == before


# -- refused ---------------------------------------------------------------------------------------------------------


def test_unlike_workers_are_told_the_difference(shared: Cluster, job: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PS_WIRE", "int4,float32")
    model = nn.Linear(4, 4)
    with ps_worker.connect(shared.address, "sync", job, elastic=True) as session:
        session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        monkeypatch.setenv("PS_WIRE", "int8,float32")
        other = nn.Linear(4, 4)
        late = ps_worker.connect(shared.address, "sync", job, elastic=True)
        with late, pytest.raises(JobMismatch, match="wire format of gradients is int4 in the registered job and int8"):
            late.prepare(other, torch.optim.SGD(other.parameters(), lr=0.1))


def test_memory_is_not_shared_and_may_not_be_asked_for(shared: Cluster, job: str) -> None:
    model = nn.Linear(4, 4)
    session = shared.connect("async", job=job, transport="shm")
    with session, pytest.raises(Unsupported, match="travel as int4: use --transport auto, tcp or grpc"):
        session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), gradient_wire="int4")


@pytest.mark.parametrize("mode", ["ssp:2", "async"])
def test_weights_in_blocks_are_refused_where_workers_have_unlike_versions(
    shared: Cluster, job: str, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PS_WIRE", "int4")
    model = nn.Linear(4, 4)
    session = shared.connect(mode, job=job)
    with session, pytest.raises(InvalidRequest, match="write --wire int4,bfloat16"):
        session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
