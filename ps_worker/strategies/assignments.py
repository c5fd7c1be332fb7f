"""Assignments: weights, and optimizer state, that a script sets itself between two steps.

noted    The model finds changed weights before a step; `load_state_dict` hands optimizer state over.
sent     They go with the next step, and take effect with it. In sync those of the lowest live rank count, so only that
         worker sends.
again    If the place is lost and the step is pushed again from the next one, they go with it again. The weights that
         come from the servers meanwhile overwrite the script's, so these are copied.
lost     They are lost if the step is given up, or if the one worker that sends dies in that step.
repeated After a rollback a script repeats what it does in its loop over the data. It does not repeat what it does
         between two passes, and the log says so.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from dataclasses import replace

import torch

from ps_protocol.layout import BucketSpec
from ps_worker.cluster.connection import Connection
from ps_worker.model.flat import FlatModel
from ps_worker.model.optimizer import ParameterStates
from ps_worker.model.optimizer_state import States, check_states, state_assignments
from ps_worker.model.stages import Stage
from ps_worker.values import Assignment

log = logging.getLogger("ps_worker")


class Assignments:
    """The assignments of one worker's script that no step has taken along yet. For the training thread."""

    def __init__(self, model: FlatModel, tensors: Sequence[torch.Tensor]) -> None:
        """tensors: the model's, in the order of the job's parameters."""
        self._model = model
        self._spec, self._stage = model.spec, 0
        self._tensors = tensors
        self._indices = {id(tensor): index for index, tensor in enumerate(tensors)}
        self._weights: set[int] = set()  # parameters that the script has set since weights last landed
        self._states: dict[int, Mapping[str, torch.Tensor]] | None = None  # by parameter
        self._sent: tuple[set[int], dict[int, Mapping[str, torch.Tensor]] | None] = (set(), None)  # with the last step
        self._copied: list[Assignment] = []  # weights that go again
        self._relied_on: int | None = None  # the rank whose assignments counted in the last step
        self._between_passes: deque[int] = deque(maxlen=64)  # clocks of assignments that the loop may not repeat

    # -- weights -----------------------------------------------------------------------------------------------------

    def find_weights(self) -> None:
        """Finds weights that the script has changed. Raises InvalidRequest, as `changed_weights`."""
        self._weights |= self._model.changed_weights()

    def copies(self) -> dict[int, torch.Tensor]:
        """Returns copies of the weights that the script has set and no step has taken along, by parameter."""
        return self._model.copies(self._weights)

    def set_all(self) -> None:
        """Counts all weights that an optimizer steps as changed."""
        self._weights = {index for index, parameter in enumerate(self._spec.parameters) if parameter.group is not None}

    def lost_step(self) -> None:
        """Drops changed weights with the step that they would have gone with."""
        self._weights, self._copied = set(), []

    def keep_for_again(self) -> None:
        """Keeps what goes, or has gone, with a step that is to be pushed again. Call it before weights land anew."""
        weights, states = self._sent
        self._weights |= weights
        self._states = self._states or states
        for bucket in self._model.layout.buckets:
            absent = self._absent(bucket)
            if not bucket.frozen and len(absent) < len(bucket.slices):
                self._copied = [each for each in self._copied if each.bucket.index != bucket.index]
                copied = memoryview(bytes(self._model.assigned(bucket)))
                self._copied.append(Assignment(bucket, absent, None, copied))
        self._weights, self._sent = set(), (set(), None)

    def _absent(self, bucket: BucketSpec) -> list[int]:
        """Returns the positions of a bucket's slices whose weights the script has not set."""
        return [position for position, part in enumerate(bucket.slices) if part.parameter not in self._weights]

    # -- optimizer state ---------------------------------------------------------------------------------------------

    def by_index(self, states: ParameterStates, of: Collection[int]) -> dict[int, Mapping[str, torch.Tensor]]:
        """Returns state by the index of its parameter, of those parameters alone."""
        found = {self._indices[id(tensor)]: state for tensor, state in states.items() if id(tensor) in self._indices}
        return {index: state for index, state in found.items() if index in of}

    def load(self, parameters: Set[int], states: ParameterStates) -> None:
        """Has the next step begin with this state of the parameters of one optimizer. Raises what `check_states` does.

        Parameters without state in `states` have none from then on; those of other jobs are left out.
        """
        loaded: dict[int, Mapping[str, torch.Tensor]] = {index: {} for index in parameters}
        for tensor, state in states.items():
            index = self._indices[id(tensor)]
            if self._spec.parameters[index].group is not None:
                loaded[index] = state
        check_states(self._spec, loaded)
        self._states = {**(self._states or {}), **loaded}

    def enter(self, stage: Stage) -> None:
        """Begins a stage: what was set of optimizers that step no more is dropped."""
        kept = {index for index, since in stage.since.items() if since < stage.number}
        states = {index: state for index, state in (self._states or {}).items() if index in kept}
        self._spec, self._stage, self._states = stage.spec, stage.number, states or None

    def loaded(self, parameters: Set[int]) -> States | None:
        """Returns the state of these parameters if the script has set it since the last step."""
        if self._states is None or not parameters <= self._states.keys():
            return None
        return {index: self._states[index] for index in parameters}

    def by_tensor(self, parameters: Set[int], states: States) -> dict[torch.Tensor, Mapping[str, torch.Tensor]]:
        """Returns the state of these parameters as torch.optim keeps it."""
        return {
            self._tensors[index]: {
                name: _beside(self._tensors[index], name, value) for name, value in states[index].items()
            }
            for index in sorted(parameters & states.keys())
            if states[index]
        }

    # -- steps -------------------------------------------------------------------------------------------------------

    def send(self, connection: Connection, ranks: Sequence[int], began_late: bool, at_pass_begin: bool) -> bool:
        """Sends the assignments, for the step that comes next; returns whether there are calls to settle.

        ranks:         those that take part
        began_late:    the job was under way when this process joined, and it has made no step yet
        at_pass_begin: the step is the first of a pass over the data, but not of the first pass
        """
        rank, clock = connection.place.identity.rank, connection.clock
        if at_pass_begin and (self._weights or self._copied or self._states is not None):
            self.note_between_passes(clock + 1)
        self._warn_of_relied_on(ranks)
        assignments = [*self._copied, *self._of_weights()]
        self._sent, self._weights, self._states = (self._weights, self._states), set(), None
        states = self._sent[1]
        if not assignments and states is None:
            return False
        if began_late:
            log.warning(
                "the job was at clock %d when this worker joined: what the script has loaded or changed before its "
                "first step is not taken over; the servers' weights and optimizer state count",
                clock,
            )
            return False
        lowest = min(ranks, default=rank)
        if self._spec.consistency.aggregate and rank != lowest:
            self._relied_on = lowest
            return False
        for assignment in (*assignments, *state_assignments(self._spec, self._model.layout, states or {})):
            connection.assign(clock + 1, replace(assignment, stage=self._stage))
        return True

    def counted(self) -> None:
        """Notes that the step counts with which the assignments went: they go no more."""
        self._copied, self._sent = [], (set(), None)

    def _of_weights(self) -> Iterator[Assignment]:
        """Yields the weights that the script has set, by bucket."""
        for bucket in self._model.layout.buckets:
            absent = self._absent(bucket)
            if not bucket.frozen and len(absent) < len(bucket.slices):
                yield Assignment(bucket, absent, None, self._model.assigned(bucket))

    def _warn_of_relied_on(self, ranks: Sequence[int]) -> None:
        relied_on, self._relied_on = self._relied_on, None
        if relied_on is not None and relied_on not in ranks:
            log.warning(
                "worker %d is gone since the step in which this script changed weights or optimizer state: "
                "if it died in that step, the change is lost",
                relied_on,
            )

    def note_between_passes(self, clock: int) -> None:
        """Notes an assignment before the step of this clock that the script's loop may not repeat."""
        self._between_passes.append(clock)

    def rollback(self, clock: int) -> None:
        """Warns, after a rollback to a clock, of assignments that will not be repeated."""
        if any(changed > clock for changed in self._between_passes):
            log.warning(
                "this script changed weights, optimizer state or groups between two passes after clock %d: what it "
                "does between passes is not done again when they are made again",
                clock,
            )


def _beside(tensor: torch.Tensor, name: str, value: torch.Tensor) -> torch.Tensor:
    """Returns state on its parameter's device; numbers stay on the host, as torch keeps them."""
    return value.to(tensor.device) if value.shape == tensor.shape and name != "step" else value
