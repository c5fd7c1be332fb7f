"""Server processes that torch's RPC reaches, and how each process of a run meets the others."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any

from torch.distributed import rpc

from bench.cluster import HERE, START_SECONDS
from bench.talk import end, tell
from ps_runtime.free_ports import free_port


@contextlib.contextmanager
def rpc_servers(name: str, count: int, **order: Any) -> Iterator[str]:
    """Starts servers of bench.serving by their name; yields the address at which all processes meet.

    order: what each server is told, besides its number, how many there are, and that address
    """
    address = f"tcp://{HERE.address}:{free_port(HERE.address)}"
    running = [HERE.start("bench.serving", name) for _ in range(count)]
    try:
        for number, process in enumerate(running):
            tell(process, json.dumps({"number": number, "count": count, "address": address, **order}))
        yield address
    finally:
        end(running)


def join(name: str, address: str, rank: int, world: int) -> None:
    """Waits until all processes are there."""
    options = rpc.TensorPipeRpcBackendOptions(init_method=address, rpc_timeout=START_SECONDS)
    rpc.init_rpc(name, rank=rank, world_size=world, rpc_backend_options=options)
