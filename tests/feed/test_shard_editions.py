"""What one shard sends to readers of a job's weights: whole editions, shared, and of one version."""

from __future__ import annotations

import weakref
import zlib
from dataclasses import replace
from typing import Any

import pytest
import torch

from ps_protocol.changes import apply_change
from ps_protocol.errors import InvalidRequest, LimitExceeded, NotFound, OutOfOrder, RunEnded, TryLater
from ps_protocol.messages.data import PushKind
from ps_protocol.messages.editions import EditionBucket, WeightsAsked
from ps_protocol.messages.rows import RowsWatch
from ps_protocol.tables import Initializer, JobTable, TableSpec
from ps_protocol.tensors import bytes_of, tensor_from
from ps_server.core.feed_figures import FeedFigures
from ps_server.core.unit import Bucket
from ps_server.shard.copied_buckets import CopiedBucket
from ps_server.shard.editions import HELD_SECONDS, KEPT_SECONDS, Editions, TakenEdition
from ps_server.shard.hosted_job import HostedJob
from ps_server.shard.last_weights import LastWeights, last_weights
from ps_server.shard.weight_feeds import SIGN_SECONDS
from tests.tools.feeding import BUCKETS, CELLS, Feeding, Reader
from tests.tools.raw_worker import vector_job


def test_a_job_without_weights_is_to_be_asked_later() -> None:
    feeding = Feeding()
    with pytest.raises(TryLater, match=r"job 'job' has no weights yet: rank 0 has not sent them"):
        feeding.pull(0)
    with pytest.raises(TryLater, match="has no weights yet"):
        feeding.describe()
    with pytest.raises(NotFound, match="knows no job 'other'"):
        feeding.describe("other")


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_pull_that_was_made_before_a_rollback_gets_nothing_of_after(mode: str) -> None:
    feeding = Feeding(mode).begin()
    with pytest.raises(OutOfOrder, match="job 'job' is on timeline 0, and not on 7"):
        feeding.pull(0, timeline=7)


def test_an_edition_of_now_is_there_at_once() -> None:
    feeding = Feeding().begin()
    feeding.step()
    here = feeding.describe()
    assert (here.lowest, here.highest, here.timeline, here.has_one_version) == (1, 1, 0, True)
    assert here.buckets == tuple(range(BUCKETS))
    assert feeding.pull(1).edition() == (1, [1.0] * CELLS)


def test_nothing_is_copied_while_nobody_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[int] = []
    make = CopiedBucket.__init__

    def counted(copy: CopiedBucket, bucket: Bucket, *more: Any) -> None:
        copied.append(bucket.index)
        make(copy, bucket, *more)

    monkeypatch.setattr(CopiedBucket, "__init__", counted)
    feeding = Feeding().begin()
    for _ in range(5):
        feeding.step()
    assert copied == []
    reader = feeding.pull(6)
    for _ in range(5):
        feeding.step()
    assert reader.edition() == (6, [6.0] * CELLS)
    assert sorted(copied) == list(range(BUCKETS)), "once each, for the version that was asked for"


def test_an_edition_ahead_is_copied_when_each_bucket_comes_to_it() -> None:
    feeding = Feeding().begin()
    reader = feeding.pull(2)
    feeding.step()
    feeding.step(range(2))
    assert not reader.queued
    assert feeding.describe().editions == (2,)
    feeding.step(range(2, 4))
    feeding.step()
    assert reader.edition() == (2, [2.0] * CELLS), "though training went on"


def test_while_an_edition_is_not_complete_its_reader_hears_that_the_shard_lives() -> None:
    feeding = Feeding().begin()
    reader = feeding.pull(1)
    feeding.pass_time(SIGN_SECONDS / 2)
    assert reader.signs == 0
    for _ in range(3):
        feeding.pass_time(SIGN_SECONDS)
    assert reader.signs == 3
    feeding.step()
    feeding.pass_time(SIGN_SECONDS)
    assert reader.signs == 3


def test_a_version_that_is_past_is_refused() -> None:
    feeding = Feeding().begin()
    feeding.step()
    feeding.step(range(1))
    reader = feeding.pull(1)
    assert isinstance(reader.error, OutOfOrder)
    assert "bucket 0 has 2 updates: more than the 1 asked for" in str(reader.error)
    assert feeding.describe().editions == ()


def test_a_version_of_another_timeline_is_refused() -> None:
    feeding = Feeding().begin()
    with pytest.raises(OutOfOrder, match=r"job 'job' is on timeline 0, and not on 3"):
        feeding.pull(0, timeline=3)


@pytest.mark.parametrize("mode", ["async", "ssp:1"])
def test_where_workers_share_no_clock_each_bucket_is_copied_as_it_is(mode: str) -> None:
    feeding = Feeding(mode).begin()
    feeding.step()
    feeding.step(range(2))
    assert not feeding.describe().has_one_version
    assert feeding.pull(0).edition() == (1, [2.0] * 32 + [1.0] * 32)


def changed(bucket: EditionBucket, base: list[float]) -> list[float]:
    """Applies a change to cells."""
    assert bucket.base is not None
    cells = apply_change(bucket.payload, bytes_of(torch.tensor(base)), 4, sparse=bucket.sparse)
    assert zlib.crc32(cells.tobytes()) == bucket.checksum
    return tensor_from(cells.data, "float32").tolist()


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_reader_that_has_an_older_version_gets_what_changed(mode: str) -> None:
    feeding = Feeding(mode).begin()
    feeding.pull(0).edition()
    feeding.step()
    for bucket in feeding.pull(1, base=0).buckets():
        assert (bucket.version, bucket.base) == (1, 0)
        assert changed(bucket, [0.0] * 16) == [1.0] * 16
    for _ in range(2):
        feeding.step()
        feeding.pull(feeding.clock, base=feeding.clock - 1).buckets()
    missed = feeding.pull(3, base=0).buckets()
    assert [changed(each, [0.0] * 16) for each in missed] == [[3.0] * 16] * BUCKETS, "no copy of 0 is left"


def test_what_cannot_be_a_change_comes_whole() -> None:
    feeding = Feeding("async").begin()
    feeding.pull(0).edition()
    feeding.step()
    for reader in (feeding.pull(1, base=7), feeding.pull(1, "bfloat16", base=0)):
        assert [each.base for each in reader.buckets()] == [None] * BUCKETS


def test_the_newest_edition_stays_for_changes_as_long_as_somebody_follows() -> None:
    feeding = Feeding().begin()
    feeding.pull(0).edition()
    waiting = feeding.pull(1, base=0)
    for _ in range(5):
        feeding.pass_time(KEPT_SECONDS - 1)
    feeding.step()
    assert [each.base for each in waiting.buckets()] == [0] * BUCKETS
    for _ in range(5):
        feeding.pass_time(KEPT_SECONDS - 1)
        feeding.describe(follows=True)
    feeding.step()
    assert [each.base for each in feeding.pull(2, base=1).buckets()] == [1] * BUCKETS
    editions = feeding.shard.jobs()["job"].editions
    assert 2 * CELLS * 4 < editions.nbytes < 3 * CELLS * 4
    feeding.pass_time(KEPT_SECONDS + 1)
    assert editions.nbytes == 0


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_the_edition_before_stays_for_changes_as_long_as_a_reader_receives_them(mode: str) -> None:
    feeding = Feeding(mode).begin()
    feeding.pull(0).edition()
    for _ in range(5):  # in which the job makes no update
        feeding.pull(0, base=0).buckets()
        feeding.pass_time(KEPT_SECONDS - 1)
    feeding.describe(follows=True)
    feeding.pass_time(2)
    feeding.step()
    reader = feeding.pull(1, base=0)
    reader.take()
    bases = []
    while reader.queued:
        bucket = reader.take().bucket
        assert bucket is not None
        bases.append(bucket.base)
        feeding.pass_time(1)
    reader.close()
    assert bases == [0] * BUCKETS
    feeding.pass_time(1)
    assert feeding.shard.jobs()["job"].editions.nbytes < 2.5 * CELLS * 4, "the edition before is not kept any more"


def test_readers_of_one_version_share_its_copies() -> None:
    feeding = Feeding().begin()
    both = [feeding.pull(1), feeding.pull(1)]
    narrow, part = feeding.pull(1, "bfloat16"), feeding.pull(1, buckets=(2,))
    feeding.step()
    editions = feeding.shard.jobs()["job"].editions
    assert editions.nbytes == CELLS * 4 + CELLS * 2
    assert [each.edition() for each in both] == [(1, [1.0] * CELLS)] * 2
    assert narrow.edition("bfloat16") == (1, [1.0] * CELLS)
    assert part.edition() == (1, [1.0] * 16)


def test_a_reader_of_another_type_that_comes_too_late_is_told_so_and_the_others_are_served() -> None:
    feeding = Feeding().begin()
    first = feeding.pull(1)
    feeding.step()
    feeding.step()
    assert isinstance(feeding.pull(1, "bfloat16").error, OutOfOrder)
    assert first.edition() == (1, [1.0] * CELLS)


def test_to_wait_takes_no_memory_and_keeps_nobody_out() -> None:
    feeding = Feeding().begin()
    waiting = [feeding.pull(version) for version in (7, 8, 9, 10)]
    assert feeding.pull(0).edition() == (0, [0.0] * CELLS)
    for version in range(1, 11):
        feeding.step()
        if version > 6:
            assert waiting[version - 7].edition() == (version, [float(version)] * CELLS)


def test_a_part_of_the_buckets_may_be_asked_for() -> None:
    feeding = Feeding().begin()
    assert feeding.pull(0, buckets=(1, 3)).edition() == (0, [0.0] * 32)
    with pytest.raises(InvalidRequest, match="has no bucket 4 of job 'job'"):
        feeding.pull(0, buckets=(1, 4))


@pytest.mark.parametrize("wire", ["int8", "int4", "nonsense"])
def test_an_edition_travels_in_a_type_that_casts(wire: str) -> None:
    with pytest.raises(InvalidRequest, match=f"float32, bfloat16, float16, not in {wire}"):
        Feeding().begin().pull(0, wire)


def test_memory_holds_two_editions_however_many_readers_stand_still() -> None:
    feeding = Feeding().begin()
    slow = [feeding.pull(0), feeding.pull(0)]
    feeding.step()
    slow.append(feeding.pull(1))
    feeding.step()
    refused = feeding.pull(2).error
    assert isinstance(refused, TryLater)
    assert "2 editions are being read, which is the most at a time" in str(refused)
    assert refused.retry_after
    assert (feeding.seen.refused["held"], feeding.seen.trouble) == (1, ""), "it is only late"
    assert feeding.shard.jobs()["job"].editions.nbytes == 2 * CELLS * 4

    feeding.pass_time(HELD_SECONDS + 1)
    assert feeding.pull(2).edition() == (2, [2.0] * CELLS), "in place of the oldest"
    for reader in slow[:2]:
        assert reader.take().begin is None, "no more of an edition that was taken from its reader"
        assert isinstance(reader.error, TryLater)
        assert "it was not read in time" in str(reader.error)
        assert not reader.is_finished, "it would look whole"
    assert slow[2].edition() == (1, [1.0] * CELLS)


def test_a_slow_reader_keeps_its_edition_as_long_as_another_one_is_free() -> None:
    feeding = Feeding().begin()
    slow = feeding.pull(0)
    for version in range(1, 5):
        feeding.step()
        feeding.pass_time(HELD_SECONDS / 2)
        assert feeding.pull(version).edition() == (version, [float(version)] * CELLS)
    assert slow.edition() == (0, [0.0] * CELLS)


def test_an_edition_that_nobody_reads_is_forgotten() -> None:
    feeding = Feeding().begin()
    editions = feeding.shard.jobs()["job"].editions
    feeding.pull(0).edition()
    assert editions.versions() == [0]
    feeding.pass_time(KEPT_SECONDS + 1)
    assert editions.versions() == []
    waiting = feeding.pull(9)
    assert editions.waiting
    waiting.close()
    assert not editions.waiting, "nobody waits for it"
    assert editions.versions() == []


def test_an_edition_that_is_given_up_ends_with_its_error_and_frees_its_memory() -> None:
    feeding = Feeding().begin()
    slow, editions = feeding.pull(0), feeding.shard.jobs()["job"].editions
    assert slow.take().begin is not None
    assert slow.take().bucket is not None
    copies = [weakref.ref(each) for edition in editions._kept for each in edition._copied.values()]
    feeding.shard.drop_job("job")
    assert isinstance(slow.error, NotFound)
    assert not slow.is_finished
    slow.close()
    assert any(copy() is not None for copy in copies), "they are the last weights of a job that somebody follows"
    feeding.pass_time(KEPT_SECONDS + 1)
    assert all(copy() is None for copy in copies)


def test_what_a_copy_for_a_reader_meets_fails_the_reader_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    feeding = Feeding(limit=2).begin()
    reader = feeding.pull(1)
    monkeypatch.setattr("ps_server.shard.editions.CopiedBucket", lambda *_: 1 / 0)
    feeding.step()
    assert "cannot be copied on this shard; its log says why" in str(reader.error)
    assert feeding.describe().lowest == 1
    for _ in range(3):
        at_once = feeding.pull(1)
        assert "cannot be copied" in str(at_once.error)
        at_once.close()
    monkeypatch.undo()
    feeding.step()
    assert feeding.pull(2).edition() == (2, [2.0] * CELLS)


def test_a_reader_that_is_refused_keeps_no_edition_alive() -> None:
    feeding = Feeding().begin()
    feeding.pull(0).edition()
    feeding.step()
    for _ in range(4):
        refused = feeding.pull(0, "bfloat16")
        assert isinstance(refused.error, OutOfOrder)
        refused.close()
        feeding.pass_time(KEPT_SECONDS / 3)
    assert feeding.shard.jobs()["job"].editions.nbytes == 0
    assert feeding.describe().editions == (), "nobody is sent to a version that is past"


def test_a_refusal_that_comes_before_its_reader_knows_the_edition_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    feeding = Feeding().begin()
    take = Editions.take

    def late(self: Editions, *arguments: Any) -> TakenEdition:
        edition = take(self, *arguments)
        feeding.step()
        return edition

    monkeypatch.setattr(Editions, "take", late)
    assert isinstance(feeding.pull(0).error, OutOfOrder)


def test_the_end_of_a_job_ends_its_readers() -> None:
    feeding = Feeding().begin()
    reader = feeding.pull(1)
    feeding.shard.drop_job("job")
    assert isinstance(reader.error, NotFound)


def test_the_last_weights_of_a_job_stay_for_those_who_name_its_run(caplog: pytest.LogCaptureFixture) -> None:
    feeding = Feeding(run="1").begin()
    waiting, narrow = feeding.pull(1000), feeding.pull(1000, "bfloat16")
    for _ in range(3):
        feeding.step()
    feeding.shard.drop_job("job")
    assert isinstance(waiting.error, NotFound)
    waiting.close()
    narrow.close()
    with pytest.raises(NotFound, match="knows no job"):
        feeding.describe()
    here = feeding.describe(run="1")
    assert (here.ended, here.lowest, here.highest) == (True, 3, 3)
    assert feeding.pull(3, run="1").edition() == (3, [3.0] * CELLS)
    assert feeding.pull(3, "bfloat16", run="1").edition("bfloat16") == (3, [3.0] * CELLS)
    with pytest.raises(OutOfOrder, match="has ended with 3 updates"):
        feeding.pull(2, run="1")
    with pytest.raises(NotFound, match="nobody had asked for these last weights"):
        feeding.pull(3, "float16", run="1")
    feeding.shard.create_job(feeding.spec, range(BUCKETS), run="2")
    feeding.shard.add_worker("job", 0, 2, 0)
    assert feeding.pull(3, run="1").edition() == (3, [3.0] * CELLS), "a later run of the name changes nothing"
    feeding.pass_time(KEPT_SECONDS / 2)
    assert feeding.describe(run="1", follows=True).ended
    feeding.pass_time(KEPT_SECONDS + 1)
    with pytest.raises(RunEnded):
        feeding.describe(run="1")


def test_the_last_weights_are_kept_for_one_that_has_asked_for_no_edition_of_this_shard_yet() -> None:
    """As after a restore: it has an edition of before, and waits for the next, for as long as its period says."""
    feeding = Feeding(run="1").begin()
    weights = feeding.shard.weight_feeds
    weights.describe(WeightsAsked("job", "1", wire="bfloat16", follows=True, buckets=(1, 1000)))
    feeding.step()
    feeding.shard.drop_job("job")
    version, cells = feeding.pull(1, "bfloat16", buckets=(1,), run="1").edition("bfloat16")
    assert version == 1
    assert set(cells) == {1.0}
    with pytest.raises(NotFound, match="nobody had asked for these last weights"):
        feeding.pull(1, "bfloat16", buckets=(0,), run="1")


def test_a_shard_that_has_nothing_of_what_a_reader_wants_tells_it_of_the_end_too() -> None:
    feeding = Feeding(run="1").begin()
    feeding.shard.weight_feeds.describe(WeightsAsked("job", "1", follows=True, buckets=(1000,)))
    feeding.step()
    feeding.shard.drop_job("job")
    here = feeding.describe(run="1")
    assert (here.ended, here.lowest, here.highest) == (True, 1, 1)


def test_while_last_weights_are_being_copied_a_reader_is_to_ask_again(monkeypatch: pytest.MonkeyPatch) -> None:
    feeding = Feeding(run="1").begin()
    feeding.pull(0).edition()
    told: list[str] = []

    def copying(job: HostedJob, now: float) -> LastWeights | None:
        with pytest.raises(TryLater, match="its last weights are being copied") as met:
            feeding.describe(run="1")
        told.append(str(met.value))
        return last_weights(job, now)

    monkeypatch.setattr("ps_server.shard.hosted.last_weights", copying)
    feeding.shard.drop_job("job")
    assert told
    assert feeding.describe(run="1").ended


def test_who_only_asks_what_there_is_does_not_follow_and_who_follows_names_a_wire_format() -> None:
    feeding = Feeding(run="1").begin()
    feeding.describe()
    with pytest.raises(InvalidRequest, match="an edition travels in float32, bfloat16, float16, not in int8"):
        feeding.shard.weight_feeds.describe(WeightsAsked("job", wire="int8", follows=True))
    feeding.shard.drop_job("job")
    with pytest.raises(NotFound):
        feeding.describe(run="1")


def test_a_job_that_nobody_follows_leaves_nothing() -> None:
    feeding = Feeding(run="1").begin()
    feeding.pull(0).edition()
    feeding.pass_time(KEPT_SECONDS + 1)
    feeding.shard.drop_job("job")
    with pytest.raises(NotFound):
        feeding.describe(run="1")


def test_readers_of_last_weights_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    feeding = Feeding(limit=2, run="1").begin()
    feeding.pull(0).edition()
    feeding.shard.drop_job("job")
    both = [feeding.pull(0, run="1"), feeding.pull(0, run="1")]
    with pytest.raises(LimitExceeded, match="job 'job' has 2 feeds here"):
        feeding.pull(0, run="1")
    feeding.pass_time(KEPT_SECONDS + 1)
    assert [each.edition() for each in both] == [(0, [0.0] * CELLS)] * 2, "whom they are sent to holds them"


def test_a_job_that_needs_the_memory_of_last_weights_gets_it(monkeypatch: pytest.MonkeyPatch) -> None:
    feeding = Feeding(run="1").begin()
    feeding.pull(0).edition()
    feeding.shard.drop_job("job")
    monkeypatch.setattr("ps_server.shard.hosted.free_bytes", lambda: 100)
    with pytest.raises(LimitExceeded):
        feeding.shard.create_job(feeding.spec, range(BUCKETS), run="2")
    with pytest.raises(NotFound):
        feeding.describe(run="1")


def test_without_memory_there_are_no_last_weights(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    feeding = Feeding(run="1").begin()
    waiting = feeding.pull(5)
    monkeypatch.setattr("ps_server.shard.editions.free_bytes", lambda: CELLS * 4 - 1)
    feeding.shard.drop_job("job")
    assert isinstance(waiting.error, NotFound)
    assert "its readers do not get its last weights: " in caplog.text
    with pytest.raises(NotFound):
        feeding.describe(run="1")


def test_frozen_buckets_are_there_at_any_version() -> None:
    spec = replace(vector_job("job", "sync", 48, 1, frozen=16))
    feeding = Feeding(spec=spec)
    for index in range(BUCKETS):
        feeding.push(float(index), PushKind.INITIAL_VALUE, range(index, index + 1))
    reader = feeding.pull(1)
    feeding.clock = 1
    feeding.push(-1.0, buckets=range(3))
    assert reader.edition() == (1, [1.0] * 16 + [2.0] * 16 + [3.0] * 16 + [3.0] * 16)


def test_a_principal_has_so_many_bytes_of_messages_until_they_are_sent() -> None:
    """A bucket has 16 cells, of 4 bytes each, or of 2."""
    feeding = Feeding(feed_bytes=128).begin()
    for _ in range(2):
        feeding.pull(0, "bfloat16", caller="one")
    whole = feeding.pull(0, caller="one")
    said = "one has feeds here whose messages take up to 128 bytes, and this one takes 64: max-feed-bytes is 128"
    with pytest.raises(LimitExceeded, match=said):
        feeding.pull(0, caller="one")
    feeding.pull(0, caller="two")
    for _ in range(1 + BUCKETS):
        whole.take()
    feeding.pull(0, caller="one")
    whole.close()  # which comes later, and gives back no more
    with pytest.raises(LimitExceeded, match=said):
        feeding.pull(0, caller="one")
    feeding.step()
    feeding.step()
    for _ in range(3):
        assert isinstance(feeding.pull(1, caller="three").error, OutOfOrder), "refused, and not counted any more"


def test_readers_are_counted_with_feeds_of_rows() -> None:
    table = JobTable(TableSpec("items", 4, Initializer("constant", 1.0)), "SGD", {"lr": 1.0})
    feeding = Feeding(limit=4, spec=replace(vector_job("job", "sync", CELLS, 1), tables=(table,))).begin()

    def read(caller: str) -> Reader:
        return feeding.pull(0, caller=caller)

    def watch(caller: str) -> Reader:
        reader = Reader()
        feeding.shard.feeds.watch(RowsWatch("job", "items", b"", 1.0), reader, caller)  # type: ignore[arg-type]
        return reader

    read("one")
    watch("one")
    for another in (read, watch):
        with pytest.raises(LimitExceeded, match="one has 2 feeds of job 'job' here: its share is half of max-feeds"):
            another("one")
    others = [read("two"), watch("three")]
    for another in (read, watch):
        with pytest.raises(LimitExceeded, match="has 4 feeds here: that is the limit max-feeds"):
            another("four")
    for other, another in zip(others, (watch, read), strict=True):
        other.close()
        another("four")


def test_a_reader_that_is_told_the_end_counts_no_more() -> None:
    feeding = Feeding(limit=1).begin()
    reader = feeding.pull(0)
    for _ in range(1 + BUCKETS):
        assert not reader.is_finished
        reader.take()
    assert reader.is_finished
    feeding.pull(0, caller="another")
    reader.close()  # which comes later, and forgets it once more
    with pytest.raises(LimitExceeded):
        feeding.pull(0)


def test_a_reader_that_is_refused_counts_no_more_when_it_is_told() -> None:
    feeding = Feeding(limit=1).begin()
    feeding.step()
    for _ in range(3):  # as one does that asks again as soon as it is told, before the call of before is closed
        assert isinstance(feeding.pull(0).error, OutOfOrder)
    assert feeding.pull(1).edition() == (1, [1.0] * CELLS)


def test_a_reader_whose_edition_is_given_up_counts_no_more_when_it_is_told() -> None:
    feeding = Feeding(limit=3).begin()
    slow = [feeding.pull(0)]
    feeding.step()
    slow.append(feeding.pull(1))
    feeding.step()
    feeding.pass_time(HELD_SECONDS + 1)
    feeding.pull(2).edition()
    slow[0].take()
    assert isinstance(slow[0].error, TryLater)
    for _ in range(2):  # the second beside that of 1 alone
        feeding.pull(2)
    with pytest.raises(LimitExceeded):
        feeding.pull(2)


def test_without_memory_no_edition_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    feeding = Feeding().begin()
    monkeypatch.setattr("ps_server.shard.editions.free_bytes", lambda: CELLS * 4 - 1)
    refused = feeding.pull(0).error
    assert isinstance(refused, LimitExceeded)
    assert "no room for an edition of 256 bytes: 255 are free" in str(refused)
    feeding.step()
    assert feeding.describe().lowest == 1, "training goes on"
    assert (feeding.seen.version, feeding.seen.behind, feeding.seen.trouble) == (None, 0, str(refused))
    assert feeding.seen.refused == {"no_room": 1, "held": 0}
    monkeypatch.undo()
    feeding.pull(1).edition()
    assert (feeding.seen.version, feeding.seen.trouble) == (1, ""), "it is over"


def test_how_a_job_is_read_is_known_as_long_as_somebody_follows_it() -> None:
    feeding = Feeding().begin()
    assert feeding.shard.statistics().jobs["job"].feed is None
    feeding.pass_time(1.0)
    reader = feeding.pull(1)
    assert (feeding.seen.readers, feeding.seen.version, feeding.seen.nbytes) == (1, None, 0)
    feeding.step()
    feeding.step(range(1))
    feeding.pass_time(2.0)
    assert feeding.seen == FeedFigures(1, 1, 2.0, 0, CELLS * 4, 0, 0, "", {"no_room": 0, "held": 0})
    reader.edition()
    feeding.step(range(1, BUCKETS))
    feeding.step()
    assert (feeding.seen.readers, feeding.seen.behind) == (0, 2)
    assert (feeding.seen.sent, feeding.seen.elements) == (CELLS * 4, CELLS * 4)
    changes = feeding.pull(3, base=1).buckets()
    changed_bytes = sum(len(each.payload) for each in changes)
    assert changed_bytes < CELLS * 4
    assert (feeding.seen.version, feeding.seen.behind) == (3, 0)
    assert (feeding.seen.sent, feeding.seen.elements) == (CELLS * 4 + changed_bytes, 2 * CELLS * 4)
    feeding.pass_time(KEPT_SECONDS - 1)
    feeding.describe(follows=True)
    feeding.pass_time(KEPT_SECONDS - 1)
    assert (feeding.seen.version, feeding.seen.age) == (3, 2 * (KEPT_SECONDS - 1)), "also when its copy has gone"
    feeding.pass_time(KEPT_SECONDS + 1)
    assert feeding.shard.statistics().jobs["job"].feed is None


@pytest.mark.parametrize("mode", ["async", "ssp:1"])
def test_the_version_of_an_edition_whose_buckets_differ_is_the_lowest(mode: str) -> None:
    feeding = Feeding(mode).begin()
    feeding.step()
    feeding.step(range(2))
    feeding.pull(0).edition()
    assert (feeding.seen.version, feeding.seen.behind) == (1, 0)


def test_what_never_changes_is_no_newest_edition() -> None:
    feeding = Feeding(spec=vector_job("job", "sync", 48, 1, frozen=16))
    for index in range(BUCKETS):
        feeding.push(float(index), PushKind.INITIAL_VALUE, range(index, index + 1))
    feeding.clock = 1
    feeding.push(-1.0, buckets=range(3))
    feeding.pull(1, buckets=(0,)).edition()
    feeding.pass_time(1.0)
    feeding.pull(2, buckets=(3,)).edition()
    assert (feeding.seen.version, feeding.seen.age) == (1, 1.0)


def test_an_edition_of_which_the_first_reader_wants_what_never_changes_is_the_newest_once_another_has_it() -> None:
    feeding = Feeding(spec=vector_job("job", "sync", 48, 1, frozen=16))
    for index in range(BUCKETS):
        feeding.push(float(index), PushKind.INITIAL_VALUE, range(index, index + 1))
    first, other = feeding.pull(1, buckets=(3,)), feeding.pull(1)
    feeding.clock = 1
    feeding.push(-1.0, buckets=range(3))
    first.edition()
    other.edition()
    assert feeding.seen.version == 1


def test_a_reader_for_whose_copies_there_is_no_memory_is_refused_and_the_others_are_served(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It comes to an edition that another one has already begun: of another type, or of more buckets."""
    feeding = Feeding().begin()
    there = feeding.pull(0, "bfloat16", (0, 1))
    monkeypatch.setattr("ps_server.shard.editions.free_bytes", lambda: CELLS * 4 - 1)
    other = feeding.pull(0)
    assert isinstance(other.error, LimitExceeded)
    assert "no room for an edition of 256 bytes: 255 are free" in str(other.error)
    assert feeding.pull(0, "bfloat16", (0, 1, 2)).edition("bfloat16") == (0, [0.0] * 48)
    assert there.edition("bfloat16") == (0, [0.0] * 32)


def test_memory_that_an_edition_has_begun_to_take_is_not_given_to_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    feeding = Feeding().begin()
    ahead = feeding.pull(1)
    feeding.step(range(2))  # half of it is copied
    monkeypatch.setattr("ps_server.shard.editions.free_bytes", lambda: CELLS * 4 - 1)
    refused = feeding.pull(0, buckets=(2, 3)).error
    assert isinstance(refused, LimitExceeded)
    assert "no room for an edition of 128 bytes: 255 are free" in str(refused)
    feeding.push(-1.0, buckets=range(2, 4))
    assert ahead.edition() == (1, [1.0] * CELLS)
