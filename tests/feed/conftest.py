"""What tests of several files here follow."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ps_feed import subscription
from ps_runtime import reloading
from ps_server.relay import upstream
from ps_server.rpc import grpc_port
from tests.tools.cluster import Cluster
from tests.tools.followed_trainer import FollowedTrainer


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who is not answered asks again soon, and so does who follows a job that rests. Files of tokens are read again
    soon, and a relay soon hears of a new run.

    Calls that are in flight at the end of a server are those of readers, which wait for an edition: they are cut off.
    """
    monkeypatch.setattr(subscription, "LONGEST_PAUSE_SECONDS", 0.2)
    monkeypatch.setattr(subscription, "IDLE_SECONDS", 0.3)
    monkeypatch.setattr(reloading, "CHECK_SECONDS", 0.05)
    monkeypatch.setattr(upstream, "FRESH_SECONDS", 0.1)
    monkeypatch.setattr(grpc_port, "STOP_GRACE_SECONDS", 0.1)


@pytest.fixture
def trainer(shared: Cluster, job: str) -> Iterator[FollowedTrainer]:
    with shared.connect("sync", job=job) as session:
        yield FollowedTrainer(session)


@pytest.fixture
def far(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Readers are as on another host: no server sees their sockets, and all comes in messages."""
    monkeypatch.setenv("PS_SHARED_DIRECTORY", str(tmp_path))


# -- readers on a shard's host: test_mapped_shards.py and test_not_mapped.py -------------------------------------------


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sockets")


@pytest.fixture(scope="module")
def alone(place: Path) -> Iterator[Cluster]:
    """One shard, which has all of each job."""
    running = Cluster(1, lease=30.0, absence_seconds=0.0, shared_directory=place)
    yield running
    running.stop()


@pytest.fixture
def here(place: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory that readers and the shard have in common."""
    monkeypatch.setenv("PS_SHARED_DIRECTORY", str(place))
    return place


@pytest.fixture
def trained(alone: Cluster, job: str, here: Path) -> Iterator[FollowedTrainer]:
    with alone.connect("sync", job=job) as session:
        yield FollowedTrainer(session)
