"""Readers on a relay's host map its editions. What they have does not change, whatever becomes of the relay."""

from __future__ import annotations

import contextlib
import errno
import gc
import mmap
import os
import re
import signal
import socket
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ps_torch as ps
from ps_feed.edition import Arriving, Contents, Damaged
from ps_feed.mapping import HandedOver, Handover
from ps_protocol.errors import Forbidden, NotShared, TryLater
from ps_protocol.handover import MOST_FILES, SOCKET_PREFIX, MappingOffer
from ps_protocol.layout import ParameterSpec, PiecePlace
from ps_protocol.messages.editions import BucketOffset, EditionBucket
from ps_runtime import memory_files
from ps_runtime.local_sockets import listen, reach
from ps_runtime.memory_files import MemoryFile
from ps_server.config import ServerConfig
from ps_server.ops import requests, status_text
from ps_server.relay import relayed
from ps_server.relay.room import EditionRoom
from ps_server.shard import mapped
from ps_server.shard.mapped import MappedFiles
from tests.tools.cluster import Cluster, scrape, until
from tests.tools.feeding import assert_sealed
from tests.tools.followed_trainer import FollowedModel, FollowedTrainer, relay
from tests.tools.launching import Commands
from tests.tools.raw_worker import vector_job

SECRET = "0123456789abcdef" * 2


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory that readers and relays of this host have in common."""
    monkeypatch.setenv("PS_SHARED_DIRECTORY", str(tmp_path))
    return tmp_path


def received(feed: ps.WeightFeed) -> tuple[int, int]:
    """The editions of a feed, and the bytes of payloads that they came in."""
    return feed._subscription.received.editions, feed._subscription.received.nbytes


def sealed(size: int, value: int = 0) -> MemoryFile:
    file = MemoryFile(size)
    file.fill()[:] = value
    file.seal()
    return file


@pytest.mark.parametrize("wire", ["bfloat16", "float32"])
def test_a_reader_on_the_host_has_the_relays_memory_and_receives_no_payload(
    shared: Cluster, job: str, trainer: FollowedTrainer, here: Path, wire: str
) -> None:
    with relay(shared.address, maps=here) as near, ps.subscribe(near.address, job, wire=wire, changes=True) as feed:
        for _ in range(3):
            last = trainer.step()
            edition = feed.wait_for(last)
            assert trainer.has(edition.state_dict(), last, getattr(torch, wire))
        editions, payloads = received(feed)
        assert (editions >= 3, payloads) == (True, 0)
        [followed] = near.relayed.followed()
        assert (followed.sent_bytes, followed.sent_elements > 0) == (0, True)
        kept = followed.newest
        assert kept is not None
        for space, values in edition.arrays.spaces.items():
            file = kept.arrays.files[space]
            assert inode_of(values) == os.fstat(file.descriptor).st_ino
    assert list(here.iterdir()) == [], "no socket is left"


def inode_of(values: np.ndarray[Any, Any]) -> int:
    """The inode of the file that is mapped where an array lies."""
    address = values.__array_interface__["data"][0]
    for line in Path("/proc/self/maps").read_text().splitlines():
        where, _, _, _, inode, *_ = line.split()
        first, last = (int(each, 16) for each in where.split("-"))
        if first <= address < last:
            return int(inode)
    raise AssertionError("it is mapped nowhere")


def test_nobody_can_change_what_is_handed_over(shared: Cluster, job: str, trainer: FollowedTrainer, here: Path) -> None:
    with relay(shared.address, maps=here) as near, ps.subscribe(near.address, job) as feed:
        edition = feed.wait_for()
        kept = near.relayed.followed()[0].newest
        assert kept is not None
        for file in kept.arrays.files.values():
            assert_sealed(file.descriptor)
        with ps.subscribe(near.address, job) as other:
            others = other.wait_for()
            weight = edition.tensor("first.weight")
            with torch.no_grad():
                weight.add_(1.0)  # although it must not
            assert not torch.equal(weight, others.tensor("first.weight"))
            assert trainer.has(others.state_dict(), 0)
            assert trainer.has(other.wait_for().state_dict(), 0)


def test_a_relay_that_is_killed_takes_nothing_from_a_reader_that_has_mapped_its_memory(
    shared: Cluster, job: str, here: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    commands = Commands(tmp_path_factory.mktemp("relay"))
    words = ("relay", "--upstream", shared.address, "--port", "0", "--metrics-port", "0")
    words = (*words, "--shared-directory", str(here))
    command = commands.start("-m", "ps_server", *words)
    [address] = command.says(r"ready at (\S+)")
    try:
        with shared.connect("sync", job=job) as session, ps.subscribe(address, job) as feed:
            trainer = FollowedTrainer(session)
            model = feed.load(FollowedModel())
            last = trainer.steps(2)
            feed.wait_for(last)
            with feed.reading(model) as version:
                os.kill(command.process.pid, signal.SIGKILL)
                command.process.wait()
                until(lambda: feed.trouble is not None, "the reader to notice")
                assert trainer.has(dict(model.state_dict()), version)
            assert received(feed)[1] == 0
    finally:
        commands.close()


def test_slow_readers_hold_a_bounded_part_of_the_relays_memory_and_the_others_get_messages(
    shared: Cluster, job: str, trainer: FollowedTrainer, here: Path
) -> None:
    with relay(shared.address, maps=here) as near:
        slow: list[Any] = []  # editions that readers do not give back

        def read() -> int:
            """A reader that gets the newest edition, and stays with it. Returns how many bytes came in messages."""
            with ps.subscribe(near.address, job, parameters=["first.weight"]) as feed:
                slow.append(feed.wait_for(trainer.session.clock))
                return received(feed)[1]

        came = []
        for _ in range(6):
            came.append(read() > 0)
            trainer.step()
        assert came == [False] * (mapped.MOST_HELD + 1) + [True] * (5 - mapped.MOST_HELD)
        [followed] = near.relayed.followed()
        size = slow[0].arrays.spaces["float32"].nbytes
        assert followed.mapped.held_bytes() == (mapped.MOST_HELD + 1) * size
        assert all(
            torch.equal(each.tensor("first.weight"), trainer.past[each.version]["first.weight"]) for each in slow
        )
        slow.clear()
        gc.collect()
        until(lambda: followed.mapped.held_bytes() == 0, "the relay to notice")
        assert read() == 0


def test_operators_see_how_many_readers_map_a_relays_memory_and_what_these_keep(
    shared: Cluster, job: str, trainer: FollowedTrainer, here: Path
) -> None:
    with relay(shared.address, maps=here) as near:

        def seen(name: str) -> float:
            return scrape(near.metrics_address)[f'{name}{{job="{job}"}}']

        with ps.subscribe(near.address, job) as feed, ps.subscribe(near.address, job) as other:
            held = feed.wait_for()
            for _ in range(4):
                last = trainer.step()
                for each in (feed, other):
                    each.wait_for(last)
            assert seen("ps_feed_mapped_readers") == 2, "a reader counts once, whatever it has mapped"
            size = held.arrays.spaces["float32"].nbytes  # frozen tensors are in the newest edition, too
            until(lambda: seen("ps_edition_held_bytes") == size, "the memory that one reader keeps")
            said = r"2 readers, 2 readers with its memory mapped, .* more that readers keep mapped, "
            until(
                lambda: re.search(said, status_text.table(requests.fetch(near.address))), "that both wait for the next"
            )
        del held, feed, other, each
        until(lambda: gc.collect() >= 0 and seen("ps_feed_mapped_readers") == 0, "that both are gone")
        assert seen("ps_edition_held_bytes") == 0
        assert "memory mapped" not in status_text.table(requests.fetch(near.address))


def test_a_reader_removes_the_sockets_of_dead_ones_once_and_looks_at_no_socket_again(here: Path) -> None:
    dead, live = (SOCKET_PREFIX + digit * 32 for digit in "01")
    closed, _ = listen(here, dead, 1)
    closed.close()
    with contextlib.closing(listen(here, live, 8)[0]) as listener:
        long_ago = time.time() - 3600
        for name in (dead, live):
            os.utime(here / name, (long_ago, long_ago))
        handover = Handover(here, "job")
        for _ in range(3):
            with handover.offered(True) as files:
                assert files is not None
        assert [each.name for each in here.iterdir()] == [live]
        for _ in ("as it was made", "by the reader"):
            listener.accept()[0].close()
        listener.settimeout(0)
        with pytest.raises(BlockingIOError):
            listener.accept()


@pytest.mark.parametrize("where", ["no memory files", "another directory", "no directory"])
def test_where_no_memory_can_be_handed_over_editions_come_in_messages(
    shared: Cluster,
    job: str,
    trainer: FollowedTrainer,
    here: Path,
    where: str,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    maps = here
    if where == "no memory files":
        monkeypatch.delattr(os, "memfd_create")
    elif where == "another directory":
        maps = tmp_path_factory.mktemp("elsewhere")
    else:
        monkeypatch.setenv("PS_SHARED_DIRECTORY", str(here / "nowhere"))
    with caplog.at_level("INFO"), relay(shared.address, maps=maps) as near, ps.subscribe(near.address, job) as feed:
        for _ in range(3):
            last = trainer.step()
            assert trainer.has(feed.wait_for(last).state_dict(), last)
        assert received(feed)[1] > 0
    said = [each.message for each in caplog.records if "in messages" in each.message]
    assert len(said) == (where != "another directory"), "a relay elsewhere is no trouble"


def test_buffers_and_frozen_tensors_are_taken_over_where_they_do_not_change(
    shared: Cluster, job: str, trainer: FollowedTrainer, here: Path
) -> None:
    with relay(shared.address, maps=here) as near, ps.subscribe(near.address, job) as feed:
        first = feed.wait_for()
        last = trainer.steps(3)
        edition = feed.wait_for(last)
        frozen = "frozen-float32"
        assert edition.arrays.spaces[frozen] is first.arrays.spaces[frozen]
        del first
        trainer.session.unwrap(trainer.model).scale.fill_(5.0)
        trainer.session.close()
        until(lambda: feed.ended, "the end")
        edition = feed.wait_for()
        assert edition.tensor("scale").tolist() == [5.0] * 3
        assert torch.equal(edition.tensor("first.weight"), trainer.past[edition.version]["first.weight"])


def test_who_may_not_read_a_job_is_handed_nothing(shared: Cluster, job: str, here: Path) -> None:
    tokens = here / "tokens"
    tokens.write_text(f"reader:other {SECRET}\n")
    tokens.chmod(0o600)
    (here / "token").write_text(SECRET)
    (here / "token").chmod(0o600)
    connected: list[Any] = []
    with shared.connect("sync", job=job) as session, pytest.MonkeyPatch.context() as patch:
        FollowedTrainer(session)
        patch.setattr(MappedFiles, "hand_over", lambda *arguments: connected.append(arguments))
        with (
            relay(shared.address, ServerConfig(tokens=tokens), maps=here, jobs=((job, "float32"),)) as near,
            ps.subscribe(near.address, job, token_file=str(here / "token")) as feed,
        ):
            until(near.is_ready, "an edition")
            with pytest.raises(Forbidden):
                feed.wait_for()
    assert connected == []


@contextlib.contextmanager
def offered(directory: Path) -> Iterator[tuple[HandedOver, MappedFiles, Any]]:
    """A reader that waits, the relay's end, and an edition of it with one space of two pages."""

    class Edition:
        files = {"float32": sealed(2 * mmap.PAGESIZE, 7)}  # noqa: RUF012

    with HandedOver(directory) as waiting:
        relays = MappedFiles(directory)
        yield waiting, relays, Edition()
        relays.close()


def test_a_relay_connects_to_nothing_but_the_socket_of_its_own_users_reader(tmp_path: Path) -> None:
    with offered(tmp_path) as (waiting, relays, edition):
        good = waiting.offer
        wrong = (
            MappingOffer("../" + good.location, good.socket_inode, good.nonce),
            MappingOffer(good.location, good.socket_inode + 1, good.nonce),
            MappingOffer(good.location, good.socket_inode, good.nonce * 2**16),
            MappingOffer("ps-torch-" + "0" * 32, good.socket_inode, good.nonce),
        )
        for offer in wrong:
            assert relays.hand_over(offer, edition, ["float32"]) is None
        assert relays.hand_over(good, edition, ["float32", "bfloat16"]) is None, "a space is not in memory files"
        (tmp_path / good.location).chmod(0o666)
        assert relays.hand_over(good, edition, ["float32"]) is None
        (tmp_path / good.location).chmod(0o600)
        assert relays.hand_over(good, edition, ["float32"]) == {"float32": 0}
        with pytest.raises(NotShared, match=f"{2 * mmap.PAGESIZE} bytes where {mmap.PAGESIZE} are the most"):
            waiting.file(0, mmap.PAGESIZE)
        assert not waiting._files, "what has another size is not even mapped"
        assert relays.hand_over(good, edition, ["float32"]) == {"float32": 0}
        assert waiting.file(0, 2 * mmap.PAGESIZE)[:3].tolist() == [7, 7, 7]


def test_what_forgot_its_readers_shares_nothing_with_one_whose_call_had_begun(tmp_path: Path) -> None:
    with offered(tmp_path) as (waiting, relays, edition):
        assert relays.sees(waiting.offer)
        relays.close()  # a tick came in between: the job is gone
        assert relays.hand_over(waiting.offer, edition, ["float32"]) is None
        assert not relays.readers
    gc.collect()  # a connection that was left open ends the test with a ResourceWarning


def test_a_relay_says_once_why_it_hands_nothing_over_and_nothing_of_readers_elsewhere(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with offered(tmp_path) as (waiting, relays, edition), caplog.at_level("INFO"):
        good = waiting.offer
        elsewhere = MappingOffer("ps-torch-" + "0" * 32, good.socket_inode, good.nonce)
        assert relays.hand_over(elsewhere, edition, ["float32"]) is None
        assert not caplog.records
        (tmp_path / good.location).chmod(0o666)
        for _ in range(3):
            assert relays.hand_over(good, edition, ["float32"]) is None
        [said] = caplog.records
        assert said.levelname == "WARNING"
        assert "must be a unix socket of this process' user alone" in said.message
        (tmp_path / good.location).chmod(0o600)
        assert relays.hand_over(good, edition, ["float32"]) == {"float32": 0}
        assert "over, after 3 times" in caplog.text


def test_a_reader_that_could_not_take_memory_over_says_so_once_and_tries_again(
    here: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    handover, file = Handover(here, "job"), sealed(mmap.PAGESIZE, 1)
    with caplog.at_level("INFO"):
        handover.failed(NotShared("the relay did not hand over file 0 (timed out)"))
        with handover.offered(True) as waiting:
            assert waiting is None
        monkeypatch.setattr("ps_feed.mapping.RETRY_SECONDS", 0.0)
        handover.failed(NotShared("the relay did not hand over file 0 (timed out)"))
        assert [each.levelname for each in caplog.records] == ["WARNING"]
        with handover.offered(True) as waiting:
            assert waiting is not None
            hand(waiting, here, file.descriptor)
            assert waiting.file(0, mmap.PAGESIZE)[0] == 1
        assert "over, after 2 times" in caplog.text


def test_a_relay_that_could_make_no_memory_file_says_so_once_and_tries_again(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = EditionRoom(is_shared=True)
    monkeypatch.setattr("ps_server.shard.mapped.RETRY_SECONDS", 0.0)
    with monkeypatch.context() as patch:
        patch.delattr(os, "memfd_create")
        assert [room.memory(1), room.memory(1)] == [None, None]
    assert [each.levelname for each in caplog.records] == ["WARNING"]
    assert room.memory(1) is not None


@pytest.mark.parametrize("members", [MOST_FILES, MOST_FILES + 1])
def test_an_edition_of_more_spaces_than_a_relay_hands_over_lies_in_no_files(members: int) -> None:
    pieces = [
        ParameterSpec("w", (1, 16), "float32", 0, member=member, piece=PiecePlace((members, 16), (member, 0)))
        for member in range(members)
    ]
    spec = replace(vector_job("job", "sync", 64, 1), parameters=tuple(pieces), group_size=members)
    made: list[int] = []
    Arriving(Contents(spec, None, "float32"), None, memory=lambda size: made.append(size))
    assert len(made) == (members if members <= MOST_FILES else 0)


def test_what_readers_have_mapped_counts_also_while_nobody_reads_the_job(
    shared: Cluster, job: str, trainer: FollowedTrainer, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with relay(shared.address, maps=here) as near:
        with ps.subscribe(near.address, job) as feed:
            edition = feed.wait_for()
        held = near.relayed.get(job, "float32").mapped.held_bytes()
        assert held > 0
        with monkeypatch.context() as patch:
            patch.setattr(relayed, "IDLE_SECONDS", 0.2)
            until(lambda: not near.relayed.followed(), "that it is followed no more")
        followed = near.relayed.get(job, "float32")
        assert followed.mapped.held_bytes() == held
        del edition, feed
        gc.collect()
        until(lambda: followed.mapped.held_bytes() == 0, "the relay to notice")
        with monkeypatch.context() as patch:
            patch.setattr(relayed, "IDLE_SECONDS", 0.2)
            until(lambda: not near.relayed._mapped, "that nothing is left of it")


def hand(waiting: HandedOver, directory: Path, descriptor: int, nonce: bytes | None = None) -> None:
    with reach(directory, waiting.offer.location, waiting.offer.socket_inode, 5.0) as connection:
        socket.send_fds(connection, [(nonce or waiting.offer.nonce) + b"\0"], [descriptor])


def test_a_reader_takes_nothing_but_sealed_memory_of_the_relay_that_it_has_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ps_feed.mapping.HANDOVER_SECONDS", 0.2)
    unsealed, shrinks = MemoryFile(mmap.PAGESIZE), os.memfd_create("empty", os.MFD_ALLOW_SEALING)
    with offered(tmp_path) as (waiting, relays, edition):
        good = sealed(mmap.PAGESIZE, 1)
        hand(waiting, tmp_path, good.descriptor, bytes(32))
        for other, why in (
            (unsealed.descriptor, "sealed against shrinking"),
            (shrinks, "sealed against shrinking"),
            (0, "no memory file|did not hand over"),
        ):
            hand(waiting, tmp_path, other)
            with pytest.raises(NotShared, match=why):
                waiting.file(0, mmap.PAGESIZE)
        with pytest.raises(NotShared, match="did not hand over file 1"):
            waiting.file(1, mmap.PAGESIZE)
        with pytest.raises(NotShared, match="64 files at most"):
            waiting.file(64, mmap.PAGESIZE)
        assert relays.hand_over(waiting.offer, edition, ["float32"]) == {"float32": 0}
        assert waiting.file(0, 2 * mmap.PAGESIZE)[-1] == 7
    os.close(shrinks)


def test_a_bucket_that_lies_elsewhere_is_refused() -> None:
    contents = Contents(vector_job("job", "sync", 64, 1), None, "float32")
    size = contents.layout.space_sizes["float32"] * 4
    memory = np.ones(size, np.uint8)

    def at(index: int, offset: int) -> EditionBucket:
        return EditionBucket(index, 1, "", 0, b"", lies=BucketOffset(0, offset))

    second = contents.buckets[1].start * 4
    wrong: tuple[Callable[[Arriving], None], ...] = (
        lambda arriving: arriving.map(at(1, second + 4), 0, memory, ""),
        lambda arriving: arriving.map(at(1, second), 0, memory[:-4], ""),
        lambda arriving: arriving.map(at(1, second), 0, np.ones(size, np.uint8), ""),
        lambda arriving: arriving.map(at(0, 0), 0, memory, ""),
        lambda arriving: arriving.take(EditionBucket(1, 1, "", 0, bytes(contents.size(contents.buckets[1]))), 0, ""),
        lambda arriving: arriving.map(EditionBucket(1, 1, "", 0, b""), 0, memory, ""),
    )
    for refused in wrong:
        arriving = Arriving(contents, None)
        arriving.map(at(0, 0), 0, memory, "an edition")
        with pytest.raises(Damaged):
            refused(arriving)


def test_memory_that_is_still_used_where_it_was_filled_is_not_handed_over() -> None:
    file = MemoryFile(mmap.PAGESIZE)
    kept = file.fill()
    with pytest.raises(NotShared, match="still in use"):
        file.seal()
    kept[0] = 3
    del kept
    assert file.seal()[0] == 3


class CountedMmap(mmap.mmap):
    """Notes how much of it is populated at a time."""

    advised: list[tuple[int, int]] = []  # noqa: RUF012

    def madvise(self, option: int, start: int = 0, length: int = 0) -> None:
        self.advised.append((start, length or len(self)))
        super().madvise(option, start, length or len(self))


def test_a_reader_that_maps_an_edition_stops_its_other_threads_for_a_few_megabytes_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    size = 9 * 2**20
    file = MemoryFile(size)
    monkeypatch.setattr(mmap, "mmap", CountedMmap)
    monkeypatch.setattr(CountedMmap, "advised", [])
    file.seal()
    assert CountedMmap.advised == [], "the relay has filled these pages"
    memory_files.mapped(file.descriptor, size)
    assert CountedMmap.advised == [(0, 2**22), (2**22, 2**22), (2**23, 2**20)]


def test_where_the_memory_of_an_edition_cannot_be_mapped_again_it_is_fetched_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    contents = Contents(vector_job("job", "sync", 64, 1), None, "float32")

    def arrived() -> Arriving:
        arriving = Arriving(contents, None, memory=MemoryFile)
        for index, bucket in contents.buckets.items():
            payload = bytes(contents.size(bucket))
            arriving.take(EditionBucket(index, 1, "", zlib.crc32(payload), payload), 0, "an edition")
        return arriving

    def no_memory(*arguments: object, **more: object) -> mmap.mmap:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    arriving = arrived()
    with monkeypatch.context() as patch:
        patch.setattr(mmap, "mmap", no_memory)
        with pytest.raises(TryLater, match="cannot be mapped again"):
            arriving.complete("run", 0)
    assert arrived().complete("run", 0).version == 1
