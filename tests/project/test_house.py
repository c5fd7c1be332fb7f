"""The rules of the house, held by a walk over the sources."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest

import ps_worker
from tests.tools.imports import PACKAGES, imports, statements, syntax

ROOT = Path(__file__).parents[2]
GENERATED = ROOT / "ps_protocol" / "v1"

# Extras, each imported by its own files alone: by file, the package that it needs.
FRAMEWORKS = {
    "ps_worker/accelerate.py": "accelerate",
    "ps_torch/accelerate.py": "accelerate",
    "ps_worker/engines/huggingface.py": "transformers",
    "ps_torch/engines/huggingface.py": "transformers",
    "ps_worker/engines/vllm.py": "vllm",
    "ps_torch/engines/vllm.py": "vllm",
    "ps_worker/huggingface.py": "transformers",
    "ps_torch/huggingface.py": "transformers",
    "ps_worker/lightning.py": "lightning",
    "ps_torch/lightning.py": "lightning",
    **dict.fromkeys(
        (f"ps_worker/ray/{name}.py" for name in ("__init__", "actor_groups", "actors", "server_actors")), "ray"
    ),
    "ps_worker/ray/train.py": "ray",
    "ps_torch/ray.py": "ray",
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
    return syntax(path.read_text(), name(path))


def within(imported: str, modules: set[str]) -> bool:
    return any(imported == module or imported.startswith(module + ".") for module in modules)


def offenders(files: list[Path], find: Callable[[Path], Iterable[str]]) -> dict[str, list[str]]:
    """What a rule finds wrong, by file; nothing if it is kept."""
    found = {name(path): list(find(path)) for path in files}
    return {path: wrong for path, wrong in found.items() if wrong}


# -- what is imported (between rooms: test_layers) ---------------------------------------------------------------------


def test_no_file_of_a_package_imports_the_test_tools() -> None:
    tools = {"pytest", "hypothesis", "unittest"}
    assert offenders(PACKAGE_FILES, lambda path: [found for found in imports(path) if within(found, tools)]) == {}


def test_frameworks_are_imported_by_who_uses_them_alone() -> None:
    """And nothing imports those files but one another, so that nobody needs a framework who did not ask for it."""
    modules = {path.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for path in FRAMEWORKS}

    def foreign(path: Path) -> list[str]:
        return [found for found in imports(path) if within(found, {*FRAMEWORKS.values()} | modules)]

    assert set(offenders(PACKAGE_FILES, foreign)) == {*FRAMEWORKS}


# -- what is started: no Python that runs a module of the current folder (ps_runtime/own_program.py) ------------------

OWN_PROGRAM = "ps_runtime/own_program.py"
# Where another command of Python begins, and why it runs nothing of the current folder.
PYTHON = {
    "ps_launch/children.py": "a Program's arguments: those of own_program, or of a user's script",
    "ps_server/ops/glibc.py": "the arguments that this very process was started with",
}
USERS_MODULE = "ps_worker/cli.py"  # `ps-worker run -m MODULE`: the user's own, from the user's folder


def words(path: Path) -> Iterator[str]:
    """`-m` and `-c` in a list or tuple of words."""
    for node in ast.walk(tree(path)):
        for each in node.elts if isinstance(node, ast.List | ast.Tuple) else ():
            if isinstance(each, ast.Constant) and each.value in ("-m", "-c"):
                yield f"line {each.lineno}: {each.value}"


def pythons(path: Path) -> Iterator[str]:
    """Commands that begin with this Python, and go on with neither own_program nor -I, which leaves the folder out."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.List | ast.Tuple) and node.elts and ast.unparse(node.elts[0]) == "sys.executable":
            rest = ast.unparse(node.elts[1]) if len(node.elts) > 1 else ""
            if not rest.startswith("*own_program(") and rest != "'-I'":
                yield f"line {node.lineno}: {ast.unparse(node)}"


def shells(path: Path) -> Iterator[str]:
    """Commands that a shell looks up."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            if called in ("os.system", "os.popen") or any(each.arg == "shell" for each in node.keywords):
                yield f"line {node.lineno}: {called}"


def test_a_module_is_named_to_python_in_one_place() -> None:
    files = [path for path in PACKAGE_FILES if name(path) not in (OWN_PROGRAM, USERS_MODULE)]
    assert offenders(files, words) == {}
    assert all(list(words(path)) for path in PACKAGE_FILES if name(path) in (OWN_PROGRAM, USERS_MODULE))


def test_a_child_that_is_a_python_gets_its_program_from_there() -> None:
    found = offenders(PACKAGE_FILES, pythons)
    assert found.keys() == PYTHON.keys(), found


def test_no_command_goes_through_a_shell() -> None:
    assert offenders(PACKAGE_FILES, shells) == {}


# -- files that can be read ------------------------------------------------------------------------------------------


def test_no_file_is_named_after_nothing() -> None:
    vague = {"utils", "util", "common", "helpers", "helper", "misc", "manager", "handler", "processor"}
    assert [name(path) for path in PACKAGE_FILES if vague & {*re.split(r"[/_.]", name(path))}] == []


def test_every_file_says_what_it_is_for() -> None:
    bare = [path for path in ALL_FILES if not re.match(r'(#.*\n)*"""\w', path.read_text())]  # or so it seems
    assert [name(path) for path in bare if not ast.get_docstring(tree(path))] == []


def test_everything_public_has_a_docstring() -> None:
    """Its own, or that of what it overrides: the stubs of gRPC methods have theirs from the contract."""

    def bare(path: Path) -> Iterator[str]:
        module = importlib.import_module(
            ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        )
        for key, value in public(vars(module)):
            if (inspect.isclass(value) or inspect.isfunction(value)) and value.__module__ == module.__name__:
                if not inspect.getdoc(value):
                    yield key
                if inspect.isclass(value):
                    yield from (f"{key}.{inside}" for inside in undocumented(value))

    # With a package's __init__.py all of its files are missing.
    missing = tuple(
        path.removesuffix("__init__.py") for path, of in FRAMEWORKS.items() if importlib.util.find_spec(of) is None
    )
    there = [path for path in PACKAGE_FILES if path.stem != "__main__" and not name(path).startswith(missing)]
    assert offenders(there, bare) == {}


def public(names: Mapping[str, object]) -> list[tuple[str, object]]:
    return [(key, value) for key, value in names.items() if not key.startswith("_")]


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


def test_no_test_sleeps() -> None:
    """It waits for an event, or the time is injected."""

    def sleeps(path: Path) -> Iterator[str]:
        for node in ast.walk(tree(path)) if "sleep" in path.read_text() else ():
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute | ast.Name):
                called = node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id
                if called == "sleep":
                    yield f"line {node.lineno}"

    tests = [path for path in sources("tests") if "chaos" not in path.parts]  # faults at random, for minutes
    assert offenders(tests, sleeps) == {}


def test_long_tests_are_found_by_the_text_of_their_files() -> None:
    """`make test-long` collects those that have the text: a mark that came from elsewhere would leave its test out."""
    [text] = re.findall(r"^LONG_MARK := (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    files = [path for path in sources("tests") if re.search(r"\bmark\.long\b", path.read_text())]
    assert len(files) > 50
    assert [name(path) for path in files if text not in path.read_text() or not path.name.startswith("test_")] == []


def test_no_test_hides_another_of_the_same_name() -> None:
    def twice(names: list[str]) -> list[str]:
        return sorted({name for name in names if names.count(name) > 1})

    def hidden(path: Path) -> list[str]:
        seem = twice(re.findall(r"^def (\w+)", path.read_text(), re.MULTILINE))  # one may be in a script's text
        return seem and twice([node.name for node in tree(path).body if isinstance(node, ast.FunctionDef)])

    assert offenders(sources("tests"), hidden) == {}


# -- what is said about the project ----------------------------------------------------------------------------------

DOCUMENTS = [path for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))) if path.exists()]


def anchors(document: Path) -> set[str]:
    """The anchors that a Markdown file's headings make."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"```.*?```", "", document.read_text(), flags=re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(path: Path) -> Iterator[str]:
    for target in re.findall(r"\]\(([^)\s]+)\)", path.read_text()):
        if not re.match(r"[a-z]+:", target):
            file, _, anchor = target.partition("#")
            linked = (path.parent / file) if file else path
            if not linked.exists() or (anchor and anchor not in anchors(linked)):
                yield target


@cache
def defined_in_tests() -> frozenset[str]:
    nodes = (node for file in sources("tests") for node in statements(tree(file)))
    return frozenset(node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef))


def wrong_names(path: Path) -> Iterator[str]:
    """Tests and files that a document names in backticks and that are not there."""
    text = path.read_text()
    for named in re.findall(r"`(test_\w+)`", text):
        if named not in defined_in_tests() and not list((ROOT / "tests").rglob(f"{named}.py")):
            yield named
    folders = "|".join((*PACKAGES, "tests", "bench", "examples", "proto", "docs"))
    for named in re.findall(rf"`((?:{folders})/[\w./-]*)`", text):
        if not (ROOT / named).exists():
            yield named


@pytest.mark.skipif(not DOCUMENTS, reason="there are no documents here")
@pytest.mark.parametrize("rule", [broken_links, wrong_names])
def test_what_the_documents_refer_to_exists(rule: Callable[[Path], Iterator[str]]) -> None:
    assert offenders(DOCUMENTS, rule) == {}


def test_the_first_screen_stays_one() -> None:
    readme = ROOT / "README.md"
    if not readme.exists():
        pytest.skip("there is no README.md here")
    assert len(readme.read_text().splitlines()) <= 200


def test_the_sources_are_where_this_test_looks_for_them() -> None:
    assert len(PACKAGE_FILES) > 20
    assert Path(str(sys.modules["ps_worker"].__file__)).parent == ROOT / "ps_worker"
