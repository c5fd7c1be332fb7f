"""The installed versions of this software and of its dependencies."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version


def version(distribution: str = "ps-torch") -> str:
    """Returns the version of an installed distribution; "0+unknown" if it is not installed, but run from
    its sources.
    """
    try:
        return installed_version(distribution)
    except PackageNotFoundError:
        return "0+unknown"
