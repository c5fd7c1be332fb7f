"""The buckets and tables of a shard in a file of tensors: written from snapshots, and read into snapshots that are
checked."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from ps_protocol.hyper_parameters import HyperParameters
from ps_protocol.layout import BucketSpec
from ps_protocol.tensors import TORCH_DTYPES
from ps_server.core.data_commits import Committed
from ps_server.core.snapshot import BucketSnapshot, Snapshot, TableSnapshot
from ps_server.storage.manifest import WITHOUT_BASES
from ps_server.storage.tensor_file import TensorEntry, TensorReader

_STATE_NAME = re.compile(r"[a-z_]{1,64}")
# In the names of a table's tensors: of all its rows, or of those that changed. An earlier version knows no changes, and
# must not take them for all.
_ROWS, _CHANGES = "rows", "changes"
_SENT = "sent"  # in the name of what workers have of a bucket, where that is not its weights


def snapshot_tensors(snapshots: Sequence[Snapshot]) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Returns what a safetensors file holds of snapshots: tensors by name, and the rest as one JSON text."""
    tensors: dict[str, torch.Tensor] = {}
    buckets: dict[str, Any] = {}
    for bucket in snapshots:
        described = buckets[str(bucket.index)] = {
            "version": bucket.version,
            "clocks": {str(rank): clock for rank, clock in bucket.clocks.items()},
            "data": {str(loader): [number, spans] for loader, (number, spans) in bucket.committed.items()},
        }
        if isinstance(bucket, TableSnapshot):
            kind = _CHANGES if bucket.changes_only else _ROWS
            tensors |= {f"{bucket.index}/{kind}/{name}": tensor for name, tensor in bucket.tensors.items()}
            described["values"] = dict(bucket.values)
            described |= {} if bucket.seed is None else {"seed": bucket.seed}
            continue
        described["groups"] = {str(group): dict(values) for group, values in bucket.groups.items()}
        tensors[f"{bucket.index}/weights"] = bucket.weights
        tensors |= {} if bucket.sent is None else {f"{bucket.index}/{_SENT}": bucket.sent}
        for position, state in bucket.state.items():
            tensors |= {f"{bucket.index}/{position}/{name}": tensor for name, tensor in state.items()}
    return tensors, {"format": str(WITHOUT_BASES), "buckets": json.dumps(buckets)}


def read_snapshots(
    reader: TensorReader, buckets: Sequence[BucketSpec], to: Mapping[int, torch.Tensor], wanted_tables: Collection[int]
) -> tuple[dict[int, BucketSnapshot], dict[int, TableSnapshot]]:
    """Returns the snapshots of buckets, and of tables, in a file.

    Raises ValueError saying what was expected where it holds other buckets.
    to: by bucket, where the weights are read to
    """
    described, wanted = json.loads(reader.metadata["buckets"]), {bucket.index: bucket for bucket in buckets}
    weights: dict[int, torch.Tensor] = {}
    sent: dict[int, torch.Tensor] = {}
    states: dict[int, dict[int, dict[str, torch.Tensor]]] = {index: {} for index in wanted}
    tables: dict[int, dict[str, torch.Tensor]] = {index: {} for index in wanted_tables if str(index) in described}

    def place(entry: TensorEntry) -> torch.Tensor | None:
        index, *rest = entry.name.split("/")
        if int(index) in tables and rest[0] in (_ROWS, _CHANGES):
            return entry.empty()
        bucket = wanted.get(int(index))
        if bucket is None:
            return None
        _check_entry(entry, bucket)
        return to[bucket.index] if rest == ["weights"] and bucket.index in to else entry.empty()

    for entry, tensor in reader.tensors(place):
        index, *rest = entry.name.split("/")
        if rest[0] in (_ROWS, _CHANGES):
            tables[int(index)][rest[1]] = tensor
        elif rest == ["weights"]:
            weights[int(index)] = tensor
        elif rest == [_SENT]:
            sent[int(index)] = tensor
        else:
            states[int(index)].setdefault(int(rest[0]), {})[rest[1]] = tensor
    return (
        {
            index: _snapshot(index, described[str(index)], weights[index], state, sent.get(index))
            for index, state in states.items()
        },
        {table: _table(table, described[str(table)], read) for table, read in tables.items()},
    )


def _check_entry(entry: TensorEntry, bucket: BucketSpec) -> None:
    """Raises ValueError for a tensor that a bucket cannot have, before memory is taken for it."""
    _, *rest = entry.name.split("/")
    if rest in (["weights"], [_SENT]):
        if entry.dtype != TORCH_DTYPES[bucket.dtype] or entry.shape != (bucket.numel,):
            present = f"{entry.shape} {entry.dtype}"
            raise ValueError(f"bucket {bucket.index}: expected {bucket.numel} x {bucket.dtype}, found {present}")
        return
    position, name = int(rest[0]), rest[1]
    if not _STATE_NAME.fullmatch(name) or not 0 <= position < len(bucket.slices):
        raise ValueError(f"bucket {bucket.index} has no optimizer state {'/'.join(rest)[:80]!r}")
    if not entry.dtype.is_floating_point or entry.shape not in ((), (1,), (bucket.slices[position].length,)):
        raise ValueError(f"{entry.name}: shape {entry.shape} and type {entry.dtype} fit no optimizer state")


def _snapshot(
    index: int,
    described: Mapping[str, Any],
    weights: torch.Tensor,
    state: Mapping[int, Mapping[str, torch.Tensor]],
    sent: torch.Tensor | None,
) -> BucketSnapshot:
    version, clocks = _reached(index, described)
    groups = {int(group): _hyper_parameters(values) for group, values in described["groups"].items()}
    return BucketSnapshot(index, version, clocks, weights, state, groups, _committed(described.get("data", {})), sent)


def _table(index: int, described: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> TableSnapshot:
    version, clocks = _reached(index, described)
    committed, seed = _committed(described.get("data", {})), described.get("seed")
    if seed is not None and not (type(seed) is int and 0 <= seed < 2**64):
        raise ValueError(f"table {index}: a seed is a number from 0 to 2^64 - 1, got {str(seed)[:80]}")
    return TableSnapshot(index, version, clocks, tensors, _hyper_parameters(described["values"]), committed, seed)


def _reached(index: int, described: Mapping[str, Any]) -> tuple[int, dict[int, int]]:
    """Returns the version and the clocks of a bucket or a table."""
    version, clocks = described["version"], {int(rank): clock for rank, clock in described["clocks"].items()}
    if any(type(number) is not int or number < 0 for number in (version, *clocks, *clocks.values())):
        raise ValueError(f"bucket {index}: versions and clocks are numbers from 0")
    return version, clocks


def _committed(described: Mapping[str, Any]) -> Committed:
    """Returns the data that a bucket has had. Raises ValueError for what is none."""
    committed = {
        int(loader): (number, [(start, stop) for start, stop in spans]) for loader, (number, spans) in described.items()
    }
    for number, spans in committed.values():
        numbers = [number, *(end for span in spans for end in span)]
        if any(type(end) is not int or end < 0 for end in numbers) or any(start >= stop for start, stop in spans):
            raise ValueError("passes and positions are numbers from 0, and a range ends after it starts")
    return committed


def _hyper_parameters(values: Mapping[str, Any]) -> HyperParameters:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
