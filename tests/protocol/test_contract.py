"""The contract is explained, the generated code is what it says, and whoever has only the contract can take part."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import struct
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import message_factory
from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
)
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from ps_protocol.v1 import data_pb2, data_pb2_grpc, job_pb2, jobs_pb2, jobs_pb2_grpc, membership_pb2, types_pb2
from tests.tools.cluster import Cluster

ROOT = Path(__file__).parents[2]
PROTOS = sorted((ROOT / "proto" / "ps_protocol").rglob("*.proto"))
MODULES = {"control": control_pb2, "data": data_pb2, "job": job_pb2}
GENERATOR = "1.64.3"  # of grpcio-tools; as old as the oldest protobuf and grpcio that pyproject.toml allows


# -- the text of the contract ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Element:
    """One thing that a .proto file declares: where, what, and whether a comment stands above it.

    path:   names from the outside in, such as JobSpec/parameters
    detail: a field's label, type and number; an enum value's number; a method's request and response
    """

    path: str
    kind: str
    detail: str
    commented: bool
    line: int


OPENING = re.compile(r"(message|enum|service|oneof) (\w+) \{(\})?")
FIELD = re.compile(r"(?:(repeated|optional) )?(map<\w+, [\w.]+>|[\w.]+) (\w+) = (\d+);")
VALUE = re.compile(r"([A-Z][A-Z0-9_]*) = (\d+);")
METHOD = re.compile(r"rpc (\w+)\(((?:stream )?\w+)\) returns \(((?:stream )?\w+)\);")


def elements(path: Path) -> list[Element]:
    """Everything declared in a file, in order. Raises for a line that this simple reading does not understand."""
    found: list[Element] = []
    inside: list[tuple[str, str]] = []  # (kind, name) of what is open
    commented = False
    for number, text in enumerate(path.read_text().splitlines(), 1):
        line = text.strip()
        where = "/".join(outer for kind, outer in inside if kind != "oneof")
        innermost = inside[-1][0] if inside else ""

        declared: tuple[str, str, str] | None = None  # kind, name, detail
        if line.startswith("//"):
            commented = True
            continue
        if opened := OPENING.fullmatch(line):
            declared = (opened[1], opened[2], "")
            if not opened[3]:
                inside.append((opened[1], opened[2]))
        elif line == "}":
            inside.pop()
        elif innermost == "enum" and (value := VALUE.fullmatch(line)):
            declared = ("value", value[1], value[2])
        elif innermost == "service" and (method := METHOD.fullmatch(line)):
            declared = ("method", method[1], f"{method[2]} -> {method[3]}")
        elif innermost in ("message", "oneof") and (field := FIELD.fullmatch(line)):
            label = "oneof" if innermost == "oneof" else field[1]
            declared = ("field", field[3], " ".join(filter(None, (label, field[2], f"= {field[4]}"))))
        else:
            assert not line or re.fullmatch(r'(syntax = "proto3"|package [\w.]+|import "[\w./]+");', line), (
                f"{path.name}, line {number} is not understood: {line}"
            )
        if declared is not None:
            kind, name, detail = declared
            found.append(Element(f"{where}/{name}".lstrip("/"), kind, detail, commented, number))
        commented = False
    assert not inside
    return found


@pytest.mark.parametrize("path", PROTOS, ids=lambda path: path.name)
def test_every_element_of_the_contract_has_a_comment(path: Path) -> None:
    assert path.read_text().startswith("//"), "the file itself"
    assert [f"line {element.line}: {element.path}" for element in elements(path) if not element.commented] == []


@pytest.mark.parametrize("path", PROTOS, ids=lambda path: path.name)
def test_the_contract_keeps_to_its_own_style(path: Path) -> None:
    """Every enum starts with what is not set; names are told from enum to enum; counts are called so."""
    for element in elements(path):
        name = element.path.rpartition("/")[2]
        if element.kind == "value":
            enum = element.path.split("/")[-2]
            prefix = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", enum).upper()
            assert name.startswith(prefix + "_")
            assert (element.detail == "0") == name.endswith("_UNSPECIFIED")
        if element.kind == "field":
            assert re.fullmatch(r"[a-z][a-z0-9_]*", name)
            assert not name.startswith("num_")


# -- the generated code ----------------------------------------------------------------------------------------------


TYPES = {
    number: name.removeprefix("TYPE_").lower()
    for name, number in FieldDescriptorProto.Type.items()
    if name not in ("TYPE_MESSAGE", "TYPE_ENUM", "TYPE_GROUP")
}


def short(type_name: str) -> str:
    return type_name.lstrip(".").removeprefix("ps_protocol.v1.")


def generated(module: Any) -> set[tuple[str, str, str]]:
    """Everything that a generated module declares, in the terms of `Element`: path, kind, detail."""
    file = FileDescriptorProto.FromString(module.DESCRIPTOR.serialized_pb)
    found: set[tuple[str, str, str]] = set()

    def field(path: str, message: DescriptorProto, one: FieldDescriptorProto) -> None:
        entries = {nested.name: nested for nested in message.nested_type if nested.options.map_entry}
        kind = TYPES.get(one.type) or short(one.type_name)
        label = "repeated" if one.label == FieldDescriptorProto.LABEL_REPEATED else ""
        entry = entries.get(kind.rpartition(".")[2])
        if entry is not None:
            key, value = (TYPES.get(part.type) or short(part.type_name) for part in entry.field)
            label, kind = "", f"map<{key}, {value}>"
        if one.proto3_optional:
            label = "optional"
        elif one.HasField("oneof_index"):
            label = "oneof"
        found.add((f"{path}/{one.name}", "field", " ".join(filter(None, (label, kind, f"= {one.number}")))))

    def enum(path: str, one: EnumDescriptorProto) -> None:
        found.add((path, "enum", ""))
        found.update((f"{path}/{value.name}", "value", str(value.number)) for value in one.value)

    def message(path: str, one: DescriptorProto) -> None:
        found.add((path, "message", ""))
        for inner in one.field:
            field(path, one, inner)
        for index, oneof in enumerate(one.oneof_decl):
            if not any(f.oneof_index == index and f.proto3_optional for f in one.field if f.HasField("oneof_index")):
                found.add((f"{path}/{oneof.name}", "oneof", ""))
        for nested in one.nested_type:
            if not nested.options.map_entry:
                message(f"{path}/{nested.name}", nested)
        for nested_enum in one.enum_type:
            enum(f"{path}/{nested_enum.name}", nested_enum)

    for top in file.message_type:
        message(top.name, top)
    for top_enum in file.enum_type:
        enum(top_enum.name, top_enum)
    for service in file.service:
        found.add((service.name, "service", ""))
        for method in service.method:
            ends = [
                ("stream " if streaming else "") + short(type_name)
                for streaming, type_name in (
                    (method.client_streaming, method.input_type),
                    (method.server_streaming, method.output_type),
                )
            ]
            found.add((f"{service.name}/{method.name}", "method", " -> ".join(ends)))
    return found


def test_every_file_of_the_contract_has_its_generated_module() -> None:
    assert [path.stem for path in PROTOS] == sorted(MODULES)
    assert not list((ROOT / "proto").rglob("*.py")), "a package of that name would hide another"


@pytest.mark.parametrize("path", PROTOS, ids=lambda path: path.name)
def test_the_generated_code_declares_what_the_contract_declares(path: Path) -> None:
    declared = {(element.path, element.kind, element.detail) for element in elements(path)}
    assert generated(MODULES[path.stem]) == declared


def generator_is_here() -> bool:
    if importlib.util.find_spec("grpc_tools") is None:
        return False
    return importlib.metadata.version("grpcio-tools") == GENERATOR


@pytest.mark.skipif(not generator_is_here(), reason=f"grpcio-tools {GENERATOR} is not installed: `make proto` has it")
def test_generating_anew_changes_nothing(tmp_path: Path) -> None:
    out = [f"--{kind}_out={tmp_path}" for kind in ("python", "pyi", "grpc_python")]
    files = [str(path.relative_to(ROOT)) for path in PROTOS]
    subprocess.run([sys.executable, "-m", "grpc_tools.protoc", "-Iproto", *out, *files], cwd=ROOT, check=True)
    made = sorted((tmp_path / "ps_protocol" / "v1").iterdir())
    assert len(made) == 3 * len(PROTOS)
    assert [path.name for path in made if path.read_bytes() != (ROOT / "ps_protocol/v1" / path.name).read_bytes()] == []


# -- a client that knows nothing but the contract --------------------------------------------------------------------


def floats(*values: float) -> bytes:
    """A bucket of 16 elements (64 bytes): these, and zeros behind them."""
    return struct.pack("<16f", *values, *[0.0] * (16 - len(values)))


SPEC = job_pb2.JobSpec(
    name="by-hand",
    parameters=[
        job_pb2.ParameterSpec(name="weight", shape=[2, 2], data_type=types_pb2.DATA_TYPE_FLOAT32),
        job_pb2.ParameterSpec(name="bias", shape=[2], data_type=types_pb2.DATA_TYPE_FLOAT32),
    ],
    optimizer="SGD",
    groups=[job_pb2.ParameterGroup(hyper_parameters=[job_pb2.HyperParameter(name="lr", number=0.5)])],
    consistency=job_pb2.Consistency(max_staleness=0, aggregate=True),
    bucket_bytes=64,
    world_size=1,
)
BIAS, WEIGHT = 0, 1  # the last parameter is in the first bucket
INITIAL = {BIAS: (1.0, 2.0), WEIGHT: (1.0, -1.0, 0.5, 8.0)}
GRADIENT = {BIAS: (2.0, -2.0), WEIGHT: (1.0, 1.0, 1.0, -4.0)}
AFTER_ONE_STEP = {BIAS: (0.0, 3.0), WEIGHT: (0.5, -1.5, 0.0, 10.0)}  # initial - 0.5 * gradient


@pytest.fixture
def channels(cluster: Cluster) -> Iterator[dict[str, grpc.Channel]]:
    """Plain channels to every server, by address."""
    opened = {server.address: grpc.insecure_channel(server.address) for server in cluster.servers}
    yield opened
    for channel in opened.values():
        channel.close()


def test_a_client_made_from_the_contract_alone_registers_joins_pushes_and_pulls(
    cluster: Cluster, channels: dict[str, grpc.Channel]
) -> None:
    jobs = jobs_pb2_grpc.JobServiceStub(channels[cluster.address])
    registered = jobs.RegisterJob(jobs_pb2.RegisterJobRequest(spec=SPEC), timeout=10)
    assert registered.created
    assert not jobs.RegisterJob(jobs_pb2.RegisterJobRequest(spec=SPEC), timeout=10).created
    place = jobs.JoinJob(membership_pb2.JoinRequest(job="by-hand", rank=0), timeout=10)
    assert (place.rank, place.clock) == (0, 0)
    assert place.lease.ToTimedelta().total_seconds() == 10
    addresses = {shard.index: shard.address for shard in registered.shard_map.shards}
    assert set(addresses.values()) == set(channels)
    assert sorted(registered.shard_map.bucket_shards) == [0, 1], "a bucket on each shard"
    shards = [data_pb2_grpc.DataServiceStub(channels[addresses[i]]) for i in registered.shard_map.bucket_shards]
    who = types_pb2.WorkerIdentity(job="by-hand", rank=0, incarnation=place.incarnation, lease_key=place.lease_key)

    def push(bucket: int, clock: int, kind: data_pb2.PushKind, payload: bytes) -> data_pb2.PushResponse:
        header = data_pb2.PushHeader(worker=who, bucket=bucket, clock=clock, kind=kind)
        response: data_pb2.PushResponse = shards[bucket].Push(
            data_pb2.PushRequest(header=header, payload=payload), timeout=10
        )
        return response

    def pull(bucket: int, clock: int) -> data_pb2.PullResponse:
        request = data_pb2.PullRequest(worker=who, clock=clock, buckets=[bucket])
        messages = [m for m in shards[bucket].Pull(request, timeout=10) if not m.header.HasField("waiting")]
        assert len(messages) == 1
        return messages[0]  # type: ignore[no-any-return]

    for bucket, values in INITIAL.items():
        push(bucket, 0, data_pb2.PUSH_KIND_INITIAL_VALUE, floats(*values))
        assert pull(bucket, 0).payload == floats(*values)
    for bucket, values in GRADIENT.items():
        assert not push(bucket, 1, data_pb2.PUSH_KIND_GRADIENT, floats(*values)).duplicate
        assert push(bucket, 1, data_pb2.PUSH_KIND_GRADIENT, floats(*values)).duplicate
    for bucket, values in AFTER_ONE_STEP.items():
        found = pull(bucket, 1)
        assert (found.header.bucket, found.header.version) == (bucket, 1)
        assert found.payload == floats(*values)
    assert (
        jobs.Heartbeat(
            membership_pb2.HeartbeatRequest(
                job="by-hand", rank=0, incarnation=place.incarnation, clock=1, lease_key=place.lease_key
            ),
            timeout=10,
        ).live_count
        == 1
    )
    assert jobs.LeaveJob(
        membership_pb2.LeaveRequest(job="by-hand", rank=0, incarnation=place.incarnation, lease_key=place.lease_key),
        timeout=10,
    ).ended


def test_an_error_carries_a_reason_that_a_program_can_read(channels: dict[str, grpc.Channel]) -> None:
    (stub, *_) = (data_pb2_grpc.DataServiceStub(channel) for channel in channels.values())
    with pytest.raises(grpc.RpcError) as failed:
        stub.Push(data_pb2.PushRequest(header=data_pb2.PushHeader(kind=data_pb2.PUSH_KIND_SKIP)), timeout=10)
    assert failed.value.code() == grpc.StatusCode.NOT_FOUND
    details = dict(failed.value.trailing_metadata())["grpc-status-details-bin"]
    assert b"NOT_FOUND" in details
    assert b"ps_protocol" in details


# -- what every gRPC tool expects to find ----------------------------------------------------------------------------

EVERY_SHARD = {"ps_protocol.v1.DataService", "ps_protocol.v1.ShardService"}
COORDINATOR = {"ps_protocol.v1.JobService", "ps_protocol.v1.ClusterService"}


def test_every_service_says_that_it_is_well(cluster: Cluster, channels: dict[str, grpc.Channel]) -> None:
    for address, channel in channels.items():
        health = health_pb2_grpc.HealthStub(channel)
        for service in ("", *EVERY_SHARD, *(COORDINATOR if address == cluster.address else ())):
            answer = health.Check(health_pb2.HealthCheckRequest(service=service), timeout=10)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING


def test_reflection_lists_what_a_server_offers(cluster: Cluster, channels: dict[str, grpc.Channel]) -> None:
    for address, channel in channels.items():
        found = set(ProtoReflectionDescriptorDatabase(channel).get_services())
        standard = {"grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"}
        assert found == standard | EVERY_SHARD | (COORDINATOR if address == cluster.address else set())


def test_a_client_made_from_reflection_alone_registers_a_job(
    cluster: Cluster, channels: dict[str, grpc.Channel]
) -> None:
    """What grpcurl does: it asks the server for the contract, and has no file of ours."""
    channel = channels[cluster.address]
    pool = DescriptorPool(ProtoReflectionDescriptorDatabase(channel))
    method = pool.FindServiceByName("ps_protocol.v1.JobService").methods_by_name["RegisterJob"]
    request_class = message_factory.GetMessageClass(method.input_type)
    response_class = message_factory.GetMessageClass(method.output_type)
    assert request_class is not jobs_pb2.RegisterJobRequest
    request = request_class()
    request.spec.ParseFromString(SPEC.SerializeToString())
    assert request.spec.parameters[0].name == "weight"
    call = channel.unary_unary(
        "/ps_protocol.v1.JobService/RegisterJob", request_class.SerializeToString, response_class.FromString
    )
    assert call(request, timeout=10).created


def test_reflection_knows_every_field_of_the_contract(channels: dict[str, grpc.Channel]) -> None:
    (channel, *_) = channels.values()
    stub = reflection_pb2_grpc.ServerReflectionStub(channel)
    asked = [reflection_pb2.ServerReflectionRequest(file_containing_symbol="ps_protocol.v1.JobSpec")]
    (answer,) = stub.ServerReflectionInfo(iter(asked), timeout=10)
    files = [FileDescriptorProto.FromString(data) for data in answer.file_descriptor_response.file_descriptor_proto]
    assert job_pb2.DESCRIPTOR.serialized_pb in [file.SerializeToString() for file in files]
