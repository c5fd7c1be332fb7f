"""The library for tables: how it is compiled and found, what a process says of it, and what fails without harm."""

from __future__ import annotations

import logging
import platform
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

import ps_worker
from ps_protocol.errors import Unsupported
from ps_server.shard.native_loops import use_native_loops
from ps_tables.choosing import Choice, choose
from ps_tables.native import in_use
from ps_tables.native.libraries import DECLARATIONS, LEVELS, SOURCE, features, file_name, runnable, sources
from ps_tables.native.loading import libraries, load
from ps_tables.native.loops import check_complete
from tests.tools.imports import ROOT

MACHINE = platform.machine()
NEWEST_GLIBC = (2, 17)  # that a library may need: manylinux_2_17


@pytest.fixture(autouse=True)
def _numpy() -> Iterator[None]:
    yield
    in_use.use(None)


@pytest.fixture
def library() -> Path:
    """The one that a process of this machine uses."""
    found = libraries()
    if not found:
        pytest.skip("this installation has no library: make native")
    return found[0]


# -- choosing --------------------------------------------------------------------------------------------------------


def test_the_library_is_used_until_it_is_turned_off(library: Path) -> None:
    level = library.stem.removeprefix("loops-")
    assert choose("auto") == Choice(level, f"tables: the library for {level}")
    assert in_use.loops() is not None
    assert choose("off") == Choice("", "tables: numpy, because native is off")
    assert in_use.loops() is None


def test_an_installation_without_a_library_uses_numpy(tmp_path: Path) -> None:
    found = choose("auto", tmp_path)
    assert found == Choice("", "tables: numpy, because this installation has no library for this machine")
    assert in_use.loops() is None


def test_the_best_library_that_the_processor_can_run_is_chosen(tmp_path: Path) -> None:
    for levels in LEVELS.values():
        for level in levels:
            (tmp_path / file_name(level)).touch()
    x86 = LEVELS["x86_64"]
    both = x86["x86-64-v2"] | x86["x86-64-v3"]
    names = [[each.name for each in runnable("x86_64", has, tmp_path)] for has in (both, both - {"fma"}, frozenset())]
    assert names == [["loops-x86-64-v3.so", "loops-x86-64-v2.so"], ["loops-x86-64-v2.so"], []]
    assert [each.name for each in runnable("aarch64", frozenset({"fp", "asimd"}), tmp_path)] == ["loops-armv8-a.so"]
    assert runnable("riscv64", both, tmp_path) == []
    assert features("processor: 0\nflags\t\t: fpu avx2\n\nprocessor: 1\nflags: fpu\n") == {"fpu", "avx2"}
    assert features("CPU part : 0x1\nFeatures : fp asimd\n") == {"fp", "asimd"}
    assert features("") == frozenset()


def test_a_library_that_is_none_costs_one_line(tmp_path: Path, library: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / library.name).write_text("nonsense")
    found = choose("auto", tmp_path)
    assert (found.level, found.is_trouble) == ("", True)
    assert found.text.startswith(f"tables: numpy in place of the library: {library.name} cannot be loaded: ")
    assert in_use.loops() is None


def test_a_library_of_other_sources_is_not_used(tmp_path: Path, library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ps_tables.native.loading.sources", lambda: sources() ^ 1)
    path = tmp_path / library.name
    shutil.copy(library, path)
    assert choose("auto", tmp_path).text.endswith(
        f"{library.name} was compiled from other sources: install ps-torch again"
    )


def test_a_library_that_lacks_any_declared_function_is_found_out() -> None:
    names = {*re.findall(r"\b(ps_\w+)\(", DECLARATIONS.read_text())} - {"ps_sources"}
    assert len(names) == 14
    check_complete(SimpleNamespace(**dict.fromkeys(names)))
    for name in names:
        with pytest.raises(AttributeError, match=f"'{name}'"):
            check_complete(SimpleNamespace(**dict.fromkeys(names - {name})))


def test_a_cffi_that_lacks_what_it_needs_costs_one_line(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def lacking() -> None:
        raise ImportError("No module named 'pycparser'")

    for cffi in (None, SimpleNamespace(FFI=lacking)):
        monkeypatch.setitem(sys.modules, "cffi", cffi)
        with pytest.raises(Unsupported, match=r"cffi cannot be used \(.*\): pip install cffi"):
            load(library)


def test_servers_and_workers_say_in_one_line_what_is_used(
    library: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    assert use_native_loops("auto") == library.stem.removeprefix("loops-")
    assert use_native_loops("off") == ""
    monkeypatch.setenv("PS_NATIVE", "off")
    for model in (torch.nn.Linear(1, 1), ps_worker.Embedding(2)):  # the first has no table
        with ps_worker.connect(mode="single") as session:
            session.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    said = [record.getMessage() for record in caplog.records if record.getMessage().startswith("tables: ")]
    off = "tables: numpy, because native is off"
    assert said == [f"tables: the library for {library.stem.removeprefix('loops-')}", off, off]


# -- what is compiled ------------------------------------------------------------------------------------------------


def compiled(tmp_path: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """What `build_library` of setup.py does with a copy of the library's sources: the folder is tmp_path."""
    folder = tmp_path / "ps_tables" / "native"
    if not folder.exists():
        folder.mkdir(parents=True)
        for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
            shutil.copy(ROOT / name, tmp_path)
        for path in (SOURCE, DECLARATIONS, SOURCE.with_name("libraries.py")):
            shutil.copy(path, folder)
    return subprocess.run(
        [sys.executable, "setup.py", "-q", "build_library", "--inplace"],
        cwd=tmp_path,
        env={"PATH": str(tmp_path), **variables},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )


def program(place: Path, text: str) -> str:
    """A compiler that is no real one."""
    place.write_text(f"#!/bin/sh\n{text}\n")
    place.chmod(0o755)
    return str(place)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (None, "there is no C compiler: install gcc or clang, or name one in CC"),
        ("exit 1", "cc failed with code 1: nothing"),
        ("echo about loops.c >&2; echo 'fatal error: no math.h' >&2; exit 4", "cc failed with code 4: fatal error: no"),
        ("missing", "cc cannot be started: No such file or directory"),
        ("off", "PS_NATIVE is off"),
    ],
    ids=["none", "fails", "says why", "is not there", "off"],
)
def test_an_installation_without_a_compiler_does_without_the_library(
    text: str | None, reason: str, tmp_path: Path
) -> None:
    if text == "off":
        variables = {"PS_NATIVE": "off", "CC": "/no/such"}
    elif text is None:
        variables = {}
    else:
        variables = {"CC": str(tmp_path / "cc") if text == "missing" else program(tmp_path / "cc", text)}
    [line] = compiled(tmp_path, **variables).stderr.splitlines()
    assert line.startswith("ps-torch: without the library for tables, numpy does its work: ")
    assert reason in line
    assert not list(tmp_path.rglob("*.so*"))


def test_the_options_are_those_that_keep_the_bits(tmp_path: Path) -> None:
    compiled(tmp_path, CC=program(tmp_path / "cc", f'echo "$@" >> {tmp_path}/said; exit 3'))
    words = (tmp_path / "said").read_text().split()
    assert {"-ffp-contract=off", "-std=c11"} <= {*words}
    assert not [word for word in words if "fast" in word or word.startswith("-march=native") or "fma" in word]


def test_the_library_needs_no_python_and_no_newer_glibc_than_its_wheels_say(library: Path) -> None:
    """As auditwheel looks at it: https://peps.python.org/pep-0600/"""
    objdump = shutil.which("objdump")
    if objdump is None:
        pytest.skip("needs objdump")
    for path in libraries():
        said = subprocess.run([objdump, "-Tp", path], capture_output=True, text=True, check=True, timeout=60).stdout
        needed = {*re.findall(r"NEEDED\s+(\S+)", said)}
        assert needed <= {"libc.so.6", "libm.so.6", "ld-linux-aarch64.so.1"}
        versions = [tuple(map(int, each.split("."))) for each in re.findall(r"GLIBC_([\d.]+)", said)]
        assert versions
        assert max(versions) <= NEWEST_GLIBC
        assert "Py" not in said


@pytest.mark.long
def test_sanitizers_find_nothing_in_the_loops(tmp_path: Path) -> None:
    """The tests of the loops again, with a library that stops at what C leaves undefined, and at memory not its own."""
    compiler = next((found for name in ("gcc", "clang") if (found := shutil.which(name))), None)
    if compiler is None or MACHINE not in LEVELS:
        pytest.skip("needs gcc or clang")
    runtime = subprocess.run(
        [compiler, "-print-file-name=libasan.so"], capture_output=True, text=True, check=True, timeout=60
    ).stdout.strip()
    if not Path(runtime).is_absolute():
        pytest.skip("needs the sanitizers' libraries")
    with mock.patch("setuptools.setup"):
        setup = runpy.run_path(str(ROOT / "setup.py"))
    words = [compiler, "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    setup["compile_libraries"].__globals__["compiler"] = lambda: words
    setup["compile_libraries"](MACHINE, tmp_path)
    (tmp_path / "sanitized.py").write_text(
        "import pathlib\n"
        "from ps_tables.native import loading\n"
        f"loading.libraries.__defaults__ = (pathlib.Path({str(tmp_path)!r}),)\n"
    )
    environment = {
        "PATH": "/usr/bin:/bin",
        "PYTHONPATH": f"{ROOT}:{tmp_path}",
        "LD_PRELOAD": runtime,
        "ASAN_OPTIONS": "detect_leaks=0",  # Python's own
        "PYTHONMALLOC": "malloc",  # so that what lies behind an array is known
    }
    words = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-p",
        "sanitized",
        "-p",
        "no:cacheprovider",
        "-k",
        "not servers and not simulated",  # ASan does not know the stacks of greenlets
    ]
    done = subprocess.run(
        [*words, "tests/tables/test_native.py"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=220,
        check=False,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    assert re.search(r"\d\d passed", done.stdout)
    assert "skipped" not in done.stdout
