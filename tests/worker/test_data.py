"""Each worker gets its own share of the data, reshuffled every epoch, as with DistributedSampler."""

from __future__ import annotations

import threading
from collections import namedtuple
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
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
from ps_worker import Session
from ps_worker.data.loaders import shard_loader, warning_once
from tests.tools.cases import cases
from tests.tools.cluster import Cluster, in_parallel
from tests.tools.counting import Indices
from tests.tools.small_models import close

Point = namedtuple("Point", ["x", "y"])


class Stream(IterableDataset[int]):
    """Shards itself, as a user of an IterableDataset does."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.rank, 12, self.world_size))


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


def epochs(loader: DataLoader[int], count: int) -> list[list[int]]:
    """What a loader yields in each of its next epochs."""
    return [[int(x) for batch in loader for x in batch] for _ in range(count)]


def share_of(loader: DataLoader[int], rank: int, world_size: int) -> DataLoader[int]:
    return shard_loader(loader, lambda: (rank, world_size), seed=3)


def torchs(size: int, rank: int, world_size: int, count: int, **options: Any) -> list[list[int]]:
    """What a DistributedSampler yields in its first epochs, of which its user must tell it."""
    sampler = DistributedSampler(Indices(size), world_size, rank, **{"seed": 3, **options})
    found = []
    for epoch in range(count):
        sampler.set_epoch(epoch)
        found.append(list(sampler))
    return found


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize(("size", "world_size"), [(12, 1), (12, 3), (13, 3), (14, 3), (3, 3), (2, 5), (100, 7)])
def test_shares_are_those_of_distributed_sampler(size: int, world_size: int, shuffle: bool, drop_last: bool) -> None:
    """So they are disjoint, cover the data, and repeat no more of it than makes them equally long."""
    for rank in range(world_size):
        mine = share_of(DataLoader(Indices(size), 1, shuffle=shuffle, drop_last=drop_last), rank, world_size)
        expected = torchs(size, rank, world_size, 3, shuffle=shuffle, drop_last=drop_last)
        assert len(mine) == len(expected[0])
        assert epochs(mine, 3) == expected


def test_an_epoch_broken_off_counts_as_one() -> None:
    loader = share_of(DataLoader(Indices(30), batch_size=1, shuffle=True), 0, 3)
    next(iter(loader))
    assert epochs(loader, 1)[0] == torchs(30, 0, 3, 2)[1]


def test_who_takes_part_is_asked_anew_every_epoch() -> None:
    place = (0, 2)
    loader = shard_loader(DataLoader(Indices(6), batch_size=1), lambda: place, seed=0)
    assert len(loader) == 3
    assert epochs(loader, 1) == [[0, 2, 4]]
    place = (1, 3)
    assert len(loader) == 2
    assert epochs(loader, 1) == [[1, 4]]


def test_everything_else_of_the_loader_stays() -> None:
    def collate(samples: list[int]) -> torch.Tensor:
        return -torch.tensor(samples)

    loader = share_of(DataLoader(Indices(10), 3, drop_last=True, collate_fn=collate), 0, 2)
    assert [batch.tolist() for batch in loader] == [[0, -2, -4]], "batches of 3, and the rest of the share dropped"


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_batch_sampler_of_torchs_own_is_divided_and_batches_keep_their_size(shuffle: bool) -> None:
    sampler = RandomSampler(Indices(10)) if shuffle else SequentialSampler(Indices(10))
    own = DataLoader(Indices(10), batch_sampler=BatchSampler(sampler, 2, drop_last=True))
    usual = DataLoader(Indices(10), batch_size=2, shuffle=shuffle, drop_last=True)
    for rank in range(2):
        found, expected = (share_of(loader, rank, 2) for loader in (own, usual))
        assert [batch.tolist() for batch in found] == [batch.tolist() for batch in expected]


# -- samplers that divide, and samplers that cannot be divided --------------------------------------------------------


class Grouped(BatchSampler):
    """Batches that a sampler of one's own divides among workers; without a rank nobody knows how."""

    def __init__(self, rank: int, num_replicas: int) -> None:
        super().__init__(SequentialSampler(Indices(12)), 2, False)
        self.rank, self.num_replicas = rank, num_replicas

    def __iter__(self) -> Iterator[list[int]]:
        return iter([[2 * self.rank, 2 * self.rank + 1]])


class OwnBatches(BatchSampler):
    """Forms batches in a way that is not known."""


class OwnDivision(DistributedSampler[int]):
    """A subclass."""


DIVIDED = {
    "DistributedSampler": lambda rank, count: {"sampler": DistributedSampler(Indices(12), count, rank)},
    "a subclass": lambda rank, count: {"sampler": OwnDivision(Indices(12), count, rank)},
    "Grouped": lambda rank, count: {"batch_sampler": Grouped(rank, count)},
    "in a BatchSampler": lambda rank, count: {
        "batch_sampler": BatchSampler(DistributedSampler(Indices(12), count, rank), 2, False)
    },
}


@pytest.mark.parametrize("name", DIVIDED)
def test_a_sampler_that_divides_by_its_own_rank_is_taken_as_it_is_and_among_others_refused(name: str) -> None:
    loader = DataLoader(Indices(12), **DIVIDED[name](1, 3))
    assert share_of(loader, 1, 3) is loader
    for rank, count in ((0, 3), (1, 2)):
        said = f"yields part {rank} of {count}, but this worker is 1 of 3: make it with num_replicas=session.world_size"
        with pytest.raises(InvalidRequest, match=said):
            share_of(DataLoader(Indices(12), **DIVIDED[name](rank, count)), 1, 3)


def test_an_iterable_dataset_is_left_as_it_is() -> None:
    loader = DataLoader(Stream(1, 3), batch_size=2)
    assert share_of(loader, 1, 3) is loader
    assert epochs(loader, 1) == [[1, 4, 7, 10]]


@pytest.mark.parametrize(
    "options",
    [
        {"sampler": WeightedRandomSampler([1.0] * 4, 4)},
        {"sampler": SubsetRandomSampler([1, 2])},
        {"sampler": RandomSampler(Indices(4), replacement=True)},
        {"sampler": RandomSampler(Indices(4), num_samples=2)},
        {"batch_sampler": OwnBatches(SequentialSampler(Indices(4)), 2, False)},
    ],
)
def test_a_sampler_that_cannot_be_divided_is_refused_by_name(options: dict[str, Any]) -> None:
    [sampler] = options.values()
    said = f"the loader's {type(sampler).__name__} cannot be divided among workers; use shuffle=True"
    with pytest.raises(Unsupported, match=said):
        share_of(DataLoader(Indices(4), **options), 0, 2)


# -- in a session ----------------------------------------------------------------------------------------------------


def prepared(session: Session, *loaders: DataLoader[Any], **options: Any) -> Any:
    """A model with one weight, its optimizer, and the loaders."""
    model = nn.Linear(1, 1)
    return session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), *loaders, **options)


def test_workers_of_a_job_get_disjoint_shares(shared: Cluster, job: str) -> None:
    def work(rank: int) -> list[list[int]]:
        with shared.connect("sync", rank, 3, job=job) as session:
            _, _, loader = prepared(session, DataLoader(Indices(30), batch_size=4, shuffle=True))
            assert len(loader) == 3
            assert loader.batch_size == 4
            assert len(loader.dataset) == 30
            return epochs(loader, 2)

    first, second = zip(*in_parallel(3, work), strict=True)
    for epoch in (first, second):
        assert sorted(sample for share in epoch for sample in share) == list(range(30))
    assert first != second


def test_the_seed_of_the_shuffle_can_be_chosen(shared: Cluster, job: str) -> None:
    def order(seed: int) -> list[int]:
        with shared.connect("sync", job=job) as session:
            _, _, loader = prepared(session, DataLoader(Indices(30), 4, shuffle=True), seed=seed)
            return epochs(loader, 1)[0]

    assert order(1) == order(1) != order(2)


def test_a_distributed_sampler_trains_on_the_shares_and_epochs_that_the_script_says(shared: Cluster, job: str) -> None:
    def work(rank: int) -> list[list[int]]:
        with shared.connect("sync", rank, 2, job=job) as session:
            sampler = DistributedSampler(Indices(12), session.world_size, session.rank, seed=4)
            _, _, loader = prepared(session, DataLoader(Indices(12), batch_size=2, sampler=sampler))
            found = []
            for epoch in (5, 9):
                loader.sampler.set_epoch(epoch)
                found += epochs(loader, 1)
            return found

    for rank, found in enumerate(in_parallel(2, work)):
        expected = torchs(12, rank, 2, 10, seed=4)
        assert found == [expected[5], expected[9]]


def test_in_an_elastic_job_a_distributed_sampler_is_refused(shared: Cluster, job: str) -> None:
    with shared.connect("sync", job=job, elastic=True) as session:
        prepared(session)
        with pytest.raises(Unsupported, match=r"DistributedSampler divides the data once and for all.*shuffle=True"):
            session.prepare(DataLoader(Indices(4), sampler=DistributedSampler(Indices(4), 1, 0)))


def test_an_elastic_job_leases_the_batches_of_a_batch_sampler(shared: Cluster, job: str) -> None:
    with shared.connect("sync", job=job, elastic=True) as session:
        batches = BatchSampler(RandomSampler(Indices(12)), 3, False)
        model, optimizer, loader = prepared(session, DataLoader(Indices(12), batch_sampler=batches))
        found = []
        for batch in loader:
            model(batch.float().view(-1, 1)).sum().backward()
            optimizer.step()
            found.append(batch.tolist())
    assert [len(batch) for batch in found] == [3] * 4
    assert sorted(sample for batch in found for sample in batch) == list(range(12))


def test_a_loader_before_the_model_is_refused(shared: Cluster, job: str) -> None:
    with shared.connect("sync", job=job) as session, pytest.raises(InvalidRequest, match="prepare the model first"):
        session.prepare(DataLoader(Indices(4)))


@pytest.mark.parametrize(
    ("dataset", "world_size", "warned"),
    [
        (Whole(), 2, True),
        (Shuffled(Whole()), 2, True),
        (Stream(0, 2), 2, False),
        (Shuffled(Stream(0, 2)), 2, False),
        (Whole(), 1, False),
    ],
    ids=["whole", "read by another", "divided", "divided and read by another", "one worker"],
)
def test_an_iterable_dataset_that_several_workers_read_whole_is_warned_of_once(
    shared: Cluster,
    job: str,
    caplog: pytest.LogCaptureFixture,
    dataset: IterableDataset[int],
    world_size: int,
    warned: bool,
) -> None:
    def warnings() -> list[str]:
        return [text for text in caplog.messages if "IterableDataset" in text]

    def work(rank: int) -> None:
        with shared.connect("sync", rank, world_size, job=job) as session:
            _, _, loader = prepared(session, DataLoader(dataset, batch_size=2))
            assert not warnings(), "nothing is iterated over yet"
            begun.wait(30)
            epochs(loader, 2)

    begun = threading.Barrier(world_size)
    in_parallel(world_size, work)
    assert len(warnings()) == warned
    for said in warnings():
        assert f"the loader's {type(dataset).__name__} is not seen to be divided among the 2 workers: divide" in said
        assert "session.rank and session.world_size" in said


def test_the_processes_of_a_loader_are_spoken_of_where_there_are_some(caplog: pytest.LogCaptureFixture) -> None:
    loader = DataLoader(Whole(), num_workers=2)
    warning_once(loader, lambda: (0, 3), lambda: iter(()))()
    assert "by torch.utils.data.get_worker_info() among the loader's processes" in caplog.text


@pytest.mark.parametrize("transport", cases(["tcp", "grpc"], ["shm"]))
def test_loader_processes_work_beside_open_connections(shared: Cluster, job: str, transport: str) -> None:
    """A loader with num_workers forks this process, with its channels and threads, in the middle of training."""
    data = TensorDataset(torch.arange(24.0).view(-1, 1) / 24, torch.arange(24.0).view(-1, 1) / 12)
    plain, model = nn.Linear(1, 1), nn.Linear(1, 1)
    model.load_state_dict(plain.state_dict())

    def train(model: nn.Module, optimizer: torch.optim.Optimizer, loader: DataLoader[Any]) -> None:
        for _ in range(2):
            for x, y in loader:
                nn.functional.mse_loss(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()

    train(plain, torch.optim.SGD(plain.parameters(), lr=0.1), DataLoader(data, batch_size=4))
    with shared.connect("sync", job=job, transport=transport) as session:
        optimizer, loader = torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(data, 4, num_workers=2)
        train(*session.prepare(model, optimizer, loader))
        assert session.clock == 12
    assert close(model.parameters(), plain.parameters())


# -- in single -------------------------------------------------------------------------------------------------------


def test_single_leaves_the_order_to_the_loader_and_its_sampler() -> None:
    with ps_worker.connect(mode="single") as session:
        torch.manual_seed(5)
        expected = epochs(DataLoader(Indices(20), batch_size=4, shuffle=True), 1)
        torch.manual_seed(5)
        assert epochs(session.prepare(DataLoader(Indices(20), batch_size=4, shuffle=True)), 1) == expected
        divided = DataLoader(Indices(6), sampler=DistributedSampler(Indices(6), 2, 1, shuffle=False))
        assert epochs(session.prepare(divided), 1) == [[1, 3, 5]]


def test_a_batch_keeps_its_shape_whatever_it_is_made_of() -> None:
    with ps_worker.connect(mode="single") as session:
        data = [{"point": Point(torch.ones(2), 1), "name": "a", "more": [torch.zeros(1), (2, 3)]}]
        [batch] = session.prepare(DataLoader(data, batch_size=1, collate_fn=lambda samples: samples[0]))
    assert isinstance(batch["point"], Point)
    assert repr(batch) == repr(data[0])
