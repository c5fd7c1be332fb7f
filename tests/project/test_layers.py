"""Which room may import which, and what each may know of the world: one dictionary, held by a walk over imports."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.tools.imports import PACKAGES, ROOT, arrows, floors, imports, modules, syntax, within

CONTRACT = "ps_protocol"
# By room: what it may import of ours, beside itself and ps_protocol. Files that no line names may import all of their
# own package, ps_runtime, ps_launch and ps_frames.
MAY_IMPORT = {
    "ps_protocol": set[str](),
    "ps_runtime": set[str](),
    "ps_launch": {"ps_runtime"},
    "ps_frames": {"ps_runtime"},
    "ps_tables.native": set[str](),
    "ps_tables": set[str](),
    "ps_server.core": {"ps_tables"},
    "ps_server.failpoints": set[str](),
    "ps_server.storage": {"ps_server.core", "ps_server.failpoints", "ps_tables"},
    "ps_server.shard": {
        "ps_server.core",
        "ps_server.storage",
        "ps_server.failpoints",
        "ps_frames.loans",
        "ps_tables",
        "ps_runtime",
    },
    "ps_server.coordinator": {"ps_server.core", "ps_server.storage", "ps_server.failpoints", "ps_runtime"},
    "ps_server.relay": {
        "ps_server.core",
        "ps_server.shard.bucket_messages",
        "ps_server.shard.mapped",
        "ps_server.shard.outbox",
        "ps_server.shard.shared_changes",
        "ps_server.shard.relay_reports",
        "ps_server.failpoints",
        "ps_feed",
        "ps_runtime",
    },
    "ps_server.view": {"ps_server.core", "ps_server.coordinator", "ps_runtime"},
    "ps_server.rpc": {
        "ps_server.core",
        "ps_server.storage",
        "ps_server.shard",
        "ps_server.coordinator",
        "ps_server.view",
        "ps_server.relay",
        "ps_server.failpoints",
        "ps_frames",
        "ps_runtime",
    },
    "ps_server.ops": {
        "ps_server.core",
        "ps_server.storage",
        "ps_server.shard",
        "ps_server.coordinator",
        "ps_server.relay",
        "ps_server.rpc",
        "ps_feed",
        "ps_runtime",
        "ps_tables.sizes",
    },
    "ps_worker.values": set[str](),
    "ps_worker.training_thread": {"ps_worker.launched"},
    "ps_worker.neighbours": {"ps_worker.launched", "ps_worker.training_thread", "ps_runtime"},
    "ps_worker.group": {"ps_worker.neighbours", "ps_runtime"},
    "ps_worker.metrics": {"ps_worker.values", "ps_runtime"},
    "ps_worker.timeline": {"ps_worker.values"},
    "ps_worker.tables": {"ps_tables"},
    "ps_worker.model": {
        "ps_worker.values",
        "ps_worker.group",
        "ps_worker.metrics",
        "ps_worker.timeline",
        "ps_worker.tables",
        "ps_runtime.troubles",
    },
    "ps_worker.data": {"ps_worker.values", "ps_worker.metrics"},
    "ps_worker.cluster": {
        "ps_worker.values",
        "ps_worker.group",
        "ps_worker.metrics",
        "ps_worker.timeline",
        "ps_worker.model",
        "ps_worker.tables",
        "ps_frames",
        "ps_tables",
        "ps_runtime",
    },
    "ps_worker.state": {
        "ps_worker.values",
        "ps_worker.data",
        "ps_worker.cluster",
        "ps_worker.model.sharded",
        "ps_runtime.pools",
        "ps_runtime.troubles",
    },
    "ps_worker.strategies": {
        "ps_worker.values",
        "ps_worker.group",
        "ps_worker.metrics",
        "ps_worker.timeline",
        "ps_worker.model",
        "ps_worker.data",
        "ps_worker.cluster",
        "ps_worker.state",
        "ps_worker.tables",
        "ps_runtime",
    },
    "ps_feed": {"ps_runtime"},
    "ps_torch": {"ps_worker"},
    "ps_worker.ray": {"ps_worker.config", "ps_worker.connecting", "ps_worker.cluster", "ps_runtime", "ps_launch"},
}

# By module of the world: the rooms and files that may import it.
ONLY_IN = {
    "grpc": {
        "ps_runtime",
        "ps_server.rpc",
        "ps_server.server",
        "ps_server.relay_server",
        "ps_worker.cluster",
        "ps_feed.edition_client",
    },
    "ray": {"ps_worker.ray"},
    "ps_protocol.v1": {
        "ps_protocol.convert",
        "ps_protocol.messages",
        "ps_server.rpc",
        "ps_worker.cluster",
        "ps_feed.edition_client",
    },
    "cffi": {"ps_tables.native.loading"},
    "fsspec": {"ps_server.storage.objects"},
    "prometheus_client": {
        "ps_runtime.metrics",
        "ps_server.shard.metrics",
        "ps_server.ops",
        "ps_server.rpc.interceptor",
        "ps_worker.metrics",
    },
}
# All that the rules may import from outside: values, and the tensors they are about.
_ARRAYS = {"numpy", "torch"}
CORE_MAY_IMPORT = {
    "__future__",
    "abc",
    "bisect",
    "collections",
    "dataclasses",
    "enum",
    "hmac",
    "math",
    "operator",
    "typing",
    *_ARRAYS,
}
MAY_READ_THE_ENVIRONMENT = {"ps_runtime", "ps_launch", "ps_server.failpoints"}


def is_in(module: str, places: set[str]) -> bool:
    return any(module == place or module.startswith(place + ".") for place in places)


def forbidden_imports() -> set[str]:
    found = set()
    for module, targets in arrows().items():
        room = next((room for room in MAY_IMPORT if is_in(module, {room})), None)
        allowed = (
            MAY_IMPORT[room] | {room}
            if room
            else {module.split(".")[0], "ps_runtime", "ps_launch", "ps_frames", "ps_feed"}
        )
        found |= {f"{module} imports {each}" for each in targets if not is_in(each, allowed | {CONTRACT})}
    return found


def reads_the_environment(text: str) -> bool:
    if "environ" not in text:
        return False
    attributes = (node for node in ast.walk(syntax(text)) if isinstance(node, ast.Attribute))
    return any(ast.unparse(node) == "os.environ" for node in attributes)


def forbidden_knowledge() -> set[str]:
    found = set()
    for module, path in modules().items():
        for imported in imports(path):
            for world, places in ONLY_IN.items():
                if is_in(imported, {world}) and not is_in(module, places):
                    found.add(f"{module} imports {world}")
            if is_in(module, {"ps_server.core"}) and not is_in(imported, {*CORE_MAY_IMPORT, *PACKAGES}):
                found.add(f"{module} imports {imported}")
        if not is_in(module, MAY_READ_THE_ENVIRONMENT) and reads_the_environment(path.read_text()):
            found.add(f"{module} reads os.environ")
    return found


def test_rooms_import_only_what_they_may() -> None:
    assert forbidden_imports() | forbidden_knowledge() == set()


@pytest.mark.parametrize("package", PACKAGES)
def test_no_import_goes_in_a_circle(package: str) -> None:
    """TYPE_CHECKING included."""
    for graph in (within(package, depth) for depth in (2, 3)):
        assert graph.keys() - floors(graph).keys() == set()


TOOLS = ("tools", "scripts", "simulation", "chaos")  # the folders of tests that hold more than claims


def rooms() -> list[Path]:
    inits = {path for path in modules().values() if path.name == "__init__.py"}
    return sorted(path.parent for path in inits) + [ROOT / "tests" / folder for folder in TOOLS]


@pytest.mark.parametrize("room", rooms(), ids=lambda room: room.relative_to(ROOT).as_posix())
def test_each_room_says_what_is_in_it(room: Path) -> None:
    listing = ast.get_docstring(syntax((room / "__init__.py").read_text())) or ""
    listed = re.findall(r"^(\w+(?:\.py|/)) ", listing, re.MULTILINE)
    present = [path.name for path in room.glob("*.py") if not path.name.startswith(("__", "test_"))]
    present += [f"{path.name}/" for path in room.iterdir() if (path / "__init__.py").exists() and path.name != "v1"]
    assert sorted(listed) == sorted(present)


def test_claims_share_tools_and_never_import_each_other() -> None:
    claims = {path: imports(path) for path in sorted((ROOT / "tests").rglob("test_*.py"))}
    shared = {path.name: {each for each in imported if ".test_" in each} for path, imported in claims.items()}
    assert {name: wrong for name, wrong in shared.items() if wrong} == {}
