"""A relay hands editions on as they are, also while its upstream is away. Readers leave a dead one for another."""

from __future__ import annotations

import contextlib
import io
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import ps_torch as ps
from ps_feed.edition_client import cluster as known_at
from ps_protocol.errors import (
    Forbidden,
    InvalidRequest,
    LimitExceeded,
    NotFound,
    TryLater,
    Unauthenticated,
    Unreachable,
)
from ps_protocol.messages.editions import WeightsAsked
from ps_runtime.credentials import PLAINTEXT
from ps_server.config import ServerConfig
from ps_server.core.limits import DEFAULTS
from ps_server.ops import feed_screen, requests, status_text
from ps_server.relay import relayed
from tests.tools.cases import cases
from tests.tools.cluster import Cluster, scrape, until
from tests.tools.documented_metrics import documented
from tests.tools.followed_trainer import FollowedTrainer, relay
from tests.tools.remembering_trainer import in_background
from tests.tools.rollbacks import QUICK

SECRET = "0123456789abcdef" * 2


def test_a_relay_that_stops_follows_nothing_new(shared: Cluster, job: str, trainer: FollowedTrainer) -> None:
    with relay(shared.address) as near:
        assert near.relayed.get(job, "float32") in near.relayed.followed()
        near.relayed.stop()
        with pytest.raises(TryLater, match="this relay is stopping"):
            near.relayed.get(job, "bfloat16")
        assert len(near.relayed.followed()) == 1


@pytest.mark.parametrize("wire", cases(["bfloat16"], ["float32", "float16"]))
def test_editions_pass_two_relays_to_the_bit_and_their_versions_rise(
    shared: Cluster, job: str, trainer: FollowedTrainer, wire: str
) -> None:
    with (
        relay(shared.address) as near,
        relay(near.address) as far,
        ps.subscribe(far.address, job, wire=wire) as feed,
    ):
        editions: list[Any] = [feed.wait_for()]
        reader = in_background(lambda: editions.extend(feed))
        for _ in range(4):
            last = trainer.steps(5)
            until(lambda: editions[-1].version == last, "the last edition")  # noqa: B023
        assert (feed.behind, feed.trouble) == (0, None)
        feed.close()
        reader.join()
    versions = [edition.version for edition in editions[1:]]
    assert versions == sorted(set(versions))
    assert len(versions) > 3
    for edition in editions:
        assert trainer.has(edition.state_dict(), edition.version, getattr(torch, wire))


def test_a_relay_sends_what_changed_and_what_comes_of_it_is_the_same_to_the_bit(
    shared: Cluster, job: str, trainer: FollowedTrainer
) -> None:
    with (
        relay(shared.address) as near,
        relay(near.address) as far,
        ps.subscribe(far.address, job, changes=True, wire="bfloat16") as feed,
    ):
        feed.wait_for()
        followed = far.relayed.followed()[0]
        for _ in range(8):
            last = trainer.step()
            assert trainer.has(feed.wait_for(last).state_dict(), last, torch.bfloat16)
        assert followed.sent_bytes < 0.9 * followed.sent_elements, "Adam moves few of the first bytes"


@pytest.mark.parametrize("mode", cases(["async"], ["ssp:1", "local:2"]))
def test_a_relay_has_the_newest_weights_of_the_other_modes_once_training_rests(
    shared: Cluster, job: str, mode: str
) -> None:
    with shared.connect(mode, job=job) as session, relay(shared.address) as near:
        trainer = FollowedTrainer(session)
        with ps.subscribe(near.address, job) as feed:
            last = trainer.steps(10)
            edition = feed.wait_for(last)
            assert trainer.has(edition.state_dict(), last)


def test_readers_with_different_needs_share_a_relay(shared: Cluster, job: str, trainer: FollowedTrainer) -> None:
    with (
        relay(shared.address) as near,
        ps.subscribe(near.address, job) as whole,
        ps.subscribe(near.address, job, wire="bfloat16") as narrow,
        ps.subscribe(near.address, job, parameters=["first.bias", "scale"]) as part,
        ps.subscribe(near.address, job, every=4) as rare,
    ):
        for feed in (whole, narrow, part, rare):
            assert feed.wait_for().version == 0
        trainer.steps(3)
        for feed in (whole, narrow, part):
            assert feed.wait_for(3).version == 3
        assert trainer.has(whole.state_dict(), 3)
        assert trainer.has(narrow.state_dict(), 3, torch.bfloat16)
        assert part.state_dict().keys() == {"first.bias", "scale"}
        assert torch.equal(part.state_dict()["first.bias"], trainer.past[3]["first.bias"])
        assert rare.version == 0
        trainer.steps(1)
        assert rare.wait_for(1).version == 4
        with (
            ps.subscribe(near.address, job, parameters=["nonsense"]) as wrong,
            pytest.raises(InvalidRequest, match="has no parameter nonsense"),
        ):
            wrong.wait_for()


def test_a_relay_that_starts_with_nothing_says_so_until_it_has_a_whole_edition(make_cluster: Any) -> None:
    with relay("127.0.0.1:1") as lost, ps.subscribe(lost.address) as feed:
        until(lambda: isinstance(feed.trouble, TryLater) and "127.0.0.1:1" in str(feed.trouble), "the trouble")
        with pytest.raises(Unreachable, match=r"did not come to version 0: .*127\.0\.0\.1:1"):
            feed.wait_for(timeout=0.1)
    running = make_cluster(shards=1)
    with relay(running.address) as near:
        until(lambda: (near.relayed.jobs(), near.relayed.upstream.looked)[1], "the first look at the servers")
        with pytest.raises(NotFound, match=r"no job 'default' at 127\.0\.0\.1:\d+"):
            near.relayed.get("default", "float32")
        with ps.subscribe(near.address) as feed, running.connect("sync") as session:
            FollowedTrainer(session)
            assert feed.wait_for().version == 0


def test_a_relay_serves_its_last_edition_with_its_age_while_the_servers_are_away_and_goes_on_then(
    tmp_path: Path,
) -> None:
    running = Cluster(checkpoint_dir=tmp_path, timing=QUICK)
    try:
        with (
            running.connect("sync") as session,
            relay(running.address, jobs=(("default", "float32"),)) as near,
            ps.subscribe(near.address) as feed,
        ):
            trainer = FollowedTrainer(session)
            last = trainer.steps(3)
            feed.wait_for(last)
            asked = in_background(lambda: running.coordinator.job("default").checkpoint())
            while asked.is_alive():
                last = trainer.step()
            asked.join()
            feed.wait_for(last)
            running.servers[1].stop()
            until(lambda: near.relayed.followed()[0].trouble is not None, "that the relay misses the shard")
            with ps.subscribe(near.address) as late:
                assert late.wait_for().version == last
                assert trainer.has(late.state_dict(), last)
                until(lambda: late.age > 1.0, "its age")
                assert late.trouble is None, "its relay is there"
            before = feed.restores
            running.start_again(1)
            trainer.steps(2)
            until(lambda: feed.restores == before + 1, "the rollback, told through the relay")
            edition = feed.wait_for(session.clock)
            assert trainer.has(edition.state_dict(), edition.version)
            until(lambda: feed.age < 1.0, "its age")
    finally:
        running.stop()


@pytest.mark.parametrize("count", [1, 2])
def test_a_job_that_ends_and_its_next_run_are_told_through_relays(
    shared: Cluster, job: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As long as relays have the run that has ended, too."""
    monkeypatch.setattr(relayed, "IDLE_SECONDS", 3600.0)
    with contextlib.ExitStack() as stack:
        near = stack.enter_context(relay(shared.address))
        for _ in range(1, count):
            near = stack.enter_context(relay(near.address))
        feed = stack.enter_context(ps.subscribe(near.address, job))
        with shared.connect("sync", job=job) as session:
            trainer = FollowedTrainer(session)
            last = trainer.steps(2)
            feed.wait_for(last)
        until(lambda: feed.ended, "the end")
        with pytest.raises(NotFound, match=f"has ended at version {last}"):
            feed.wait_for(last + 1)
        assert trainer.has(feed.state_dict(), last)
        assert job not in known_at(near.address, PLAINTEXT).jobs
        with pytest.raises(NotFound, match="has ended at version 2"):
            near.relayed.describe(WeightsAsked(job))
        assert near.relayed.describe(WeightsAsked(job, run=feed.wait_for().run)).lowest == last
        with shared.connect("sync", job=job) as session, ps.subscribe(near.address, job) as again:
            FollowedTrainer(session).steps(1)
            until(lambda: again.version == 1, "the next run")
            assert again.wait_for().run > feed.wait_for().run


def test_a_job_is_fetched_only_while_somebody_reads_it(
    shared: Cluster, job: str, trainer: FollowedTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with relay(shared.address) as near:
        until(lambda: job in known_at(near.address, PLAINTEXT).jobs, "the first look at the servers")
        assert not near.relayed.followed()
        with ps.subscribe(near.address, job) as feed:
            feed.wait_for()
            assert [(each.name, each.wire) for each in near.relayed.followed()] == [(job, "float32")]
        with monkeypatch.context() as patch:
            patch.setattr(relayed, "IDLE_SECONDS", 0.2)
            until(lambda: not near.relayed.followed(), "that it is followed no more")
        trainer.steps(2)
        with ps.subscribe(near.address, job) as feed:
            assert feed.wait_for(2).version == 2
    with relay(shared.address, jobs=((job, "bfloat16"),)) as near:
        until(near.is_ready, "the job that is named")
        assert [each.wire for each in near.relayed.followed()] == ["bfloat16"]


def test_a_reader_goes_on_at_another_relay_and_never_goes_back(
    shared: Cluster, job: str, trainer: FollowedTrainer
) -> None:
    with relay(shared.address) as second:
        with relay(shared.address) as first:
            both = f"{first.address},{second.address}"
            feed = ps.subscribe(both, job)
            last = trainer.steps(3)
            feed.wait_for(last)
        assert feed.version == last
        with feed:
            last = trainer.steps(2)
            edition = feed.wait_for(last)
            assert trainer.has(edition.state_dict(), last)
            assert feed.restores == 0


def test_a_relay_has_the_roles_of_the_servers(tmp_path: Path) -> None:
    words = {"own": "reader:own", "other": "reader:other", "all": "reader", "cluster": "cluster"}
    tokens = {name: f"{index}{SECRET}" for index, name in enumerate(words)}
    access = tmp_path / "tokens"
    for name, token in tokens.items():
        (tmp_path / name).write_text(token)
        (tmp_path / name).chmod(0o600)
    access.write_text("".join(f"{words[name]} {token}\n" for name, token in tokens.items()) + f"worker {SECRET}w\n")
    access.chmod(0o600)
    (tmp_path / "worker").write_text(f"{SECRET}w")
    (tmp_path / "worker").chmod(0o600)
    running = Cluster(shards=1, tokens=access)
    try:
        with (
            running.connect("sync", job="own", token_file=str(tmp_path / "worker")) as session,
            relay(running.address, ServerConfig(tokens=access)) as near,
        ):
            FollowedTrainer(session)
            with ps.subscribe(near.address, "own", token_file=str(tmp_path / "own")) as feed:
                assert feed.wait_for().version == 0
            with (
                ps.subscribe(near.address, "own", token_file=str(tmp_path / "other")) as feed,
                pytest.raises(Forbidden, match="for job other only"),
            ):
                feed.wait_for()
            with ps.subscribe(near.address, "own") as feed, pytest.raises(Unauthenticated):
                feed.wait_for()
            with (
                relay(running.address, token_file=str(tmp_path / "other")) as narrow,
                ps.subscribe(narrow.address, "own") as feed,
            ):
                until(lambda: "no job 'own'" in str(feed.trouble), "the trouble")
                with pytest.raises(Unreachable, match="no job 'own'"):
                    feed.wait_for(timeout=0.1)
    finally:
        running.stop()


def test_a_token_that_is_withdrawn_is_told_by_name(tmp_path: Path) -> None:
    access, own = tmp_path / "tokens", tmp_path / "own"
    own.write_text(f"reader{SECRET}")
    access.write_text(f"reader reader{SECRET} name=relay-1\nworker worker{SECRET}\ncluster cluster{SECRET}\n")
    (tmp_path / "worker").write_text(f"worker{SECRET}")
    for each in tmp_path.iterdir():
        each.chmod(0o600)
    running = Cluster(shards=1, tokens=access)
    try:
        with (
            running.connect("sync", token_file=str(tmp_path / "worker")) as session,
            relay(running.address, token_file=str(own)) as near,
            ps.subscribe(near.address) as feed,
        ):
            trainer = FollowedTrainer(session)
            feed.wait_for()
            access.write_text(f"worker worker{SECRET}\ncluster cluster{SECRET}\n")
            job = near.relayed.followed()[0]

            def is_told() -> bool:
                trainer.step()
                return isinstance(job.trouble, Unauthenticated)

            until(is_told, "that its token is not known any more", every=0.1)
            with ps.subscribe(near.address) as late:
                assert late.wait_for().version == job.describe(False).lowest, "the last edition stays"
            shown = requests.fetch(near.address)["shards"][0]["jobs"][0]["feed"]
            assert "bearer token is not known" in shown["trouble"]
    finally:
        running.stop()


def test_past_max_feeds_a_reader_is_told(shared: Cluster, job: str, trainer: FollowedTrainer) -> None:
    limits = replace(DEFAULTS, feeds=4)
    with relay(shared.address, ServerConfig(limits=limits)) as near:
        feeds = [ps.subscribe(near.address, job) for _ in range(2)]
        for feed in feeds:
            feed.wait_for()
        until(lambda: len(near.relayed.followed()[0].callers()) == 2, "that both wait")
        with ps.subscribe(near.address, job, every=2) as third:
            until(lambda: isinstance(third.trouble, LimitExceeded), "that it is one too many of this caller")
        for _ in range(5):
            last = trainer.step()
            for feed in feeds:
                assert feed.wait_for(last).version == last
                assert feed.trouble is None, "its own feed of before does not count"
        for feed in feeds:
            feed.close()


def test_a_relay_says_what_it_is_and_what_it_has(shared: Cluster, job: str, trainer: FollowedTrainer) -> None:
    with relay(shared.address) as near, ps.subscribe(near.address, job) as feed:
        last = trainer.steps(3)
        feed.wait_for(last)
        until(lambda: requests.fetch(near.address)["shards"][0]["jobs"][0]["feed"]["reader_count"], "that it waits")
        said = requests.fetch(near.address)
        assert said["coordinator"]["upstream"] == shared.address
        held = said["shards"][0]["jobs"][0]
        assert held["job"] == job
        assert (held["feed"]["edition_version"], held["feed"]["behind"]) == (last, 0)
        assert held["feed"]["sent_bytes"] > 0


def test_metrics_of_a_relay_are_those_that_the_docs_have(shared: Cluster, job: str, trainer: FollowedTrainer) -> None:
    with relay(shared.address) as near, ps.subscribe(near.address, job) as feed:
        last = trainer.steps(2)
        feed.wait_for(last)
        found = scrape(near.metrics_address)
        for metric in documented():
            if metric.section == "Relays":
                assert f'{metric.name}{{job="{job}"}}' in found
        assert found[f'ps_edition_version{{job="{job}"}}'] == last
        assert found[f'ps_edition_behind{{job="{job}"}}'] == 0
        assert found[f'ps_edition_age_seconds{{job="{job}"}}'] < 30
        assert found[f'ps_feed_sent_bytes_total{{job="{job}"}}'] > 0


def test_status_of_a_relay_says_in_words_what_it_has(shared: Cluster, job: str, trainer: FollowedTrainer) -> None:
    with relay(shared.address) as near, ps.subscribe(near.address, job) as feed:
        last = trainer.steps(2)
        feed.wait_for(last)
        said = status_text.table(requests.fetch(near.address))
    assert re.search(rf"^relay +0 .* {re.escape(job)} .*{last}", said, re.MULTILINE)
    assert re.search(
        rf"^job {re.escape(job)}: edition {last}, \d\.\d s old, 0 updates behind, \d readers?, ", said, re.M
    )
    assert "coordinator" not in said


@pytest.mark.parametrize("as_json", [False, True])
def test_a_job_is_followed_in_a_terminal_to_its_end(shared: Cluster, job: str, as_json: bool) -> None:
    out = io.StringIO()
    with relay(shared.address) as near:
        with shared.connect("sync", job=job) as session:
            trainer = FollowedTrainer(session)
            shown = in_background(lambda: feed_screen.follow(near.address, job, as_json=as_json, out=out))
            until(lambda: "version 0" in out.getvalue() or '"version": 0' in out.getvalue(), "the first edition")
            last = trainer.steps(3)
            until(lambda: f"version {last}" in out.getvalue() or f'"version": {last}' in out.getvalue(), "the last")
        shown.join(60)
        assert not shown.is_alive()
    lines = out.getvalue().splitlines()
    if as_json:
        told = [json.loads(line) for line in lines]
        assert (told[-1]["version"], told[-1]["ended"], told[-1]["job"]) == (last, True, job)
        versions = [each["version"] for each in told]
        assert versions == sorted(versions)
        assert told[-1]["received_bytes"] > 0
    else:
        assert lines[-1].startswith(f"job {job}: version {last}; 0 updates behind; ")
        assert lines[-1].endswith("; the job has ended")
