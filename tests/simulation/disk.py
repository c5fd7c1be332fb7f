"""The disks of simulated processes: real files below one directory, on a disk that can be full or slow.

What is durable is what the real code writes there. A coordinator that comes back may find its file as it was some
writes ago, or none, as after a restore from a backup or on another machine.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable
from pathlib import Path

from ps_protocol.framing import Buffer
from ps_server.coordinator.state_file import FILE
from ps_server.storage.disk import Disk, pieces
from tests.simulation.processes import Host
from tests.simulation.world import World


class SimulatedDisk(Disk):
    """The disk of one machine; its files are those of all, as on a network file system.

    full_until: when there is room again
    slow:       the mean seconds of a write
    """

    def __init__(self, world: World, directory: Path) -> None:
        self._world, self.directory = world, directory
        self.full_until, self.slow = 0.0, 0.0
        self._locked: dict[Path, Host] = {}
        self._earlier: list[bytes] = []  # what the coordinator's file has held

    def lock(self, path: Path, holder: bytes) -> Callable[[], None]:
        """Locks a file, until its process has ended or lets go of it."""
        task = self._world.current
        assert task is not None
        owner = self._locked.get(path)
        if owner is not None and owner.alive:
            raise BlockingIOError(errno.EAGAIN, owner.name)
        self._locked[path] = task.host

        def let_go() -> None:
            self._locked.pop(path, None)

        return let_go

    def write(self, path: Path, chunks: Iterable[Buffer], mode: int = 0o600) -> None:
        """Writes a file, in place of one that is there."""
        self._pass(path)
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "wb", buffering=0) as file:
            for piece in pieces(chunks):
                self._pass(path)
                file.write(piece)

    def rename(self, path: Path, new: Path) -> None:
        """Gives a file another name."""
        self._check_alive()
        if new.name == FILE:
            self._earlier.append(path.read_bytes())
        path.replace(new)

    def remove(self, path: Path) -> None:
        """Removes a file."""
        self._check_alive()
        super().remove(path)

    def remove_tree(self, path: Path) -> None:
        """Removes a directory."""
        self._check_alive()
        super().remove_tree(path)

    def _check_alive(self) -> None:
        if self._world.current is not None:
            self._world.current.host.check_alive()

    def _pass(self, path: Path) -> None:
        """Takes the time of a write, or raises what a full disk does."""
        self._check_alive()
        if self.slow and self._world.current is not None:
            self._world.let_pass(self._world.random.expovariate(1 / self.slow))
        if self.full_until > self._world.now:
            self._world.trace(f"the disk is full: {path.name} is not written")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    # -- what is done to the coordinator's file ----------------------------------------------------------------------

    def lose_state_file(self) -> None:
        """Removes the coordinator's file."""
        (self.directory / FILE).unlink(missing_ok=True)

    def bring_back_state_file(self, back: int) -> bool:
        """Puts the coordinator's file back as it was so many writes ago. Returns False if it is not so old."""
        if len(self._earlier) <= back:
            return False
        (self.directory / FILE).write_bytes(self._earlier[-1 - back])
        return True
