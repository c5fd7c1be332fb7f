"""Ray's actors as a parameter server: workers call a method of an actor, which answers when all have called it.

Gradients go through Ray's shared memory as arrays, of which nothing is copied when they are read; an actor puts its
weights there once for all workers. The Ray is one of its own on this machine, and ends with its process. It listens on
the machine's own address, which it takes for a loopback address that it is given: so it has a token of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bench.cluster import START_SECONDS, Host
from bench.peer_part import Answer, Part, Served
from bench.peer_work import Work
from bench.results import MIB, THREADS
from bench.talk import answer, end, own_output, tell

RAY_SECONDS = 3 * START_SECONDS  # a Ray is many processes
COPIES = 4  # of the model in Ray's shared memory, beside two of each worker
SPACE = "peers"


def ray_here(folder: Path) -> Host:
    """Returns where a process of a Ray runs, which has a token of its own.

    folder: with a short path, because Ray's sockets are in it
    """
    token = folder / "token"
    token.touch(0o600)
    token.write_text(os.urandom(32).hex())
    return Host(variables=("RAY_AUTH_MODE=token", f"RAY_AUTH_TOKEN_PATH={token}", "RAY_USAGE_STATS_ENABLED=0"))


@contextlib.contextmanager
def ray_servers(count: int, work: Work) -> Iterator[tuple[str, Host]]:
    """A Ray with an actor for each part of a model; yields its address, and where a process runs that may enter it."""
    with tempfile.TemporaryDirectory(prefix="ray-") as folder:
        host = ray_here(Path(folder))
        head = host.start("bench.serving", "peer_ray")
        try:
            tell(head, json.dumps({"count": count, "folder": folder, "work": asdict(work)}))
            yield answer(head, RAY_SECONDS), host
        finally:
            end([head])


def ray_served(address: str, model: nn.Module, servers: int) -> Served:
    """Returns a worker's optimizer."""
    import ray

    warnings.filterwarnings("ignore", message="The given NumPy array is not writable")  # what is read is not written
    ray.init(address, namespace=SPACE, log_to_driver=False, logging_level=logging.WARNING)
    actors = [ray.get_actor(f"server-{number}", SPACE) for number in range(servers)]

    def send(number: int, gradients: list[Tensor]) -> Answer:
        pushed = actors[number].push.remote([gradient.numpy() for gradient in gradients])
        return lambda: [torch.from_numpy(weights) for weights in ray.get(ray.get(pushed)[0])]

    return Served(model, servers, send)


# -- the servers -----------------------------------------------------------------------------------------------------


class Server:
    """An actor."""

    def __init__(self, work: dict[str, Any], number: int, count: int) -> None:
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        torch.set_num_threads(THREADS)
        self._part = Part(Work(**work), number, count)
        self._update: asyncio.Future[list[Any]] | None = None

    async def ready(self) -> bool:
        """Returns when the part is there."""
        return True

    async def push(self, gradients: Sequence[Any]) -> list[Any]:
        """Called by workers. Returns where the weights of the next update are."""
        import ray

        self._update = mine = self._update or asyncio.get_running_loop().create_future()
        if self._part.add([torch.from_numpy(gradient) for gradient in gradients]):
            self._update = None
            mine.set_result([ray.put([parameter.detach().numpy() for parameter in self._part.parameters])])
        return await mine


def serve() -> None:
    """Runs a Ray, and its actors, until there is no more input."""
    import ray

    say = own_output()
    order = json.loads(sys.stdin.readline())
    work, count = Work(**order["work"]), order["count"]
    size = 4 * sum(parameter.numel() for parameter in work.model().parameters())
    ray.init(
        num_cpus=count,
        object_store_memory=(COPIES + 2 * work.workers) * size + 128 * MIB,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.WARNING,
        namespace=SPACE,
        _temp_dir=order["folder"],
    )
    remote = ray.remote(num_cpus=1)(Server)
    actors = [remote.options(name=f"server-{n}").remote(order["work"], n, count) for n in range(count)]
    ray.get([actor.ready.remote() for actor in actors])
    say(ray.get_runtime_context().gcs_address)
    sys.stdin.read()
    ray.shutdown()
