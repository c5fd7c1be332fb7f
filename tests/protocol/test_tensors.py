"""Bytes are tensors and tensors are bytes, without copies."""

from __future__ import annotations

import pytest
import torch

from ps_protocol.layout import DATA_TYPES
from ps_protocol.tensors import DTYPE_NAMES, TORCH_DTYPES, bytes_of, is_finite, tensor_from

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
