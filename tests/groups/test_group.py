"""How the members of a group agree, and how each of them leaves."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
import torch.distributed as dist

from ps_protocol.errors import InvalidRequest
from ps_protocol.identity import Identity
from ps_protocol.messages.workers import SavedState
from ps_protocol.v1 import membership_pb2, membership_pb2_grpc
from ps_runtime.credentials import PLAINTEXT
from ps_worker.cluster.coordinator_calls import CoordinatorClient
from ps_worker.cluster.value_rounds import GroupRounds
from ps_worker.group import Group, PlaceLost, RaisedByAll

DAY = 24 * 3600.0


@pytest.fixture
def alone(tmp_path: Path) -> Group:
    """The group of this process alone."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    return Group([0])


def test_members_wait_for_each_other_as_long_as_it_takes(alone: Group) -> None:
    """The first may be at the coordinator, in a round behind another worker's evaluation of hours."""
    options = alone._gloo._get_backend(torch.device("cpu")).options
    assert options._timeout.total_seconds() > DAY


def test_members_talk_whatever_the_scripts_default_device_is(alone: Group) -> None:
    torch.set_default_device("meta")
    try:
        assert alone.gather(b"") == [b""]
        assert alone.gather(b"own") == [b"own"]
        assert alone.from_first(lambda: b"") == b""
        assert alone.from_first(lambda: b"made") == b"made"
        assert alone.compare(None, True, -3) == (None, [1, -3])
    finally:
        torch.set_default_device(None)


def test_what_members_say_is_heard_where_the_place_is_lost(alone: Group) -> None:
    lost, highest = alone.compare(PlaceLost(), True)
    assert isinstance(lost, PlaceLost)
    assert highest == [1]
    with pytest.raises(InvalidRequest, match="not so"):
        alone.compare(InvalidRequest("not so"), True)


class Failing:
    """The steps of a worker whose empty steps, and ways back, fail on all members."""

    stepped = False

    def empty_step(self) -> None:
        raise InvalidRequest("no step")

    def pause(self, seconds: float) -> None:
        pass

    def come_back(self) -> bool:
        raise InvalidRequest("no place")


@pytest.mark.parametrize("call", ["empty_step", "come_back"])
def test_nobody_is_told_of_an_error_that_all_members_raise(
    alone: Group, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """The others are out of the round by then, and listen no more."""
    told: list[bytes] = []
    broadcast = alone._broadcast
    monkeypatch.setattr(alone, "_broadcast", lambda made: told.append(made) or broadcast(made))
    participation: Any = None
    rounds = GroupRounds(alone, participation, Failing())
    stepper: Any = rounds._rounds._stepper
    monkeypatch.setattr(rounds._rounds, "exchange", lambda value, what: getattr(stepper, call)())
    with pytest.raises(InvalidRequest, match=r"^no (step|place)$"):
        rounds.exchange(b"", "mean")
    assert told == [b"+s" if call == "empty_step" else b"+b"]
    with pytest.raises(RaisedByAll):
        getattr(stepper, call)()


class Losing(membership_pb2_grpc.MembershipServiceServicer):  # type: ignore[misc,unused-ignore]
    """A coordinator that does not answer the first calls."""

    def __init__(self, silent: int) -> None:
        self.silent, self.heard = silent, list[Any]()

    def Leave(self, request: Any, context: grpc.ServicerContext) -> Any:
        self.heard.append(request)
        if len(self.heard) <= self.silent:
            context.abort(grpc.StatusCode.UNAVAILABLE, "it starts")
        return membership_pb2.LeaveResponse()


@pytest.mark.parametrize(("attempts", "silent", "heard"), [(1, 2, 1), (3, 2, 3), (3, 9, 3), (3, 0, 1)])
def test_a_leave_is_repeated_where_the_coordinator_does_not_answer(
    monkeypatch: pytest.MonkeyPatch, attempts: int, silent: int, heard: int
) -> None:
    monkeypatch.setattr("ps_worker.cluster.coordinator_calls.LEAVE_PAUSE_SECONDS", 0.0)
    service = Losing(silent)
    with ThreadPoolExecutor(2) as pool:
        server = grpc.server(pool)
        membership_pb2_grpc.add_MembershipServiceServicer_to_server(service, server)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        client = CoordinatorClient(f"127.0.0.1:{port}", 10.0, PLAINTEXT)
        client.leave(Identity("job", 0, 1), SavedState(4, b"own"), True, None, attempts)
        client.close()
        server.stop(None).wait()
    assert [(each.done, each.state.content) for each in service.heard] == [(True, b"own")] * heard
