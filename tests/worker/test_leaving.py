"""A worker leaves its job, whatever becomes of the state that it leaves behind."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
import torch
from google.protobuf import descriptor_pool
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from torch import nn

from ps_protocol.errors import Backlogged, Forbidden, PSError, TryLater
from ps_protocol.identity import Identity
from ps_protocol.messages.workers import SavedState
from ps_runtime.grpc_status import status_of
from ps_server.rpc.permissions import METHODS, REFLECTION_V1
from ps_server.rpc.receiving import KINDS
from ps_worker.cluster import coordinator_calls
from ps_worker.cluster.coordinator_calls import CoordinatorClient
from ps_worker.session import Session
from ps_worker.strategies.job_training import JobTraining
from tests.tools.cluster import TEST_SECONDS, Cluster, until
from tests.tools.raw_worker import RawWorker, vector_job
from tests.tools.rpc_faults import Broken

SHORT = {"lease_key", "nonce", "cursor", "base_sha256"}  # bytes, of which there are few


def identity_of(worker: RawWorker) -> Identity:
    return Identity(worker.spec.name, worker.rank, worker.incarnation, worker.lease_key)


def test_a_worker_whose_state_is_too_large_for_a_message_leaves_without_it(
    shared: Cluster, job: str, caplog: pytest.LogCaptureFixture
) -> None:
    client = CoordinatorClient(shared.address, 20.0)
    with RawWorker(shared.address, vector_job(job, "async", 16, 0), 0) as worker:
        client.leave(identity_of(worker), SavedState(3, bytes(18 * 2**20)))
        assert job not in shared.coordinator.jobs(), "it was the last one, and did not just go away"
    client.close()
    assert "this worker leaves without its state at clock 3" in caplog.text


class Ended(Broken):
    """How a server, or gRPC in its place, ends a call."""

    def __init__(self, code: grpc.StatusCode, error: PSError | None = None) -> None:
        self._code, self._error = code, error

    def code(self) -> grpc.StatusCode:
        return self._code

    def trailing_metadata(self) -> tuple[tuple[str, bytes], ...]:
        if self._error is None:
            return ()
        return (("grpc-status-details-bin", status_of(self._error).SerializeToString()),)


PASSING = {
    "a server that stops": Ended(grpc.StatusCode.CANCELLED),
    "no room yet": Ended(grpc.StatusCode.RESOURCE_EXHAUSTED, Backlogged("too many calls")),
    "not yet": Ended(grpc.StatusCode.UNAVAILABLE, TryLater("a moment")),
}


@pytest.mark.parametrize("ended", PASSING.values(), ids=PASSING)
def test_a_farewell_that_is_refused_for_a_moment_is_repeated_with_the_state(
    shared: Cluster, job: str, monkeypatch: pytest.MonkeyPatch, ended: Ended
) -> None:
    client = CoordinatorClient(shared.address, 20.0)
    leave, tried = client._membership.Leave, 0

    def refused_once(request: Any, timeout: float) -> Any:
        nonlocal tried
        tried += 1
        if tried == 1:
            raise ended
        assert request.state.content == b"state"
        return leave(request, timeout=timeout)

    monkeypatch.setattr(coordinator_calls, "LEAVE_PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(client._membership, "Leave", refused_once)
    with RawWorker(shared.address, vector_job(job, "async", 16, 0), 0) as worker:
        client.leave(identity_of(worker), SavedState(3, b"state"), done=True)
        assert job not in shared.coordinator.jobs()
    client.close()
    assert tried == 2


def test_a_worker_whose_state_takes_too_long_to_send_leaves_without_it(
    shared: Cluster, job: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Over a slow link. It would count as lost otherwise, although its script has ended."""
    client = CoordinatorClient(shared.address, 20.0)
    leave, seconds = client._membership.Leave, list[float]()

    def slow(request: Any, timeout: float) -> Any:
        seconds.append(timeout)
        if request.HasField("state"):
            raise Ended(grpc.StatusCode.DEADLINE_EXCEEDED)
        return leave(request, timeout=TEST_SECONDS)

    monkeypatch.setattr(coordinator_calls, "LEAVE_SECONDS", 0.0)  # so much of it is over when the first call ends
    monkeypatch.setattr(client._membership, "Leave", slow)
    with RawWorker(shared.address, vector_job(job, "async", 16, 0), 0) as worker:
        client.leave(identity_of(worker), SavedState(3, b"state"), done=True)
        assert job not in shared.coordinator.jobs()
    client.close()
    assert seconds[0] == coordinator_calls.CALL_SECONDS
    assert "this worker leaves without its state at clock 3, unless the coordinator has it from a call" in caplog.text


def test_a_farewell_that_is_refused_for_good_is_logged(
    shared: Cluster, job: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    client = CoordinatorClient(shared.address, 20.0)

    def refused(request: Any, timeout: float) -> Any:
        raise Ended(grpc.StatusCode.PERMISSION_DENIED, Forbidden("not with this token"))

    monkeypatch.setattr(client._membership, "Leave", refused)
    client.leave(Identity(job, 0, 1, b"key"), SavedState(3, b"state"))
    client.close()
    said = "could not be told that this worker leaves with its state: it counts as lost when its lease ends (a test"
    assert said in caplog.text


def test_a_worker_leaves_its_state_behind(shared: Cluster, job: str) -> None:
    client = CoordinatorClient(shared.address, 20.0)
    spec = vector_job(job, "async", 16, 0)
    with RawWorker(shared.address, spec, 0) as worker, RawWorker(shared.address, spec, 1) as other:
        client.leave(identity_of(worker), SavedState(3, b"state"))
        assert [member.rank for member in shared.coordinator.job(job).workers.all()] == [1]
        other.leave()
    client.close()


class Broken:
    """Its state cannot be told once `is_broken`."""

    is_broken = False

    def state_dict(self) -> dict[str, int]:
        if self.is_broken:
            raise ValueError("it has no state")
        return {"state": 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        pass


def test_a_worker_leaves_whose_script_cannot_tell_what_it_has_set(shared: Cluster, job: str) -> None:
    session, model, thing = shared.connect("local:2", job=job), nn.Linear(4, 4), Broken()
    model, optimizer, _ = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), thing)
    for _ in range(2):
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
    thing.is_broken = True
    session.close()
    assert job not in shared.coordinator.jobs()


def test_a_worker_whose_place_another_process_has_sends_no_state(
    shared: Cluster, job: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def begun() -> tuple[Session, JobTraining]:
        session, model = shared.connect("async", 0, 1, job=job), nn.Linear(4, 4)
        session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        training = session._strategy._training  # type: ignore[attr-defined]
        return session, training

    session, training = begun()
    monkeypatch.setattr("ps_worker.connecting._open", [])  # as in another process: it closes no session of this one
    with begun()[0]:
        sender, members = training._sender, training.participation.membership
        assert members.place is not None
        until(lambda: (members.await_change(members.place), members.error)[1], "that its place is lost")
        sender.send(3, b"state")
        assert sender._last is not None
        sender._last.result(TEST_SECONDS)
    session.close()


def brings_bytes(message: Descriptor, within: tuple[Descriptor, ...] = ()) -> bool:
    """Whether a message has a field that may be long."""
    if message in within:
        return False
    return any(
        (field.message_type is not None and brings_bytes(field.message_type, (*within, message)))
        or (field.type == FieldDescriptor.TYPE_BYTES and field.name not in SHORT)
        for field in message.fields
    )


def request_of(method: str) -> Descriptor:
    _, service, name = method.split("/")
    return descriptor_pool.Default().FindServiceByName(service).methods_by_name[name].input_type


def test_every_request_that_may_be_long_has_time_to_arrive() -> None:
    """A farewell brings the worker's state: in two seconds, as heartbeats have, not every link carries it."""
    long = {method for method in METHODS if REFLECTION_V1 not in method and brings_bytes(request_of(method))}
    assert {method.rpartition("/")[2] for method in long} >= {"Push", "GatherValues", "SaveWorkerState", "Leave"}
    assert long <= KINDS.keys()
