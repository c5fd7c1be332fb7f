"""torch's RPC as a parameter server of an embedding: rows are looked up and trained by calls of functions.

Row n of a table is on server n % count. With distributed autograd and its optimizers, which torch's tutorials use, a
step takes several times as long.
"""

from __future__ import annotations

import json
import sys
import threading

import torch
from torch import nn
from torch.distributed import rpc

from bench.results import THREADS
from bench.rpc_processes import join


class RpcTable:
    """The table as a worker has it. ids: row numbers"""

    def __init__(self, address: str, rank: int, servers: int, workers: int) -> None:
        join(f"worker-{rank}", address, rank, workers + servers)
        self._names = [f"server-{number}" for number in range(servers)]

    def look_up(self, ids: torch.Tensor) -> torch.Tensor:
        """Returns rows: [n] to [n, dim]."""
        places = self._places(ids)
        calls = [
            rpc.rpc_async(name, look_up, (ids[place] // len(self._names),))
            for name, place in zip(self._names, places, strict=True)
        ]
        return torch.cat([call.wait() for call in calls])[torch.cat(places).argsort()]

    def train(self, ids: torch.Tensor, gradients: torch.Tensor) -> None:
        """Has each server make a step of its optimizer. gradients: [n, dim]"""
        calls = [
            rpc.rpc_async(name, train, (ids[place] // len(self._names), gradients[place]))
            for name, place in zip(self._names, self._places(ids), strict=True)
        ]
        for call in calls:
            call.wait()

    def _places(self, ids: torch.Tensor) -> list[torch.Tensor]:
        of = ids % len(self._names)
        return [torch.nonzero(of == number).squeeze(1) for number in range(len(self._names))]


# -- one server ------------------------------------------------------------------------------------------------------


class Part:
    """The rows of this server, and torch's optimizer of them."""

    def __init__(self, rows: int, dim: int, lr: float) -> None:
        self.rows = nn.Embedding(rows, dim, sparse=True)
        nn.init.zeros_(self.rows.weight)
        self.optimizer = torch.optim.SGD(self.rows.parameters(), lr=lr)
        self.lock = threading.Lock()


part: Part


def look_up(ids: torch.Tensor) -> torch.Tensor:
    """Called by workers."""
    with torch.no_grad(), part.lock:
        return part.rows(ids)


def train(ids: torch.Tensor, gradients: torch.Tensor) -> None:
    """Called by workers."""
    weight = part.rows.weight
    with part.lock:
        weight.grad = torch.sparse_coo_tensor(ids.unsqueeze(0), gradients, weight.shape, check_invariants=False)
        part.optimizer.step()


def serve() -> None:
    """Serves its part until there is no more input."""
    global part
    order = json.loads(sys.stdin.readline())
    torch.set_num_threads(THREADS)
    number, count, workers = order["number"], order["count"], order["workers"]
    part = Part(-(-order["rows"] // count), order["dim"], order["lr"])
    join(f"server-{number}", order["address"], workers + number, workers + count)
    sys.stdin.read()
