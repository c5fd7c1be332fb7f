"""Versions of the protocol, and which of them understand each other.

1  as released first: a worker does not say which run of a job it belongs to
2  every job has a run, and every message of a worker or a coordinator names it

Servers are upgraded before workers, and all servers of a cluster together. A message without a version is of version 1.
"""

from __future__ import annotations

import re

from ps_protocol.errors import InvalidRequest, VersionMismatch

VERSION = 2
_RUN = re.compile("[0-9a-f]{16}")


def check_worker_version(version: int) -> None:
    """Raises VersionMismatch unless servers of this version understand a worker of that one."""
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
    """Raises VersionMismatch for a coordinator of version 1, which makes jobs without a run, and InvalidRequest for
    what is no run: a coordinator that comes later compares it with its own."""
    if not run:
        raise VersionMismatch(
            f"the shard speaks version {VERSION} of the protocol, and its coordinator makes a job without a run, as in "
            "version 1: all servers of a cluster need one version"
        )
    if not _RUN.fullmatch(run):
        raise InvalidRequest(f"a run is 16 hexadecimal digits in lower case, got {run[:80]!r}")


def check_server_version(version: int) -> None:
    """Raises VersionMismatch unless workers of this version understand a server of that one."""
    if (version or 1) < VERSION:
        raise VersionMismatch(
            f"the server speaks version {version or 1} of the protocol, and this worker needs version {VERSION}: "
            "upgrade the servers before the workers"
        )
