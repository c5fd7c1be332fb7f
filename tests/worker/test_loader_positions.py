"""`state_dict` of a prepared loader: a script that saves itself goes on to the sample, with any number of workers."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

import ps_worker
from ps_protocol.errors import InvalidRequest
from ps_worker.data.loaders import PositionedLoader, ShareSampler, shard_loader
from ps_worker.data.pass_position import SharePass
from ps_worker.metrics import StepTimer
from ps_worker.state.checkpoint import WorkerCheckpoint
from ps_worker.state.encoding import decode, encode
from tests.tools.cases import cases, crossed
from tests.tools.cluster import Cluster, in_parallel

CPU = torch.device("cpu")
SIZE, BATCH = 37, 2
Make = Callable[[int, int], PositionedLoader]


def loader(**more: Any) -> DataLoader[int]:
    return DataLoader(list(range(SIZE)), **{"batch_size": BATCH, "shuffle": True, **more})  # type: ignore[arg-type]


def without_servers(rank: int, workers: int, **more: Any) -> PositionedLoader:
    """A loader as ddp prepares it."""
    share = shard_loader(loader(**more), lambda: (rank, workers), seed=3)
    assert isinstance(share.sampler, ShareSampler)
    position = SharePass(share, share.sampler)
    return PositionedLoader(share, CPU, StepTimer(), position.batches, position)


def with_servers(rank: int, workers: int, **more: Any) -> PositionedLoader:
    """A loader as the modes with servers prepare it."""
    share = shard_loader(loader(**more), lambda: (rank, workers), seed=3)
    position = WorkerCheckpoint(CPU, lambda clock, state: None).add_loader(share, iter)
    return PositionedLoader(share, CPU, StepTimer(), position.batches, position)


def passes(prepared: PositionedLoader, count: int) -> Iterator[list[int]]:
    """The batches of so many passes."""
    for _ in range(count):
        yield from (batch.tolist() for batch in prepared)


def saved_after(make: Make, workers: int, batches: int, **more: Any) -> tuple[dict[str, Any], list[list[list[int]]]]:
    """What rank 0 saves after so many batches, and what all workers had until then."""
    had, state = [], {}
    for rank in range(workers):
        prepared = make(rank, workers, **more)
        going = passes(prepared, 3)
        had.append(list(itertools.islice(going, batches)))
        if rank == 0:
            state = prepared.state_dict()
        going.close()
    return state, had


MAKES = [without_servers, with_servers]
POSITIONS: list[tuple[dict[str, Any], int]] = [
    *(({}, count) for count in (0, 4, 9, 10, 13)),  # a share has 19 samples
    *(({"drop_last": True}, count) for count in (0, 8, 9, 10)),  # and 18
    ({"shuffle": False}, 4),
]


@pytest.mark.parametrize(
    ("more", "batches", "make"),
    cases(
        [
            *((more, batches, make) for more, batches in POSITIONS for make in MAKES),
            ({"num_workers": 2}, 4, with_servers),
        ],
        [({"num_workers": 2}, 4, without_servers)],
    ),
)
def test_as_many_workers_go_on_with_the_next_batch(make: Make, more: dict[str, Any], batches: int) -> None:
    undisturbed = [list(passes(make(rank, 2, **more), 3)) for rank in range(2)]
    state, had = saved_after(make, 2, batches, **more)
    for rank in range(2):
        prepared = make(rank, 2, **more)
        prepared.load_state_dict(state)
        assert had[rank] + list(passes(prepared, 3))[: len(undisturbed[rank]) - batches] == undisturbed[rank]


@pytest.mark.parametrize(
    ("workers", "num_workers", "make"),
    cases(
        [*((workers, 0, make) for workers in (1, 3, 4) for make in MAKES), (3, 2, without_servers)],
        [(3, 2, with_servers)],
    ),
)
def test_another_number_of_workers_divides_the_rest_of_the_pass(make: Make, workers: int, num_workers: int) -> None:
    state, had = saved_after(make, 2, 4, num_workers=num_workers)
    before = [index for own in had for batch in own for index in batch]
    rest, following = [], []
    for rank in range(workers):
        prepared = make(rank, workers, num_workers=num_workers)
        prepared.load_state_dict(state)
        rest += [index for batch in passes(prepared, 1) for index in batch]
        assert prepared.state_dict() == {"order": 4, "samples": 0, "size": SIZE}
        following += [index for batch in passes(prepared, 1) for index in batch]
    assert len(before) == 16
    assert set(rest) | set(before) == set(range(SIZE))
    assert len(set(rest) - set(before)) == SIZE - 16
    assert len(rest) - (SIZE - 16) < workers, "but for those that make shares equally long"
    assert set(following) == set(range(SIZE))


@pytest.mark.parametrize("make", MAKES)
def test_the_place_is_that_of_the_script_when_it_saves_twice(make: Make) -> None:
    first, _ = saved_after(make, 2, 3)
    prepared = make(0, 3)
    prepared.load_state_dict(first)
    assert prepared.state_dict() == first
    going = iter(prepared)
    next(going)
    assert prepared.state_dict() == {**first, "samples": first["samples"] + 3 * BATCH}


@pytest.mark.parametrize("make", MAKES)
def test_a_loop_that_was_left_is_over(make: Make) -> None:
    def broken_off(prepared: PositionedLoader) -> list[list[int]]:
        return [batch.tolist() for batch, _ in zip(prepared, range(3), strict=False)]

    prepared = make(0, 2)
    prepared.load_state_dict({"order": 3, "samples": 8, "size": SIZE})
    broken_off(prepared)
    state = prepared.state_dict()
    assert state == {"order": 4, "samples": 0, "size": SIZE}
    again = make(0, 2)
    again.load_state_dict(state)
    assert broken_off(again) == broken_off(prepared)
    kept = iter(again)  # a loop that is left behind, and not closed
    next(kept)
    assert next(iter(again)).tolist() == next(iter(make_at(make, 6))).tolist()


def make_at(make: Make, order: int) -> PositionedLoader:
    prepared = make(0, 2)
    prepared.load_state_dict({"order": order, "samples": 0, "size": SIZE})
    return prepared


@pytest.mark.parametrize("make", MAKES)
@pytest.mark.parametrize(
    ("state", "said"),
    [
        ({"order": 3, "samples": 0, "size": SIZE + 1}, "of a loader of 38 samples, and this one has 37"),
        ({"order": None, "samples": 0, "size": SIZE}, "of a loader with no shuffle, and this one shuffles"),
        ({"order": 3, "samples": SIZE + 1, "size": SIZE}, "0 to 37 samples, got order=3, samples=38"),
        ({"order": "a", "samples": 0, "size": SIZE}, "expected whole numbers"),
        ({"_num_yielded": 3}, "with order, samples, size, got _num_yielded"),
        (None, "got NoneType"),
    ],
)
def test_what_is_no_place_here_is_refused_and_changes_nothing(make: Make, state: Any, said: str) -> None:
    prepared = make(0, 2)
    before = prepared.state_dict()
    with pytest.raises(InvalidRequest, match=said):
        prepared.load_state_dict(state)
    assert prepared.state_dict() == before


@pytest.mark.parametrize("make", MAKES)
def test_a_loop_under_way_goes_on_where_it_is(make: Make) -> None:
    prepared = make(0, 2)
    going = iter(prepared)
    next(going)
    with pytest.raises(InvalidRequest, match="a loop over this loader is under way"):
        prepared.load_state_dict(prepared.state_dict())
    list(going)
    prepared.load_state_dict(prepared.state_dict())


# -- a job ------------------------------------------------------------------------------------------------------------


class Run:
    """A script that saves itself in the middle of a pass, and goes on from there in a job of its own."""

    def __init__(self, cluster: Cluster, job: str, num_workers: int) -> None:
        self._cluster, self._job, self._num_workers = cluster, job, num_workers

    def __call__(self, workers: int, steps: int, saved: Any = None) -> tuple[list[list[int]], dict[str, Any]]:
        """Makes so many steps. Returns what each had of the data, and what rank 0 saves."""

        def work(rank: int) -> tuple[list[int], dict[str, Any]]:
            with self._cluster.connect("sync", rank, workers, job=self._job) as session:
                model = nn.Linear(1, 1)
                optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
                data = loader(num_workers=self._num_workers)
                model, optimizer, prepared = session.prepare(model, optimizer, data, seed=3)
                if saved is not None:
                    prepared.load_state_dict(saved)
                had: list[int] = []
                while True:
                    for batch in prepared:
                        model(batch[:, None].float()).sum().backward()
                        optimizer.step()
                        had += batch.tolist()
                        if session.clock == steps:
                            return had, prepared.state_dict()

        found = in_parallel(workers, work)
        return [had for had, _ in found], found[0][1]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_script_goes_on_to_the_sample_with_its_own_file(shared: Cluster, job: str, num_workers: int) -> None:
    run = Run(shared, job, num_workers)
    undisturbed, end = run(2, 14)
    before, saved = run(2, 4)
    after, again = run(2, 10, saved)
    assert [a + b for a, b in zip(before, after, strict=True)] == undisturbed
    assert again == end
    by_three, _ = run(3, 4, saved)
    first = {index for own in before for index in own}
    rest = [index for own in by_three for index in own]
    assert set(rest) == set(range(SIZE)) - first, "the rest of the pass, in 4 steps of 3 workers"


@pytest.mark.parametrize("is_left", [False, True])
def test_a_checkpoint_of_the_servers_knows_that_the_pass_began_in_its_middle(is_left: bool) -> None:
    """is_left: by a script that is cut short in its loop"""
    saved, _ = saved_after(with_servers, 2, 4)

    def fresh() -> tuple[WorkerCheckpoint, PositionedLoader]:
        share = shard_loader(loader(), lambda: (0, 3), seed=3)
        checkpoint = WorkerCheckpoint(CPU, lambda clock, state: None)
        position = checkpoint.add_loader(share, iter)
        return checkpoint, PositionedLoader(share, CPU, StepTimer(), position.batches, position)

    _, undisturbed = fresh()
    undisturbed.load_state_dict(saved)
    expected = list(passes(undisturbed, 2))
    for had in (1, 2, 3):
        checkpoint, prepared = fresh()
        prepared.load_state_dict(saved)
        going = passes(prepared, 2)
        before = list(itertools.islice(going, had))
        checkpoint.stepped()
        if is_left:
            going.close()
        state = encode(decode(checkpoint.last_state(1, counts=True)))
        restarted, again = fresh()  # whatever its script has loaded: the servers' checkpoint is later
        again.load_state_dict({"order": 9, "samples": 0, "size": SIZE})
        restarted.rollback(state, 1)
        restarted.try_restore()
        assert before + list(passes(again, 2)) == expected


# -- those that have none, and single ---------------------------------------------------------------------------------


class Counting(IterableDataset[int]):
    """Divides itself, as a dataset says that has a world size."""

    world_size = 1

    def __iter__(self) -> Iterator[int]:
        return iter(range(6))


def test_loaders_that_divide_themselves_have_their_own_place(shared: Cluster, job: str) -> None:
    with shared.connect("sync", job=job) as session:
        model = nn.Linear(1, 1)
        own = DataLoader(list(range(4)), sampler=DistributedSampler(range(4), 1, 0))  # type: ignore[arg-type]
        _, _, *prepared = session.prepare(
            model, torch.optim.SGD(model.parameters(), lr=0.1), own, DataLoader(Counting())
        )
        for each in prepared:
            for name in ("state_dict", "load_state_dict"):
                with pytest.raises(AttributeError, match="this loader divides its data itself"):
                    getattr(each, name)


def test_the_place_in_leased_data_is_the_coordinators(shared: Cluster, job: str) -> None:
    with ps_worker.connect(shared.address, "sync", job, elastic=True) as session:
        model = nn.Linear(1, 1)
        own = loader()
        own.state_dict = dict  # type: ignore[attr-defined]  # as torchdata's has one, which does not know what is leased
        _, _, prepared = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), own)
        for name in ("state_dict", "load_state_dict"):
            with pytest.raises(AttributeError, match="a loader of an elastic job has no state_dict"):
                getattr(prepared, name)


def test_a_state_that_torchdatas_loader_has_loaded_already_is_not_lost() -> None:
    loaded = loader()
    loaded.next_iter_state = {"_num_yielded": 3}  # type: ignore[attr-defined]  # as StatefulDataLoader keeps it
    with pytest.raises(InvalidRequest, match="load it into the loader that prepare returns"):
        shard_loader(loaded, lambda: (0, 2), seed=3)


@pytest.mark.parametrize(("num_workers", "own_generator"), crossed([0, 2], [True, False]))
def test_in_single_torchs_random_numbers_decide_on_the_order(num_workers: int, own_generator: bool) -> None:
    def prepared() -> PositionedLoader:
        generator = torch.Generator().manual_seed(7) if own_generator else None
        with ps_worker.connect(mode="single") as session:
            model = nn.Linear(1, 1)
            own = loader(num_workers=num_workers, generator=generator)
            _, _, found = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), own)
        return found  # type: ignore[no-any-return]

    torch.manual_seed(1)
    first = prepared()
    going = passes(first, 2)
    had = list(itertools.islice(going, 4))
    state, random = first.state_dict(), torch.get_rng_state()
    expected = list(going)
    torch.manual_seed(2)
    again = prepared()
    again.load_state_dict(state)
    torch.set_rng_state(random)  # the script's own
    going = passes(again, 2)
    assert len(had) == 4
    assert again.state_dict()["batches"] == 0
    assert list(going) == expected
    assert again.state_dict() == {"batches": 0, "size": SIZE, "random": None, "generator": None}
    with pytest.raises(InvalidRequest, match="that is used as it is, in single, with batches, size"):
        again.load_state_dict({"order": 3, "samples": 0, "size": SIZE})
