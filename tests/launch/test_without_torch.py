"""Those that look in need no torch: an operator's laptop has none, and a probe waits for none.

Torch and numpy are hidden from a process of the command, as they are where nobody has installed them.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.tools.cluster import Cluster
from tests.tools.launching import ROOT, Command, python
from tests.tools.requirements import PROJECT, of

# What servers and workers need, and what looks in does not.
HIDDEN = ("torch", "numpy", "safetensors")
SERVER = ("ps_tables", "ps_server.coordinator.coordinator", "ps_server.shard", "ps_server.view")
HEAVY = {*HIDDEN, *SERVER, "prometheus_client", "cryptography", "multiprocessing"}
HIDE = f"""
import importlib.abc, sys
class Hidden(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] in {HIDDEN!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Hidden())
"""
RUN = "import runpy; runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"


def without_torch(*words: str, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    """`python -m WORDS` where torch is not installed, to its end."""
    done = python("-c", HIDE + RUN, *words, folder=folder)
    assert "Traceback" not in done.stderr, done.stderr
    return done


def test_commands_that_look_in_run_without_torch(cluster: Cluster) -> None:
    asking = ("--server", cluster.address)
    table = without_torch("ps_server", "status", *asking)
    assert table.returncode == 0, table.stderr
    assert len(re.findall(r"^shard ", table.stdout, re.MULTILINE)) == 2, table.stdout
    told = without_torch("ps_server", "status", "--json", *asking)
    assert '"shards"' in told.stdout, told.stderr
    assert without_torch("ps_server", "health", *asking).returncode == 0
    for command in ("checkpoint", "end"):
        refused = without_torch("ps_server", command, "--job", "absent", *asking)
        assert (refused.returncode, refused.stderr) == (1, "ps-server: no job 'absent' here\n")
    report = without_torch("ps_server", "report", "--index", "1", "--process", "7", *asking)
    assert report.stdout == "process 7 is not shard 1: nothing changed\n", report.stderr


@pytest.mark.parametrize("words", [("status", "--watch"), ("page", "--page-port", "0")], ids=["status --watch", "page"])
def test_what_goes_on_looking_runs_without_torch(words: tuple[str, ...], cluster: Cluster, tmp_path: Path) -> None:
    command = Command(tmp_path, "-c", HIDE + RUN, "ps_server", *words, "--server", cluster.address)
    try:
        command.says(r"shard +1|the page of \S+ is at (http://\S+)\n")
    finally:
        command.process.terminate()
        command.process.wait(30)
    assert "Traceback" not in command.err, command.err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("ps_server", "--version"), "ps-server 0"),
        (("ps_server", "--help"), "usage: ps-server"),
        (("ps_server", "up", "--help"), "usage: ps-server up"),
        (("ps_server", "config"), "max-connections = "),
        (("ps_server", "plan", "--params", "25M", "--workers", "4", "--link", "10G"), "WORKER'S LINK"),
        (("ps_server", "plan", "--params", "25M", "--workers", "4", "--optimizer", "sgd", "--momentum", "0.9"), "sync"),
        (("ps_worker", "--help"), "usage: ps-worker"),
        (("ps_worker", "run", "--help"), "usage: ps-worker run"),
        (("ps_worker", "config"), "restore = "),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_commands_that_ask_nobody_run_without_torch(words: tuple[str, ...], says: str) -> None:
    done = without_torch(*words)
    assert done.returncode == 0, done.stderr
    assert says in done.stdout


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("up", "--port", "0", "--metrics-port", "0"), "ps-server: `ps-server up` needs torch, which this Python"),
        (("shard", "--index", "0", "--with-coordinator", "--port", "0", "--metrics-port", "0"), "needs torch, which"),
        (("export", "--checkpoint-dir", "nowhere", "out"), "ps-server: nowhere is no directory\n"),
        (("export", "--checkpoint-dir", ".", "out"), "ps-server: `ps-server export` needs"),
        (
            ("plan", "--params", "1M", "--workers", "2", "--momentum", "0.9"),
            "momentum is of SGD and RMSprop, got",
        ),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_what_needs_torch_says_so_in_one_line(words: tuple[str, ...], says: str, tmp_path: Path) -> None:
    done = without_torch("ps_server", *words, folder=tmp_path)
    lines = [line for line in done.stderr.splitlines() if not line.startswith("ps-server: starting")]
    assert done.returncode == 1
    assert len(lines) == 1, done.stderr
    assert says in done.stderr


def test_status_imports_nothing_heavy(shared: Cluster, tmp_path: Path) -> None:
    """What a look costs is what it imports: with torch 2.3 s of the processor, without 0.3 s."""
    check = (
        "import atexit, sys; from ps_server.__main__ import program; "
        f"atexit.register(lambda: print('heavy:', {HEAVY!r} & sys.modules.keys())); "
        f"sys.argv[1:] = ['status', '--server', '{shared.address}']; program()"
    )
    told = python("-c", check, folder=tmp_path)
    assert (told.returncode, told.stdout.splitlines()[-1]) == (0, "heavy: set()"), told.stderr


def test_the_docs_list_all_dependencies_but_those_of_servers_and_workers() -> None:
    named = {each.name for each in of(PROJECT)}
    text = (ROOT / "docs" / "deploy.md").read_text()
    [line] = re.findall(r"^\$ pip install (grpcio .*?)(?: +#.*)?$", text, re.MULTILINE)
    assert set(line.split()) == named - {*HIDDEN, "tomli", "cffi"}  # cffi calls the library for tables
