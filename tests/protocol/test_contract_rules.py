"""The contract keeps the rules of buf.yaml and breaks no released one; and what checks that sees what it should."""

from __future__ import annotations

import json
import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BUF = Path(sysconfig.get_path("scripts")) / "buf"
RELEASED = "proto/released.binpb"


def broken_rules(command: str, *arguments: str, folder: Path = ROOT) -> set[str]:
    """The rules that buf finds broken, each with the file: {"FIELD_NO_DELETE data.proto"}."""
    run = subprocess.run(
        [BUF, command, "--error-format=json", *arguments], cwd=folder, capture_output=True, text=True, timeout=60
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
