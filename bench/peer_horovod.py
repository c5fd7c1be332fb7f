"""Horovod over gloo: where its processes meet, and how a worker trains with it. Nothing of it needs MPI or a GPU."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from bench.cluster import HERE, Host


@contextlib.contextmanager
def horovod_hosts(workers: int) -> Iterator[list[Host]]:
    """Yields where each worker runs: with the variables by which Horovod's own launcher tells it its place."""
    from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
    from horovod.runner.http.http_server import RendezvousHandler, RendezvousHTTPServer

    meeting = RendezvousHTTPServer((HERE.address, 0), RendezvousHandler, 0)  # Horovod's own is on all addresses
    thread = threading.Thread(target=meeting.serve_forever, daemon=True)
    thread.start()
    try:
        places = get_host_assignments(parse_hosts(f"{HERE.address}:{workers}"), workers)
        meeting.init(places)
        common = {
            "HOROVOD_CONTROLLER": "gloo",
            "HOROVOD_CPU_OPERATIONS": "gloo",
            "HOROVOD_GLOO_IFACE": "lo",
            "HOROVOD_GLOO_RENDEZVOUS_ADDR": HERE.address,
            "HOROVOD_GLOO_RENDEZVOUS_PORT": meeting.server_port,
            "HOROVOD_HOSTNAME": HERE.address,
        }
        own = (
            {
                "HOROVOD_RANK": place.rank,
                "HOROVOD_SIZE": place.size,
                "HOROVOD_LOCAL_RANK": place.local_rank,
                "HOROVOD_LOCAL_SIZE": place.local_size,
                "HOROVOD_CROSS_RANK": place.cross_rank,
                "HOROVOD_CROSS_SIZE": place.cross_size,
            }
            for place in places
        )
        yield [Host(variables=tuple(f"{name}={value}" for name, value in {**common, **one}.items())) for one in own]
    finally:
        meeting.shutdown()
        meeting.server_close()
        thread.join()


def horovod_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    """Returns an optimizer that all-reduces gradients as the backward pass makes them, or else in its step."""
    import horovod.torch as hvd

    hvd.init()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    return hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
