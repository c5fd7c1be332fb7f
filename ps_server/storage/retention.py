"""Selects the checkpoints of a job that are kept. Some build on the files of others."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from ps_protocol.errors import CheckpointDamaged
from ps_server.storage.manifest import Manifest

Needs = Callable[[str], frozenset[str] | None]


class KnownNeeds:
    """Caches, by job and name, the checkpoints that a checkpoint builds on. Each manifest is read only once."""

    def __init__(self, manifest: Callable[[str, str], Manifest]) -> None:
        self._manifest = manifest
        self._known: dict[tuple[str, str], frozenset[str]] = {}

    def of(self, job: str, name: str) -> frozenset[str] | None:
        """Returns the checkpoints that one builds on; None if its manifest cannot be read. Raises VersionMismatch."""
        if (job, name) not in self._known:
            try:
                self._known[job, name] = self._manifest(job, name).needs
            except CheckpointDamaged:
                return None
        return self._known[job, name]

    def forget(self, job: str, name: str) -> None:
        """Forgets a checkpoint that is removed."""
        self._known.pop((job, name), None)


def staying(complete: Sequence[str], keep: int, also: Collection[str | None], needs: Needs) -> set[str]:
    """Returns the checkpoints that are kept: the last `keep`, and those that they build on.

    If several are kept, so is the last one that has no file in common with the newest: one damaged file must not damage
    all. If the manifest of one of the last `keep` cannot be read, all are kept: the disk may only not have answered,
    and that checkpoint may build on any other.

    complete: all complete checkpoints, oldest first
    also:     further checkpoints to keep
    """
    last = complete[-keep:]
    if any(needs(name) is None for name in last):
        return set(complete)
    stays = {name for name in complete if name in last or name in also}
    stays |= {base for name in stays for base in needs(name) or ()}
    newest = {last[-1], *(needs(last[-1]) or ())} if complete and keep > 1 else set()
    for name in reversed(complete) if newest else ():
        files = needs(name)
        if files is not None and not newest & {name, *files}:
            return stays | {name, *files}
    return stays
