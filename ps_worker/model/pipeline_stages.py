"""Pipeline stages: the members of a group may hold different layers of one model.

Each parameter has to have the name that it has in the whole model.

* Members whose models have the same names hold the same stage, which tensor parallelism or `fully_shard` may cut among
  them.
* A name that several stages have is one parameter that they share, such as an embedding that is also the last layer.
  The job has it once (replicated.py).
* Stages that were built separately may have one name for different layers, such as "0.weight". The job would take these
  for one shared parameter. So members compare the values before the job begins: a parameter that is really shared has
  the same ones in each stage. Where all elements are equal, as in a new bias, this proves nothing: such a name is
  refused.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import astuple, dataclass
from math import prod
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

_SEED = (
    "What members of a group hold alike has the same values in all of them, before prepare: call torch.manual_seed "
    "with one seed in all members, or torch.distributed.broadcast the values of one"
)

Key = tuple[str, tuple[int, ...]]  # the key of a parameter or of a piece: ParameterSpec.key


def stages_of(group: Group, names: Collection[str], shares: int) -> list[int]:
    """Returns the stage of each member, by the number of the first member that holds it. A call of all members.

    names:  the names of this member's parameters
    shares: how many shares the group's data has, according to this member's models
    Raises InvalidRequest, on all members, if they do not have the same number of shares.
    """
    own = [hashlib.sha256("\n".join(sorted(names)).encode()).hexdigest(), shares]
    gathered = [json.loads(each) for each in group.gather(json.dumps(own).encode())]
    held, counts = [each[0] for each in gathered], [each[1] for each in gathered]
    other = next((member for member, count in enumerate(counts) if count != counts[0]), None)
    if other is not None:
        raise InvalidRequest(
            f"members 0 and {other} of this worker's group share its data by {counts[0]} and by {counts[other]}: there "
            "are as many shares as the first dimension of the mesh of fully_shard is long, and one where it was not "
            "called. Call it in all members, over meshes of one shape"
        )
    return [held.index(each) for each in held]


def refuse_second(name: str) -> None:
    """Raises InvalidRequest for a second tensor of a name in the stages of one process."""
    raise InvalidRequest(
        f"two stages in this process both have {name}: what both have, a parameter or a buffer, is one tensor in the "
        "two, as in head.weight = embedding.weight. Share a buffer after model.to(session.device), which makes a new "
        f"one in each. {NAMES}"
    )


def check_values(group: Group, specs: Sequence[Sequence[ParameterSpec]], tensors: Mapping[Key, torch.Tensor]) -> None:
    """Raises InvalidRequest, on all members, if tensors that several of them hold under one name are not one parameter.
    A call of all members.

    specs:   by member, its parameters
    tensors: this member's tensors
    """
    held: dict[Key, dict[int, ParameterSpec]] = {}
    for member, parameters in enumerate(specs):
        for each in parameters:
            held.setdefault(each.key, {})[member] = each
    wanted = {
        key: shared
        for key, shared in ((key, _Shared(each, group.pipeline_stages)) for key, each in held.items())
        if len(shared.by) > 1 and (shared.is_trained or shared.is_across)
    }
    if not wanted:
        return
    own = group.all_through(lambda: [astuple(_summary(tensors[key])) if key in tensors else None for key in wanted])
    gathered: list[list[Any]] = [json.loads(each) for each in group.gather(json.dumps(own).encode())]
    for index, shared in enumerate(wanted.values()):
        shared.check({member: _Values(*gathered[member][index]) for member in shared.by})


@dataclass(frozen=True)
class _Values:
    """A member's summary of a parameter's values.

    checksum: the values' checksum
    constant: the value that all elements have, if they have one
    mesh:     the processes over which torch has cut or replicated them; none of a plain tensor
    """

    checksum: int
    constant: float | None
    mesh: list[int]


def _summary(tensor: Any) -> _Values:
    flat = flat_parts(local(tensor)).cpu()
    is_one = flat.numel() > 0 and bool((flat == flat[0]).all())
    mesh = sorted(int(rank) for rank in tensor.device_mesh.mesh.flatten()) if is_sharded(tensor) else []
    return _Values(zlib.crc32(bytes_of(flat)), float(flat[0]) if is_one else None, mesh)


@dataclass(frozen=True)
class _Shared:
    """Tensors that several members hold under one name.

    by:              by member, its description of the tensor
    pipeline_stages: by member, its stage
    """

    by: Mapping[int, ParameterSpec]
    pipeline_stages: Sequence[int]

    @property
    def is_across(self) -> bool:
        """Whether members of different stages hold it."""
        return len({self.pipeline_stages[member] for member in self.by}) > 1

    @property
    def is_trained(self) -> bool:
        return any(each.param_group is not None for each in self.by.values())

    @property
    def has_one_element(self) -> bool:
        one = next(iter(self.by.values()))
        return prod(one.shape if one.piece is None else one.piece.whole_shape) == 1

    def check(self, summaries: Mapping[int, _Values]) -> None:
        """Raises InvalidRequest unless it is one parameter. summaries: those of the tensor, by member"""
        first, *others = self.by
        for member in others:
            one, other = summaries[first], summaries[member]
            both = f"members {first} and {member} of this worker's group both hold {self.by[first].name}"
            if self.pipeline_stages[first] == self.pipeline_stages[member]:
                # torch treats a tensor over one mesh as one parameter.
                is_one = one.mesh == other.mesh != []
                if self.is_trained and not is_one and one.checksum != other.checksum:
                    raise InvalidRequest(f"{both}, with unlike values. {_SEED}. {NAMES}")
                continue
            if one.checksum != other.checksum:
                raise InvalidRequest(
                    f"{both}, with unlike values. What is one parameter has the same values in all processes that hold "
                    f"it, before prepare. {NAMES}"
                )
            # The value of a single element proves nothing. Its gradients are compared in the first step.
            if one.constant is not None and self.is_trained and not self.has_one_element:
                raise InvalidRequest(
                    f"{both}, which have unlike stages, and all its elements are {one.constant:g}: that does not tell "
                    f"whether it is one parameter that both have. {NAMES}. One that both have begins with other values"
                )
