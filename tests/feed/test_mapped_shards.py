"""Readers on a shard's host map its editions: the twin of test_mapped.py, which has a relay between them."""

from __future__ import annotations

import contextlib
import errno
import gc
import mmap
import os
import re
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import ps_torch as ps
from ps_feed.mapping import HandedOver
from ps_protocol.errors import Forbidden, TryLater
from ps_protocol.handover import MOST_FILES
from ps_protocol.identity import Identity
from ps_protocol.layout import BucketSpec
from ps_protocol.messages.data import PushCall, PushedBucket, PushKind
from ps_protocol.messages.editions import EditionBucket, EditionMessage
from ps_protocol.tensors import bytes_of, tensor_from
from ps_runtime.memory_files import SharedFile, WrittenFile
from ps_server.core.limits import Limits
from ps_server.ops import requests, status_text
from ps_server.shard import mapped
from ps_server.shard.copied_buckets import CopiedBucket, EditionMemories
from ps_server.shard.editions import KEPT_SECONDS
from ps_server.shard.mapped import MappedFiles, NewFiles
from ps_server.shard.shard import Shard
from ps_worker.cluster import coordinator_calls
from tests.tools.cluster import Cluster, until
from tests.tools.feeding import BUCKETS, CELLS, Feeding, Reader, assert_sealed
from tests.tools.followed_trainer import FollowedModel, FollowedTrainer
from tests.tools.forkserver import Nursery, address_in

SECRET = "0123456789abcdef" * 2


def payload_bytes(feed: ps.WeightFeed) -> int:
    return feed._subscription.received.nbytes


def mapped_of(shard: Shard, job: str, wire: str = "float32") -> MappedFiles:
    return shard.weight_feeds._mapped[job, wire]


def inodes_of(shard: Shard, job: str) -> set[int]:
    """The inodes of the memory files in which a job's editions lie."""
    kept = shard.jobs()[job].editions._kept
    places = {each.lies for edition in kept for each in edition._copied.values() if each.lies is not None}
    return {os.fstat(place.file.memory.descriptor).st_ino for place in places}


def inode_of(values: Any) -> int:
    """The inode of the file that is mapped where an array lies."""
    address = values.__array_interface__["data"][0]
    for line in Path("/proc/self/maps").read_text().splitlines():
        where, _, _, _, inode, *_ = line.split()
        first, last = (int(each, 16) for each in where.split("-"))
        if first <= address < last:
            return int(inode)
    raise AssertionError("it is mapped nowhere")


# -- a cluster ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wire", ["bfloat16", "float32"])
def test_a_reader_on_the_host_has_the_shards_memory_and_receives_no_payload(
    alone: Cluster, job: str, trained: FollowedTrainer, here: Path, wire: str
) -> None:
    before = set(here.iterdir())  # the worker's
    with ps.subscribe(alone.address, job, wire=wire, changes=True) as feed:
        for _ in range(3):
            last = trained.step()
            edition = feed.wait_for(last)
            assert trained.has(edition.state_dict(), last, getattr(torch, wire))
            assert inode_of(edition.arrays.spaces["float32"]) in inodes_of(alone.shards[0], job)
        assert payload_bytes(feed) == 0
    assert set(here.iterdir()) <= before, "no socket is left"


@pytest.mark.parametrize("mode", ["sync", "async", "ssp:2"])
def test_what_lies_on_several_shards_is_put_together_without_payloads(
    shared: Cluster, job: str, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PS_SHARED_DIRECTORY", raising=False)
    with shared.connect(mode, job=job) as session, ps.subscribe(shared.address, job, wire="bfloat16") as feed:
        trainer = FollowedTrainer(session)
        for _ in range(3):
            last = trainer.step()
            assert trainer.has(feed.wait_for(last).state_dict(), last, torch.bfloat16)
        assert payload_bytes(feed) == 0


def test_a_reader_of_a_part_maps_that_alone(alone: Cluster, job: str, trained: FollowedTrainer, here: Path) -> None:
    with ps.subscribe(alone.address, job, parameters=["last.weight"]) as feed:
        last = trained.step()
        assert torch.equal(feed.wait_for(last).tensor("last.weight"), trained.past[last]["last.weight"])
        assert payload_bytes(feed) == 0
        held = mapped_of(alone.shards[0], job).held_bytes()
        assert held <= 2 * sum(each.numel() * 4 for each in trained.past[last].values())


def test_the_last_weights_and_buffers_come_as_they_are_at_the_end(
    alone: Cluster, job: str, trained: FollowedTrainer, here: Path
) -> None:
    with ps.subscribe(alone.address, job) as feed:
        feed.wait_for(trained.steps(2))
        trained.session.unwrap(trained.model).scale.fill_(5.0)
        trained.session.close()
        until(lambda: feed.ended, "the end")
        edition = feed.wait_for()
        assert edition.tensor("scale").tolist() == [5.0] * 3
        assert torch.equal(edition.tensor("first.weight"), trained.past[edition.version]["first.weight"])


def test_where_the_shard_has_no_such_directory_editions_come_in_messages(
    alone: Cluster, job: str, trained: FollowedTrainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for directory in (tmp_path, tmp_path / "nowhere"):
        monkeypatch.setenv("PS_SHARED_DIRECTORY", str(directory))
        with ps.subscribe(alone.address, job) as feed:
            last = trained.step()
            assert trained.has(feed.wait_for(last).state_dict(), last)
            assert payload_bytes(feed) > 0


def test_slow_readers_hold_a_bounded_part_of_the_shards_memory_and_the_others_get_messages(
    alone: Cluster, job: str, trained: FollowedTrainer, here: Path
) -> None:
    slow: list[Any] = []  # editions that readers do not give back

    def read() -> int:
        """A reader that gets the newest edition, and stays with it. Returns how many bytes came in messages."""
        with ps.subscribe(alone.address, job) as feed:
            edition = feed.wait_for(trained.session.clock)
            slow.append(edition)
            assert trained.has(edition.state_dict(), edition.version)
            return payload_bytes(feed)

    came = []
    for _ in range(mapped.MOST_HELD + 3):
        came.append(read() > 0)
        trained.step()
    assert came == [False] * (mapped.MOST_HELD + 1) + [True] * 2
    held = mapped_of(alone.shards[0], job)
    said = rf"{mapped.MOST_HELD + 1} readers with its memory mapped, .* more that readers keep mapped, "
    until(lambda: re.search(said, status_text.table(requests.fetch(alone.address))), "what readers keep")
    assert all(trained.has(each.state_dict(), each.version) for each in slow)
    slow.clear()
    gc.collect()
    until(lambda: held.look() or held.held_bytes() == 0, "the shard to notice")
    assert read() == 0


# Without torch, whose import takes seconds.
READER = """
import os, pathlib, sys
from ps_feed.subscription import Subscription
directory = pathlib.Path(os.environ["PS_SHARED_DIRECTORY"])
with Subscription(sys.argv[1], sys.argv[2], shared_directory=directory) as feed:
    feed.wait()
    print(feed.received.nbytes, flush=True)
    sys.stdin.read()
"""


def test_a_reader_that_is_killed_while_it_maps_gives_its_memory_back(
    alone: Cluster, job: str, trained: FollowedTrainer, here: Path
) -> None:
    words = [sys.executable, "-c", READER, alone.address, job]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as reader:
        assert reader.stdout is not None
        assert reader.stdout.readline() == "0\n"
        held = mapped_of(alone.shards[0], job)
        held.look()
        assert held.held_bytes() > 0
        reader.kill()
    until(lambda: held.look() or held.held_bytes() == 0, "the shard to notice")
    trained.steps(2)
    with ps.subscribe(alone.address, job) as feed:
        assert trained.has(feed.wait_for(2).state_dict(), 2)
        assert payload_bytes(feed) == 0


def test_a_shard_that_is_killed_takes_nothing_from_a_reader_that_has_mapped_its_memory(
    job: str, here: Path, tmp_path: Path, nursery: Nursery, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coordinator_calls, "LEAVE_SECONDS", 0.1)  # nobody hears of it
    words = ("shard", "--with-coordinator", "--shards=1", "--index=0", "--port=0", "--metrics-port=0")
    server = nursery.serve([*words, f"--shared-directory={here}"], tmp_path / "log")
    try:
        address = address_in(tmp_path / "log")
        with ps.subscribe(address, job) as feed, contextlib.suppress(ps.PSError):
            session = ps.connect(address, "sync", job=job)
            trainer = FollowedTrainer(session)
            model = feed.load(FollowedModel())
            feed.wait_for(trainer.steps(2))
            with feed.reading(model) as version:
                server.kill()
                until(lambda: feed.trouble is not None, "the reader to notice")
                assert trainer.has(dict(model.state_dict()), version)
            assert payload_bytes(feed) == 0
            session.close()
    finally:
        server.kill()


def test_who_may_not_read_a_job_is_handed_nothing(job: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PS_SHARED_DIRECTORY", str(tmp_path))
    tokens, words = tmp_path / "tokens", {"cluster": "cluster", "reader": "reader:other", "worker": "worker"}
    for name in words:
        (tmp_path / name).write_text(SECRET + name)
    tokens.write_text("".join(f"{role} {SECRET}{name}\n" for name, role in words.items()))
    for each in tmp_path.iterdir():
        each.chmod(0o600)
    seen: list[Any] = []
    monkeypatch.setattr(MappedFiles, "sees", lambda *arguments: seen.append(arguments))
    cluster = Cluster(1, tokens=tokens, shared_directory=tmp_path)
    try:
        with cluster.connect("sync", job=job, token_file=str(tmp_path / "worker")) as session:
            FollowedTrainer(session)
            with (
                ps.subscribe(cluster.address, job, token_file=str(tmp_path / "reader")) as feed,
                pytest.raises(Forbidden),
            ):
                feed.wait_for()
    finally:
        cluster.stop()
    assert seen == []


# -- one shard, by hand ------------------------------------------------------------------------------------------------


@pytest.fixture
def begun(tmp_path: Path) -> Iterator[Callable[..., Feeding]]:
    """Makes shards with initial weights, whose readers wait in the test's directory."""
    made: list[Feeding] = []

    def make(mode: str = "sync") -> Feeding:
        made.append(Feeding(mode, directory=tmp_path).begin())
        return made[-1]

    yield make
    for each in made:
        each.shard.weight_feeds.stop()


def handed(reader: Reader, waiting: HandedOver, dtype: str = "float32") -> list[float]:
    """Takes an edition of which nothing comes in messages; the cells."""
    cells: list[float] = []
    for bucket in reader.buckets():
        assert (bucket.payload, bucket.lies is not None) == (b"", True)
        cells += tensor_from(memory_of(bucket, waiting, dtype), dtype).float().tolist()
    return cells


def memory_of(bucket: EditionBucket, waiting: HandedOver, dtype: str = "float32") -> memoryview:
    assert bucket.lies is not None
    size = CELLS // BUCKETS * torch.empty(0, dtype=getattr(torch, dtype)).itemsize
    content = waiting.file(bucket.lies.file, 2**20)
    return content[bucket.lies.offset : bucket.lies.offset + size].data


@pytest.mark.parametrize("mode", ["sync", "async", "ssp:1"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_edition_lies_in_a_file_that_nobody_can_change(
    begun: Callable[..., Feeding], tmp_path: Path, mode: str, dtype: str
) -> None:
    feeding = begun(mode)
    feeding.step()
    with HandedOver(tmp_path) as waiting:
        assert handed(feeding.pull(1, dtype, offer=waiting.offer), waiting, dtype) == [1.0] * CELLS
        feeding.step()
        [edition] = feeding.shard.jobs()["job"].editions._kept
        [memory] = {each.lies.file.memory for each in edition._copied.values() if each.lies is not None}
        assert memory.size == CELLS * torch.empty(0, dtype=getattr(torch, dtype)).itemsize
        assert_sealed(memory.descriptor)


def test_readers_elsewhere_get_the_same_edition_in_messages(begun: Callable[..., Feeding], tmp_path: Path) -> None:
    feeding = begun()
    with HandedOver(tmp_path) as waiting:
        near, far = feeding.pull(1, offer=waiting.offer), feeding.pull(1)
        feeding.step()
        feeding.step()
        assert handed(near, waiting) == [1.0] * CELLS
        assert far.edition() == (1, [1.0] * CELLS)
        assert feeding.shard.jobs()["job"].editions.nbytes == CELLS * 4, "there is one copy"


def test_what_was_copied_before_a_reader_of_the_host_came_is_sent_and_the_next_is_handed_over(
    begun: Callable[..., Feeding], tmp_path: Path
) -> None:
    feeding = begun()
    assert feeding.pull(0).edition() == (0, [0.0] * CELLS)
    with HandedOver(tmp_path) as waiting:
        assert feeding.pull(0, offer=waiting.offer).edition() == (0, [0.0] * CELLS)
        feeding.step()
        assert handed(feeding.pull(1, offer=waiting.offer), waiting) == [1.0] * CELLS


def test_readers_of_other_parts_of_an_edition_get_files_of_their_own(
    begun: Callable[..., Feeding], tmp_path: Path
) -> None:
    feeding = begun()
    with HandedOver(tmp_path) as first, HandedOver(tmp_path) as second:
        part = feeding.pull(1, buckets=(1, 2), offer=first.offer)
        whole = feeding.pull(1, offer=second.offer)
        feeding.step()
        assert handed(part, first) == [1.0] * (CELLS // 2)
        assert {each.size for each in first._files.values()} == {CELLS // 2 * 4}
        assert handed(whole, second) == [1.0] * CELLS
        assert len(second._files) == 2


def test_what_another_reader_still_waits_for_in_a_file_is_not_handed_over(
    begun: Callable[..., Feeding], tmp_path: Path
) -> None:
    """It is sealed when it is complete: nothing could be added to it then."""
    feeding = begun()
    with HandedOver(tmp_path) as first, HandedOver(tmp_path) as second:
        whole = feeding.pull(1, offer=first.offer)
        part = feeding.pull(1, buckets=(0,), offer=second.offer)
        feeding.step(range(2))
        [bucket] = part.buckets()
        assert (bucket.lies, tensor_from(bucket.payload, "float32").tolist()) == (None, [1.0] * 16)
        feeding.step(range(2, 4))
        assert handed(whole, first) == [1.0] * CELLS


def test_a_reader_that_left_early_keeps_nobody_from_the_edition(begun: Callable[..., Feeding], tmp_path: Path) -> None:
    feeding = begun()
    with HandedOver(tmp_path) as first, HandedOver(tmp_path) as second:
        whole, part = feeding.pull(1, offer=first.offer), feeding.pull(1, buckets=(0,), offer=second.offer)
        whole.close()
        feeding.step()
        [bucket] = part.buckets()
        assert tensor_from(bucket.payload, "float32").tolist() == [1.0] * 16, "its file will never be complete"
        feeding.step()
        assert handed(feeding.pull(2, offer=first.offer), first) == [2.0] * CELLS


def test_where_a_file_gets_no_memory_the_edition_is_sent_and_the_log_says_why(
    begun: Callable[..., Feeding], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*arguments: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    feeding = begun()
    with HandedOver(tmp_path) as waiting, monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        assert feeding.pull(0, offer=waiting.offer).edition() == (0, [0.0] * CELLS)
    assert [each.message for each in caplog.records] == [
        "readers of this host get editions in messages, and not as memory: a memory file cannot be filled "
        "(No space left on device)"
    ]


def test_an_edition_that_was_handed_over_is_no_longer_kept_than_others(
    begun: Callable[..., Feeding], tmp_path: Path
) -> None:
    feeding = begun()
    with HandedOver(tmp_path) as waiting:
        handed(feeding.pull(0, offer=waiting.offer), waiting)
        [content] = waiting._files.values()
    held = mapped_of(feeding.shard, "job")
    feeding.pass_time(KEPT_SECONDS + 1)
    assert feeding.shard.jobs()["job"].editions.nbytes == 0
    assert held.held_bytes() == CELLS * 4, "the reader has it"
    feeding.shard.drop_job("job")
    feeding.pass_time(1)
    assert mapped_of(feeding.shard, "job") is held, "it counts after the end of the job, too"
    assert content.view("float32").tolist() == [0.0] * CELLS
    del content
    feeding.pass_time(1)
    assert not feeding.shard.weight_feeds._mapped


@pytest.mark.parametrize("part_bytes", [0, 16])
def test_an_edition_that_is_given_up_leaves_no_file_to_a_reader_that_is_stuck_in_a_message(
    begun: Callable[..., Feeding], tmp_path: Path, part_bytes: int
) -> None:
    feeding = begun()
    with HandedOver(tmp_path) as waiting:
        near, stuck = feeding.pull(1, offer=waiting.offer), feeding.pull(1, part_bytes=part_bytes)
        feeding.step()
        handed(near, waiting)
        waiting._files.clear()
    assert stuck.take().begin is not None
    [edition] = feeding.shard.jobs()["job"].editions._kept
    [memory] = {weakref.ref(each.lies.file.memory) for each in edition._copied.values() if each.lies is not None}
    with stuck.queued.popleft()() as (message, _):  # it does not leave
        assert isinstance(message, EditionMessage)
        assert message.bucket is not None
        assert bytes(message.bucket.payload) == bytes_of(torch.ones(16)).tobytes()[: part_bytes or None]
        edition.fail(TryLater("given up"))
        gc.collect()
        assert memory() is None
    while stuck.queued:
        stuck.take()
    assert str(stuck.error) == "given up"
    assert not stuck.is_finished, "it would look whole"


def test_what_comes_in_parts_from_a_file_is_complete(begun: Callable[..., Feeding], tmp_path: Path) -> None:
    feeding = begun()
    with HandedOver(tmp_path) as waiting:
        near, far = feeding.pull(1, offer=waiting.offer), feeding.pull(1, part_bytes=24)
        feeding.step()
        handed(near, waiting)
    assert far.take().begin is not None
    parts = [far.take() for _ in range(BUCKETS * 3)]
    came = b"".join(bytes(part.bucket.payload if part.bucket else part.more or b"") for part in parts)
    assert came == bytes_of(torch.ones(CELLS)).tobytes()
    assert far.is_finished


def test_what_is_handed_over_has_the_version_of_its_bytes_where_a_newer_one_is_copied_meanwhile(
    begun: Callable[..., Feeding], tmp_path: Path
) -> None:
    """Of a bucket that no optimizer steps rank 0 may tell something newer before a reader has heard of all of it."""
    feeding = begun()
    with HandedOver(tmp_path) as waiting:
        reader = feeding.pull(0, offer=waiting.offer)
        assert reader.take().begin is not None
        [edition] = feeding.shard.jobs()["job"].editions._kept
        for piece, copied in list(edition._copied.items()):
            newer = CopiedBucket(feeding.shard.jobs()["job"].buckets[piece[0]].unit, "float32")
            newer.version = copied.version + 7
            edition._copied[piece] = newer
        for _ in range(BUCKETS):
            bucket = reader.take().bucket
            assert bucket is not None
            assert (bucket.version, bucket.lies is not None) == (0, True)


@pytest.mark.parametrize("spaces", [MOST_FILES, MOST_FILES + 1])
def test_an_edition_of_more_spaces_than_a_shard_hands_over_lies_in_no_files(spaces: int) -> None:
    made: list[int] = []

    def make(size: int) -> WrittenFile:
        made.append(size)
        return WrittenFile(size)

    def spec(index: int) -> BucketSpec:
        return BucketSpec(index, f"space {index}", "float32", False, 0, 4, ())

    files = EditionMemories(spec, NewFiles(make))
    files.add({(index, "float32") for index in range(spaces)})
    assert made == ([16] * spaces if spaces <= MOST_FILES else [])


def test_readers_of_ever_other_parts_make_no_more_files_than_an_edition_may_have() -> None:
    made: list[WrittenFile] = []

    def make(size: int) -> WrittenFile:
        made.append(WrittenFile(size))
        return made[-1]

    files = EditionMemories(
        lambda index: BucketSpec(index, "float32", "float32", False, 4 * index, 4, ()), NewFiles(make)
    )
    for index in range(MOST_FILES + 5):
        files.add({(index, "float32")})
    assert len(made) == MOST_FILES
    assert files.place((MOST_FILES - 1, "float32")) is not None
    assert files.place((MOST_FILES, "float32")) is None


def test_a_server_may_open_the_files_of_its_editions_beside_its_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted: list[int] = []
    monkeypatch.setattr("ps_server.server.allow_many_files", wanted.append)
    Cluster(1).stop()
    assert min(wanted) == Limits().connections + mapped.MOST_READERS + 4 * MOST_FILES


class Handed(NamedTuple):
    """An edition that lies in memory files, by their names."""

    files: dict[str, SharedFile]


def file_of(pages: int) -> SharedFile:
    file = WrittenFile(pages * mmap.PAGESIZE)
    file.seal()
    return file


def taken(held: MappedFiles, directory: Path, edition: Handed, *names: str) -> list[Any] | None:
    """What a new reader maps of an edition; None: it gets messages."""
    with HandedOver(directory) as waiting:
        numbers = held.hand_over(waiting.offer, edition, names)
        return numbers and [waiting.file(number, edition.files[name].size) for name, number in numbers.items()]


def test_a_reader_that_keeps_what_never_changes_goes_on_mapping_the_rest(tmp_path: Path) -> None:
    held = MappedFiles(tmp_path)
    kept = [taken(held, tmp_path, Handed({"frozen": file_of(10), "trained": file_of(1)}), "frozen", "trained")]
    kept += [taken(held, tmp_path, Handed({"trained": file_of(1)}), "trained") for _ in range(mapped.MOST_HELD)]
    assert None not in kept
    held.close()


def test_readers_of_one_type_hold_a_part_that_is_bound_by_what_they_are_handed(tmp_path: Path) -> None:
    """An edition has what readers want in all types; each type counts by itself."""
    held = MappedFiles(tmp_path)
    readers = [
        taken(held, tmp_path, Handed({"bfloat16": file_of(1), "float32": file_of(20)}), "bfloat16")
        for _ in range(mapped.MOST_HELD + 3)
    ]
    assert [each is None for each in readers] == [False] * (mapped.MOST_HELD + 1) + [True] * 2
    held.close()


def test_a_shard_that_may_not_look_where_readers_wait_sends_messages(tmp_path: Path) -> None:
    feeding = Feeding(directory=tmp_path / ("x" * 300)).begin()  # what is there cannot be asked for
    with HandedOver(tmp_path) as waiting:
        assert feeding.pull(0, offer=waiting.offer).edition() == (0, [0.0] * CELLS)


def test_editions_lie_in_files_only_as_long_as_a_reader_of_the_host_follows(
    begun: Callable[..., Feeding], tmp_path: Path
) -> None:
    feeding = begun()
    with HandedOver(tmp_path) as waiting:
        handed(feeding.pull(0, offer=waiting.offer), waiting)
        waiting._files.clear()
    gc.collect()
    for expected in (True, False):
        feeding.pass_time(KEPT_SECONDS - 1)
        feeding.step()
        assert feeding.pull(feeding.clock).edition() == (feeding.clock, [float(feeding.clock)] * CELLS)
        [*_, newest] = feeding.shard.jobs()["job"].editions._kept
        assert all((each.lies is not None) == expected for each in newest._copied.values())


def test_what_is_converted_piece_by_piece_has_the_same_bits(
    begun: Callable[..., Feeding], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ps_server.shard.copied_buckets._CONVERTED_BYTES", 10)
    feeding = begun()
    torch.manual_seed(2)
    gradient = torch.randn(CELLS)
    pushed = tuple(PushedBucket(index, PushKind.GRADIENT) for index in range(BUCKETS))
    feeding.shard.push(PushCall(Identity("job", 0, 1), 1, pushed, bytes_of(gradient)))
    values = torch.cat([each.unit.weights.flat for each in feeding.shard.jobs()["job"].buckets.values()])
    assert len(set(values.tolist())) == CELLS
    with HandedOver(tmp_path) as waiting:
        cells = handed(feeding.pull(1, "bfloat16", offer=waiting.offer), waiting, "bfloat16")
    assert torch.equal(torch.tensor(cells), values.bfloat16().float())
