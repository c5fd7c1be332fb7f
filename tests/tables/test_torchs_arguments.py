"""padding_idx and scale_grad_by_freq are those of torch's modules; max_norm is refused."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import nn

import ps_worker
from ps_protocol.errors import InvalidRequest, Unsupported
from tests.tools.cluster import Cluster

IDS, DIM = 8, 3


def pair(mode: str | None, **arguments: object) -> tuple[nn.Module, nn.Module]:
    """A table and torch's module, with the same rows. mode: of a bag"""
    if mode is None:
        ours: nn.Module = ps_worker.Embedding(DIM, **arguments)  # type: ignore[arg-type]
        theirs: nn.Module = nn.Embedding(IDS, DIM, **arguments)  # type: ignore[arg-type]
    else:
        ours = ps_worker.EmbeddingBag(DIM, mode, **arguments)  # type: ignore[arg-type]
        theirs = nn.EmbeddingBag(IDS, DIM, mode=mode, **arguments)  # type: ignore[arg-type]
    theirs.weight.data = ours.rows(torch.arange(IDS))  # type: ignore[operator]
    return ours, theirs


def assert_trained_alike(ours: nn.Module, theirs: nn.Module, batches: list[tuple[torch.Tensor, ...]]) -> None:
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.5) for each in (ours, theirs)]
    random = torch.Generator().manual_seed(1)
    for batch in batches:
        outputs = [each(*batch) for each in (ours, theirs)]
        assert torch.allclose(*outputs)
        gradient = torch.randn(outputs[0].shape, generator=random)
        for output, optimizer in zip(outputs, optimizers, strict=True):
            optimizer.zero_grad()
            output.backward(gradient)
            optimizer.step()
        assert torch.allclose(ours.rows(torch.arange(IDS)), theirs.weight.detach(), atol=1e-5)  # type: ignore[operator]


BATCHES = [
    (torch.tensor([[1, 0, 2], [0, 0, 0], [5, 1, 1]]),),
    (torch.tensor([[0, 0, 0]]),),
    (torch.tensor([[7, 7, 0], [2, 3, 4]], dtype=torch.int32),),
]
BAGS = [
    *BATCHES,
    (torch.tensor([1, 0, 0, 2, 0, 3]), torch.tensor([0, 2, 2, 5])),
    (torch.tensor([], dtype=torch.int64), torch.tensor([0, 0])),
]


@pytest.mark.parametrize("arguments", [{"padding_idx": 0}, {"padding_idx": 1}])
@pytest.mark.parametrize("mode", [None, "sum", "mean", "max"])
def test_padding_is_that_of_torchs_module(mode: str | None, arguments: dict[str, int]) -> None:
    ours, theirs = pair(mode, **arguments)
    assert_trained_alike(ours, theirs, BATCHES if mode is None else BAGS)


class Bags(nn.Module):
    """Bags of torch's plain embedding. torch's own bags divide by how often some other id occurs (2.13, on CPUs)."""

    def __init__(self, mode: str, **arguments: object) -> None:
        super().__init__()
        self.plain, self.mode = nn.Embedding(IDS, DIM, **arguments), mode  # type: ignore[arg-type]

    @property
    def weight(self) -> nn.Parameter:
        return self.plain.weight  # type: ignore[return-value]

    def forward(self, input: torch.Tensor, offsets: torch.Tensor | None = None) -> torch.Tensor:
        bags = list(input) if offsets is None else list(torch.tensor_split(input, offsets[1:]))
        rows = self.plain(input.reshape(-1)).split([len(bag) for bag in bags])  # those of padding are zeros here
        sums = torch.stack([each.sum(0) for each in rows])
        if self.mode == "sum":
            return sums
        padding = -1 if self.plain.padding_idx is None else self.plain.padding_idx
        return sums / torch.tensor([[max(1, int((bag != padding).sum()))] for bag in bags])


@pytest.mark.parametrize("arguments", [{}, {"padding_idx": 0}])
@pytest.mark.parametrize("mode", [None, "sum", "mean"])
def test_gradients_are_divided_by_how_often_an_id_occurs(mode: str | None, arguments: dict[str, int]) -> None:
    ours, theirs = pair(mode, scale_grad_by_freq=True, **arguments)
    if mode is not None:
        theirs = Bags(mode, scale_grad_by_freq=True, **arguments)
        theirs.plain.weight.data = ours.rows(torch.arange(IDS))  # type: ignore[operator]
    if "padding_idx" in arguments:
        assert torch.equal(theirs.weight[0], torch.zeros(DIM))
    assert_trained_alike(ours, theirs, BATCHES if mode is None else BAGS)


def test_the_mode_max_divides_no_gradients() -> None:
    with pytest.raises(Unsupported, match=r'for the modes "sum" and "mean", as in torch, got "max"'):
        ps_worker.EmbeddingBag(DIM, "max", scale_grad_by_freq=True)


def test_weights_of_samples_that_are_padding_count_for_nothing() -> None:
    batch = torch.tensor([[1, 0, 2], [0, 0, 0]]), None, torch.rand(2, 3)
    assert_trained_alike(*pair("sum", padding_idx=0), [batch])


def test_padding_reads_as_zeros_and_never_becomes_a_row() -> None:
    table = ps_worker.Embedding(DIM, padding_idx=-1, initial="constant", scale=2.0)
    optimizer = torch.optim.Adam(table.parameters(), lr=0.1)
    table(torch.tensor([-1, 4, -1])).sum().backward()
    optimizer.step()
    assert len(table) == 1
    for each in (table, copy.deepcopy(table), pickle.loads(pickle.dumps(table))):
        assert torch.equal(each.rows(torch.tensor([[-1]])), torch.zeros(1, 1, DIM))
        assert not torch.equal(each.rows(torch.tensor([5])), torch.zeros(1, DIM))
        assert (each.padding_idx, repr(each)) == (
            -1,
            "Embedding(3, initial='constant', scale=2.0, padding_idx=-1)",
        )


@pytest.mark.parametrize("ids", [torch.tensor([[4, -1], [9, 4]]), torch.tensor([[-1, -1]])])
def test_a_model_that_is_frozen_for_serving_has_the_padding(ids: torch.Tensor) -> None:
    for table in (
        ps_worker.Embedding(DIM, padding_idx=-1, initial="constant", scale=2.0),
        ps_worker.EmbeddingBag(DIM, "mean", padding_idx=-1, initial="constant", scale=2.0),
    ):
        optimizer = torch.optim.SGD(table.parameters(), lr=0.1)
        table(torch.tensor([[4, 5]])).sum().backward()
        optimizer.step()
        assert torch.allclose(ps_worker.freeze(table)(ids), table(ids))


def test_servers_never_hear_of_padding(shared: Cluster, job: str) -> None:
    with shared.connect("sync", job=job) as session:
        table = ps_worker.Embedding(DIM, padding_idx=0, ids=lambda batch: batch)
        model, optimizer = session.prepare(nn.Sequential(table), torch.optim.SGD(table.parameters(), lr=1.0))
        before = table.rows(torch.tensor([3]))
        for ids in ([0, 3], [0, 0], [3, 0]):
            optimizer.zero_grad()
            table.announce(torch.tensor(ids))
            model(torch.tensor(ids)).sum().backward()
            optimizer.step()
        assert len(table) == 1
        assert torch.equal(table.rows(torch.tensor([0, 3])), torch.cat([torch.zeros(1, DIM), before - 2.0]))


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: ps_worker.Embedding(4, padding_idx=2**63), InvalidRequest, "padding_idx must be an id of 64 bits"),
        (lambda: ps_worker.Embedding(4, padding_idx=0.5), InvalidRequest, "padding_idx must be an id of 64 bits"),
        (
            lambda: ps_worker.Embedding(4, max_norm=1.0),
            Unsupported,
            r"max_norm \(1.0\) would have a lookup write rows, .* as by torch.renorm",
        ),
        (lambda: ps_worker.EmbeddingBag(4, max_norm=1.0, norm_type=1.0), Unsupported, r"max_norm \(1.0\)"),
    ],
)
def test_arguments_that_no_table_can_have_are_refused(
    make: Callable[[], object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        make()
