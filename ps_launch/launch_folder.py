"""The folder of a launch for temporary files. A launcher that is killed leaves it; the next one on the host removes it.

A launcher locks a file in its folder, and the kernel unlocks that when the launcher ends, whatever ends it. So a folder
whose file can be locked belongs to nobody any more. Process ids would not tell: containers that share a folder for
temporary files have each their own.

Hosts may share the folder for temporary files, and some file systems keep locks to themselves on each host. So the file
says which kernel has the lock, and folders of other kernels stay, as do those from before this host was started.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import socket
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from ps_protocol.errors import InvalidRequest

PREFIX = "ps-worker-"
LOCK = ".ps-worker-launcher"
LEFT_SECONDS = 60.0  # a launcher locks its file microseconds after it has made it


KERNEL_BYTES = 256
_BOOT = Path("/proc/sys/kernel/random/boot_id")


def _kernel() -> bytes:
    """Returns what tells the kernel of this process from those of other hosts, and from itself before a start."""
    with contextlib.suppress(OSError):
        return _BOOT.read_bytes().strip()
    return socket.gethostname().encode()[:KERNEL_BYTES]


@contextlib.contextmanager
def launch_folder() -> Iterator[Path]:
    """A `with` block with a new folder, which is removed at its end. First removes the folders of this user's launchers
    that were killed. Raises InvalidRequest if no folder can be made.
    """
    with contextlib.ExitStack() as stack:
        try:
            remove_leftovers(Path(tempfile.gettempdir()))
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=PREFIX)))
            lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            stack.callback(os.close, lock)
            os.write(lock, _kernel())
        except OSError as error:
            raise InvalidRequest(f"there is no directory for temporary files ({error.strerror}); set TMPDIR") from None
        with contextlib.suppress(OSError):  # a file system without locks: then only this launcher removes the folder
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield folder


def remove_leftovers(directory: Path) -> None:
    """Removes the folders of launches of this user whose launchers are gone. All else in the directory stays."""
    for path in directory.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # another launcher holds the lock, or was faster
            status = path.lstat()
            if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
                continue
            lock = os.open(path / LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                is_old = time.time() - os.fstat(lock).st_mtime >= LEFT_SECONDS
                if is_old and os.read(lock, KERNEL_BYTES) == _kernel():
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(path)
            finally:
                os.close(lock)
