"""Tables behind the update rule of the servers: the same rows whatever the order of pushes and the number of shards."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch

from ps_protocol.modes import Consistency
from ps_protocol.row_ids import shards_of
from ps_protocol.tables import JobTable, TableSpec
from ps_tables.contributions import RowGradients
from ps_tables.initial import initial_rows
from tests.tools.cases import cases
from tests.tools.row_gradients import summed
from tests.tools.table_shards import DIM, SPEC, SYNC, WORKERS, TableShard

STEPS = 30
IDS = np.arange(200) * 7919 - 300


def batch(rank: int, clock: int) -> tuple[np.ndarray, torch.Tensor]:
    """The ids of a worker's step, some of them several times, and a gradient for each."""
    random = np.random.default_rng((clock, rank))
    ids = random.zipf(1.3, 40) % 200 * 7919 - 300
    return ids.astype(np.int64), torch.from_numpy(random.standard_normal((40, DIM)).astype(np.float32))


def pushes(shards: int, seed: int) -> Iterator[tuple[int, int, int, RowGradients]]:
    """All pushes in an order that the update rule allows, by shard, rank and clock: a third of them come twice."""
    random = np.random.default_rng(seed)
    for clock in range(1, STEPS + 1):
        due = []
        for rank in range(WORKERS):
            contribution = summed(*batch(rank, clock))
            of = shards_of(contribution.ids, shards)
            due += [(shard, rank, clock, contribution.part(of == shard)) for shard in range(shards)]
        due += [push for push in due if random.random() < 0.3]
        yield from (due[place] for place in random.permutation(len(due)))


def made(spec: TableSpec, shards: int, optimizer: str, consistency: Consistency = SYNC) -> list[TableShard]:
    return [TableShard(JobTable(spec, optimizer, {"lr": 0.1}), consistency, shard, shards) for shard in range(shards)]


def trained(
    spec: TableSpec, shards: int, seed: int, optimizer: str = "Adagrad", consistency: Consistency = SYNC
) -> list[TableShard]:
    each = made(spec, shards, optimizer, consistency)
    random = np.random.default_rng(seed)
    for shard, rank, clock, contribution in pushes(shards, seed):
        each[shard].push(rank, clock, contribution, int(random.integers(1, 4)))
        if random.random() < 0.3:
            each[shard].table.pull(np.arange(-300, 2_000, 13), torch.empty(177, DIM))
    return each


def weights(shards: list[TableShard]) -> torch.Tensor:
    out, of = torch.empty(len(IDS), DIM), shards_of(IDS, len(shards))
    for number, shard in enumerate(shards):
        ids = IDS[of == number]
        part = torch.empty(len(ids), DIM)
        shard.table.pull(ids, part)
        out[torch.from_numpy(of == number)] = part
    return out


@cache
def undisturbed(spec: TableSpec, optimizer: str) -> torch.Tensor:
    """One shard, to which each push comes once and in turn."""
    [alone] = made(spec, 1, optimizer)
    for clock in range(1, STEPS + 1):
        for rank in range(WORKERS):
            alone.push(rank, clock, summed(*batch(rank, clock)))
    return weights([alone])


AGES = [(0, 0), (5, 0), (0, 6), (4, 8)]


@pytest.mark.parametrize(
    ("admit_after", "expire_after", "shards", "seed"),
    cases(
        [(0, 0, 1, 0), (5, 0, 2, 0), (0, 6, 3, 0), (4, 8, 2, 0), (4, 8, 3, 0)],
        [(*ages, shards, seed) for ages in AGES for shards in (1, 2, 3) for seed in range(1, 7)],
    ),
)
def test_sync_ends_with_the_same_bits(admit_after: int, expire_after: int, shards: int, seed: int) -> None:
    spec = replace(SPEC, admit_after=admit_after, expire_after=expire_after)
    each = trained(spec, shards, seed)
    assert torch.equal(weights(each), undisturbed(spec, "Adagrad"))
    rows = sum(len(shard.table) for shard in each)
    assert 0 < rows < 200 if admit_after or expire_after else rows > 100


@pytest.mark.parametrize("optimizer", ["SGD", "Adam", "RowWiseAdagrad", "Ftrl"])
def test_sync_ends_with_the_same_bits_with_every_optimizer(optimizer: str) -> None:
    spec = replace(SPEC, admit_after=3, expire_after=10)
    assert torch.equal(weights(trained(spec, 3, 1, optimizer)), undisturbed(spec, optimizer))


@pytest.mark.parametrize(
    ("before", "after", "optimizer"),
    cases(
        [(2, 2, "Adam"), (2, 1, "RowWiseAdagrad"), (1, 3, "RowWiseAdagrad"), (2, 5, "Adam")],
        [(2, 2, "RowWiseAdagrad"), (2, 1, "Adam"), (1, 3, "Adam"), (2, 5, "RowWiseAdagrad")],
    ),
)
def test_rows_that_were_saved_go_on_as_if_nothing_had_happened_on_any_number_of_shards(
    before: int, after: int, optimizer: str
) -> None:
    """With what is not admitted yet, what expires next, and the optimizer's state."""
    spec = replace(SPEC, admit_after=4, expire_after=8)
    first, then = made(spec, before, optimizer), made(spec, after, optimizer)
    saved_at = 13
    for shard, rank, clock, contribution in pushes(before, 1):
        if clock <= saved_at:
            first[shard].push(rank, clock, contribution)
    parts = [shard.partition.tables[0].snapshot() for shard in first]
    for shard in then:
        shard.restore(parts)
    for number, rank, clock, contribution in pushes(after, 2):
        if clock > saved_at:
            then[number].push(rank, clock, contribution)
    assert torch.equal(weights(then), undisturbed(spec, optimizer))


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_sync_is_an_embedding_and_an_optimizer_of_torch_on_the_combined_batch() -> None:
    embedding = torch.nn.Embedding(200, DIM, sparse=True)
    embedding.weight.data = initial_rows(SPEC.initializer, IDS, DIM)
    optimizer = torch.optim.Adagrad(embedding.parameters(), lr=0.1)
    for clock in range(1, STEPS + 1):
        optimizer.zero_grad()
        for rank in range(WORKERS):
            ids, values = batch(rank, clock)
            (embedding(torch.from_numpy((ids + 300) // 7919)) * values).sum().div(WORKERS).backward()
        optimizer.step()
    assert float((weights(trained(SPEC, 2, 1)) - embedding.weight.detach()).abs().max()) < 1e-6


@pytest.mark.parametrize("staleness", [0, 4, None])
def test_without_averaging_each_step_of_a_worker_is_an_update(staleness: int | None) -> None:
    """In the order of arrival, and once: with plain SGD the sum of all gradients, whatever that order was."""
    each = trained(SPEC, 2, 3, "SGD", Consistency(staleness))
    assert [shard.partition.rules[0].version for shard in each] == [WORKERS * STEPS] * 2
    expected = initial_rows(SPEC.initializer, IDS, DIM)
    for clock in range(1, STEPS + 1):
        for rank in range(WORKERS):
            ids, values = batch(rank, clock)
            expected.index_add_(0, torch.from_numpy((ids + 300) // 7919), values, alpha=-0.1)
    assert torch.allclose(weights(each), expected, atol=1e-5)
