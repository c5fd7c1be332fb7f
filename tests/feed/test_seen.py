"""Operators see who reads a job's weights at the servers: in status, on the page's answer, and as metrics."""

from __future__ import annotations

import contextlib
import gc
import re
import weakref
from dataclasses import replace

import pytest

import ps_torch as ps
from ps_feed.edition import Arriving
from ps_feed.edition_client import EachShard, ShardReader
from ps_protocol.errors import LimitExceeded, PSError
from ps_protocol.messages.editions import EditionBucket, EditionCall, WeightsAsked
from ps_protocol.v1 import shard_pb2
from ps_runtime.credentials import PLAINTEXT
from ps_server.core.feed_figures import FeedFigures, of_all_wires
from ps_server.ops import requests, status_text
from ps_server.rpc.feed_status import feed_figures, feed_message
from tests.tools.cluster import Cluster, scrape, until
from tests.tools.documented_metrics import documented
from tests.tools.followed_trainer import FollowedTrainer, relay

SAME = {"ps_edition_version", "ps_edition_behind", "ps_edition_bytes", "ps_feed_readers"}
SAME |= {"ps_feed_sent_bytes_total", "ps_feed_element_bytes_total", "ps_feed_mapped_readers", "ps_edition_held_bytes"}


def shown(cluster: Cluster, job: str) -> str:
    """What status says of who reads a job's weights; empty: nothing."""
    lines = status_text.table(requests.fetch(cluster.address)).splitlines()
    begin = next(at for at, line in enumerate(lines) if line.startswith(f"job {job}:"))
    own = [line for line in lines[begin + 1 :] if line.startswith("  weights are read: ")]
    return own[0].removeprefix("  weights are read: ") if own else ""


@pytest.mark.usefixtures("far")
def test_status_says_in_one_line_how_a_job_is_read(shared: Cluster, job: str, trainer: FollowedTrainer) -> None:
    assert shown(shared, job) == ""
    with (
        ps.subscribe(shared.address, job, changes=False) as feed,
        ps.subscribe(shared.address, job, wire="bfloat16", changes=False) as narrow,
    ):
        last = trainer.steps(3)
        for each in (feed, narrow):
            each.wait_for(last)
        expected = rf"edition {last}, \d+\.\d s old, 0 updates behind, 2 readers, \S+ \w+ in memory, \S+ \w+ sent"
        until(lambda: re.fullmatch(expected, shown(shared, job)), "that both wait for the next")


def test_status_says_what_changes_have_saved(shared: Cluster, job: str, trainer: FollowedTrainer) -> None:
    with ps.subscribe(shared.address, job, changes=True, wire="bfloat16") as feed:
        for _ in range(6):
            feed.wait_for(trainer.step())
        until(lambda: " in place of " in shown(shared, job), "that less was sent than there is")


def test_status_says_why_readers_get_no_newer_weights(
    shared: Cluster, job: str, trainer: FollowedTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ps.subscribe(shared.address, job) as feed:
        feed.wait_for()
        monkeypatch.setattr("ps_server.shard.editions.free_bytes", lambda: 99)
        trainer.steps(2)
        until(lambda: re.search("; shard .*no room for an edition", shown(shared, job)), "that it is said")
        until(lambda: isinstance(feed.trouble, LimitExceeded), "that the reader is told, too")
        metrics = [scrape(server.metrics_address) for server in shared.servers]
        refused = f'ps_edition_refused_total{{job="{job}",reason="no_room"}}'
        assert sum(found.get(refused, 0) for found in metrics) > 0
        monkeypatch.undo()
        feed.wait_for(trainer.step())
        until(lambda: "no room" not in shown(shared, job), "that it is over")


def test_shards_and_relays_have_the_same_metrics_of_readers(
    shared: Cluster, job: str, trainer: FollowedTrainer
) -> None:
    for name in SAME:
        assert {metric.section for metric in documented() if metric.name == name} == {"Shards", "Relays"}
    with relay(shared.address) as near, ps.subscribe(near.address, job) as feed:
        last = trainer.steps(3)
        feed.wait_for(last)
        for address in (near.metrics_address, *(server.metrics_address for server in shared.servers)):
            found = scrape(address)
            assert {name for name in SAME if f'{name}{{job="{job}"}}' in found} == SAME
            assert found[f'ps_edition_version{{job="{job}"}}'] == last
            assert found[f'ps_edition_behind{{job="{job}"}}'] == 0
            assert found[f'ps_feed_sent_bytes_total{{job="{job}"}}'] > 0
        assert f'ps_edition_taken_age_seconds{{job="{job}"}}' in scrape(shared.servers[0].metrics_address)
        assert f'ps_edition_age_seconds{{job="{job}"}}' not in scrape(shared.servers[0].metrics_address), (
            "a job whose readers ask rarely would alert"
        )


def test_a_job_that_nobody_reads_has_no_metrics_of_readers(shared: Cluster, job: str, trainer: FollowedTrainer) -> None:
    found = scrape(shared.servers[0].metrics_address)
    assert not [name for name in found if name.startswith(("ps_edition", "ps_feed")) and f'job="{job}"' in name]


@pytest.mark.parametrize("figures", [FeedFigures(), FeedFigures(3, 0, 2.5, 4, 5, 6, 7, "no room", mapped=8, held=9)])
def test_figures_of_readers_travel(figures: FeedFigures) -> None:
    sent = shard_pb2.FeedStatus.FromString(feed_message(figures).SerializeToString())
    assert feed_figures(sent) == figures
    assert sent.HasField("age_duration") == (figures.version is not None)


def test_a_job_in_several_wire_formats_counts_as_one() -> None:
    one, other = FeedFigures(1, 7, 0.5, 1, 10, 20, 30), FeedFigures(2, 8, 0.25, 0, 1, 2, 3, "away", mapped=4, held=5)
    together = FeedFigures(3, 8, 0.5, 1, 11, 22, 33, "away", mapped=5, held=11)
    assert of_all_wires([replace(one, mapped=1, held=6), other]) == together
    assert of_all_wires([replace(one, version=None), FeedFigures()]).version is None


@pytest.mark.usefixtures("far")
def test_an_edition_that_could_not_be_received_keeps_no_memory(
    shared: Cluster, job: str, trainer: FollowedTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As long as the trouble stays, so would all that its traceback refers to."""
    arrived: list[weakref.ref[Arriving]] = []

    def breaks(self: Arriving, sent: EditionBucket, timeline: int, what: str) -> None:
        arrived.append(weakref.ref(self))
        raise LimitExceeded("as where there is no room")

    with ps.subscribe(shared.address, job) as feed:
        feed.wait_for()
        with monkeypatch.context() as patched:
            patched.setattr(Arriving, "take", breaks)
            trainer.step()
            until(lambda: isinstance(feed.trouble, LimitExceeded), "the trouble")
            feed.close()
        assert isinstance(feed.trouble, LimitExceeded)
        assert arrived
        # gRPC's threads may have it yet.
        until(lambda: gc.collect() >= 0 and all(each() is None for each in arrived), "the end of what came")


class Part:
    """Stands for what has come of an edition."""


@pytest.mark.parametrize("is_refused", [False, True], ids=["here", "by the shard"])
def test_what_a_call_to_the_shards_had_is_gone_with_its_error(
    shared: Cluster, job: str, trainer: FollowedTrainer, is_refused: bool
) -> None:
    """A reader asks again and again, and parts of editions are large: none waits for the garbage collector."""
    parts: list[weakref.ref[Part]] = []
    shards = EachShard(shared.address, PLAINTEXT)
    timeline = shards.readers[0].describe(WeightsAsked(job, "", False, "float32", False, ())).timeline
    call = EditionCall(job, "", timeline, 0, "float32", (99,) if is_refused else (), {})

    def pull(reader: ShardReader) -> None:
        part = Part()
        parts.append(weakref.ref(part))

        def take(*_: object) -> None:
            raise LimitExceeded(f"no room for {part}")

        reader.pull(call, take, lambda *_: None, lambda _: None)

    gc.collect()
    gc.disable()
    try:
        for _ in range(3):
            with contextlib.suppress(PSError):
                shards.all(pull)
        assert len(parts) == 3 * len(shards.readers)
        until(lambda: all(each() is None for each in parts), "the end of what came")  # gRPC's threads may have it yet
    finally:
        gc.enable()
        shards.close()
