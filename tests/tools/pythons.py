"""`make test-pythons`: what needs no torch, on every Python that pyproject.toml promises and this machine has.

A torch for each Python is gigabytes; the rest is small. So each version gets an environment without torch, in which all
packages are compiled with warnings as errors, the program is asked for help, and the tests of TESTS run. The workflows
run all tests on all versions. `make clean test PYTHON=python3.13` does so here, for one.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

from packaging.requirements import Requirement

from tests.tools.launching import ROOT
from tests.tools.requirements import PROJECT, of

TOOLS = ("pytest>=8", "pytest-timeout>=2.3", "hypothesis>=6.100", "pyyaml>=6", "packaging>=24", "setuptools>=77")
# They import nothing that imports torch; conftest.py does, and is left out.
TESTS = (
    "tests/launch/test_completion.py",
    "tests/launch/test_restarts.py",
    "tests/project/test_layers.py",
    "tests/project/test_metric_names.py",
    "tests/protocol/test_fragments.py",
    "tests/protocol/test_layout.py",
    "tests/protocol/test_modes.py",
    "tests/server/test_admission.py",
    "tests/server/test_apply.py",
    "tests/server/test_comebacks.py",
    "tests/server/test_rounds.py",
    "tests/tables/test_row_ids.py",
)


def promised() -> list[str]:
    """The versions that the classifiers name, as 3.10."""
    return re.findall(r"Python :: (3\.\d+)", (ROOT / "pyproject.toml").read_text())


def interpreter(version: str, pyenv: Path | None = None) -> Path | None:
    """Returns a Python of a version: of the path, or of pyenv, the newest one; None: there is none.

    pyenv: its folder of versions
    """
    installed = (pyenv or Path.home() / ".pyenv" / "versions").glob(f"{version}.*/bin/python")
    newest = sorted(
        installed, key=lambda path: [int(part) for part in re.findall(r"\d+", path.parts[-3])], reverse=True
    )
    on_path = shutil.which(f"python{version}")
    return next((path for path in (*([Path(on_path)] if on_path else []), *newest) if _is(path, version)), None)


def _is(path: Path, version: str) -> bool:
    """Whether it runs, and is of that version: a shim of pyenv's may lead nowhere."""
    ask = "import sys; print('%d.%d' % sys.version_info[:2])"
    try:
        done = subprocess.run([path, "-c", ask], capture_output=True, text=True, timeout=60)
    except OSError:
        return False
    return done.returncode == 0 and done.stdout.strip() == version


def needed(requirements: list[Requirement]) -> list[str]:
    """What to install: all that the project needs, but torch."""
    return [str(each) for each in requirements if each.name != "torch"]


def try_one(version: str, python: Path) -> bool:
    """Makes the environment, unless it is there, and runs everything in it; says whether all is well."""
    folder = ROOT / f".venv-python{version}"
    inside = str(folder / "bin" / "python")
    if not (folder / "stamp").exists():
        subprocess.run([python, "-m", "venv", "--clear", folder], check=True)
        pip = [inside, "-m", "pip", "-qq", "--disable-pip-version-check", "install"]
        subprocess.run([*pip, *needed(list(of(PROJECT))), *TOOLS], cwd=ROOT, check=True)
        subprocess.run([*pip, "--no-deps", "--no-build-isolation", "--editable", "."], cwd=ROOT, check=True)
        (folder / "stamp").touch()
    packages = sorted(path.name for path in ROOT.glob("ps_*") if path.is_dir())
    plugins = ["-p", "no:cacheprovider", "-p", "tests.tools.claims"]
    commands = (
        [inside, "-W", "error", "-m", "compileall", "-q", "-f", *packages, "examples", "bench", "tests"],
        [str(folder / "bin" / "ps-server"), "--help"],
        [inside, "-m", "pytest", "-q", "--noconftest", *plugins, "-m", "not (long or repeat)", *TESTS],
    )
    for command in commands:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        if done.returncode:
            print(f"Python {version}: {' '.join(command)} ended with code {done.returncode}", done.stdout, done.stderr)
            return False
    print(f"Python {version}: {done.stdout.strip().splitlines()[-1]}")
    return True


def main() -> None:
    """Tries every version; ends with code 1 if one fails, or none is here."""
    found = {version: interpreter(version) for version in promised()}
    for version, python in found.items():
        if python is None:
            print(f"Python {version} is not here: left out")
    worked = [try_one(version, python) for version, python in found.items() if python is not None]
    sys.exit(not (worked and all(worked)))


if __name__ == "__main__":
    main()
