"""What pyproject.toml asks for, as pip takes it: all but torch to be locked, or the oldest version of each.

    python -m tests.tools.requirements lock examples dev    # extras and groups, for `make lock`
    python -m tests.tools.requirements floors               # for `make test-floors`

torch is in no lock: which build of it fits, for CPUs or for a CUDA version, only the machine knows (TORCH in the
Makefile and in the Dockerfile). What torch itself needs on any machine is locked.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.dependency_groups import resolve_dependency_groups
from packaging.requirements import Requirement

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PROJECT = "ps-torch"
PYTHONS = ("3.10", "3.13")  # the first and the last that it runs on
BUILD = "setuptools>=77"  # [build-system] of pyproject.toml: the project is built with what is locked, too


def of(distribution: str, *extras: str) -> Iterator[Requirement]:
    """What an installed distribution needs, with some of its extras; those of its own that they name as well."""
    for text in metadata.requires(distribution) or ():
        requirement = Requirement(text)
        marker = requirement.marker
        environments = [{"extra": extra, "python_version": version} for extra in ("", *extras) for version in PYTHONS]
        if marker is not None and not any(map(marker.evaluate, environments)):
            continue
        if requirement.name == distribution:
            yield from of(distribution, *requirement.extras)
        else:
            yield requirement


def groups() -> dict[str, Any]:
    """The groups of dependencies, which only contributors install, as pyproject.toml has them."""
    project: dict[str, Any] = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    return dict(project["dependency-groups"])


def in_group(name: str) -> Iterator[Requirement]:
    """What a group asks for, and the groups and extras that it names."""
    for requirement in map(Requirement, resolve_dependency_groups(groups(), name)):
        if requirement.name == PROJECT:
            yield from of(PROJECT, *requirement.extras)
        else:
            yield requirement


def to_lock(*names: str) -> list[str]:
    """What `make lock` resolves: everything but torch, and what torch needs that is not a build for some device.

    names: of extras and groups
    """
    of_groups = [each for name in names if name in groups() for each in in_group(name)]
    asked = {_text(each) for each in (*of(PROJECT, *names), *of_groups) if each.name != "torch"}
    of_torch = {each.name for each in of("torch") if not each.name.startswith(("nvidia", "cuda", "triton"))}
    return sorted(asked | of_torch | {BUILD})


def _text(requirement: Requirement) -> str:
    """As pip takes it, for which Python it is included; what an extra needs is asked for without naming the extra."""
    text, _, marker = str(requirement).partition(";")
    return text.strip() if "extra" in marker else str(requirement)


def floors() -> list[str]:
    """The oldest version that is allowed of each dependency, pinned."""
    oldest = {
        each.name: specifier.version
        for each in of(PROJECT)
        for specifier in each.specifier
        if specifier.operator == ">="
    }
    return [f"{name}=={version}" for name, version in oldest.items()]


def main(words: list[str]) -> None:
    """Prints one requirement a line."""
    kind, *names = words
    print("\n".join(to_lock(*names) if kind == "lock" else floors()))


if __name__ == "__main__":
    main(sys.argv[1:])
