"""Compiled loops are made once, loaded only from where nobody else can write, and done without where that fails."""

from __future__ import annotations

import importlib.util
import logging
import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import ps_server.cli
import ps_worker
from ps_protocol.errors import Unsupported
from ps_runtime.compiled_loops import c_compiler, loops_folder
from ps_server.shard.native_loops import use_native_loops
from ps_tables.choosing import Choice, choose
from ps_tables.native import in_use
from ps_tables.native.building import build, file_name
from ps_tables.native.loading import DECLARATIONS, check_private
from ps_tables.native.loops import check_complete
from tests.tools.forkserver import ROOT, Nursery

SCRIPT = ROOT / "tests" / "scripts" / "build_loops.py"
NO_ONE = 54321  # a user's number


@pytest.fixture
def compiler() -> list[str]:
    """This machine's."""
    if importlib.util.find_spec("cffi") is None:
        pytest.skip("needs cffi")
    if not c_compiler():
        pytest.skip("needs a C compiler")
    return c_compiler()


@pytest.fixture(autouse=True)
def _numpy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user without compiled loops."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(in_use, "_loops", None)


def program(place: Path, text: str) -> list[str]:
    """A compiler that is no real one."""
    place.write_text(f"#!/bin/sh\n{text}\n")
    place.chmod(0o755)
    return [str(place)]


# -- choosing --------------------------------------------------------------------------------------------------------


def test_without_compiled_loops_nothing_is_said_and_no_compiler_started(tmp_path: Path) -> None:
    def started() -> list[str]:
        raise AssertionError("a compiler was looked for")

    for how in ("auto", "off"):
        assert choose(how, tmp_path / "none", started) == Choice(False)
    assert not (tmp_path / "none").exists()
    assert in_use.loops() is None


def test_what_was_compiled_is_used_until_it_is_turned_off(tmp_path: Path, compiler: list[str]) -> None:
    folder = tmp_path / "new" / "loops"
    path = build(folder, compiler)
    assert path == folder / file_name()
    assert [each.stat().st_mode & 0o777 for each in (folder.parent, folder, path)] == [0o700, 0o700, 0o755]
    found = choose("auto", folder, list)
    assert (found.is_native, found.is_trouble) == (True, False)
    assert found.text.startswith(f"tables: compiled loops, {path}")
    assert in_use.loops() is not None
    assert choose("off", folder, list) == Choice(False)
    assert in_use.loops() is None


def test_the_options_are_those_that_keep_the_bits(tmp_path: Path) -> None:
    said = tmp_path / "said"
    with pytest.raises(Unsupported, match=r"cc failed with code 3: nothing"):
        build(tmp_path / "loops", program(tmp_path / "cc", f'echo "$@" > {said}; exit 3'))
    words = said.read_text().split()
    assert {"-ffp-contract=off", "-std=c11"} <= {*words}
    assert not [word for word in words if "fast" in word or word.startswith("-march")]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (None, "there is no C compiler: install gcc or clang, or name one in CC"),
        ("exit 1", "cc failed with code 1: nothing"),
        ("echo about loops.c >&2; echo 'fatal error: no math.h' >&2; exit 4", "cc failed with code 4: fatal error: no"),
        ("exit 0", "cc failed with code 0: nothing"),
        ('while [ "$1" != -o ]; do shift; done; echo nonsense > "$2"', "cannot be loaded: "),
        ("missing", "cc cannot be started: No such file or directory"),
    ],
    ids=["none", "fails", "says why", "makes nothing", "makes nonsense", "is not there"],
)
def test_a_compiler_that_fails_costs_one_line_and_no_result(
    text: str | None, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if "loaded" in reason:
        pytest.importorskip("cffi")
    if text is None:
        monkeypatch.setenv("PATH", str(tmp_path))
    else:
        place = tmp_path / "cc"
        monkeypatch.setenv("CC", str(place) if text == "missing" else program(place, text)[0])
    assert use_native_loops("build", None) is False
    [line] = caplog.records
    assert line.levelno == logging.WARNING
    assert line.getMessage().startswith("tables: numpy in place of compiled loops: ")
    assert reason in line.getMessage()
    assert in_use.loops() is None
    folder = loops_folder(None)
    assert not folder.exists() or [*folder.iterdir()] == ([folder / file_name()] if "loaded" in reason else [])


def test_a_library_without_the_loops_costs_one_line(tmp_path: Path, compiler: list[str]) -> None:
    """As where CC hides the names of functions."""
    found = choose("build", tmp_path / "loops", lambda: [*compiler, "-fvisibility=hidden"])
    assert (found.is_native, found.is_trouble) == (False, True)
    assert "cannot be loaded: " in found.text
    assert "ps_" in found.text
    assert in_use.loops() is None


def test_a_library_that_lacks_any_declared_function_is_found_out() -> None:
    names = {*re.findall(r"\b(ps_\w+)\(", DECLARATIONS.read_text())}
    assert len(names) == 10
    check_complete(SimpleNamespace(**dict.fromkeys(names)))
    for name in names:
        with pytest.raises(AttributeError, match=f"'{name}'"):
            check_complete(SimpleNamespace(**dict.fromkeys(names - {name})))


def test_a_cffi_that_lacks_what_it_needs_costs_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def lacking() -> None:
        raise ImportError("No module named 'pycparser'")

    (tmp_path / file_name()).write_text("")
    for cffi in (None, SimpleNamespace(FFI=lacking)):
        monkeypatch.setitem(sys.modules, "cffi", cffi)
        found = choose("auto", tmp_path, list)
        assert (found.is_native, found.is_trouble) == (False, True)
        assert found.text.endswith(": pip install 'ps-torch[native]'")


def test_a_folder_that_may_not_be_looked_into_has_no_loops_and_nothing_is_said(tmp_path: Path) -> None:
    """As the home of another user, which containers often name."""
    folder = tmp_path / "home" / ".cache" / "ps-torch"
    folder.mkdir(parents=True)
    user = os.geteuid()
    folder.parents[1].chmod(0)
    if user == 0:
        os.seteuid(NO_ONE)
    try:
        for looked in (folder, folder.parent):
            assert choose("auto", looked, list) == Choice(False)
        assert choose("build", folder, lambda: ["cc"]).is_trouble
    finally:
        os.seteuid(user)
        folder.parents[1].chmod(0o700)


def test_a_worker_says_why_it_does_without_and_trains(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PS_NATIVE", "build")
    monkeypatch.setenv("CC", "/no/such/compiler")
    table = ps_worker.Embedding(2, initial="constant", scale=0.0)
    with ps_worker.connect(mode="single") as session:
        plain = torch.nn.Linear(1, 1)  # has no table
        session.prepare(plain, torch.optim.SGD(plain.parameters(), lr=1.0))
    assert not caplog.records
    with ps_worker.connect(mode="single") as session:
        table, optimizer = session.prepare(table, torch.optim.SGD(table.parameters(), lr=1.0))
        table(torch.tensor([7])).sum().backward()
        optimizer.step()
        assert table.rows(torch.tensor([7])).tolist() == [[-1.0, -1.0]]
    [line] = caplog.records
    assert "/no/such/compiler cannot be started" in line.getMessage()


def test_loops_of_another_version_are_not_used_and_it_is_said(tmp_path: Path) -> None:
    (tmp_path / "loops-other-0123456789abcdef.so").write_text("")
    found = choose("auto", tmp_path, list)
    assert (found.is_native, found.is_trouble) == (False, True)
    assert found.text.endswith("are of another version or processor: run `ps-server native`")


def test_a_folder_that_cannot_be_had_is_an_error_with_its_name(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(Unsupported, match=r"/file/loops: (Not a directory|File exists)"):
        build(tmp_path / "file" / "loops", ["cc"])
    with pytest.raises(Unsupported, match=r"expected an absolute path of a folder, got '~/.cache'"):
        build(Path("~/.cache"), ["cc"])


def test_the_command_compiles_and_says_what_is_used(
    tmp_path: Path, compiler: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(*words: str) -> object:
        monkeypatch.setattr(sys, "argv", ["ps-server", "native", *words])
        with pytest.raises(SystemExit) as ended:
            ps_server.cli.main()
        return ended.value.code

    assert run() == 0
    path = tmp_path / "cache" / "ps-torch" / file_name()
    assert capsys.readouterr().out.startswith(f"ps-server: tables: compiled loops, {path}")
    monkeypatch.setenv("CC", "/no/such/compiler")
    assert run("--native-dir", str(tmp_path / "other")) == "ps-server: /no/such/compiler cannot be started: " + (
        os.strerror(2)
    )


# -- who else could have written them --------------------------------------------------------------------------------


def test_what_others_can_write_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    folder.mkdir(parents=True)
    path = folder / "loops.so"
    path.write_text("")
    assert check_private(path) == path
    for each in (path, folder, folder.parent):
        usual = each.stat().st_mode
        for more in (0o020, 0o002):
            each.chmod(usual | more)
            with pytest.raises(Unsupported, match=f"others can write to {each}, .* chmod go-w {each}"):
                check_private(path)
        each.chmod(usual)
    folder.parent.chmod(0o1777)  # as /tmp: each may remove only what is his own
    (tmp_path / "link").symlink_to(folder)
    assert check_private(tmp_path / "link" / "loops.so") == path


def test_what_belongs_to_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "loops.so"
    path.write_text("")
    if os.geteuid() == 0:
        os.chown(path, NO_ONE, NO_ONE)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: NO_ONE)
    with pytest.raises(Unsupported, match=r"belongs to another user \(uid \d+\), who could change what is loaded"):
        check_private(path)


def test_loops_in_a_folder_that_others_can_write_are_neither_loaded_nor_made(tmp_path: Path) -> None:
    pytest.importorskip("cffi")
    path = tmp_path / "loops" / file_name()
    path.parent.mkdir()
    path.write_text("")
    path.parent.chmod(0o777)
    found = choose("auto", path.parent, list)
    assert (found.is_native, found.is_trouble) == (False, True)
    assert f"others can write to {path.parent}" in found.text
    assert in_use.loops() is None
    path.unlink()
    with pytest.raises(Unsupported, match="others can write to"):
        build(path.parent, ["cc"])
    assert [*path.parent.iterdir()] == []


def test_loops_are_not_loaded_from_where_the_process_happens_to_be(
    tmp_path: Path, compiler: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A user without a home has the folder ~/.cache, which would be one below whatever folder a process starts in."""
    monkeypatch.chdir(tmp_path)
    here = Path("~", ".cache", "ps-torch")
    build(tmp_path / here, compiler)
    for how in ("auto", "build"):
        found = choose(how, here, lambda: compiler)
        assert (found.is_native, found.is_trouble) == (False, True)
        assert "expected an absolute path of a folder, got '~/.cache/ps-torch'" in found.text
        assert in_use.loops() is None


# -- several at once -------------------------------------------------------------------------------------------------


def test_two_processes_that_compile_at_once_both_end_with_whole_loops(
    tmp_path: Path, compiler: list[str], nursery: Nursery
) -> None:
    """Each waits in its compiler until the other one is there, too."""
    meet = (
        f'touch {tmp_path}/here.$$; while [ "$(ls {tmp_path} | grep -c here)" -lt 2 ]; do sleep 0.05; done; exec "$@"'
    )
    words = [*program(tmp_path / "cc", meet), *compiler]
    folder = tmp_path / "loops"
    both = [nursery.run(SCRIPT, [folder, *words], tmp_path / f"log{number}") for number in range(2)]
    assert [process.wait(60.0) for process in both] == [0, 0]
    assert [each.name for each in folder.iterdir()] == [file_name()]
    assert choose("auto", folder, list).is_native


def test_a_user_reads_what_the_environment_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "ccache gcc -pipe")
    assert c_compiler() == ["ccache", "gcc", "-pipe"]
    assert loops_folder("/x") == Path("/x")
    assert loops_folder(None) == tmp_path / "cache" / "ps-torch"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/some")
    assert loops_folder(None) == Path("/home/some/.cache/ps-torch")
