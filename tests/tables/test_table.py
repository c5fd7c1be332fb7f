"""A table on its own: rows come into being, are trained, expire, and are read without being changed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from ps_protocol.errors import InvalidRequest
from ps_protocol.row_ids import Ids, by_shard, chance_order
from ps_protocol.tables import Initializer, TableSpec
from ps_tables.contributions import RowGradients
from ps_tables.distinct import distinct
from ps_tables.entries import Entries
from ps_tables.increments import in_order
from ps_tables.initial import initial_rows
from ps_tables.row_arrays import RowNumbers
from ps_tables.table import Applied, Table
from tests.tools.row_gradients import summed

pytestmark = pytest.mark.usefixtures("with_and_without_the_library")

SPEC = TableSpec("t", 4, Initializer("uniform", 0.1, 3))


def table(capacity: int = 5_000, **fields: object) -> Table:
    return Table(replace(SPEC, **fields), "Adagrad", {"lr": 0.1}, capacity)  # type: ignore[arg-type]


def pulled(from_: Table, ids: Ids) -> torch.Tensor:
    out = torch.empty(len(ids), from_.spec.dim)
    from_.pull(ids, out)
    return out


def gradients(*ids: int, counts: int = 1, value: float = 1.0) -> RowGradients:
    return RowGradients(np.array(ids), np.full(len(ids), counts), torch.full((len(ids), 4), value))


def test_a_pull_reads_rows_and_makes_none() -> None:
    """Not even a lasting note of the ids that it asked for."""
    rows = table()
    rows.apply(gradients(7, -7), 1, 1)
    before, nbytes = pulled(rows, np.arange(-10, 10)), rows.nbytes
    for _ in range(3):
        assert rows.pull(np.array([7, 7, 8, 2**62]), torch.empty(4, 4)) == 2
        assert (len(rows), rows.nbytes) == (2, nbytes)
    assert torch.equal(pulled(rows, np.arange(-10, 10)), before)
    start = initial_rows(SPEC.initializer, np.arange(-10, 10), 4)
    trained = [(row != first).all().item() for row, first in zip(before, start, strict=True)]
    assert [number for number, is_trained in zip(range(-10, 10), trained, strict=True) if is_trained] == [-7, 7]


class LongWay(Table):
    """A table that updates rows that are all there as it does where some must be made."""

    def _used(self, update: RowGradients, version: int) -> tuple[RowNumbers, torch.Tensor, Applied]:
        return self._made_and_used(update, self._rows.find(update.ids), version)


def history(kind: type[Table], optimizer: str) -> tuple[list[Applied], list[torch.Tensor]]:
    """Returns what became of updates, and what copies and readers got meanwhile.

    Some have only ids that have rows. From version 20 on ids wait for admission, and rows expire.
    """
    rows, results, seen = kind(SPEC, optimizer, {"lr": 0.1}, 200), [], []
    copy, walk = rows.copy(), rows.changes(0)
    for version in range(1, 81):
        random = np.random.default_rng(version)
        ids = random.permutation(300 if version % 3 == 0 else 40)[:25] - 20
        values = torch.from_numpy(random.standard_normal((25, 4), "f4"))
        results.append(rows.apply(RowGradients(ids, random.integers(1, 3, 25), values), version % 2 + 1, version))
        copy.take(9)
        seen += [*walk.take(9)[1:], torch.from_numpy(walk.take_removed(9)), pulled(rows, ids)]
        if version == 20:
            saved, rows = rows.snapshot(), kind(replace(SPEC, admit_after=2, expire_after=16), optimizer, {}, 200)
            rows.restore(saved, {"lr": 0.1})
        if version % 10 == 0:
            seen += [tensor for _, tensor in sorted(in_order(copy.tensors()).items())] if copy.is_over else []
            copy, walk = rows.copy(version - 10 if version > 30 else None), rows.changes(version - 5)
    return results, seen + [tensor for _, tensor in sorted(rows.snapshot().items())]


@pytest.mark.parametrize("optimizer", ["SGD", "RowWiseAdagrad", "Adam"])
def test_an_update_whose_ids_all_have_rows_does_as_one_that_makes_some(optimizer: str) -> None:
    """Its way is shorter. Rows, their expiry, a copy that is under way, and what readers get are the same."""
    results, seen = history(Table, optimizer)
    long_results, long_seen = history(LongWay, optimizer)
    assert results == long_results
    assert len(seen) == len(long_seen)
    assert all(torch.equal(*pair) for pair in zip(seen, long_seen, strict=True))
    short = [each for each in results if not each.admitted + each.waiting + each.no_room]
    assert len(short) > 30
    assert sum(each.expired for each in results) > 10
    assert any(each.expired for each in short)


def test_an_id_that_is_refused_expired_or_unknown_shifts_no_other_ids_gradient() -> None:
    """Gradients are found by the id that they came with, not by how many were taken before."""
    rows = table(admit_after=2, expire_after=16)
    rows.apply(gradients(1, 3, counts=2), 1, 1)
    for version in range(2, 40):
        rows.apply(gradients(3), 1, version)
    assert len(rows) == 1, "1 has expired"
    ids = np.arange(6)
    before = pulled(rows, ids)
    own = torch.arange(6.0)[:, None].expand(6, 4).contiguous()
    counts = np.array([1, 2, 1, 1, 2, 1])
    assert rows.apply(RowGradients(ids, counts, own), 1, 40) == Applied(stepped=3, admitted=2, waiting=3)
    moved = (pulled(rows, ids) - before).abs().sum(1) > 0
    assert moved.tolist() == [False, True, False, True, True, False]
    alone = table()
    alone.apply(RowGradients(np.array([1, 4]), np.ones(2, np.int64), own[[1, 4]]), 1, 1)
    assert torch.equal(pulled(rows, np.array([1, 4])), pulled(alone, np.array([1, 4])))


def test_ids_become_rows_when_they_have_occurred_often_enough() -> None:
    rows = table(admit_after=5)
    assert rows.apply(gradients(1, 2, counts=2), 1, 1) == Applied(0, 0, waiting=2)
    assert rows.apply(gradients(1, counts=2), 1, 2).admitted == 0
    assert rows.apply(gradients(1, 2, 3, counts=1), 1, 3) == Applied(1, 1, waiting=2)
    assert rows.apply(gradients(3, counts=5), 1, 4).admitted == 1
    assert len(rows) == 2
    assert rows.apply(gradients(1, 3), 1, 5) == Applied(2, 0)


@pytest.mark.parametrize("expire_after", [1, 5, 40])
def test_rows_expire_by_updates_within_a_sixteenth_and_begin_anew(expire_after: int) -> None:
    rows = table(expire_after=expire_after, admit_after=2)
    rows.apply(gradients(1, 2, counts=2), 1, 1)
    trained = pulled(rows, np.array([1]))
    version, expired = 1, 0
    while len(rows) == 2:
        version += 1
        assert torch.equal(pulled(rows, np.array([1])), trained)
        expired += rows.apply(gradients(2), 1, version).expired
    assert expired == 1
    period = max(1, expire_after // 16)
    assert expire_after < version - 1 <= expire_after + period
    start = initial_rows(SPEC.initializer, np.array([1]), 4)
    assert torch.equal(pulled(rows, np.array([1])), start)
    assert rows.apply(gradients(1), 1, version + 1).admitted == 0, "what it had occurred before is forgotten, too"
    assert rows.apply(gradients(1), 1, version + 2).admitted == 1
    again = table()
    again.apply(gradients(1), 1, 1)
    assert torch.equal(pulled(rows, np.array([1])), pulled(again, np.array([1]))), "and so is its optimizer state"


def test_what_candidates_have_occurred_is_forgotten_in_the_same_way() -> None:
    rows = table(expire_after=5, admit_after=2)
    rows.apply(gradients(1, counts=1), 1, 1)
    for version in range(2, 12):
        rows.apply(gradients(2, counts=2), 1, version)
    assert rows.apply(gradients(1, counts=1), 1, 12).waiting == 1


def test_beyond_the_most_rows_those_trained_longest_ago_go_and_those_of_the_update_stay() -> None:
    rows = table(capacity=100)
    for version in range(1, 11):
        rows.apply(gradients(*range(10 * version, 10 * version + 10)), 1, version)
    assert len(rows) == 100
    applied = rows.apply(gradients(10, 1_000), 1, 11)  # 10 is of the oldest ones
    assert (applied.admitted, applied.evicted) == (1, 6), "a sixteenth of the rows, of the oldest version"
    assert rows.pull(np.array([10, 1_000, *range(11, 20)]), torch.empty(11, 4)) == 2 + 3
    applied = rows.apply(gradients(*range(2_000, 2_300)), 1, 12)
    assert (applied.stepped, applied.no_room, len(rows)) == (100, 200, 100), "more than fit at all"
    assert rows.apply(gradients(*range(3_000, 3_100)), 1, 13) == Applied(100, 100, evicted=100)


def test_a_table_that_has_room_for_fewer_rows_than_before_makes_room_also_in_an_update_without_new_ids() -> None:
    """As one whose file is on a disk that has become full."""
    rows = table(capacity=100)
    rows.apply(gradients(*range(100)), 1, 1)
    rows._positions._capacity = 60  # type: ignore[attr-defined]
    applied = rows.apply(gradients(*range(50)), 1, 2)
    assert (applied.stepped, applied.evicted, len(rows)) == (50, 40, 60)
    assert rows.pull(np.arange(50), torch.empty(50, 4)) == 50


@pytest.mark.parametrize("updates", [1, 2, 4, 16])
def test_one_new_id_takes_the_place_of_a_sixteenth_however_many_updates_filled_the_table(updates: int) -> None:
    rows = table(capacity=1_600)
    ids = np.random.default_rng(updates).permutation(1_600)
    for version, part in enumerate(np.split(ids, updates), 1):
        rows.apply(gradients(*part), 1, version)
    applied = rows.apply(gradients(10**12), 1, updates + 1)
    assert (applied.evicted, len(rows)) == (100, 1_501)
    oldest = np.split(ids, updates)[0]
    went = set(range(1_600)) - set(rows.snapshot()["ids"].tolist())
    assert went == set(oldest[np.argsort(chance_order(oldest))[:100]]), "by chance, and the same ones each time"


def test_rows_that_came_from_elsewhere_make_room_a_sixteenth_at_a_time() -> None:
    """All are of one version: those that a script has put together, and those of a table with one update."""
    full = table(capacity=1_600)
    full.apply(gradients(*range(1_600)), 1, 1)
    rows = table(capacity=1_600)
    rows.restore(full.snapshot())
    assert rows.apply(gradients(10**12, 10**12 + 1), 1, 2) == Applied(2, 2, evicted=100)


def test_waiting_ids_make_room_a_sixteenth_at_a_time() -> None:
    rows = table(capacity=1_600, admit_after=2)
    rows.apply(gradients(*range(1_600)), 1, 1)
    rows.apply(gradients(10**12), 1, 2)
    waiting = rows.snapshot()["waiting.ids"]
    assert len(waiting) == 1_501
    applied = rows.apply(gradients(*waiting.tolist()), 1, 3)
    assert (applied.admitted, applied.waiting) == (1_501, 0), "no count of the others is lost"


@pytest.mark.parametrize("shards", [2, 3])
def test_on_each_shard_rows_make_room_in_the_same_order(shards: int) -> None:
    """The ids that stay on several shards are those that come last on one: none is nearer to the first shard."""
    ids = np.arange(6_000)
    order = chance_order(ids)
    parts = [ids[which] for which in by_shard(ids, shards)]
    for part in parts:
        rows = table(capacity=len(part))
        rows.apply(gradients(*part), 1, 1)
        rows.apply(gradients(10**12), 1, 2)
        stayed = np.setdiff1d(rows.snapshot()["ids"].numpy(), [10**12])
        assert len(stayed) == len(part) - len(part) // 16
        assert order[stayed].min() > order[np.setdiff1d(part, stayed)].max()
        assert abs(np.mean(order[part] < 2**63) - 0.5) < 0.05, "half of each shard's ids come first"


def test_memory_of_rows_that_went_is_used_again() -> None:
    rows, most = table(capacity=400), 0
    for version in range(1, 60):
        rows.apply(gradients(*range(50 * version, 50 * version + 50)), 1, version)
        most = max(most, rows.nbytes - rows._removed.nbytes) if version < 20 else most
    assert len(rows) <= 400
    assert rows.nbytes - rows._removed.nbytes <= most


def test_many_gradients_of_an_id_are_one_row_of_the_sum() -> None:
    ids, values = np.array([5, -2, 5, 5]), torch.arange(8.0).view(4, 2)
    sums = summed(ids, values)
    assert by_id(sums) == {-2: (1, [2.0, 3.0]), 5: (3, [10.0, 13.0])}
    union = RowGradients.union([sums, summed(np.array([9, 5]), torch.ones(2, 2))])
    assert by_id(union) == {-2: (1, [2.0, 3.0]), 5: (4, [11.0, 14.0]), 9: (1, [1.0, 1.0])}
    assert RowGradients.union([sums]) is sums


def by_id(rows: RowGradients) -> dict[int, tuple[int, list[float]]]:
    each = zip(rows.counts.tolist(), rows.gradients.tolist(), strict=True)
    return dict(zip(rows.ids.tolist(), each, strict=True))


@pytest.mark.parametrize(
    "ids",
    [
        np.zeros(0, np.int64),
        np.array([3]),
        np.array([0, -1, 2**63 - 1, -(2**63), 0, -1]),
        np.random.default_rng(1).zipf(1.3, 5_000),
        np.random.default_rng(2).integers(-(2**63), 2**63 - 1, 5_000),
        np.tile(np.arange(100) << 40, 30),
    ],
    ids=["none", "one", "edges", "zipf", "all distinct", "alike in their low bits"],
)
def test_distinct_ids_are_those_of_numpy(ids: Ids) -> None:
    expected, counts = np.unique(ids, return_counts=True)
    each, places, found, _ = distinct(ids)
    assert np.array_equal(each[places], ids)
    order = np.argsort(each)
    assert np.array_equal(each[order], expected)
    assert np.array_equal(found[order], counts)


def test_what_is_saved_is_the_same_however_the_table_came_to_be() -> None:
    one, other = table(), table(capacity=300)
    for version, ids in enumerate(([1, 2, 3], [4, 2], [9, -5]), 1):
        one.apply(gradients(*ids), 1, version)
        other.apply(gradients(*reversed(ids)), 1, version)
    saved = one.snapshot()
    assert sorted(saved) == ["ids", "last", "state.Adagrad.sum", "version", "weights"]
    assert sorted(saved["ids"].tolist()) == [-5, 1, 2, 3, 4, 9]
    again = table()
    again.restore(saved)
    assert (len(again), again.version) == (6, 3)
    for found in (other.snapshot(), again.snapshot()):
        assert all(torch.equal(found[name], saved[name]) for name in saved)
    changed = Table(SPEC, "SGD", {"lr": 0.1, "momentum": 0.9}, 100)
    changed.restore(saved)
    assert torch.equal(changed.snapshot()["weights"], saved["weights"]), "another optimizer begins without a state"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weights": torch.zeros(6, 5)}, r"table 't': expected weights to be \(6, 4\) of torch.float32, got \(6, 5\)"),
        ({"ids": torch.arange(7)}, r"table 't': expected weights to be \(7, 4\) of torch.float32, got \(6, 4\)"),
        ({"ids": torch.zeros(6, dtype=torch.int64)}, r"table 't': expected ids once each, got some twice"),
        ({"last": torch.arange(6) // 5}, r"table 't': expected last to be updates from 1 to 1, got 0 to 1"),
        ({"last": torch.arange(6) // 5 + 1}, r"table 't': expected last to be updates from 1 to 1, got 1 to 2"),
        (
            {"last": torch.zeros(6)},
            r"table 't': expected last to be \(6,\) of torch.int64, got \(6,\) of torch.float32",
        ),
        (
            {"waiting.ids": torch.arange(3)},
            r"table 't': expected waiting.last to be \(3,\) of torch.int64, got nothing",
        ),
        ({"last": None}, r"table 't': expected rows as they were saved, got none of \['last'\]"),
    ],
)
def test_rows_of_another_table_are_refused(change: dict[str, torch.Tensor | None], message: str) -> None:
    full = table()
    full.apply(gradients(*range(6)), 1, 1)
    saved = {name: value for name, value in {**full.snapshot(), **change}.items() if value is not None}
    with pytest.raises(InvalidRequest, match=message):
        table().restore(saved)
    with pytest.raises(InvalidRequest, match="has room for 5 rows, got 6"):
        table(capacity=5).restore(full.snapshot())


def test_of_more_waiting_ids_than_there_is_room_for_the_newest_are_restored() -> None:
    full = table(admit_after=3)
    for version in range(1, 6):
        full.apply(gradients(*range(100 * version, 100 * version + 50)), 1, version)
    small = table(capacity=100, admit_after=3)
    small.restore(full.snapshot())
    assert sorted(small.snapshot()["waiting.ids"].tolist()) == [*range(400, 450), *range(500, 550)]


def test_entries_that_have_expired_stay_so_when_versions_are_counted_anew() -> None:
    entries = Entries(200_000)
    entries.add(np.arange(100_000), 50)
    late = entries.add(np.array([10**6]), 150)
    assert entries.expire(100).tolist() == list(range(100_000))
    entries.use(late, 2**32)
    assert (entries.find(np.arange(100_000)) == -1).all()
    assert entries.entries()[0].tolist() == [10**6]
    for _ in range(10):
        entries.sweep()
    assert len(entries.add(np.arange(100_000, 299_999), 2**32)) == 199_999, "their numbers are free"


def test_versions_beyond_32_bits_are_counted_from_a_later_one_on() -> None:
    entries = Entries(100)
    old = entries.add(np.array([1]), 5)
    recent = entries.add(np.array([2]), 2**32 - 10)
    for version in (2**32 - 1, 2**32, 2**33, 2**33 + 2**31):
        entries.use(recent, version)
        assert entries.versions(recent).tolist() == [version]
        assert entries.find(np.array([1, 2])).tolist() == [old[0], recent[0]], "nothing expires by it"
    assert entries.expire(2**33).tolist() == [1]
    assert entries.find(np.array([1, 2])).tolist() == [-1, recent[0]]
    assert sorted(entries.entries()[0].tolist()) == [2]
