"""Groups of actors on a real Ray: one of which an actor is killed is started again as a whole, and no other one."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ps_protocol.errors import InvalidRequest
from tests.scripts.train_on_ray import ENOUGH, train_in_group
from tests.tools.rays import needs_ray, steps, three_nodes, until, until_further

pytestmark = needs_ray

LEASE = 120.0  # longer than all that this test allows: no recovery waits for it
END_SECONDS = 60.0


class Member:
    """A plain actor that is a member of a group."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def train(self) -> dict[str, Any]:
        return train_in_group(self._folder)

    def fail(self) -> None:
        raise ValueError("no such sample")


@pytest.fixture(scope="module")
def servers() -> Iterator[Any]:
    from ps_worker.ray import ParameterServer

    with three_nodes(), ParameterServer(1, server_options=f"--lease {LEASE:g}", insecure=True) as running:
        yield running


def groups_of(servers: Any, folder: Path, job: str, **more: Any) -> Any:
    import ray

    from ps_worker.ray import ActorGroups

    settings = servers.settings(mode="sync", job=job, elastic=False)
    kind = ray.remote(num_cpus=0.5)(Member)
    return ActorGroups(servers, settings, lambda group, member: kind.remote(folder), 2, 2, **more)


def test_a_group_of_actors_is_started_again_as_a_whole_and_the_other_goes_on(servers: Any, tmp_path: Path) -> None:
    groups = groups_of(servers, tmp_path, "groups", max_restarts=1)
    found: list[Any] = []
    running = threading.Thread(target=lambda: found.append(groups.run(lambda actor: actor.train.remote())), daemon=True)
    running.start()
    until(lambda: len([each for each in steps(tmp_path).values() if each > 20]) == 4, "four members that train")
    first = set(steps(tmp_path))
    [killed] = [pid for name, pid in first if name == "3"]

    begun = time.monotonic()
    os.kill(killed, signal.SIGKILL)
    until(lambda: len(steps(tmp_path)) == 6, "both members of the group anew")
    again = set(steps(tmp_path)) - first
    assert {name for name, _ in again} == {"2", "3"}
    until_further(tmp_path, again | {(name, pid) for name, pid in first if name in "01"})
    assert time.monotonic() - begun < LEASE, "it waited for the lease"
    assert set(steps(tmp_path)) == first | again, "the other group kept its processes"

    (tmp_path / ENOUGH).touch()
    running.join(END_SECONDS)
    [results] = found
    assert [[(each["rank"], each["member"]) for each in group] for group in results] == [
        [(0, 0), (0, 1)],
        [(1, 0), (1, 1)],
    ]
    assert results[0][0]["first"] == 0
    assert results[1][0]["first"] == results[1][1]["first"] > 20, "it came back at the job's clock"


def test_a_group_that_fails_too_often_raises_its_own_error(servers: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no such sample"):
        groups_of(servers, tmp_path, "fails", max_restarts=1).run(lambda actor: actor.fail.remote())


def test_groups_that_cannot_be_are_refused(servers: Any, tmp_path: Path) -> None:
    from ps_worker.ray import ActorGroups

    with pytest.raises(InvalidRequest, match="elastic=False"):
        ActorGroups(servers, servers.settings(), lambda group, member: None, 2, 2)
    with pytest.raises(InvalidRequest, match="got 2 and 0"):
        ActorGroups(servers, servers.settings(elastic=False), lambda group, member: None, 2, 0)
