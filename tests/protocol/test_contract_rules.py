"""The contract keeps the rules of buf.yaml and breaks no released one; and what checks that sees what it should."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest
from google.protobuf.descriptor_pb2 import DescriptorProto, FileDescriptorProto

from tests.tools.buf import buf, declared

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
def files() -> list[FileDescriptorProto]:
    """The files of the contract as descriptors, those of others left out."""
    return [file for file in declared() if file.package == "ps_protocol.v1"]


@pytest.fixture(scope="module")
def messages(files: list[FileDescriptorProto]) -> dict[str, DescriptorProto]:
    """The messages of the contract by name."""
    return {message.name: message for file in files for message in file.message_type}


def test_the_contract_keeps_its_rules_and_breaks_no_client_of_the_released_one() -> None:
    assert broken_rules("lint") == set()
    assert broken_rules("breaking", f"--against={RELEASED}") == set()


FIELD, METHOD = "  uint64 bucket_bytes = 3;\n", "  rpc EndJob(EndJobRequest) returns (EndJobResponse);\n"


@pytest.mark.parametrize(
    ("command", "before", "after", "rules"),
    [
        ("breaking", FIELD, "", {"FIELD_NO_DELETE"}),
        ("breaking", FIELD, FIELD.replace("3", "40"), {"FIELD_NO_DELETE"}),
        ("breaking", FIELD, FIELD.replace("uint64", "string"), {"FIELD_SAME_TYPE"}),
        ("breaking", METHOD, "", {"RPC_NO_DELETE"}),
        ("breaking", FIELD, FIELD + "  // How many buckets the job has.\n  uint32 bucket_count = 40;\n", set()),
        ("lint", FIELD, FIELD + "  // How many buckets the job has.\n  uint32 bucket_count = 40;\n", set()),
        ("lint", FIELD, FIELD + "\n  uint32 count = 40;\n", {"COMMENT_FIELD"}),
        ("lint", "service JobService {\n", "service Jobs {\n", {"SERVICE_SUFFIX"}),
    ],
)
def test_a_change_that_breaks_clients_or_a_rule_is_found(
    copy: Path, command: str, before: str, after: str, rules: set[str]
) -> None:
    (path,) = (path for path in copy.rglob("jobs.proto") if f"\n{before}" in path.read_text())
    path.write_text(path.read_text().replace(f"\n{before}", f"\n{after}"))
    against = [f"--against={RELEASED}"] if command == "breaking" else []
    assert broken_rules(command, *against, folder=copy) == {f"{rule} jobs.proto" for rule in rules}


# -- what buf does not know (that a payload comes last: test_framing) --------------------------------------------------


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
