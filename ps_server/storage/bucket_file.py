"""The buckets and tables of a shard in a file of tensors. It is written from snapshots, and read into snapshots that
are checked.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from ps_protocol.errors import InvalidRequest
from ps_protocol.hyper_parameters import HyperParameters
from ps_protocol.layout import BucketSpec
from ps_protocol.stage_spec import StageSpec
from ps_protocol.tensors import TORCH_DTYPES
from ps_server.core.data_commits import Committed
from ps_server.core.other_cut import OtherCut
from ps_server.core.snapshot import BucketSnapshot, Snapshot, TableSnapshot
from ps_server.core.validation import check_stage
from ps_server.storage.manifest import WITHOUT_BASES
from ps_server.storage.tensor_file import TensorEntry, TensorReader

_STATE_NAME = re.compile(r"[a-z_]{1,64}")
# In the names of a table's tensors, if a file has all rows of the table, or only those that changed. Earlier releases
# cannot read changes. The other name keeps them from taking changes for all rows.
_ROWS, _CHANGES = "rows", "changes"
_SENT = "sent"  # in the name of the workers' copy of a bucket, if it differs from the weights
# In the name of a bucket's weights; the second one if another optimizer trains the bucket than the one with which its
# job is registered. Earlier versions, which would go on with the registered optimizer, do not know that name.
_WEIGHTS, _STAGED_WEIGHTS = "weights", "weights-in-stage"


def snapshot_tensors(snapshots: Sequence[Snapshot]) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Returns the content of a safetensors file of snapshots: tensors by name, and the rest as one JSON text."""
    tensors: dict[str, torch.Tensor] = {}
    buckets: dict[str, Any] = {}
    for bucket in snapshots:
        described = buckets[str(bucket.index)] = {
            "version": bucket.version,
            "clocks": {str(rank): clock for rank, clock in bucket.clocks.items()},
            "data": {str(loader): [number, spans] for loader, (number, spans) in bucket.committed.items()},
        }
        if bucket.pushed:
            described["pushed"] = {str(rank): clock for rank, clock in bucket.pushed.items()}
        if isinstance(bucket, TableSnapshot):
            kind = _CHANGES if bucket.changes_only else _ROWS
            tensors |= {f"{bucket.index}/{kind}/{name}": tensor for name, tensor in bucket.tensors.items()}
            described["values"] = dict(bucket.values)
            described |= {} if bucket.seed is None else {"seed": bucket.seed}
            continue
        described["groups"] = {str(group): dict(values) for group, values in bucket.groups.items()}
        if bucket.stage is not None:
            described["stage"] = _stage_data(bucket.stage)
        tensors[f"{bucket.index}/{_WEIGHTS if bucket.stage is None else _STAGED_WEIGHTS}"] = bucket.weights
        tensors |= {} if bucket.sent is None else {f"{bucket.index}/{_SENT}": bucket.sent}
        for position, state in bucket.state.items():
            tensors |= {f"{bucket.index}/{position}/{name}": tensor for name, tensor in state.items()}
    return tensors, {"format": str(WITHOUT_BASES), "buckets": json.dumps(buckets)}


def read_snapshots(
    reader: TensorReader, buckets: Sequence[BucketSpec], to: Mapping[int, torch.Tensor], wanted_tables: Collection[int]
) -> tuple[dict[int, BucketSnapshot], dict[int, TableSnapshot]]:
    """Returns the snapshots of buckets, and of tables, in a file.

    Raises ValueError, with the expected content, if the file has other buckets.

    to: by bucket, the memory for its weights
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
        is_weights = rest in ([_WEIGHTS], [_STAGED_WEIGHTS])
        return to[bucket.index] if is_weights and bucket.index in to else entry.empty()

    for entry, tensor in reader.tensors(place):
        index, *rest = entry.name.split("/")
        if rest[0] in (_ROWS, _CHANGES):
            tables[int(index)][rest[1]] = tensor
        elif rest in ([_WEIGHTS], [_STAGED_WEIGHTS]):
            weights[int(index)] = tensor
        elif rest == [_SENT]:
            sent[int(index)] = tensor
        else:
            states[int(index)].setdefault(int(rest[0]), {})[rest[1]] = tensor
    return (
        {
            index: _snapshot(wanted[index], described[str(index)], weights[index], state, sent.get(index))
            for index, state in states.items()
        },
        {table: _table(table, described[str(table)], read) for table, read in tables.items()},
    )


def read_into(reader: TensorReader, buckets: Sequence[BucketSpec], cut: OtherCut) -> None:
    """Passes the buckets of a file, tensor by tensor, to a job with another cut. Raises ValueError as `read_snapshots`
    does, and the errors of `cut`.
    """
    described, wanted = json.loads(reader.metadata["buckets"]), {bucket.index: bucket for bucket in buckets}
    nothing = torch.empty(0)
    heads = {index: _snapshot(bucket, described[str(index)], nothing, {}, None) for index, bucket in wanted.items()}
    passing = torch.empty(0, dtype=torch.uint8)  # reused for one tensor after the other

    def place(entry: TensorEntry) -> torch.Tensor | None:
        nonlocal passing
        bucket = wanted.get(int(entry.name.split("/")[0]))
        if bucket is None:
            return None
        _check_entry(entry, bucket)
        if len(passing) < entry.nbytes:
            passing = torch.empty(entry.nbytes, dtype=torch.uint8)
        return passing[: entry.nbytes].view(entry.dtype).view(entry.shape)

    for entry, tensor in reader.tensors(place):
        index, *rest = entry.name.split("/")
        bucket, head = wanted[int(index)], heads[int(index)]
        if rest in ([_WEIGHTS], [_STAGED_WEIGHTS], [_SENT]):
            cut.take_weights(bucket, head, tensor, sent=rest == [_SENT])
        else:
            cut.take_state(bucket, head, int(rest[0]), rest[1], tensor)


def _check_entry(entry: TensorEntry, bucket: BucketSpec) -> None:
    """Raises ValueError for a tensor that a bucket cannot have, before memory is allocated for it."""
    _, *rest = entry.name.split("/")
    if rest in ([_WEIGHTS], [_STAGED_WEIGHTS], [_SENT]):
        if entry.dtype != TORCH_DTYPES[bucket.dtype] or entry.shape != (bucket.numel,):
            present = f"{entry.shape} {entry.dtype}"
            raise ValueError(f"bucket {bucket.index}: expected {bucket.numel} x {bucket.dtype}, found {present}")
        return
    position, name = int(rest[0]), rest[1]
    if not _STATE_NAME.fullmatch(name) or not 0 <= position < len(bucket.slices):
        raise ValueError(f"bucket {bucket.index} has no optimizer state {'/'.join(rest)[:80]!r}")
    if not entry.dtype.is_floating_point or entry.shape not in ((), (1,), (bucket.slices[position].length,)):
        raise ValueError(f"{entry.name}: shape {entry.shape} and type {entry.dtype} fit no optimizer state")


def _stage_data(stage: StageSpec) -> dict[str, Any]:
    groups = {str(group): dict(values) for group, values in stage.groups.items()}
    return {"number": stage.number, "optimizer": stage.optimizer, "members": stage.group_of_slice, "groups": groups}


def _stage(data: Any, bucket: BucketSpec) -> StageSpec | None:
    """Returns the stage of a bucket; None if the file has none. Raises ValueError for an invalid one."""
    if data is None:
        return None
    members = tuple(None if member is None else int(member) for member in data["members"])
    groups = {int(group): _hyper_parameters(values) for group, values in data["groups"].items()}
    stage = StageSpec(int(data["number"]), str(data["optimizer"]), members, groups)
    try:
        check_stage(stage, bucket)
    except InvalidRequest as error:
        raise ValueError(str(error)) from None
    return stage


def _snapshot(
    bucket: BucketSpec,
    described: Mapping[str, Any],
    weights: torch.Tensor,
    state: Mapping[int, Mapping[str, torch.Tensor]],
    sent: torch.Tensor | None,
) -> BucketSnapshot:
    version, clocks, pushed = _reached(bucket.index, described)
    groups = {int(group): _hyper_parameters(values) for group, values in described["groups"].items()}
    committed, stage = _committed(described.get("data", {})), _stage(described.get("stage"), bucket)
    reached = bucket.index, version, clocks
    return BucketSnapshot(*reached, weights, state, groups, committed, sent, pushed, stage)


def _table(index: int, described: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> TableSnapshot:
    version, clocks, pushed = _reached(index, described)
    committed, seed = _committed(described.get("data", {})), described.get("seed")
    if seed is not None and not (type(seed) is int and 0 <= seed < 2**64):
        raise ValueError(f"table {index}: a seed is a number from 0 to 2^64 - 1, got {str(seed)[:80]}")
    values = _hyper_parameters(described["values"])
    return TableSnapshot(index, version, clocks, tensors, values, committed, seed, pushed)


def _reached(index: int, described: Mapping[str, Any]) -> tuple[int, dict[int, int], dict[int, int]]:
    """Returns the version of a bucket or a table, its clocks and its pushed clocks. Files of earlier releases lack the
    last.
    """
    version, clocks = described["version"], {int(rank): clock for rank, clock in described["clocks"].items()}
    pushed = {int(rank): clock for rank, clock in described.get("pushed", {}).items()}
    numbers = version, *clocks, *clocks.values(), *pushed, *pushed.values()
    if any(type(number) is not int or number < 0 for number in numbers):
        raise ValueError(f"bucket {index}: versions and clocks are numbers from 0")
    return version, clocks, pushed


def _committed(described: Mapping[str, Any]) -> Committed:
    """Returns the data that a bucket has committed. Raises ValueError for invalid ranges."""
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
