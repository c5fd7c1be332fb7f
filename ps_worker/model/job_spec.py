"""Describes models and their optimizers as a job: its parameters, their groups and their optimizers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from ps_protocol.errors import InvalidRequest, Unsupported
from ps_protocol.job import MAX_BUCKET_BYTES, JobSpec, validate
from ps_protocol.layout import ParameterSpec
from ps_protocol.modes import Consistency
from ps_protocol.optimizers import hyper_parameters, optimizer_name
from ps_worker.group import Group, ranks_of
from ps_worker.model.elements import element_spec, is_trained, parts_that_travel
from ps_worker.model.group_spec import described_together
from ps_worker.model.pipeline_stages import refuse_second, stages_of
from ps_worker.model.refused import (
    refuse_lazy,
    refuse_meta,
    refuse_scaler,
    refuse_sparse,
    refuse_sync_batch_norm,
    refuse_wrapped,
)
from ps_worker.model.sharded import data_share, is_sharded, local, piece_of, uses_fsdp
from ps_worker.tables.modules import named_tables
from ps_worker.tables.server_rows import described_tables
from ps_worker.tables.stepping import check, group_of, optimizer_of
from ps_worker.values import PrepareOptions


def describe(
    models: Sequence[nn.Module],
    optimizers: Sequence[torch.optim.Optimizer],
    options: PrepareOptions,
    name: str,
    consistency: Consistency,
    world_size: int,
    group: Group | None = None,
) -> tuple[JobSpec, list[torch.Tensor]]:
    """Returns the job that trains these models with these optimizers, and the models' tensors in the job's order.

    Tied parameters appear once. Names are those in the model's state_dict; of several models, with the model's number
    in front ("0.weight"), unless they are stages of a pipeline. Parameters that no optimizer has, and buffers, are
    frozen: every worker starts with rank 0's and goes on with its own. Without options.bucket_bytes the spec has 0: the
    server chooses. In a group all members call this; the job has the pieces of all, and tensors without memory stand
    for those of others. Raises Unsupported or InvalidRequest for models that a parameter server cannot train, with the
    reason.
    """

    def own() -> tuple[JobSpec, list[torch.Tensor]]:
        spec, tensors = _described(models, optimizers, options, group)
        return replace(spec, name=name, consistency=consistency, world_size=world_size), tensors

    if group is not None:
        group.data = group.all_through(partial(data_share, models, group.given))
        group.pipeline_stages = stages_of(group, {key for key, _ in _named(models, is_pipeline=True)}, group.data[1])
    spec, tensors = own() if group is None else described_together(group, own)
    validate(spec)
    return spec if options.bucket_bytes is not None else replace(spec, bucket_bytes=0), tensors


def _described(
    models: Sequence[nn.Module],
    optimizers: Sequence[torch.optim.Optimizer],
    options: PrepareOptions,
    group: Group | None,
) -> tuple[JobSpec, list[torch.Tensor]]:
    """Returns the job of this process, without its name, mode and world size. group: the processes that share it"""
    classes = [optimizer_name(optimizer) for optimizer in optimizers]
    for model in models:
        refuse_lazy(model)
        if group is not None:
            refuse_meta(model)
        refuse_wrapped(model, group is not None)
        refuse_sync_batch_norm(model, 1 if group is None else group.size)
        if options.local is None:
            refuse_sparse(model)
    if group is not None and group.is_pipeline and options.has_scaler:
        refuse_scaler()
    tables = named_tables(models)
    if tables and options.local is not None:
        raise Unsupported(
            f"mode local:H has no tables of rows, and the model has {next(iter(tables))!r}: train it in sync, ssp:K or "
            "async, or make it a torch.nn.Embedding"
        )
    ranks, is_pipeline = (None, False) if group is None else (group.ranks, group.is_pipeline)
    parameters, tensors = _parameters(models, optimizers, ranks, is_pipeline)
    of_group = [index for index, optimizer in enumerate(optimizers) for _ in optimizer.param_groups]
    spec = JobSpec(
        name="",
        parameters=parameters,
        optimizer=classes[0],
        param_groups=tuple(
            hyper_parameters(cls, each)
            for cls, optimizer in zip(classes, optimizers, strict=True)
            for each in optimizer.param_groups
        ),
        consistency=Consistency(None, False),
        bucket_bytes=MAX_BUCKET_BYTES if options.bucket_bytes is None else options.bucket_bytes,
        world_size=0,
        non_finite=options.non_finite,
        gradient_wire=options.gradient_wire,
        weight_wire=options.weight_wire,
        more_optimizers=tuple(classes[1:]),
        param_group_optimizers=tuple(of_group) if len(classes) > 1 else (),
        tables=described_tables(tables, optimizers),
        local=options.local,
    )
    return spec, tensors


def _parameters(
    models: Sequence[nn.Module],
    optimizers: Sequence[torch.optim.Optimizer],
    ranks: Sequence[int] | None,
    is_pipeline: bool = False,
) -> tuple[tuple[ParameterSpec, ...], list[torch.Tensor]]:
    """Returns all tensors of the models, each once: their descriptions, and the tensors.

    ranks:      the processes of the group that shares them; None if there is no group
    is_pipeline: the models are stages of a pipeline
    """
    groups = _groups(models, optimizers)
    known = {id(table.weight) for table in named_tables(models).values()}  # handles: the rows are in no bucket
    for handle in known:
        groups.pop(handle, None)
    not_saved = {id(buffer) for model in models for buffer in _not_persistent(model)}
    parameters: list[ParameterSpec] = []
    tensors: list[torch.Tensor] = []
    names: set[str] = set()
    for key, tensor in _named(models, is_pipeline):
        if id(tensor) in known:
            continue
        known.add(id(tensor))
        number, optimizer = groups.pop(id(tensor), (None, 0))
        if key in names:
            refuse_second(key)
        names.add(key)
        if ranks is not None and is_sharded(tensor):
            piece = piece_of(key, tensor, ranks)
            if piece is not None:
                parameters.append(replace(piece, param_group=number, optimizer=optimizer))
                tensors.append(tensor if number is not None else local(tensor))
            continue
        if number is not None and not is_trained(key, tensor):
            number, optimizer = None, 0
        if ranks is not None and number is not None and uses_fsdp(models):  # its gradient is of this process' own batch
            raise Unsupported(
                f"{key} is whole in each process of the group, and an optimizer steps it: shard it, too, by calling "
                "fully_shard on the model as a whole after its layers"
            )
        for name, part in parts_that_travel(key, tensor):
            shape, dtype, element = element_spec(part, number is not None)
            is_saved = id(tensor) not in not_saved
            parameters.append(ParameterSpec(name, shape, dtype, number, optimizer, element, is_saved))
            tensors.append(part)
    _refuse_unknown(len(groups))
    return tuple(parameters), tensors


def _refuse_unknown(count: int) -> None:
    """Raises InvalidRequest if optimizers have parameters that no model has. count: the number of these"""
    if count:
        raise InvalidRequest(
            f"the optimizers hold {count} parameters of no model that was handed to prepare; hand all models over. Put "
            "a parameter of its own, such as the weight of a loss, into a module, and hand that over, too: class "
            "Loss(nn.Module), with self.weight = nn.Parameter(...) in its __init__"
        )


def check_next(
    models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer], rows_of: Mapping[str, str]
) -> None:
    """Raises the errors of `describe`, for optimizers of a later stage.

    rows_of: by the name of a table, the optimizer of its rows in the job
    """
    for optimizer in optimizers:
        optimizer_name(optimizer)
    check_known(models, optimizers)
    tables = named_tables(models)
    check(list(tables.values()), optimizers)
    for name, table in tables.items():
        owner = next((each for each in optimizers if group_of(each, table.weight) is not None), None)
        cls = rows_of[name] if owner is None else optimizer_of(table, owner)[0]
        if cls != rows_of[name]:
            raise Unsupported(
                f"the rows of table {name!r} are stepped by {rows_of[name]} as long as the job runs, and {cls} has its "
                f"weight now: leave it out, or give it a {rows_of[name]} of its own"
            )


def check_known(models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Raises InvalidRequest if optimizers share parameters, or have parameters of no model; Unsupported for parameters
    of a type that servers cannot step.
    """
    groups = _groups(models, optimizers)
    for key, tensor in _named(models):
        if groups.pop(id(tensor), None) is not None:
            is_trained(key, tensor)
    _refuse_unknown(len(groups))


def _named(models: Sequence[nn.Module], is_pipeline: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the tensors of the models with their names in the job; tied tensors several times.

    is_pipeline: they are stages of one model, and have its names
    """
    for number, model in enumerate(models):
        for key, tensor in [*model.named_parameters(), *model.named_buffers()]:
            yield f"{number}.{key}" if len(models) > 1 and not is_pipeline else key, tensor


def _not_persistent(model: nn.Module) -> Iterator[torch.Tensor]:
    for module in model.modules():
        for name in module._non_persistent_buffers_set:
            if (buffer := module._buffers.get(name)) is not None:
                yield buffer


def _groups(models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer]) -> dict[int, tuple[int, int]]:
    """Returns, by the id of a parameter, the numbers of its group and its optimizer. Raises InvalidRequest for a
    parameter with two optimizers.
    """
    places: dict[int, tuple[int, int]] = {}
    number = 0
    for index, optimizer in enumerate(optimizers):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                before, first = places.setdefault(id(parameter), (number, index))
                if before != number:
                    name = next((key for key, tensor in _named(models) if tensor is parameter), "a parameter")
                    raise InvalidRequest(
                        f"{name} is in optimizers {first} and {index}; each parameter is stepped by one"
                    )
            number += 1
    return places


def refused_of(
    models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer], group: Any = None
) -> list[str]:
    """Returns the messages of the errors that `describe` would raise for models and their optimizers: a dry run.

    group: as `prepare` takes it. Its other processes are not asked: a difference between them is not found
    """
    in_group = group is not None
    whole: list[Callable[[], object]] = [partial(ranks_of, group)] if in_group else []
    for model in models:
        whole += [partial(refuse_lazy, model), partial(refuse_wrapped, model, in_group)]
    missing = _all_said(whole)
    members = len(ranks_of(group)) if in_group and not missing else 1
    checks: list[Callable[[], object]] = [partial(optimizer_name, optimizer) for optimizer in optimizers]
    for model in models:
        checks += [partial(refuse_sync_batch_norm, model, members), partial(refuse_sparse, model)]
    if missing:  # the tensors of such a model are not there to be described
        return missing + _all_said(checks)
    checks += [partial(data_share, models, group)] if in_group else []
    return _all_said([*checks, partial(_parameters, models, optimizers, ranks_of(group) if in_group else None)])


def _all_said(checks: Sequence[Callable[[], object]]) -> list[str]:
    """Returns the messages of the errors that checks raise."""
    said = []
    for refuse in checks:
        try:
            refuse()
        except (InvalidRequest, Unsupported) as error:
            said.append(str(error))
    return said
