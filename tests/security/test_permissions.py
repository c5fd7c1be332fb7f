"""Who may do what: every method is in the table, callers are known by token or certificate, none speaks for another."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from google.protobuf import message_factory
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_reflection.v1alpha import reflection_pb2
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from torch import nn

from ps_protocol.errors import Forbidden, InvalidRequest, NotFound, PSError, Unauthenticated
from ps_protocol.v1 import data_pb2, membership_pb2, rounds_pb2, types_pb2
from ps_protocol.v1.data_pb2_grpc import DataServiceStub
from ps_runtime import reloading
from ps_runtime.channel import open_channel
from ps_runtime.credentials import Access, Tls, access
from ps_runtime.grpc_status import error_from
from ps_server.ops import dev_certs, requests
from ps_server.rpc import call_limits
from ps_server.rpc.auth import parse_access_list
from ps_server.rpc.call_limits import HEARTBEAT
from ps_server.rpc.health_client import is_serving
from ps_server.rpc.permissions import EVERYONE, METHODS, REFLECTION_V1, Permission, Principal, Role
from ps_server.rpc.receiving import KINDS
from ps_worker.cluster.launcher_reports import report_shard_end, report_worker_end
from tests.tools.cluster import Cluster
from tests.tools.raw_worker import joined, vector_job

MakeCluster = Callable[..., Cluster]

ROLES = ("worker:mine", "reader", "admin", "cluster")
TOKENS = {name: f"{name}-token-of-some-length".replace(":", "-") for name in ROLES}
SECONDS = 20.0
REFLECTION = f"/{REFLECTION_V1}/ServerReflectionInfo"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The servers' list of tokens, and a file with each token by itself."""
    made = tmp_path_factory.mktemp("tokens")
    lines = "".join(f"{role} {token}\n" for role, token in TOKENS.items())
    texts = {"tokens": f"# who may do what\n\n{lines}", **{role: f"{token}\n" for role, token in TOKENS.items()}}
    for name, text in texts.items():
        (made / name).write_text(text)
        (made / name).chmod(0o600)
    return made


@pytest.fixture(scope="module")
def guarded(folder: Path) -> Iterator[Cluster]:
    running = Cluster(tokens=folder / "tokens")
    yield running
    running.stop()


def carrying(role: str) -> Access:
    return Access(token=lambda: TOKENS[role])


def services(cluster: Cluster) -> Iterator[tuple[str, Any]]:
    """(method path, descriptor) of everything that the servers say they serve."""
    for server in cluster.servers:
        with open_channel(server.address, carrying("admin")) as channel:
            database = ProtoReflectionDescriptorDatabase(channel)
            pool = DescriptorPool(database)
            for name in database.get_services():
                yield from ((f"/{name}/{method.name}", method) for method in pool.FindServiceByName(name).methods)


def test_every_method_of_every_service_is_in_the_table(guarded: Cluster) -> None:
    assert {path for path, _ in services(guarded)} == set(METHODS) - {REFLECTION}


def test_reflection_by_its_newer_name_needs_the_same_roles(guarded: Cluster) -> None:
    service = reflection_pb2.DESCRIPTOR.services_by_name["ServerReflection"]
    [method] = service.methods
    assert METHODS[REFLECTION] == METHODS[f"/{service.full_name}/{method.name}"]
    assert isinstance(_call(guarded, REFLECTION, method, Access()), Unauthenticated)
    worker = next(name for name in TOKENS if name.startswith("worker"))
    assert isinstance(_call(guarded, REFLECTION, method, carrying(worker)), Forbidden)
    assert _call(guarded, REFLECTION, method, carrying("reader")) is None


def test_methods_that_are_named_for_how_they_are_received_are_there() -> None:
    """One that is misspelt would be received as any other."""
    assert KINDS.keys() | {HEARTBEAT} <= METHODS.keys()


def _call(cluster: Cluster, path: str, method: Any, how: Access) -> PSError | None:
    """The error that an empty request ends with; None if it is answered."""
    kind = ("stream" if method.client_streaming else "unary") + "_" + ("stream" if method.server_streaming else "unary")
    empty = message_factory.GetMessageClass(method.input_type)().SerializeToString()
    with open_channel(cluster.address, how) as channel:
        call = getattr(channel, kind)(path)
        try:
            answer = call(iter([empty]) if method.client_streaming else empty, timeout=SECONDS)
            if method.server_streaming:
                next(answer)
                answer.cancel()
        except grpc.RpcError as error:
            return error_from(error, "the server")
    return None


def test_no_method_answers_who_does_not_say_who_it_is(guarded: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_limits, "HELD_SECONDS", 0.2)  # strangers are refused later where many come
    ways = (Access(), Access(token=lambda: "a-token-that-nobody-knows"))
    asked = [(path, method, how) for path, method in dict(services(guarded)).items() for how in ways]
    with ThreadPoolExecutor(len(asked)) as pool:
        errors = pool.map(lambda each: _call(guarded, *each), asked)
    for (path, _, _), error in zip(asked, errors, strict=True):
        assert error is None if METHODS[path] == EVERYONE else isinstance(error, Unauthenticated), path


@pytest.mark.parametrize("role", list(Role))
def test_the_table_is_what_the_servers_do(guarded: Cluster, role: Role) -> None:
    name = next(name for name in TOKENS if name.startswith(role.value))
    for path, method in dict(services(guarded)).items():
        error = _call(guarded, path, method, carrying(name))
        may = METHODS[path] == EVERYONE or role in METHODS[path]
        refused = isinstance(error, Forbidden) and "takes the role" in str(error)
        assert refused is not may, f"{role.value} calls {path}: {error}"


def test_health_answers_everyone(guarded: Cluster) -> None:
    assert is_serving(guarded.address)


def test_a_method_that_is_in_no_table_may_be_called_by_nobody() -> None:
    with pytest.raises(Forbidden, match="not in the table"):
        Principal("whoever", frozenset(Permission(role) for role in Role)).check("/ps_protocol.v1.JobService/Another")


def _train(cluster: Cluster, job: str, **more: object) -> None:
    model = nn.Linear(1, 1, bias=False)
    with cluster.connect("sync", job=job, **more) as session:
        model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
        model(torch.ones(1, 1)).sum().backward()
        optimizer.step()


def test_a_worker_trains_its_own_job_and_no_other(guarded: Cluster, folder: Path) -> None:
    _train(guarded, "mine", token_file=folder / "worker:mine")
    with pytest.raises(Forbidden, match="for job mine only"):
        _train(guarded, "another", token_file=folder / "worker:mine")
    with pytest.raises(Forbidden, match="takes the role worker"):
        _train(guarded, "mine", token_file=folder / "reader")
    with pytest.raises(Unauthenticated):
        _train(guarded, "mine")


def test_a_reader_sees_the_status_and_cannot_end_a_job(guarded: Cluster) -> None:
    assert requests.fetch(guarded.address, carrying("reader"))["jobs"] == []
    with pytest.raises(Forbidden):
        requests.end_job(guarded.address, "of no worker", carrying("reader"))
    with pytest.raises(LookupError):
        requests.end_job(guarded.address, "of no worker", carrying("admin"))


@pytest.mark.parametrize(
    ("role", "may"), [("worker:mine", True), ("reader", False), ("admin", True), ("cluster", True)]
)
def test_who_may_report_a_workers_end(guarded: Cluster, folder: Path, role: str, may: bool) -> None:
    """A worker's own role is enough, for its own job: it could take the place of the other anyway."""
    with guarded.connect("sync", job="mine", token_file=folder / "worker:mine") as session:
        model = nn.Linear(1, 1)
        session.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))

        def report(job: str) -> tuple[int, ...]:
            return report_worker_end(guarded.address, job, "another-launch", pid=1, access=carrying(role))

        if may:
            assert report("mine") == ()
        else:
            with pytest.raises(Forbidden, match="that takes the role admin or cluster or worker"):
                report("mine")
        with pytest.raises(NotFound if may and role != "worker:mine" else Forbidden):
            report("another")
        assert [
            worker["rank"] for worker in requests.fetch(guarded.address, carrying("reader"))["jobs"][0]["workers"]
        ] == [0]


@pytest.mark.parametrize(
    ("role", "may"), [("worker:mine", False), ("reader", False), ("admin", True), ("cluster", True)]
)
def test_who_may_report_a_shards_end(guarded: Cluster, role: str, may: bool) -> None:
    """With it another process may take the shard's index, so a worker may not."""
    process = guarded.servers[0].process
    if may:
        assert not report_shard_end(guarded.address, 0, process + 1, carrying(role)), "another process is meant"
    else:
        with pytest.raises(Forbidden, match="that takes the role admin or cluster"):
            report_shard_end(guarded.address, 0, process, carrying(role))


def test_tokens_are_read_again_when_they_change(
    make_cluster: MakeCluster, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reloading, "CHECK_SECONDS", 0.0)
    tokens = Path(shutil.copy(folder / "tokens", tmp_path))
    cluster = make_cluster(tokens=tokens)
    tokens.write_text(f"cluster {TOKENS['cluster']}\nadmin {TOKENS['reader']}\n")
    with pytest.raises(LookupError):
        requests.end_job(cluster.address, "mine", carrying("reader"))
    with pytest.raises(Unauthenticated):
        requests.fetch(cluster.address, carrying("admin"))
    tokens.write_text("nonsense")
    assert requests.fetch(cluster.address, carrying("reader"))


def test_a_certificate_says_who_calls(make_cluster: MakeCluster, tmp_path: Path) -> None:
    certs = tmp_path / "certs"
    dev_certs.write(certs)
    cluster = make_cluster(
        tls=Tls(certs / "server.pem", certs / "server.key", certs / "ca.pem"), tokens=certs / "roles"
    )
    files = {"tls_cert": certs / "worker.pem", "tls_key": certs / "worker.key", "tls_ca": certs / "ca.pem"}
    _train(cluster, "any", **files)
    worker, reader, admin = (
        access(certs / f"{role}.pem", certs / f"{role}.key", certs / "ca.pem") for role in ("worker", "reader", "admin")
    )
    with open_channel(cluster.address, worker) as channel, pytest.raises(grpc.RpcError) as caught:
        channel.unary_unary("/ps_protocol.v1.ShardService/DropJob")(b"", timeout=SECONDS)
    assert isinstance(error_from(caught.value, "it"), Forbidden)
    for other in (worker, reader):
        with pytest.raises(Forbidden):
            requests.end_job(cluster.address, "another's", other)
        with pytest.raises(Forbidden):
            requests.checkpoint_job(cluster.address, "another's", other)
    with pytest.raises(Forbidden):
        requests.fetch(cluster.address, worker)
    for looks in (reader, admin):
        assert requests.fetch(cluster.address, looks)["shards"]
    with pytest.raises(LookupError):
        requests.end_job(cluster.address, "another's", admin)
    with pytest.raises(Forbidden):
        _train(cluster, "more", **{key: Path(str(path).replace("worker", "admin")) for key, path in files.items()})
    (certs / "roles").write_text("cn:another admin\ncn:ps-server cluster\n")


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("captain a-token-of-some-length", "line 2: expected ROLE"),
        ("worker short", "line 2: a token is 16 to"),
        ("worker", "line 2: expected two words"),
        ("admin:job a-token-of-some-length", "line 2: admin is for all jobs"),
        ("cn:name captain", "line 2: expected ROLE"),
        ("", "names no token and no certificate"),
    ],
)
def test_a_file_of_tokens_that_is_wrong_is_refused_without_telling_a_token(line: str, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says) as caught:
        parse_access_list(f"# a comment\n{line}\n", "tokens")
    assert "some-length" not in str(caught.value)


def test_tokens_are_in_no_repr_and_in_no_log(guarded: Cluster, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    _train(guarded, "mine", token_file=folder / "worker:mine")
    with pytest.raises(Forbidden):
        requests.end_job(guarded.address, "mine", carrying("reader"))
    shown = repr(parse_access_list((folder / "tokens").read_text(), "tokens")) + repr(
        access(token_file=folder / "admin")
    )
    for token in TOKENS.values():
        assert token not in shown
        assert token not in caplog.text


def test_a_token_file_may_be_a_link_that_is_turned_to_another_file(
    guarded: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Kubernetes turns the secrets that it mounts."""
    monkeypatch.setattr(reloading, "CHECK_SECONDS", 0.0)
    for name, token in (("old", "a-token-that-nobody-knows"), ("new", TOKENS["reader"])):
        (tmp_path / name).write_text(token)
        (tmp_path / name).chmod(0o600)
    link = tmp_path / "link"
    link.symlink_to("old")
    mine = access(token_file=link)
    with pytest.raises(Unauthenticated):
        requests.fetch(guarded.address, mine)
    (tmp_path / "turned").symlink_to("new")
    (tmp_path / "turned").replace(link)
    assert requests.fetch(guarded.address, mine)["jobs"] == []


def test_a_token_does_not_leave_this_machine_in_plaintext() -> None:
    with pytest.raises(InvalidRequest, match="in plaintext"):
        open_channel("192.0.2.1:50051", carrying("admin"))


# -- incarnations ----------------------------------------------------------------------------------------------------


def _say(server: str, path: str, request: Any) -> list[bytes]:
    with open_channel(server) as channel:
        try:
            return list(channel.unary_stream(path)(request.SerializeToString(), timeout=SECONDS))
        except grpc.RpcError as error:
            raise error_from(error, "the server") from None


def in_the_name_of(worker: types_pb2.WorkerIdentity) -> Iterator[tuple[str, Any]]:
    """(method, request) for everything that a worker may ask."""
    pushed, here = data_pb2.BucketPush(kind=data_pb2.PUSH_KIND_SKIP), data_pb2.InSegment()
    push = data_pb2.PushHeader(worker=worker, clock=1, buckets=[pushed])
    yield "MembershipService/Heartbeat", membership_pb2.HeartbeatRequest(worker=worker)
    yield "MembershipService/Leave", membership_pb2.LeaveRequest(worker=worker)
    yield "MembershipService/SaveWorkerState", membership_pb2.SaveWorkerStateRequest(worker=worker)
    yield "RoundService/GatherValues", rounds_pb2.GatherValuesRequest(worker=worker, round=1)
    segment = {"location": "ps-torch-" + "0" * 32, "nonce": bytes(32), "socket_inode": 1}
    yield "DataService/AttachSegment", data_pb2.AttachSegmentRequest(worker=worker, **segment)
    for place in ({}, {"in_segment": here}):
        yield "DataService/Push", data_pb2.PushRequest(header=push, **place)
        yield "DataService/Pull", data_pb2.PullRequest(worker=worker, clock=0, **place)
        yield "DataService/Exchange", data_pb2.ExchangeRequest(push=push, **place)


def test_a_worker_cannot_speak_for_another(shared: Cluster, job: str) -> None:
    with joined(shared.address, vector_job(job, "async", cells=16, world_size=2)) as [victim, other]:
        assert len(other.lease_key) == 16
        for key in (b"", bytes(16), other.lease_key):
            for method, request in in_the_name_of(victim.identity(lease_key=key)):
                server = shared.servers[victim.shard_of[0] if method.startswith("DataService") else 0]
                with pytest.raises(Forbidden, match="does not come from worker 0"):
                    _say(server.address, f"/ps_protocol.v1.{method}", request)
        victim.step(torch.ones(16))  # its own next push is the first, whatever was sent in its name
        assert victim.pull().tolist() == [-1.0] * 16


def test_a_reader_pulls_the_weights_as_they_are(guarded: Cluster, folder: Path) -> None:
    with guarded.connect("sync", token_file=folder / "worker:mine", job="mine", transport="grpc") as session:
        model = nn.Linear(3, 1, bias=False)
        model, _ = session.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
        pull = data_pb2.PullRequest(worker=types_pb2.WorkerIdentity(job="mine"), buckets=[0])
        [place] = [index for index, shard in enumerate(guarded.shards) if shard.jobs()["mine"].buckets]
        with open_channel(guarded.servers[place].address, carrying("reader")) as channel:
            pulled = next(DataServiceStub(channel).Pull(pull, timeout=SECONDS))
        assert pulled.payload[:12] == model.weight.detach().numpy().tobytes()
