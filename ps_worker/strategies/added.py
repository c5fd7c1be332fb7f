"""Parameters that an optimizer is given after `prepare`: `optimizer.add_param_group`, to unfreeze layers for example.

A job's parameters are fixed when it is registered. So parameters that are added later become a second job with the same
workers: `NAME.added1` for the first group that is added to job NAME, and so on. Its clock counts the steps since then.
Everything that is neither weights nor optimizer state stays with the first job.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from ps_protocol.errors import InvalidRequest, Unsupported
from ps_protocol.job import JobSpec, added_name
from ps_worker.model.elements import is_trained
from ps_worker.model.optimizer import ParameterStates, RemoteOptimizers, optimizer_like
from ps_worker.model.script_stages import ScriptStage

log = logging.getLogger("ps_worker")


class AddedStages(Protocol):
    """The stages of a second job, see job_stages.py."""

    def following(self, optimizers: Mapping[int, torch.optim.Optimizer], new: Collection[int]) -> ScriptStage:
        """Returns the stage in which these optimizers step, without entering it. See JobStages.following."""

    def enter(self, stage: ScriptStage) -> None:
        """Begins a stage."""

    def read_groups(self, groups: Sequence[dict[str, Any]]) -> None:
        """Reads hyper-parameters from these groups from now on, in place of those with which it began."""


class AddedJob(RemoteOptimizers, Protocol):
    """A second job beside the first, for added parameters. It begins with one optimizer, which has number 0."""

    @property
    def stages(self) -> AddedStages:
        """The stages of the job: which optimizers step it."""

    def empty_step(self) -> None:
        """Makes a step without a gradient."""

    def refresh(self) -> None:
        """Pulls the weights with every update that is staged into the model."""

    def no_sync(self) -> AbstractContextManager[None]:
        """Returns a context in which backward only accumulates gradients, and none is sent."""

    def close(self) -> None:
        """Leaves the job."""


# Begins job number k beside the first one. Arguments: k, a module with the job's parameters, and their optimizer.
Begin = Callable[[int, nn.Module, torch.optim.Optimizer], AddedJob]


@dataclass
class _Added:
    """Added parameters, and the job that trains them.

    numbers: the optimizers that step them: by number in the script, the number in the job
    """

    numbers: dict[int, int]
    parameters: list[nn.Parameter]
    job: AddedJob


class AddedGroups:
    """The parameter groups that were added to the optimizers of one job. For the training thread.

    tensors:    the first job's tensors, in the order of its parameters
    optimizers: the script's optimizers, each with its name
    groups:     the added groups
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
        self._optimizers = {number: own for number, (_, own) in enumerate(optimizers)}
        self._begin = begin
        self.groups: list[_Added] = []

    def add(self, optimizer: int, group: dict[str, Any]) -> list[int]:
        """Begins to train one more group; returns its parameters, by index in the first job.

        Blocks, in a job with a world size, until all workers have called it. Raises the errors of `checked_group`, of
        joining a job, and of torch's own add_param_group; the optimizer is unchanged then.
        """
        parameters = checked_group(group, self._spec, self._indices, self._taken())
        own = self._optimizers[optimizer]
        own.add_param_group({**group, "params": parameters})
        try:
            self._begin_job(optimizer, parameters, optimizer_like(own, own.param_groups[-1:]))
        except BaseException:
            own.param_groups.pop()
            raise
        return [self._indices[id(parameter)] for parameter in parameters]

    def _taken(self) -> set[int]:
        return {self._indices[id(parameter)] for added in self.groups for parameter in added.parameters}

    def _begin_job(self, optimizer: int, parameters: list[nn.Parameter], alike: torch.optim.Optimizer) -> AddedJob:
        number = len(self.groups) + 1
        job = self._begin(number, holder(self._spec, self._indices, parameters), alike)
        self.groups.append(_Added({optimizer: 0}, parameters, job))
        name = type(alike).__name__
        log.info("%d parameters are added to %s: job %s", len(parameters), name, added_name(self._spec.name, number))
        return job

    # -- the next stage of the script --------------------------------------------------------------------------------

    def begin_stage(self, optimizers: Mapping[int, torch.optim.Optimizer], new: Collection[int]) -> list[int]:
        """Begins a stage in all added jobs, and a new job for frozen parameters that `new` optimizers have. Returns the
        indices of these parameters in the first job.

        optimizers: all optimizers that step from now on, by number
        new:        the numbers of those that begin now
        Raises as `next_stage`, before anything has changed, and as `add`.
        """
        following = []
        for added in self.groups:
            own = {number: each for number, each in optimizers.items() if _has_any(each, added.parameters)}
            if own.keys() != added.numbers.keys():
                following.append((added, own.keys(), added.job.stages.following(own, new)))
        fresh = {number: self._frozen_of(optimizers[number]) for number in new}
        for number, parameters in fresh.items():
            if parameters:
                self._begin_stage_of(number, optimizers[number], parameters)
        for added, numbers, stage in following:
            added.job.stages.enter(stage)
            added.numbers = {number: number for number in numbers}
        self._optimizers = dict(optimizers)
        return [self._indices[id(parameter)] for parameters in fresh.values() for parameter in parameters]

    def _frozen_of(self, optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
        """Returns the parameters of an optimizer that no job trains yet, and that servers can step."""
        taken, found = self._taken(), []
        for parameter in (each for group in optimizer.param_groups for each in group["params"]):
            index = self._indices.get(id(parameter))
            if index is None or index in taken or self._spec.parameters[index].param_group is not None:
                continue
            if is_trained(self._spec.parameters[index].name, parameter):
                found.append(parameter)
        return found

    def _begin_stage_of(self, number: int, optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter]) -> None:
        """Begins a job for frozen parameters of an optimizer that has others, too."""
        ids = {id(parameter) for parameter in parameters}
        chosen = [(group, [each for each in group["params"] if id(each) in ids]) for group in optimizer.param_groups]
        live = [group for group, members in chosen if members]
        alike = optimizer_like(optimizer, [{**group, "params": members} for group, members in chosen if members])
        alike.state.update({each: optimizer.state[each] for each in parameters if each in optimizer.state})
        self._begin_job(number, parameters, alike).stages.read_groups(live)

    def _of(self, optimizer: int) -> list[tuple[_Added, int]]:
        return [(added, added.numbers[optimizer]) for added in self.groups if optimizer in added.numbers]

    def step(self, optimizer: int) -> None:
        """Makes a step of one optimizer in all jobs that it steps. A job that no optimizer steps any more makes an
        empty step.
        """
        for added, number in self._of(optimizer):
            added.job.step(number)
        for added in self.groups:
            if not added.numbers:
                added.job.empty_step()

    def empty_step(self) -> None:
        """Makes a step without a gradient in all added jobs."""
        for added in self.groups:
            added.job.empty_step()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """A `with` block in which backward only accumulates gradients, and none is sent."""
        with ExitStack() as stack:
            for added in self.groups:
                stack.enter_context(added.job.no_sync())
            yield

    def refresh(self) -> None:
        """Pulls the weights of all added jobs; see JobTraining.refresh."""
        for added in self.groups:
            added.job.refresh()

    def load(self, optimizer: int, states: ParameterStates) -> None:
        """Sets the state with which the next step begins, for the added parameters of one optimizer. Ignores all other
        state.
        """
        for added, number in self._of(optimizer):
            added.job.load(number, {tensor: states[tensor] for tensor in added.parameters if tensor in states})

    def load_first(self, optimizer: int, states: ParameterStates, fresh: Collection[int]) -> None:
        """Sets the state that a new optimizer brings, for parameters that were added before it.

        fresh: the indices of parameters whose job has just begun with this state
        """
        for added, number in self._of(optimizer):
            own: dict[torch.Tensor, Any] = {each: states[each] for each in added.parameters if each in states}
            if own and not any(self._indices[id(each)] in fresh for each in own):
                added.job.load(number, own)

    def state(self, optimizer: int) -> ParameterStates:
        """Returns the state of the added parameters of one optimizer."""
        states = [added.job.state(number) for added, number in self._of(optimizer)]
        return {tensor: state for each in states for tensor, state in each.items()}

    def close(self) -> None:
        """Leaves all jobs."""
        for added in self.groups:
            try:
                added.job.close()
            except Exception:
                log.exception("a job of added parameters could not be left in order")


def _has_any(optimizer: torch.optim.Optimizer, parameters: Sequence[nn.Parameter]) -> bool:
    ids = {id(parameter) for parameter in parameters}
    return any(id(each) in ids for group in optimizer.param_groups for each in group["params"])


def checked_group(
    group: Mapping[str, Any], spec: JobSpec, indices: Mapping[int, int], taken: set[int]
) -> list[nn.Parameter]:
    """Returns the parameters of a group, which may be added. Raises InvalidRequest or Unsupported if it may not.

    indices: by the id of a tensor, its index in the job
    taken:   the indices of parameters that other groups have got since `prepare`
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
        if spec.parameters[index].param_group is not None or index in taken:
            raise InvalidRequest(
                f"{spec.parameters[index].name} is in an optimizer already; what another one has had, "
                "session.prepare(optimizer) hands over"
            )
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
