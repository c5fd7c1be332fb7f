"""What pyproject.toml asks for, as pip takes it: all but torch to be locked, or the oldest version of each.

    python -m tests.tools.requirements lock examples dev    # for `make lock`
    python -m tests.tools.requirements floors           # for `make test-floors`

torch is in no lock: which build of it fits, for CPUs or for a CUDA version, only the machine knows (TORCH in the
Makefile and in the Dockerfile). What torch itself needs on any machine is locked.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import metadata

from packaging.requirements import Requirement

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


def to_lock(*extras: str) -> list[str]:
    """What `make lock` resolves: everything but torch, and what torch needs that is not a build for some device."""
    asked = {_text(each) for each in of(PROJECT, *extras) if each.name != "torch"}
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
    kind, *extras = words
    print("\n".join(to_lock(*extras) if kind == "lock" else floors()))


if __name__ == "__main__":
    main(sys.argv[1:])
