"""The versions of the protocol, and their compatibility.

1  the first release: workers do not name the run of their job
2  every job has a run, and every message of a worker or a coordinator names it

Servers are upgraded before workers, and all servers of a cluster together. A message without a version is of version 1.
"""

from __future__ import annotations

import re

from ps_protocol.errors import InvalidRequest, VersionMismatch

VERSION = 2
_RUN = re.compile("[0-9a-f]{16}")


def check_worker_version(version: int) -> None:
    """Raises VersionMismatch unless servers of this version support workers of that version."""
    if version > VERSION:
        raise VersionMismatch(
            f"this server speaks versions 1 to {VERSION} of the protocol, and the worker speaks version {version}: "
            "upgrade the servers before the workers"
        )


def check_shard_version(version: int) -> None:
    """Raises VersionMismatch unless a shard has the version of this coordinator."""
    if (version or 1) != VERSION:
        raise VersionMismatch(
            f"the coordinator speaks version {VERSION} of the protocol, and the shard speaks version {version or 1}: "
            "all servers of a cluster need one version"
        )


def check_coordinator_run(run: str) -> None:
    """Raises VersionMismatch for a coordinator of version 1, whose jobs have no run, and InvalidRequest for an invalid
    run.

    A later coordinator compares the run with its own.
    """
    if not run:
        raise VersionMismatch(
            f"the shard speaks version {VERSION} of the protocol, and its coordinator makes a job without a run, as in "
            "version 1: all servers of a cluster need one version"
        )
    if not _RUN.fullmatch(run):
        raise InvalidRequest(f"a run is 16 hexadecimal digits in lower case, got {run[:80]!r}")


def check_server_version(version: int) -> None:
    """Raises VersionMismatch unless workers of this version support a server of that version."""
    if (version or 1) < VERSION:
        raise VersionMismatch(
            f"the server speaks version {version or 1} of the protocol, and this worker needs version {VERSION}: "
            "upgrade the servers before the workers"
        )
