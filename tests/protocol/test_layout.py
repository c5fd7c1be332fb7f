"""Both ends compute the same buckets, and the buckets hold every element once."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ps_protocol.layout import ALIGNMENT_BYTES, DATA_TYPES, DEFAULT_BUCKET_BYTES, Layout, ParameterSpec, bucket_layout

FLOATING = [name for name, entry in DATA_TYPES.items() if entry.floating]


@st.composite
def parameters(draw: st.DrawFn) -> list[ParameterSpec]:
    """Models of up to a dozen tensors: scalars, empty ones, large ones, of mixed types, trained and held."""
    found = []
    for index in range(draw(st.integers(0, 12))):
        shape = tuple(draw(st.lists(st.integers(0, 12), max_size=3)))
        group = draw(st.sampled_from([None, 0, 1]))
        dtype = draw(st.sampled_from(list(DATA_TYPES) if group is None else FLOATING))
        found.append(ParameterSpec(f"p{index}", shape, dtype, group))
    return found


BUCKET_BYTES = st.integers(1, 8).map(lambda n: n * ALIGNMENT_BYTES)


def test_the_last_parameter_comes_first_and_a_large_one_is_split() -> None:
    specs = [
        ParameterSpec("weight", (10, 4), "float32", 0),
        ParameterSpec("bias", (4,), "float32", 0),
        ParameterSpec("running_mean", (3,), "float32", None),
    ]
    layout = bucket_layout(specs, bucket_bytes=128)
    found = [
        (b.space, b.frozen, b.start, b.numel, [(s.parameter, s.start, s.offset, s.length) for s in b.slices])
        for b in layout.buckets
    ]
    assert found == [
        ("float32", False, 0, 32, [(1, 0, 0, 4), (0, 0, 16, 16)]),  # bias; weight from the next 64-byte boundary on
        ("float32", False, 32, 32, [(0, 16, 0, 24)]),
        ("frozen-float32", True, 0, 16, [(2, 0, 0, 3)]),
    ]
    assert layout.offsets == (16, 0, 0)
    assert layout.space_sizes == {"float32": 64, "frozen-float32": 16}
    assert layout.nbytes == 128 + 128 + 64


def test_element_types_never_share_a_bucket() -> None:
    specs = [ParameterSpec("a", (4,), "float32", 0), ParameterSpec("b", (4,), "bfloat16", 0)]
    assert [bucket.dtype for bucket in bucket_layout(specs, DEFAULT_BUCKET_BYTES).buckets] == ["bfloat16", "float32"]


@given(parameters(), BUCKET_BYTES)
def test_every_element_of_every_parameter_is_in_one_slice(specs: list[ParameterSpec], bucket_bytes: int) -> None:
    layout = bucket_layout(specs, bucket_bytes)
    covered: dict[int, list[tuple[int, int]]] = {index: [] for index in range(len(specs))}
    for bucket in layout.buckets:
        for segment in bucket.slices:
            spec = specs[segment.parameter]
            assert spec.dtype == bucket.dtype
            assert (spec.param_group is None) == bucket.frozen
            assert layout.offsets[segment.parameter] + segment.start == bucket.start + segment.offset
            covered[segment.parameter].append((segment.start, segment.start + segment.length))
    for index, spec in enumerate(specs):
        edges = [0, *(end for _, end in sorted(covered[index]))]
        assert sorted(covered[index]) == list(pairwise(edges))
        assert edges[-1] == spec.numel
        assert layout.offsets[index] * DATA_TYPES[spec.dtype].itemsize % ALIGNMENT_BYTES == 0


@given(parameters(), BUCKET_BYTES)
def test_buckets_tile_their_spaces_and_slices_do_not_overlap(specs: list[ParameterSpec], bucket_bytes: int) -> None:
    layout = bucket_layout(specs, bucket_bytes)
    assert [bucket.index for bucket in layout.buckets] == list(range(len(layout.buckets)))
    frozen = [bucket.frozen for bucket in layout.buckets]
    assert frozen == sorted(frozen), "what trains comes first"
    ends = dict.fromkeys(layout.space_sizes, 0)
    for bucket in layout.buckets:
        assert bucket.start == ends[bucket.space]
        assert 0 < bucket.nbytes <= bucket_bytes
        ends[bucket.space] += bucket.numel
        assert bucket.slices, "no bucket holds nothing but padding"
        position = 0
        for segment in bucket.slices:
            assert segment.offset >= position
            position = segment.offset + segment.length
        assert position <= bucket.numel
    assert ends == layout.space_sizes
    full = [b for b in layout.buckets if b.start + b.numel < layout.space_sizes[b.space]]
    assert all(bucket.nbytes == bucket_bytes for bucket in full), "only the last of a space is smaller"


@given(parameters(), BUCKET_BYTES)
def test_the_layout_depends_on_sizes_and_types_alone(specs: list[ParameterSpec], bucket_bytes: int) -> None:
    renamed = [
        ParameterSpec(f"other{i}", (spec.numel,), spec.dtype, None if spec.param_group is None else 0)
        for i, spec in enumerate(specs)
    ]
    assert bucket_layout(renamed, bucket_bytes) == bucket_layout(specs, bucket_bytes)


@pytest.mark.parametrize("specs", [[], [ParameterSpec("empty", (0, 3), "float32", 0)]])
def test_a_model_without_elements_has_no_buckets(specs: list[ParameterSpec]) -> None:
    layout: Layout = bucket_layout(specs, DEFAULT_BUCKET_BYTES)
    assert layout.buckets == ()
    assert layout.nbytes == 0
