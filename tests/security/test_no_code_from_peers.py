"""What the code never does, held by a walk over its syntax trees: nothing that a peer or a file says is ever run."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest

from tests.tools.imports import PACKAGES, ROOT, syntax

FILES = sorted(path for folder in (*PACKAGES, "bench", "examples") for path in (ROOT / folder).rglob("*.py"))
# Modules that can run what they read, functions that can, and arguments that let others do so.
MODULES = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib", "code", "imp", "runpy"}
BUILTINS = {"eval", "exec", "compile", "__import__", "breakpoint"}
FUNCTIONS = {
    *("torch.load", "torch.save", "torch.hub", "torch.jit", "torch.serialization"),
    *("numpy.load", "numpy.save", "np.load", "np.save", "yaml.load"),
    *("os.system", "os.popen", "importlib.import_module", "importlib.util"),
}
LAST_NAMES = {function.rpartition(".")[2] for function in FUNCTIONS}  # to turn few nodes into texts
ARGUMENTS = {"shell", "allow_pickle"}
BY_NAME = {
    ("bench/__main__.py", "importlib.import_module"),  # benchmarks, whose names stand in that file
    ("ps_server/storage/table_files.py", "np.save"),  # arrays of numbers, which are written and never read
    ("ps_worker/tables/given_rows.py", "np.load"),  # arrays of numbers of the script's own, without pickle
}


def dangers(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, name) of each of these in a syntax tree."""
    for node in ast.walk(tree):
        match node:
            case ast.Import() | ast.ImportFrom():
                module = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
                names = [module + alias.name for alias in node.names]
                found = [name for name in names if name.split(".")[0] in MODULES or is_function(name)]
            case ast.Attribute(attr=attr):  # of a.b.c there is a node for a.b, too
                found = [name] if attr in LAST_NAMES and is_function(name := ast.unparse(node)) else []
            case ast.Call(func=ast.Name(id=name)):
                found = [name] if name in BUILTINS else []
            case ast.keyword(arg=name, value=ast.Constant(value=True)):
                found = [f"{name}=True"] if name in ARGUMENTS else []
            case _:
                found = []
        yield from ((node.lineno, name) for name in found)  # type: ignore[attr-defined]


def is_function(name: str) -> bool:
    return any(name == function or name.startswith(function + ".") for function in FUNCTIONS)


def test_everything_that_is_installed_is_walked() -> None:
    included = re.search(r"^include = \[(.*)\]", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert included is not None
    assert sorted(re.findall(r'"([^"*]+)\*"', included[1])) == sorted(PACKAGES)
    imported = {path.parent.name for path in ROOT.glob("*/__init__.py")} - {"tests", "bench", "examples"}
    assert imported <= {*PACKAGES}, "a package that is not installed"


def test_nothing_that_a_peer_or_a_file_says_is_run() -> None:
    found = {
        (path.relative_to(ROOT).as_posix(), line, name)
        for path in FILES
        for line, name in dangers(syntax(path.read_text()))
    }
    assert {each for each in found if (each[0], each[2]) not in BY_NAME} == set()


@pytest.mark.parametrize(
    "code",
    [
        "import pickle",
        "from pickle import loads",
        "from torch import load",
        "from os import system",
        "from importlib import import_module",
        "torch.serialization.load(x)",
        "numpy.lib.format.read_array(x, allow_pickle=True)",
        "eval(x)",
        "__import__(x)",
        "importlib.import_module(x)",
        "torch.load(x)",
        "subprocess.run(x, shell=True)",
        "os.system(x)",
    ],
)
def test_the_walk_finds_what_it_is_for(code: str) -> None:
    assert list(dangers(syntax(code)))


def test_attributes_are_never_looked_up_by_a_name_that_came_over_the_wire() -> None:
    """getattr with a computed name is found in a few places, each of which takes it from a table or a field of ours."""
    known = {
        "ps_runtime/channel.py",  # a kind of call, written out in that file
        "ps_protocol/convert.py",  # a oneof's field, as protobuf names it
        "ps_protocol/tensors.py",  # torch's dtypes by the table of data types
        "ps_server/rpc/plain.py",  # a message's fields, as its descriptor names them
        "ps_server/rpc/shard_messages.py",  # a message's durations, by the phases that a step has
        "ps_server/rpc/interceptor.py",  # two attributes of handlers
        "ps_server/rpc/shard_service.py",  # the service's own methods, as its descriptor names them
        "ps_server/cli.py",  # a flag's value, by the names of two flags
        "ps_torch/__init__.py",  # the public names, of ps_worker
        "ps_worker/__init__.py",  # the public names, imported when they are first used
        "ps_worker/data/loaders.py",  # attributes of the user's own loader
        "ps_worker/data/leased.py",  # the same
        "ps_worker/model/elements.py",  # the inner tensors of the script's own model, as their class names them
    }
    found = set()
    for path in FILES:
        text = path.read_text()
        for node in ast.walk(syntax(text)) if "getattr" in text else ():
            looks_up = isinstance(node, ast.Call) and getattr(node.func, "id", "") == "getattr"
            if looks_up and not isinstance(node.args[1], ast.Constant):  # type: ignore[attr-defined]
                found.add(path.relative_to(ROOT).as_posix())
    assert {place for place in found if place.startswith("ps_")} <= known
