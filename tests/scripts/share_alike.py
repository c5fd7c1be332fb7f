"""One member of a group that holds some parameters as other members do, and shares them in local rounds.

python tests/scripts/share_alike.py DIRECTORY MEMBER

Leaves, for each exchange, the weights that it has then and those that the round began with. At last the optimizer state
of what others own, by parameter, and how many bytes it was sent for it.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ps_protocol.job import JobSpec
from ps_protocol.layout import ParameterSpec
from ps_protocol.local import Local
from ps_worker.group import Group
from ps_worker.model.replicated import ReplicatedParameters
from tests.tools.modes import consistency

# By parameter, the members that hold it, the owner first, and its type.
HOLDERS = [
    ((0, 2), torch.float32),
    ((0, 1, 2), torch.float32),
    ((1, 2), torch.bfloat16),
    ((1, 2), torch.float32),
    ((1,), torch.float32),
]
TYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
# In each exchange, the members whose weights are not those that the round began with.
DIFFER: list[tuple[int, ...]] = [(), (1,), (0, 1), ()]
STATE_NUMEL = 1000


def state_of(index: int) -> dict[str, torch.Tensor]:
    """The optimizer state of a parameter, on its owner."""
    return {"step": torch.tensor(3.0), "momentum_buffer": torch.full((STATE_NUMEL,), float(index))}


def shared_state(
    group: Group, alike: ReplicatedParameters, tensors: list[torch.Tensor], member: int
) -> tuple[dict[int, dict[str, torch.Tensor]], int]:
    sent: list[int] = []
    gathering, broadcast = group._gathering, dist.broadcast

    def gathers(own: bytes, size: int) -> Any:
        sent.append(size * group.size)
        return gathering(own, size)

    def broadcasts(content: torch.Tensor, source: int, **more: Any) -> Any:
        sent.append(content.nbytes)
        return broadcast(content, source, **more)

    group._gathering, dist.broadcast = gathers, broadcasts  # type: ignore[method-assign]
    owned = {each: state_of(i) for i, each in enumerate(tensors) if HOLDERS[i][0][0] == member}
    with group.during("optimizer.state_dict"):
        found = alike.states(owned)
    return {index: found[each] for index, each in enumerate(tensors) if each in found}, sum(sent)


def main() -> None:
    directory, member = Path(sys.argv[1]), int(sys.argv[2])
    dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=member, world_size=3)
    group = Group(range(3))
    specs = [
        ParameterSpec(f"p{index}", (3,), TYPES[dtype], 0, member=holders[0])
        for index, (holders, dtype) in enumerate(HOLDERS)
    ]
    spec = JobSpec("job", tuple(specs), "SGD", ({"lr": 1.0},), consistency("sync"), 64, 1, local=Local(2))
    tensors = [torch.zeros(3, dtype=dtype, device="cpu" if member in holders else "meta") for holders, dtype in HOLDERS]
    alike = ReplicatedParameters(group, spec, tensors)
    for exchange, differ in enumerate(DIFFER):
        for tensor in tensors:
            tensor.copy_(torch.arange(3) + 10 * exchange + 100 * member)
        own = [each for each, (holders, _) in zip(tensors, HOLDERS, strict=True) if holders[0] == member]
        bases = {id(each): each - int(member in differ) for each in own}
        with group.during("share"):
            alike.share(bases, is_first=not exchange)
        held = {**alike.base, **bases}
        left = [None if each.is_meta else (each, held.get(id(each))) for each in tensors]
        torch.save(left, directory / f"{exchange}-{member}")
    torch.save(shared_state(group, alike, tensors, member), directory / f"state-{member}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
