"""The servers show the relays of a job: what each says of itself, as long as it is there, and no more than fits."""

from __future__ import annotations

import os
import re
import signal
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import ps_torch as ps
from ps_protocol.errors import InvalidRequest
from ps_protocol.messages.editions import (
    MOST_TOLD_READERS,
    EditionCall,
    RelayReport,
    WeightsAsked,
    read_edition_call,
    read_weights_asked,
    write_edition_call,
    write_weights_asked,
)
from ps_protocol.v1 import feed_pb2
from ps_server.config import ServerConfig
from ps_server.core.feed_figures import FeedFigures, RelayFigures, of_all_wires
from ps_server.ops import status
from ps_server.shard import told_relays
from ps_server.shard.told_relays import MOST_RELAYS, ToldRelays
from tests.tools.cluster import Cluster, scrape, until
from tests.tools.feeding import Feeding, Reader
from tests.tools.followed_trainer import FollowedTrainer, relay
from tests.tools.launching import Commands

HOST = socket.gethostname()


def shown(cluster: Cluster, job: str) -> list[str]:
    """The lines of status about a job's relays."""
    lines = status.table(status.fetch(cluster.address)).splitlines()
    begin = next(at for at, line in enumerate(lines) if line.startswith(f"job {job}:"))
    end = next((at for at, line in enumerate(lines[begin + 1 :], begin + 1) if line.startswith("job ")), len(lines))
    return [line.strip() for line in lines[begin:end] if re.match("    (relay|and) ", line)]


def named(address: str) -> str:
    """What a relay of this host, at a loopback address, calls itself."""
    return f"{HOST}:{address.rpartition(':')[2]}"


# -- relays that are there ---------------------------------------------------------------------------------------------


def test_the_servers_show_a_relay_its_readers_and_those_of_relays_behind_it(
    shared: Cluster, job: str, trainer: FollowedTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ps_feed.subscription.TELL_SECONDS", 0.1)
    with (
        relay(shared.address) as near,
        relay(near.address) as far,
        ps.subscribe(near.address, job) as one,
        ps.subscribe(far.address, job) as two,
        ps.subscribe(far.address, job) as three,
    ):
        last = trainer.steps(2)
        for feed in (one, two, three):
            feed.wait_for(last)
        # Its own two are a reader and the relay behind it, which has two.
        said = f"relay {named(near.address)} tells of 4 readers; its edition {last} is 0 updates behind"
        until(lambda: shown(shared, job) == [said], "one line, for all shards")
        for server in shared.servers:
            assert scrape(server.metrics_address)[f'ps_feed_relayed_readers{{job="{job}"}}'] == 4
        behind = f"    relay {named(far.address)} tells of 2 readers; its edition {last} is 0 updates behind"
        until(lambda: behind in status.table(status.fetch(near.address)).splitlines(), "at the relay, the one behind")


def test_a_relay_tells_of_readers_that_come_while_nobody_trains(
    shared: Cluster, job: str, trainer: FollowedTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its call waits for the next edition, which may be far away."""
    monkeypatch.setattr("ps_feed.subscription.TELL_SECONDS", 0.1)
    monkeypatch.setattr(told_relays, "KEPT_SECONDS", 0.5)
    with relay(shared.address) as near, ps.subscribe(near.address, job) as feed:
        last = trainer.steps(2)
        feed.wait_for(last)
        for readers in ("1 reader", "2 readers"):
            said = f"relay {named(near.address)} tells of {readers}; its edition {last} is 0 updates behind"
            until(lambda: shown(shared, job) == [said], "the number of now")  # noqa: B023
            more = ps.subscribe(near.address, job)
        more.close()


def test_a_relay_in_several_wire_formats_is_one(
    shared: Cluster, job: str, trainer: FollowedTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ps_feed.subscription.TELL_SECONDS", 0.1)
    with (
        relay(shared.address) as near,
        ps.subscribe(near.address, job) as one,
        ps.subscribe(near.address, job, wire="bfloat16") as other,
    ):
        last = trainer.steps(2)
        for feed in (one, other):
            feed.wait_for(last)
        said = f"relay {named(near.address)} tells of 2 readers; its edition {last} is 0 updates behind"
        until(lambda: shown(shared, job) == [said], "one line")


def test_a_relay_is_called_as_readers_know_it(shared: Cluster, job: str, trainer: FollowedTrainer) -> None:
    server = replace(ServerConfig(), advertise="relay.example:7000")
    with relay(shared.address, server, jobs=((job, "float32"),)):
        until(lambda: shown(shared, job), "that it follows the job")
        assert shown(shared, job)[0].startswith("relay relay.example:7000 tells of 0 readers")


@pytest.fixture
def commands(tmp_path: Path) -> Iterator[Commands]:
    started = Commands(tmp_path)
    yield started
    started.close()


def test_a_relay_that_is_killed_is_soon_not_shown_any_more(
    shared: Cluster, job: str, trainer: FollowedTrainer, commands: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(told_relays, "KEPT_SECONDS", 0.5)
    words = ("relay", "--upstream", shared.address, "--port", "0", "--metrics-port", "0", "--jobs", job)
    process = commands.start("-m", "ps_server", *words)
    [address] = process.says(r"ready at (\S+)")
    with ps.subscribe(shared.address, job) as feed:  # so that there is a line of who reads in any case
        feed.wait_for(trainer.steps(2))
        until(lambda: [line.split()[1] for line in shown(shared, job)] == [named(address)], "the relay")
        os.kill(process.process.pid, signal.SIGKILL)
        process.process.wait()
        until(lambda: not shown(shared, job), "that it is forgotten")
        assert status.fetch(shared.address)["shards"][0]["jobs"][0]["feed"] is not None


# -- what a shard keeps ------------------------------------------------------------------------------------------------


def ask(feeding: Feeding, report: RelayReport, caller: str = "") -> None:
    asked = WeightsAsked("job", follows=True, relay=report)
    feeding.shard.weight_feeds.describe(asked, caller)


def test_a_shard_keeps_a_relay_while_it_waits_and_ten_seconds_more() -> None:
    feeding = Feeding().begin()
    ask(feeding, RelayReport("near:1", 3))
    assert feeding.seen.relays == (RelayFigures("near:1", 3),)
    reader, call = Reader(), EditionCall("job", "", 0, 1, "float32", (), relay=RelayReport("near:1", 4, 0))
    feeding.shard.weight_feeds.pull(call, reader)  # type: ignore[arg-type]
    feeding.pass_time(3600.0)
    assert feeding.seen.relays == (RelayFigures("near:1", 4, 0, 0),)
    feeding.step()
    assert feeding.seen.relays == (RelayFigures("near:1", 4, 0, 1),), "how far it is behind is as of now"
    reader.edition()
    feeding.pass_time(9.0)
    assert feeding.seen.relays
    feeding.pass_time(2.0)
    ask(feeding, RelayReport("other:1", 1))
    assert [each.name for each in feeding.seen.relays] == ["other:1"]


def test_readers_that_are_no_relays_tell_nothing() -> None:
    feeding = Feeding().begin()
    feeding.describe(follows=True)
    feeding.shard.weight_feeds.describe(WeightsAsked("job", relay=RelayReport("near:1", 3)))  # it does not follow
    assert (feeding.seen.relays, feeding.seen.relayed) == ((), 0)


def test_a_call_that_is_refused_holds_no_relay() -> None:
    feeding = Feeding(limit=1).begin()
    feeding.pull(1)
    call = EditionCall("job", "", 0, 1, "float32", (), relay=RelayReport("near:1", 4))
    with pytest.raises(Exception, match="max-feeds"):
        feeding.shard.weight_feeds.pull(call, Reader())  # type: ignore[arg-type]
    assert feeding.seen.relays == ()


def test_one_that_claims_to_be_a_thousand_relays_leaves_room_for_others() -> None:
    told = ToldRelays()
    for number in range(1000):
        told.tell(RelayReport(f"r{number}:1", MOST_TOLD_READERS), "hostile", 0.0)
    assert len(told.figures(0, 0.0)) == MOST_RELAYS // 2
    told.tell(RelayReport("honest:1", 7), "reader", 0.0)
    assert RelayFigures("honest:1", 7) in told.figures(0, 0.0)
    for number in range(1000):
        told.tell(RelayReport(f"s{number}:1", 1), f"caller {number}", 0.0)
    assert len(told.figures(0, 0.0)) == MOST_RELAYS
    told.tell(RelayReport("later:1", 7), "reader", 11.0)
    assert told.figures(0, 11.0) == (RelayFigures("later:1", 7),), "places of those that are gone are free"


def test_a_principal_cannot_speak_for_a_relay_of_another() -> None:
    told = ToldRelays()
    told.tell(RelayReport("near:1", 7), "reader", 0.0)
    told.tell(RelayReport("near:1", 0), "hostile", 1.0)
    assert told.figures(0, 1.0) == (RelayFigures("near:1", 7),)
    told.hold(RelayReport("near:1", 0), "hostile", lambda: 2.0)()
    assert told.figures(0, 10.0) == (RelayFigures("near:1", 7),)
    told.tell(RelayReport("near:1", 0), "hostile", 11.0)
    assert told.figures(0, 11.0) == (RelayFigures("near:1", 0),), "it was gone"


def test_a_relay_is_held_by_the_last_of_its_feeds() -> None:
    told, now = ToldRelays(), [0.0]
    first, second = (told.hold(RelayReport("near:1", 7), "", lambda: now[0]) for _ in range(2))
    now[0] = 100.0
    first()
    first()
    assert told.figures(0, 200.0)
    now[0] = 200.0
    second()
    assert told.figures(0, 209.0)
    assert not told.figures(0, 211.0)


# -- on the wire, and as text ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("report", [None, RelayReport("near:1", 3), RelayReport("[::1%lo]:1", 0, 7)])
def test_what_a_relay_says_travels(report: RelayReport | None) -> None:
    asked = WeightsAsked("job", relay=report)
    assert read_weights_asked(write_weights_asked(asked)) == asked
    call = EditionCall("job", "", 0, 1, "float32", (), relay=report)
    assert read_edition_call(write_edition_call(call)) == call


@pytest.mark.parametrize("name", ["", "x" * 129, "a b:1", "\x1b[31m:1", "<b>:1", "ä:1", "near:1\n"])
def test_a_name_that_no_relay_may_have_is_refused(name: str) -> None:
    asked = feed_pb2.DescribeWeightsRequest(job="job", relay=feed_pb2.RelayReport(name=name))
    with pytest.raises(InvalidRequest, match="the name of a relay"):
        read_weights_asked(asked.SerializeToString())
    call = feed_pb2.PullEditionRequest(job="job", relay=feed_pb2.RelayReport(name=name))
    with pytest.raises(InvalidRequest, match="the name of a relay"):
        read_edition_call(call.SerializeToString())


def test_numbers_that_relays_add_up_stay_numbers_of_the_wire() -> None:
    most = 2**32 - 1
    message = feed_pb2.DescribeWeightsRequest(relay=feed_pb2.RelayReport(name="near:1", reader_count=most))
    assert read_weights_asked(message.SerializeToString()).relay == RelayReport("near:1", MOST_TOLD_READERS)
    sent = write_weights_asked(WeightsAsked("job", relay=RelayReport("near:1", 300 * MOST_TOLD_READERS)))
    assert read_weights_asked(sent).relay == RelayReport("near:1", MOST_TOLD_READERS)
    feed = FeedFigures(relays=tuple(RelayFigures(f"r{number}:1", MOST_TOLD_READERS) for number in range(MOST_RELAYS)))
    assert feed.relayed < most


def test_relays_of_several_wire_formats_count_once() -> None:
    one, two = RelayFigures("a:1", 3, 7, 0), RelayFigures("b:1", 2)
    together = of_all_wires([FeedFigures(1, relays=(two,)), FeedFigures(1, relays=(one, two))])
    assert (together.relays, together.relayed) == ((one, two), 5)


def test_status_has_eight_relays_with_a_line_each_and_one_of_all_others() -> None:
    def told(name: str, readers: int, version: int | None, behind: int = 0) -> dict[str, object]:
        return {"name": name, "reader_count": readers, "edition_version": version, "behind": behind}

    def lines(*shards: list[dict[str, object]]) -> list[str]:
        held = [{"job": "job", "feed": {"relays": relays}} for relays in shards]
        silent = {"jobs": [{"job": "job", "feed": None}, {"job": "other", "feed": {"relays": [told("x:1", 9, 9)]}}]}
        said = {"shards": [*({"jobs": [each]} for each in held), silent]}
        return status.relay_lines(said, "job")

    assert lines([]) == []
    assert lines([told("a:1", 2, 7, 1), told("b:1", 1, None)], [told("a:1", 2, 8)]) == [
        "    relay a:1 tells of 2 readers; its edition 8 is 0 updates behind",
        "    relay b:1 tells of 1 reader, and has no edition yet",
    ]
    many = lines([told(f"r{number}:1", number, 0) for number in range(11)])
    assert [line.split()[1] for line in many[:8]] == [f"r{number}:1" for number in range(10, 2, -1)]
    assert many[8:] == ["    and 3 more relays with 3 readers"]
