"""Wire formats: sizes, values and memory, and the one choice that both ends make."""

from __future__ import annotations

import pytest
import torch

from ps_protocol.job import JobSpec
from ps_protocol.layout import DATA_TYPES, ParameterSpec, bucket_layout
from ps_protocol.modes import Consistency
from ps_protocol.tensors import BLOCKS, PLAIN, bytes_of, gradient_codec, weight_codec
from ps_protocol.v1 import types_pb2
from ps_protocol.wire_formats import FORMATS


def job(gradient_wire: str, weight_wire: str) -> JobSpec:
    parameters = (
        ParameterSpec("wide", (8,), "float32", 0),
        ParameterSpec("half", (8,), "float16", 0),
        ParameterSpec("double", (8,), "float64", 0),
        ParameterSpec("buffer", (8,), "float32", None),
        ParameterSpec("count", (8,), "int64", None),
    )
    groups = ({"lr": 0.1},)
    rule = Consistency(None)
    return JobSpec(
        "job", parameters, "SGD", groups, rule, 1024, 0, gradient_wire=gradient_wire, weight_wire=weight_wire
    )


@pytest.mark.parametrize("name", PLAIN)
def test_what_travels_as_it_is_is_never_copied(name: str) -> None:
    codec, values = PLAIN[name], torch.tensor([0, 1, 1, 0, 1]).to(PLAIN[name].torch_dtype)
    assert codec.encode(values) is values
    payload = bytes_of(codec.encode(values))
    decoded = codec.decode(payload, 5)
    assert len(payload) == codec.size(5)
    assert torch.equal(decoded, values)
    assert decoded.data_ptr() == values.data_ptr()


@pytest.mark.parametrize("name", sorted(FORMATS.keys() - BLOCKS.keys()))
def test_a_wire_format_rounds_as_torch_does_and_decodes_where_it_lies(name: str) -> None:
    codec, values = PLAIN[name], torch.randn(1000)
    payload = bytes(bytes_of(codec.encode(values)))
    assert len(payload) == codec.size(1000)
    assert torch.equal(codec.decode(payload, 1000), values.to(getattr(torch, name)))
    assert codec.decode(b"", 0).shape == (0,)


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_a_format_says_whether_its_scales_show_what_is_not_finite(name: str) -> None:
    codec, values = BLOCKS.get(name) or PLAIN[name], torch.tensor([1.0, torch.nan, torch.inf, 2.0])
    assert codec.is_finite(bytes_of(codec.encode(values))) is not codec.is_checked_by_scales


def test_only_float32_that_an_optimizer_steps_is_narrowed() -> None:
    spec = job("bfloat16", "float16")
    chosen = {
        bucket.space: (gradient_codec(spec, bucket).name, weight_codec(spec, bucket).name)
        for bucket in bucket_layout(spec.parameters, spec.bucket_bytes).buckets
        if not bucket.frozen
    }
    assert chosen == {
        "float32": ("bfloat16", "float16"),
        "float16": ("float16", "float16"),
        "float64": ("float64", "float64"),
    }
    untrained = [b for b in bucket_layout(spec.parameters, spec.bucket_bytes).buckets if b.frozen]
    assert {weight_codec(spec, bucket).name for bucket in untrained} == {"float32", "int64"}
    assert all(weight_codec(spec, bucket).keeps(bucket) for bucket in untrained)


def test_every_format_and_element_type_of_the_contract_has_a_codec_and_every_codec_a_number() -> None:
    for enum, prefix, names in (
        (types_pb2.WireFormat, "WIRE_FORMAT_", FORMATS),
        (types_pb2.DataType, "DATA_TYPE_", DATA_TYPES),
    ):
        assert {key.removeprefix(prefix).lower() for key in enum.DESCRIPTOR.values_by_name} == {"unspecified", *names}
    assert set(PLAIN) == set(DATA_TYPES)
