"""Draws what imports what in the packages, as boxes on floors: `python -m tests.tools.imports`.

A box is a file, or a room seen from its package; its floor is one above the highest that it imports.
"""

from __future__ import annotations

import ast
import gc
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = (
    *("ps_protocol", "ps_runtime", "ps_launch", "ps_frames", "ps_tables", "ps_feed"),
    *("ps_server", "ps_worker", "ps_torch"),
)


@cache
def modules() -> dict[str, Path]:
    """The hand-written modules of the packages, by dotted name."""
    paths = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py")) if "v1" not in path.parts]
    return {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in paths}


def syntax(text: str, name: str = "<unknown>") -> ast.Module:
    """The syntax tree of a text. There is no garbage collection meanwhile: where one has a callback that is deep,
    CPython 3.11 raises SystemError ("recursion depth mismatch") from `ast.parse`."""
    gc.disable()
    try:
        return ast.parse(text, name)
    finally:
        gc.enable()


def statements(tree: ast.AST) -> Iterator[ast.AST]:
    """All statements of a syntax tree, wherever in it. A walk through its expressions too takes five times as long."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.stmt | ast.excepthandler | ast.match_case):
            yield node
            yield from statements(node)


@cache
def imports(path: Path) -> tuple[str, ...]:
    """Full names of what a file imports, wherever in it: `from a.b import c` is a.b.c."""
    found: list[str] = []
    for node in statements(syntax(path.read_text())):
        if isinstance(node, ast.Import):
            found += (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            found += (f"{'.' * node.level}{node.module}.{alias.name}" for alias in node.names)
    return tuple(found)


@cache
def arrows() -> dict[str, set[str]]:
    """The modules that each module imports, TYPE_CHECKING included."""

    def module(imported: str) -> str:
        return max((name for name in modules() if f"{imported}.".startswith(f"{name}.")), key=len, default="")

    return {name: {module(each) for each in imports(path)} - {"", name} for name, path in modules().items()}


def within(package: str, depth: int) -> dict[str, set[str]]:
    """The arrows inside a package, between its parts of that depth: 2 is rooms and files beside them."""

    def box(name: str) -> str:
        return ".".join(name.split(".")[:depth]) if name.startswith(f"{package}.") else ""

    graph: dict[str, set[str]] = {}
    for name, targets in arrows().items():
        graph.setdefault(box(name), set()).update({box(each) for each in targets} - {"", box(name)})
    graph.pop("", None)
    return graph


def floors(graph: dict[str, set[str]]) -> dict[str, int]:
    """The floor of each box; none for the boxes of a circle, and for those above it."""
    heights: dict[str, int] = {}
    while ready := [box for box in graph if box not in heights and graph[box] <= heights.keys()]:
        heights |= {box: max((heights[each] + 1 for each in graph[box]), default=0) for box in ready}
    return heights


if __name__ == "__main__":
    for place in (*PACKAGES, *sorted({name.rpartition(".")[0] for name in modules() if name.count(".") == 2})):
        graph = within(place, place.count(".") + 2)
        heights = floors(graph)
        count = max(heights.values()) + 1
        print(f"{place}: {len(graph)} boxes, {count} floors, {sum(map(len, graph.values()))} arrows")
        for floor in reversed(range(count)):
            print(f"  {floor}:", *sorted(box.rpartition(".")[2] for box in heights if heights[box] == floor))
        print(*(f"  in a circle, or above one: {box}\n" for box in graph.keys() - heights.keys()), sep="", end="")
