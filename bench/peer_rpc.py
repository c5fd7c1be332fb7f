"""torch's RPC as a parameter server: workers call a function of a server, which answers when all have called it."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict

import torch
from torch import Tensor, nn
from torch.distributed import rpc

from bench.cluster import HERE, free_port
from bench.peer_part import Answer, Part, Served
from bench.peer_work import Work
from bench.results import THREADS
from bench.row_rpc import join
from bench.talk import end, tell


@contextlib.contextmanager
def rpc_servers(count: int, work: Work) -> Iterator[str]:
    """Processes that hold the parts of a model; yields where workers meet them, who have to be there, too."""
    address = f"tcp://{HERE.address}:{free_port()}"
    running = [HERE.start("bench.serving", "peer_rpc") for _ in range(count)]
    try:
        for number, process in enumerate(running):
            tell(process, json.dumps({"number": number, "count": count, "address": address, "work": asdict(work)}))
        yield address
    finally:
        end(running)


def rpc_served(address: str, model: nn.Module, work: Work, rank: int, servers: int) -> Served:
    """Returns a worker's optimizer, once all processes are there."""
    join(f"worker-{rank}", address, rank, work.workers + servers)

    def send(number: int, gradients: list[Tensor]) -> Answer:
        answer: Answer = rpc.rpc_async(f"server-{number}", push, (gradients,)).wait
        return answer

    return Served(model, servers, send)


# -- one server ------------------------------------------------------------------------------------------------------


part: Part
update: torch.futures.Future[list[Tensor]]


@rpc.functions.async_execution  # no thread of the server waits for other workers
def push(gradients: list[Tensor]) -> torch.futures.Future[list[Tensor]]:
    """Called by workers. Returns the weights of the next update."""
    global update
    mine = update  # nobody's next call comes before this update
    if part.add(gradients):
        update = torch.futures.Future()
        mine.set_result([parameter.detach() for parameter in part.parameters])
    return mine


def serve() -> None:
    """Serves its part until there is no more input."""
    global part, update
    order = json.loads(sys.stdin.readline())
    torch.set_num_threads(THREADS)
    work, number, count = Work(**order["work"]), order["number"], order["count"]
    part, update = Part(work, number, count), torch.futures.Future()
    join(f"server-{number}", order["address"], work.workers + number, work.workers + count)
    sys.stdin.read()
