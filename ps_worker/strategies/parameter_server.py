"""Training on parameter servers, in the modes sync, ssp, async and local, and how a worker joins a job.

prepare    The models are described as a job. The worker registers and joins it, and connects to its shards. Then the
           models lie in flat buffers and have the job's weights, rank 0's at first.
train      The step loop of that job (job_training.py). What a step is, of gradients or a round of local steps, is the
           job's StepKind (step_kind.py).
beside     A group that is added to an optimizer later is a job of its own, with a step for each of that optimizer's
           (added.py).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from ps_protocol.errors import InvalidRequest, Unsupported
from ps_protocol.job import JobSpec, added_name
from ps_protocol.layout import Layout, bucket_layout
from ps_runtime.launch_id import LauncherReports, is_launched
from ps_runtime.signals import is_cut_short
from ps_worker.cluster.options import JobOptions
from ps_worker.cluster.participation import Participation
from ps_worker.cluster.shared_memory import check_transport
from ps_worker.cluster.value_rounds import Exchanging, value_rounds
from ps_worker.data.leased import LeasedBatches, LeasedLoader, loader_spec
from ps_worker.data.loaders import (
    PreparedLoader,
    dividing_sampler,
    prepared_loader,
    shard_loader,
    warning_once,
    with_plain_batches,
)
from ps_worker.group import Group, group_of, in_call
from ps_worker.metrics import ModelNumbers, WorkerMetrics
from ps_worker.model.group_spec import check_own_optimizers
from ps_worker.model.job_spec import describe
from ps_worker.model.optimizer import SteppedAlone, refuse
from ps_worker.model.refused import LATER_IN_GROUP, has_scaler, refuse_scaler
from ps_worker.model.replicated import held_alike, reduced_late
from ps_worker.model.state_transfer import states_before
from ps_worker.model.step import StepMaker
from ps_worker.strategies.added import AddedGroups
from ps_worker.strategies.gradient_steps import GradientSteps
from ps_worker.strategies.job_training import JobTraining
from ps_worker.strategies.local_rounds import LocalRounds, outer_optimizer
from ps_worker.strategies.row_reads import RowReads
from ps_worker.strategies.step_kind import StepKind
from ps_worker.strategies.strategy import Prepared
from ps_worker.tables.modules import named_tables
from ps_worker.tables.server_rows import ServerTables
from ps_worker.timeline.recording import Timeline
from ps_worker.values import PrepareOptions

log = logging.getLogger("ps_worker")


class ServerStrategy:
    """The strategy of sync, ssp, async and local, for one job.

    launcher: hears whether the job has begun
    """

    def __init__(
        self,
        job: JobOptions,
        metrics: WorkerMetrics,
        device: torch.device,
        launcher: LauncherReports,
        timeline: Timeline,
    ) -> None:
        self._job = job
        self._metrics = metrics
        self._timeline = timeline
        self._device = device
        self._launcher = launcher
        self._joining: Participation | None = None  # from the beginning of `prepare` on
        self._training: JobTraining | None = None  # from the end of `prepare` on
        self._rounds: Exchanging | None = None  # likewise
        self._alone: SteppedAlone  # likewise

    @property
    def rank(self) -> int:
        """This worker's rank; 0 in an elastic job before `prepare`."""
        return self._training.participation.rank if self._training else self._job.rank or 0

    @property
    def exchange_rank(self) -> int:
        """This process's number among all that exchange values: the rank; in groups of M members, rank * M + the
        member's number.
        """
        group = self._training.participation.group if self._training else None
        return self.rank if group is None else self.rank * group.size + group.member

    @property
    def world_size(self) -> int:
        """The declared world size, or how many take part now in an elastic job."""
        return self._training.participation.world_size if self._training else self._job.world_size or 1

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0; in an elastic job the lowest live rank, as this worker heard last."""
        if self._training is not None:
            return self._training.participation.is_main
        if not self._job.world_size:
            raise InvalidRequest(
                "session.is_main: an elastic job gives out ranks when it is joined; call prepare first"
            )
        return self._job.rank == 0

    @property
    def clock(self) -> int:
        """The script's steps, counted from the job's beginning."""
        return self._training.kind.steps if self._training else 0

    @property
    def round(self) -> int:
        """The number of finished rounds of local steps; in other modes the clock."""
        return self._training.clock if self._training else 0

    def refresh(self) -> None:
        """Pulls the weights with every update that is staged into the model; see JobTraining.refresh."""
        if self._training is not None:
            group = self._training.participation.group
            with in_call(group, "session.global_weights"):
                self._training.refresh()

    def global_values(self) -> Mapping[int, torch.Tensor]:
        """Returns the weights with which the round began, by the id of the parameter; empty in modes other
        than local.
        """
        return self._training.kind.global_values() if self._training else {}

    def prepare(
        self, models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer], options: PrepareOptions
    ) -> Prepared:
        """Joins the job; returns the models with rank 0's weights, and the optimizers to train with: those that step on
        the servers, or in local modes the script's own."""
        figures, metrics_address = self._metrics.figures, self._metrics.announced
        job = self._job
        is_one_process = options.group is None and job.group_size <= 1
        timeouts = job.group_timeout, job.step_timeout
        group = None if is_one_process else group_of(options.group, job.group_size, job.start_timeout, timeouts)
        with in_call(group, "session.prepare"):
            if group is not None:
                group.check_alike(f"rank {job.rank} of {job.world_size} in job {job.job!r}")
                if not (job.group_size and is_launched()):  # another launcher starts the processes of this group alone
                    job = replace(job, launch=replace(job.launch, ranks=range(0)))
            self._joining = Participation(job, metrics_address, self._launcher, figures, self._timeline, group)
            training = join(self._joining, options, models, optimizers, self._metrics, self._device)
        self._training = training
        self._rounds = value_rounds(self._joining, training)
        self._alone = SteppedAlone(models, refuse)
        prepared = training.kind.prepared(optimizers)
        self._alone.know(prepared, optimizers)
        return models, prepared

    def begin_stage(
        self, models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer]
    ) -> Sequence[torch.optim.Optimizer]:
        """Returns the optimizers to train with, as `prepare`. Raises Unsupported or InvalidRequest."""
        assert self._training is not None
        if self._training.participation.group is not None:
            raise Unsupported(LATER_IN_GROUP)
        self._alone.check_new(optimizers)
        prepared = self._training.kind.begin_stage(models, optimizers)
        self._alone.take_over(prepared, optimizers)
        return prepared

    def prepare_loader(self, loader: DataLoader[Any], seed: int) -> PreparedLoader | LeasedLoader:
        """Returns a loader of this worker's share of the data; in an elastic job, a loader that leases batches."""
        training = self._training
        if training is None:
            raise InvalidRequest(
                "prepare the model first, or together with its loaders: joining tells the share of data"
            )
        fixed = dividing_sampler(loader)
        if fixed is not None and not self._job.world_size:
            raise Unsupported(
                f"the loader's {type(fixed).__name__} divides the data once and for all, and workers of an elastic job "
                "come and go: give the loader shuffle=True or False instead"
            )
        share, timer = shard_loader(loader, training.participation.share, seed), self._metrics.timer
        is_iterable = isinstance(loader.dataset, IterableDataset)
        if self._job.world_size or is_iterable:
            catch_up = partial(make_known_rollback, training)
            position = training.checkpoint.add_loader(share, training.look_ahead, catch_up)
            begin, known = position.batches, position if position.is_divided else None
            if is_iterable:
                begin = warning_once(loader, training.participation.share, begin)
            return prepared_loader(share, self._device, timer, begin, known)
        training.kind.check_leased()
        loader = with_plain_batches(loader)
        leases = LeasedBatches(loader_spec(len(training.data.accounts), loader, seed), training.data, training)
        shares = PreparedLoader(share, self._device, timer)
        return LeasedLoader(loader, shares, leases, self._device, timer, training.look_ahead)

    def keep(self, things: Sequence[Any], own: Sequence[Any] = ()) -> None:
        """Adds objects whose state is rolled back with the job, and sent to workers that join late.

        own: those of them whose state belongs to this worker alone, and is not sent
        """
        group = self._joining.group if self._joining is not None else None
        if group is not None and group.is_pipeline and has_scaler(things):
            refuse_scaler()
        if self._training is not None:
            for thing in things:
                self._training.checkpoint.add(thing, any(thing is each for each in own))
            self._training.checkpoint.try_restore()

    def no_sync(self) -> AbstractContextManager[None]:
        """Returns a context in which backward only accumulates gradients. The next backward outside, or `step`, sends
        them.
        """
        return self._training.kind.no_sync() if self._training else nullcontext()

    def exchange(self, value: bytes, what: str) -> dict[int, bytes]:
        """Returns the values of all live workers, by rank; see ValueRounds.exchange."""
        if self._rounds is None:
            raise InvalidRequest(
                f"session.{what.split()[0]}: this worker takes no part in the job yet; call prepare first"
            )
        assert self._joining is not None
        with self._joining.script.standing():
            return self._rounds.exchange(value, what)

    def close(self) -> None:
        """Leaves the job and ends every thread and connection."""
        if self._training is not None:
            warn_of_no_step(self._alone, self._metrics)
            self._alone.close()
            self._training.close()
        elif self._joining is not None:
            self._joining.close()


def make_known_rollback(training: JobTraining) -> None:
    """Makes a rollback of the job that this process has heard of, and has not made. In a group it does nothing: members
    make one together, in a call of all of them.
    """
    part = training.participation
    place, own = part.membership.place, part.connection.place
    if part.group is None and place is not None and place.restore_count > own.restore_count and not part.is_closed:
        training.come_back()


def warn_of_no_step(alone: SteppedAlone, metrics: WorkerMetrics) -> None:
    """Warns, at the end of a script, if it trained but never stepped an optimizer that `prepare` returned.

    A script trains if backward made gradients of the models that `prepare` got, or if an optimizer stepped other
    parameters, such as those of a copy, and a prepared loader was asked for batches.
    """
    if alone.steps or alone.is_closed or is_cut_short():
        return
    why = ""
    if metrics.timer.has_gradients:
        why = "backward has made gradients"
    elif alone.others and metrics.timer.has_asked:
        why = "another optimizer has stepped parameters of no model that prepare got, such as a copy's"
    if why:
        log.warning(
            "no step was made through this session, although %s: what this worker trained, it trained alone. Step the "
            "optimizer that prepare returns: model, optimizer, loader = session.prepare(model, optimizer, loader)",
            why,
        )


def join(
    participation: Participation,
    options: PrepareOptions,
    models: Sequence[nn.Module],
    own: Sequence[torch.optim.Optimizer],
    metrics: WorkerMetrics,
    device: torch.device,
    beside: bool = False,
) -> JobTraining:
    """Joins a job, and pulls its weights into the models. If it raises PSError, the worker has left again.

    own:    the script's optimizers
    beside: it is a second job of this worker: only its weights belong to it, all other state to the first job
    """
    job, group, world_size = participation.options, participation.group, participation.options.world_size
    assert job.consistency is not None
    with ExitStack() as undo:
        undo.callback(participation.close)
        optimizers = _those_of_servers(own, options, group)
        described, tensors = describe(models, optimizers, options, job.job, job.consistency, world_size, group)
        check_transport(described, job.transport)
        states = states_before(described, tensors, optimizers)
        spec = participation.join(described)
        named = list(zip(spec.optimizers, optimizers, strict=True))
        tables = ServerTables(named_tables(models), spec.non_finite)
        layout = _described_layout(participation, spec)
        steps = StepMaker(
            *(spec, tensors, layout, named, tables, options.overlap, metrics),
            draft=participation.draft,
            timeline=participation.timeline,
            is_late=_are_late(group, spec, tensors, options.overlap),
        )
        undo.callback(steps.model.release)
        steps.model.base.alike = held_alike(group, spec, tensors)
        checkpoint_wanted = participation.connect(steps.model, states, tables)

        def begin(number: int, module: nn.Module, optimizer: torch.optim.Optimizer) -> JobTraining:
            rank = participation.rank if world_size else None
            added = participation.beside(replace(job, job=added_name(job.job, number), rank=rank))
            # A step is counted once, by this job: nothing scrapes the metrics of the other.
            return join(added, options, [module], [optimizer], WorkerMetrics(), device, beside=True)

        groups = AddedGroups(spec, tensors, named, begin)
        kind = partial(_kind_of_steps, maker=steps, metrics=metrics, own=own, beside=beside)
        training = JobTraining(participation, steps, tensors, groups, metrics, device, beside, kind)
        undo.callback(training.close)
        reads = RowReads(participation, training.in_place, metrics, lambda: training.is_past)
        undo.callback(tables.connect(reads, participation.connection.shards))
        metrics.watch_model(ModelNumbers(tables.looked_up, steps.model.residuals.ratio))
        training.begin(own, checkpoint_wanted)
        for optimizer in optimizers:  # now that nothing can fail any more
            optimizer.state.clear()  # the shards have it, and a copy here would not follow
        tables.forget()
        undo.pop_all()
        return training


def _those_of_servers(
    own: Sequence[torch.optim.Optimizer], options: PrepareOptions, group: Group | None
) -> Sequence[torch.optim.Optimizer]:
    """Returns the optimizers that the servers run: the script's own, or, in local modes, the one outer optimizer. The
    script's optimizers then step in this process.

    own: the script's optimizers
    """
    if options.local is None:
        return own
    if group is not None:
        check_own_optimizers(group, own)
    return [outer_optimizer(options.local, own)]


def _are_late(group: Group | None, spec: JobSpec, tensors: Sequence[torch.Tensor], overlap: bool | None) -> bool:
    """Whether gradients of this process may change after backward undetected: see StepMaker. Logs the reason if it may
    surprise the user.
    """
    if group is None or group.is_pipeline:
        return group is not None
    name = reduced_late(spec, tensors)
    if name is not None and overlap is not False and spec.local is None:
        log.info(
            "gradients leave with optimizer.step(), and none during backward: the script may reduce that of %s in "
            "between, which is a plain tensor. With fully_shard or parallelize_module over all that is trained they "
            "leave during backward",
            name,
        )
    return name is not None


def _described_layout(participation: Participation, spec: JobSpec) -> Layout:
    """Returns the layout of a job with this process's member number, and passes it to the timeline."""
    member = None if participation.group is None else participation.group.member
    layout = replace(bucket_layout(spec.parameters, spec.bucket_bytes), member=member)
    participation.timeline.describe(layout, member)
    return layout


def _kind_of_steps(
    loop: JobTraining,
    maker: StepMaker,
    metrics: WorkerMetrics,
    own: Sequence[torch.optim.Optimizer],
    beside: bool,
) -> StepKind:
    local = maker.model.spec.local
    if local is None:
        return GradientSteps(loop, maker, beside)
    return LocalRounds(loop, local, maker, metrics, own)
