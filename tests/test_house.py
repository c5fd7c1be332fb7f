"""The rules of the house, held by a walk over the sources."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

import ps_worker

ROOT = Path(__file__).parent.parent
PACKAGES = ("ps_protocol", "ps_server", "ps_worker")
GENERATED = ROOT / "ps_protocol" / "v1"
MOST_LINES = 400

# The one place of each side where protobuf messages become Python values, and the servicers that carry them.
KNOW_MESSAGES = {
    "ps_protocol/job_messages.py",
    "ps_server/messages.py",
    "ps_server/services.py",
    "ps_worker/messages.py",
}

# All that the rules of a shard and of the coordinator may know: values, and the tensors they are about.
CORE_MAY_IMPORT = {
    "__future__",
    "collections",
    "dataclasses",
    "enum",
    "math",
    "typing",
    "torch",
    "ps_protocol.errors",
    "ps_protocol.framing",
    "ps_protocol.job",
    "ps_protocol.layout",
    "ps_protocol.modes",
    "ps_protocol.optimizers",
    "ps_protocol.tensors",
    "ps_server.core",
}


def sources(*folders: str) -> list[Path]:
    """The Python files of some folders that people wrote."""
    found = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    return [path for path in found if GENERATED not in path.parents]


PACKAGE_FILES = sources(*PACKAGES)
ALL_FILES = sources(*PACKAGES, "bench", "examples", "tests")


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), name(path))


def imports(path: Path) -> Iterator[str]:
    """Full names of what a file imports, wherever in it: `from a.b import c` is a.b.c."""
    package = path.relative_to(ROOT).with_suffix("").parts[:-1]
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            module = ".".join(filter(None, (base, node.module)))
            yield from (f"{module}.{alias.name}" for alias in node.names)


def within(imported: str, modules: set[str] | tuple[str, ...]) -> bool:
    return any(imported == module or imported.startswith(module + ".") for module in modules)


def each(files: list[Path]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    return pytest.mark.parametrize("path", files, ids=name)


# -- who may know whom -----------------------------------------------------------------------------------------------


@each(PACKAGE_FILES)
def test_servers_and_workers_never_import_each_other_and_what_they_share_imports_neither(path: Path) -> None:
    own = path.relative_to(ROOT).parts[0]
    others = tuple(package for package in PACKAGES if package not in (own, "ps_protocol"))
    assert [found for found in imports(path) if within(found, (*others, "bench", "examples", "tests"))] == []


@each(sources("ps_server/core"))
def test_the_core_knows_no_sockets_clocks_threads_environment_or_messages(path: Path) -> None:
    assert [found for found in imports(path) if not within(found, CORE_MAY_IMPORT)] == []


@each(PACKAGE_FILES)
def test_messages_are_known_in_one_place_of_each_side(path: Path) -> None:
    """Stubs (`…_pb2_grpc`) are known where calls are made, and a DESCRIPTOR, which only names a service, anywhere."""
    found = [name for name in imports(path) if re.match(r"ps_protocol\.v1\.\w+_pb2(\.(?!DESCRIPTOR$)|$)", name)]
    assert not found or name(path) in KNOW_MESSAGES


@each(PACKAGE_FILES)
def test_no_file_of_a_package_imports_the_test_tools(path: Path) -> None:
    assert [found for found in imports(path) if within(found, ("pytest", "hypothesis", "unittest"))] == []


# -- nothing that runs what a peer or a file says --------------------------------------------------------------------

PICKLES = ("pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "joblib")
RUN_TEXT = {"eval", "exec", "compile", "__import__"}
PICKLE_INSIDE = {("torch", "load"), ("torch", "save"), ("numpy", "load"), ("np", "load"), ("np", "save")}


@each([path for path in ALL_FILES if "tests" not in path.relative_to(ROOT).parts])
def test_nothing_is_unpickled_or_evaluated(path: Path) -> None:
    assert [found for found in imports(path) if within(found, PICKLES)] == []
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Call):
            called = node.func
            if isinstance(called, ast.Name):
                assert called.id not in RUN_TEXT, f"line {node.lineno}"
            elif isinstance(called, ast.Attribute) and isinstance(called.value, ast.Name):
                assert (called.value.id, called.attr) not in PICKLE_INSIDE, f"line {node.lineno}"


# -- files that can be read ------------------------------------------------------------------------------------------


@each(sources(*PACKAGES, "bench", "examples"))
def test_no_file_is_too_long_to_read_at_once(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= MOST_LINES


@each(PACKAGE_FILES)
def test_no_file_is_named_after_nothing(path: Path) -> None:
    vague = {"utils", "util", "common", "helpers", "helper", "misc", "manager", "handler", "processor"}
    assert not vague & {*path.with_suffix("").relative_to(ROOT).parts, *path.stem.split("_")}


@each(ALL_FILES)
def test_every_file_says_what_it_is_for(path: Path) -> None:
    assert ast.get_docstring(tree(path))


@each([path for path in PACKAGE_FILES if path.stem != "__main__"])
def test_everything_public_has_a_docstring(path: Path) -> None:
    """Its own, or that of what it overrides (a gRPC method is explained in the contract, from where the stubs have it)."""
    module = importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"))
    bare = []
    for key, value in public(vars(module)):
        if (inspect.isclass(value) or inspect.isfunction(value)) and value.__module__ == module.__name__:
            bare += [key] if not inspect.getdoc(value) else []
            if inspect.isclass(value):
                bare += [f"{key}.{inside}" for inside in undocumented(value)]
    assert bare == []


def public(names: object) -> list[tuple[str, object]]:
    return [(key, value) for key, value in dict(names).items() if not key.startswith("_")]  # type: ignore[call-overload]


def undocumented(cls: type) -> list[str]:
    return [
        key
        for key, value in public(vars(cls))
        if (inspect.isroutine(value) or isinstance(value, property | staticmethod | classmethod))
        and not inspect.getdoc(getattr(cls, key))
    ]


def test_the_public_face_is_what_it_says() -> None:
    assert sorted(ps_worker.__all__) == list(ps_worker.__all__)
    assert all(hasattr(ps_worker, key) for key in ps_worker.__all__)
    assert {"connect", "Session", "PSError"} <= set(ps_worker.__all__)


# -- the tests themselves --------------------------------------------------------------------------------------------


@each(sources("tests"))
def test_no_test_sleeps(path: Path) -> None:
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute | ast.Name):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id
            assert called != "sleep", f"line {node.lineno}: wait for an event, or inject the time"


@each([path for path in sources("tests") if path.name.startswith("test_")])
def test_test_names_are_claims_and_none_hides_another(path: Path) -> None:
    names = [node.name for node in tree(path).body if isinstance(node, ast.FunctionDef) and "test" in node.name]
    assert len(names) == len(set(names))


# -- what is said about the project ----------------------------------------------------------------------------------

DOCUMENTS = [path for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))) if path.exists()]


def anchors(document: Path) -> set[str]:
    """The anchors that a Markdown file's headings make."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"```.*?```", "", document.read_text(), flags=re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.skipif(not DOCUMENTS, reason="there are no documents here")
@each(DOCUMENTS)
def test_every_link_leads_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", path.read_text()):
        if re.match(r"[a-z]+:", target):
            continue
        file, _, anchor = target.partition("#")
        linked = (path.parent / file) if file else path
        assert linked.exists(), target
        assert not anchor or anchor in anchors(linked), target


@pytest.mark.skipif(not DOCUMENTS, reason="there are no documents here")
@each(DOCUMENTS)
def test_every_file_and_test_that_is_named_exists(path: Path) -> None:
    text = path.read_text()
    defined = {
        node.name
        for file in sources("tests")
        for node in ast.walk(tree(file))
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
    }
    for named in re.findall(r"`(test_\w+)`", text):
        assert named in defined or (ROOT / "tests" / f"{named}.py").exists(), named
    for named in re.findall(r"`((?:ps_protocol|ps_server|ps_worker|tests|bench|examples|proto|docs)/[\w./-]*)`", text):
        assert (ROOT / named).exists(), named


def test_the_first_screen_stays_one() -> None:
    readme = ROOT / "README.md"
    if not readme.exists():
        pytest.skip("there is no README.md here")
    assert len(readme.read_text().splitlines()) <= 200


def test_the_sources_are_where_this_test_looks_for_them() -> None:
    assert len(PACKAGE_FILES) > 20
    assert Path(str(sys.modules["ps_worker"].__file__)).parent == ROOT / "ps_worker"
