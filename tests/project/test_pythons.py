"""What `make test-pythons` takes: which interpreters, and tests that need no torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from packaging.requirements import Requirement

from tests.tools.launching import ROOT
from tests.tools.pythons import TESTS, interpreter, needed, promised


def executable(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def test_an_interpreter_is_one_that_runs_and_is_of_the_version(tmp_path: Path) -> None:
    for patch, text in ((2, "echo 9.8"), (10, "echo 9.8"), (11, "exit 127"), (12, "echo 9.7")):
        executable(tmp_path / f"9.8.{patch}" / "bin" / "python", text)
    assert interpreter("9.8", tmp_path) == tmp_path / "9.8.10" / "bin" / "python", "10 is newer than 2"
    assert interpreter("9.9", tmp_path) is None
    own = "{}.{}".format(*sys.version_info)
    assert own in promised()


def test_torch_is_not_installed() -> None:
    asked = [Requirement("torch>=2.4"), Requirement("tomli>=2; python_version < '3.11'")]
    assert needed(asked) == ['tomli>=2; python_version < "3.11"']


def test_the_tests_that_it_runs_import_no_torch() -> None:
    modules = ", ".join(name.removesuffix(".py").replace("/", ".") for name in TESTS)
    without = f"import sys; sys.modules['torch'] = None; import {modules}"
    done = subprocess.run([sys.executable, "-c", without], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
