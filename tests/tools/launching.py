"""Commands as processes: to their end, or while they run; and scripts as modules."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.tools.cluster import until

ROOT = Path(__file__).parents[2]
STARTUP = ROOT / "tests" / "tools" / "startup"
START_SECONDS = 120.0  # a command that imports torch takes so long on a machine that has much other work
END_SECONDS = 60.0


# One write a line: workers share one output, and nothing may come between a line and its end.
# await_file is `until` for a process that has nothing of this project.
_BEFORE = """
import os, sys, time

def say(*words):
    sys.stdout.write(" ".join(map(str, words)) + "\\n")

def await_file(path):
    while not os.path.exists(path):
        time.sleep(0.01)

"""


def script(directory: Path, text: str) -> str:
    """A script that needs neither torch nor a server: it starts in a moment."""
    path = directory / "script.py"
    path.write_text(_BEFORE + text)
    return str(path)


def environment(**variables: str) -> dict[str, str]:
    """Of a process that imports the packages from their sources, and torch without its compiler.

    It computes with one thread: several would wait for each other where other tests run.
    """
    paths = (str(STARTUP), str(ROOT))
    return {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": os.pathsep.join(paths), **variables}


def python(
    *words: str, folder: Path | None = None, seconds: float = 140, **variables: str
) -> subprocess.CompletedProcess[str]:
    """`python WORDS` in a folder, to its end, which comes within so many seconds."""
    return subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env=environment(**variables),
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )


def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """`ps-worker run`, to its end."""
    return python("-m", "ps_worker", "run", *arguments, **variables)


def run_here(monkeypatch: pytest.MonkeyPatch, path: Path, *arguments: str, **variables: str) -> None:
    """Runs a script in this process, in its folder: a process of its own takes seconds to import torch."""
    with monkeypatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        patch.setattr(sys, "argv", [str(path), *arguments])
        patch.syspath_prepend(str(path.parent))
        patch.chdir(path.parent)
        left = runpy.run_path(str(path), run_name="__main__")
    if "session" in left:
        left["session"].close()  # as the end of its process does


def load(script: Path) -> Any:
    """A script as a module, which has its own name in place of `__main__`."""
    spec = importlib.util.spec_from_file_location(script.stem, script)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[script.stem] = module  # dataclasses look up the module that they are made in
    spec.loader.exec_module(module)
    return module


# The beginning of a script in whose process torch cannot be imported, nor what needs it.
NO_TORCH = """
import sys
class NoTorch:
    def find_spec(self, name, *_):
        if name.partition(".")[0] in ("torch", "safetensors"):
            raise ModuleNotFoundError(f"{name} is not there", name=name)
sys.meta_path.insert(0, NoTorch())
"""


class Command:
    """A running command, with everything it has printed so far."""

    def __init__(self, directory: Path, *arguments: str, **variables: str) -> None:
        self._out, self._err = directory / "out", directory / "err"
        own = environment(PYTHONUNBUFFERED="1", **variables)
        with self._out.open("wb") as out, self._err.open("wb") as err:
            self.process = subprocess.Popen(
                [sys.executable, *arguments], stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=own
            )
        self._family: list[psutil.Process] = []

    @property
    def out(self) -> str:
        return self._out.read_text()

    @property
    def err(self) -> str:
        return self._err.read_text()

    def says(self, pattern: str, count: int = 1, seconds: float = START_SECONDS) -> list[str]:
        """Waits until it has printed a line like this `count` times; what the pattern's group caught."""

        def found() -> list[str]:
            assert self.process.poll() is None or len(re.findall(pattern, self.out)) >= count, self.err
            matches = re.findall(pattern, self.out)
            return matches if len(matches) >= count else []

        return until(found, f"{pattern!r} in the output", seconds)

    def family(self) -> list[psutil.Process]:
        """The processes it has started, and theirs."""
        return psutil.Process(self.process.pid).children(recursive=True)

    def end(self, number: int) -> int:
        """Sends a signal, waits for the end of the command and all it has started, and returns its exit code."""
        family = self.family()
        assert family
        self.process.send_signal(number)
        code = self.process.wait(END_SECONDS)
        _, orphans = psutil.wait_procs(family, timeout=END_SECONDS)
        assert not orphans, f"left behind: {orphans}"
        return code

    def clean_up(self) -> None:
        """Leaves nothing behind if a test fails half-way."""
        if self.process.poll() is None:
            kill_family(self.process.pid)
            self.process.wait()


def kill_family(pid: int) -> None:
    """Kills a process and all that it has started; one of them may end because another does."""
    process = psutil.Process(pid)
    for each in [*process.children(recursive=True), process]:
        with contextlib.suppress(psutil.NoSuchProcess):
            each.kill()


def resident(pid: int) -> int:
    """Bytes of a process' own memory."""
    found = re.search(r"^RssAnon:\s+(\d+) kB$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    assert found
    return int(found[1]) * 1024


class Commands:
    """Starts commands in a directory; none of them outlives the test."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._started: list[Command] = []

    def start(self, *arguments: str, **variables: str) -> Command:
        directory = self._directory / f"command-{len(self._started)}"
        directory.mkdir()
        self._started.append(Command(directory, *arguments, **variables))
        return self._started[-1]

    def close(self) -> None:
        for command in reversed(self._started):
            command.clean_up()


Start = Callable[..., Command]  # as Commands.start
Refusal = Callable[..., tuple[int, str]]
