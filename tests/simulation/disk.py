"""The disks of simulated processes: real files below one directory, on a disk that can be full or slow.

What is durable is what the real code writes there. A process that comes back may find its file as it was earlier, or
none, as after a restore from a backup or on another machine.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

from ps_server.coordinator.state_file import FILE
from tests.simulation.world import World


class Disk:
    """The disk of one machine; its files are those of all, as on a network file system."""

    def __init__(self, world: World, directory: Path) -> None:
        self._world, self.directory = world, directory
        self.full_until, self.slow = 0.0, 0.0
        self._earlier: list[bytes] = []  # what the coordinator's file has held

    def pass_write(self, path: Path) -> None:
        """Takes the time of a write, or raises what a full disk does."""
        task = self._world.current
        if task is not None:
            task.host.check_alive()
        if self.full_until > self._world.now:
            self._world.trace(f"{task.host.name if task else ''}: the disk is full: {path.name} is not written")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        if self.slow and task is not None:
            self._world.sleep(self._world.random.expovariate(1 / self.slow))
            if self.full_until > self._world.now:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    def wrote(self, path: Path, data: bytes) -> None:
        """Remembers what the coordinator's file holds."""
        if path.name == FILE:
            self._earlier.append(data)

    def lose_state_file(self) -> None:
        """Removes the coordinator's file."""
        (self.directory / FILE).unlink(missing_ok=True)

    def bring_back_state_file(self, back: int) -> bool:
        """Puts the coordinator's file back as it was so many writes ago. Returns False if it is not so old."""
        if len(self._earlier) <= back:
            return False
        (self.directory / FILE).write_bytes(self._earlier[-1 - back])
        return True


def on_disk(world: World, real: Any) -> Any:
    """Returns a function that writes as `real`, on the disk of the process that calls it; a path comes first."""

    def write(path: Path, *arguments: Any, **named: Any) -> Any:
        task = world.current
        disk = task.host.disk if task is not None else None
        if disk is not None:
            disk.pass_write(path)
        result = real(path, *arguments, **named)
        if disk is not None and arguments and isinstance(arguments[0], bytes):
            disk.wrote(path, arguments[0])
        return result

    return write
