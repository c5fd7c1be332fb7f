"""The layout of a job's buckets as messages, for clients that do not compute it."""

from __future__ import annotations

from typing import Any

from ps_protocol.convert import DATA_TYPE_NUMBERS
from ps_protocol.job import JobSpec
from ps_protocol.layout import BucketSpec, bucket_layout
from ps_protocol.segment_layout import SegmentPlan, segment_plan
from ps_protocol.v1 import jobs_pb2


def layout_of(spec: JobSpec) -> dict[str, Any]:
    """Returns the fields of a RegisterJobResponse that say what lies where."""
    layout = bucket_layout(spec.parameters, spec.bucket_bytes)
    plan = segment_plan(layout)
    return {"layout": [_bucket(bucket, plan) for bucket in layout.buckets], "segment_bytes": plan.size}


def _bucket(bucket: BucketSpec, plan: SegmentPlan) -> jobs_pb2.BucketLayout:
    message = jobs_pb2.BucketLayout(
        data_type=DATA_TYPE_NUMBERS[bucket.dtype],
        element_count=bucket.numel,
        frozen=bucket.frozen,
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
