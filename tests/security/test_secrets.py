"""No secret is in the repr of what holds it: a log line, a traceback with variables or a debugger would show it."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

from tests.tools.imports import PACKAGES, statements, syntax

ROOT = Path(__file__).parents[2]
# What is a secret by its name, and by its type no mere place or count of one.
SECRET = re.compile(r"(^|_)(key|token|secret|password|ticket|nonce|digest|roles|metadata|auth_context)s?$")
HOLDS = re.compile(r"\b(bytes|str|Any|\w*Key|Callable)\b")
# Fields that are named so and hold none: names of rows, of parameters, of metrics.
HARMLESS: frozenset[str] = frozenset()


def fields_with_secrets() -> Iterator[tuple[str, str]]:
    """Yields where a class holds a secret, and how the field is declared: of every dataclass and NamedTuple."""
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            for kind in statements(syntax(path.read_text())):
                if isinstance(kind, ast.ClassDef) and _has_fields(kind):
                    for field in kind.body:
                        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                            name, holds = field.target.id, ast.unparse(field.annotation)
                            if SECRET.search(name) and HOLDS.search(holds):
                                where = f"{path.relative_to(ROOT)}: {kind.name}.{name}"
                                yield where, "" if field.value is None else ast.unparse(field.value)


def _has_fields(kind: ast.ClassDef) -> bool:
    marks = [ast.unparse(mark) for mark in (*kind.decorator_list, *kind.bases)]
    return any(mark.startswith("dataclass") or mark == "NamedTuple" for mark in marks)


def test_no_field_that_holds_a_secret_is_in_its_class_repr() -> None:
    found = dict(fields_with_secrets())
    assert len(found) > 13, "the walk finds what there is"
    shown = [where for where, declared in found.items() if "repr=False" not in declared and where not in HARMLESS]
    assert not shown, "declare them as field(repr=False)"


def test_what_ray_carries_between_nodes_shows_neither_key_nor_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """By its file: the package around it needs Ray."""
    described = spec_from_file_location("values_of_ray", ROOT / "ps_worker" / "ray" / "deployment.py")
    assert described is not None
    assert described.loader is not None
    values = module_from_spec(described)
    monkeypatch.setitem(sys.modules, described.name, values)
    described.loader.exec_module(values)
    held = values.Certificates(ca=b"authority", cert=b"certificate", key=b"hidden-key", roles=b"admin hidden-token")
    assert "certificate" in repr(held)
    assert "hidden" not in repr(held)
