"""What is installed: the locks fit pyproject.toml and name no registry, and what we use of gRPC's insides is there."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import Any

import grpc
import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from tests.tools import audit, requirements

ROOT = Path(__file__).parents[2]
LOCKS = {"requirements.lock": ("examples",), "requirements-dev.lock": ("dev",)}
CPU_INDEX = "https://download.pytorch.org/whl/cpu"


def locked(lock: str) -> dict[str, list[str]]:
    """The versions of each package in a lock: several where they depend on Python's."""
    versions: dict[str, list[str]] = {}
    for name, version in re.findall(r"^([a-z0-9-]+)==(\S+)", (ROOT / lock).read_text(), re.MULTILINE):
        versions.setdefault(name, []).append(version)
    return versions


@pytest.mark.parametrize("lock", LOCKS)
def test_a_lock_has_all_that_is_asked_for_in_a_version_that_fits(lock: str) -> None:
    versions = locked(lock)
    for requirement in map(Requirement, requirements.to_lock(*LOCKS[lock])):
        name = requirement.name.lower().replace("_", "-")
        assert name in versions, f"{lock} lacks {name}: run `make lock`"
        assert all(Version(version) in requirement.specifier for version in versions[name]), f"{name}: run `make lock`"
    assert "torch" not in versions, "which build fits, only the machine knows"


@pytest.mark.parametrize("lock", LOCKS)
def test_a_lock_has_the_versions_of_the_constraints_and_hashes_and_names_no_registry(lock: str) -> None:
    versions, text = locked(lock), (ROOT / lock).read_text()
    pinned = dict(re.findall(r"^(\S+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    differing = {name: versions[name] for name in pinned if versions.get(name, [pinned[name]]) != [pinned[name]]}
    assert differing == {}, "run `make lock`"
    for entry in re.split(r"^(?=[a-z0-9-]+==)", text, flags=re.MULTILINE)[1:]:
        assert "--hash=sha256:" in entry, entry
    assert "://" not in text


def test_users_choose_among_extras_that_are_for_them() -> None:
    offered = set(metadata.metadata(requirements.PROJECT).get_all("Provides-Extra") or ())
    documents = "".join(path.read_text() for path in (ROOT / "docs").glob("*.md"))
    assert {extra for extra in offered if f"[{extra}]'" not in documents} == set()
    assert {"dev", "release", "kubernetes"} <= set(requirements.groups())
    assert offered.isdisjoint(requirements.groups())


def test_make_installs_groups_and_extras_that_there_are() -> None:
    makefile = (ROOT / "Makefile").read_text()
    stamps = set(re.findall(r"\.venv/([a-z-]+)\.stamp", makefile))
    [extras] = re.findall(r"^EXTRAS := (.*)$", makefile, re.MULTILINE)
    assert set(extras.split()) <= set(metadata.metadata(requirements.PROJECT).get_all("Provides-Extra") or ())
    assert stamps - set(extras.split()) <= set(requirements.groups())


def test_every_floor_is_below_what_is_locked() -> None:
    versions = locked("requirements.lock")
    floors = dict(line.split("==") for line in requirements.floors())
    assert {"torch", "grpcio", "protobuf", "cryptography", "googleapis-common-protos"} <= set(floors)
    for name, floor in floors.items():
        assert all(Version(floor) <= Version(version) for version in versions.get(name, []))


def test_the_generated_code_is_of_the_oldest_versions_that_are_allowed() -> None:
    """Generated code refuses what is older than it, and protobuf promises nothing beyond the next major version."""
    floors = dict(line.split("==") for line in requirements.floors())
    for path in (ROOT / "ps_protocol/v1").glob("*_pb2.py"):
        [version] = re.findall(r"^# Protobuf Python Version: (\S+)$", path.read_text(), re.MULTILINE)
        assert Version(version) == Version(floors["protobuf"]), path.name
        services = path.with_name(path.name.replace("_pb2", "_pb2_grpc")).read_text()
        [made_by] = re.findall(r"^GRPC_GENERATED_VERSION = '(\S+)'$", services, re.MULTILINE)
        assert Version(made_by) == Version(floors["grpcio"]), path.name


REPORT = {
    "dependencies": [
        {"name": "safe", "version": "1", "vulns": []},
        {"name": "broken", "version": "2", "vulns": [{"id": "PYSEC-1", "fix_versions": ["3"]}]},
    ]
}


@pytest.mark.parametrize(
    ("out", "err", "code", "says"),
    [
        (json.dumps(REPORT), "Found 1 known vulnerability", 1, "broken 2: PYSEC-1, mended in 3\n"),
        (json.dumps({"dependencies": []}), "", 0, "lock: no known vulnerabilities\n"),
        ("", "requests.exceptions.ConnectionError: Max retries exceeded", 0, "no advisory database is reachable"),
        ("", "unknown option --format", 1, "pip-audit failed: unknown option"),
    ],
    ids=["found", "clean", "offline", "broken"],
)
def test_an_audit_fails_on_findings_and_says_when_it_could_not_ask(
    out: str, err: str, code: int, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    program = f"import sys; sys.stdout.write({out!r}); sys.stderr.write({err!r}); sys.exit({code})"
    monkeypatch.setattr(audit, "AUDIT", ("-c", program))
    assert audit.audit("lock") == code
    assert says in capsys.readouterr().out


def test_grpc_still_has_the_insides_that_the_data_path_stands_on() -> None:
    """`experimental_non_blocking` and `experimental_thread_pool` are no public API: a newer grpcio may lack them.

    If this fails after an upgrade of grpcio, the version is not for us: give it an upper bound in pyproject.toml, and
    find another way in ps_server/rpc/call_limits.py to answer without a thread for each call.
    """
    general, own = ThreadPoolExecutor(1, "general"), ThreadPoolExecutor(1, "own")
    threads: list[str] = []

    def answer(request: bytes, context: Any, send: Callable[[bytes | None], None]) -> None:
        threads.append(threading.current_thread().name)
        send(request)
        send(None)

    answer.experimental_non_blocking = True  # type: ignore[attr-defined]
    answer.experimental_thread_pool = own  # type: ignore[attr-defined]

    class Handler(grpc.GenericRpcHandler):
        def service(self, handler_call_details: Any) -> Any:
            return grpc.unary_stream_rpc_method_handler(answer)

    server = grpc.server(general)
    server.add_generic_rpc_handlers((Handler(),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            answers = channel.unary_stream("/canary/Ask")(b"question", timeout=20, wait_for_ready=True)
            assert list(answers) == [b"question"], "experimental_non_blocking: the handler is handed a way to answer"
            assert threads[0].startswith("own"), "experimental_thread_pool: the handler runs on the pool it names"
    finally:
        server.stop(None).wait()
        general.shutdown()
        own.shutdown()


PIP = """#!{python}
import sys
if "-c" in sys.argv and not {torch}:
    sys.exit("no torch")
if "pip" in sys.argv:
    print("pip", *sys.argv[sys.argv.index("install"):])
if "pip" in sys.argv and "requirements.lock" in sys.argv:
    print("Collecting numpy==2.3 (from -r requirements.lock (line 3))")
    print("  Downloading numpy")
    sys.exit({code})
"""


def make_stamp(folder: Path, *variables: str, code: int = 0, torch: bool = True) -> subprocess.CompletedProcess[str]:
    """What `make demo` does first, with a Python whose pip ends with that code, and which may have torch."""
    for name in ("pyproject.toml", "constraints.txt", "requirements.lock", "requirements-dev.lock"):
        (folder / name).touch()
    (folder / ".venv").mkdir()
    (folder / "bin").mkdir()
    python = folder / "bin" / "python"
    python.write_text(PIP.format(python=sys.executable, code=code, torch=torch))
    python.chmod(0o755)
    command = ["make", "-f", str(ROOT / "Makefile"), "-C", str(folder), "IN_VENV=bin", *variables]
    return subprocess.run([*command, ".venv/examples.stamp"], capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("code", [0, 1])
def test_make_names_what_pip_fetches_and_fails_where_pip_does(tmp_path: Path, code: int) -> None:
    """Without a word for a minute it looks as if it hung."""
    done = make_stamp(tmp_path, code=code)
    assert "\n  numpy\n" in done.stdout, done.stderr
    assert "Downloading" not in done.stdout
    assert (done.returncode == 0) == (code == 0)
    assert (tmp_path / ".venv" / "examples.stamp").exists() == (code == 0)
    assert "torch==" not in done.stdout, "the one that is there is taken"


def test_make_says_what_torch_takes_before_it_fetches_it(tmp_path: Path) -> None:
    done = make_stamp(tmp_path, "TORCH_INDEX=", torch=False)
    said, _, fetched = done.stdout.partition("\npip install")
    assert "5 GB" in said, done.stdout + done.stderr
    assert f"TORCH_INDEX={CPU_INDEX}" in said
    assert fetched.startswith(" torch==")


def test_make_takes_torch_from_the_index_that_it_is_given(tmp_path: Path) -> None:
    done = make_stamp(tmp_path, f"TORCH_INDEX={CPU_INDEX}", torch=False)
    said, _, fetched = done.stdout.partition("\npip install")
    assert CPU_INDEX in said, done.stdout + done.stderr
    assert "5 GB" not in said
    assert fetched.startswith(f" --index-url {CPU_INDEX} torch==")


# What brings torch where it is missing, as the documents show it.
FETCHES = re.compile(r"make demo|docker compose up --build|pip install '?\.(?=\s|\[)")
SHOW_A_START = ("README.md", "docs/index.md", "docs/deploy.md", "docs/slurm.md", "docs/ray.md")


@pytest.mark.parametrize("name", SHOW_A_START)
def test_a_document_says_what_torch_takes_before_the_command_that_fetches_it(name: str) -> None:
    text = "\n" + (ROOT / name).read_text()
    found = [each.start() for each in FETCHES.finditer(text)]
    assert found
    for start in found:
        before = text[text.rindex("\n#", 0, start) : text.index("\n", start)]
        assert re.search(r"\b[56] GB", before), text[start:][:80]
        assert CPU_INDEX in before, text[start:][:80]
