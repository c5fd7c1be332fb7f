"""Pieces of parameters: what the members of a group hold, where a worker is a group of processes.

A parameter is cut along one dimension, and each piece is held by one member. The pieces of one name are parameters of
the job like others: each has its own values, gradients and optimizer state. Together they are the
parameter of that name.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ps_protocol.errors import InvalidRequest, LimitExceeded
from ps_protocol.layout import ParameterSpec

MAX_GROUP_SIZE = 256


@dataclass(frozen=True)
class Stretches:
    """Where the elements of a piece lie in its whole parameter, both flattened: in stretches without a gap, alike and
    equally far apart.

    first:  where the first stretch begins
    length: elements of a stretch
    step:   from the beginning of one stretch to that of the next
    count:  of the stretches
    """

    first: int
    length: int
    step: int
    count: int


def stretches_of(parameter: ParameterSpec) -> Stretches:
    """Returns where a piece that is valid lies. A whole parameter is one stretch."""
    piece, shape, numel = parameter.piece, parameter.shape, parameter.numel
    cut = None if piece is None else next((d for d, n in enumerate(piece.whole_shape) if shape[d] != n), None)
    if piece is None or cut is None:
        return Stretches(0, numel, numel, 1)
    whole, inner = piece.whole_shape, math.prod(shape[cut + 1 :])
    return Stretches(piece.offsets[cut] * inner, shape[cut] * inner, whole[cut] * inner, math.prod(shape[:cut]))


def validate_pieces(parameters: Sequence[ParameterSpec], group_size: int) -> None:
    """Raises InvalidRequest or LimitExceeded that names the first error in what the members of a group hold."""
    if not 1 <= group_size <= MAX_GROUP_SIZE:
        raise LimitExceeded(f"a group may have up to {MAX_GROUP_SIZE} members, got {group_size}")
    for parameter in parameters:
        if not 0 <= parameter.member < group_size:
            raise InvalidRequest(
                f"{parameter.name}: expected a member below {group_size}, of as many in the group, got "
                f"{parameter.member}"
            )
        _validate_place(parameter)
    for name, pieces in pieces_by_name(parameters).items():
        _validate_alike(name, pieces)
        _validate_cover(name, pieces)


def pieces_by_name(parameters: Sequence[ParameterSpec]) -> Mapping[str, list[ParameterSpec]]:
    """Returns the pieces of each parameter that is cut, in their order in it. Whole parameters are left out."""
    found: dict[str, list[ParameterSpec]] = {}
    for parameter in parameters:
        if parameter.piece is not None:
            found.setdefault(parameter.name, []).append(parameter)
    for pieces in found.values():
        pieces.sort(key=lambda each: each.key)
    return found


def whole_parameters(parameters: Sequence[ParameterSpec]) -> tuple[ParameterSpec, ...]:
    """Returns the parameters of the uncut model: each name once, at the place of its first piece."""
    seen: set[str] = set()
    wholes: list[ParameterSpec] = []
    for parameter in parameters:
        if parameter.name not in seen:
            seen.add(parameter.name)
            shape = parameter.shape if parameter.piece is None else parameter.piece.whole_shape
            wholes.append(replace(parameter, shape=shape, member=0, piece=None))
    return tuple(wholes)


def _validate_place(parameter: ParameterSpec) -> None:
    """Raises InvalidRequest for a piece that does not lie within its parameter."""
    piece, shape = parameter.piece, parameter.shape
    if piece is None:
        return
    if parameter.element:
        raise InvalidRequest(
            f"{parameter.name}: pieces have element types that travel as they are, got {parameter.element}"
        )
    if not len(piece.whole_shape) == len(piece.offsets) == len(shape):
        raise InvalidRequest(
            f"{parameter.name}: expected a piece in {len(shape)} dimensions, got offsets {piece.offsets} in "
            f"{piece.whole_shape}"
        )
    ends = zip(piece.offsets, shape, piece.whole_shape, strict=True)
    if any(start < 0 or start + size > whole for start, size, whole in ends):
        raise InvalidRequest(
            f"{parameter.name}: expected a piece within {piece.whole_shape}, got {shape} from {piece.offsets} on"
        )


def _validate_alike(name: str, pieces: Sequence[ParameterSpec]) -> None:
    """Raises InvalidRequest for pieces of one name that cannot be of one parameter."""

    def of(each: ParameterSpec) -> tuple[object, ...]:
        return each.piece and each.piece.whole_shape, each.dtype, each.group, each.optimizer, each.is_saved

    other = next((each for each in pieces if of(each) != of(pieces[0])), None)
    if other is not None:
        raise InvalidRequest(
            f"members {pieces[0].member} and {other.member} have pieces of unlike parameters called {name!r}: one of "
            f"{_described(pieces[0])}, and one of {_described(other)}"
        )


def _described(parameter: ParameterSpec) -> str:
    whole = parameter.shape if parameter.piece is None else parameter.piece.whole_shape
    return f"{parameter.dtype} {whole} in optimizer group {parameter.group}"


def _validate_cover(name: str, pieces: Sequence[ParameterSpec]) -> None:
    """Raises InvalidRequest unless the pieces of a name, cut along one dimension, cover it, each element once."""
    assert pieces[0].piece is not None
    whole = pieces[0].piece.whole_shape
    cut = next((d for d, size in enumerate(whole) if pieces[0].shape[d] != size), 0)
    end = 0
    for each in pieces:
        assert each.piece is not None
        others = [d for d in range(len(whole)) if d != cut]
        if any(each.piece.offsets[d] or each.shape[d] != whole[d] for d in others):
            raise InvalidRequest(
                f"{name!r} is cut along more than one dimension: {each.shape} from {each.piece.offsets} on, of {whole}"
            )
        if not whole or each.piece.offsets[cut] != end or not each.shape[cut]:
            where = each.piece.offsets[cut] if whole else 0
            raise InvalidRequest(
                f"the pieces of {name!r} are to cover its {whole}, each element once: expected the next one at {end} "
                f"of dimension {cut}, got {each.shape} at {where}, of member {each.member}"
            )
        end += each.shape[cut]
    if end != whole[cut]:
        raise InvalidRequest(f"the pieces of {name!r} end at {end} of dimension {cut}, and it has {whole[cut]} there")
