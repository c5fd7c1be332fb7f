"""torch's RPC as a parameter server: workers call a function of a server, which answers when all have called it."""

from __future__ import annotations

import json
import sys

import torch
from torch import Tensor, nn
from torch.distributed import rpc

from bench.peer_part import Answer, Part, Served
from bench.peer_work import Work
from bench.results import THREADS
from bench.rpc_processes import join


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
    mine = update  # each worker waits for this update before it calls again
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
