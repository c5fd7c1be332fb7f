"""Each worker gets its own share of the data, reshuffled every epoch, as with DistributedSampler."""

from __future__ import annotations

import threading
from collections import namedtuple
from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

import ps_worker
from ps_protocol.errors import InvalidRequest, Unsupported
from ps_worker.data.loaders import ShareSampler, shard_loader, warning_once
from tests.tools.cluster import Cluster, in_parallel

Point = namedtuple("Point", ["x", "y"])


class Numbers(Dataset[int]):
    """0 .. size - 1."""

    def __init__(self, size: int) -> None:
        self._size = size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> int:
        return index


class Stream(IterableDataset[int]):
    """Shards itself, as a user of an IterableDataset does."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.rank, 12, self.world_size))


def epochs(loader: DataLoader[int], count: int) -> list[list[int]]:
    """What a loader yields in each of its next epochs."""
    return [[int(x) for batch in loader for x in batch] for _ in range(count)]


def shares(
    size: int, world_size: int, shuffle: bool = False, drop_last: bool = False, count: int = 1
) -> list[list[list[int]]]:
    """By epoch and rank, the samples of each worker."""
    each = [
        epochs(
            shard_loader(
                DataLoader(Numbers(size), batch_size=1, shuffle=shuffle, drop_last=drop_last),
                lambda rank=rank: (rank, world_size),  # type: ignore[misc]
                seed=0,
            ),
            count,
        )
        for rank in range(world_size)
    ]
    return [list(epoch) for epoch in zip(*each, strict=True)]


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize(("size", "world_size"), [(12, 3), (12, 1), (100, 7), (3, 3)])
def test_shares_are_disjoint_equally_long_and_cover_the_data(size: int, world_size: int, shuffle: bool) -> None:
    [found] = shares(size, world_size, shuffle)
    assert len({len(share) for share in found}) == 1
    everything = [sample for share in found for sample in share]
    assert set(everything) == set(range(size))
    assert len(everything) - size == -size % world_size, "no more is repeated than makes the shares equally long"


def test_with_drop_last_nothing_is_repeated() -> None:
    [found] = shares(100, 7, shuffle=True, drop_last=True)
    everything = [sample for share in found for sample in share]
    assert len(everything) == len(set(everything)) == 98


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize(("size", "world_size"), [(12, 3), (13, 3), (14, 3), (2, 5), (100, 7)])
def test_shares_are_those_of_distributed_sampler(size: int, world_size: int, shuffle: bool, drop_last: bool) -> None:
    for rank in range(world_size):
        mine = ShareSampler(size, lambda r=rank: (r, world_size), shuffle, drop_last, seed=3)  # type: ignore[misc]
        theirs = DistributedSampler(Numbers(size), world_size, rank, shuffle=shuffle, seed=3, drop_last=drop_last)
        for epoch in range(3):
            theirs.set_epoch(epoch)  # what a user must not forget there happens by itself here
            assert list(mine) == list(theirs)
            assert len(mine) == len(theirs)


def test_every_epoch_is_shuffled_anew_and_alike_for_all_workers() -> None:
    first, second, third = shares(30, 3, shuffle=True, count=3)
    assert len({tuple(map(tuple, epoch)) for epoch in (first, second, third)}) == 3
    for epoch in (first, second, third):
        assert sorted(sample for share in epoch for sample in share) == list(range(30))
    assert [first, second, third] == shares(30, 3, shuffle=True, count=3), "and the same again in the next run"


def test_without_shuffle_the_order_is_kept() -> None:
    assert shares(6, 2, count=2) == [[[0, 2, 4], [1, 3, 5]]] * 2


def test_an_epoch_broken_off_counts_as_one() -> None:
    loader = shard_loader(DataLoader(Numbers(30), batch_size=1, shuffle=True), lambda: (0, 3), seed=0)
    next(iter(loader))
    assert epochs(loader, 1)[0] == shares(30, 3, shuffle=True, count=2)[1][0]


def test_who_takes_part_is_asked_anew_every_epoch() -> None:
    place = (0, 2)
    loader = shard_loader(DataLoader(Numbers(6), batch_size=1), lambda: place, seed=0)
    assert len(loader) == 3
    assert epochs(loader, 1) == [[0, 2, 4]]
    place = (1, 3)
    assert len(loader) == 2
    assert epochs(loader, 1) == [[1, 4]]


def test_an_iterable_dataset_is_left_as_it_is() -> None:
    loader = DataLoader(Stream(1, 3), batch_size=2)
    assert shard_loader(loader, lambda: (1, 3), seed=0) is loader
    assert epochs(loader, 1) == [[1, 4, 7, 10]]


ODD = {
    "WeightedRandomSampler": lambda: DataLoader(Numbers(4), sampler=WeightedRandomSampler([1.0] * 4, 4)),
    "SubsetRandomSampler": lambda: DataLoader(Numbers(4), sampler=SubsetRandomSampler([1, 2])),
    "RandomSampler": lambda: DataLoader(Numbers(4), sampler=RandomSampler(Numbers(4), replacement=True)),
    "MyBatches": lambda: DataLoader(Numbers(4), batch_sampler=MyBatches(SequentialSampler(Numbers(4)), 2, False)),
}


class MyBatches(BatchSampler):
    """Forms batches in a way that nobody else knows."""


@pytest.mark.parametrize("name", ODD)
def test_a_sampler_that_cannot_be_divided_is_refused_by_name(name: str) -> None:
    with pytest.raises(Unsupported, match=f"the loader's {name} cannot be divided among workers; use shuffle=True"):
        shard_loader(ODD[name](), lambda: (0, 2), seed=0)


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_batch_sampler_of_torchs_own_is_divided_and_batches_keep_their_size(shuffle: bool) -> None:
    sampler = RandomSampler(Numbers(10)) if shuffle else SequentialSampler(Numbers(10))
    mine = DataLoader(Numbers(10), batch_sampler=BatchSampler(sampler, 2, drop_last=True))
    usual = DataLoader(Numbers(10), batch_size=2, shuffle=shuffle, drop_last=True)
    for rank in range(2):
        found, expected = (shard_loader(one, lambda r=rank: (r, 2), seed=3) for one in (mine, usual))  # type: ignore[misc]
        assert [batch.tolist() for batch in found] == [batch.tolist() for batch in expected]


class Grouped(BatchSampler):
    """Batches that a sampler of one's own divides among workers."""

    def __init__(self, rank: int, num_replicas: int) -> None:
        super().__init__(SequentialSampler(Numbers(12)), 2, False)
        self.rank, self.num_replicas = rank, num_replicas

    def __iter__(self) -> Iterator[list[int]]:
        return iter([[2 * self.rank, 2 * self.rank + 1]])


class Mine(DistributedSampler[int]):
    """A subclass."""


DIVIDED = {
    "DistributedSampler": lambda rank, count: {"sampler": DistributedSampler(Numbers(12), count, rank)},
    "Mine": lambda rank, count: {"sampler": Mine(Numbers(12), count, rank)},
    "Grouped": lambda rank, count: {"batch_sampler": Grouped(rank, count)},
    "in a BatchSampler": lambda rank, count: {
        "batch_sampler": BatchSampler(DistributedSampler(Numbers(12), count, rank), 2, False)
    },
}


@pytest.mark.parametrize("name", DIVIDED)
def test_a_sampler_that_divides_by_its_own_rank_is_taken_as_it_is(name: str) -> None:
    loader = DataLoader(Numbers(12), **DIVIDED[name](1, 3))
    assert shard_loader(loader, lambda: (1, 3), seed=0) is loader


@pytest.mark.parametrize("name", DIVIDED)
@pytest.mark.parametrize(("rank", "count"), [(0, 3), (1, 2)])
def test_a_sampler_that_divides_among_others_is_refused(name: str, rank: int, count: int) -> None:
    loader = DataLoader(Numbers(12), **DIVIDED[name](rank, count))
    said = f"yields part {rank} of {count}, but this worker is 1 of 3: make it with num_replicas=session.world_size"
    with pytest.raises(InvalidRequest, match=said):
        shard_loader(loader, lambda: (1, 3), seed=0)


def test_a_random_sampler_that_draws_only_some_is_refused() -> None:
    loader = DataLoader(Numbers(100), sampler=RandomSampler(Numbers(100), num_samples=10))
    with pytest.raises(Unsupported, match="RandomSampler"):
        shard_loader(loader, lambda: (0, 2), seed=0)


def test_everything_else_of_the_loader_stays() -> None:
    def collate(samples: list[int]) -> torch.Tensor:
        return -torch.tensor(samples)

    loader = shard_loader(
        DataLoader(Numbers(10), batch_size=3, drop_last=True, collate_fn=collate, timeout=0), lambda: (0, 2), seed=0
    )
    assert [batch.tolist() for batch in loader] == [[0, -2, -4]], "batches of 3, and the rest of the share dropped"


# -- in a session ----------------------------------------------------------------------------------------------------


def test_workers_of_a_job_get_disjoint_shares(shared: Cluster, job: str) -> None:
    def work(rank: int) -> list[list[int]]:
        with shared.connect("sync", rank, 3, job=job) as session:
            model = nn.Linear(1, 1)
            loader = DataLoader(Numbers(30), batch_size=4, shuffle=True)
            model, _, loader = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
            assert len(loader) == 3
            assert loader.batch_size == 4
            assert len(loader.dataset) == 30
            return epochs(loader, 2)

    first, second = zip(*in_parallel(3, work), strict=True)
    for epoch in (first, second):
        assert sorted(sample for share in epoch for sample in share) == list(range(30))
    assert first != second


def test_the_seed_of_the_shuffle_can_be_chosen(shared: Cluster, job: str) -> None:
    def order(name: str, seed: int) -> list[int]:
        with shared.connect("sync", job=name) as session:
            model = nn.Linear(1, 1)
            loader = DataLoader(Numbers(30), batch_size=4, shuffle=True)
            _, _, loader = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader, seed=seed)
            return epochs(loader, 1)[0]

    assert order(f"{job}-a", 1) == order(f"{job}-b", 1)
    assert order(f"{job}-c", 1) != order(f"{job}-d", 2)


def test_a_distributed_sampler_trains_on_the_shares_and_epochs_that_the_script_says(shared: Cluster, job: str) -> None:
    def work(rank: int) -> list[list[int]]:
        with shared.connect("sync", rank, 2, job=job) as session:
            model, found = nn.Linear(1, 1), []
            sampler = DistributedSampler(Numbers(12), session.world_size, session.rank, seed=4)
            loader = DataLoader(Numbers(12), batch_size=2, sampler=sampler)
            model, _, loader = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
            for epoch in (5, 9):
                loader.sampler.set_epoch(epoch)
                found += epochs(loader, 1)
            return found

    for rank, found in enumerate(in_parallel(2, work)):
        theirs = DistributedSampler(Numbers(12), 2, rank, seed=4)
        for epoch, samples in zip((5, 9), found, strict=True):
            theirs.set_epoch(epoch)
            assert samples == list(theirs)


def test_in_an_elastic_job_a_distributed_sampler_is_refused(shared: Cluster, job: str) -> None:
    with shared.connect("sync", job=job, elastic=True) as session:
        model = nn.Linear(1, 1)
        session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        with pytest.raises(Unsupported, match=r"DistributedSampler divides the data once and for all.*shuffle=True"):
            session.prepare(DataLoader(Numbers(4), sampler=DistributedSampler(Numbers(4), 1, 0)))


def test_an_elastic_job_leases_the_batches_of_a_batch_sampler(shared: Cluster, job: str) -> None:
    with shared.connect("sync", job=job, elastic=True) as session:
        model = nn.Linear(1, 1)
        loader = DataLoader(Numbers(12), batch_sampler=BatchSampler(RandomSampler(Numbers(12)), 3, False))
        model, optimizer, loader = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
        found = []
        for batch in loader:
            model(batch.float().view(-1, 1)).sum().backward()
            optimizer.step()
            found.append(batch.tolist())
    assert [len(batch) for batch in found] == [3] * 4
    assert sorted(sample for batch in found for sample in batch) == list(range(12))


def test_single_takes_a_distributed_sampler_as_torch_does() -> None:
    with ps_worker.connect(mode="single") as session:
        loader = DataLoader(Numbers(6), sampler=DistributedSampler(Numbers(6), 2, 1, shuffle=False))
        assert epochs(session.prepare(loader), 1) == [[1, 3, 5]]


class Whole(IterableDataset[int]):
    """Is not divided."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(6))


class Shuffled(IterableDataset[int]):
    """Reads from another."""

    def __init__(self, source: IterableDataset[int]) -> None:
        self.source = source

    def __iter__(self) -> Iterator[int]:
        return iter(self.source)


def warnings_of(
    shared: Cluster, job: str, caplog: pytest.LogCaptureFixture, world_size: int, dataset: IterableDataset[int]
) -> list[str]:
    """What two loops over a dataset log, in each of a job's workers."""

    def work(rank: int) -> None:
        with shared.connect("sync", rank, world_size, job=job) as session:
            model = nn.Linear(1, 1)
            loader = DataLoader(dataset, batch_size=2)
            _, _, loader = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
            assert not [text for text in caplog.messages if "IterableDataset" in text], "nothing is iterated over yet"
            begun.wait(30)
            epochs(loader, 2)

    begun = threading.Barrier(world_size)
    in_parallel(world_size, work)
    return [text for text in caplog.messages if "IterableDataset" in text]


@pytest.mark.parametrize("dataset", [Whole(), Shuffled(Whole())])
def test_an_iterable_dataset_that_all_workers_read_whole_is_warned_of_once(
    shared: Cluster, job: str, caplog: pytest.LogCaptureFixture, dataset: IterableDataset[int]
) -> None:
    [said] = warnings_of(shared, job, caplog, 2, dataset)
    assert f"each of the 2 workers reads all of the loader's {type(dataset).__name__}: divide" in said
    assert "session.rank and session.world_size" in said


@pytest.mark.parametrize("dataset", [Stream(0, 2), Shuffled(Stream(0, 2))])
def test_one_that_divides_itself_is_not(
    shared: Cluster, job: str, caplog: pytest.LogCaptureFixture, dataset: IterableDataset[int]
) -> None:
    assert warnings_of(shared, job, caplog, 2, dataset) == []


def test_one_worker_may_read_it_whole(shared: Cluster, job: str, caplog: pytest.LogCaptureFixture) -> None:
    assert warnings_of(shared, job, caplog, 1, Whole()) == []


def test_the_processes_of_a_loader_are_spoken_of_where_there_are_some(caplog: pytest.LogCaptureFixture) -> None:
    loader = DataLoader(Whole(), num_workers=2)
    warning_once(loader, lambda: (0, 3), lambda: iter(()))()
    assert "by torch.utils.data.get_worker_info() among the loader's processes" in caplog.text


def test_a_batch_keeps_its_shape_whatever_it_is_made_of() -> None:
    with ps_worker.connect(mode="single") as session:
        data = [{"point": Point(torch.ones(2), 1), "name": "a", "more": [torch.zeros(1), (2, 3)]}]
        [batch] = session.prepare(DataLoader(data, batch_size=1, collate_fn=lambda samples: samples[0]))
    assert set(batch) == {"point", "name", "more"}
    assert isinstance(batch["point"], Point)
    assert torch.equal(batch["point"].x, torch.ones(2))
    assert batch["point"].y == 1
    assert batch["name"] == "a"
    assert torch.equal(batch["more"][0], torch.zeros(1))
    assert batch["more"][1] == (2, 3)


def test_single_leaves_the_order_to_the_loader() -> None:
    torch.manual_seed(5)
    expected = epochs(DataLoader(Numbers(20), batch_size=4, shuffle=True), 1)
    torch.manual_seed(5)
    with ps_worker.connect(mode="single") as session:
        assert epochs(session.prepare(DataLoader(Numbers(20), batch_size=4, shuffle=True)), 1) == expected


def test_a_loader_before_the_model_is_refused(shared: Cluster, job: str) -> None:
    with shared.connect("sync", job=job) as session, pytest.raises(InvalidRequest, match="prepare the model first"):
        session.prepare(DataLoader(Numbers(4)))


@pytest.mark.parametrize("transport", ["shm", "grpc"])
def test_loader_processes_work_beside_open_connections(shared: Cluster, job: str, transport: str) -> None:
    """A loader with num_workers forks this process, with its channels and threads, in the middle of training."""

    def loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(model(x), y)

    data = TensorDataset(torch.arange(24.0).view(-1, 1) / 24, torch.arange(24.0).view(-1, 1) / 12)
    plain = nn.Linear(1, 1)
    model = nn.Linear(1, 1)
    model.load_state_dict(plain.state_dict())
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for _ in range(2):
        for x, y in DataLoader(data, batch_size=4):
            loss(plain, x, y).backward()
            optimizer.step()
            optimizer.zero_grad()
    with shared.connect("sync", job=job, transport=transport) as session:
        model, optimizer, loader = session.prepare(
            model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(data, batch_size=4, num_workers=2)
        )
        for _ in range(2):
            for x, y in loader:
                loss(model, x, y).backward()
                optimizer.step()
                optimizer.zero_grad()
        assert session.clock == 12
    assert torch.allclose(model.weight, plain.weight, atol=1e-6)
