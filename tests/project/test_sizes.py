"""Nothing grows until only its author can read it: how large a function, a class and a file of the packages may be."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache

import pytest

from tests.tools.imports import ROOT, modules, statements, syntax

MOST_FUNCTION_LINES = 50  # without the docstring
MOST_FILE_LINES = 600
MOST_ENGINE_LINES = 150  # of a file that connects an inference engine: who connects another one reads all of it


def lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """The lines of a function without those of its docstring."""
    first = function.body[0]
    docstring = (first.end_lineno or 0) - first.lineno + 1 if ast.get_docstring(function) is not None else 0
    return (function.end_lineno or 0) - function.lineno + 1 - docstring


def too_large(place: str, text: str, tree: ast.Module) -> Iterator[tuple[str, str]]:
    """What of a file is too large, and what to do about it."""
    height = text.count("\n")
    if height > MOST_FILE_LINES:
        yield place, f"has {height} lines of {MOST_FILE_LINES}: give each of its ideas a file"
    for node in statements(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and lines(node) > MOST_FUNCTION_LINES:
            counts = f"{lines(node)} lines of {MOST_FUNCTION_LINES}"
            yield f"{place}: def {node.name}", f"has {counts} without its docstring: give each of its steps a name"


@cache
def looked_at() -> tuple[dict[str, str], list[tuple[str, str, int]]]:
    """What of the packages' files is too large; and each class's name, its file, and how many public methods it has."""
    large: dict[str, str] = {}
    found: list[tuple[str, str, int]] = []
    for path in modules().values():
        place, text = path.relative_to(ROOT).as_posix(), path.read_text()
        tree = syntax(text)
        large |= too_large(place, text, tree)
        found += ((cls.name, place, public_methods(cls)) for cls in classes(tree))
    return large, found


def test_no_function_or_file_is_too_large() -> None:
    assert looked_at()[0] == {}


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
    assert [place for place, _ in too_large("x.py", text, syntax(text))] == what


ENGINES = {
    "vLLM": ("vllm", "answers", "loaded_versions"),
    "SGLang": ("sglang", "folders"),
    "`transformers`": ("huggingface",),
}


@pytest.mark.parametrize("engine", ENGINES)
def test_an_engine_of_another_project_takes_as_few_lines_as_the_docs_say(engine: str) -> None:
    [told] = re.findall(rf"^\| {engine}.* \| (\d.*) \|$", (ROOT / "docs" / "feed.md").read_text(), re.MULTILINE)
    most = [int(number) for number in re.findall(r"\d+", told)]
    heights = [(ROOT / f"ps_worker/engines/{name}.py").read_text().count("\n") for name in ENGINES[engine]]
    assert most[0] == MOST_ENGINE_LINES
    assert [height for height, limit in zip(heights, most, strict=True) if height > limit] == []


# -- classes -----------------------------------------------------------------------------------------------------------

MOST_PUBLIC_METHODS = 12  # without properties

# Classes that may have more, with the reason. A class that shrinks takes its line with it.
LARGER_CLASSES = {
    "Assignments": "values that a script has set, of every kind",
    "CheckpointStore": "the one door to a checkpoint directory: write, list, read, delete",
    "Connection": "all calls of a worker to the shards of its job",
    "CoordinatedJob": "the coordinator's face of one job",
    "Coordinator": "a method for each call of ClusterService and WorkerService",
    "Disk": "implements Files for a file system",
    "Entries": "the arrays of a table's rows, which only it may index",
    "Files": "the interface of a storage backend: one method for each operation on files",
    "FlatModel": "the model's buffers in both directions, with wire formats and residuals",
    "GradientSteps": "implements StepKind for steps of gradients",
    "HostedJob": "a shard's face of one job",
    "JobCheckpoints": "the life of a job's checkpoints: due, begun, complete, failed, restored",
    "JobWorkers": "joins, leaves, leases and removals share one roster",
    "JobTraining": "the step loop of all modes on servers",
    "LocalRound": "the buffers of a round of local steps: begun, pushed, pulled and mixed in",
    "LocalRounds": "implements StepKind for rounds of local steps",
    "Loops": "a method for each loop of the library",
    "Membership": "the pure rules of joins, leaves and leases",
    "Objects": "implements Files for an object store",
    "ParameterServerGroupStrategy": "implements Lightning's Strategy: it has no method that is not Lightning's",
    "QuorumRule": "implements UpdateRule for a quorum",
    "ServerTables": "implements Rows on servers, for all tables of a model",
    "Shard": "a method for each call of DataService and ShardService",
    "StepKind": "the interface between the step loop and what a step is",
    "UpdateRule": "the one statement of sync, ssp and async",
    "WorkerCheckpoint": "a worker's own part of a checkpoint, from capture to restore",
    "WorkerMetrics": "a method for each event that a metric counts",
}


def classes(tree: ast.Module) -> Iterator[ast.ClassDef]:
    return (node for node in statements(tree) if isinstance(node, ast.ClassDef))


def public_methods(cls: ast.ClassDef) -> int:
    """How many methods of a class are public; properties are not counted."""
    methods = [node for node in cls.body if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")]
    decorators = [{ast.unparse(each).rpartition(".")[2] for each in method.decorator_list} for method in methods]
    return sum(not names & {"property", "setter"} for names in decorators)


def test_no_class_has_too_many_public_methods() -> None:
    found = {}
    for name, file, count in looked_at()[1]:
        if count > MOST_PUBLIC_METHODS:
            found[name] = f"{file}: {count}, give a part of it a class"
    assert {name: text for name, text in found.items() if name not in LARGER_CLASSES} == {}
    assert LARGER_CLASSES.keys() - found.keys() == set(), "these are no larger than others"


def test_no_two_classes_have_one_name() -> None:
    files: dict[str, list[str]] = {}
    for name, file, _ in looked_at()[1]:
        files.setdefault(name, []).append(file)
    twice = {name: where for name, where in files.items() if len(where) > 1}
    assert twice == {}, "name each for what it is"


@pytest.mark.parametrize(
    ("body", "count"),
    [("def a(self): ...", 1), ("def _a(self): ...", 0), ("@property\n    def a(self): ...", 0)],
    ids=["public", "private", "property"],
)
def test_public_methods_are_counted(body: str, count: int) -> None:
    [cls] = classes(syntax(f"class C:\n    {body}\n"))
    assert public_methods(cls) == count


# -- files -------------------------------------------------------------------------------------------------------------

# File names that two packages share, because the files do the same for each. ps_torch is left out: it only gives the
# names of other packages' files.
SHARED_FILE_NAMES = {
    "__init__",
    "__main__",
    "cli",
    "config",
    "metrics",
    "server",  # a process, and its end of a data connection
    "editions",  # on a shard, and their messages
    "huggingface",  # the Trainer, and the server that generates
}


def test_no_two_files_have_one_name() -> None:
    names = Counter(path.stem for path in modules().values() if "ps_torch" not in path.parts)
    assert {name for name, count in names.items() if count > 1} == SHARED_FILE_NAMES
