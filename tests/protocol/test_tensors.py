"""Bytes are tensors and tensors are bytes, without copies."""

from __future__ import annotations

import math

import pytest
import torch

from ps_protocol.layout import DATA_TYPES
from ps_protocol.tensors import (
    DTYPE_NAMES,
    TORCH_DTYPES,
    bytes_of,
    element_name,
    element_type,
    is_finite,
    parts_of,
    tensor_from,
    whole_of,
)

NAN, INF = float("nan"), float("inf")
FLOATING = [name for name, entry in DATA_TYPES.items() if entry.floating]


@pytest.mark.parametrize("name", DATA_TYPES)
def test_every_element_type_goes_to_bytes_and_back(name: str) -> None:
    assert tensor_from(b"", name).shape == (0,)
    values = torch.tensor([0, 1, 1, 0, 1]).to(TORCH_DTYPES[name])
    assert DTYPE_NAMES[values.dtype] == name
    assert values.itemsize == DATA_TYPES[name].itemsize
    assert values.dtype.is_floating_point == DATA_TYPES[name].floating
    back = tensor_from(bytes(bytes_of(values)), name)
    assert back.dtype == values.dtype
    assert torch.equal(back, values)


OTHERS = [
    name
    for name in (
        "complex64",
        "complex128",
        "int8",
        "int16",
        "uint16",
        "uint32",
        "uint64",
        "float8_e4m3fn",
        "float8_e5m2",
    )
    if element_type(name) is not None
]


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 3)])
def test_other_types_are_their_parts_and_these_are_they_again(name: str, shape: tuple[int, ...]) -> None:
    dtype = element_type(name)
    assert dtype is not None
    assert element_name(dtype) == name
    values = torch.randint(0, 100, (math.prod(shape) * dtype.itemsize,), dtype=torch.uint8).view(dtype).view(shape)
    parts = parts_of(values)
    assert (parts.dtype, parts.shape) == (torch.uint8, (*shape, dtype.itemsize))
    back = whole_of(parts, name)
    assert (back.dtype, back.shape) == (dtype, shape)
    assert torch.equal(parts_of(back), parts)
    assert back.data_ptr() == values.data_ptr(), "nothing is copied"


def test_complex_numbers_that_train_are_their_real_and_imaginary_parts() -> None:
    values = torch.tensor([[1 + 2j, 3 - 4j]])
    assert parts_of(values, trained=True).tolist() == [[[1, 2], [3, -4]]]
    assert parts_of(values.conj().T, trained=True).tolist() == [[[1, -2]], [[3, 4]]], "as it is, not as it lies"
    assert torch.equal(whole_of(parts_of(values, trained=True), "complex64"), values)


def test_parts_at_an_odd_address_become_a_tensor_that_may_lie_where_it_does() -> None:
    values = torch.tensor([1 + 2j, 3 - 4j, 5 + 0j], dtype=torch.complex128)
    data = torch.zeros(1 + values.nbytes, dtype=torch.uint8)
    data[1:] = parts_of(values).view(-1)
    found = whole_of(data[1:].view(3, 16), "complex128")
    assert found.data_ptr() % 16 == 0
    assert torch.equal(found, values)


def test_parts_of_a_type_that_this_torch_does_not_have_stay_as_they_are() -> None:
    parts = torch.zeros(2, 3, dtype=torch.uint8)
    for name in ("float3_of_tomorrow", "nn", "complex64", ""):
        assert whole_of(parts, name) is parts


def test_the_bytes_are_little_endian() -> None:
    assert bytes(bytes_of(torch.tensor([1, -2], dtype=torch.int32))) == b"\1\0\0\0\xfe\xff\xff\xff"
    assert bytes(bytes_of(torch.tensor([1.0]))) == b"\0\0\x80\x3f"


def test_a_payload_at_an_odd_address_is_read_right() -> None:
    message = memoryview(b"x" + bytes(bytes_of(torch.arange(5.0))))
    assert tensor_from(message[1:], "float32").tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("name", FLOATING)
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("position", [0, 500, 999])
def test_one_bad_element_anywhere_is_found(name: str, bad: float, position: int) -> None:
    values = torch.randn(1000).to(TORCH_DTYPES[name])
    assert is_finite(values)
    values[position] = bad
    assert not is_finite(values)


@pytest.mark.parametrize("name", FLOATING)
def test_infinities_that_cancel_are_found_and_a_sum_that_overflows_is_none(name: str) -> None:
    dtype = TORCH_DTYPES[name]
    assert not is_finite(torch.tensor([INF, -INF], dtype=dtype))
    assert is_finite(torch.full((1000,), torch.finfo(dtype).max, dtype=dtype))


def test_whole_numbers_and_no_numbers_are_finite() -> None:
    assert is_finite(torch.full((10,), torch.iinfo(torch.int64).max))
    assert is_finite(tensor_from(b"", "float32"))


@pytest.mark.parametrize("payload", [b"", bytes(8)])
def test_a_payload_lies_on_the_host_whatever_the_default_device_is(payload: bytes) -> None:
    torch.set_default_device("meta")
    try:
        found = tensor_from(bytearray(payload), "float32")
    finally:
        torch.set_default_device(None)
    assert found.device == torch.device("cpu")
