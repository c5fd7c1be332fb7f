"""Between full checkpoints others have only the rows that changed: they restore the same table, or count as damaged."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from ps_protocol.errors import CheckpointDamaged, VersionMismatch
from ps_server.coordinator.checkpoint_policy import CheckpointPolicy
from ps_server.storage import manifest as manifest_module
from ps_server.storage.checkpoints import CheckpointStore
from ps_server.storage.export import export
from ps_server.storage.manifest import FORMAT, WITHOUT_BASES, Manifest
from ps_server.storage.own_disk import take_own_disk
from ps_tables.increments import in_order
from tests.tools.cases import crossed
from tests.tools.one_process import OneProcess
from tests.tools.one_thread import one_thread
from tests.tools.table_worker import Rows, TableWorker, rows_of

RULES = {"admit_after": 2, "expire_after": 40}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., OneProcess]]:
    started: list[OneProcess] = []

    def run(shards: int = 2, keep: int = 3, every: int = 4, restore: bool = False) -> OneProcess:
        """Starts servers on one directory, in place of those before."""
        stop()
        cluster = OneProcess(tmp_path, shards)
        cluster.start_coordinator(CheckpointPolicy(tmp_path, keep=keep, full_every=every, restore=restore))
        started.append(cluster)
        return cluster

    def stop() -> None:
        while started:
            before = started.pop()
            for job in before.coordinator.jobs().values():
                job.end()
            before.stop()

    yield run
    stop()


def filled(cluster: OneProcess, rules: dict[str, int] | None = None) -> TableWorker:
    """A worker whose table has many rows, of which a step trains few."""
    worker = TableWorker(cluster, rules)
    for _ in range(2):
        worker.step(np.arange(400) * 7919 - 300)
    return worker


def part_bytes(directory: Path, manifest: Manifest) -> int:
    return sum((directory / "job" / manifest.name / part.file).stat().st_size for part in manifest.shards.values())


def spoil(directory: Path, name: str, shard: int = 0) -> None:
    """Turns a bit in the last row of a file."""
    path = directory / "job" / name / f"shard-{shard}.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def chain(manifest: Manifest, shard: int = 0) -> list[str]:
    return [stored.checkpoint for stored in manifest.bases.get(shard, ())]


def test_only_what_changed_is_written_until_the_next_full_one(start: Callable[..., OneProcess], tmp_path: Path) -> None:
    worker, made, sizes = filled(start(every=4)), list[Manifest](), []
    for _ in range(9):
        worker.steps(2)
        made.append(worker.checkpoint())
        sizes.append(part_bytes(tmp_path, made[-1]))
    names = [manifest.name for manifest in made]
    assert [chain(manifest) for manifest in made] == [
        *([], names[:1], names[:2], names[:3]),
        *([], names[4:5], names[4:6], names[4:7]),
        [],
    ]
    full, increments = sizes[::4], [size for number, size in enumerate(sizes) if number % 4]
    assert max(increments) < min(full) / 3
    assert all(manifest.bases.keys() in (set(), {0, 1}) for manifest in made)


def test_without_training_in_between_nothing_is_written_of_tables(start: Callable[..., OneProcess]) -> None:
    worker = filled(start(shards=1))
    worker.checkpoint()
    second = worker.checkpoint()
    assert chain(second)
    assert second.bytes < 3000


def test_where_much_has_changed_all_is_written(start: Callable[..., OneProcess]) -> None:
    worker = filled(start(shards=1, every=100))
    made = [worker.checkpoint()]
    for count in (150, 150, 150, 150, 250):
        worker.step(np.arange(count) * 7919 - 300)
        made.append(worker.checkpoint())
    why = "of 400 rows: three times 150 are more than all, and 250 at once more than half"
    assert [len(chain(manifest)) for manifest in made] == [0, 1, 2, 0, 1, 0], why


@pytest.mark.parametrize("every", [1, 0])
def test_a_setting_turns_increments_off(start: Callable[..., OneProcess], every: int) -> None:
    worker = filled(start(every=every))
    assert [chain(worker.checkpoint()) for _ in range(3)] == [[], [], []]


@pytest.mark.parametrize(
    ("shards", "rules"),
    crossed([1, 2, 3], [RULES, {}]),
    ids=lambda value: ("rules" if value else "plain") if isinstance(value, dict) else None,
)
def test_a_restore_on_any_number_of_shards_has_the_same_table(
    start: Callable[..., OneProcess], tmp_path: Path, shards: int, rules: dict[str, int]
) -> None:
    """And it goes on alike: counts of what waits, versions and state are there."""
    worker = filled(start(), rules)
    for _ in range(4):
        worker.steps(5)
        last = worker.checkpoint()
    assert len(chain(last)) == 3
    then, clock = worker.rows(), worker.clock
    worker.steps(25)
    expected = worker.rows()
    again = TableWorker(start(shards, restore=True), rules)
    assert again.rows() == then
    assert again.clock == clock
    export(tmp_path, "job", None, tmp_path / "out")
    exported = load_file(tmp_path / "out" / "tables" / "t.safetensors")
    assert rows_of(exported) == then
    assert torch.equal(exported["ids"], in_order(exported)["ids"])
    again.steps(25)
    if not rules or shards == 2:  # elsewhere updates are of other parts, and so count other times of expiry
        assert again.rows() == expected


def test_a_shard_that_died_between_two_checkpoints_goes_on_from_an_increment(
    start: Callable[..., OneProcess],
) -> None:
    """The shard knows nothing of what it wrote before, and writes all rows again. The other one does not."""
    cluster = start(every=100)
    worker = filled(cluster, RULES)
    for _ in range(3):
        worker.steps(5)
        last = worker.checkpoint()
    assert len(chain(last)) == 2
    then = [rows_of(each.jobs()["job"].partition.tables[0].weights.snapshot()) for each in cluster.shards.values()]
    worker.steps(3)
    cluster.start_shard(1)
    cluster.coordinator.recover_jobs()
    assert rows_of(cluster.shards[1].jobs()["job"].partition.tables[0].weights.snapshot()) == then[1]
    worker.rejoin()
    worker.steps(2)
    after = worker.checkpoint()
    assert (len(chain(after, 0)), len(chain(after, 1))) == (3, 0)
    expected = worker.rows()
    assert TableWorker(start(restore=True), RULES).rows() == expected


@pytest.mark.parametrize("damaged", ["its own file", "a file in between", "the full one", "the full one is missing"])
def test_a_damaged_base_makes_a_checkpoint_damaged_and_the_one_before_is_taken(
    start: Callable[..., OneProcess], tmp_path: Path, damaged: str, caplog: pytest.LogCaptureFixture
) -> None:
    worker, rows = filled(start(keep=2, every=3)), dict[str, Rows]()
    for _ in range(6):
        worker.steps(4)
        rows[worker.checkpoint().name] = worker.rows()
    names = list(rows)
    place = {"its own file": 5, "a file in between": 4}.get(damaged, 3)
    if "missing" in damaged:
        (tmp_path / "job" / names[3] / "shard-1.safetensors").unlink()
    else:
        spoil(tmp_path, names[place], 1)
    cluster = start(restore=True)
    expected = names[place - 1]  # of the chain before, where no file of the last one is any good
    assert TableWorker(cluster).rows() == rows[expected]
    assert caplog.text.count("cannot be used, trying the one before") == 6 - place
    told: list[str] = []
    assert f"checkpoint {expected} " in export(tmp_path, "job", None, tmp_path / "last", on_skipped=told.append)
    assert len(told) == 6 - place
    assert all(line in caplog.text for line in told), "an export falls back as a restore does, and says the same"
    assert rows_of(load_file(tmp_path / "last" / "tables" / "t.safetensors")) == rows[expected]
    with pytest.raises(CheckpointDamaged):
        export(tmp_path, "job", names[5], tmp_path / "out")


def test_no_file_is_removed_that_a_kept_checkpoint_needs(start: Callable[..., OneProcess], tmp_path: Path) -> None:
    worker, store = filled(start(keep=2, every=4)), CheckpointStore(tmp_path)
    for number in range(1, 13):
        worker.steps(2)
        worker.checkpoint()
        there = store.names("job")
        for name in there[-2:]:
            manifest = store.manifest("job", name)
            store.read_files("job", store.files("job", manifest, (), manifest.shards), rows={0: []})
        first = (number - 1) // 4 * 4 + 1  # the full one of the last chain
        # Those of the chain before: its last one has no file in common with any of this chain.
        expected = set(range(max(1, first - 4), number + 1))
        assert {int(name) for name in there} == expected
        assert {path.name for path in (tmp_path / "job").iterdir()} == set(there)


def test_where_one_is_kept_the_chain_before_goes(start: Callable[..., OneProcess], tmp_path: Path) -> None:
    worker, store = filled(start(keep=1, every=3)), CheckpointStore(tmp_path)
    found = []
    for _ in range(7):
        worker.steps(2)
        worker.checkpoint()
        found.append([int(name) for name in store.names("job")])
    assert found == [[1], [1, 2], [1, 2, 3], [4], [4, 5], [4, 5, 6], [7]]


def test_nothing_is_removed_where_it_is_not_known_what_the_newest_builds_on(
    start: Callable[..., OneProcess], tmp_path: Path
) -> None:
    """Its manifest was not to be read for a moment: the disk reported an error."""
    worker, store = filled(start(keep=1, every=3)), CheckpointStore(tmp_path)
    for _ in range(2):
        worker.steps(2)
        worker.checkpoint()
    there = store.names("job")
    assert len(there) == 2
    manifest = tmp_path / "job" / there[-1] / "manifest.json"
    whole = manifest.read_bytes()
    manifest.write_bytes(whole[:-20])
    store.prune("job", 1)
    assert store.names("job") == there
    manifest.write_bytes(whole)
    store.read_files("job", store.files("job", store.manifest("job", there[-1]), (), [0, 1]), rows={0: []})
    store.prune("job", 1)
    assert store.names("job") == there, "the newest builds on the other"


def test_an_older_version_reads_a_full_one_and_refuses_the_others_in_words(
    start: Callable[..., OneProcess], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = filled(start())
    names = [worker.checkpoint().name for _ in range(2)]
    store = CheckpointStore(tmp_path)
    assert [store.manifest("job", name).format for name in names] == [WITHOUT_BASES, FORMAT]
    assert "bases" not in (tmp_path / "job" / names[0] / "manifest.json").read_text()
    monkeypatch.setattr(manifest_module, "FORMAT", WITHOUT_BASES)
    store.manifest("job", names[0])
    with pytest.raises(VersionMismatch, match=f"a newer version of ps-torch .format {FORMAT}.*: upgrade"):
        store.manifest("job", names[1])


def test_a_base_that_was_removed_is_not_built_on(start: Callable[..., OneProcess], tmp_path: Path) -> None:
    worker = filled(start())
    CheckpointStore(tmp_path).discard("job", worker.checkpoint().name)
    worker.steps(1)
    assert chain(worker.checkpoint()) == []


def test_an_attempt_that_failed_is_not_built_on(
    start: Callable[..., OneProcess], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it has written is of no checkpoint: the next one has what changed since the last complete one."""
    cluster = start()
    worker = filled(cluster)
    first = worker.checkpoint()
    worker.steps(3)
    with monkeypatch.context() as patch:
        patch.setattr(CheckpointStore, "commit", lambda *_: (_ for _ in ()).throw(CheckpointDamaged("the disk fails")))
        with pytest.raises(CheckpointDamaged):
            worker.checkpoint()
    worker.steps(3)
    assert chain(worker.checkpoint()) == [first.name]
    expected = worker.rows()
    assert TableWorker(start(restore=True)).rows() == expected


def test_on_a_disk_of_the_shards_own(start: Callable[..., OneProcess], tmp_path: Path) -> None:
    cluster = start(shards=1, keep=1, every=3)
    disk, release = take_own_disk(tmp_path, 0, "here", 0.0)
    cluster._store = CheckpointStore(tmp_path, own_disk=disk)
    cluster.start_shard(0)
    worker, own = filled(cluster), tmp_path / ".shard-0" / "job"
    for number in range(1, 6):
        worker.steps(2)
        last = worker.checkpoint()
        assert {stored.part.disk for stored in last.bases.get(0, ())} <= {disk}
        needed = {*chain(last), last.name}
        assert {path.name for path in own.iterdir()} >= needed
        if number == 5:  # the parts of the chain before went with the one after it
            assert {path.name for path in own.iterdir()} == needed
    then = worker.rows()
    assert len(chain(last)) == 1
    cluster.start_shard(0)
    cluster.coordinator.recover_jobs()
    assert worker.rows() == then
    release()
