"""A bucket, or a table, as a checkpoint has it: a value that outlives the shard it was taken from.

A snapshot is taken between two updates, so nothing is half applied in it. What was staged and not yet applied at that
moment is not in it: its clocks are those of applied updates, and workers that continue from it push again what came
after. Buckets are the same on any number of shards, so a snapshot is restored on the shard that holds its bucket then.
A table's rows are divided anew where the number of shards is another one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from ps_protocol.hyper_parameters import HyperParameters
from ps_protocol.job import JobSpec
from ps_protocol.row_ids import shards_of
from ps_protocol.stages import StageSpec
from ps_server.core.data_commits import Committed, in_all
from ps_server.core.placement import Place
from ps_tables.increments import merged

# By the slice's position in its bucket, the optimizer's state of that slice: name -> tensor.
OptimizerState = Mapping[int, Mapping[str, torch.Tensor]]


@dataclass(frozen=True)
class BucketSnapshot:
    """One bucket at one version.

    version: updates applied
    clocks:  by rank, the highest clock whose update is in the weights, of the living and of the dead: what makes a push
             exactly once
    weights: [numel of the bucket] in the bucket's dtype
    state:   of the optimizer, by slice; empty for a frozen bucket
    groups:  the hyper-parameters of the last update, by parameter group
    committed: the leased data that is in the weights, by loader
    sent:    what workers have, where weights travel in blocks: [numel] float32; None: what they have are the weights
    pushed:  by rank, the last clock that it has pushed, where `clocks` has one that it has joined at
    stage:   what trains it; None: what its job is registered with
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
    """A table's rows on one shard, or on several, at one version; or what changed in it after another one.

    tensors: as Table.snapshot returns them, or, for changes, as ps_tables/increments.py says
    values:  the hyper-parameters of the last update
    seed:    of rows that are not trained; None: that of the job
    the others as in BucketSnapshot
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
    """How far the buckets of a shard or a job are: the lowest and highest version, and by rank the lowest clock."""

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
class Part:
    """One file of a checkpoint.

    disk: the name of the shard's own disk that has it; empty: it is where the manifest is
    """

    file: str
    bytes: int
    sha256: str
    disk: str = ""


@dataclass(frozen=True)
class StoredPart:
    """A file of a checkpoint, with the checkpoint's name."""

    checkpoint: str
    part: Part


@dataclass(frozen=True)
class ShardSnapshot:
    """A shard's part on disk: the file, how far its buckets are, and seconds for which copying held up training.

    changes_only: of a table it has only what changed since the part that it was to build on
    """

    part: Part
    extent: VersionRange
    held_up: float
    changes_only: bool = False


@dataclass(frozen=True)
class RestoreProgress:
    """How far a shard's restore is: bytes read, of so many (0: not known yet), and how far the buckets are that it
    holds once it is complete; None before."""

    done: int
    total: int
    extent: VersionRange | None = None


def union(ranges: Iterable[VersionRange]) -> VersionRange:
    """Returns the smallest range that has all of these."""
    total, *others = [*ranges] or [VersionRange()]
    for other in others:
        total = total.union(other)
    return total


def chained(parts: list[TableSnapshot]) -> TableSnapshot:
    """Returns the last of some snapshots of one shard with all its rows: the first has all, the others what changed
    after the one before. Raises ValueError or KeyError where they do not fit together.

    Takes the parts out of the list, and gives back the memory of each as soon as it can.
    """
    last = replace(parts[-1], tensors={})
    chain = [dict(part.tensors) for part in parts]
    parts.clear()
    return replace(last, tensors=merged(chain))


def joined(parts: Sequence[TableSnapshot], place: Place) -> TableSnapshot:
    """Returns the rows of some shards that belong to this one, of which there may be another number now.

    Where the parts are of different versions (ssp, async), rows keep the time since they were trained last. What no
    part has had of leased data is not committed. A step that one part has had counts as pushed: its rows are not to
    come twice.
    """
    newest = max(int(part.tensors["version"]) for part in parts)
    kept: dict[str, list[torch.Tensor]] = {}
    for part in parts:
        age = newest - int(part.tensors["version"])
        for prefix in ("", "waiting."):
            ids = part.tensors.get(f"{prefix}ids")
            here = None if ids is None else torch.from_numpy(shards_of(ids.numpy(), place.shards) == place.shard)
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


# -- what a coordinator asks of a shard --------------------------------------------------------------------------------


@dataclass(frozen=True)
class SnapshotRequest:
    """A shard's part of a checkpoint that a coordinator asks for.

    clock:   the snapshot has so many updates of each bucket; None: those that are there
    refusal: for so many seconds the shard takes no push that would not be in it; 0: it takes all
    last_incarnation: a worker of a later one ends the refusal
    kept:    the checkpoints that stay: a shard with a disk of its own removes its parts of the others before this
    built_on: the SHA-256 of the shard's part of the last checkpoint, which this one may build on; empty: it may not
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
    """A job that a shard is to continue as of a checkpoint: with some of its buckets, and the workers that it fences.

    own:    the file that has the buckets, the last one, and those that it builds on, oldest first, on a disk of this
            shard's own; none: as the manifest says, which all share
    shards: how many have a part of the job's tables
    """

    spec: JobSpec
    buckets: tuple[int, ...]
    checkpoint: str
    last_incarnation: int
    run: str = ""
    own: tuple[StoredPart, ...] = ()
    shards: int = 1
