"""Pieces of parameters: the parts that the members of a group hold, if a worker is a group of processes.

A parameter is cut into a grid of boxes, along one dimension or more, and each piece belongs to one member. The pieces
of one name are parameters of the job like others: each has its own values, gradients and optimizer state. Together they
form the parameter of that name.
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
    """The positions of a piece's elements in its whole parameter, both flattened: stretches of consecutive elements, of
    equal length and equally far apart.

    first:  the beginning of the first stretch
    length: elements of a stretch
    step:   from the beginning of one stretch to that of the next
    count:  of the stretches
    """

    first: int
    length: int
    step: int
    count: int


def stretches_of(parameter: ParameterSpec) -> Stretches:
    """Returns the stretches of a valid piece. A whole parameter is one stretch."""
    piece, shape, numel = parameter.piece, parameter.shape, parameter.numel
    cuts = _cut_dimensions(parameter)
    if piece is None or not cuts:
        return Stretches(0, numel, numel, 1)
    whole, last = piece.whole_shape, cuts[-1]
    first = sum(offset * math.prod(whole[d + 1 :]) for d, offset in enumerate(piece.offsets))
    inner = math.prod(shape[last + 1 :])
    return Stretches(first, shape[last] * inner, whole[last] * inner, math.prod(shape[:last]))


def _cut_dimensions(parameter: ParameterSpec) -> list[int]:
    """Returns the dimensions along which a piece is shorter than its parameter."""
    piece = parameter.piece
    return [] if piece is None else [d for d, n in enumerate(piece.whole_shape) if parameter.shape[d] != n]


def validate_pieces(parameters: Sequence[ParameterSpec], group_size: int) -> None:
    """Raises InvalidRequest or LimitExceeded that names the first error in the pieces of a group's members."""
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
    """Returns the pieces of each parameter that is cut, in their order within it. Whole parameters are left out."""
    found: dict[str, list[ParameterSpec]] = {}
    for parameter in parameters:
        if parameter.piece is not None:
            found.setdefault(parameter.name, []).append(parameter)
    for pieces in found.values():
        pieces.sort(key=lambda each: each.key)
    return found


def whole_parameters(parameters: Sequence[ParameterSpec]) -> tuple[ParameterSpec, ...]:
    """Returns the parameters of the uncut model. Each name comes once, where its first piece was."""
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
    """Raises InvalidRequest for pieces of one name that cannot belong to one parameter."""

    def of(each: ParameterSpec) -> tuple[object, ...]:
        return each.piece and each.piece.whole_shape, each.dtype, each.param_group, each.optimizer, each.is_saved

    other = next((each for each in pieces if of(each) != of(pieces[0])), None)
    if other is not None:
        raise InvalidRequest(
            f"members {pieces[0].member} and {other.member} have pieces of unlike parameters called {name!r}: one of "
            f"{_described(pieces[0])}, and one of {_described(other)}"
        )


def _described(parameter: ParameterSpec) -> str:
    whole = parameter.shape if parameter.piece is None else parameter.piece.whole_shape
    return f"{parameter.dtype} {whole} in optimizer group {parameter.param_group}"


def _validate_cover(name: str, pieces: Sequence[ParameterSpec]) -> None:
    """Raises InvalidRequest unless the pieces of a name are a grid that covers it, each element once."""
    assert pieces[0].piece is not None
    whole = pieces[0].piece.whole_shape
    cut = sorted({d for each in pieces for d in _cut_dimensions(each)})
    expected = 1
    for d in cut or range(min(1, len(whole))):
        expected *= _validate_cuts(name, pieces, d)
    for each in pieces:
        _validate_stretches(each)
    places = {each.piece.offsets for each in pieces if each.piece is not None}
    if len(places) != len(pieces) or len(pieces) != expected:
        raise InvalidRequest(
            f"the pieces of {name!r} are to cover its {whole}, each element once: expected {expected} at "
            f"as many places, got {len(pieces)} at {len(places)}"
        )


def _validate_cuts(name: str, pieces: Sequence[ParameterSpec], dimension: int) -> int:
    """Returns the number of parts into which the pieces cut one dimension. Raises InvalidRequest unless the parts cover
    the dimension, one after the other.
    """
    end, parts, size = 0, 0, 0
    for each in sorted(pieces, key=lambda each: 0 if each.piece is None else each.piece.offsets[dimension]):
        assert each.piece is not None
        start, length = each.piece.offsets[dimension], each.shape[dimension]
        is_next = start == end and length > 0
        # Next to the piece before it, along another dimension
        if not is_next and (start, length) != (end - size, size):
            raise InvalidRequest(
                f"the pieces of {name!r} are to cover its {each.piece.whole_shape}, each element once: expected the "
                f"next one at {end} of dimension {dimension}, got {each.shape} at {start}, of member {each.member}"
            )
        if is_next:
            end, parts, size = end + length, parts + 1, length
    assert pieces[0].piece is not None
    whole = pieces[0].piece.whole_shape[dimension]
    if end != whole:
        raise InvalidRequest(f"the pieces of {name!r} end at {end} of dimension {dimension}, and it has {whole} there")
    return parts


def _validate_stretches(piece: ParameterSpec) -> None:
    """Raises InvalidRequest for a piece whose elements are not in stretches that are equally far apart: it is cut along
    more than two dimensions, or along two of which the first is not the first dimension with more than one element.
    """
    cuts = _cut_dimensions(piece)
    if len(cuts) > 1 and (len(cuts) > 2 or math.prod(piece.shape[: cuts[0]]) > 1):
        assert piece.piece is not None
        raise InvalidRequest(
            f"{piece.name!r} is cut along its dimensions {cuts}: {piece.shape} from {piece.piece.offsets} on, of "
            f"{piece.piece.whole_shape}. A piece is cut along one dimension, or along the first and one other"
        )
