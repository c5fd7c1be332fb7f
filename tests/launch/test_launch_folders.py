"""What a launcher that was killed leaves in the folder for temporary files, the next one removes; and nothing else."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from pathlib import Path

import psutil
import pytest

from ps_launch.launch_folder import LEFT_SECONDS, LOCK, PREFIX, launch_folder, remove_leftovers
from ps_protocol.errors import InvalidRequest
from ps_protocol.handover import SOCKET_PREFIX
from ps_runtime.local_sockets import listen
from ps_runtime.local_sockets import remove_leftovers as remove_sockets
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
    """Folders with other rights, files, links, a folder of a launcher that has just begun, and one without a lock."""
    kinds = {name: temporary / f"{PREFIX}{name}" for name in ("open", "file", "link", "new", "bare", "dead")}
    for name in ("open", "new", "bare", "dead"):
        kinds[name].mkdir(0o700)
    for name in ("open", "new", "dead"):
        (kinds[name] / LOCK).touch(0o600)
    for name in ("open", "dead"):
        age(kinds[name])
    kinds["open"].chmod(0o755)
    kinds["file"].touch()
    elsewhere = temporary / "elsewhere"
    elsewhere.mkdir(0o700)
    (elsewhere / LOCK).touch(0o600)
    age(elsewhere)
    kinds["link"].symlink_to(elsewhere)
    remove_leftovers(temporary)
    assert {name for name, path in kinds.items() if path.exists()} == {"open", "file", "link", "new", "bare"}
    assert (elsewhere / LOCK).exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="another user's folder can be made by root alone")
def test_another_users_folder_stays(temporary: Path) -> None:
    other = temporary / f"{PREFIX}other"
    other.mkdir(0o700)
    (other / LOCK).touch(0o600)
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
