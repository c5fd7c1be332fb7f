"""The library's loops give the bits of numpy: each of them, on hostile input, and whole training runs."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ps_protocol.row_ids import Ids, mix, shards_of
from ps_protocol.tables import Initializer, TableSpec
from ps_tables import index, row_sums, steps
from ps_tables.contributions import RowGradients
from ps_tables.distinct import are_distinct, are_of_shard, distinct
from ps_tables.native import in_use
from ps_tables.native.libraries import LEVELS, file_name
from ps_tables.native.loading import libraries, load
from ps_tables.native.loops import Loops
from ps_tables.optimizing_rows import row_optimizer
from ps_tables.row_arrays import RowArray
from ps_tables.table import Applied, Table
from tests.simulation.cluster import Cluster as Simulated
from tests.tools.cases import cases
from tests.tools.cluster import Cluster
from tests.tools.row_gradients import summed
from tests.tools.special_numbers import same, special_numbers
from tests.tools.table_model import TableModel, train

EDGES = [0, 1, -1, 2**63 - 1, -(2**63)]
DIMS = (1, 3, 7, 8, 9, 64, 100)


@pytest.fixture(scope="module", params=[*LEVELS.get(platform.machine(), ["none"])])
def loops(request: pytest.FixtureRequest) -> Loops:
    """The library of this installation for each level that this processor has."""
    path = next((each for each in libraries() if each.name == file_name(request.param)), None)
    if path is None:
        pytest.skip("this installation has no such library, or this processor cannot run it: make native")
    return load(path)


@pytest.fixture(autouse=True)
def _numpy() -> Iterator[None]:
    """Whatever a test has used, the next one begins with numpy."""
    yield
    in_use.use(None)


def rows_of(numbers: torch.Tensor) -> RowArray:
    array = RowArray(len(numbers), numbers.shape[1])
    array.write(np.arange(len(numbers)), numbers)
    return array


# -- ids -------------------------------------------------------------------------------------------------------------


@given(
    ids=st.lists(st.one_of(st.sampled_from(EDGES), st.integers(-20, 20), st.integers(-(2**63), 2**63 - 1))),
    salt=st.integers(-(2**63), 2**63 - 1),
    shards=st.integers(1, 5),
)
def test_distinct_ids_come_in_the_same_order(loops: Loops, ids: list[int], salt: int, shards: int) -> None:
    batch = np.array(ids, np.int64)
    in_use.use(None)
    expected = distinct(batch, salt, shards)
    found = loops.distinct(batch, salt, shards)
    assert all(np.array_equal(*pair) and pair[0].dtype == pair[1].dtype for pair in zip(found, expected, strict=True))


def test_a_large_batch_has_the_same_distinct_ids(loops: Loops) -> None:
    """Also where the memory of an earlier call is used again, for fewer ids and for more."""
    batch = mix(np.random.default_rng(1).zipf(1.2, 30_000) % 10_000).astype(np.int64)
    for each in (batch[:100], batch, batch[::2], np.arange(5_000), batch[:1], batch[:0]):
        for shards in (1, 3, 300):
            found, expected = loops.distinct(each, 7, shards), distinct(each, 7, shards)
            assert all(np.array_equal(*pair) for pair in zip(found, expected, strict=True))
            of = shards_of(expected.ids, shards)
            assert np.array_equal(expected.ends, [np.count_nonzero(of <= shard) for shard in range(shards)])
            assert np.array_equal(expected.ids[expected.positions], each)


@given(
    ids=st.lists(st.one_of(st.sampled_from(EDGES), st.integers(-20, 20), st.integers(-(2**63), 2**63 - 1))),
    salt=st.integers(-(2**63), 2**63 - 1),
    shards=st.integers(1, 5),
    shard=st.integers(0, 4),
)
def test_ids_are_checked_alike(loops: Loops, ids: list[int], salt: int, shards: int, shard: int) -> None:
    batch, shard = np.array(ids, np.int64), shard % shards
    once = np.unique(batch)
    here = once[shards_of(once, shards) == shard]
    for each, is_here, is_distinct in ((batch, False, len(once) == len(ids)), (once, False, True), (here, True, True)):
        for use in (None, loops):
            in_use.use(use)
            assert are_distinct(each, salt) == is_distinct
            assert are_of_shard(each, shards, shard) == (is_here or bool((shards_of(each, shards) == shard).all()))


def test_an_id_that_comes_twice_is_found_wherever_it_is(loops: Loops) -> None:
    """Also right after another refusal, in the same memory, where ids share slots."""
    crowd = np.arange(400_000)
    crowd = crowd[mix(crowd ^ 7) % 1024 == 5]
    ids = np.concatenate([crowd, np.array(EDGES), np.arange(2_000, 7_000)[::-1] * 2**40])
    in_use.use(loops)
    assert are_distinct(ids, 7)
    for first, second in ((0, 1), (0, len(ids) - 1), (200, 300), (len(ids) - 2, len(ids) - 1)):
        again = ids.copy()
        again[second] = again[first]
        assert not are_distinct(again, 7)
        assert are_distinct(ids, 7)
        assert np.array_equal(loops.distinct(ids, 7, 1)[0], ids)


def test_more_shards_or_ids_than_the_library_counts_are_refused(loops: Loops) -> None:
    huge = np.lib.stride_tricks.as_strided(np.zeros(1, np.int64), (2**29 + 1,), (0,))
    for ids, shards in ((huge, 1), (np.arange(3), 0), (np.arange(3), 2**16 + 1)):
        with pytest.raises(ValueError, match="expected up to 536870912 ids of up to 65536 shards, got "):
            loops.distinct(ids, 0, shards)
    with pytest.raises(ValueError, match="expected up to 536870912 ids, got 536870913"):
        loops.are_distinct(huge, 0)
    with pytest.raises(ValueError, match="expected fewer ids than the 8 slots, got 8"):
        loops.insert(np.zeros(8, np.uint64), 0, np.arange(8), np.arange(8))


def test_an_index_finds_the_same_rows_whichever_loops_have_filled_it(loops: Loops) -> None:
    """Also where they take turns, ids share a slot, and rows are removed."""
    rng = np.random.default_rng(3)
    crowd = np.arange(400_000)
    every = np.unique(np.concatenate([rng.integers(-(2**63), 2**63 - 1, 20_000), EDGES, crowd[mix(crowd) % 1024 == 5]]))
    rng.shuffle(every)
    ids_of_rows = np.empty(len(every), np.int64)
    indexes = [index.Index(ids_of_rows, 9) for _ in range(3)]
    for turn, rows in enumerate(np.array_split(np.arange(len(every)), 12)):
        part, gone = every[rows], rows[: len(rows) // 3]
        for number, each in enumerate(indexes):
            in_use.use((None, loops, (None, loops)[turn % 2])[number])
            ids_of_rows[rows] = part
            each.insert(part, rows)
            each.remove(every[gone], gone)
            ids_of_rows[gone[::2]] = every[gone[::2]][::-1]
            each.insert(ids_of_rows[gone[::2]], gone[::2])
        found = []
        for use in (None, loops):
            in_use.use(use)
            found += [each.find(every) for each in indexes]
        assert all(np.array_equal(found[0], other) for other in found[1:])
    assert len({(len(each), each.nbytes) for each in indexes}) == 1
    for each in indexes:  # which slots of removed rows are used again depends on the order of insertions
        assert each._slots.used == np.count_nonzero(each._slots.values)


# -- rows ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dim", DIMS)
def test_rows_are_read_and_written_alike(loops: Loops, dim: int) -> None:
    """To the last bit of a NaN; a place below zero or beyond the end reads the first or the last row."""
    numbers, rng = special_numbers(300, dim, 1), np.random.default_rng(dim)
    read, written = [], []
    for use in (None, loops):
        array = rows_of(numbers)
        in_use.use(use)
        out = torch.empty(500, dim)
        array.read(np.concatenate([rng.permutation(300), np.arange(-50, 150) * 3]), out)
        rng = np.random.default_rng(dim)
        array.write(np.array([7, 299, 7, 0]), special_numbers(4, dim, 2))  # of two for one row the last one stays
        read.append(out.view(torch.int32)[300:])
        written.append(array.elements.view(np.int32))
    assert torch.equal(*read)
    assert np.array_equal(*written)
    empty = np.empty(0, np.int64)
    array.read(empty, torch.empty(0, dim))
    array.write(empty, torch.empty(0, dim))


def test_what_is_finite_is_found_out_wherever_it_lies(loops: Loops) -> None:
    for count in (0, 1, 7, 8, 9, 4095, 4096, 4097, 10_000):
        numbers = np.full(count, 3e38, np.float32)
        numbers[::3] = 1e-40
        out = np.zeros(count, np.float32)
        assert loops.are_finite(numbers)
        assert loops.copy(numbers, out)
        assert np.array_equal(out, numbers)
        for place in {0, count // 2, count - 1} if count else ():
            for odd in (np.nan, np.inf, -np.inf):
                other = numbers.copy()
                other[place] = odd
                assert not loops.are_finite(other)
                assert not loops.copy(other, out)
                assert np.array_equal(out.view(np.int32), other.view(np.int32))


@pytest.mark.parametrize("dim", DIMS)
def test_rows_are_found_by_their_places(loops: Loops, dim: int) -> None:
    rows, places = special_numbers(50, dim, 1), torch.from_numpy(np.random.default_rng(dim).integers(0, 50, 300))
    expected = row_sums.rows_at(rows, places)
    in_use.use(loops)
    assert torch.equal(row_sums.rows_at(rows, places).view(torch.int32), expected.view(torch.int32))
    assert torch.equal(row_sums.rows_at(rows[::2], places // 2).isnan(), rows[::2][places // 2].isnan())
    assert row_sums.rows_at(rows, places[:0]).shape == (0, dim)
    for place in (50, -1):
        with pytest.raises(IndexError, match="a position is outside of the array"):
            row_sums.rows_at(rows, torch.tensor([0, place]))
    odd = torch.zeros(3, dim)
    for use in (None, loops):
        in_use.use(use)
        odd[1, 0] = 3e38
        assert row_sums.are_finite(odd)
        odd[1, 0] = -np.inf
        assert not row_sums.are_finite(odd)


@pytest.mark.parametrize("dim", DIMS)
def test_sums_have_the_same_bits(loops: Loops, dim: int) -> None:
    """Both ways of torch, and loops that add to zeros: also of places without a row, and of negative zeros."""
    values, places = special_numbers(900, dim, 3), np.random.default_rng(dim).zipf(1.3, 900) % 200
    values[places == 5] = -0.0
    expected = torch.zeros(200, dim).index_add_(0, torch.from_numpy(places), values)
    assert same(row_sums.added_up(values, torch.from_numpy(places), 200), expected)
    in_use.use(loops)
    found = row_sums.added_up(values, torch.from_numpy(places), 200)
    assert same(found, expected)
    assert not found[np.setdiff1d(np.arange(200), places)].any()
    assert row_sums.added_up(values[:0], torch.empty(0, dtype=torch.int64), 3).tolist() == [[0.0] * dim] * 3
    ids = places * 3 - 50
    pair = []
    for use in (None, loops):
        in_use.use(use)
        each = [summed(ids[part], values[part]) for part in (slice(0, 400), slice(300, 900))]
        pair.append(RowGradients.union(each))
    assert same(pair[0].gradients, pair[1].gradients)
    assert np.array_equal(pair[0].ids, pair[1].ids)
    assert np.array_equal(pair[0].counts, pair[1].counts)


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("SGD", {"lr": 0.1}),
        ("SGD", {"lr": 1e-30, "momentum": 0.0}),
        ("SGD", {"lr": 0.1, "momentum": 0.9}),
        ("SGD", {"lr": 0.1, "weight_decay": 0.01}),
        ("SGD", {"lr": 0.1, "maximize": True}),
        ("RowWiseAdagrad", {"lr": 0.3, "eps": 1e-3, "initial_accumulator_value": 0.5}),
        ("RowWiseAdagrad", {"eps": 0.0}),
        ("RowWiseAdagrad", {}),
        ("Adagrad", {"lr": 0.1}),
    ],
    ids=str,
)
def test_rows_are_stepped_alike(
    loops: Loops, name: str, values: dict[str, float], dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In several blocks, by means of several counts, with a rate that changes."""
    monkeypatch.setattr(steps, "BLOCK_ELEMENTS", 200 * dim)
    ends = []
    for use in (None, loops):
        in_use.use(use)
        array = rows_of(special_numbers(700, dim, 4))
        optimizer = row_optimizer(name, values, 700, dim)
        optimizer.reset(np.arange(700), values)
        for version, count in enumerate((1, 3, 7, 2**40 + 1), 1):
            rows = np.random.default_rng(version).permutation(700)[:500]
            now = {**values, "lr": values.get("lr", 0.01) / version}
            optimizer.step(array, rows, special_numbers(500, dim, version), count, now, version)
        optimizer.step(array, np.empty(0, np.int64), torch.empty(0, dim), 1, values, 5)
        ends.append([array.elements, *(kept.elements for kept in optimizer.state.values())])
    assert all(same(torch.from_numpy(a), torch.from_numpy(b)) for a, b in zip(*ends, strict=True))


def test_a_rows_bits_do_not_depend_on_the_rows_beside_it(loops: Loops) -> None:
    numbers, sums_of_rows = special_numbers(40, 9, 1), special_numbers(40, 9, 2)
    for use in (None, loops):
        in_use.use(use)
        for step in (
            lambda weights, squares, rows: steps.sgd(weights, rows, sums_of_rows.numpy()[rows], 3, 0.1),
            lambda weights, squares, rows: steps.row_wise_adagrad(
                weights, squares, rows, sums_of_rows.numpy()[rows], 3, 0.1, 1e-10
            ),
        ):
            together, alone = rows_of(numbers), rows_of(numbers)
            step(together, RowArray(40, 1), np.arange(40))
            squares = RowArray(40, 1)
            for row in range(40):
                step(alone, squares, np.array([row]))
            assert same(torch.from_numpy(together.elements), torch.from_numpy(alone.elements))


def test_adagrad_is_what_its_paper_says() -> None:
    """Beside float64: the order of a sum moves the last bits alone."""
    random = np.random.default_rng(0)
    numbers, gradients = random.standard_normal((30, 20)), random.standard_normal((3, 30, 20))
    array, squares, total = rows_of(torch.from_numpy(numbers).float()), RowArray(30, 1), np.zeros(30)
    for gradient in gradients:
        steps.row_wise_adagrad(array, squares, np.arange(30), gradient.astype(np.float32) * 2, 2, 0.1, 1e-10)
        total += (gradient**2).mean(1)
        numbers -= 0.1 / (np.sqrt(total) + 1e-10)[:, None] * gradient
    np.testing.assert_allclose(array.elements, numbers, rtol=1e-4, atol=1e-6)


def test_a_loop_refuses_what_does_not_fit_and_writes_nothing(loops: Loops) -> None:
    numbers = special_numbers(10, 4, 5)
    array, more, squares = rows_of(numbers), torch.ones(2, 4), np.zeros((10, 1), np.float32)
    ones, records = more.numpy(), more.reshape(-1).numpy().view("V16")
    for place in (10, -1, 2**62, -(2**63)):
        places = np.array([3, place])
        for refused in (
            lambda places=places: loops.scatter(array._records, places, records),
            lambda places=places: loops.add(array.elements, places, ones),
            lambda places=places: loops.sum(array.elements, places, ones),
            lambda places=places: loops.sgd(array.elements, places, ones, 1, 0.1),
            lambda places=places: loops.adagrad(array.elements, squares, places, ones, 1, 0.1, 0.0),
        ):
            with pytest.raises(IndexError, match="a position is outside of the array"):
                refused()
    good = np.array([3, 4])
    with pytest.raises(TypeError, match="expected an array of int64, got int32"):
        loops.add(array.elements, good.astype(np.int32), ones)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="expected 2 elements, got 1"):
        loops.add(array.elements, good, ones[:1])
    with pytest.raises(ValueError, match="expected rows of 4, got 3"):
        loops.add(array.elements, good, np.ones((2, 3), np.float32))
    with pytest.raises(ValueError, match="contiguous"):
        loops.add(array.elements[:, ::2], good, np.ones((2, 2), np.float32))
    with pytest.raises(ValueError, match="expected 10 elements, got 9"):
        loops.adagrad(array.elements, squares[:9], good, ones, 1, 0.1, 0.0)
    with pytest.raises(ValueError, match="expected room for 8 numbers, got 7"):
        loops.copy(ones, np.empty(7, np.float32))
    unaligned = np.zeros(33, np.uint8)[1:].view(np.float32).reshape(2, 4)
    with pytest.raises(ValueError, match="expected an array that is aligned"):
        loops.add(unaligned, good - 3, ones)
    assert not squares.any()
    assert torch.equal(torch.from_numpy(array.elements).view(torch.int32), numbers.view(torch.int32))


def test_what_is_read_may_lie_anyhow(loops: Loops) -> None:
    """As what came in a message: its payload begins at any byte."""
    values, places, ids = special_numbers(3, 4, 1).numpy(), np.array([2, 0, 2]), np.array([9, -9, 9])

    def moved(array: np.ndarray) -> np.ndarray:
        memory = np.zeros(array.nbytes + 1, np.uint8)[1:]
        memory[:] = array.view(np.uint8).reshape(-1)
        return memory.view(array.dtype).reshape(array.shape)

    def found(lies: Callable[[np.ndarray], np.ndarray]) -> list[np.ndarray]:
        sums, copy = np.zeros((4, 4), np.float32), np.zeros((3, 4), np.float32)
        loops.add(sums, lies(places), lies(values))
        is_finite = loops.copy(lies(values), copy)
        assert is_finite == loops.are_finite(lies(values))
        return [sums.view(np.int32), copy.view(np.int32), *loops.distinct(lies(ids), 0, 2)]

    assert not moved(values).flags.aligned
    for lies in (moved, lambda array: np.repeat(array, 2, axis=0)[::2]):
        assert all(np.array_equal(*pair) for pair in zip(found(lies), found(np.copy), strict=True))


def test_records_of_another_size_are_refused(loops: Loops) -> None:
    """Otherwise a copy would go on beyond the end of the smaller ones."""
    records, places = np.zeros(4, "V16"), np.array([1, 2])
    for other in (np.zeros(2, "V8"), np.zeros(2, "V32")):
        for refused in (loops.gather, loops.scatter):
            with pytest.raises(TypeError, match=f"expected records of 16 bytes, got {other.itemsize}"):
                refused(records, places, other)
    with pytest.raises(IndexError, match="a position is outside of the array"):
        loops.gather(records[:0], places, np.zeros(2, "V16"))


def test_what_is_only_to_be_read_is_not_written(loops: Loops) -> None:
    array, places, ones = RowArray(4, 2), np.array([1, 2]), np.ones((2, 2), np.float32)
    slots, out = np.zeros(8, np.uint64), np.zeros(2, "V8")
    for each in (array.elements, array._records, out, slots):
        each.flags.writeable = False
    for refused in (
        lambda: loops.gather(array._records, places, out),
        lambda: loops.scatter(array._records, places, ones.reshape(-1).view("V8")),
        lambda: loops.add(array.elements, places, ones),
        lambda: loops.sum(array.elements, places, ones),
        lambda: loops.copy(ones, array.elements[:2]),
        lambda: loops.sgd(array.elements, places, ones, 1, 0.1),
        lambda: loops.adagrad(array.elements, np.zeros((4, 1), np.float32), places, ones, 1, 0.1, 0.0),
        lambda: loops.insert(slots, 0, places, places),
    ):
        with pytest.raises(ValueError, match="read-only"):
            refused()
    assert not array.elements.any()
    assert not slots.any()
    assert loops.find(slots, 0, places, places).tolist() == [-1, -1]


# -- whole runs ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", ["SGD", "RowWiseAdagrad", "Adam"])
def test_a_table_that_is_trained_ends_with_the_same_bits(loops: Loops, optimizer: str) -> None:
    """With rows that are admitted, expire, make room, come again, and are saved and restored."""
    spec = TableSpec("t", 6, Initializer("normal", 0.1, 3), admit_after=2, expire_after=20)

    def trained(use: Callable[[int], Loops | None]) -> dict[str, torch.Tensor]:
        table = Table(spec, optimizer, {"lr": 0.1}, 900, salt=5)
        for version in range(1, 61):
            in_use.use(use(version))
            random = np.random.default_rng(version)
            ids = (random.zipf(1.2, 400) % 3_000 + 10 * version) * 2**40 - 7
            table.apply(summed(ids, torch.from_numpy(random.standard_normal((400, 6), "f4"))), 2, version)
            table.pull(ids, torch.empty(400, 6))
            if version == 30:
                saved, table = table.snapshot(), Table(spec, optimizer, {"lr": 0.1}, 900, salt=6)
                table.restore(saved)
        return table.snapshot()

    expected = trained(lambda version: None)
    assert 100 < len(expected["ids"]) < 900
    for use in (lambda version: loops, lambda version: (None, loops)[version % 2]):
        found = trained(use)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize(
    ("mode", "seed"), cases([("sync", 3), ("async", 4)], [("ssp:2", 5), ("sync", 7), ("async", 8)])
)
def test_simulated_clusters_have_the_same_bits_with_and_without_the_library(
    mode: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through faults, checkpoints and rollbacks: every row that any table has stepped or read."""
    if not libraries():
        pytest.skip("this installation has no library: make native")
    pull, apply, seen = Table.pull, Table.apply, hashlib.sha256()

    def pulled(table: Table, ids: Ids, out: torch.Tensor) -> int:
        found = pull(table, ids, out)
        seen.update(ids.tobytes() + out.numpy().tobytes())
        return found

    def applied(table: Table, update: RowGradients, *more: Any) -> Applied:
        done = apply(table, update, *more)
        pulled(table, update.ids, torch.empty_like(update.gradients))
        return done

    monkeypatch.setattr(Table, "pull", pulled)
    monkeypatch.setattr(Table, "apply", applied)
    found = []
    for use in (None, load(libraries()[0])):
        in_use.use(use)
        seen = hashlib.sha256()
        cluster = Simulated(mode, seed, tables=True)
        assert cluster.run() == []
        found.append((seen.hexdigest(), cluster.digest()))
    assert found[0] == found[1]
    assert found[0][0] != hashlib.sha256().hexdigest(), "no row was read"


def test_a_job_on_servers_ends_with_the_same_bits(
    make_cluster: Callable[..., Cluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Worker and shards use the library, unless it is turned off."""
    if not libraries():
        pytest.skip("this installation has no library: make native")
    ends, used = [], []
    for how in ("off", "auto"):
        monkeypatch.setenv("PS_NATIVE", how)
        torch.manual_seed(0)
        own = TableModel()
        with make_cluster(native=how).connect("sync") as session:
            train(session, own)
            ends.append(own.rows())
            used.append(in_use.loops() is not None)
    assert used == [False, True]
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])
