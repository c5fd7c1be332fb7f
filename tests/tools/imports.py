"""Reads which file of the packages imports which, and draws it: `python -m tests.tools.imports`.

A box is a file, or a room seen from its package; a floor is one more than the highest floor of what a box imports.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("ps_protocol", "ps_runtime", "ps_launch", "ps_server", "ps_worker")


@cache
def modules() -> dict[str, Path]:
    """The hand-written modules of the packages, by dotted name."""
    files = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py")) if "v1" not in path.parts]
    return {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in files}


def imports(path: Path) -> Iterator[str]:
    """Full names of what a file imports, wherever in it: `from a.b import c` is a.b.c."""
    package = path.relative_to(ROOT).with_suffix("").parts[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            yield from (".".join(filter(None, (base, node.module, alias.name))) for alias in node.names)


def module_of(imported: str) -> str | None:
    """The module of the packages that defines an imported name; None for everything else."""
    while imported and imported not in modules():
        imported = imported.rpartition(".")[0]
    return imported or None


@cache
def arrows() -> dict[str, set[str]]:
    """The modules that each module imports, TYPE_CHECKING included."""
    found = {name: {module_of(each) for each in imports(path)} - {None, name} for name, path in modules().items()}
    return {name: {each for each in targets if each is not None} for name, targets in found.items()}


def within(package: str, depth: int) -> dict[str, set[str]]:
    """The arrows inside a package, between its parts of that depth: 2 is rooms and files beside them."""
    graph: dict[str, set[str]] = {}
    for name, targets in arrows().items():
        if name.startswith(package + "."):
            box = ".".join(name.split(".")[:depth])
            inside = {".".join(each.split(".")[:depth]) for each in targets if each.startswith(package + ".")}
            graph.setdefault(box, set()).update(inside - {box})
    return graph


def floors(graph: dict[str, set[str]]) -> dict[str, int] | list[str]:
    """The floor of each box, or the boxes of a circle."""
    heights: dict[str, int] = {}
    while len(heights) < len(graph):
        ready = [box for box in graph if box not in heights and graph[box] <= heights.keys()]
        if not ready:
            return sorted(graph.keys() - heights.keys())
        heights.update({box: max((heights[each] + 1 for each in graph[box]), default=0) for box in ready})
    return heights


def describe(package: str, depth: int) -> str:
    """How many boxes, floors and arrows a package has."""
    graph = within(package, depth)
    heights = floors(graph)
    count = "a circle: " + ", ".join(heights) if isinstance(heights, list) else f"{max(heights.values()) + 1} floors"
    return f"{package}: {len(graph)} boxes, {sum(map(len, graph.values()))} arrows, {count}"


if __name__ == "__main__":
    for each in (*PACKAGES, *sorted({name.rpartition(".")[0] for name in modules() if name.count(".") == 2})):
        print(describe(each, each.count(".") + 2))
