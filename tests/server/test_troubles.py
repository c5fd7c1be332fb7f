"""A trouble that comes again and again is logged when it begins and when it is over, and counted every time."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ps_protocol.errors import CheckpointFailed, PSError, TryLater, Unreachable
from ps_runtime.background import errors, guarded
from ps_runtime.retry import Peer
from ps_runtime.troubles import Troubles, counts
from ps_server.rpc import registration
from ps_server.storage.checkpoints import CheckpointStore
from tests.chaos.cluster import free_ports
from tests.tools.cluster import Cluster, scrape, until
from tests.tools.one_process import DirectWorker, OneProcess
from tests.tools.raw_worker import vector_job

log = logging.getLogger("ps_server")
KIND = "of this test"


@pytest.fixture
def troubles(caplog: pytest.LogCaptureFixture) -> Troubles:
    caplog.set_level(logging.INFO)
    return Troubles(log, KIND)


def fail(error: type[Exception]) -> Exception:
    """An error as it is when it was raised and caught."""
    try:
        raise error("no")
    except Exception as caught:
        return caught


def test_it_is_logged_once_until_it_is_over_and_counted_each_time(
    troubles: Troubles, caplog: pytest.LogCaptureFixture
) -> None:
    before = counts().get(KIND, 0)
    for number in range(5):
        troubles.met("shard 1", "shard %d is away: %s", 1, f"try {number}")
    assert caplog.messages == ["shard 1 is away: try 0"]
    troubles.over("shard 1")
    troubles.over("shard 1")
    assert caplog.messages[1:] == ["over, after 5 times: shard 1 is away: try 0"]
    troubles.met("shard 1", "shard %d is away: %s", 1, "try 6")
    assert caplog.messages[2:] == ["shard 1 is away: try 6"]
    assert counts()[KIND] - before == 6


def test_one_that_came_once_ends_without_a_word(troubles: Troubles, caplog: pytest.LogCaptureFixture) -> None:
    troubles.met("", "once")
    troubles.over("")
    assert caplog.messages == ["once"]


def test_another_trouble_is_logged_in_its_place(troubles: Troubles, caplog: pytest.LogCaptureFixture) -> None:
    """Of another kind, from another place, of another thing, or with other details."""
    for _ in range(2):
        for error in (TryLater, Unreachable):
            troubles.met("a", "not yet: %s", fail(error))
        troubles.met("b", "not yet: %s", fail(TryLater))
        for ranks in ((1,), (1, 2)):
            troubles.met("c", "without %s", list(ranks), detail=ranks)
    assert caplog.messages == ["not yet: no", "not yet: no", "not yet: no", "without [1]", "without [1, 2]"]
    try:
        raise TryLater("from here")
    except PSError as error:
        troubles.met("a", "not yet: %s", error)
    assert caplog.messages[-1] == "not yet: from here"


def test_a_traceback_is_logged_with_the_first(troubles: Troubles, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        troubles.met("", "it failed", trace=fail(ValueError), level=logging.ERROR)
    [record] = caplog.records
    assert record.exc_info is not None
    assert (record.levelno, record.exc_info[0]) == (logging.ERROR, ValueError)


def test_a_background_thread_logs_the_same_fault_once_and_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    name = "a thread of this test"

    def work() -> None:
        raise ValueError("again")

    for _ in range(3):
        guarded(name, work)
    assert len(caplog.records) == 1
    assert errors()[name] == 3
    guarded(name, lambda: None)
    guarded(name, work)
    assert [record.levelno for record in caplog.records if record.exc_info] == [logging.ERROR] * 2, "it came back"


@pytest.mark.parametrize(("seconds", "level"), [(60.0, logging.INFO), (0.0, logging.WARNING)])
def test_a_coordinator_that_a_shard_does_not_reach_is_a_warning_only_after_a_while(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, seconds: float, level: int
) -> None:
    """It ends before its shards do."""
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(registration, "QUIET_SECONDS", seconds)
    monkeypatch.setattr(registration, "SHARD_CALL_SECONDS", 0.05)
    nowhere = Peer("coordinator", f"127.0.0.1:{free_ports(1)}")
    calls, called = list[tuple[Any, ...]](), Troubles.met

    def met(troubles: Troubles, *arguments: Any, **more: Any) -> None:
        called(troubles, *arguments, **more)
        if any(nowhere.address in str(argument) for argument in arguments):  # other tests' servers may still run
            calls.append(arguments)

    monkeypatch.setattr(Troubles, "met", met)
    calling = registration.ShardRegistration(nowhere, 0, "127.0.0.1:1", "127.0.0.1:2", process=7)
    until(lambda: len(calls) >= 2, "two calls")
    calling.stop()
    [record] = [record for record in caplog.records if f"{nowhere.address} does not answer" in record.getMessage()]
    assert record.levelno == level


def test_a_shard_that_does_not_hear_of_a_removal_is_one_line_until_it_does(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO)
    cluster = OneProcess(tmp_path, shards=2)
    for rank in range(2):
        DirectWorker(cluster, vector_job("job", "sync", 16, 2), rank)
    api = cluster.coordinator.shards()[1].api

    def is_away(*_: object) -> None:
        raise TryLater("shard 1 does not answer")

    with monkeypatch.context() as patch:
        patch.setattr(api, "remove_workers", is_away, raising=False)
        cluster.clock.seconds += 60
        before = counts().get("removal", 0)
        for _ in range(10):
            cluster.coordinator.expire_workers()
    said = "job {}: workers 0 and 1 are not removed from shard 1 yet: shard 1 does not answer"
    [name] = cluster.coordinator.jobs()
    removals = [text for text in caplog.messages if "not removed" in text]
    assert removals == [said.format(name)]
    assert counts()["removal"] - before == 10
    cluster.coordinator.expire_workers()
    assert f"over, after 10 times: {said.format(name)}" in caplog.messages
    cluster.stop()


def test_checkpoints_that_fail_for_the_same_reason_are_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO)
    cluster = OneProcess(tmp_path, shards=1)
    worker = DirectWorker(cluster, vector_job("job", "sync", 16, 1), 0)
    worker.initialise()

    def is_full(*_: object) -> None:
        raise CheckpointFailed("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(CheckpointStore, "write_shard", is_full)
        for _ in range(3):
            with pytest.raises(CheckpointFailed):
                worker.checkpoint()
    failed = [text for text in caplog.messages if "the disk is full" in text]
    assert len(failed) == 2, "the shard's line and the coordinator's"
    assert cluster.coordinator.statistics().jobs[worker.spec.name].checkpoints.failed == 3  # type: ignore[union-attr]
    worker.checkpoint()
    assert [text for text in caplog.messages if text.startswith("over, after 3 times: ")]
    cluster.stop()


def test_every_server_process_serves_the_counts(
    make_cluster: Callable[..., Cluster], caplog: pytest.LogCaptureFixture
) -> None:
    Troubles(log, KIND).met("", "once more")
    cluster = make_cluster(shards=1)
    served = until(lambda: scrape(cluster.servers[0].metrics_address), "a scrape")
    assert served[f'ps_troubles_total{{kind="{KIND}"}}'] == counts()[KIND]
