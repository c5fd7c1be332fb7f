"""One of three processes, of which the first two are a group, and the second one is in another group, too.

python tests/scripts/group_of_some.py DIRECTORY RANK

Leaves what the members of the group have told each other in DIRECTORY.
"""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from ps_worker.group import Group

TIMEOUT = timedelta(seconds=20)


def main() -> None:
    directory, rank = Path(sys.argv[1]), int(sys.argv[2])
    dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=3, timeout=TIMEOUT)
    if rank > 0:
        dist.new_group([1, 2], use_local_synchronization=True)
    if rank < 2:
        for _ in range(2):
            told = Group([0, 1]).gather(str(rank).encode())
        (directory / f"told-{rank}").write_bytes(b"".join(told))
    dist.barrier()


if __name__ == "__main__":
    main()
