"""Rounds of a job whose coordinator could not write its file: no worker is told another round's values."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ps_protocol.errors import PSError, TryLater
from ps_protocol.identity import Identity
from ps_protocol.messages.workers import GatherRequest
from ps_server.coordinator.job_value_rounds import Standing
from tests.tools.one_process import DirectWorker, FullDisk, OneProcess, join_all


class Told:
    """The stream of a worker that asked."""

    def __init__(self) -> None:
        self.standing: Standing | None = None

    def tell(self, standing: Standing) -> None:
        self.standing = standing

    def finish(self) -> None:
        pass

    def fail(self, error: PSError) -> None:
        raise error

    @property
    def complete(self) -> int | None:
        """The number of the round whose values came."""
        return None if self.standing is None or self.standing.complete is None else self.standing.complete.number


@pytest.fixture
def disk() -> FullDisk:
    return FullDisk()


@pytest.fixture
def cluster(tmp_path: Path, disk: FullDisk) -> Iterator[OneProcess]:
    cluster = OneProcess(tmp_path, disk=disk)
    yield cluster
    cluster.stop()


def asked(worker: DirectWorker, number: int) -> Told:
    member, told = worker.place.worker, Told()
    identity = Identity("job", worker.rank, member.incarnation, member.key)
    request = GatherRequest(identity, number, 0, b"%d" % number)
    worker.cluster.coordinator.job("job").rounds.gather_values(request, told)
    return told


def test_who_asks_for_an_earlier_round_while_one_waits_for_the_disk_has_that_one_kept(
    cluster: OneProcess, disk: FullDisk
) -> None:
    first, second = join_all(cluster, "async")
    asked(first, 1)
    asked(second, 1)
    waits = asked(first, 2)
    disk.full = True
    with pytest.raises(TryLater, match="No space left"):
        asked(second, 2)
    disk.full = False
    assert asked(second, 1).complete == 1
    assert waits.complete == 2
    assert cluster.coordinator.job("job").rounds.done()[0] == 2
