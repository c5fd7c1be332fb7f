"""The contract keeps the rules of buf.yaml and breaks no released one; and what checks that sees what it should."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest
from google.protobuf.descriptor_pb2 import DescriptorProto, FieldDescriptorProto, FileDescriptorProto, FileDescriptorSet

from tests.tools.buf import buf

ROOT = Path(__file__).parents[2]
RELEASED = "proto/released.binpb"


def broken_rules(command: str, *arguments: str, folder: Path = ROOT) -> set[str]:
    """The rules that buf finds broken, each with the file: {"FIELD_NO_DELETE data.proto"}."""
    run = subprocess.run(
        [buf(), command, "--error-format=json", *arguments], cwd=folder, capture_output=True, text=True, timeout=60
    )
    assert run.returncode in (0, 100), run.stderr
    found = [json.loads(line) for line in run.stdout.splitlines()]
    assert bool(found) == (run.returncode == 100)
    return {f"{fault['type']} {Path(fault['path']).name}" for fault in found}


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of the contract and its rules, to change."""
    shutil.copytree(ROOT / "proto", tmp_path / "proto")
    shutil.copy(ROOT / "buf.yaml", tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[FileDescriptorProto]:
    """The files of the contract as descriptors, those of others left out."""
    image = tmp_path_factory.mktemp("contract") / "image.binpb"
    subprocess.run([buf(), "build", "--as-file-descriptor-set", f"--output={image}"], cwd=ROOT, check=True, timeout=60)
    found = FileDescriptorSet.FromString(image.read_bytes())
    return [file for file in found.file if file.package == "ps_protocol.v1"]


@pytest.fixture(scope="module")
def messages(files: list[FileDescriptorProto]) -> dict[str, DescriptorProto]:
    """The messages of the contract by name."""
    return {message.name: message for file in files for message in file.message_type}


def change(folder: Path, file: str, before: str, after: str) -> None:
    """Replaces a text that occurs once in a file of the contract."""
    (path,) = (path for path in folder.rglob(file) if f"\n{before}" in path.read_text())
    text = path.read_text()
    assert text.count(f"\n{before}") == 1
    path.write_text(text.replace(f"\n{before}", f"\n{after}"))


def test_the_contract_keeps_its_rules() -> None:
    assert broken_rules("lint") == set()


def test_the_contract_breaks_no_client_of_the_released_one() -> None:
    assert broken_rules("breaking", f"--against={RELEASED}") == set()


@pytest.mark.parametrize(
    ("file", "before", "after", "rule"),
    [
        ("jobs.proto", "  uint64 bucket_bytes = 3;\n", "", "FIELD_NO_DELETE"),
        ("jobs.proto", "  uint64 bucket_bytes = 3;\n", "  uint64 bucket_bytes = 4;\n", "FIELD_NO_DELETE"),
        ("jobs.proto", "  uint64 bucket_bytes = 3;\n", "  uint64 bytes_of_bucket = 3;\n", "FIELD_SAME_NAME"),
        ("jobs.proto", "  uint64 bucket_bytes = 3;\n", "  string bucket_bytes = 3;\n", "FIELD_SAME_TYPE"),
        ("types.proto", "  DATA_TYPE_UINT8 = 8;\n", "", "ENUM_VALUE_NO_DELETE"),
        ("jobs.proto", "  rpc EndJob(EndJobRequest) returns (EndJobResponse);\n", "", "RPC_NO_DELETE"),
    ],
)
def test_a_change_that_breaks_clients_is_found(copy: Path, file: str, before: str, after: str, rule: str) -> None:
    change(copy, file, before, after)
    assert f"{rule} {file}" in broken_rules("breaking", f"--against={RELEASED}", folder=copy)


def test_a_field_that_is_added_breaks_nobody(copy: Path) -> None:
    field = "  uint64 bucket_bytes = 3;\n"
    change(copy, "jobs.proto", field, field + "  // How many buckets the job has.\n  uint32 bucket_count = 4;\n")
    assert broken_rules("breaking", f"--against={RELEASED}", folder=copy) == set()
    assert broken_rules("lint", folder=copy) == set()


@pytest.mark.parametrize(
    ("before", "after", "rule"),
    [
        ("  uint64 bucket_bytes = 3;\n", "  uint64 bucket_bytes = 3;\n\n  uint32 count = 4;\n", "COMMENT_FIELD"),
        ("  uint64 bucket_bytes = 3;\n", "  uint64 bucketBytes = 3;\n", "FIELD_LOWER_SNAKE_CASE"),
        (
            "  rpc EndJob(EndJobRequest) returns (EndJobResponse);\n",
            "  rpc EndJob(EndJobRequest) returns (CheckpointJobResponse);\n",
            "RPC_REQUEST_RESPONSE_UNIQUE",
        ),
        ("service JobService {\n", "service Jobs {\n", "SERVICE_SUFFIX"),
    ],
)
def test_a_rule_that_is_broken_is_found(copy: Path, before: str, after: str, rule: str) -> None:
    change(copy, "jobs.proto", before, after)
    assert f"{rule} jobs.proto" in broken_rules("lint", folder=copy)


# -- what buf does not know --------------------------------------------------------------------------------------------


def test_a_payload_is_the_last_field_of_its_message(messages: dict[str, DescriptorProto]) -> None:
    """So it can be written and read without a copy; see ps_protocol/framing.py."""
    carriers = 0
    for message in messages.values():
        for field in message.field:
            if field.name == "payload":
                carriers += 1
                assert field.type == FieldDescriptorProto.TYPE_BYTES
                assert field.number == 15 == max(other.number for other in message.field), message.name
    assert carriers


def test_every_answer_of_the_data_path_begins_with_the_state_that_answers(
    files: list[FileDescriptorProto], messages: dict[str, DescriptorProto]
) -> None:
    (service,) = (service for file in files for service in file.service if service.name == "DataService")
    for method in service.method:
        first = messages[method.output_type.rpartition(".")[2]].field[0]
        assert (first.name, first.number, first.type_name) == ("header", 1, ".ps_protocol.v1.ResponseHeader")


def test_a_file_holds_one_service_at_most(files: list[FileDescriptorProto]) -> None:
    assert {file.name: len(file.service) for file in files if len(file.service) > 1} == {}


def test_a_worker_shows_who_it_is_in_one_way(messages: dict[str, DescriptorProto]) -> None:
    secrets = {message.name for message in messages.values() for field in message.field if field.name == "lease_key"}
    assert secrets == {"WorkerIdentity"}


@pytest.mark.parametrize(("suffix", "type_name"), [("_duration", "Duration"), ("_time", "Timestamp")])
def test_times_are_durations_and_timestamps(messages: dict[str, DescriptorProto], suffix: str, type_name: str) -> None:
    full = f".google.protobuf.{type_name}"
    fields = [(message.name, field) for message in messages.values() for field in message.field]
    named = {(where, field.name) for where, field in fields if field.name.endswith(suffix)}
    assert named == {(where, field.name) for where, field in fields if field.type_name == full}
    assert named
    assert not [field.name for _, field in fields if field.name.endswith(("_seconds", "_ms", "_millis"))]
