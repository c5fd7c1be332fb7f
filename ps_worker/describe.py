"""A model and its optimizer as a job: what is trained, in which groups, with what."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from ps_protocol.channel import MAX_BUCKET_BYTES
from ps_protocol.errors import InvalidRequest, Unsupported
from ps_protocol.job import JobSpec, NonFinite, validate
from ps_protocol.layout import ParameterSpec
from ps_protocol.modes import Consistency
from ps_protocol.optimizers import hyper_parameters, optimizer_name
from ps_protocol.tensors import DTYPE_NAMES


def describe(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    name: str,
    consistency: Consistency,
    bucket_bytes: int | None,
    world_size: int,
    non_finite: NonFinite,
    gradient_wire: str,
    weight_wire: str,
) -> tuple[JobSpec, list[torch.Tensor]]:
    """The job that trains this model with this optimizer, and the model's tensors in the job's order.

    Tied parameters appear once. Parameters that the optimizer does not have, and buffers, are held: every worker starts
    with rank 0's and goes on with its own. Without bucket_bytes their size is left open. Raises Unsupported for what a
    parameter server cannot do, naming it.
    """
    _refuse_lazy(model)
    cls = optimizer_name(optimizer)
    if _has_stepped(optimizer):
        raise Unsupported(
            "the optimizer has taken steps already, and its state would stay behind; "
            "call prepare before the first step, with a new optimizer"
        )
    _refuse_sparse(model)
    groups = {id(p): index for index, group in enumerate(optimizer.param_groups) for p in group["params"]}
    specs: list[ParameterSpec] = []
    tensors: list[torch.Tensor] = []
    for key, tensor in [*model.named_parameters(), *model.named_buffers()]:
        _refuse_dtype(key, tensor)
        specs.append(ParameterSpec(key, tuple(tensor.shape), DTYPE_NAMES[tensor.dtype], groups.pop(id(tensor), None)))
        tensors.append(tensor)
    if groups:
        raise InvalidRequest(f"the optimizer holds {len(groups)} parameters that are not the model's")
    trained = {tensor.device for spec, tensor in zip(specs, tensors, strict=True) if spec.group is not None}
    if len(trained) > 1:
        raise Unsupported(f"the parameters lie on several devices ({', '.join(map(str, trained))}); use one a worker")
    spec = JobSpec(
        name=name,
        parameters=tuple(specs),
        optimizer=cls,
        groups=tuple(hyper_parameters(cls, group) for group in optimizer.param_groups),
        consistency=consistency,
        bucket_bytes=MAX_BUCKET_BYTES if bucket_bytes is None else bucket_bytes,
        world_size=world_size,
        non_finite=non_finite,
        gradient_wire=gradient_wire,
        weight_wire=weight_wire,
    )
    validate(spec, MAX_BUCKET_BYTES)
    return spec if bucket_bytes is not None else replace(spec, bucket_bytes=0), tensors


def refused_of_model(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    """What `describe` would refuse of a model and its optimizer, in its words: a dry run. Changes nothing."""

    def dtypes() -> None:
        for key, tensor in [*model.named_parameters(), *model.named_buffers()]:
            _refuse_dtype(key, tensor)

    found = []
    checks = (lambda: optimizer_name(optimizer), lambda: _refuse_lazy(model), lambda: _refuse_sparse(model), dtypes)
    for check in checks:
        try:
            check()
        except (InvalidRequest, Unsupported) as error:
            found.append(error.message)
    return found


def _refuse_lazy(model: nn.Module) -> None:
    for key, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if nn.parameter.is_lazy(tensor):
            owner = model.get_submodule(key.rpartition(".")[0])
            raise InvalidRequest(
                f"{key} of a {type(owner).__name__} has no shape yet: run one batch through the model before prepare"
            )


def _refuse_dtype(key: str, tensor: torch.Tensor) -> None:
    if tensor.dtype not in DTYPE_NAMES:
        raise Unsupported(f"{key} has dtype {tensor.dtype}; known are {', '.join(DTYPE_NAMES.values())}")


def _has_stepped(optimizer: torch.optim.Optimizer) -> bool:
    """Whether there is state that a step made: Adagrad's is there, at step 0, from the beginning."""
    return any(
        any(v is not None for v in state.values()) and state.get("step") != 0 for state in optimizer.state.values()
    )


def _refuse_sparse(model: nn.Module) -> None:
    for key, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise Unsupported(f"{key} makes sparse gradients; use sparse=False")
        if isinstance(module, nn.parallel.DistributedDataParallel):
            raise Unsupported("the model is wrapped in DistributedDataParallel; hand the plain model to prepare")
