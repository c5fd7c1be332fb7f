"""Groups of actors on a real Ray: one of which an actor is killed is started again as a whole, and no other one."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ps_protocol.errors import InvalidRequest, PSError
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

    def train_late(self) -> dict[str, Any]:
        """As `train`. A group that is started again begins when the job has finished."""
        path, over = self._folder / f"begun-{os.environ['PS_RANK']}-{os.environ['RANK']}", self._folder / "over"
        if path.exists():
            until(over.exists, "the end of the job")
        path.touch()
        found = train_in_group(self._folder)
        over.touch()
        return found

    def train_apart(self) -> dict[str, Any]:
        """As `train`, in a folder of the group's own: each group has enough by itself."""
        folder = self._folder / os.environ["PS_RANK"]
        folder.mkdir(exist_ok=True)
        found = train_in_group(folder)
        (folder / f"over-{os.environ['RANK']}").touch()
        return found

    def fail(self) -> None:
        raise ValueError("no such sample")

    def die_beside_an_error(self) -> None:
        """Member 1 dies a moment after its neighbour has failed because of it."""
        (self._folder / f"{os.environ['RANK']}-here").touch()
        if os.environ["RANK"] == "0":
            until((self._folder / "1-here").exists, "the neighbour")
            (self._folder / "failed").touch()
            raise RuntimeError("Connection closed by peer")
        until((self._folder / "failed").exists, "its error")
        os._exit(1)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    with three_nodes() as nodes:
        yield nodes


@pytest.fixture(scope="module")
def servers(cluster: Any) -> Iterator[Any]:
    from ps_worker.ray import ParameterServer

    with ParameterServer(1, server_options=f"--lease {LEASE:g}", insecure=True) as running:
        yield running


def groups_of(
    servers: Any,
    folder: Path,
    job: str,
    needs: Callable[[int], dict[str, float]] = lambda group: {},
    size: tuple[int, int] = (2, 2),
    **more: Any,
) -> Any:
    """needs: returns the resources that a new actor of a group asks for"""
    import ray

    from ps_worker.ray import ActorGroups

    settings = servers.settings(mode="sync", job=job, elastic=False)
    kind = ray.remote(num_cpus=0.5)(Member)
    start = lambda group, member: kind.options(resources=needs(group)).remote(folder)  # noqa: E731
    return ActorGroups(servers, settings, start, *size, **more)


def begin(groups: Any, method: str = "train") -> tuple[threading.Thread, list[Any]]:
    """Runs groups in a thread. Returns it, and the list that gets the results."""
    found: list[Any] = []
    train = lambda actor: getattr(actor, method).remote()  # noqa: E731
    running = threading.Thread(target=lambda: found.append(groups.run(train)), daemon=True)
    running.start()
    return running, found


def kill(folder: Path, name: str) -> None:
    """Kills the process of a member that trains, by its number among all members."""
    for pid in (pid for own, pid in steps(folder) if own == name):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def test_a_group_of_actors_is_started_again_as_a_whole_and_the_other_goes_on(servers: Any, tmp_path: Path) -> None:
    running, found = begin(groups_of(servers, tmp_path, "groups", max_restarts=1))
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


def test_while_one_group_waits_for_room_the_end_of_an_actor_of_another_is_seen(
    cluster: Any, servers: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("ps_worker.ray.actor_groups.NOTICE_SECONDS", 0.5)
    made: list[int] = []

    def needs(group: int) -> dict[str, float]:
        made.append(group)
        return {"later": 1.0} if group == 0 and made.count(0) > 2 else {}

    running, found = begin(groups_of(servers, tmp_path, "room", needs, max_restarts=1))
    until(lambda: len([each for each in steps(tmp_path).values() if each > 2]) == 4, "four members that train")
    kill(tmp_path, "0")
    until(lambda: made.count(0) == 4, "the actors of group 0 anew")
    until(lambda: "group 0 has waited for" in caplog.text, "the notice")
    kill(tmp_path, "3")
    until(lambda: made.count(1) == 4, "the actors of group 1 anew")

    cluster.add_node(num_cpus=1, resources={"later": 2}, include_dashboard=False)
    until(lambda: len(steps(tmp_path)) == 8, "all members anew")
    (tmp_path / ENOUGH).touch()
    running.join(END_SECONDS)
    [results] = found
    assert [[each["member"] for each in group] for group in results] == [[0, 1], [0, 1]]


def test_a_group_that_comes_back_when_the_others_have_finished_ends_with_them(servers: Any, tmp_path: Path) -> None:
    running, found = begin(groups_of(servers, tmp_path, "late", max_restarts=1), "train_late")
    until(lambda: len([each for each in steps(tmp_path).values() if each > 2]) == 4, "four members that train")
    first = {process for process in steps(tmp_path) if process[0] in "01"}
    kill(tmp_path, "3")
    until_further(tmp_path, first)
    (tmp_path / ENOUGH).touch()
    running.join(END_SECONDS)
    [results] = found
    assert [each["member"] for each in results[0]] == [0, 1], "its results are kept"
    assert results[1] == [None, None]


def test_a_group_that_fails_when_the_others_have_ended_does_not_wait_for_them(servers: Any, tmp_path: Path) -> None:
    """The job has ended with it, and begins anew: the group would wait for half an hour."""
    groups = groups_of(servers, tmp_path, "last", max_restarts=1)
    raised: list[str] = []

    def run() -> None:
        try:
            groups.run(lambda actor: actor.train_apart.remote())
        except PSError as error:
            raised.append(str(error))

    running = threading.Thread(target=run, daemon=True)
    running.start()
    until(lambda: len([each for g in "01" for each in steps(tmp_path / g).values() if each > 2]) == 4, "all to train")
    (tmp_path / "0" / ENOUGH).touch()
    until(lambda: len(list((tmp_path / "0").glob("over-*"))) == 2, "the end of group 0")
    (tmp_path / "1").rename(tmp_path / "gone")  # so that the members of group 1 fail, and leave with an error
    running.join(END_SECONDS)
    assert [each.partition(" would ")[0] for each in raised] == ["group 0 will not join job 'last': group 1"]


def test_a_group_that_fails_too_often_raises_its_own_error(
    servers: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    groups = groups_of(servers, tmp_path, "fails", size=(1, 1), max_restarts=1)
    for runs in (1, 2):
        with pytest.raises(ValueError, match="no such sample"):
            groups.run(lambda actor: actor.fail.remote())
        again = "group 0 failed: no such sample; it is ended, and started again in 0.5 s"
        assert caplog.text.count(again) == runs, "each run has all restarts"


def test_the_error_of_a_group_is_the_end_of_its_actor_and_no_error_of_a_neighbour(servers: Any, tmp_path: Path) -> None:
    from ray.exceptions import RayActorError

    with pytest.raises(RayActorError):
        groups_of(servers, tmp_path, "dies", size=(1, 2)).run(lambda actor: actor.die_beside_an_error.remote())


def test_groups_that_cannot_be_are_refused(servers: Any, tmp_path: Path) -> None:
    from ps_worker.ray import ActorGroups

    with pytest.raises(InvalidRequest, match="elastic=False"):
        ActorGroups(servers, servers.settings(), lambda group, member: None, 2, 2)
    with pytest.raises(InvalidRequest, match="got 2 and 0"):
        ActorGroups(servers, servers.settings(elastic=False), lambda group, member: None, 2, 0)
