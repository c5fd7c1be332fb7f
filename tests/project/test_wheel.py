"""The wheel holds all that its users need: code, types, and the contract for clients in other languages."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from ps_tables.native.libraries import LEVELS, file_name
from tests.tools.imports import PACKAGES

ROOT = Path(__file__).parents[2]
CONTRACT = ROOT / "proto" / "ps_protocol" / "v1"
PAGE = "ps_server/page/"
BUILD = "import setuptools.build_meta as backend; print(backend.build_wheel('.'))"


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of this project, so that nothing of an earlier build gets into a wheel."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    for name in (*PACKAGES, "proto"):
        shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    return folder


def built(tree: Path, **variables: str) -> tuple[Path, str]:
    """Builds a wheel; returns it, and what was said."""
    environment = {**os.environ, **variables}
    both = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    done = subprocess.run(
        [sys.executable, "-c", BUILD], cwd=tree, env=environment, check=True, text=True, timeout=120, **both
    )
    return tree / done.stdout.splitlines()[-1], done.stdout


@pytest.fixture(scope="module")
def wheel(tree: Path) -> zipfile.Path:
    """A wheel of this project, as a machine without a compiler builds it."""
    path, said = built(tree, PS_NATIVE="off")
    assert path.name.endswith("-py3-none-any.whl")
    assert said.count("ps-torch: without the library for tables, numpy does its work: PS_NATIVE is off") == 1
    return zipfile.Path(path)


def test_the_contract_is_in_the_wheel_as_it_is_here(wheel: zipfile.Path) -> None:
    inside = wheel / "ps_protocol" / "proto" / "ps_protocol" / "v1"
    files = {path.name: path.read_text() for path in inside.iterdir()}
    assert files == {path.name: path.read_text() for path in CONTRACT.glob("*.proto")}
    assert files, "nothing was compared"


def test_the_code_and_its_types_are_in_the_wheel_and_nothing_else(wheel: zipfile.Path) -> None:
    names = {name for name in wheel.root.namelist() if ".dist-info/" not in name and not name.endswith("/")}
    kinds = (".py", ".pyi", "py.typed", ".c", ".h")
    here = {
        path.relative_to(ROOT).as_posix()
        for package in PACKAGES
        for path in (ROOT / package).rglob("*")
        if path.name.endswith(kinds)
    }
    assert {name for name in names if not name.endswith(".proto") and not name.startswith(PAGE)} == here


def test_the_page_is_in_the_wheel_as_it_is_here(wheel: zipfile.Path) -> None:
    inside = {path.name: path.read_bytes() for path in (wheel / "ps_server" / "page").iterdir()}
    assert inside == {path.name: path.read_bytes() for path in (ROOT / PAGE).iterdir()}
    assert b"MIT License" in inside["uPlot.LICENSE.txt"]


def files(path: str | Path | None) -> set[str]:
    """The files of a wheel. What opens it as a path counts its folders, too."""
    assert path is not None
    with zipfile.ZipFile(path) as packed:
        return {each.filename for each in packed.infolist() if not each.is_dir()}


@pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() not in LEVELS or not any(map(shutil.which, ("cc", "gcc", "clang"))),
    reason="needs a C compiler, and a machine that has a library",
)
def test_a_compiler_makes_a_wheel_for_every_python_that_has_the_library_besides(
    tree: Path, wheel: zipfile.Path
) -> None:
    """Also after a wheel without, and a wheel without after it: nothing of one build gets into the next."""
    path, _ = built(tree)
    assert path.name.endswith(f"-py3-none-linux_{platform.machine()}.whl")
    libraries = {f"ps_tables/native/{file_name(level)}" for level in LEVELS[platform.machine()]}
    assert files(path) - files(wheel.root.filename) == libraries
    path, _ = built(tree, PS_NATIVE="off")
    assert files(path) == files(wheel.root.filename)
