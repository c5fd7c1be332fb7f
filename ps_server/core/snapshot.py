"""Snapshots of buckets and tables, as checkpoints hold them: values that outlive the shard they were taken from.

A snapshot is taken between two updates, so nothing is half applied in it. Contributions that were staged and not yet
applied are not in it. Its clocks are those of applied updates; workers that continue from it push all later steps
again. Buckets are the same on any number of shards, so a snapshot is restored on the shard that holds its bucket then.
A table's rows are divided again if the number of shards has changed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from ps_protocol.hyper_parameters import HyperParameters
from ps_protocol.job import JobSpec
from ps_protocol.row_ids import shards_of
from ps_protocol.stage_spec import StageSpec
from ps_server.core.data_commits import Committed, in_all
from ps_server.core.placement import TableShare
from ps_tables.increments import merged

# By the slice's position in its bucket, the optimizer's state of that slice: name -> tensor.
OptimizerState = Mapping[int, Mapping[str, torch.Tensor]]


@dataclass(frozen=True)
class BucketSnapshot:
    """One bucket at one version.

    version: the number of updates applied
    clocks:  by rank, also of workers that have left, the highest clock whose update is in the weights. A push up to
             this clock is a repeat
    weights: [numel of the bucket] in the bucket's dtype
    state:   the optimizer's state, by slice; empty for a frozen bucket
    groups:  the hyper-parameters of the last update, by parameter group
    committed: the leased data in the weights, by loader
    sent:    the workers' version of the weights, if these travel in blocks: [numel] float32; None: the weights
             themselves
    pushed:  by rank, the last clock that it has pushed, where `clocks` has the clock of its join instead
    stage:   the bucket's stage; None: the one with which its job is registered
    """

    index: int
    version: int
    clocks: Mapping[int, int]
    weights: torch.Tensor
    state: OptimizerState = field(default_factory=dict)
    groups: Mapping[int, HyperParameters] = field(default_factory=dict)
    committed: Committed = field(default_factory=dict)
    sent: torch.Tensor | None = None
    pushed: Mapping[int, int] = field(default_factory=dict)
    stage: StageSpec | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors."""
        states = sum(tensor.nbytes for state in self.state.values() for tensor in state.values())
        return self.weights.nbytes + states + (0 if self.sent is None else self.sent.nbytes)


@dataclass(frozen=True)
class TableSnapshot:
    """A table's rows on one shard, or on several, at one version; or only those that changed after an earlier version.

    tensors: as Table.snapshot returns them; for changes only, as ps_tables/increments.py describes
    values:  the hyper-parameters of the last update
    seed:    the seed of rows that are not trained; None: that of the job
    The other fields are as in BucketSnapshot.
    """

    index: int
    version: int
    clocks: Mapping[int, int]
    tensors: Mapping[str, torch.Tensor]
    values: HyperParameters = field(default_factory=dict)
    committed: Committed = field(default_factory=dict)
    seed: int | None = None
    pushed: Mapping[int, int] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    @property
    def changes_only(self) -> bool:
        """Whether the snapshot has only the rows that changed."""
        return "since" in self.tensors


Snapshot = BucketSnapshot | TableSnapshot


@dataclass(frozen=True)
class VersionRange:
    """The extent of the buckets of a shard or a job: the lowest and highest version, and by rank the lowest clock."""

    version_min: int = 0
    version_max: int = 0
    clocks: Mapping[int, int] = field(default_factory=dict)

    def union(self, other: VersionRange) -> VersionRange:
        """Returns the range of both together."""
        ranks = self.clocks.keys() | other.clocks.keys()
        clocks = {
            rank: min(extent.clocks[rank] for extent in (self, other) if rank in extent.clocks)
            for rank in sorted(ranks)
        }
        low, high = min(self.version_min, other.version_min), max(self.version_max, other.version_max)
        return VersionRange(low, high, clocks)


@dataclass(frozen=True)
class CheckpointFile:
    """One file of a checkpoint.

    disk: the name of the shard's own disk that has the file; empty: the file lies beside the manifest
    """

    file: str
    bytes: int
    sha256: str
    disk: str = ""


@dataclass(frozen=True)
class StoredFile:
    """A file of a checkpoint, with the checkpoint's name."""

    checkpoint: str
    part: CheckpointFile


@dataclass(frozen=True)
class ShardSnapshot:
    """The file of one shard in a checkpoint on disk.

    part:     the file of this shard
    extent:   how far the shard's buckets are in it
    held_up:  seconds for which copying held up training
    changes_only: of tables the file has only the rows that changed since the file on which it builds
    """

    part: CheckpointFile
    extent: VersionRange
    held_up: float
    changes_only: bool = False


@dataclass(frozen=True)
class RestoreProgress:
    """The progress of a shard's restore.

    done, total: the bytes that were read, and all bytes to read; a total of 0 is not known yet
    extent:      the versions and clocks of the restored buckets; None if the restore is not complete
    """

    done: int
    total: int
    extent: VersionRange | None = None


def union(ranges: Iterable[VersionRange]) -> VersionRange:
    """Returns the smallest range that includes all these ranges."""
    total, *others = [*ranges] or [VersionRange()]
    for other in others:
        total = total.union(other)
    return total


def chained(parts: list[TableSnapshot]) -> TableSnapshot:
    """Returns the last of a shard's snapshots with all its rows.

    The first snapshot has all rows, each other one the rows that changed since the one before. Raises ValueError or
    KeyError if they do not fit together.

    Empties the list, so that the memory of each part is freed as soon as possible.
    """
    last = replace(parts[-1], tensors={})
    chain = [dict(part.tensors) for part in parts]
    parts.clear()
    return replace(last, tensors=merged(chain))


def joined(parts: Sequence[TableSnapshot], share: TableShare) -> TableSnapshot:
    """Returns the rows that belong to this shard, from the snapshots of all former shards. Their number may differ.

    If the parts are of different versions (ssp, async), each row keeps the time since it was last trained. Leased data
    counts as committed only if all parts have had it. A step counts as pushed if one part has had it, so that its rows
    are not pushed twice.
    """
    newest = max(int(part.tensors["version"]) for part in parts)
    kept: dict[str, list[torch.Tensor]] = {}
    for part in parts:
        age = newest - int(part.tensors["version"])
        for prefix in ("", "waiting."):
            ids = part.tensors.get(f"{prefix}ids")
            here = None if ids is None else torch.from_numpy(shards_of(ids.numpy(), share.shards) == share.shard)
            for name, tensor in part.tensors.items():
                if here is not None and name != "version" and name.startswith("waiting.") == bool(prefix):
                    rows = tensor if bool(here.all()) else tensor[here]
                    kept.setdefault(name, []).append(rows + age if name == f"{prefix}last" and age else rows)
    tensors = {name: each[0] if len(each) == 1 else torch.cat(each) for name, each in kept.items()}
    tensors["version"] = torch.tensor([newest])
    ranks = sorted({rank for part in parts for rank in part.clocks})
    return TableSnapshot(
        parts[0].index,
        max(part.version for part in parts),
        {rank: min(part.clocks.get(rank, 0) for part in parts) for rank in ranks},
        tensors,
        parts[0].values,
        in_all([part.committed for part in parts]),
        parts[0].seed,
        {rank: max(part.pushed.get(rank, part.clocks.get(rank, 0)) for part in parts) for rank in ranks},
    )


# -- requests of a coordinator to a shard
# --------------------------------------------------------------------------------


@dataclass(frozen=True)
class SnapshotRequest:
    """A coordinator's request for a shard's part of a checkpoint.

    clock:    the version of each bucket in the snapshot; None: its present version
    refusal:  seconds for which the shard refuses pushes that would come too late for the snapshot; 0: none
    last_incarnation: a worker with a higher one ends the refusal
    kept:     the checkpoints to keep: a shard with its own disk first removes its files of all others
    built_on: the SHA-256 of the shard's file in the last checkpoint, on which this one may build; empty: it must not
    """

    job: str
    checkpoint: str
    clock: int | None
    run: str = ""
    refusal: float = 0.0
    last_incarnation: int = 0
    kept: tuple[str, ...] = ()
    built_on: str = ""


@dataclass(frozen=True)
class RestoreRequest:
    """A request to a shard to continue a job from a checkpoint, with some of its buckets.

    last_incarnation: workers up to this one are fenced
    own:    the shard's files, if they are on a disk of its own: those on which the last one builds, oldest first, then
            the last one. Empty: the files that the manifest names, in the common directory
    shards: the number of shards that share the job's tables
    """

    spec: JobSpec
    buckets: tuple[int, ...]
    checkpoint: str
    last_incarnation: int
    run: str = ""
    own: tuple[StoredFile, ...] = ()
    shards: int = 1
