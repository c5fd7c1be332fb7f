"""The stages of one job on a worker: `session.prepare(optimizer)` has other optimizers step its parameters.

begun  The script hands optimizers over. They replace those that stepped any of their parameters. Parameters that no
       optimizer has stepped yet become a job beside this one (added.py).
tell   With the next step, the worker tells each bucket which optimizer steps it from then on (model/script_stages.py).
       It tells them once from each place. A bucket that is at the stage already stays as it is. A bucket that was
       rolled back to before the stage enters it again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch

from ps_protocol.errors import InvalidRequest, LimitExceeded, Unsupported
from ps_worker.cluster.participation import Participation
from ps_worker.model.script_stages import ScriptStage, tensors_in
from ps_worker.model.state_transfer import check_states, states_of
from ps_worker.model.step import StepMaker
from ps_worker.state.checkpoint import WorkerCheckpoint
from ps_worker.strategies.added import AddedGroups
from ps_worker.strategies.assignments import Assignments
from ps_worker.values import BucketAssignment


class JobStages:
    """Which optimizers step the parameters of one job. For the training thread.

    checkpoint: returns this worker's part of the job's checkpoints
    """

    def __init__(
        self,
        participation: Participation,
        steps: StepMaker,
        assignments: Assignments,
        added: AddedGroups,
        checkpoint: Callable[[], WorkerCheckpoint],
    ) -> None:
        self._participation = participation
        self._steps = steps
        self._assignments = assignments
        self._added = added
        self._checkpoint = checkpoint
        self._numbers = len(steps.stage.optimizers)  # that optimizers have had
        self._known = 0  # the last stage that the shards were told since this worker joined last; 0: none

    @property
    def rows_of(self) -> Mapping[str, str]:
        """By the name of a table, the optimizer that steps its rows."""
        return {table.rows.name: table.optimizer for table in self._steps.model.spec.tables}

    def check_steps(self, optimizer: int) -> None:
        """Raises InvalidRequest for an optimizer that a later call of `prepare` has replaced. optimizer: its number"""
        if optimizer not in self._steps.stage.optimizers:
            raise InvalidRequest(
                "this optimizer was replaced by a later call of prepare: use the one that this call has returned"
            )

    # -- begun -------------------------------------------------------------------------------------------------------

    def begin(self, optimizers: Sequence[torch.optim.Optimizer]) -> list[int]:
        """Makes these optimizers step their parameters from the next step on; returns their numbers.

        They replace all optimizers that had any of these parameters. Their state is taken over, as at `prepare`. If
        they have parameters that were frozen, blocks as `AddedGroups.add`.

        Raises Unsupported or InvalidRequest for what the shards cannot do, and errors of joining a job; nothing has
        changed then.
        """
        self._check_limit()
        known, taken = self._steps.stage.optimizers, {id(tensor) for each in optimizers for tensor in tensors_in(each)}
        live = {n: each for n, each in known.items() if not any(id(tensor) in taken for tensor in tensors_in(each))}
        new = dict(enumerate(optimizers, self._numbers))
        stage = self.following(live | new, new.keys())
        states = {n: states_of([each]) for n, each in new.items()}
        for each in states.values():
            check_states(stage.spec, self._assignments.by_index(each, stage.owner))
        fresh = self._added.begin_stage(live | new, new.keys())
        self._numbers += len(new)
        self.enter(stage)
        for number, each in states.items():
            if each:
                self._assignments.load(stage.parameters_of(number), each)
                self._added.load_first(number, each, fresh)
        for optimizer in optimizers:
            optimizer.state.clear()  # the shards come to have it
        self._assignments.note_between_passes(self._participation.connection.clock + 1)
        self._checkpoint().enter(stage.number, list(stage.optimizers.values()))
        self._checkpoint().trains(fresh)
        return list(new)

    def _check_limit(self) -> None:
        """Raises Unsupported or LimitExceeded if the servers can begin no other stage."""
        limit = self._participation.stage_limit
        if limit == 0:
            raise Unsupported(
                "the servers are of an earlier version, and step a job's parameters with the optimizers that it began "
                "with: upgrade them, or begin another job: session.close(), then connect(job=...) with another name"
            )
        if self._steps.stage.number + 1 >= limit:
            raise LimitExceeded(f"a job may come to {limit} stages, each with other optimizers, and this is one more")

    def following(self, optimizers: Mapping[int, torch.optim.Optimizer], new: Collection[int]) -> ScriptStage:
        """Returns the stage after the current one, without entering it. Raises as `next_stage`.

        optimizers: by number, all optimizers that step in it
        new:        the numbers of those that begin with it
        """
        return self._steps.following(optimizers, new)

    def enter(self, stage: ScriptStage) -> None:
        """Enters a stage. The next step tells the shards: see `tell`."""
        self._participation.connection.drop_drafts()
        self._steps.enter(stage)
        self._assignments.enter(stage)

    def read_groups(self, groups: Sequence[dict[str, Any]]) -> None:
        """Reads hyper-parameters from these groups from now on, in place of those with which the job began."""
        self._steps.read_groups(groups)

    # -- sending the stage to the shards
    # --------------------------------------------------------------------------------------------------------

    def tell(self) -> None:
        """Sends the shards the stage of each bucket, which takes effect with the current step. Call it before anything
        else of this stage is sent. Does nothing if the shards know it.
        """
        stage, connection = self._steps.stage, self._participation.connection
        if self._known == stage.number:
            return
        for index, spec in stage.buckets.items():
            bucket = self._steps.model.layout.buckets[index]
            connection.assign(connection.clock + 1, BucketAssignment(bucket, (), None, None, stage.number, spec))
        self._participation.settle()

    def shards_know(self) -> None:
        """Notes that the shards know the stage: a step that told them counts on all of them."""
        self._known = self._steps.stage.number

    def place_lost(self) -> None:
        """Makes the next step tell the shards again: the job may have been rolled back to before the stage."""
        self._known = 0
