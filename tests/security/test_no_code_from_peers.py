"""What the packages never do, held by a walk over their syntax trees: nothing that a peer sends is ever run."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# Whatever is installed, as pyproject.toml says it: a package that is added is walked too.
_INCLUDED = re.findall(r"^include = \[(.*)\]", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
PACKAGES = sorted(
    path for pattern in re.findall(r'"([^"]+)"', ",".join(_INCLUDED)) for path in ROOT.glob(pattern) if path.is_dir()
)
FILES = sorted(path for package in PACKAGES for path in package.rglob("*.py"))
# Modules that can run what they read, and calls that can.
MODULES = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib", "code", "imp", "runpy"}
CALLS = {"eval", "exec", "compile", "__import__", "breakpoint"}
ATTRIBUTES = {
    ("torch", "load"),
    ("torch", "save"),
    ("torch", "hub"),
    ("torch", "jit"),
    ("torch", "serialization"),
    ("serialization", "load"),
    ("numpy", "load"),
    ("np", "load"),
    ("yaml", "load"),
    ("os", "system"),
    ("os", "popen"),
    ("importlib", "import_module"),
    ("pickle", "loads"),
}


def forbidden(tree: ast.AST) -> Iterator[str]:
    """What a syntax tree holds of these, with its line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names]
            if isinstance(node, ast.ImportFrom):
                for module_name, name in ATTRIBUTES & {((node.module or "").split(".")[0], name) for name in names}:
                    yield f"line {node.lineno} imports {name} from {module_name}"
            module = [node.module or ""] if isinstance(node, ast.ImportFrom) else names
            for name in {name.split(".")[0] for name in module} & MODULES:
                yield f"line {node.lineno} imports {name}"
            if "importlib" in module:
                yield f"line {node.lineno} imports by name"
        elif isinstance(node, ast.Call):
            if isinstance(node.func, ast.Name) and node.func.id in CALLS:
                yield f"line {node.lineno} calls {node.func.id}"
            for keyword in node.keywords:
                true = isinstance(keyword.value, ast.Constant) and keyword.value.value is True
                if keyword.arg == "shell" and true:
                    yield f"line {node.lineno} runs a shell"
                if keyword.arg == "allow_pickle" and true:
                    yield f"line {node.lineno} allows pickle"
        elif isinstance(node, ast.Attribute) and (getattr(node.value, "id", ""), node.attr) in ATTRIBUTES:
            yield f"line {node.lineno} uses {ast.unparse(node)}"


def test_everything_that_is_installed_is_walked() -> None:
    ours = {"ps_protocol", "ps_runtime", "ps_launch", "ps_server", "ps_worker"}
    assert {package.name for package in PACKAGES} >= ours
    walked = {path.relative_to(ROOT).as_posix() for path in FILES}
    assert {
        "ps_server/storage/checkpoints.py",
        "ps_server/coordinator/state_file.py",
        "ps_server/core/snapshot.py",
    } <= walked
    imported = {path.parent.name for path in ROOT.glob("*/__init__.py")} - {"tests", "bench", "examples"}
    assert imported <= {package.name for package in PACKAGES}, "a package that nobody installs"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_that_a_peer_sends_is_run(path: Path) -> None:
    assert list(forbidden(ast.parse(path.read_text()))) == []


@pytest.mark.parametrize(
    "code",
    [
        "import pickle",
        "from torch import load",
        "from os import system",
        "torch.serialization.load(x)",
        "numpy.lib.format.read_array(x, allow_pickle=True)",
        "from pickle import loads",
        "eval(x)",
        "exec(x)",
        "__import__(x)",
        "import importlib",
        "importlib.import_module(x)",
        "torch.load(x)",
        "numpy.load(x, allow_pickle=True)",
        "subprocess.run(x, shell=True)",
        "os.system(x)",
    ],
)
def test_the_walk_finds_what_it_is_for(code: str) -> None:
    assert list(forbidden(ast.parse(code)))


def test_attributes_are_never_looked_up_by_a_name_that_came_over_the_wire() -> None:
    """getattr with a computed name is found in a few places, each of which takes it from a table or a field of ours."""
    known = {
        "ps_runtime/channel.py",  # a kind of call, written out in that file
        "ps_protocol/convert.py",  # a oneof's field, as protobuf names it
        "ps_protocol/tensors.py",  # torch's dtypes by the table of data types
        "ps_server/rpc/interceptor.py",  # two attributes of handlers
        "ps_worker/__init__.py",  # the public names, imported when they are first used
        "ps_worker/data/loaders.py",  # attributes of the user's own loader
        "ps_worker/data/leased.py",  # the same
    }
    found = set()
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            looks_up = isinstance(node, ast.Call) and getattr(node.func, "id", "") == "getattr"
            if looks_up and not isinstance(node.args[1], ast.Constant):  # type: ignore[attr-defined]
                found.add(str(path.relative_to(ROOT)))
    assert found <= known
