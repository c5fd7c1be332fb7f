"""Assignments: weights, and optimizer state, that a script sets itself between two steps.

noted    The model finds changed weights before a step; `load_state_dict` hands optimizer state over.
sent     They go with the next step, and take effect with it. In sync only those of the lowest live rank count, so only
         that worker sends them. The worker keeps them until the step counts, because it may have to push the step again
         from another place. If the data of the step comes again instead, they go with the step after it.
lost     They are lost with the step if the one worker that sends them dies in it.
since    A script may interrupt a step, set more, and go on. What it has set since goes with the next step, whether the
         interrupted one counts or not.
refused  They stay for the next step if an error ends this one before it is pushed: a gradient that is not finite, on
         another member of the group, too; servers that refuse some of them.
repeated After a rollback a script repeats what it does in its loop over the data. It does not repeat what it does
         between two passes, and the log says so.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from dataclasses import dataclass, replace

import torch

from ps_protocol.errors import InvalidRequest, LimitExceeded, UnknownWorker
from ps_protocol.layout import Layout
from ps_protocol.messages.workers import JoinResult
from ps_protocol.tensors import tensor_from, whole_of
from ps_worker.cluster.connection import Connection
from ps_worker.cluster.participation import Participation, end_last_step
from ps_worker.group import Group, in_call
from ps_worker.metrics import WorkerMetrics, added
from ps_worker.model.empty_shards import with_empty_shards
from ps_worker.model.flat import FlatModel
from ps_worker.model.optimizer import ParameterStates
from ps_worker.model.replicated import beside
from ps_worker.model.script_stages import ScriptStage, tensors_in
from ps_worker.model.sharded import is_sharded
from ps_worker.model.state_transfer import StateCollector, States, check_states, state_assignments
from ps_worker.tables.server_rows import ServerTables
from ps_worker.values import BucketAssignment

log = logging.getLogger("ps_worker")


@dataclass(frozen=True)
class SetByScript:
    """Weights and optimizer state that a script has set, and that may be in no step that counts yet. By parameter.

    weights, states: those that the current step includes
    since:           weights that were set after that step began. Optimizer state set since waits for the next step
                     anyway
    """

    weights: Mapping[int, torch.Tensor]
    states: Mapping[int, Mapping[str, torch.Tensor]]
    since: Mapping[int, torch.Tensor]


class Assignments:
    """The assignments of one worker's script that wait for its next step. For the training thread.

    Rows that the script sets wait in their tables; this class only decides whether they count.

    are_some: something waits for the next step, or goes with the current one. While it is False no step need call this
    """

    def __init__(self, model: FlatModel, tensors: Sequence[torch.Tensor], tables: ServerTables) -> None:
        """tensors: the model's, in the order of the job's parameters."""
        self._model, self._tables = model, tables
        self.are_some = False
        self._spec, self._stage = model.spec, 0
        self._tensors = tensors
        self._indices = {id(tensor): index for index, tensor in enumerate(tensors)}
        self._weights: set[int] = set()  # parameters that the script has set since weights last landed
        self._states: dict[int, Mapping[str, torch.Tensor]] | None = None  # by parameter
        self._relied_on: int | None = None  # the rank whose assignments counted in the last step
        self._of_step: list[BucketAssignment] = []  # the assignments of the current step, until it counts
        self._states_of_step: dict[int, Mapping[str, torch.Tensor]] = {}  # likewise, by parameter
        self._sent_over: Connection | None = None  # the connection over which the current step's assignments were sent
        self._between_passes: deque[int] = deque(maxlen=64)  # clocks of assignments that the loop may not repeat

    # -- weights -----------------------------------------------------------------------------------------------------

    def find_weights(self) -> None:
        """Finds weights that the script has changed. Raises InvalidRequest, as FlatModel.changed_weights."""
        self.note_weights(self._model.changed_weights())

    def note_weights(self, changed: Collection[int]) -> None:
        """Notes weights that the script has changed, by parameter."""
        if changed:
            self.are_some = True  # first: an interrupt may come between the two
            self._weights.update(changed)

    def copies(self) -> dict[int, torch.Tensor]:
        """Returns copies of the weights that the script has set and that no step includes yet, by parameter."""
        return self._model.copies(self._weights)

    def set_all(self) -> None:
        """Treats all trained weights as changed by the script."""
        trains = self._model.layout.trains
        self.note_weights([index for index, parameter in enumerate(self._spec.parameters) if trains(parameter)])

    def step_is_over(self) -> None:
        """Forgets the assignments of the current step, and weights that were changed since."""
        self._weights, self._of_step, self._states_of_step = set(), [], {}
        self.are_some = self._states is not None or self._relied_on is not None

    # -- a lost place ------------------------------------------------------------------------------------------------

    def at_hand(self, of_step: bool, since: bool) -> SetByScript:
        """Returns the script's assignments, before the weights of a new place overwrite them. Raises as `find_weights`.

        In local:H it returns nothing: there the script's weights belong to the round.

        of_step: a step has ended: return what it includes
        since:   the script may have set more after that. Both are True if the script interrupted the step and went on
        """
        if self._spec.local is not None:
            return SetByScript({}, {}, {})
        if since:
            self.find_weights()
        weights, states = (self._weights_of_step(), self._states_of_step) if of_step else ({}, {})
        return SetByScript(weights, states, self.copies() if since else {})

    def with_later(self, kept: SetByScript) -> SetByScript:
        """Returns `kept` with the weights that the script has set since an interrupt on the way to another place.

        kept: what it had set before, whose memory the weights of that place may have overwritten since
        """
        self._weights = set()
        return replace(kept, since={**kept.since, **self.at_hand(of_step=False, since=True).since})

    def keep(self, kept: SetByScript, counts: bool) -> None:
        """Includes what the script has set in the next step, because the script does not set it again.

        counts: the current step counts, so that only what was set since then is kept
        """
        for weights in (kept.since,) if counts else (kept.weights, kept.since):
            self._model.put_back(weights)
            self.note_weights(weights)
        if kept.states and not counts:
            self._states = {**kept.states, **(self._states or {})}
            self.are_some = True

    def take_back(self) -> None:
        """Moves the assignments of the current step to the next one: an error has kept the step from being pushed.

        Assignments that shards have already received have no effect before that step, which sends them again. In
        local:H they are dropped: the next round sends its final weights anyway.
        """
        kept = self.at_hand(of_step=True, since=False)
        self._of_step, self._states_of_step = [], {}
        self.keep(kept, counts=False)

    def _weights_of_step(self) -> dict[int, torch.Tensor]:
        found: dict[int, torch.Tensor] = {}
        for each in self._of_step:
            if each.state is not None or each.payload is None:
                continue
            values = tensor_from(each.payload, each.bucket.dtype)
            for position, part in enumerate(each.bucket.slices):
                if position not in each.absent:
                    numel = self._spec.parameters[part.parameter].numel
                    whole = found.setdefault(part.parameter, torch.empty(numel, dtype=values.dtype))
                    whole[part.start : part.start + part.length] = values[part.offset : part.offset + part.length]
        parameters = self._spec.parameters  # a complex one travels as its real parts
        return {i: whole_of(flat.view(parameters[i].shape), parameters[i].element) for i, flat in found.items()}

    # -- optimizer state ---------------------------------------------------------------------------------------------

    def by_index(self, states: ParameterStates, of: Collection[int]) -> dict[int, Mapping[str, torch.Tensor]]:
        """Returns state by the index of its parameter. of: only the state of parameters with these indices"""
        found = {self._indices[id(tensor)]: state for tensor, state in states.items() if id(tensor) in self._indices}
        return {index: state for index, state in found.items() if index in of}

    def load(self, parameters: Set[int], states: ParameterStates) -> None:
        """Sets the state with which the next step begins, for the parameters of one optimizer. Raises what
        `check_states` does.

        Parameters without state in `states` have none from then on. State of parameters of other jobs is ignored.
        """
        loaded: dict[int, Mapping[str, torch.Tensor]] = {index: {} for index in parameters}
        for tensor, state in states.items():
            index = self._indices.get(id(tensor)) if is_sharded(tensor) else self._indices[id(tensor)]
            if index is None:  # a DTensor of which this member holds no piece of the job
                continue
            if self._spec.parameters[index].param_group is not None:
                loaded[index] = state
        check_states(self._spec, loaded)
        self._states = {**(self._states or {}), **loaded}
        self.are_some = True

    def enter(self, stage: ScriptStage) -> None:
        """Enters a stage. State that was set for optimizers that do not step any more is dropped."""
        kept = {index for index, since in stage.since.items() if since < stage.number}
        states = {index: state for index, state in (self._states or {}).items() if index in kept}
        self._spec, self._stage, self._states = stage.spec, stage.number, states or None

    def state_of(
        self, stage: ScriptStage, optimizer: int, group: Group | None, fetch: Callable[[], States]
    ) -> dict[torch.Tensor, Mapping[str, torch.Tensor]]:
        """Returns the state of one optimizer as torch.optim keeps it: as the script has set it since the last step, or
        as it is on the shards. fetch: returns the latter, of all optimizers
        """
        parameters = stage.parameters_of(optimizer)
        with in_call(group, "optimizer.state_dict"):
            states = self._loaded(parameters)
            lacks = states is None
            if group is not None:  # a fetch is a call of all members, and one may have none of these parameters
                lacks = b"lacks" in group.gather(b"lacks" if lacks else b"")
            own = self._by_tensor(parameters, {**(fetch() if lacks else {}), **(states or {})})
            alike = self._model.base.alike
            own = own if alike is None else {**own, **alike.states(own)}
            return with_empty_shards(group, tensors_in(stage.optimizers[optimizer]), own)

    def _loaded(self, parameters: Set[int]) -> States | None:
        """Returns the state of these parameters if the script has set that of all of them since the last step;
        otherwise None.
        """
        if self._states is None or not parameters <= self._states.keys():
            return None
        return {index: self._states[index] for index in parameters}

    def _by_tensor(self, parameters: Set[int], states: States) -> dict[torch.Tensor, Mapping[str, torch.Tensor]]:
        return {
            self._tensors[index]: {
                name: beside(self._tensors[index], name, value) for name, value in states[index].items()
            }
            for index in sorted(parameters & states.keys())
            if states[index]
        }

    # -- steps -------------------------------------------------------------------------------------------------------

    def gather(
        self, place: JoinResult, clock: int, ranks: Sequence[int], began_late: bool, at_pass_begin: bool, later: bool
    ) -> None:
        """Includes the assignments in the step of `clock`, which comes next.

        place:         that of this worker
        ranks:         the live ranks
        began_late:    this process joined a job under way, and has made no step yet
        at_pass_begin: the step is the first of a pass over the data, but not of the first pass
        later:         it is not known yet whose assignments count: the caller calls `rely_on` afterwards
        """
        rank, has_rows = place.identity.rank, self._tables.are_some and bool(self._tables.assigned())
        if at_pass_begin and (self._weights or self._states is not None or has_rows):
            self.note_between_passes(clock)
        self._warn_of_relied_on(ranks)
        weights, self._weights = self._weights, set()
        states, self._states = self._states, None
        self._of_step, self._states_of_step, self._sent_over = [], {}, None
        if began_late and (weights or states is not None or has_rows):
            log.warning(
                "the job was at clock %d when this worker joined: what the script has loaded or changed before its "
                "first step is not taken over; the servers' weights, rows and optimizer state count",
                clock - 1,
            )
            self._tables.forget_assigned()
            return
        if not weights and states is None:
            return
        lowest = min(ranks, default=rank)
        if self._spec.consistency.assigns_once and rank != lowest and not later:
            self._relied_on = lowest
            return
        for bucket in self._model.layout.buckets:
            absent = [position for position, part in enumerate(bucket.slices) if part.parameter not in weights]
            if not bucket.frozen and len(absent) < len(bucket.slices):
                # A copy: weights that land would change it.
                values = memoryview(bytes(self._model.assigned(bucket)))
                self._of_step.append(BucketAssignment(bucket, absent, None, values))
        self._of_step += state_assignments(self._spec, self._model.layout, states or {})
        self._states_of_step = states or {}

    def rely_on(self, lowest: int, rank: int) -> None:
        """Leaves it to the worker of the lowest rank to send what this one's step would take along, where the mode has
        its assignments alone count."""
        if self.has_some and self._spec.consistency.assigns_once and rank != lowest:
            self._relied_on, self._of_step, self._states_of_step = lowest, [], {}

    def send(self, connection: Connection, begun: int | None = None) -> bool:
        """Sends the assignments of the next step, once over each connection. Returns whether the caller must `settle`.

        begun: as in Connection.push_pull
        """
        if self._sent_over is connection:
            return False
        self._sent_over = connection
        if not self._of_step:
            return False
        of_step = [each for each in self._of_step if begun is None or not connection.has_had(each.bucket, begun)]
        for assignment in of_step:
            connection.assign(connection.clock + 1, replace(assignment, stage=self._stage))
        return bool(of_step)

    @property
    def has_some(self) -> bool:
        """Whether the current step includes assignments."""
        return bool(self._of_step)

    def _warn_of_relied_on(self, ranks: Sequence[int]) -> None:
        relied_on, self._relied_on = self._relied_on, None
        if relied_on is not None and relied_on not in ranks:
            log.warning(
                "worker %d is gone since the step in which this script changed weights or optimizer state: "
                "if it died in that step, the change is lost",
                relied_on,
            )

    def note_between_passes(self, clock: int) -> None:
        """Notes that the script has made an assignment between two passes, before the step of this clock.

        After a rollback the script does not repeat it: see `rollback`.
        """
        self._between_passes.append(clock)

    def rollback(self, clock: int) -> None:
        """Warns, after a rollback to a clock, of assignments that will not be repeated."""
        if any(changed > clock for changed in self._between_passes):
            log.warning(
                "this script changed weights, rows, optimizer state or groups between two passes after clock %d: what "
                "it does between passes is not done again when they are made again",
                clock,
            )


def send_assigned_rows(participation: Participation, tables: ServerTables, begun: int | None) -> None:
    """Sends the rows that the script has set before the current step. If the servers refuse some, none take effect.

    begun: as in Connection.push_pull
    """
    connection, assigned = participation.connection, tables.assigned()
    for table, rows in assigned.items():
        connection.assign_rows(connection.clock + 1, table, rows, begun)
    try:
        participation.settle()
    except (InvalidRequest, LimitExceeded):
        tables.forget_assigned()
        connection.forget_assigned_rows()
        raise


def fetch_weights(
    participation: Participation, assignments: Assignments, model: FlatModel, metrics: WorkerMetrics
) -> bool:
    """Fetches the weights with all that is staged; what the script has set stays. Returns whether a checkpoint wants
    this worker's state at its clock.
    """
    end_last_step(participation)
    assignments.find_weights()
    set_by_script = assignments.copies()
    try:
        model.begin_pull()
        pulls = participation.connection.pull(all_staged=True)
        participation.settle()
        model.end_pull()
    finally:
        model.put_back(set_by_script)
    landed = [pull.result() for pull in pulls]
    metrics.fetched(added(pull.sizes for pull in landed))
    return any(pull.checkpoint for pull in landed)  # a shard tells that at one clock alone


def fetched_states(
    participation: Participation,
    in_place: Callable[[Callable[[], None]], bool | None],
    stage: ScriptStage,
    layout: Layout,
) -> States:
    """Pulls the optimizer state of a worker's parameters from the shards. in_place: see JobTraining

    Raises UnknownWorker if the worker has left.
    """
    if participation.is_closed:
        raise UnknownWorker(
            "the session is closed, and the optimizer's state went with its place in the job: save it before"
        )
    while True:
        collector = StateCollector(stage, layout)

        def fetch(collector: StateCollector = collector) -> None:
            participation.connection.pull_state(collector.land)
            participation.settle()

        with in_call(participation.group, "optimizer.state_dict"):
            if in_place(fetch) is None:
                return collector.states
