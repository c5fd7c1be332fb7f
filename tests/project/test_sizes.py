"""Nothing grows until only its author can read it: how large a function and a file of the packages may be."""

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
