"""Pipeline stages: the members of a group may hold unlike layers of one model.

names   Each parameter has the name that it has in the whole model. Members whose models have the same names hold one
        stage; tensor parallelism or `fully_shard` may cut it among them.
once    A parameter that several stages hold, such as the embedding of the first and the last one, is one parameter of
        the job (alike.py).
told    Stages that are built apart have the same names for unlike layers ("0.weight"), and the job would take these for
        one parameter. What is one parameter has the same values wherever it is held, before the job begins. Where all
        its elements are the same, values tell nothing, and a name in several stages is refused.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ps_protocol.errors import InvalidRequest
from ps_protocol.layout import ParameterSpec
from ps_protocol.tensors import bytes_of, flat_parts
from ps_worker.group import Group
from ps_worker.model.sharded import is_sharded, local

NAMES = (
    "Stages of a pipeline have the names of the whole model: build it in each process, and put None or nn.Identity() "
    "in place of the layers that the stage has not (docs/groups.md#pipeline-stages)"
)

Key = tuple[str, tuple[int, ...]]  # of a parameter, or a piece: ParameterSpec.key


def stages_of(group: Group, names: Collection[str]) -> list[int]:
    """Returns the stage of each member, by the number of the first member that holds it. A call of all members.

    names: of what this member's models have
    """
    told = group.gather(hashlib.sha256("\n".join(sorted(names)).encode()).digest())
    return [told.index(each) for each in told]


def refuse_unlike(name: str, one: torch.Tensor, other: torch.Tensor, is_trained: bool) -> None:
    """Raises InvalidRequest for two tensors of one name in stages of one process, unless they are copies of what nobody
    trains, such as tables of positions.

    is_trained: an optimizer steps the other one
    """
    is_copy = not is_trained and one.shape == other.shape and one.dtype == other.dtype
    if not is_copy or not torch.equal(flat_parts(local(one)), flat_parts(local(other))):
        raise InvalidRequest(
            f"two stages in this process both have {name}: one parameter that both have is one tensor in the two, as "
            f"in head.weight = embedding.weight. {NAMES}"
        )


def check_values(group: Group, specs: Sequence[Sequence[ParameterSpec]], tensors: Mapping[Key, torch.Tensor]) -> None:
    """Raises InvalidRequest, on all members, if what several of them hold under one name is not one parameter. A call
    of all members.

    specs:   by member, what it holds
    tensors: what this member holds
    """
    held: dict[Key, dict[int, ParameterSpec]] = {}
    for member, parameters in enumerate(specs):
        for each in parameters:
            held.setdefault(each.key, {})[member] = each
    shared = {key: _Shared(each, len({group.stages[m] for m in each}) > 1) for key, each in held.items()}
    wanted = [key for key, each in shared.items() if len(each.by) > 1 and (each.is_trained or each.is_across)]
    if not wanted:
        return
    own = [None if key not in tensors else _told(tensors[key], shared[key].is_across) for key in wanted]
    told: list[list[Any]] = [json.loads(each) for each in group.gather(json.dumps(own).encode())]
    for index, key in enumerate(wanted):
        shared[key].check([each[index] for each in told], group.stages)


def _told(tensor: torch.Tensor, is_across: bool) -> tuple[int, float | None] | None:
    """Returns a checksum of a tensor's values, and the value that all of its elements have, if they are the same. None
    for what torch has cut, or replicated, within one stage: it is one parameter."""
    if is_sharded(tensor) and not is_across:
        return None
    flat = flat_parts(local(tensor)).cpu()
    is_one = flat.numel() > 0 and bool((flat == flat[0]).all())
    return zlib.crc32(bytes_of(flat)), float(flat[0]) if is_one else None


@dataclass(frozen=True)
class _Shared:
    """What several members hold under one name, or may.

    by:        by member, how it describes that
    is_across: members of unlike stages do
    """

    by: Mapping[int, ParameterSpec]
    is_across: bool

    @property
    def is_trained(self) -> bool:
        return any(each.group is not None for each in self.by.values())

    def check(self, told: Sequence[tuple[int, float | None] | None], stages: Sequence[int]) -> None:
        """Raises InvalidRequest unless it is one parameter. told: by member, as `_told` returns it"""
        first, *others = self.by
        for member in others:
            one, other = told[first], told[member]
            if one is None or other is None:
                continue
            both = f"members {first} and {member} of this worker's group both hold {self.by[first].name}"
            if one[0] != other[0] and (self.is_trained or stages[first] != stages[member]):
                raise InvalidRequest(
                    f"{both}, with unlike values. What is one parameter has the same values in all processes that hold "
                    f"it, before prepare. {NAMES}"
                )
            if one[1] is not None and self.is_trained and stages[first] != stages[member]:
                raise InvalidRequest(
                    f"{both}, which have unlike stages, and all its elements are {one[1]:g}: that does not tell "
                    f"whether it is one parameter that both have. {NAMES}. One that both have begins with other values"
                )
