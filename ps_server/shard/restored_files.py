"""The files of a checkpoint that a shard must read to restore its part of a job."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ps_protocol.convert import job_spec_from_data
from ps_protocol.errors import CheckpointDamaged, InvalidRequest, JobMismatch
from ps_protocol.job import JobSpec, are_cut_alike, difference_of_uncut
from ps_protocol.layout import bucket_layout
from ps_protocol.optimizers import with_defaults
from ps_protocol.pieces import validate_pieces
from ps_server.core.other_cut import OtherCut
from ps_server.core.snapshot import BucketSnapshot, RestoreRequest, TableSnapshot, joined
from ps_server.shard.hosted_job import HostedJob
from ps_server.storage.changed_tensors import changed_tensors
from ps_server.storage.checkpoints import CheckpointStore, wanted
from ps_server.storage.manifest import Manifest


@dataclass(frozen=True)
class Before:
    """A checkpoint of the job with another cut of its parameters. cut: assembles this job's buckets from it"""

    manifest: Manifest
    spec: JobSpec
    cut: OtherCut


class RestoredFiles:
    """The files that a shard reads for a restore. Raises CheckpointDamaged; JobMismatch if the checkpoint is of another
    job.

    index: the shard's index
    files: the files, in the order in which they are read
    """

    def __init__(self, store: CheckpointStore, request: RestoreRequest, index: int) -> None:
        self._store, self._request = store, request
        self._before: Before | None = None
        layout = bucket_layout(request.spec.parameters, request.spec.bucket_bytes).buckets
        specs = [layout[index] for index in request.buckets]
        if request.own:  # on a disk of its own: the manifest is elsewhere, and is of the same cut
            self.files = wanted(request.own, specs)
            return
        manifest = store.manifest(request.spec.name, request.checkpoint)
        spec = _other_cut(manifest, request.spec)
        if spec is not None:
            # In the other modes pieces may be of different moments.
            cut = OtherCut(spec, request.spec, specs, refuses=spec.consistency.one_clock)
            self._before = Before(manifest, spec, cut)
            self.files = store.files(request.spec.name, manifest, self._before.cut.sources())
            return
        self.files = store.files(request.spec.name, manifest, specs, _with_rows(manifest, request, index))

    @property
    def bytes(self) -> int:
        """The bytes of all files to read."""
        return self._store.bytes_to_read(self._request.spec.name, self.files)

    def read(
        self, job: HostedJob, on_progress: Callable[[int], object]
    ) -> tuple[Mapping[int, BucketSnapshot], Mapping[int, TableSnapshot]]:
        """Reads the job's buckets, their weights into the job's memory, and its tables.

        on_progress: see `read_files`
        """
        name, before = job.name, self._before
        weights = {index: bucket.unit.weights.flat for index, bucket in job.buckets.items()}
        if before is not None:
            before.cut.use(weights)
            snapshots = self._store.read_files(name, self.files, on_progress, cut=before.cut)
            if any(bucket.unit.spec.frozen for bucket in job.buckets.values()):
                changed = changed_tensors(self._store, name, before.manifest, before.spec)
                for parameter, values in changed.items():
                    before.cut.take_changed(parameter, values)
            return snapshots, {}
        parts: dict[int, list[TableSnapshot]] = {index: [] for index in job.partition.tables}
        snapshots = self._store.read_files(name, self.files, on_progress, weights, parts)
        return snapshots, {
            index: joined(each, job.partition.row_checker.share) for index, each in parts.items() if each
        }


def _with_rows(manifest: Manifest, request: RestoreRequest, index: int) -> list[int]:
    """Returns the shards whose files have the rows of this shard's tables.

    That is this shard alone; or all shards of the checkpoint, if the number of shards has changed.
    """
    if not request.spec.tables:
        return []
    as_before = len(manifest.shards) == request.shards and index in manifest.shards
    return [index] if as_before else list(manifest.shards)


def _other_cut(manifest: Manifest, spec: JobSpec) -> JobSpec | None:
    """Returns the job of a checkpoint if its parameters are cut differently; None if they are cut alike."""
    before = job_spec_from_data(manifest.job)
    if are_cut_alike(before, spec):
        return None
    try:
        validate_pieces(before.parameters, before.group_size)
    except InvalidRequest as error:
        raise CheckpointDamaged(f"checkpoint {manifest.name}: {error}") from None
    differs = difference_of_uncut(with_defaults(before), with_defaults(spec))
    if differs is not None:
        raise JobMismatch(f"job {spec.name!r} differs from its checkpoint {manifest.name}: {differs}")
    return before
