"""Locks a directory of checkpoints for one coordinator, and so for one cluster.

Only a coordinator names checkpoints and writes the state file; its shards write to the directories that it names. The
coordinator's lock therefore excludes other clusters. A shard with a disk of its own locks its directory there
(own_disk.py). The kernel releases the lock (flock) however the process ends, so its successor gets it at once. In an
object store the lock is a lease (lock_lease.py).
"""

from __future__ import annotations

import errno
import json
import logging
import os
import socket
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path

from ps_protocol.errors import InvalidRequest
from ps_server.storage.files import Files

log = logging.getLogger("ps_server")

FILE = ".lock"
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP}  # error codes of a file system without locks


def lock_directory(
    directory: Path, address: str, disk: Files, since: float, holder: str = "the coordinator"
) -> Callable[[], None]:
    """Locks a directory for this process. Returns the function that unlocks it. Raises InvalidRequest that names the
    holder.

    holder, address, since: this process, for the message of others; since in seconds since 1970

    If the file system has no locks, a warning says that a second cluster is not excluded.
    """
    began = datetime.fromtimestamp(since, timezone.utc).isoformat(" ", "seconds")
    process = {"holder": holder, "host": socket.gethostname(), "pid": os.getpid(), "address": address, "since": began}
    try:
        return disk.lock(directory / FILE, json.dumps(process).encode())
    except BlockingIOError as error:
        raise InvalidRequest(
            f"the checkpoint directory {directory} is in use by {_described(str(error.strerror))}: "
            "each cluster needs a directory of its own"
        ) from None
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise InvalidRequest(f"{directory / FILE} cannot be locked: {error.strerror}") from None
        log.warning(
            "%s cannot be locked (%s): nothing keeps a second cluster out of this directory",
            *(directory / FILE, error.strerror),
        )
        return lambda: None


def _described(holder: str) -> str:
    try:
        data = json.loads(holder)
        where = f" for {data['address']}" if data["address"] else ""
        who = str(data.get("holder", "the coordinator"))  # earlier releases write none
        return f"{who} with pid {int(data['pid'])} on {data['host']}{where}, since {data['since']}"
    except (ValueError, KeyError, TypeError, RecursionError):
        return "another process"  # it has just got the lock, and has not written its name yet
