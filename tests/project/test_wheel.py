"""The wheel holds all that its users need: code, types, and the contract for clients in other languages."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.tools.imports import PACKAGES

ROOT = Path(__file__).parents[2]
CONTRACT = ROOT / "proto" / "ps_protocol" / "v1"
PAGE = "ps_server/page/"
BUILD = "import setuptools.build_meta as backend; print(backend.build_wheel('.'))"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.Path:
    """A wheel of this project, built from a copy, so that nothing of an earlier build gets into it."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    for name in (*PACKAGES, "proto"):
        shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    subprocess.run([sys.executable, "-c", BUILD], cwd=folder, check=True, capture_output=True, timeout=120)
    (built,) = folder.glob("*.whl")
    return zipfile.Path(built)


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
