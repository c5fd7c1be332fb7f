"""Exports a checkpoint as plain PyTorch files.

    model.safetensors       the model's state_dict, for load_state_dict; with the rows of tables
    tables/                 the rows of each table, for other programs: see table_files
    optimizer.safetensors   the optimizer's state, `INDEX/NAME` by parameter in the order of the optimizer's groups
    dcp/                    with --dcp or --dcp-flat: both, as a folder of torch.distributed.checkpoint
    optimizer.json          the rest of the optimizer's state_dict: its groups

`optimizer_state_dict` combines the last two into the dictionary for torch.optim's load_state_dict.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from ps_protocol.convert import job_spec_from_data
from ps_protocol.errors import CheckpointDamaged, CheckpointFailed, InvalidRequest, NoCheckpoints
from ps_protocol.job import JobSpec
from ps_protocol.layout import BucketSpec, bucket_layout
from ps_protocol.pieces import whole_parameters
from ps_protocol.stage_spec import first_stage
from ps_protocol.tables import TableSpec
from ps_protocol.tensors import TORCH_DTYPES, whole_of
from ps_server.core.other_cut import OtherCut
from ps_server.core.placement import TableShare
from ps_server.core.snapshot import BucketSnapshot, TableSnapshot, joined
from ps_server.storage.any_type import load_any, save_any
from ps_server.storage.changed_tensors import changed_tensors
from ps_server.storage.checkpoints import PASSED_OVER, CheckpointStore, last_whole
from ps_server.storage.dcp_folder import DcpLayout, write_folder
from ps_server.storage.files import check_directory
from ps_server.storage.manifest import Manifest
from ps_server.storage.table_files import Rows, check_format, write_rows
from ps_tables.increments import in_order
from ps_tables.saved import saved_rows

log = logging.getLogger("ps_server")

FOLDERS = "tables", "dcp"  # the folders of an export
NEW = "new"  # the file that names the parts of an export that replaces an earlier one
PARTS = *FOLDERS, "model.safetensors", "optimizer.safetensors", "optimizer.json"
# A file in each of the folders, by which a later export knows that it may replace the folder.
MARK = ".ps-server-export"


@dataclass(frozen=True)
class Found:
    """The content of a checkpoint: snapshots of buckets, changed frozen tensors, and by table its rows of all
    shards."""

    manifest: Manifest
    spec: JobSpec
    buckets: tuple[BucketSpec, ...]
    snapshots: dict[int, BucketSnapshot]
    changed: dict[str, torch.Tensor]
    rows: dict[str, Rows]


def export(
    directory: Path,
    job: str,
    name: str | None,
    output: Path,
    tables_as: str = "safetensors",
    on_skipped: Callable[[str], object] = log.error,
    fallback: bool = True,
    dcp: DcpLayout | None = None,
) -> str:
    """Writes the files. Returns a description of their content.

    name: the name of the checkpoint; None: the last intact checkpoint, from which a restore would continue
    tables_as: the format of tables/: safetensors, parquet or npy
    on_skipped: called with each checkpoint that was skipped, and the reason
    fallback: False: a damaged checkpoint is an error, and no earlier one is exported instead
    dcp: the layout of a folder of torch.distributed.checkpoint; None if there is none

    Raises InvalidRequest, NoCheckpoints, CheckpointDamaged, CheckpointFailed. InvalidRequest is also for a folder in
    `output` that has the name of an export's, and that no export has made.
    """
    check_format(tables_as)
    check_directory(directory)
    store = CheckpointStore(directory)
    found = _find(store, job, name, on_skipped, fallback)
    manifest, tables = found.manifest, found.rows
    spec, snapshots = _in_last_stage(found.spec, found.buckets, found.snapshots)
    model, optimizer, groups = _gather(spec, found.buckets, snapshots)
    model |= found.changed
    model = _as_modules_have_them(model, spec)
    for table in spec.tables:
        model |= _module_state(table.rows, tables[table.rows.name])
    try:
        folders = ["tables"] * bool(tables) + ["dcp"] * (dcp is not None)
        with _put_together(output, folders) as made:
            for name, rows in tables.items():
                write_rows(rows, made / "tables", name, tables_as)
            save_any(model, made / "model.safetensors")
            save_any(optimizer, made / "optimizer.safetensors")
            (made / "optimizer.json").write_text(
                json.dumps({"optimizer": spec.optimizer, "param_groups": groups}, indent=1)
            )
            if dcp is not None:
                order = [
                    each.name for group in range(len(groups)) for each in spec.parameters if each.param_group == group
                ]
                kinds = [spec.optimizer_of(group) for group in range(len(groups))]
                write_folder(model, optimizer, groups, order, kinds, made / "dcp", dcp)
    except (OSError, safetensors.SafetensorError) as error:
        raise CheckpointFailed(f"{output} cannot be written: {error}") from None
    return f"job {job}: checkpoint {manifest.name} at clock {manifest.clock} is in {output} ({len(model)} tensors)"


@contextmanager
def _put_together(output: Path, folders: list[str]) -> Iterator[Path]:
    """A `with` block that writes all files of an export into the folder that it gets, from which they go to `output`
    at its end. There they replace those of an earlier export, also those that this one does not have. If anything fails
    or is interrupted, the earlier export is as it was. If the process is killed while it replaces them, the next export
    puts them back.

    folders: those of FOLDERS that this export has

    Raises InvalidRequest if `output` has another folder of such a name.
    """
    work = output / f"{MARK}-under-way"
    made, earlier = work / "made", work / "earlier"
    output.mkdir(parents=True, exist_ok=True)
    _put_back(output, work)
    foreign = {name for name in PARTS if _is_foreign(output / name)}
    if in_the_way := sorted(foreign.intersection((*folders, *PARTS[len(FOLDERS) :]))):
        raise InvalidRequest(
            f"{output / in_the_way[0]} has no {MARK}, so no export has made it: move it, or export into another folder"
        )
    shutil.rmtree(work, ignore_errors=True)
    made.mkdir(parents=True)
    earlier.mkdir()
    try:
        yield made
        for name in folders:
            (made / name / MARK).write_text("The next `ps-server export` into the folder above replaces this folder.\n")
        _replace(output, work, [name for name in PARTS if name not in foreign])
        earlier.rename(work / "done")  # in one step: from here on nothing is put back
    except BaseException:
        if not (earlier.is_dir() and any(earlier.iterdir())):  # else the next export puts these back
            shutil.rmtree(work, ignore_errors=True)
        raise
    shutil.rmtree(work, ignore_errors=True)


def _is_foreign(part: Path) -> bool:
    """Whether what has the name of a part is none of an earlier export."""
    if part.is_dir():
        return not (part / MARK).is_file()
    return part.name in FOLDERS and os.path.lexists(part)


def _replace(output: Path, work: Path, names: list[str]) -> None:
    """Moves the parts of an export from `output` to `earlier`, and those of the next one from `made` to `output`; all
    of them or none.
    """
    made, earlier = work / "made", work / "earlier"
    new = [name for name in names if (made / name).exists()]
    (work / NEW).write_text("\n".join(new))
    try:
        for name in names:
            part = output / name
            if part.is_file():
                shutil.copymode(part, made / name)
            if os.path.lexists(part):
                part.rename(earlier / name)
            if name in new:
                (made / name).rename(part)
    except BaseException:
        _put_back(output, work)
        raise


def _put_back(output: Path, work: Path) -> None:
    """Moves the parts of an earlier export back, if an export has begun to replace them and has not ended."""
    made, earlier = work / "made", work / "earlier"
    if not (work / NEW).is_file() or not earlier.is_dir():
        return
    new = (work / NEW).read_text().splitlines()
    for name in PARTS:
        if name in new and os.path.lexists(output / name) and not os.path.lexists(made / name):
            (output / name).rename(made / name)
        if os.path.lexists(earlier / name):
            (earlier / name).rename(output / name)
    (work / NEW).unlink()  # before anything is removed: it is put back once


def model_state_dict(directory: Path) -> dict[str, torch.Tensor]:
    """Returns the exported model for its load_state_dict, with tensors of types that safetensors does not know, such as
    complex128."""
    return load_any(directory / "model.safetensors")


def optimizer_state_dict(directory: Path) -> dict[str, Any]:
    """Returns the exported optimizer for its load_state_dict."""
    groups = json.loads((directory / "optimizer.json").read_text())["param_groups"]
    state: dict[int, dict[str, torch.Tensor]] = {}
    for key, tensor in load_any(directory / "optimizer.safetensors").items():
        index, name = key.split("/")
        state.setdefault(int(index), {})[name] = tensor
    for group in groups:
        group.update({key: tuple(value) for key, value in group.items() if key != "params" and isinstance(value, list)})
    return {"state": state, "param_groups": groups}


def _module_state(spec: TableSpec, rows: Rows) -> dict[str, torch.Tensor]:
    """Returns the entries of a table in a model's state_dict: see ps_torch.Embedding."""
    state = saved_rows(rows, spec.initializer.seed)
    return {
        f"{spec.name}.weight": torch.empty(0, spec.dim),
        f"{spec.name}._extra_state": torch.frombuffer(bytearray(state), dtype=torch.uint8),
    }


def _find(
    store: CheckpointStore, job: str, name: str | None, on_skipped: Callable[[str], object], fallback: bool
) -> Found:
    """Returns the checkpoint of a name, or the last intact one."""
    if name is not None:
        return _read(store, job, name)
    reasons = ["there is none"]

    def pass_over(checkpoint: str, error: CheckpointDamaged) -> None:
        if not fallback:
            raise error
        reasons.append(str(error))
        on_skipped(PASSED_OVER % (job, checkpoint, error))

    found = last_whole(store.names(job), lambda checkpoint: _read(store, job, checkpoint), pass_over)
    if found is None:
        raise NoCheckpoints(f"no checkpoint of job {job!r} can be used: {reasons[-1]}")
    return found


def _read(store: CheckpointStore, job: str, name: str) -> Found:
    """Returns the content of a checkpoint. Raises CheckpointDamaged if any file was changed."""
    manifest = store.manifest(job, name)
    before = job_spec_from_data(manifest.job)
    spec = replace(before, parameters=whole_parameters(before.parameters), group_size=1)
    buckets = bucket_layout(spec.parameters, spec.bucket_bytes).buckets
    cut = None if before == spec else OtherCut(before, spec, buckets, refuses=False)
    parts: dict[int, list[TableSnapshot]] = {len(buckets) + index: [] for index in range(len(spec.tables))}
    sources = buckets if cut is None else cut.sources()
    files = store.files(job, manifest, sources, manifest.shards if parts else ())
    snapshots = store.read_files(job, files, rows=parts, cut=cut)
    if not all(parts.values()):
        raise CheckpointDamaged(f"checkpoint {name} has no rows of a table")
    store.check_workers(job, manifest)
    changed = changed_tensors(store, job, manifest, before)
    if cut is not None:
        for index, tensor in changed.items():
            cut.take_changed(index, tensor)
    tables = [joined(each, TableShare()) for each in parts.values()]
    spec = _with_seeds(spec, tables)
    rows: dict[str, Rows] = {
        table.rows.name: in_order(dict(each.tensors)) for table, each in zip(spec.tables, tables, strict=True)
    }
    named = {spec.parameters[index].name: tensor for index, tensor in changed.items()} if cut is None else {}
    return Found(manifest, spec, buckets, snapshots, named, rows)


def _in_last_stage(
    spec: JobSpec, buckets: tuple[BucketSpec, ...], snapshots: dict[int, BucketSnapshot]
) -> tuple[JobSpec, dict[int, BucketSnapshot]]:
    """Returns a job and its buckets with the optimizers and groups of the last stage that any bucket has reached.

    In a mode in which buckets progress independently, a bucket that has not reached it counts as frozen.
    """
    stages = {bucket.index: snapshots[bucket.index].stage or first_stage(spec, bucket) for bucket in buckets}
    last = max((stage.number for stage in stages.values()), default=0)
    if last == 0:
        return spec, snapshots
    here = [(bucket, stages[bucket.index]) for bucket in buckets if stages[bucket.index].number == last]
    number = {group: place for place, group in enumerate(sorted({g for _, stage in here for g in stage.groups}))}
    values = {number[group]: values for _, stage in here for group, values in stage.groups.items()}
    of = {part.parameter: stage.group_of_slice[p] for bucket, stage in here for p, part in enumerate(bucket.slices)}
    members = {parameter: number[group] for parameter, group in of.items() if group is not None}
    found = {index: replace(each, state={}, groups={}) for index, each in snapshots.items()}
    for bucket, _ in here:
        own = snapshots[bucket.index]
        found[bucket.index] = replace(own, groups={number[group]: used for group, used in own.groups.items()})
    in_stage = replace(
        spec,
        parameters=tuple(replace(each, param_group=members.get(index)) for index, each in enumerate(spec.parameters)),
        optimizer=", ".join(dict.fromkeys(stage.optimizer for _, stage in here if stage.groups)),
        param_groups=tuple(values[place] for place in sorted(values)),
    )
    return in_stage, found


def _as_modules_have_them(model: dict[str, torch.Tensor], spec: JobSpec) -> dict[str, torch.Tensor]:
    """Returns the tensors of the model's state_dict: in its element types, and without those that it leaves out."""
    elements = {parameter.name: parameter.element for parameter in spec.parameters}
    left_out = {parameter.name for parameter in spec.parameters if not parameter.is_saved}
    return {
        name: whole_of(tensor, elements[name]) if elements.get(name) else tensor
        for name, tensor in model.items()
        if name not in left_out
    }


def _with_seeds(spec: JobSpec, tables: list[TableSnapshot]) -> JobSpec:
    """Returns a job with the seeds of its tables: rank 0 may have brought other seeds than the registered ones."""
    each = zip(spec.tables, tables, strict=True)
    return replace(spec, tables=tuple(replace(table, rows=table.rows.seeded(found.seed)) for table, found in each))


def _gather(
    spec: JobSpec, buckets: tuple[BucketSpec, ...], snapshots: dict[int, BucketSnapshot]
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], list[dict[str, Any]]]:
    """Returns the model's tensors by name, the optimizer's by number and name, and its groups."""
    model = {p.name: torch.zeros(p.numel, dtype=TORCH_DTYPES[p.dtype]) for p in spec.parameters}
    order = [
        i for group in range(len(spec.param_groups)) for i, p in enumerate(spec.parameters) if p.param_group == group
    ]
    number = {parameter: position for position, parameter in enumerate(order)}
    state: dict[str, torch.Tensor] = {}
    groups: list[dict[str, Any]] = [dict(values) for values in spec.param_groups]
    for bucket in buckets:
        snapshot = snapshots[bucket.index]
        for group, last in snapshot.groups.items():
            groups[group].update(last)
        for position, part in enumerate(bucket.slices):
            parameter = spec.parameters[part.parameter]
            whole = slice(part.start, part.start + part.length)
            model[parameter.name][whole] = snapshot.weights[part.offset : part.offset + part.length]
            for name, tensor in snapshot.state.get(position, {}).items():
                key = f"{number[part.parameter]}/{name}"
                if tensor.numel() == part.length and tensor.dim() == 1:
                    state.setdefault(key, torch.zeros(parameter.numel, dtype=tensor.dtype))[whole] = tensor
                else:
                    state[key] = tensor.clone()  # a count of steps, the same for every slice
    for key, tensor in state.items():
        parameter = spec.parameters[order[int(key.split("/")[0])]]
        if tensor.dim() == 1 and tensor.numel() == parameter.numel:
            shaped = tensor.reshape(parameter.shape)
            state[key] = whole_of(shaped, parameter.element) if parameter.element else shaped
    for index, values in enumerate(groups):
        values["params"] = [number[i] for i in order if spec.parameters[i].param_group == index]
    shapes = {p.name: p.shape for p in spec.parameters}
    return {name: tensor.reshape(shapes[name]) for name, tensor in model.items()}, state, groups
