"""int8 and int4: the bytes that the contract describes, and nothing more is lost than it says."""

from __future__ import annotations

import math
import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ps_protocol.job import BLOCK_WIRES, WIRES
from ps_protocol.tensors import BLOCKS, Blocks, bytes_of, row_codec

EACH = pytest.mark.parametrize("codec", BLOCKS.values(), ids=list(BLOCKS))


def floats(width: int = 32) -> st.SearchStrategy[float]:
    return st.floats(width=width, allow_nan=False, allow_infinity=False)


def bfloat16(value: float) -> float:
    """The nearest bfloat16, halves to even, of a float32."""
    bits = struct.unpack("<I", struct.pack("<f", value))[0]
    bits += 0x7FFF + (bits >> 16 & 1)
    return struct.unpack("<f", struct.pack("<I", bits >> 16 << 16))[0]


def float32(value: float) -> float:
    return struct.unpack("<f", struct.pack("<f", value))[0]


def by_the_contract(values: list[float], codec: Blocks) -> bytes:
    """The payload, element by element, as types.proto says it."""
    largest, limit = (127, 128) if codec.bits == 8 else (7, 8)
    scales, codes = b"", []
    for begin in range(0, len(values), codec.block):
        block = values[begin : begin + codec.block]
        scale = bfloat16(float32(max(map(abs, block)) / largest))
        scale = 0.0 if scale < 2.0**-126 else min(scale, struct.unpack("<f", b"\0\0\x7f\x7f")[0] / limit)
        scales += struct.pack("<f", scale)[2:]
        # Python divides in float64 and rounds halves to even; what float32 makes of a quotient is a step before that.
        codes += [max(-largest, min(largest, round(float32(x / scale)))) if scale else 0 for x in block]
    if codec.bits == 8:
        return scales + struct.pack(f"{len(codes)}b", *codes)
    half = (len(codes) + 1) // 2
    upper = [*codes[half:], 0][:half]
    return scales + bytes((a & 15) | (b & 15) << 4 for a, b in zip(codes[:half], upper, strict=True))


def encoded(codec: Blocks, values: torch.Tensor) -> bytes:
    return bytes(bytes_of(codec.encode(values)))


@EACH
@given(
    values=st.lists(floats() | st.sampled_from([0.0, -0.0, 1e-45, -1e-38, 2.0**-126, 3.4e38, 1.0, -7.0]), max_size=300)
)
def test_a_payload_is_what_the_contract_says_byte_by_byte(codec: Blocks, values: list[float]) -> None:
    payload = encoded(codec, torch.tensor(values, dtype=torch.float32))
    assert payload == by_the_contract(values, codec)
    assert len(payload) == codec.size(len(values))
    assert codec.is_finite(payload)


@EACH
@given(values=st.lists(floats(), min_size=1, max_size=300))
def test_no_element_is_further_off_than_half_a_step_and_what_the_scale_has_lost(
    codec: Blocks, values: list[float]
) -> None:
    given_ = torch.tensor(values, dtype=torch.float32)
    found = codec.decode(encoded(codec, given_), len(values)).double()
    assert torch.isfinite(found).all()
    largest = (1 << codec.bits - 1) - 1
    for begin in range(0, len(values), codec.block):
        block, got = given_[begin : begin + codec.block].double(), found[begin : begin + codec.block]
        most = block.abs().max().item()
        # Half a step of a scale that bfloat16 has rounded by up to 2^-9, and the limit of what float32 can hold.
        step = most / largest * (1 + 2.0**-8)
        assert (got - block).abs().max() <= max(step / 2 + most * 2.0**-8, largest * 2.0**-126, most - 3.36e38)


@EACH
@given(values=st.lists(floats(), min_size=1, max_size=300), seed=st.integers(0, 99))
def test_codes_that_are_decoded_are_encoded_as_themselves(codec: Blocks, values: list[float], seed: int) -> None:
    """So a zero stays one, and what the codes can say exactly, such as a count, is lost in no part."""
    largest = (1 << codec.bits - 1) - 1
    codes = torch.randint(-largest, largest + 1, (len(values),), generator=torch.Generator().manual_seed(seed))
    codes[:: codec.block] = largest
    exact = codes * 2.0**seed
    assert torch.equal(codec.decode(encoded(codec, exact), len(values)), exact)
    assert codec.decode(encoded(codec, 0 * exact), len(values)).tolist() == [0.0] * len(values)


@EACH
def test_what_is_encoded_again_and_again_with_what_was_lost_adds_up_to_the_sum(codec: Blocks) -> None:
    values = torch.randn(1000, generator=torch.Generator().manual_seed(1))
    total, error = torch.zeros(1000), torch.zeros(1000)
    for _ in range(100):
        wanted = values + error
        sent = codec.decode(encoded(codec, wanted), 1000)
        total, error = total + sent, wanted - sent
    torch.testing.assert_close(total + error, 100 * values, rtol=1e-5, atol=1e-4)
    assert error.abs().max() <= 2 * values.abs().max() / codec.bits


@EACH
def test_bits_do_not_depend_on_the_number_of_threads_or_on_subnormal_numbers(codec: Blocks) -> None:
    values = torch.randn(1 << 17, generator=torch.Generator().manual_seed(2)) * 1e-38
    found = []
    before = torch.get_num_threads()
    for threads, flushes in ((1, False), (4, False), (1, True)):
        torch.set_num_threads(threads)
        torch.set_flush_denormal(flushes)
        payload = encoded(codec, values)
        found.append((payload, bytes(bytes_of(codec.decode(payload, len(values))))))
    torch.set_num_threads(before)
    torch.set_flush_denormal(False)
    assert found[0] == found[1] == found[2]


@EACH
@pytest.mark.parametrize("wrong", [math.inf, math.nan, -math.inf])
def test_a_block_with_an_element_that_is_not_finite_has_none_that_is(codec: Blocks, wrong: float) -> None:
    values = torch.ones(4 * codec.block)
    values[codec.block + 3] = wrong
    payload = encoded(codec, values)
    assert not codec.is_finite(payload)
    found = codec.decode(payload, len(values)).isfinite().view(4, -1)
    assert found.all(dim=1).tolist() == [True, False, True, True]
    assert not found[1].any()


@EACH
@pytest.mark.parametrize("scale", [math.inf, -math.inf, math.nan, -1.0, 3.0e38])
def test_scales_that_would_make_no_finite_elements_are_found_wherever_they_are(codec: Blocks, scale: float) -> None:
    for numel in (1, codec.block, codec.block + 1, 3 * codec.block - 1):
        payload = bytearray(encoded(codec, torch.ones(numel)))
        assert codec.is_finite(payload)
        last = 2 * (-(-numel // codec.block) - 1)
        payload[last : last + 2] = struct.pack("<f", scale)[2:]
        assert not codec.is_finite(payload)


@EACH
@given(payload=st.binary(min_size=0, max_size=400))
def test_any_bytes_with_scales_in_order_are_finite_elements(codec: Blocks, payload: bytes) -> None:
    numel = max((n for n in range(900) if codec.size(n) <= len(payload)), default=0)
    payload = payload[: codec.size(numel)]
    found = codec.decode(payload, numel)
    assert found.shape == (numel,)
    if codec.is_finite(payload):
        assert torch.isfinite(found).all()


def test_half_types_are_encoded_as_their_float32_values() -> None:
    values = torch.randn(256).bfloat16()
    for codec in BLOCKS.values():
        assert torch.equal(codec.encode(values), codec.encode(values.float()))


def test_rows_of_tables_never_travel_in_blocks() -> None:
    assert tuple(BLOCKS) == BLOCK_WIRES
    assert {name: row_codec(name).dtype for name in WIRES} == {
        **{name: name for name in WIRES},
        **dict.fromkeys(BLOCK_WIRES, "float32"),
    }
