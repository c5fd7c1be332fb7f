"""What a launcher that was killed leaves in the folder for temporary files, the next one removes; and nothing else."""

from __future__ import annotations

import os
import signal
import tempfile
import threading
import time
from pathlib import Path

import psutil
import pytest

from ps_launch.launch_folder import LEFT_SECONDS, LOCK, PREFIX, _kernel, launch_folder, remove_leftovers
from ps_launch.worker_launch import LOOK_SECONDS
from ps_protocol.errors import InvalidRequest
from ps_protocol.handover import SOCKET_PREFIX
from ps_runtime.local_sockets import listen
from ps_runtime.local_sockets import remove_leftovers as remove_sockets
from tests.tools.cluster import until
from tests.tools.launching import START_SECONDS, Commands, script

LONG_AGO = time.time() - 2 * LEFT_SECONDS


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder for temporary files of this process and of its children."""
    found = tmp_path / "temporary"
    found.mkdir()
    monkeypatch.setenv("TMPDIR", str(found))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return found


def age(folder: Path) -> None:
    """Makes a folder look like one of long ago."""
    os.utime(folder / LOCK, (LONG_AGO, LONG_AGO))


def lock_file(folder: Path, kernel: bytes | None = None) -> None:
    """Makes the file of a launcher that is gone."""
    (folder / LOCK).touch(0o600)
    (folder / LOCK).write_bytes(_kernel() if kernel is None else kernel)


def test_a_launcher_that_was_killed_leaves_a_folder_which_the_next_one_removes(
    temporary: Path, tmp_path: Path, commands: Commands
) -> None:
    program = script(tmp_path, "say('runs')\nawait_file(sys.argv[1])\n")
    go = tmp_path / "go"
    run = ("-m", "ps_worker", "run", "--mode", "single", program, str(go))
    killed = commands.start(*run)
    killed.says("runs")
    [left] = temporary.glob(f"{PREFIX}*")
    family = killed.family()
    killed.process.send_signal(signal.SIGKILL)
    killed.process.wait()
    go.touch()
    psutil.wait_procs(family)
    age(left)
    assert commands.start(*run).process.wait(START_SECONDS) == 0
    assert list(temporary.glob(f"{PREFIX}*")) == []


def test_the_folder_of_a_launcher_that_lives_stays_however_old_it_is(temporary: Path) -> None:
    with launch_folder() as folder:
        age(folder)
        with launch_folder() as other:
            assert other != folder
        assert folder.exists()
        assert not other.exists()
    assert list(temporary.iterdir()) == []


def test_what_is_no_launchers_of_this_user_stays(temporary: Path) -> None:
    """Folders with other rights, files, links, a folder of a launcher that has just begun, one without a lock, and one
    of another host, whose lock may not be seen here."""
    kinds = {name: temporary / f"{PREFIX}{name}" for name in ("open", "file", "link", "new", "bare", "other", "dead")}
    for name in ("open", "new", "bare", "other", "dead"):
        kinds[name].mkdir(0o700)
    for name in ("open", "new", "dead"):
        lock_file(kinds[name])
    lock_file(kinds["other"], b"another kernel")
    for name in ("open", "other", "dead"):
        age(kinds[name])
    kinds["open"].chmod(0o755)
    kinds["file"].touch()
    elsewhere = temporary / "elsewhere"
    elsewhere.mkdir(0o700)
    lock_file(elsewhere)
    age(elsewhere)
    kinds["link"].symlink_to(elsewhere)
    remove_leftovers(temporary)
    assert {name for name, path in kinds.items() if path.exists()} == kinds.keys() - {"dead"}
    assert (elsewhere / LOCK).exists()


# Worker 0 goes on; worker 1 joins, and fails when the test has emptied the launcher's folder.
TRAINS = """
if os.environ["PS_RESTART_COUNT"] == "0":
    open(os.environ["PS_STARTED_FILE"], "w").close()
    open(os.path.join(os.path.dirname(__file__), "joined-" + os.environ["PS_RANK"]), "w").close()
go = os.path.join(os.path.dirname(__file__), "go-")
if os.environ["PS_RANK"] == "1":
    await_file(go + "1")
    sys.exit(7)
await_file(go + "0")
if os.environ["PS_RESTART_COUNT"] == "0":
    sys.exit(5)
open(os.environ["PS_STARTED_FILE"] + "-awaits", "w").write("1")  # it takes the run for a new one
await_file(go + "end")
"""


def test_a_launch_whose_folder_is_emptied_goes_on_without_a_worker(
    temporary: Path, tmp_path: Path, commands: Commands
) -> None:
    """Something may clean the folder for temporary files of what is old. All workers have joined before."""
    program = script(tmp_path, TRAINS)
    words = ("--server", "127.0.0.1:1", "--mode", "sync", "--workers", "2", "--max-restarts", "1")
    command = commands.start("-m", "ps_worker", "run", *words, program)
    joined = [tmp_path / f"joined-{rank}" for rank in range(2)]
    until(lambda: all(each.exists() for each in joined), "that none puts its file there again", START_SECONDS)
    until(lambda: "training begins" in command.err, "all workers", START_SECONDS)
    [folder] = temporary.glob(f"{PREFIX}*")
    (folder / "started").unlink()
    (tmp_path / "go-1").touch()
    until(lambda: command.err.count("worker 1 failed with code 7") == 2, "the end of worker 1", START_SECONDS)
    assert "the launch goes on with 1 of 2 workers" in command.err
    (tmp_path / "go-0").touch()
    until(lambda: (folder / "started-awaits").exists(), "worker 0 again", START_SECONDS)
    threading.Event().wait(3 * LOOK_SECONDS)  # the launcher looks at it, and must do nothing
    assert command.process.poll() is None
    (tmp_path / "go-end").touch()
    assert command.process.wait(START_SECONDS) == 7
    assert "begins anew" not in command.err


@pytest.mark.skipif(os.geteuid() != 0, reason="another user's folder can be made by root alone")
def test_another_users_folder_stays(temporary: Path) -> None:
    other = temporary / f"{PREFIX}other"
    other.mkdir(0o700)
    lock_file(other)
    age(other)
    os.chown(other, 65534, 65534)
    remove_leftovers(temporary)
    assert other.exists()


def test_a_folder_for_temporary_files_that_is_not_there_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "none"))
    with (
        pytest.raises(InvalidRequest, match="there is no directory for temporary files"),
        launch_folder(),
    ):
        pass


def test_sockets_of_processes_that_were_killed_are_removed_and_no_others(tmp_path: Path) -> None:
    names = [f"{SOCKET_PREFIX}{kind}" for kind in ("dead", "new", "live")]
    sockets = [listen(tmp_path, name, 1)[0] for name in names]
    for each, is_dead in zip(sockets, (True, True, False), strict=True):
        if is_dead:
            each.close()
    for name in (names[0], names[2]):
        os.utime(tmp_path / name, (LONG_AGO, LONG_AGO))
    (tmp_path / f"{SOCKET_PREFIX}file").touch()
    os.utime(tmp_path / f"{SOCKET_PREFIX}file", (LONG_AGO, LONG_AGO))
    (tmp_path / "other").touch()
    remove_sockets(tmp_path, SOCKET_PREFIX)
    assert {path.name for path in tmp_path.iterdir()} == {*names[1:], f"{SOCKET_PREFIX}file", "other"}
    sockets[2].close()
