"""The disks of simulated machines: files in memory, of which a power failure leaves what was flushed.

The real code writes here, by the real Disk; what stands here are the few calls of the operating system under it. They
do what POSIX says, and no more: what was written is there after a power failure if its file was flushed, and a name if
its directory was. What was not may be there, or in part. Of the changes in one directory the first ones stay.
"""

from __future__ import annotations

import errno
import io
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

from ps_server.storage.disk import Disk
from tests.simulation.processes import Host
from tests.simulation.world import World

WRITTEN_BACK_SECONDS = 5.0  # after which the system has written everything by itself
DATE = 1.7e9  # when the world began, in seconds since 1970, less its clock then


class File:
    """What is in a file, and when it was written last."""

    def __init__(self, content: bytes = b"", written: float = 0.0) -> None:
        self.content, self.written = bytearray(content), written


Folder = dict[str, File | None]  # by name; None: another folder
Image = dict[str, Folder]  # all folders, by path


class Storage:
    """The files below one directory, which all machines share as on a network file system."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.folders: Image = {str(root): {}}

    def image(self) -> Image:
        """Returns all that is there now: what a snapshot of the file system, or a backup of it at rest, has."""
        return {
            path: {name: file and File(file.content, file.written) for name, file in folder.items()}
            for path, folder in self.folders.items()
        }

    def folder(self, path: Path) -> Folder:
        """Returns a folder. Raises FileNotFoundError where there is none."""
        try:
            return self.folders[str(path)]
        except KeyError:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path)) from None

    def file(self, path: Path) -> File:
        """Returns a file. Raises FileNotFoundError or IsADirectoryError where there is none."""
        file = self.folder(path.parent).get(path.name, ...)
        if isinstance(file, File):
            return file
        number = errno.EISDIR if file is None else errno.ENOENT
        raise OSError(number, os.strerror(number), str(path))

    def drop(self, path: str) -> None:
        """Removes a folder with all below it."""
        for below in [other for other in self.folders if other == path or other.startswith(f"{path}/")]:
            del self.folders[below]


@dataclass(frozen=True)
class Change:
    """A name that a machine has made, changed or removed in a folder, and not flushed. at: when; undo: takes it back"""

    folder: str
    at: float
    undo: Callable[[], object]


class SimulatedDisk(Disk):
    """The files as one machine reads and writes them.

    full_until: when there is room again
    slow:       the mean seconds of a write
    on_rename:  is called with a name that a file has got
    """

    def __init__(self, world: World, storage: Storage) -> None:
        self._world, self.storage = world, storage
        self.full_until, self.slow = 0.0, 0.0
        self.on_rename: Callable[[Path], object] = lambda path: None
        self._locked: dict[Path, Host] = {}
        self._terms: dict[Host, int] = {}  # of each process that has locked a file here: its lease's number
        self._found_out = 0.0
        self._changes: list[Change] = []  # of names, that were not flushed
        self._unflushed: dict[File, float] = {}

    @property
    def is_disturbed(self) -> bool:
        """Whether it is slow or full now."""
        return bool(self.slow) or self.full_until > self._world.now

    # -- looks -------------------------------------------------------------------------------------------------------

    def kind(self, path: Path) -> str | None:
        """Returns what is at a path."""
        if str(path) in self.storage.folders or path in self.storage.root.parents:
            return "a directory"
        folder = self.storage.folders.get(str(path.parent), {})
        return "a file" if path.name in folder else None

    def is_writable(self, path: Path) -> bool:
        """Whether files can be made in a directory."""
        return str(path) in self.storage.folders

    def directories(self, path: Path) -> list[str]:
        """Returns the names of the directories in a directory, sorted."""
        folder = self.storage.folders.get(str(path), {})
        return sorted(name for name, file in folder.items() if file is None)

    def is_empty(self, path: Path) -> bool:
        """Whether nothing is in a directory, or it was removed."""
        return not self.storage.folders.get(str(path))

    def size(self, path: Path) -> int:
        """Returns the bytes of a file."""
        return len(self.storage.file(path).content)

    def modified(self, path: Path) -> float:
        """Returns when a file was written last."""
        return DATE + self.storage.file(path).written

    def open(self, path: Path) -> BinaryIO:
        """Opens a file to read it."""
        return io.BytesIO(self.storage.file(path).content)

    # -- changes -----------------------------------------------------------------------------------------------------

    def take_over(self, known: float) -> None:
        """Has the next process that locks a file get it, whoever has it. known: when the holder finds out, unless it
        writes before"""
        self._locked.clear()
        self._found_out = known

    def term(self) -> int:
        """Returns the number of the lease, which rises with each holder."""
        task = self._world.current
        return self._terms.get(task.host, 0) if task is not None else 0

    def taken_over(self) -> str:
        """Returns who has taken the lock over, as far as its holder knows."""
        return "another coordinator has the lease" if self._is_deposed() and self._world.now >= self._found_out else ""

    def _is_deposed(self) -> bool:
        return 0 < self.term() < max(self._terms.values(), default=0)

    def lock(self, path: Path, holder: bytes) -> Callable[[], None]:
        """Locks a file, until its process has ended or lets go of it."""
        task = self._world.current
        assert task is not None
        owner = self._locked.get(path)
        if owner is not None and owner.alive:
            raise BlockingIOError(errno.EAGAIN, owner.name)
        self._locked[path] = task.host
        self._terms[task.host] = max(self._terms.values(), default=0) + 1

        def let_go() -> None:
            self._locked.pop(path, None)

        return let_go

    def remove(self, path: Path) -> None:
        """Removes a file."""
        self._check_alive()
        file, folder = self.storage.file(path), self.storage.folder(path.parent)
        del folder[path.name]
        self._changed(path.parent, lambda: folder.setdefault(path.name, file))

    def remove_tree(self, path: Path) -> None:
        """Removes a directory."""
        self._check_alive()
        storage = self.storage
        if str(path) not in storage.folders:
            return
        folder, above = storage.folder(path), storage.folder(path.parent)
        for name in list(folder):
            self.remove(path / name)
        storage.drop(str(path))
        above.pop(path.name, None)

        def undo() -> None:
            above[path.name] = None
            storage.folders.setdefault(str(path), folder)

        self._changed(path.parent, undo)

    def _make_directory(self, path: Path, exist_ok: bool) -> None:
        if self.kind(path) is not None and not (exist_ok and self.kind(path) == "a directory"):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
        if self.kind(path) is None:
            self._pass(path)
            self.storage.folder(path.parent)[path.name] = None
            self.storage.folders[str(path)] = {}

            def undo() -> None:
                self.storage.drop(str(path))
                self.storage.folders.get(str(path.parent), {}).pop(path.name, None)

            self._changed(path.parent, undo)

    def _create(self, path: Path) -> BinaryIO:
        self._pass(path)
        folder, file = self.storage.folder(path.parent), File(written=self._world.now)
        before = folder.get(path.name)
        folder[path.name] = file

        def undo() -> None:
            if folder.get(path.name) is file:
                del folder[path.name]

        if before is None:
            self._changed(path.parent, undo)
        return cast(BinaryIO, Writer(self, path, file))

    def append(self, path: Path, file: File, piece: memoryview) -> int:
        """Writes what a file goes on with; it takes the time of a write."""
        self._unflushed[file] = self._world.now
        self._pass(path)
        file.content += piece
        file.written = self._world.now
        return len(piece)

    def _flush(self, file: BinaryIO) -> None:
        self._check_alive()
        self._unflushed.pop(cast(Any, file).file, None)

    def _rename(self, path: Path, new: Path) -> None:
        self._check_alive()
        folder, file = self.storage.folder(path.parent), self.storage.file(path)
        before = folder.get(new.name)
        del folder[path.name]
        folder[new.name] = file

        def undo() -> None:
            if folder.get(new.name) is file:
                folder[path.name] = file
                if before is None:
                    del folder[new.name]
                else:
                    folder[new.name] = before

        self._changed(path.parent, undo)
        self.on_rename(new)

    def _flush_directory(self, path: Path) -> None:
        self._check_alive()
        flushed = str(path)
        self._changes = [change for change in self._changes if change.folder != flushed]

    def _changed(self, folder: Path, undo: Callable[[], object]) -> None:
        self._changes.append(Change(str(folder), self._world.now, undo))

    def _check_alive(self) -> None:
        if self._world.current is not None:
            self._world.current.host.check_alive()
        if self._is_deposed():
            self._found_out = min(self._found_out, self._world.now)
            raise OSError(errno.ESTALE, "another coordinator has the lease")

    def _pass(self, path: Path) -> None:
        """Takes the time of a write, or raises what a full disk does."""
        self._check_alive()
        if self.slow and self._world.current is not None:
            self._world.let_pass(self._world.random.expovariate(1 / self.slow))
        if self.full_until > self._world.now:
            self._world.trace(f"the disk is full: {path.name} is not written")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    # -- what happens to it ------------------------------------------------------------------------------------------

    def lose_power(self) -> None:
        """Forgets what was not flushed, or a part of it. The machine's processes are dead."""
        draw, since = self._world.random, self._world.now - WRITTEN_BACK_SECONDS
        for file, at in self._unflushed.items():
            if at > since:
                self._spoil(file)
        changes: dict[str, list[Change]] = {}
        for change in self._changes:
            if change.at > since:
                changes.setdefault(change.folder, []).append(change)
        for folder, in_order in changes.items():
            kept = draw.randint(0, len(in_order))
            for change in reversed(in_order[kept:]):
                change.undo()
            self._world.trace(f"{len(in_order) - kept} of {len(in_order)} names are lost in {folder}")
        self.forget()

    def _spoil(self, file: File) -> None:
        """Leaves of a file what a power failure does: a part, or the length alone."""
        draw = self._world.random
        kept = draw.randint(0, len(file.content))
        if draw.random() < 0.5:
            del file.content[kept:]
        else:
            file.content[kept:] = bytes(len(file.content) - kept)

    def forget(self) -> None:
        """Takes what is there for flushed: it was written back, or another image is there."""
        self._changes.clear()
        self._unflushed.clear()


class Writer:
    """A file that is being written: what Disk needs of a BinaryIO."""

    def __init__(self, disk: SimulatedDisk, path: Path, file: File) -> None:
        self._disk, self._path, self.file = disk, path, file

    def write(self, piece: memoryview) -> int:
        """Writes a piece."""
        return self._disk.append(self._path, self.file, piece)

    def close(self) -> None:
        """Does nothing: what is not flushed stays in memory."""
