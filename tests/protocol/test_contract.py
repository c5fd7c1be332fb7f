"""The generated code is what the contract says, and every server tells tools of gRPC what it serves."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from google.protobuf import message_factory
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from ps_protocol.v1 import job_pb2, jobs_pb2, types_pb2
from tests.tools.buf import declared
from tests.tools.cluster import Cluster

ROOT = Path(__file__).parents[2]
PROTOS = sorted((ROOT / "proto" / "ps_protocol").rglob("*.proto"))
GENERATED = ROOT / "ps_protocol" / "v1"
GENERATOR = "1.84.0"  # of grpcio-tools; as old as the oldest protobuf and grpcio that pyproject.toml allows


# -- the generated code ----------------------------------------------------------------------------------------------


def test_every_file_of_the_contract_has_its_generated_module() -> None:
    assert {path.stem + "_pb2.py" for path in PROTOS} == {path.name for path in GENERATED.glob("*_pb2.py")}
    assert not list((ROOT / "proto").rglob("*.py")), "a package of that name would hide another"


@pytest.mark.parametrize("path", PROTOS, ids=lambda path: path.name)
def test_the_generated_code_declares_what_the_contract_declares(path: Path) -> None:
    [expected] = [file for file in declared() if file.name.endswith("/v1/" + path.name)]
    for message in expected.message_type:
        for field in [*message.field, *(field for nested in message.nested_type for field in nested.field)]:
            field.ClearField("json_name")
    module = importlib.import_module(f"ps_protocol.v1.{path.stem}_pb2")
    assert FileDescriptorProto.FromString(module.DESCRIPTOR.serialized_pb) == expected


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


# -- what every gRPC tool expects to find ----------------------------------------------------------------------------

SPEC = job_pb2.JobSpec(
    name="by-hand",
    parameters=[
        job_pb2.ParameterSpec(name="weight", shape=[2, 2], data_type=types_pb2.DATA_TYPE_FLOAT32),
        job_pb2.ParameterSpec(name="bias", shape=[2], data_type=types_pb2.DATA_TYPE_FLOAT32),
    ],
    optimizers=["SGD"],
    groups=[job_pb2.ParameterGroup(hyper_parameters=[job_pb2.HyperParameter(name="lr", number=0.5)])],
    consistency=job_pb2.Consistency(max_staleness=0, aggregate=True),
    bucket_bytes=64,
    world_size=1,
)


@pytest.fixture
def channels(shared: Cluster) -> Iterator[dict[str, grpc.Channel]]:
    """Plain channels to every server, by address."""
    opened = {server.address: grpc.insecure_channel(server.address) for server in shared.servers}
    yield opened
    for channel in opened.values():
        channel.close()


EVERY_SHARD = {"ps_protocol.v1.DataService", "ps_protocol.v1.FeedService", "ps_protocol.v1.ShardService"}
COORDINATOR = {f"ps_protocol.v1.{name}Service" for name in ("Job", "Membership", "DataLease", "Round", "Cluster")}


def test_health_and_reflection_know_every_service_of_a_server(
    shared: Cluster, channels: dict[str, grpc.Channel]
) -> None:
    for address, channel in channels.items():
        services = EVERY_SHARD | (COORDINATOR if address == shared.address else set())
        found = set(ProtoReflectionDescriptorDatabase(channel).get_services())
        assert found == services | {"grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"}
        health = health_pb2_grpc.HealthStub(channel)
        for service in ("", *services):
            answer = health.Check(health_pb2.HealthCheckRequest(service=service), timeout=10)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING


def test_reflection_answers_by_its_newer_name_as_by_the_older_one(channels: dict[str, grpc.Channel]) -> None:
    asked = reflection_pb2.ServerReflectionRequest
    questions = [asked(list_services=""), asked(file_containing_symbol="ps_protocol.v1.DataService")]
    for channel in channels.values():
        answers = [
            list(
                channel.stream_stream(
                    f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
                    asked.SerializeToString,
                    reflection_pb2.ServerReflectionResponse.FromString,
                )(iter(questions), timeout=20)
            )
            for version in ("v1alpha", "v1")
        ]
        assert answers[0] == answers[1]
        assert answers[0][1].file_descriptor_response.file_descriptor_proto


def test_a_client_made_from_reflection_alone_registers_a_job(
    shared: Cluster, channels: dict[str, grpc.Channel]
) -> None:
    """What grpcurl does: it asks the server for the contract, and has no file of ours."""
    channel = channels[shared.address]
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
