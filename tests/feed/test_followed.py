"""What a relay has of a job, step by step: a run that ends and the next, readers that come as it closes."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

import ps_torch as ps
from ps_feed.edition import EditionArrays
from ps_protocol.errors import InvalidRequest, NotFound, PSError, RunEnded, TryLater
from ps_protocol.messages.editions import EditionCall, EditionMessage
from ps_server.relay.followed import FollowedJob
from ps_server.relay.room import EditionRoom
from tests.tools.cluster import Cluster
from tests.tools.followed_trainer import FollowedTrainer

WAIT_SECONDS = 30.0


class Following:
    """The stand-in of a subscription: what it has comes when a test says so."""

    def __init__(self, told: Callable[[], None]) -> None:
        self.edition: EditionArrays | None = None
        self.trouble: PSError | None = None
        self.ended = self.closed = self.is_left = False
        self.latest, self.age = 0, 0.0
        self._told = told

    def has(self, edition: EditionArrays) -> None:
        self.edition, self.latest = edition, edition.version
        self._told()

    def ends(self) -> None:
        self.ended = True
        self._told()

    def close(self, timeout: float | None = None) -> None:
        self.closed = True
        self._told()


class Reading:
    """An outbox whose reader takes all at once."""

    def __init__(self) -> None:
        self.parts: list[EditionMessage] = []
        self.error: PSError | None = None
        self.is_finished = False
        self._callback: Callable[[], None] = lambda: None

    def tell(self, answer: EditionMessage) -> None:
        self.parts.append(answer)

    def lend(self, lent: Callable[[], Any], is_small: bool = False) -> None:
        with lent() as (answer, _):
            self.parts.append(answer)

    def finish(self) -> None:
        self.is_finished = True
        self._callback()

    def fail(self, error: PSError) -> None:
        self.error = error

    def on_close(self, callback: Callable[[], None]) -> None:
        self._callback = callback

    @property
    def buckets(self) -> list[int]:
        return [part.bucket.bucket for part in self.parts if part.bucket is not None]


class Followed:
    """A job that is followed, of which `edition` makes editions. made: the subscriptions"""

    def __init__(self, edition: EditionArrays) -> None:
        self._edition = edition
        self.made: list[Following] = []
        self.job = FollowedJob("job", "float32", self._subscribe, EditionRoom())  # type: ignore[arg-type]

    def _subscribe(self, told: Callable[[], None]) -> Following:
        self.made.append(Following(told))
        return self.made[-1]

    def edition(self, run: str, version: int) -> EditionArrays:
        return replace(self._edition, run=run, version=version)

    def pull(self, run: str, version: int, *buckets: int, bases: dict[int, int] | None = None) -> Reading:
        reading = Reading()
        call = EditionCall("job", run, 0, version, "float32", buckets, bases or {})
        self.job.pull(call, reading, "")  # type: ignore[arg-type]
        return reading


@pytest.fixture
def followed(shared: Cluster, job: str, far: None) -> Iterator[Followed]:
    with shared.connect("sync", job=job) as session, ps.subscribe(shared.address, job) as feed:
        FollowedTrainer(session)
        yield Followed(feed.wait_for().arrays)


def test_an_edition_that_the_job_has_left_is_not_its_present_one(followed: Followed) -> None:
    job = followed.job
    assert job.present_version is None
    followed.made[0].has(followed.edition("a", 4))
    assert job.present_version == 4
    followed.made[0].is_left = True
    assert job.present_version is None
    followed.made[0].is_left = False
    followed.made[0].ends()
    assert job.present_version == 4
    job.follow_again()
    assert job.present_version is None, "the next run has none yet"
    followed.made[1].has(followed.edition("b", 1))
    assert job.present_version == 1


def test_a_run_that_has_ended_is_told_as_that_until_the_next_has_an_edition(followed: Followed) -> None:
    job = followed.job
    followed.made[0].has(followed.edition("a", 4))
    followed.made[0].ends()
    with pytest.raises(NotFound, match="has ended at version 4"):
        job.describe(False)
    job.follow_again()
    assert followed.made[0].closed
    assert not job.ended
    followed.made[1].latest = 9  # of the next run, as shards have told
    with pytest.raises(TryLater, match="no edition of the new run"):
        job.describe(False)
    with pytest.raises(TryLater, match="no edition of the new run"):
        followed.pull("", 0)
    last = job.describe(False, "a")
    assert (last.lowest, last.highest, last.ended) == (4, 4, True)
    assert followed.pull("a", 4).is_finished
    assert isinstance(followed.pull("a", 5).error, NotFound)
    with pytest.raises(TryLater, match="no edition of run b"):
        followed.pull("b", 0)
    followed.made[1].has(followed.edition("b", 0))
    here = job.describe(False)
    assert (here.run, here.lowest, here.ended, here.editions) == ("b", 0, False, (0,))
    with pytest.raises(RunEnded):
        job.describe(False, "a")


def test_an_edition_that_waits_for_room_keeps_its_age_when_another_run_begins(followed: Followed) -> None:
    first = followed.made[0]
    for version in (1, 2):
        first.has(followed.edition("a", version))
        followed.job.newest.readers.add(str(version))  # type: ignore[union-attr, arg-type]
    first.has(followed.edition("a", 3))
    first.ends()
    followed.job.follow_again()
    followed.made[1].age = math.inf  # it has no edition yet
    assert followed.job.newest.arrays.version == 2  # type: ignore[union-attr]
    followed.job.newest.readers.clear()  # type: ignore[union-attr]
    followed.job.tick(time.monotonic())
    assert followed.job.newest.arrays.version == 3  # type: ignore[union-attr]
    assert followed.job.newest.age() < 60  # type: ignore[union-attr]


def test_those_who_find_together_that_another_run_has_begun_follow_it_once(followed: Followed) -> None:
    followed.made[0].has(followed.edition("a", 4))
    followed.made[0].ends()
    count = 8
    together, here, first = threading.Barrier(count), threading.Barrier(count), followed.job._subscribe

    def slow(told: Callable[[], None]) -> Any:
        made = first(told)
        with contextlib.suppress(threading.BrokenBarrierError):  # as long as it takes the others to come here, too
            here.wait(0.2)
        return made

    followed.job._subscribe = slow

    def find() -> None:
        together.wait(WAIT_SECONDS)
        followed.job.follow_again()

    threads = [threading.Thread(target=find) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [each.closed for each in followed.made] == [True, False]


def test_what_is_followed_no_more_takes_no_readers(followed: Followed) -> None:
    followed.made[0].has(followed.edition("a", 4))
    waiting = followed.pull("a", 5)
    followed.job.close()
    assert isinstance(waiting.error, TryLater)
    with pytest.raises(TryLater):
        followed.pull("a", 4)
    followed.made[0].has(followed.edition("a", 5))
    assert followed.job.nbytes == 0
    followed.job.follow_again()
    assert len(followed.made) == 1


def test_a_reader_that_comes_as_it_closes_is_told(followed: Followed, monkeypatch: pytest.MonkeyPatch) -> None:
    followed.made[0].has(followed.edition("a", 4))
    there = followed.job._there

    def closes_then(run: str) -> Any:
        kept = there(run)
        followed.job.close()
        return kept

    monkeypatch.setattr(followed.job, "_there", closes_then)
    with pytest.raises(TryLater, match="not followed here any more"):
        followed.pull("a", 5)
    assert followed.job.callers() == []


def test_a_bucket_is_sent_once_and_no_more_are_asked_for_than_there_are(followed: Followed) -> None:
    followed.made[0].has(followed.edition("a", 4))
    count = len(followed.edition("a", 4).contents.buckets)
    assert count > 2
    assert followed.pull("a", 4, 1, 1, 0).buckets == [0, 1]
    assert followed.pull("a", 4).buckets == [*range(count)]
    with pytest.raises(InvalidRequest, match=f"has {count} buckets"):
        followed.pull("a", 4, *[0] * (count + 1))
    with pytest.raises(InvalidRequest, match=f"has {count} buckets"):
        followed.pull("a", 4, 0, bases=dict.fromkeys(range(count + 1), 3))
    assert followed.job.callers() == []
