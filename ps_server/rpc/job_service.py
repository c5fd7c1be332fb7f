"""The coordinator's service for whole jobs: registers, saves and ends them."""

from __future__ import annotations

import math
from typing import Any

import grpc

from ps_protocol.convert import DATA_TYPE_NUMBERS, job_spec
from ps_protocol.errors import NotFound
from ps_protocol.job import JobSpec
from ps_protocol.layout import BucketSpec, bucket_layout
from ps_protocol.messages.workers import shard_map_message
from ps_protocol.segment_layout import SegmentPlan, segment_plan
from ps_protocol.stage_spec import MAX_STAGES
from ps_protocol.v1 import jobs_pb2, jobs_pb2_grpc
from ps_protocol.versions import VERSION, check_worker_version
from ps_server.coordinator.coordinator import Coordinator
from ps_server.rpc.call_limits import caller_name, check_job

ANSWER_SECONDS = 1.0  # kept free of the deadline for the answer's way to the caller


class JobService(jobs_pb2_grpc.JobServiceServicer):  # type: ignore[misc,unused-ignore]
    """Registers, checkpoints and ends jobs."""

    NAME = jobs_pb2.DESCRIPTOR.services_by_name["JobService"].full_name

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator

    def register(self, server: grpc.Server) -> None:
        """Adds the methods to a server."""
        jobs_pb2_grpc.add_JobServiceServicer_to_server(self, server)

    def RegisterJob(self, request: Any, context: grpc.ServicerContext) -> Any:
        check_job(request.spec.name)
        check_worker_version(request.protocol_version)
        job, created = self._coordinator.register_job(
            job_spec(request.spec), request.launch, request.memory_place, caller_name()
        )
        return jobs_pb2.RegisterJobResponse(
            shard_map=shard_map_message(self._coordinator.shard_map(job.placed.placement)),
            created=created,
            bucket_bytes=job.spec.bucket_bytes,
            run=job.placed.run,
            protocol_version=VERSION,
            stage_limit=MAX_STAGES,
            **(layout_of(job.spec) if request.layout_wanted else {}),
        )

    def CheckpointJob(self, request: Any, context: grpc.ServicerContext) -> Any:
        job = self._coordinator.job(request.job)
        # Before a shard that ends has its part in a checkpoint: the coordinator may be about to make a later one.
        if request.caller_ends and job.checkpoints is not None and self._coordinator.ending.awaited(_left(context)):
            made = job.checkpoints.final()
        else:
            made = job.checkpoint(_left(context))
        checkpoint = jobs_pb2.Checkpoint(
            name=made.name, clock=made.clock, size_bytes=made.bytes, missing_ranks=made.without
        )
        return jobs_pb2.CheckpointJobResponse(checkpoint=checkpoint)

    def EndJob(self, request: Any, context: grpc.ServicerContext) -> Any:
        forgotten = self._coordinator.ended.forget(request.job)
        try:
            self._coordinator.job(request.job).end("`ps-server end` ended it")
        except NotFound:
            if not forgotten:
                raise
            self._coordinator.save()
        return jobs_pb2.EndJobResponse()


def _left(context: grpc.ServicerContext) -> float:
    """Returns how many seconds an answer may still take."""
    left = context.time_remaining()
    return math.inf if left is None else max(0.0, left - ANSWER_SECONDS)


def layout_of(spec: JobSpec) -> dict[str, Any]:
    """Returns the fields of a RegisterJobResponse that describe the buckets and the segment."""
    layout = bucket_layout(spec.parameters, spec.bucket_bytes)
    plan = segment_plan(layout)
    return {"layout": [_bucket(bucket, plan) for bucket in layout.buckets], "segment_bytes": plan.size}


def _bucket(bucket: BucketSpec, plan: SegmentPlan) -> jobs_pb2.BucketLayout:
    message = jobs_pb2.BucketLayout(
        data_type=DATA_TYPE_NUMBERS[bucket.dtype],
        element_count=bucket.numel,
        frozen=bucket.frozen,
        member=bucket.member,
        slices=[
            jobs_pb2.SliceLayout(
                parameter=part.parameter, parameter_start=part.start, bucket_start=part.offset, length=part.length
            )
            for part in bucket.slices
        ],
    )
    if not bucket.frozen:
        gradients, weights = plan.gradients[bucket.space], plan.weights[bucket.space]
        message.gradient_offset = gradients.offset + gradients.codec.size(bucket.start)
        message.weights_offset = weights.offset + weights.codec.size(bucket.start)
    return message
