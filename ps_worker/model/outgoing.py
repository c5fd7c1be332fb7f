"""What a worker tells the shards in a step besides the gradients."""

from __future__ import annotations

import logging
from collections.abc import Sequence, Set

import torch

from ps_protocol.data import DataRange
from ps_protocol.errors import InvalidRequest, NonFiniteGradient
from ps_protocol.job import HyperParameters, JobSpec, NonFinite
from ps_protocol.layout import BucketSpec
from ps_protocol.optimizers import check_hyper_parameters, hyper_parameters
from ps_worker.metrics import WorkerMetrics
from ps_worker.values import BucketPush

log = logging.getLogger("ps_worker")


class LiveGroups:
    """The hyper-parameters of the script's optimizers, which schedulers change."""

    def __init__(self, optimizers: Sequence[tuple[str, torch.optim.Optimizer]]) -> None:
        """optimizers: each with its name. Groups that are added to one later are no part of this."""
        self._optimizers = [(name, optimizer, len(optimizer.param_groups)) for name, optimizer in optimizers]
        self._checked: list[HyperParameters] = []

    def read(self) -> list[HyperParameters]:
        """Those of each group now. Raises InvalidRequest for what the shards would refuse, before a push."""
        for name, optimizer, count in self._optimizers:
            if len(optimizer.param_groups) < count:
                raise InvalidRequest(
                    f"{name} had {count} parameter groups at prepare and has {len(optimizer.param_groups)} now: groups "
                    "cannot be taken away; set requires_grad=False on their parameters, or lr to 0"
                )
        named = [
            (name, group) for name, optimizer, count in self._optimizers for group in optimizer.param_groups[:count]
        ]
        found = [hyper_parameters(name, group) for name, group in named]
        if found != self._checked:
            for (name, _), values in zip(named, found, strict=True):
                check_hyper_parameters(name, values)
            self._checked = found
        return found


def is_left_out(name: str | None, policy: NonFinite, metrics: WorkerMetrics) -> bool:
    """Whether a step counts as none because the gradient of the parameter of that name is not finite.

    Raises NonFiniteGradient if such steps are refused.
    """
    if name is None:
        return False
    metrics.not_finite()
    if policy is NonFinite.REFUSE:
        raise NonFiniteGradient(
            f"the gradient of {name} is not finite; it was not pushed "
            "(prepare(..., non_finite='skip') leaves out such steps instead)"
        )
    log.warning("the gradient of %s is not finite; this step is skipped", name)
    return True


def bucket_push(
    spec: JobSpec,
    bucket: BucketSpec,
    clock: int,
    absent: Set[int],
    groups: Sequence[HyperParameters],
    skip: bool,
    ranges: Sequence[DataRange],
) -> BucketPush:
    """One bucket's part of a step.

    absent: the parameters that have no gradient in this step
    groups: the hyper-parameters of each group of the job
    skip:   the step counts as none
    ranges: of leased data, that the step used
    """
    missing = [position for position, segment in enumerate(bucket.segments) if segment.parameter in absent]
    mine = {spec.parameters[segment.parameter].group for segment in bucket.segments}
    return BucketPush(
        bucket=bucket,
        clock=clock,
        absent=[] if skip else missing,
        empty=skip or len(missing) == len(bucket.segments),
        groups={group: groups[group] for group in mine if group is not None},
        ranges=list(ranges),
    )
