"""The servers show the relays of a job: what each says of itself, as long as it is there, and no more than fits."""

from __future__ import annotations

import os
import re
import signal
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import ps_torch as ps
from ps_feed.telling import Telling
from ps_protocol.errors import InvalidRequest
from ps_protocol.messages.editions import (
    MOST_REPORTED_READERS,
    RelayReport,
    WeightsAsked,
    WeightsHere,
    read_weights_asked,
    write_weights_asked,
)
from ps_protocol.v1 import feed_pb2
from ps_server.config import ServerConfig
from ps_server.core.feed_figures import AllRelays, FeedFigures, RelayFigures
from ps_server.ops import requests, status_text
from ps_server.rpc.feed_status import feed_figures, feed_message
from ps_server.shard import relay_reports
from ps_server.shard.relay_reports import MOST_RELAYS, MOST_SHOWN, RelayReports
from ps_server.shard.weight_feeds import WeightFeeds
from tests.tools.cluster import Cluster, scrape, until
from tests.tools.feeding import Feeding
from tests.tools.followed_trainer import FollowedTrainer, relay
from tests.tools.launching import Commands

HOST = socket.gethostname()


def shown(cluster: Cluster, job: str) -> list[str]:
    """The lines of status about a job's relays."""
    lines = status_text.table(requests.fetch(cluster.address)).splitlines()
    begin = next(at for at, line in enumerate(lines) if line.startswith(f"job {job}:"))
    end = next((at for at, line in enumerate(lines[begin + 1 :], begin + 1) if line.startswith("job ")), len(lines))
    return [line.strip() for line in lines[begin:end] if re.match("    (relay|and) ", line)]


def readers(cluster: Cluster, job: str) -> list[int]:
    """How many readers each shard has that is read: they have an edition, or wait for one."""
    held = [held for shard in requests.fetch(cluster.address)["shards"] for held in shard["jobs"]]
    return [each["feed"]["reader_count"] for each in held if each["job"] == job and each["feed"]]


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
        name = f'ps_feed_relayed_readers{{job="{job}"}}'
        for server in shared.servers:
            until(lambda: scrape(server.metrics_address).get(name) == 4, "the metric")  # noqa: B023
        behind = f"    relay {named(far.address)} tells of 2 readers; its edition {last} is 0 updates behind"
        until(
            lambda: behind in status_text.table(requests.fetch(near.address)).splitlines(),
            "at the relay, the one behind",
        )


class Heard:
    """What shards have heard of relays, and how many editions they were asked for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reports: list[RelayReport] = []
        self.callers: set[str] = set()
        self.pulls = 0
        self.goes_on = threading.Event()  # otherwise those who report get no answer
        self.goes_on.set()
        describe, pull = WeightFeeds.describe, WeightFeeds.pull

        def described(feeds: WeightFeeds, asked: WeightsAsked, caller: str = "") -> WeightsHere:
            here = describe(feeds, asked, caller)
            if asked.relay is not None:
                self.callers.add(caller)
                self.reports.append(asked.relay)
                self.goes_on.wait()
            return here

        def pulled(feeds: WeightFeeds, *arguments: Any) -> None:
            self.pulls += 1
            pull(feeds, *arguments)

        monkeypatch.setattr(WeightFeeds, "describe", described)
        monkeypatch.setattr(WeightFeeds, "pull", pulled)

    def more(self, count: int) -> list[RelayReport]:
        """Waits for so many reports from now on."""
        before = len(self.reports)
        until(lambda: len(self.reports) >= before + count, "reports")
        return self.reports[before:]


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch) -> Iterator[Heard]:
    spied = Heard(monkeypatch)
    yield spied
    spied.goes_on.set()


def test_a_relay_that_waits_reports_again_and_again_and_its_wait_goes_on(
    shared: Cluster, job: str, trainer: FollowedTrainer, monkeypatch: pytest.MonkeyPatch, heard: Heard
) -> None:
    """Nobody trains: its calls wait for the next edition, which may be far away."""
    monkeypatch.setattr("ps_feed.subscription.TELL_SECONDS", 0.05)
    with relay(shared.address) as near, ps.subscribe(near.address, job) as feed:
        last = trainer.steps(2)
        feed.wait_for(last)
        until(lambda: near.relayed.followed()[0].callers(), "that the reader waits for the next")
        until(lambda: readers(shared, job) == [1, 1], "that the relay waits for it, too")
        same = RelayReport(named(near.address), 1, last)
        until(lambda: set(heard.more(1)) == {same}, "a report of it")
        pulls = heard.pulls
        assert set(heard.more(4)) == {same}, "also where nothing has changed"
        with ps.subscribe(near.address, job):
            said = f"relay {named(near.address)} tells of 2 readers; its edition {last} is 0 updates behind"
            until(lambda: shown(shared, job) == [said], "the number of now")
        assert heard.pulls == pulls
        assert feed.wait_for(trainer.steps(1)).version == last + 1


def test_an_edition_comes_while_a_shard_does_not_answer_a_report(
    shared: Cluster, job: str, trainer: FollowedTrainer, monkeypatch: pytest.MonkeyPatch, heard: Heard
) -> None:
    monkeypatch.setattr("ps_feed.subscription.TELL_SECONDS", 0.05)
    with relay(shared.address) as near, ps.subscribe(near.address, job) as feed:
        last = trainer.steps(2)
        feed.wait_for(last)
        until(lambda: readers(shared, job) == [1, 1], "that the relay waits for the next")
        heard.goes_on.clear()
        heard.more(2)
        assert feed.wait_for(trainer.steps(1)).version == last + 1


def test_a_relay_shows_its_token_with_each_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, heard: Heard
) -> None:
    monkeypatch.setattr("ps_feed.subscription.TELL_SECONDS", 0.05)
    tokens = {role: f"{role:_<32}" for role in ("worker", "reader", "cluster")}
    access = tmp_path / "tokens"
    access.write_text("".join(f"{role} {token} name=a-{role}\n" for role, token in tokens.items()))
    for role, token in tokens.items():
        (tmp_path / role).write_text(token)
    for each in tmp_path.iterdir():
        each.chmod(0o600)
    running = Cluster(shards=1, tokens=access)
    try:
        with (
            running.connect("sync", job="own", token_file=str(tmp_path / "worker")) as session,
            relay(running.address, jobs=(("own", "float32"),), token_file=str(tmp_path / "reader")) as near,
        ):
            FollowedTrainer(session).steps(1)
            until(near.is_ready, "an edition")
            heard.more(4)
            assert heard.callers == {"token:a-reader"}
            told = running.servers[0].shard.jobs()["own"].editions.relays
            assert [each.name for each in told.figures(9, time.monotonic()).shown] == [named(near.address)]
    finally:
        running.stop()


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
    words = ("relay", "--upstream", shared.address, "--port", "0", "--metrics-port", "0", "--jobs", job)
    process = commands.start("-m", "ps_server", *words)
    [address] = process.says(r"ready at (\S+)")
    with ps.subscribe(shared.address, job) as feed:  # so that there is a line of who reads in any case
        feed.wait_for(trainer.steps(2))
        until(lambda: [line.split()[1] for line in shown(shared, job)] == [named(address)], "the relay")
        os.kill(process.process.pid, signal.SIGKILL)
        process.process.wait()
        monkeypatch.setattr(relay_reports, "KEPT_SECONDS", 0.5)
        until(lambda: readers(shared, job) and not shown(shared, job), "that only the relay is forgotten")


def test_a_relay_whose_address_is_no_name_says_nothing_of_itself(
    shared: Cluster, job: str, trainer: FollowedTrainer, caplog: pytest.LogCaptureFixture, heard: Heard
) -> None:
    server = replace(ServerConfig(), advertise="relay of ours:7000")
    trainer.steps(2)
    with relay(shared.address, server, jobs=((job, "float32"), (job, "bfloat16"))) as near:
        until(near.is_ready, "that it follows the job")
        assert not heard.reports
    assert [each.levelname for each in caplog.records if "'relay of ours:7000'" in each.message] == ["WARNING"]


# -- what a shard keeps ------------------------------------------------------------------------------------------------


def ask(feeding: Feeding, report: RelayReport, caller: str = "") -> None:
    feeding.shard.weight_feeds.describe(WeightsAsked("job", follows=True, relay=report), caller)


def names(told: RelayReports, now: float = 0.0) -> list[str]:
    return [each.name for each in told.figures(0, now).shown]


def test_a_shard_keeps_a_relay_as_long_as_it_reports() -> None:
    feeding = Feeding().begin()
    feeding.pull(100)  # so that somebody follows the job in any case
    ask(feeding, RelayReport("near:1", 4, 0))
    for _ in range(100):
        feeding.pass_time(7.5)
        assert feeding.seen.relays == AllRelays((RelayFigures("near:1", 4, 0, 0),), 1, 4)
        ask(feeding, RelayReport("near:1", 4, 0))
    feeding.step()
    assert feeding.seen.relays.shown == (RelayFigures("near:1", 4, 0, 1),), "how far it is behind is as of now"
    feeding.pass_time(20.0)
    assert feeding.seen.relays.count == 1
    feeding.pass_time(0.5)
    assert feeding.seen.relays == AllRelays()


def test_a_version_that_the_job_has_not_come_to_is_not_shown() -> None:
    """The relay has it from before a rollback, or has made it up."""
    feeding = Feeding().begin()
    feeding.step()
    for version, seen in ((0, (0, 1)), (1, (1, 0)), (2, (None, 0)), (2**64 - 1, (None, 0)), (None, (None, 0))):
        ask(feeding, RelayReport("near:1", 4, version))
        assert feeding.seen.relays.shown == (RelayFigures("near:1", 4, *seen),)


def test_readers_that_are_no_relays_tell_nothing() -> None:
    feeding = Feeding().begin()
    feeding.describe(follows=True)
    assert feeding.seen.relays == AllRelays()


def test_one_that_claims_to_be_a_thousand_relays_leaves_room_for_others() -> None:
    told = RelayReports()
    for number in range(1000):
        told.tell(RelayReport(f"r{number}:1", MOST_REPORTED_READERS), "hostile", 0.0)
    assert told.figures(0, 0.0).count == MOST_RELAYS // 2
    told.tell(RelayReport("honest:1", 7), "reader", 0.0)
    assert "honest:1" in names(told), "although others claim to have more readers"
    for number in range(1000):
        told.tell(RelayReport(f"s{number}:1", 1), f"caller {number}", 0.0)
    assert told.figures(0, 0.0).count == MOST_RELAYS
    assert len(names(told)) == MOST_SHOWN
    told.tell(RelayReport("later:1", 7), "reader", 21.0)
    assert told.figures(0, 21.0) == AllRelays((RelayFigures("later:1", 7),), 1, 7), "there is room again"


def test_of_many_relays_those_with_the_most_readers_are_shown() -> None:
    told = RelayReports()
    for number in range(40):
        told.tell(RelayReport(f"r{number}:1", number), "reader", 0.0)
    assert names(told) == [f"r{number}:1" for number in range(39, 7, -1)]
    figures = told.figures(0, 0.0)
    assert (figures.count, figures.readers, told.readers(0.0)) == (40, sum(range(40)), sum(range(40)))


def test_an_edition_may_be_ahead_of_tables_and_not_of_all_weights() -> None:
    told = RelayReports()
    told.tell(RelayReport("near:1", 7, 4), "reader", 0.0)
    assert told.figures(3, 0.0, highest=4).shown == (RelayFigures("near:1", 7, 4, 0),)
    assert told.figures(3, 0.0).shown == (RelayFigures("near:1", 7),)
    assert told.figures(6, 0.0, highest=7).shown == (RelayFigures("near:1", 7, 4, 2),)


def test_a_principal_cannot_speak_for_a_relay_of_another() -> None:
    told = RelayReports()
    told.tell(RelayReport("near:1", 7), "reader", 0.0)
    told.tell(RelayReport("near:1", 0), "hostile", 20.0)
    assert told.readers(20.0) == 7
    told.tell(RelayReport("near:1", 0), "hostile", 20.5)
    assert told.figures(0, 20.5).shown == (RelayFigures("near:1", 0),), "the first had gone"


def test_a_relay_has_its_name_from_the_caller_of_the_call() -> None:
    feeding = Feeding().begin()
    ask(feeding, RelayReport("near:1", 7), "reader")
    ask(feeding, RelayReport("near:1", 0), "hostile")
    assert feeding.seen.relays.readers == 7


# -- what a relay says, and when ---------------------------------------------------------------------------------------


def test_reports_are_due_after_a_pause_whoever_else_has_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    now, said = [0.0], [RelayReport("near:1", 1)]
    monkeypatch.setattr("ps_feed.telling.time", SimpleNamespace(monotonic=lambda: now[0]))
    telling = Telling(lambda: said[0], lambda: 5.0)
    telling.renew()
    now[0] = 4.0
    assert not telling.is_due()
    telling.renew()  # with the next edition
    now[0] = 8.0
    assert not telling.is_due()
    said[0], now[0] = RelayReport("near:1", 2), 9.0
    assert telling.last == RelayReport("near:1", 1)
    assert [telling.is_due() for _ in range(3)] == [True, False, False], "one thread tells all shards"
    assert telling.last == RelayReport("near:1", 2)
    now[0] = 14.0
    assert telling.is_due(), "also where nothing has changed"


def test_a_reader_that_is_no_relay_has_no_reports() -> None:
    telling = Telling(lambda: None, lambda: 0.0)
    telling.renew()
    assert not telling.is_due()
    assert telling.last is None


# -- on the wire, and as text ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("report", [None, RelayReport("near:1", 3), RelayReport("[::1%lo]:1", 0, 7)])
def test_what_a_relay_says_travels(report: RelayReport | None) -> None:
    asked = WeightsAsked("job", relay=report)
    assert read_weights_asked(write_weights_asked(asked)) == asked


@pytest.mark.parametrize("name", ["", "x" * 129, "a b:1", "\x1b[31m:1", "<b>:1", "ä:1", "near:1\n"])
def test_a_name_that_no_relay_may_have_is_refused(name: str) -> None:
    asked = feed_pb2.DescribeWeightsRequest(job="job", relay=feed_pb2.RelayReport(name=name))
    with pytest.raises(InvalidRequest, match="the name of a relay"):
        read_weights_asked(asked.SerializeToString())


def test_numbers_that_relays_add_up_stay_numbers_of_the_wire() -> None:
    most = 2**32 - 1
    message = feed_pb2.DescribeWeightsRequest(relay=feed_pb2.RelayReport(name="near:1", reader_count=most))
    assert read_weights_asked(message.SerializeToString()).relay == RelayReport("near:1", MOST_REPORTED_READERS)
    sent = write_weights_asked(WeightsAsked("job", relay=RelayReport("near:1", 300 * MOST_REPORTED_READERS)))
    assert read_weights_asked(sent).relay == RelayReport("near:1", MOST_REPORTED_READERS)
    told = RelayReports()
    for number in range(MOST_RELAYS):
        told.tell(RelayReport(f"r{number}:1", MOST_REPORTED_READERS), "", 0.0)
    figures = FeedFigures(relays=told.figures(0, 0.0))
    assert feed_figures(feed_message(figures)) == figures


def test_status_has_eight_relays_with_a_line_each_and_one_of_all_others() -> None:
    def told(name: str, readers: int, version: int | None, behind: int = 0) -> dict[str, object]:
        return {"name": name, "reader_count": readers, "edition_version": version, "behind": behind}

    def lines(*shards: list[dict[str, object]], count: int = 0, readers: int = 0) -> list[str]:
        more = {"relay_count": count, "relayed_reader_count": readers}
        held = [{"job": "job", "feed": {"relays": relays, **more}} for relays in shards]
        others = {"job": "other", "feed": {"relays": [told("x:1", 9, 9)], "relay_count": 9, "relayed_reader_count": 9}}
        said = {"shards": [*({"jobs": [each]} for each in held), {"jobs": [{"job": "job", "feed": None}, others]}]}
        return status_text.relay_lines(said, "job")

    assert status_text.relay_lines({"shards": []}, "job") == lines() == lines([]) == []
    assert lines([told("a:1", 2, 7, 1), told("b:1", 1, None)], [told("a:1", 2, 8)], count=2, readers=3) == [
        "    relay a:1 tells of 2 readers; its edition 8 is 0 updates behind",
        "    relay b:1 tells of 1 reader, and of no edition",
    ]
    relays = [told(f"r{number}:1", number, 0) for number in range(11)]
    many = lines(relays)
    assert [line.split()[1] for line in many[:8]] == [f"r{number}:1" for number in range(10, 2, -1)]
    assert many[8:] == ["    and 3 more relays with 3 readers"]
    assert lines(relays, count=20, readers=100)[8:] == ["    and 12 more relays with 48 readers"]
    assert lines(relays[:6], relays[5:], count=9, readers=50)[8:] == ["    and 3 more relays with 3 readers"]
