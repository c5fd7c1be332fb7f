"""Parameters that several members of a group hold alike, as tensor parallelism replicates them, or as stages of a
pipeline hold a tied embedding.

owner     The lowest member that holds one. The job has it once: its owner pushes and pulls it, and reads and sets its
          optimizer state.
others    The other holders get the weights from the owner, over gloo, once all members have a step's weights. So all
          have the same bits, whatever each has computed. Members that do not hold a parameter take no part: of a
          pipeline with a tied embedding only the first and the last stage move it.
gradient  The group has reduced it: it is the same on all of them. They compare it in the first step in which it is not
          zero. If optimizers step in this process, they compare the gradients of plain tensors.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import safetensors.torch
import torch
from torch.utils.hooks import RemovableHandle

from ps_protocol.errors import InvalidRequest
from ps_protocol.job import JobSpec
from ps_protocol.tensors import TORCH_DTYPES, parts_of, whole_of
from ps_worker.group import Group, Members
from ps_worker.model.pipeline_stages import NAMES
from ps_worker.model.sharded import as_placed, is_sharded, like, local
from ps_worker.model.tracked import values

# Members compute a gradient in unlike order, where they reduce it themselves: it may differ by rounding.
TOLERANCE = 1e-2


@dataclass(frozen=True)
class _Package:
    """Parameters of one type that the same members hold alike, in one piece of memory: one broadcast moves them.

    members: the holders, the owner first
    indices: the parameters, by index
    content: their weights, one after the other
    is_base: the weights are those that a round of local steps began with
    """

    members: Members
    indices: Sequence[int]
    content: torch.Tensor
    is_base: bool


class ReplicatedParameters:
    """The parameters of a job that members of one group hold alike. For the training thread; all members make the same
    calls.

    tensors: this member's tensors, in the order of the job's parameters
    base:    in a round of local steps: by parameter that another member owns, the weights that the round began with
    """

    def __init__(self, group: Group, spec: JobSpec, tensors: Sequence[torch.Tensor]) -> None:
        self._group, self._spec, self._tensors = group, spec, tensors
        each = enumerate(zip(spec.parameters, tensors, strict=True))
        self._others = [
            index
            for index, (parameter, tensor) in each
            if parameter.member != group.member
            and not tensor.is_meta
            and (parameter.param_group is not None or parameter.piece is not None or parameter.member)
        ]  # frozen whole tensors come from the servers, if the first member has them
        placed = [index for index in self._others if is_sharded(tensors[index])]
        gathered = [json.loads(each) for each in group.gather(json.dumps([self._others, placed]).encode())]
        others: dict[int, list[int]] = {}  # by parameter, the members that hold it and do not own it
        for member, (held, _) in enumerate(gathered):
            for index in held:
                others.setdefault(index, []).append(member)
        self._shared = sorted(others)
        self._holders = {index: (spec.parameters[index].member, *others[index]) for index in self._shared}
        group.connect([*self._holders.values()])
        self._hooks: list[RemovableHandle] = []
        trained = {index for index in self._shared if spec.parameters[index].param_group is not None}
        # Parameters whose gradients no step has compared yet. In local modes not DTensors: the script's gradient may be
        # a partial sum on each process.
        self._unchecked = trained.difference(*(each for _, each in gathered)) if spec.local is not None else {*trained}
        self.base: dict[int, torch.Tensor] = {}
        if spec.local is None:
            for index in trained.intersection(self._others):  # as their owners do: it is a collective of all
                tensor, frozen = tensors[index], not tensors[index].requires_grad
                tensor.requires_grad_()  # a frozen one takes no hook, and may be thawed later
                self._hooks.append(tensor.register_post_accumulate_grad_hook(as_placed))
                tensor.requires_grad_(not frozen)

    @property
    def are_some(self) -> bool:
        """Whether members hold anything alike."""
        return bool(self._shared)

    def release(self) -> None:
        """Removes hooks."""
        for hook in self._hooks:
            hook.remove()

    # -- weights -----------------------------------------------------------------------------------------------------

    def share(self, bases: Mapping[int, torch.Tensor], is_first: bool = False) -> None:
        """Overwrites this member's copies of parameters that several members hold with the owner's weights. All members
        call it.

        bases:    in local modes, by id of each tensor that this member owns, the weights that the round began with;
                  sent, too, if they differ from the weights; empty: none
        is_first: include parameters that no optimizer steps
        """
        shared = [i for i in self._shared if is_first or self._spec.parameters[i].param_group is not None]
        if not shared:
            return
        # Before the members meet: a member that has no memory for a package leaves no other one within a broadcast. And
        # these are the weights that `_differ` compares with the bases.
        packages = [*self._packed(shared, {})]

        def contents(bases_differ: bool) -> list[tuple[Members, torch.Tensor]]:
            if bases_differ:
                trained = [index for index in shared if self._spec.parameters[index].param_group is not None]
                packages.extend(self._packed(trained, bases, is_base=True))
            return [(each.members, each.content) for each in packages]

        def take() -> None:
            have_bases = any(each.is_base for each in packages)
            for package in packages:
                self._take(package, is_base=package.is_base or not have_bases)

        self._group.hand_out(self._differ(bases), contents, take)

    def _differ(self, bases: Mapping[int, torch.Tensor]) -> bool:
        """Returns whether the weights of a parameter that this member owns differ from its base. At the end of a round
        they are the same, and are sent once.
        """
        own = [self._tensors[i] for i in self._shared if self._spec.parameters[i].member == self._group.member]
        pairs = [(values(tensor), bases[id(tensor)]) for tensor in own if id(tensor) in bases]
        return not all(torch.equal(weights.to(base.device), base) for weights, base in pairs)

    def _packed(
        self, shared: Sequence[int], bases: Mapping[int, torch.Tensor], is_base: bool = False
    ) -> Iterator[_Package]:
        """Yields memory for the parameters that this member holds. On the owner of these it contains the weights."""
        packages: dict[tuple[Members, torch.dtype], list[int]] = {}
        for index in shared:
            members, dtype = self._holders[index], TORCH_DTYPES[self._spec.parameters[index].dtype]
            if self._group.member in members:
                packages.setdefault((members, dtype), []).append(index)
        for (members, dtype), indices in packages.items():
            content = torch.empty(sum(self._spec.parameters[i].numel for i in indices), dtype=dtype, device="cpu")
            if members[0] == self._group.member:
                for index, part in self._parts(indices, content):
                    tensor, is_trained = self._tensors[index], self._spec.parameters[index].param_group is not None
                    part.copy_(parts_of(bases.get(id(tensor), values(tensor)).detach(), trained=is_trained))
            yield _Package(members, indices, content, is_base)

    def _parts(self, indices: Sequence[int], content: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
        """Yields the part of each parameter in the content of a package, in the parameter's shape."""
        sizes = [self._spec.parameters[index].numel for index in indices]
        for index, part in zip(indices, content.split(sizes), strict=True):
            yield index, part.view(self._spec.parameters[index].shape)

    def _take(self, package: _Package, is_base: bool) -> None:
        if package.members[0] == self._group.member:
            return
        for index, part in self._parts(package.indices, package.content):
            parameter, tensor = self._spec.parameters[index], self._tensors[index]
            whole = whole_of(part, parameter.element)
            if not package.is_base:
                values(tensor).copy_(whole)
            if is_base and self._spec.local is not None and parameter.param_group is not None:
                self.base[id(tensor)] = whole

    def go_back(self) -> None:
        """Sets parameters of other owners to the weights that the round began with."""
        for index in self._others:
            tensor = self._tensors[index]
            if id(tensor) in self.base:
                values(tensor).copy_(self.base[id(tensor)])

    # -- gradients, and state ----------------------------------------------------------------------------------------

    def check(self) -> None:
        """Checks, in the first step in which a parameter's gradient is not zero, that all members that hold the
        parameter have the same gradient. Otherwise raises InvalidRequest on every member. A missing gradient (of a
        frozen or unused parameter) counts as zero.
        """
        if not self._unchecked:
            return
        unchecked = sorted(self._unchecked)
        own = {str(index): self._described(index) for index in unchecked if not self._tensors[index].is_meta}
        gathered: list[dict[str, list[float]]] = [
            json.loads(each) for each in self._group.gather(json.dumps(own).encode())
        ]
        for index in unchecked:
            parameter = self._spec.parameters[index]
            expected = gathered[parameter.member].get(str(index), [])
            for member, each in enumerate(gathered):
                found = each.get(str(index), expected)
                if not _are_close(found, expected):
                    raise InvalidRequest(
                        f"members {parameter.member} and {member} of a group hold the same of {parameter.name}, and "
                        f"have unlike gradients of it: of norm {_norm(expected)} and {_norm(found)}. If they are two "
                        f"layers, they need two names. {NAMES}. If it is one parameter, it gets the same gradient: "
                        "give the members the same batches, or reduce it within the group. Stages of a pipeline sum "
                        "it: torch.distributed.all_reduce(parameter.grad, group=...) over those that hold it, before "
                        "clipping and optimizer.step()"
                    )
            if expected and expected[0] > 0:
                self._unchecked.discard(index)

    def _described(self, index: int) -> list[float]:
        """Returns numbers by which to compare a gradient between members; none if there is no gradient."""
        gradient = self._tensors[index].grad
        if gradient is None:
            return []
        flat = local(gradient).detach()
        flat = (torch.view_as_real(flat) if flat.is_complex() else flat).double()
        return [float(flat.norm()), float(flat.sum())]

    def states(
        self, own: Mapping[torch.Tensor, Mapping[str, torch.Tensor]]
    ) -> dict[torch.Tensor, dict[str, torch.Tensor]]:
        """Returns the optimizer state of parameters that other members own. Only members that hold a parameter get its
        state. A call of all members.

        own: the state of this member's parameters
        """
        if not self._shared:
            return {}
        sets = sorted({*self._holders.values()})
        given = {members: self._owned_state(members, own) for members in sets if members[0] == self._group.member}
        sizes = [len(given.get(members, b"")) for members in sets]
        gathered = [json.loads(each) for each in self._group.gather(json.dumps(sizes).encode())]
        packages = [
            (members, _bytes_tensor(given.get(members), gathered[members[0]][number]))
            for number, members in enumerate(sets)
            if self._group.member in members
        ]
        found: dict[torch.Tensor, dict[str, torch.Tensor]] = {}

        def take() -> None:
            for members, content in packages:
                if members[0] == self._group.member:
                    continue
                for key, value in safetensors.torch.load(content.numpy().tobytes()).items():
                    index, name = key.split("/", 1)
                    tensor = self._tensors[int(index)]
                    found.setdefault(tensor, {})[name] = beside(tensor, name, value)

        self._group.hand_out(False, lambda _: packages, take)
        return found

    def _owned_state(self, members: Members, own: Mapping[torch.Tensor, Mapping[str, torch.Tensor]]) -> bytes:
        """Returns the state of the parameters that exactly these members hold. own: as in `states`"""
        return safetensors.torch.save(
            {
                f"{index}/{name}": local(value).detach().to("cpu", copy=True).contiguous()
                for index, holders in self._holders.items()
                if holders == members
                for name, value in own.get(self._tensors[index], {}).items()
            }
        )


def held_alike(group: Group | None, spec: JobSpec, tensors: Sequence[torch.Tensor]) -> ReplicatedParameters | None:
    """Returns the parameters that members of a group hold alike; None if there are none, or there is no group."""
    found = None if group is None else ReplicatedParameters(group, spec, tensors)
    return found if found is not None and found.are_some else None


def reduced_late(spec: JobSpec, tensors: Sequence[torch.Tensor]) -> str | None:
    """Returns the name of this member's first parameter whose gradient the script may reduce after backward; None:
    there is none. torch itself reduces the gradients of DTensors within backward.
    """
    each = zip(spec.parameters, tensors, strict=True)
    late = (one.name for one, its in each if one.param_group is not None and not its.is_meta and not is_sharded(its))
    return next(late, None)


def beside(tensor: torch.Tensor, name: str, value: torch.Tensor) -> torch.Tensor:
    """Returns state on its parameter's device, and of its kind; numbers stay on the host, as torch keeps them."""
    is_like = value.shape == local(tensor).shape and name != "step"
    return like(tensor, value.to(tensor.device)) if is_like else value


def _are_close(one: Sequence[float], other: Sequence[float]) -> bool:
    """Whether gradients with these numbers may be the same; one that is not finite is refused elsewhere."""
    one, other = one or (0.0, 0.0), other or (0.0, 0.0)
    room = TOLERANCE * (1e-12 + max(one[0], other[0]))
    return all(not abs(a - b) > room for a, b in zip(one, other, strict=True))


def _bytes_tensor(content: bytes | None, size: int) -> torch.Tensor:
    """Returns bytes as a tensor on the host. None: those of another member are to come, so many."""
    if content is None:
        return torch.empty(size, dtype=torch.uint8, device="cpu")
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def _norm(described: Sequence[float]) -> str:
    return f"{described[0]:.4g}" if described else "none"
