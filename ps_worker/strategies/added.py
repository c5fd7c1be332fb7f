"""Parameters that an optimizer is given after `prepare`: `optimizer.add_param_group`, to unfreeze layers for example.

A job's parameters are fixed when it is registered. So what is added later is a job of its own beside it, with the same
workers: `NAME.added1` for the first group that is added to job NAME, and so on. Its clock counts the steps since then.
Everything that is neither weights nor optimizer state stays with the first job.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from ps_protocol.errors import InvalidRequest, Unsupported
from ps_protocol.job import JobSpec
from ps_worker.model.optimizer import ParameterStates, RemoteOptimizers, optimizer_like

log = logging.getLogger("ps_worker")


class AddedJob(RemoteOptimizers, Protocol):
    """A job beside the first, with one optimizer: number 0."""

    def empty_step(self) -> None:
        """Makes a step without a gradient."""

    def no_sync(self) -> AbstractContextManager[None]:
        """Returns a context in which gradients only add up."""

    def close(self) -> None:
        """Leaves the job."""


# Begins job number k beside the first: (k, a module with its parameters, its optimizer).
Begin = Callable[[int, nn.Module, torch.optim.Optimizer], AddedJob]


@dataclass(frozen=True)
class _Added:
    """A group that was added to the optimizer of that number, and the job that trains it."""

    optimizer: int
    parameters: list[nn.Parameter]
    job: AddedJob


class AddedGroups:
    """The groups that were added to the optimizers of one job. For the training thread.

    tensors:    of the job, in the order of its parameters
    optimizers: the script's own, each with its name
    """

    def __init__(
        self,
        spec: JobSpec,
        tensors: Sequence[torch.Tensor],
        optimizers: Sequence[tuple[str, torch.optim.Optimizer]],
        begin: Begin,
    ) -> None:
        self._spec = spec
        self._indices = {id(tensor): index for index, tensor in enumerate(tensors)}
        self._optimizers = optimizers
        self._begin = begin
        self._groups: list[_Added] = []

    def add(self, optimizer: int, group: dict[str, Any]) -> list[int]:
        """Begins to train one more group; returns its parameters, by index in the first job.

        Blocks, in a job with a world size, until all workers have called it. Raises the errors of `checked_group`, of
        joining a job, and of torch's own add_param_group; the optimizer is unchanged then.
        """
        taken = {self._indices[id(parameter)] for added in self._groups for parameter in added.parameters}
        parameters = checked_group(group, self._spec, self._indices, taken)
        name, own = self._optimizers[optimizer]
        own.add_param_group({**group, "params": parameters})
        module, alike = holder(self._spec, self._indices, parameters), optimizer_like(own, own.param_groups[-1:])
        number = len(self._groups) + 1
        try:
            job = self._begin(number, module, alike)
        except BaseException:
            own.param_groups.pop()
            raise
        self._groups.append(_Added(optimizer, parameters, job))
        log.info("%d parameters are added to %s: job %s", len(parameters), name, added_name(self._spec.name, number))
        return [self._indices[id(parameter)] for parameter in parameters]

    def _of(self, optimizer: int) -> list[_Added]:
        return [added for added in self._groups if added.optimizer == optimizer]

    def step(self, optimizer: int) -> None:
        """Makes a step of what was added to one optimizer."""
        for added in self._of(optimizer):
            added.job.step(0)

    def empty_step(self) -> None:
        """Makes a step without a gradient of all that was added."""
        for added in self._groups:
            added.job.empty_step()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Lets gradients only add up inside."""
        with ExitStack() as stack:
            for added in self._groups:
                stack.enter_context(added.job.no_sync())
            yield

    def load(self, optimizer: int, states: ParameterStates) -> None:
        """Has the next step begin with this state of what was added to one optimizer; leaves out all other."""
        for added in self._of(optimizer):
            added.job.load(0, {tensor: states[tensor] for tensor in added.parameters if tensor in states})

    def state(self, optimizer: int) -> ParameterStates:
        """Returns the state of what was added to one optimizer."""
        return {tensor: state for added in self._of(optimizer) for tensor, state in added.job.state(0).items()}

    def close(self) -> None:
        """Leaves all jobs."""
        for added in self._groups:
            added.job.close()


def added_name(name: str, number: int) -> str:
    """Returns the name of job number `number` beside the job of that name."""
    return f"{name}.added{number}"


def checked_group(
    group: Mapping[str, Any], spec: JobSpec, indices: Mapping[int, int], taken: set[int]
) -> list[nn.Parameter]:
    """Returns the parameters of a group that is to be added. Raises InvalidRequest or Unsupported if it cannot be.

    indices: by the id of a tensor, its index in the job
    taken:   indices that other groups have since `prepare`
    """
    given = group["params"]
    parameters: list[Any] = [given] if isinstance(given, torch.Tensor) else list(given)
    if not parameters:
        raise InvalidRequest("expected at least one parameter in the group, got none")
    for parameter in parameters:
        index = indices.get(id(parameter))
        if index is None or not isinstance(parameter, nn.Parameter):
            raise Unsupported(
                "add_param_group takes parameters of the models that were handed to prepare, got a tensor of "
                f"{tuple(parameter.shape)} that is in none of them"
            )
        if spec.parameters[index].group is not None or index in taken:
            raise InvalidRequest(f"{spec.parameters[index].name} is in an optimizer already")
    return parameters


def holder(spec: JobSpec, indices: Mapping[int, int], parameters: list[nn.Parameter]) -> nn.Module:
    """Returns a module with these parameters under the names that they have in the job."""
    root = nn.Module()
    for parameter in parameters:
        *path, name = spec.parameters[indices[id(parameter)]].name.split(".")
        module = root
        for part in path:
            if part not in module._modules:
                module.add_module(part, nn.Module())
            module = module.get_submodule(part)
        module.register_parameter(name, parameter)
    return root
