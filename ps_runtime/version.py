"""Which version of this software, and of what it stands on, a process runs."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version


def version(distribution: str = "ps-torch") -> str:
    """Returns the version of an installed distribution; "0+unknown" for one that only lies in a folder of sources."""
    try:
        return installed_version(distribution)
    except PackageNotFoundError:
        return "0+unknown"
