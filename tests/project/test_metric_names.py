"""The metrics that docs/metrics.md explains are those that the processes serve, each of them and no other."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from tests.tools.documented_metrics import documented
from tests.tools.imports import PACKAGES, syntax

ROOT = Path(__file__).parents[2]
NAMED = re.compile(r"ps_[a-z]+(?:_[a-z]+)*")


def served() -> set[str]:
    """The names that the code gives to metrics: all texts of that form that are no package's or logger's name."""
    files = [path.read_text() for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    texts = {
        node.value
        for text in files
        if re.search("[\"']ps_", text)
        for node in ast.walk(syntax(text))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    names = {text for text in texts if NAMED.fullmatch(text)} - {*PACKAGES}
    return names - {name + part for name in names for part in ("_count", "_sum")}  # of a histogram that a page reads


def test_every_metric_is_explained_and_what_is_explained_is_served() -> None:
    explained = {metric.name for metric in documented()}
    assert len(explained) > 40
    assert explained == served()
