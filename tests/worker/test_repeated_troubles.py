"""What happens to a worker again and again is logged when it begins and when it is over, and counted every time."""

from __future__ import annotations

import logging
import re
import threading

import pytest
import torch
from torch import nn

from ps_protocol.errors import PSError, TryLater
from ps_protocol.framing import Parts
from ps_protocol.messages.workers import ValueNews
from ps_runtime import retry
from ps_runtime.troubles import Troubles, counts
from ps_worker.cluster import value_rounds as rounds
from ps_worker.cluster.calls import ShardCalls
from tests.chaos.cluster import free_ports
from tests.tools.cluster import Cluster, in_parallel, scrape, until
from tests.tools.said import said_by_workers

LOOP = 12


@pytest.fixture(autouse=True)
def all_levels(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)


def test_steps_that_are_skipped_one_after_the_other_are_logged_once(
    shared: Cluster, job: str, caplog: pytest.LogCaptureFixture
) -> None:
    with shared.connect("sync", job=job) as session:
        model = nn.Linear(4, 1)
        model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), non_finite="skip")
        weights = []
        for x in [torch.full((4,), torch.nan)] * LOOP + [torch.ones(4)] * 2:
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()
            weights.append(model.weight.detach().clone())
        counted = scrape(session.metrics_address)["ps_worker_non_finite_total"]
    assert torch.equal(weights[0], weights[LOOP - 1]), "skipped"
    assert not torch.equal(weights[LOOP - 1], weights[LOOP + 1]), "trained"
    told = [message for message in caplog.messages if "is not finite" in message]
    assert len(told) == 2
    assert told[0].endswith("is not finite; this step is skipped")
    assert told[1].startswith(f"over, after {LOOP} times: ")
    assert counted == LOOP


def test_pushes_of_many_buckets_to_a_shard_that_is_away_are_logged_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They go on until they are cut off."""
    monkeypatch.setattr(retry, "NOTICE_SECONDS", 0.0)
    before = counts().get("peer", 0)
    calls = ShardCalls(1, f"127.0.0.1:{free_ports(1)}", timeout=60.0)

    def push(number: int) -> None:
        if number == LOOP:
            until(lambda: counts().get("peer", 0) - before == LOOP, "a trouble of each")
            calls.closing.set()
            return
        with pytest.raises(PSError):
            calls.unary("Push", Parts(b""))

    in_parallel(LOOP + 1, push)
    calls.close()
    told = [message for message in caplog.messages if "trying again for 60 s" in message]
    assert len(told) == 1
    assert told[0].startswith("shard 1 at 127.0.0.1:")
    assert counts()["peer"] - before == LOOP


@pytest.mark.parametrize(("seconds", "levels"), [(60.0, [logging.INFO]), (0.0, [logging.INFO, logging.WARNING])])
def test_a_wait_that_a_peer_asks_for_is_a_warning_only_once_it_is_long(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, seconds: float, levels: list[int]
) -> None:
    monkeypatch.setattr(retry, "LONG_WAIT_SECONDS", seconds)
    before = counts().get("peer", 0)
    peer = retry.Peer("coordinator", "host:1")
    again = retry.Retry(peer, timeout=60.0, closing=threading.Event())
    busy = TryLater("it makes the job")
    busy.retry_after = 1e-6
    for _ in range(LOOP):
        again.wait_after(busy)
    said = [record for record in caplog.records if "it makes the job" in record.getMessage()]
    assert [record.levelno for record in said] == levels
    assert said[0].getMessage() == "it makes the job"
    for record in said[1:]:
        assert re.fullmatch(r"waiting for coordinator at host:1 for \d+ s now: it makes the job", record.getMessage())
    assert counts().get("peer", 0) - before == len(levels) - 1


def test_rounds_that_wait_for_the_same_worker_are_logged_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rounds, "NOTICE_SECONDS", 0.0)
    waits = Troubles(logging.getLogger("ps_worker"), None)
    for number in range(LOOP):
        waiting = rounds.Waiting("mean", waits)
        assert waiting.heard(ValueNews(number, False, {}, "", (1, 2) if number == LOOP - 1 else (1,), False))
        waiting.over()
    quick = rounds.Waiting("mean", waits)
    quick.over()
    assert [record.getMessage() for record in said_by_workers(caplog)] == [
        "waiting in session.mean for worker 1",
        "waiting in session.mean for workers 1, 2",
        f"over, after {LOOP} times: waiting in session.mean for worker 1",
    ]
