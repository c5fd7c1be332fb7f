"""`import ps_torch as ps`: the one name of a script has all that users import, and documents use no other."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys

import pytest

import ps_torch
import ps_worker
from tests.tools import launching
from tests.tools.imports import syntax
from tests.tools.launching import ROOT

FILES = {
    path.relative_to(ROOT / "ps_torch").with_suffix("").as_posix().replace("/", "."): path
    for path in (ROOT / "ps_torch").rglob("[!_]*.py")
}
MODULES = sorted(FILES)


def loaded_by(program: str) -> set[str]:
    """The modules that a program loads in a new process."""
    words = [sys.executable, "-c", f"{program}; import sys; print(*sys.modules)"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_every_public_name_is_the_same_object_under_both_names() -> None:
    assert ps_torch.__all__ == ps_worker.__all__
    assert all(getattr(ps_torch, name) is getattr(ps_worker, name) for name in ps_torch.__all__)
    assert ps_torch.__version__ == ps_worker.__version__
    assert set(ps_torch.__all__) <= set(dir(ps_torch)), "a shell completes them"
    with pytest.raises(AttributeError, match="module 'ps_torch' has no attribute 'conect'"):
        _ = ps_torch.conect


def test_the_import_loads_nothing_beside_what_it_names() -> None:
    loaded = loaded_by("import ps_torch")
    assert loaded - loaded_by("import ps_worker") == {"ps_torch"}
    assert "torch" not in loaded


def test_no_name_loads_torchs_compiler() -> None:
    """Its import takes as long as that of torch; a process that trains loads it with its first optimizer or table."""
    loaded = loaded_by("import ps_torch; [getattr(ps_torch, name) for name in ps_torch.__all__]")
    assert "torch" in loaded
    assert "torch._dynamo" not in loaded


def test_every_name_of_the_reference_that_needs_a_framework_is_there_too() -> None:
    frameworks = launching.load(ROOT / "docs" / "make_reference.py").FRAMEWORKS
    assert {*frameworks, "reports"} == set(MODULES)
    for module, names in frameworks.items():
        tree = syntax(FILES[module].read_text())
        [listed] = [node.value for node in tree.body if isinstance(node, ast.Assign)]
        assert set(names) <= set(ast.literal_eval(listed)), module


@pytest.mark.parametrize("module", MODULES)
def test_a_module_for_a_framework_has_what_it_lists(module: str) -> None:
    name = module.rpartition(".")[2]
    none = dict.fromkeys(("reports", "answers", "sglang"), "ps_worker")  # SGLang is called over HTTP
    framework = {"huggingface": "transformers", **none}.get(name, name)
    pytest.importorskip(framework)
    found = importlib.import_module(f"ps_torch.{module}")
    named = [getattr(found, name) for name in found.__all__]
    assert all(each.__module__.startswith("ps_worker.") for each in named if not isinstance(each, str))


def test_documents_and_examples_use_the_one_name() -> None:
    documents = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "examples").glob("*.py")]
    other = re.compile(r"^\s*(?:import|from) ps_worker\b.*|\bps_worker\.(?:connect|[A-Z])\w*", re.MULTILINE)
    found = {path.name: other.findall(path.read_text()) for path in documents}
    assert {name: uses for name, uses in found.items() if uses} == {}
