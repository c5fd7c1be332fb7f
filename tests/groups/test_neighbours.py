"""Signs that the members of a group give each other: whose are missing, and what counts as one."""

from __future__ import annotations

import linecache
import re
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.elastic.utils.store import barrier

from ps_protocol.errors import LimitExceeded
from ps_runtime.launch_id import SILENT_MEMBER_CODE
from ps_worker.group import Group
from ps_worker.neighbours import SIGNS, Neighbours
from ps_worker.training_thread import CALL, COLLECTIVE, SCRIPT, TrainingThread
from tests.scripts.train_in_group import Options
from tests.tools.cluster import Cluster, until
from tests.tools.forkserver import Nursery
from tests.tools.groups import LEASE, Groups, same

SECONDS = 1.0  # the group timeout
WAIT_SECONDS = 60.0


class Members:
    """Members of a group of three, in this process; and what would have ended each."""

    def __init__(self, stack: ExitStack) -> None:
        self.store: Any = dist.HashStore()
        self._stack = stack

    def begin(self, member: int, ends: list[str], step_seconds: float = 0.0) -> Neighbours:
        neighbours = Neighbours(self.store, "group", member, 3, SECONDS, ends.append, step_seconds)
        neighbours.begin()
        self._stack.callback(neighbours.leave)
        return neighbours


@pytest.fixture
def members() -> Iterator[Members]:
    with ExitStack() as stack:
        yield Members(stack)


def looked(neighbours: Neighbours, ends: list[str]) -> bool:
    """Looks once. Whether the process would have ended."""
    neighbours.check()
    return bool(ends)


def test_a_member_that_gives_no_sign_is_named_and_one_that_has_left_is_not(members: Members) -> None:
    ends: list[str] = []
    first, last = members.begin(0, ends), members.begin(2, [])
    members.store.set("group/1", "0 n1, pid 7")  # it has come, and gives no other sign
    first.await_all(WAIT_SECONDS)
    last.leave()
    until(lambda: first._has_left(2), "the end of the last member")
    first.check()
    first.all_go_on()  # both are silent from now on
    until(lambda: looked(first, ends), "the end of the first member")
    assert ends[0] == (
        "member 1 (n1, pid 7) of this worker's group has given no sign for 1 s (--group-timeout): this process ends, "
        "so that the group is started again"
    )


def test_members_that_give_signs_and_heartbeats_that_are_accepted_end_nothing(members: Members) -> None:
    ends: list[str] = []
    of_last: list[str] = []
    first, last = members.begin(0, ends), members.begin(2, of_last)
    members.store.set("group/1", "0 n1, pid 7")
    last.await_all(WAIT_SECONDS)

    def one_alone_hears_of_heartbeats() -> bool:
        last.all_go_on()
        last.check()
        return looked(first, ends)

    until(one_alone_hears_of_heartbeats, "the end of the first member")
    assert "member 2" not in ends[0]
    assert of_last == []


def test_the_time_in_which_this_process_was_stopped_counts_for_nobodys_silence(members: Members) -> None:
    ends: list[str] = []
    first = members.begin(0, ends)
    for other in (1, 2):
        members.store.set(f"group/{other}", "0 n1, pid 7")
    first.await_all(WAIT_SECONDS)
    first.check()
    first._checked -= 100 * SECONDS
    first.check()
    assert ends == []


class Hanging:
    """A store whose process is stopped at some time: no call returns then."""

    def __init__(self, store: Any, is_stopped: threading.Event, goes_on: threading.Event) -> None:
        self._store, self._is_stopped, self._goes_on = store, is_stopped, goes_on

    def _await(self) -> None:
        if self._is_stopped.is_set():
            self._goes_on.wait(WAIT_SECONDS)

    def set(self, key: str, value: str) -> None:
        self._await()
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        self._await()
        found: bytes = self._store.get(key)
        return found

    def check(self, keys: list[str]) -> bool:
        self._await()
        found: bool = self._store.check(keys)
        return found


def test_where_the_store_hangs_its_keeper_is_named(members: Members) -> None:
    is_stopped, goes_on, ends = threading.Event(), threading.Event(), list[str]()
    plain, members.store = members.store, Hanging(members.store, is_stopped, goes_on)
    for other in (0, 2):
        plain.set(f"group/{other}", f"0 n{other}, pid 7")
    second = members.begin(1, ends)
    second.await_all(WAIT_SECONDS)
    is_stopped.set()
    until(lambda: looked(second, ends), "the end of the second member")
    goes_on.set()
    assert ends[0].startswith("member 0 (n0, pid 7) and member 2 (n2, pid 7) of this worker's group have given no sign")


class Breaking:
    """A store whose connections break off at some time, and where one may be unable to connect anew."""

    def __init__(self, store: Any) -> None:
        self.store, self.age, self.is_away, self.tries = store, 0, False, 0

    def clone(self) -> Any:
        self.tries += 1
        if self.is_away:
            raise dist.DistNetworkError("Connection refused")
        return _Connection(self)


class _Connection:
    def __init__(self, to: Breaking) -> None:
        self._to, self._age = to, to.age

    def _store(self) -> Any:
        if self._to.age > self._age:
            raise dist.DistNetworkError("Connection reset by peer")
        return self._to.store

    def clone(self) -> Any:
        return self._to.clone()

    def set_timeout(self, timeout: timedelta) -> None:
        pass

    def set(self, key: str, value: str) -> None:
        self._store().set(key, value)

    def get(self, key: str) -> bytes:
        found: bytes = self._store().get(key)
        return found

    def check(self, keys: list[str]) -> bool:
        found: bool = self._store().check(keys)
        return found


def test_a_member_whose_connection_to_the_store_breaks_off_makes_it_anew(members: Members) -> None:
    """It gives signs again, and looks for those of the others."""
    plain, ends = members.store, list[str]()
    members.store = breaking = Breaking(plain)
    plain.set("group/1", "0 n1, pid 7")
    first = members.begin(0, ends)
    members.store = plain
    last = members.begin(2, [])
    first.await_all(WAIT_SECONDS)
    breaking.age += 1
    sign = plain.get("group/0")
    until(lambda: plain.get("group/0") != sign, "a sign over the next connection")
    until(lambda: looked(first, ends), "the end of the first member")
    assert ends[0].startswith("member 1 (n1, pid 7) of this worker's group has given no sign")
    last.leave()


def test_a_member_that_cannot_reach_the_store_says_so_once_and_takes_nobody_for_gone(
    members: Members, caplog: pytest.LogCaptureFixture
) -> None:
    plain, ends = members.store, list[str]()
    members.store = breaking = Breaking(plain)
    for other in (1, 2):
        plain.set(f"group/{other}", f"0 n{other}, pid 7")
    first = members.begin(0, ends)
    first.await_all(WAIT_SECONDS)
    breaking.is_away, breaking.age = True, 1
    until(lambda: first._broken is not None, "a connection that cannot be made")
    begin = breaking.tries
    until(lambda: looked(first, ends) or breaking.tries >= begin + 2 * SIGNS, "more tries than a timeout has room for")
    assert ends == []
    assert caplog.text.count("member 0 cannot reach the store of its group, and tries again") == 1
    breaking.is_away = False
    until(lambda: looked(first, ends), "the end of the first member, which looks again")


def test_a_member_that_has_left_is_named_by_one_that_waits_for_it_in_a_collective(members: Members) -> None:
    """Its process may go on, and heartbeats of the others are accepted."""
    ends: list[str] = []
    first, second, last = members.begin(0, ends), members.begin(1, []), members.begin(2, [])
    first.await_all(WAIT_SECONDS)
    last.leave()
    until(lambda: first._has_left(2), "the end of the last member")
    first.awaits_all = True

    def is_named() -> bool:
        first.all_go_on()
        return looked(first, ends)

    until(is_named, "the end of the first member")
    assert re.match(r"member 2 \(\S+, pid \d+, has closed its session\) of this worker's group has given", ends[0])
    second.leave()


class Counting(dist.HashStore):
    """A store that records what it is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[tuple[str, int]] = []

    def clone(self) -> Counting:
        return self

    def set(self, key: str, value: str) -> None:
        self.asked.append(("set", 1))
        super().set(key, value)

    def get(self, key: str) -> bytes:
        self.asked.append(("get", 1))
        return super().get(key)

    def check(self, keys: list[str]) -> bool:
        self.asked.append(("check", len(keys)))
        return super().check(keys)


def test_while_members_are_missing_the_store_is_asked_twice_a_look_and_not_for_those_that_have_come() -> None:
    store = Counting()
    for member in range(1, 20):
        dist.HashStore.set(store, f"group/{member}", "0 n, pid 7")
    first = Neighbours(store, "group", 0, 30, SECONDS)
    first.begin()
    try:
        until(lambda: len(first._signs) == 19, "those that have come")
        begin = len(store.asked) + 2
        until(lambda: len(store.asked) >= begin + 20, "more looks")
        asked = store.asked[begin : begin + 20]
        assert sorted({*asked}) == [("check", 1), ("check", 10)]
        assert all(one != next_one for one, next_one in pairwise(asked)), "in turn"
    finally:
        first.leave()


@pytest.mark.parametrize("error", [RuntimeError("Connection reset by peer"), SystemExit(143)])
def test_neighbours_are_left_where_members_cannot_be_compared(
    members: Members, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    def broken(self: Group, own: bytes) -> list[bytes]:
        raise error

    monkeypatch.setattr(Group, "gather", broken)
    group = Group.__new__(Group)
    group.neighbours = members.begin(0, [])
    with pytest.raises(type(error)):
        group.check_alike("rank 0 of 1")
    assert not group.neighbours._thread.is_alive()


def test_a_member_that_does_not_come_is_named(members: Members) -> None:
    first, _ = members.begin(0, []), members.begin(2, [])
    until(lambda: 2 in first._signs, "the last member to come")
    said = "gave up after --start-timeout 0.5 s: waiting for member 1 of this worker's group to come to prepare"
    with pytest.raises(LimitExceeded, match=f"^{said}$"):
        first.await_all(0.5)


# -- a training thread that hangs ------------------------------------------------------------------------------------


class Others:
    """The other two members of a group of three, of which the first is looked at: they give signs of what they do."""

    def __init__(self, members: Members, places: list[str]) -> None:
        self._store, self._places, self._count = members.store, places, 0
        self.moves = 5
        self.ends: list[str] = []
        self.give()
        self.first = members.begin(0, self.ends, step_seconds=SECONDS)
        self.first.await_all(WAIT_SECONDS)

    def give(self) -> None:
        """Each gives its next sign."""
        self._count += 1
        for other, place in enumerate(self._places, 1):
            sign = f"{self._count} n{other}, pid 7\t{self.moves}\t{place}\ttrain.py:3 in load"
            self._store.set(f"group/{other}", sign)

    def _is_heard(self) -> bool:
        return all(self.first._signs[each].startswith(f"{self._count} ") for each in (1, 2))

    def look(self, gives: bool = True) -> None:
        """The first member looks once, after as long as two signs take. Its heartbeats are accepted."""
        if gives:
            self.give()
            until(self._is_heard, "the signs")
        self.first.all_go_on()
        self.first._checked -= SECONDS
        self.first.check()


LOOKS = 2 * SIGNS  # take several step timeouts


def ends_of(members: Members, own: str, others: list[str]) -> list[str]:
    """What ends the first of three members, whose thread is at `own`, where nobody moves for several step timeouts."""
    looking = Others(members, others)
    if own == CALL:
        looking.first.thread.enters()
    for _ in range(LOOKS):
        looking.look()
    return looking.ends


@pytest.mark.parametrize(
    ("own", "others", "named"),
    [
        (CALL, [SCRIPT, CALL], r"member 1 \(n1, pid 7, at train.py:3 in load\) of this worker's group has"),
        (CALL, [SCRIPT, SCRIPT], r"member 1 \(n1, .*\) and member 2 \(n2, .*\) of this worker's group have"),
        (SCRIPT, [COLLECTIVE, CALL], r"member 0 \(\S+, pid \d+, at test_neighbours.py:\d+ in look\) of .* has"),
    ],
)
def test_a_member_that_stays_in_the_script_while_another_one_waits_is_named(
    members: Members, own: str, others: list[str], named: str
) -> None:
    said = (
        rf"{named} made no step and no call of the session for 1 s, while another member waits \(--step-timeout\): "
        "this process ends, so that the group is started again"
    )
    assert re.fullmatch(said, ends_of(members, own, others)[0])


@pytest.mark.parametrize(
    ("own", "others"), [(SCRIPT, [SCRIPT, SCRIPT]), (CALL, [CALL, CALL]), (CALL, [COLLECTIVE, CALL])]
)
def test_members_that_are_all_in_the_script_or_all_wait_end_nothing(
    members: Members, own: str, others: list[str]
) -> None:
    """They evaluate together; or they wait for the servers, and for other groups."""
    assert ends_of(members, own, others) == []


def test_while_a_member_makes_steps_none_is_taken_to_hang(members: Members) -> None:
    others = Others(members, [COLLECTIVE, COLLECTIVE])
    for _ in range(LOOKS):
        others.first.thread.begins_step()
        others.look()
    assert others.ends == []


def test_while_members_meet_in_collectives_none_is_taken_to_hang(members: Members) -> None:
    """As in an evaluation by all, without a step, where each time that they look one is ahead and waits."""
    others = Others(members, [COLLECTIVE, COLLECTIVE])
    for _ in range(LOOKS):
        others.moves += 1
        others.look()
    assert others.ends == []


def test_a_member_that_gives_no_sign_is_not_taken_to_hang(members: Members) -> None:
    """Its heartbeats go on: it cannot reach the store, or C code keeps its GIL. What it has told last is old."""
    others = Others(members, [SCRIPT, CALL])
    others.first.thread.enters()
    for _ in range(LOOKS):
        others.look(gives=False)
    assert others.ends == []
    for _ in range(LOOKS):
        others.look()
    assert "member 1" in others.ends[0], "it gives signs again, and hangs"


@pytest.fixture
def alone() -> Iterator[None]:
    """This process is a process group of its own."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
def test_steps_calls_and_collectives_count_as_moves() -> None:
    thread = TrainingThread()
    moves = [thread.moves()]
    for moving in (thread.begins_step, thread.enters, lambda: dist.all_reduce(torch.ones(1)), dist.barrier):
        moving()
        moves.append(thread.moves())
    assert all(after > before for before, after in pairwise(moves)), moves
    assert thread.moves() == moves[-1]


@pytest.mark.usefixtures("alone")
def test_ctrl_c_as_a_call_begins_leaves_the_member_in_none(monkeypatch: pytest.MonkeyPatch) -> None:
    group = Group(range(1))
    enters = group.neighbours.thread.enters

    def interrupted() -> None:
        enters()
        raise KeyboardInterrupt

    monkeypatch.setattr(group.neighbours.thread, "enters", interrupted)
    with pytest.raises(KeyboardInterrupt), group.during("optimizer.step"):
        pass
    assert group.neighbours.thread.place()[0] == SCRIPT
    monkeypatch.setattr(group.neighbours.thread, "enters", enters)
    with group.during("session.mean"):
        assert group._call == "session.mean"


def test_where_a_training_thread_is() -> None:
    """In a script's own wait, in code of torch.distributed, and in a call of the session."""
    store, found, waits = dist.HashStore(), list[TrainingThread](), threading.Event()

    def train() -> None:
        found.append(TrainingThread())
        waits.wait(WAIT_SECONDS)
        barrier(store, 2, "here", barrier_timeout=WAIT_SECONDS)

    thread = threading.Thread(target=train, name="train")
    thread.start()
    until(lambda: bool(found), "the thread")
    kind, line = found[0].place()
    assert (kind, re.sub(r"\d+", "N", line)) == (SCRIPT, "test_neighbours.py:N in train")
    waits.set()
    until(lambda: found[0].place()[0] == COLLECTIVE, "the barrier")
    barrier(store, 2, "here", barrier_timeout=WAIT_SECONDS)
    thread.join(WAIT_SECONDS)
    found[0].enters()
    assert found[0].place()[0] == CALL
    found[0].is_in_call = False
    assert found[0].place()[0] == SCRIPT


def test_where_a_training_thread_is_is_found_without_a_look_at_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """The script's file may lie on a machine that is gone."""
    looks: list[object] = []
    linecache.getlines(__file__)  # as a warning that the script has given does
    monkeypatch.setattr(linecache, "checkcache", looks.append)
    assert TrainingThread().place()[0] == SCRIPT
    assert looks == []


# -- with processes --------------------------------------------------------------------------------------------------


def test_where_a_member_does_not_come_to_prepare_the_others_are_told(
    nursery: Nursery, shared: Cluster, job: str, tmp_path: Path
) -> None:
    options = Options(groups=1, absent=True)
    with Groups(nursery, shared.address, job, tmp_path, options, variables={"PS_START_TIMEOUT": "1"}) as groups:
        codes = [process.wait(WAIT_SECONDS) for process in groups.processes.values()]
        assert codes == [0, 0], groups.logs()
    said = (tmp_path / "refused-0-0").read_text()
    assert said == "gave up after --start-timeout 1 s: waiting for member 1 of this worker's group to come to prepare"


def test_a_member_that_does_not_come_to_a_call_ends_its_group_after_the_step_timeout(
    nursery: Nursery, shared: Cluster, job: str, tmp_path: Path
) -> None:
    """It waits for a file. Its heartbeats and signs go on. Whichever member sees it first ends, and says who hangs."""
    options, variables = Options(groups=1, steps=2, late=True), {"PS_STEP_TIMEOUT": "5"}
    with Groups(nursery, shared.address, job, tmp_path, options, variables=variables) as groups:
        codes = [process.wait(WAIT_SECONDS) for process in groups.processes.values()]
        assert SILENT_MEMBER_CODE in codes, groups.logs()
    said = r"member 1 \(\S+, pid \d+, at \w+.py:\d+ in \w+\) of this worker's group has made no step and no call"
    assert any(re.search(said, (tmp_path / f"log-0-{member}").read_text()) for member in (0, 1)), groups.logs()


def test_a_group_that_was_away_for_longer_than_the_group_timeout_goes_on_if_its_members_do(
    nursery: Nursery, make_cluster: Any, job: str, tmp_path: Path
) -> None:
    cluster = make_cluster(lease=LEASE)
    seconds = {"PS_GROUP_TIMEOUT": "6"}
    with Groups(nursery, cluster.address, job, tmp_path, Options(steps=8, holds=[4]), variables=seconds) as groups:
        until(lambda: groups.are_held(4), "all to stand at clock 4")
        signs = Signs(tmp_path / "group-1", members=2)
        cluster.end_lease(1, job)
        begin = signs.given()
        until(lambda: signs.given() > begin + SIGNS, "more signs than the group timeout has room for")
        groups.let_go(4)
        found = groups.ended()
    assert same(found[0], found[1])
    assert same(found[2], found[3])


class Signs:
    """The signs that the members of a group have given in their store, a file."""

    def __init__(self, path: Path, members: int) -> None:
        self._store = dist.PrefixStore("default_pg/0/", dist.FileStore(str(path), -1))
        self._store.set_timeout(timedelta(seconds=WAIT_SECONDS))
        self._keys = [f"ps_torch/group/0-1/0/{member}" for member in range(members)]

    def given(self) -> int:
        """How many the most silent member has given."""
        return min(int(self._store.get(key).split()[0]) for key in self._keys)
