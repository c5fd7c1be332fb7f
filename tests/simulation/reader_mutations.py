"""Feeds that are broken on purpose: a simulation with readers has to find each."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

import ps_feed.edition
from ps_feed.edition import Arriving, EditionArrays
from ps_feed.subscription import Subscription
from ps_protocol.messages.editions import EditionBucket
from ps_server.core.unit import Bucket
from ps_server.relay.kept import KeptEdition
from ps_server.shard import hosted
from ps_server.shard.editions import TakenEdition
from ps_server.shard.shared_changes import BucketChanges
from ps_worker.followed_model import WeightFeed


def copies_a_bucket_late(patch: pytest.MonkeyPatch) -> None:
    """A bucket that is past the version of an edition is copied all the same."""
    look = TakenEdition.look

    def late(self: TakenEdition, bucket: Bucket, now: float) -> None:
        version = self.version
        if version is not None and bucket.rule.version > version:
            self.version = None
        look(self, bucket, now)
        self.version = version

    patch.setattr(TakenEdition, "look", late)


def changes_since_another_version_and_no_checksum(patch: pytest.MonkeyPatch) -> None:
    """A change is computed from another version than the reader has, and nothing looks at the checksum."""

    class Whatever(int):
        """Equals any number."""

        def __ne__(self, other: object) -> bool:
            return False

        __hash__ = int.__hash__

    patch.setattr(BucketChanges, "_elements", lambda self, version, copies: copies[-1].payload)
    patch.setattr(ps_feed.edition, "zlib", SimpleNamespace(crc32=lambda elements: Whatever()))


def tells_no_rollback(patch: pytest.MonkeyPatch) -> None:
    """A reader does not hear that the job went back to a checkpoint."""
    patch.setattr(Subscription, "restores", 0)


def changes_a_model_that_is_read(patch: pytest.MonkeyPatch) -> None:
    """New weights come into a model while another thread is in a block of `reading`."""
    enter = WeightFeed._enter

    def careless(self: WeightFeed, loaded: Any, *rest: Any) -> Any:
        edition = enter(self, loaded, *rest)
        loaded.readers = 0
        return edition

    patch.setattr(WeightFeed, "_enter", careless)


def keeps_no_last_weights(patch: pytest.MonkeyPatch) -> None:
    """The weights of a job that has ended are gone at once."""
    patch.setattr(hosted, "last_weights", lambda job, now: None)


def takes_parts_of_two_editions(patch: pytest.MonkeyPatch) -> None:
    """A shard that is asked for an edition ahead sends what it has now."""
    look = TakenEdition.look

    def early(self: TakenEdition, bucket: Bucket, now: float) -> None:
        version = self.version
        if version is not None and bucket.index == 1 and bucket.rule.version == version - 1:
            self.version = version - 1
        look(self, bucket, now)
        self.version = version

    patch.setattr(TakenEdition, "look", early)


def keeps_the_first_buffers(patch: pytest.MonkeyPatch) -> None:
    """A reader never asks for newer buffers than those that it has."""
    patch.setattr(EditionArrays, "is_older", lambda self, index, told: False)


def numbers_old_buffers_as_new(patch: pytest.MonkeyPatch) -> None:
    """A shard copies the buffers with which the job began, and says that they are those of rank 0's last step."""
    shown = Bucket.shown
    patch.setattr(Bucket, "shown", lambda self: (shown(self)[0], self.weights.flat))


def takes_buffers_of_earlier_steps(patch: pytest.MonkeyPatch) -> None:
    """A shard that is told of buffers takes the number of the step, and keeps what it has been told before."""
    keeps = Bucket._keeps_for_readers

    def late(self: Bucket, command: Any) -> bool:
        before, is_new = self._for_readers, keeps(self, command)
        if is_new and before is not None and self._for_readers is not None:
            self._for_readers = self._for_readers[0], before[1]
        return is_new

    patch.setattr(Bucket, "_keeps_for_readers", late)


def shares_buffers_of_earlier_steps(patch: pytest.MonkeyPatch) -> None:
    """A reader that asks for an edition which another has asked for gets the buffers of that moment."""
    patch.setattr(TakenEdition, "_renew", lambda self, bucket: None)


def asks_for_frozen_tensors_again(patch: pytest.MonkeyPatch) -> None:
    """A reader takes nothing over from the edition before: frozen tensors come with each one."""
    begin = Arriving.__init__
    patch.setattr(Arriving, "__init__", lambda self, contents, before, *rest: begin(self, contents, None, *rest))


def relays_call_weights_newer(patch: pytest.MonkeyPatch) -> None:
    """A relay says that its weights have an update more than they have."""
    bucket = KeptEdition.bucket

    def newer(self: KeptEdition, index: int) -> EditionBucket:
        sent = bucket(self, index)
        is_frozen = self.arrays.contents.buckets[index].frozen
        return sent if is_frozen else sent._replace(version=sent.version + 1)

    patch.setattr(KeptEdition, "bucket", newer)


# What breaks the feed, the mode and the seed that show it, and the kinds of promises that it breaks.
BROKEN_FEEDS: tuple[tuple[Callable[[pytest.MonkeyPatch], None], str, int, frozenset[str]], ...] = (
    (copies_a_bucket_late, "sync", 38, frozenset({"mixed edition"})),
    (takes_parts_of_two_editions, "sync", 0, frozenset({"mixed edition"})),
    (changes_since_another_version_and_no_checksum, "sync", 2, frozenset({"other bytes"})),
    (tells_no_rollback, "sync", 11, frozenset({"fell unsaid"})),
    (changes_a_model_that_is_read, "sync", 0, frozenset({"two versions in one reading", "mixed model"})),
    (keeps_no_last_weights, "sync", 3, frozenset({"not the last"})),
    (keeps_the_first_buffers, "sync", 2, frozenset({"not the last"})),
    (numbers_old_buffers_as_new, "sync", 0, frozenset({"other buffers"})),
    (takes_buffers_of_earlier_steps, "async", 0, frozenset({"other buffers"})),
    (shares_buffers_of_earlier_steps, "sync", 2, frozenset({"came again", "fell unsaid"})),
    (asks_for_frozen_tensors_again, "sync", 0, frozenset({"came again"})),
)
# The same, in clusters with relays.
BROKEN_RELAYS: tuple[tuple[Callable[[pytest.MonkeyPatch], None], str, int, frozenset[str]], ...] = (
    (relays_call_weights_newer, "sync", 0, frozenset({"other bytes"})),
)
