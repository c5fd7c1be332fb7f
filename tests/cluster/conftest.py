"""What the tests of running clusters share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from ps_server.view import making, watch
from ps_worker.cluster import own_membership
from tests.tools.cluster import Cluster
from tests.tools.forkserver import Nursery, address_in
from tests.tools.heartbeats import be_sure_soon, beat_often

BEATS = 40  # heartbeats in a lease


@pytest.fixture(autouse=True)
def _quick_to_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """A session that lost its place soon has another one that counts.

    It hears of the loss by a heartbeat where it makes no call. The job goes on once each of the others has sent one.
    And a watch of the roster that broke is begun again at once, not 2 s later.
    """
    beat_often(monkeypatch, BEATS)
    monkeypatch.setattr(own_membership, "NOTICE_SECONDS", 0.1)


@pytest.fixture
def soon_sure(monkeypatch: pytest.MonkeyPatch) -> None:
    """A coordinator is soon sure, when a worker comes back, that the others have lived on."""
    be_sure_soon(monkeypatch, BEATS)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch, _quick_to_come_back: None) -> None:
    """A session that was fenced has the time to hear by whom, also on a busy machine."""
    monkeypatch.setattr(own_membership, "NOTICE_SECONDS", 5.0)


@pytest.fixture
def server(nursery: Nursery, tmp_path: Path) -> Iterator[tuple[str, int]]:
    """A shard with a coordinator in a process of its own: its address and process id."""
    flags = ["--with-coordinator", "--shards=1", "--index=0", "--port=0", "--metrics-port=0", "--lease=600"]
    process = nursery.serve(["shard", *flags], tmp_path / "log")
    yield address_in(tmp_path / "log"), process.pid
    process.kill()


@pytest.fixture
def lively(make_cluster: Callable[..., Cluster], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Cluster]:
    """Clusters of which much is told soon: sessions beat four times a second, and the coordinator looks ten times.

    Their lease outlasts all. One of a second has as many heartbeats, and ends on a busy machine. There, too, a shard
    may not answer for seconds, which is no event in these clusters.
    """
    lease = 30.0
    beat_often(monkeypatch, 4 * lease)
    monkeypatch.setattr(watch, "LOOK_SECONDS", 0.1)
    monkeypatch.setattr(making, "SILENT_SECONDS", 60.0)
    return partial(make_cluster, lease=lease)
