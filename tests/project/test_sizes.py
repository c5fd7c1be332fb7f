"""Nothing grows until only its author can read it: how large a function, a class and a file of the packages may be."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from tests.tools.imports import ROOT, modules

MOST_FUNCTION_LINES = 50  # without the docstring
MOST_FILE_LINES = 600


def lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """The lines of a function without those of its docstring."""
    first = function.body[0]
    docstring = (first.end_lineno or 0) - first.lineno + 1 if ast.get_docstring(function) is not None else 0
    return (function.end_lineno or 0) - function.lineno + 1 - docstring


def too_large(place: str, text: str) -> Iterator[tuple[str, str]]:
    """What of a file is too large, and what to do about it."""
    height = text.count("\n")
    if height > MOST_FILE_LINES:
        yield place, f"has {height} lines of {MOST_FILE_LINES}: give each of its ideas a file"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and lines(node) > MOST_FUNCTION_LINES:
            counts = f"{lines(node)} lines of {MOST_FUNCTION_LINES}"
            yield f"{place}: def {node.name}", f"has {counts} without its docstring: give each of its steps a name"


def test_no_function_or_file_is_too_large() -> None:
    files = {path.relative_to(ROOT).as_posix(): path.read_text() for path in modules().values()}
    found = dict(pair for place, text in files.items() for pair in too_large(place, text))
    assert found == {}


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("def f():\n    'a\\\n b'\n" + "    pass\n" * 50, ["x.py: def f"]),
        ("def f():\n    'a\\\n b'\n" + "    pass\n" * 49, []),
        ("\n" * 601, ["x.py"]),
    ],
    ids=["function", "no function", "file"],
)
def test_what_is_too_large_is_found(text: str, what: list[str]) -> None:
    assert [place for place, _ in too_large("x.py", text)] == what


# -- classes -----------------------------------------------------------------------------------------------------------

MOST_PUBLIC_METHODS = 12  # without properties

# Classes that may have more, with their number and the reason. A class that shrinks takes its line with it.
LARGER_CLASSES = {
    "CheckpointStore": (20, "the one door to a checkpoint directory: write, list, read, delete"),
    "Connection": (24, "all calls of a worker to the shards of its job"),
    "CoordinatedJob": (16, "the coordinator's face of one job"),
    "Coordinator": (20, "a method for each call of ClusterService and WorkerService"),
    "ConnectionCall": (16, "has the methods of gRPC's ServicerContext"),
    "Disk": (17, "implements Files for a file system"),
    "Entries": (17, "the arrays of a table's rows, which only it may index"),
    "Files": (16, "the interface of a storage backend: one method for each operation on files"),
    "FlatModel": (21, "the model's buffers in both directions, with wire formats and residuals"),
    "HostedJob": (16, "a shard's face of one job"),
    "JobCheckpoints": (16, "the life of a job's checkpoints: due, begun, complete, failed, restored"),
    "JobMembers": (30, "joins, leaves, leases and removals share one roster"),
    "JobTraining": (14, "the three strategies on servers share it"),
    "Membership": (18, "the pure rules of joins, leaves and leases"),
    "Objects": (19, "implements Files for an object store"),
    "QuorumRule": (15, "implements UpdateRule for a quorum"),
    "ServerTables": (15, "implements Rows on servers, for all tables of a model"),
    "Session": (13, "the public API"),
    "Shard": (22, "a method for each call of DataService and ShardService"),
    "UpdateRule": (24, "the one statement of sync, ssp and async"),
    "WorkerCheckpoint": (25, "a worker's own part of a checkpoint, from capture to restore"),
    "WorkerMetrics": (16, "a method for each event that a metric counts"),
    "Assignments": (13, "values that a script has set, of every kind"),
}

# Names that a class of workers and one of servers share. No name may be added: a traceback, a log or a search cannot
# distinguish two classes of one name.
SHARED_NAMES = {
    *("Answers", "Assignment", "Call", "Changes", "Continued", "CoordinatorClient", "DataConnection", "Draft"),
    *("FeedPart", "JoinResult", "Kind", "Membership", "ParameterServer", "PulledBucket", "Registration"),
    *("Room", "RoundBegin", "Rounds", "RowFeed", "RowsPush", "Stage", "Terms", "Watch", "WorkerProcess"),
}


def classes(tree: ast.Module) -> Iterator[ast.ClassDef]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef))


def public_methods(cls: ast.ClassDef) -> int:
    """How many methods of a class are public; properties are not counted."""
    methods = [node for node in cls.body if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")]
    decorators = [{ast.unparse(each).rpartition(".")[2] for each in method.decorator_list} for method in methods]
    return sum(not names & {"property", "setter"} for names in decorators)


def test_no_class_has_too_many_public_methods() -> None:
    found = {}
    for path in modules().values():
        for cls in classes(ast.parse(path.read_text())):
            most, _ = LARGER_CLASSES.get(cls.name, (MOST_PUBLIC_METHODS, ""))
            if (count := public_methods(cls)) > most:
                found[f"{path.relative_to(ROOT)}: {cls.name}"] = f"{count} of {most}: give a part of it a class"
    assert found == {}


def test_no_two_classes_have_one_name() -> None:
    files: dict[str, list[str]] = {}
    for path in modules().values():
        for cls in classes(ast.parse(path.read_text())):
            files.setdefault(cls.name, []).append(path.relative_to(ROOT).as_posix())
    twice = {name: where for name, where in files.items() if len(where) > 1 and name not in SHARED_NAMES}
    assert twice == {}, "name each for what it is"


@pytest.mark.parametrize(
    ("body", "count"),
    [("def a(self): ...", 1), ("def _a(self): ...", 0), ("@property\n    def a(self): ...", 0)],
    ids=["public", "private", "property"],
)
def test_public_methods_are_counted(body: str, count: int) -> None:
    [cls] = classes(ast.parse(f"class C:\n    {body}\n"))
    assert public_methods(cls) == count
