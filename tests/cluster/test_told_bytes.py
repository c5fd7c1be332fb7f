"""What a wire format and local steps save, and what they cost, is told: in metrics and in `ps-server status`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from ps_protocol.tensors import BLOCKS
from ps_server.ops import requests, status_text
from ps_worker import Session
from tests.tools.cases import cases
from tests.tools.cluster import Cluster, in_parallel, scrape, until

CELLS = 256  # in buckets of 128: each is two blocks of int4, and fills whole lines of 64 bytes
BUCKET_BYTES = 512


def trained(session: Session, gradients: list[torch.Tensor], **options: Any) -> None:
    """Steps a vector with these gradients, by SGD with lr 1."""
    model = nn.Module()
    model.cells = nn.Parameter(torch.zeros(CELLS))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model, optimizer = session.prepare(model, optimizer, bucket_bytes=BUCKET_BYTES, **options)
    for gradient in gradients:
        model.cells.grad = gradient.clone()
        optimizer.step()


def wires(session: Session) -> dict[str, float]:
    """The bytes that a worker tells, by direction and format."""
    samples = scrape(session.metrics_address)
    prefix, suffix = 'ps_wire_bytes_total{direction="', '"}'
    return {
        name.removeprefix(prefix).removesuffix(suffix).replace('",format="', " "): value
        for name, value in samples.items()
        if name.startswith(prefix)
    }


@pytest.mark.parametrize(
    ("transport", "wire", "expected"),
    [
        ("tcp", "int4", {"push int4": BLOCKS["int4"].size(CELLS), "pull int4": BLOCKS["int4"].size(CELLS)}),
        ("grpc", "bfloat16,float32", {"push bfloat16": 2 * CELLS, "pull float32": 4 * CELLS}),
        ("shm", "bfloat16,float32", {"push float32": 4 * CELLS, "pull float32": 4 * CELLS}),
    ],
)
def test_bytes_are_told_by_what_they_travel_as_and_add_up(
    shared: Cluster, job: str, transport: str, wire: str, expected: dict[str, int]
) -> None:
    push, _, pull = wire.partition(",")
    with shared.connect("sync", job=job, transport=transport) as session:
        trained(session, [torch.ones(CELLS)] * 3, gradient_wire=push, weight_wire=pull or push)
        told, samples = wires(session), scrape(session.metrics_address)
    assert told == {what: 3 * size for what, size in expected.items()}
    for direction in ("push", "pull"):
        of_it = sum(size for what, size in told.items() if what.startswith(direction))
        assert of_it == samples[f"ps_worker_{direction}_bytes_total"]


def test_what_a_format_leaves_out_is_told_beside_what_is_pushed(shared: Cluster, job: str) -> None:
    """In steps of a block's scale, 1: 0.2 is left out twice, and sent, as 1, with the third step."""
    block = torch.tensor([7.0, *[0.2] * 63])
    steps = [(0.2, 7.0), (0.4, 7.0), (-0.4, math.sqrt(49 + 63))]
    for count, (left, pushed) in enumerate(steps, 1):
        with shared.connect("sync", job=f"{job}-{count}", transport="tcp") as session:
            trained(session, [block.repeat(4)] * count, gradient_wire="int4")
            told = scrape(session.metrics_address)["ps_residual_ratio"]
        assert told == pytest.approx(abs(left) * math.sqrt(63) / pushed, rel=1e-4)
    with shared.connect("sync", job=job) as session:
        trained(session, [block.repeat(4)])
        assert "ps_residual_ratio" not in scrape(session.metrics_address), "float32 leaves nothing out"


@pytest.mark.parametrize(
    ("directions", "agreement"),
    cases(
        [([[2.0, 0.0], [-2.0, 0.0]], 0.0), ([[2.0, 0.0], [0.0, 0.0]], 0.5)],
        [([[1.0, 0.0], [1.0, 0.0]], 1.0), ([[3.0, 0.0], [0.0, 3.0]], 0.5)],
    ),
    ids=["opposite", "one-stands-still", "alike", "unrelated"],
)
def test_how_alike_workers_move_in_a_round_is_told(
    shared: Cluster, job: str, directions: list[list[float]], agreement: float
) -> None:
    def work(rank: int) -> None:
        with shared.connect("local:2", rank, 2, job=job) as session:
            gradient = torch.tensor(directions[rank]).repeat(CELLS // 2)
            trained(session, [gradient] * 4, outer={"warm_up": 0})
            session.barrier()
            told = [
                samples[name]
                for server in shared.servers
                for samples in [scrape(server.metrics_address)]
                for name in [f'ps_round_agreement{{job="{job}"}}']
                if name in samples
            ]
            assert told == pytest.approx([agreement] * len(told))
            assert told
            known = requests.fetch(shared.address)
            assert status_text.round_agreement(known, job) == pytest.approx(agreement)
            assert f"workers agree to {agreement:.2f} in their last round: 1 is alike, 0.50 unrelated" in (
                status_text.table(known)
            )
            session.barrier()

    in_parallel(2, work)


def test_one_worker_agrees_with_nobody_and_gradients_are_not_looked_at(shared: Cluster, job: str) -> None:
    def of(mode: str, workers: int) -> set[str]:
        def work(rank: int) -> None:
            with shared.connect(mode, rank, workers, job=f"{job}-{workers}") as session:
                trained(session, [torch.ones(CELLS)] * 2)
                session.barrier()
                assert status_text.round_agreement(requests.fetch(shared.address), f"{job}-{workers}") is None
                session.barrier()

        in_parallel(workers, work)
        return {name for server in shared.servers for name in scrape(server.metrics_address)}

    assert not [name for name in of("local:2", 1) | of("sync", 2) if f'ps_round_agreement{{job="{job}' in name]


@pytest.mark.parametrize(
    ("mode", "wire", "said"),
    [
        ("sync", "int4", "  a step sends 136 B and receives 136 B on average, 7.5 times fewer bytes than in"),
        ("local:4", "float32", "  a step sends 256 B and receives 256 B on average, 4.0 times fewer bytes than in"),
        ("sync", "float32", "  a step sends 1.02 kB and receives 1.02 kB on average\n"),
    ],
)
def test_status_tells_the_bytes_of_a_step_beside_those_of_sync_in_float32(
    lively: Callable[..., Cluster], mode: str, wire: str, said: str
) -> None:
    cluster = lively()

    def work(rank: int) -> None:
        with cluster.connect(mode, rank, 2, transport="tcp") as session:
            weights = wire if mode == "sync" else "float32"
            trained(session, [torch.ones(CELLS)] * 8, gradient_wire=wire, weight_wire=weights, outer={"warm_up": 0})
            session.barrier()

            def all_told() -> bool:
                [known] = requests.fetch(cluster.address)["jobs"]
                return [worker["figures"]["step_count"] for worker in known["workers"] if worker["figures"]] == [8, 8]

            until(all_told, "heartbeats with the figures of eight steps")
            known = requests.fetch(cluster.address)
            assert said in status_text.table(known) + "\n"
            assert known["jobs"][0]["trained_bytes"] == 4 * CELLS
            ratios = [worker["figures"]["residual_ratio"] for worker in known["jobs"][0]["workers"]]
            assert all((ratio is not None) == (wire == "int4") for ratio in ratios)
            session.barrier()

    in_parallel(2, work)
