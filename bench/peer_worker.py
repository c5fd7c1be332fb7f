"""A worker of one system of `bench peers`.

The first line of its input is its Order; it makes the warm-up, checks what came of it, and answers. Each line after it,
{"count": N}, has it make N rounds or steps; it answers with the seconds of each but the first, which finds the caches
full of another system's data. A round's time is that of the slowest worker.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ps_worker
from bench.peer_horovod import horovod_optimizer
from bench.peer_part import owned
from bench.peer_ray import ray_served
from bench.peer_rpc import rpc_served
from bench.peer_work import ROUND, WARMUP, Batches, Rounds, Work, check_weights, save_expected
from bench.results import THREADS
from bench.round import GLOO_BUCKET
from bench.talk import own_output
from bench.training import build


@dataclass(frozen=True)
class Order:
    """What a worker does.

    system:    a key of SYSTEMS
    work:      fields of Work
    servers:   how many there are, and `address`, where they are found
    transport: ours
    expected:  a file of the weights that a step's warm-up must come to; the system "alone" writes it
    """

    system: str
    work: dict[str, Any]
    servers: int = 0
    address: str = ""
    transport: str = ""
    expected: str = ""


class Steps(Protocol):
    """An optimizer, or an object with its two methods. A step also makes the mean of all workers' gradients."""

    def step(self) -> object:
        """Makes of this worker's gradients the weights of all."""

    def zero_grad(self) -> object:
        """Before the next gradients."""


@dataclass(frozen=True)
class System:
    """One way to train.

    model:    what a batch goes through; `plain`: the module whose parameters are trained
    backward: whether it brings gradients together in the backward pass alone, so that a round has to have one
    """

    model: nn.Module
    plain: nn.Module
    optimizer: Steps
    backward: bool = False


# -- the systems -----------------------------------------------------------------------------------------------------


def _ours(order: Order, work: Work, plain: nn.Module) -> System:
    rank, size, job = dist.get_rank(), dist.get_world_size(), order.transport
    session = ps_worker.connect(order.address, "sync", job, rank, size, transport=order.transport)
    # No peer looks for infinities either.
    model, optimizer = session.prepare(plain, work.optimizer(plain.parameters()), non_finite="allow")
    return System(model, plain, optimizer)


def _gloo(order: Order, work: Work, plain: nn.Module) -> System:
    """All-reduce in buckets of DDP's size in a round, where there is no backward pass; DDP itself in a step."""
    optimizer = work.optimizer(plain.parameters())
    if work.kind == ROUND:
        return System(plain, plain, AllReduced(plain, optimizer, work.workers))
    return System(DistributedDataParallel(plain), plain, optimizer)


def _horovod(order: Order, work: Work, plain: nn.Module) -> System:
    return System(plain, plain, horovod_optimizer(plain, work.optimizer(plain.parameters())))


def _rpc(order: Order, work: Work, plain: nn.Module) -> System:
    return System(plain, plain, rpc_served(order.address, plain, work, dist.get_rank(), order.servers))


def _ray(order: Order, work: Work, plain: nn.Module) -> System:
    return System(plain, plain, ray_served(order.address, plain, order.servers))


def _data_parallel(order: Order, work: Work, plain: nn.Module) -> System:
    """One process, whose first device is the root of all."""
    model = nn.DataParallel(plain, device_ids=list(range(work.workers)) if work.device == "cuda" else None)
    return System(model, plain, work.optimizer(plain.parameters()), backward=True)


def _alone(order: Order, work: Work, plain: nn.Module) -> System:
    return System(plain, plain, work.optimizer(plain.parameters()))


SYSTEMS: dict[str, Callable[[Order, Work, nn.Module], System]] = {
    "ours": _ours,
    "gloo": _gloo,
    "Horovod": _horovod,
    "torch RPC": _rpc,
    "Ray": _ray,
    "DataParallel": _data_parallel,
    "alone": _alone,
}
IN_ONE_PROCESS = ("DataParallel", "alone")


class AllReduced:
    """An optimizer whose gradients lie in one tensor, and are all-reduced in pieces of it."""

    def __init__(self, plain: nn.Module, optimizer: torch.optim.Optimizer, workers: int) -> None:
        [parameters] = owned(plain, 1)
        flat = torch.zeros(sum(each.numel() for each in parameters), device=parameters[0].device)
        for parameter, part in zip(parameters, flat.split([each.numel() for each in parameters]), strict=True):
            parameter.grad = part.view_as(parameter)
        self._optimizer, self._workers = optimizer, workers
        self._flat, self._pieces = flat, flat.split(GLOO_BUCKET // 4)

    def step(self) -> None:
        """All pieces travel at the same time."""
        pending = [dist.all_reduce(piece, async_op=True) for piece in self._pieces]
        for work in pending:
            work.wait()
        self._flat.div_(self._workers)
        self._optimizer.step()

    def zero_grad(self) -> None:
        """Nothing: gradients are filled in anew."""


# -- what they do ----------------------------------------------------------------------------------------------------


class Worker:
    """One worker, and the times of what it does."""

    def __init__(self, order: Order) -> None:
        self._order, self._work = order, Work(**order.work)
        rank = 0 if order.system in IN_ONE_PROCESS else dist.get_rank()
        self._device = self._work.place(rank)
        plain = self._work.model().to(self._device)
        self._system = SYSTEMS[order.system](order, self._work, plain)
        self._ranks = range(self._work.workers) if order.system in IN_ONE_PROCESS else range(rank, rank + 1)
        if self._work.kind == ROUND:
            self._rounds = Rounds(self._work, rank, plain)
        else:
            self._batches = Batches(self._work, build(self._work.task)[2], self._ranks, self._device)
        self._loss = float("nan")

    def warm_up(self) -> None:
        """Makes the first rounds or steps. Raises SystemExit unless the weights are right after them."""
        for _ in range(WARMUP):
            self._one()
        if self._work.kind == ROUND:
            self._rounds.check()
        elif self._order.system == "alone":
            save_expected(self._system.plain, Path(self._order.expected))
        else:
            check_weights(self._work, self._system.plain, Path(self._order.expected))

    def turn(self, count: int) -> dict[str, Any]:
        """Makes so many rounds or steps. In a step no worker waits for others but as its system has it."""
        dist.barrier()
        seconds = [self._one() for _ in range(count)][1:]
        if self._work.kind == ROUND:
            self._rounds.check()
        return {"seconds": seconds, "loss": self._loss}

    def _one(self) -> float:
        return self._round() if self._work.kind == ROUND else self._step()

    def _round(self) -> float:
        self._rounds.fill()
        if self._system.backward:
            self._system.optimizer.zero_grad()
        self._wait()
        dist.barrier()
        started = time.perf_counter()
        if self._system.backward:
            ranks = torch.tensor([float(rank) for rank in self._ranks], device=self._device)
            self._system.model(ranks).mean().backward()
        self._system.optimizer.step()
        self._wait()
        longest = torch.tensor(time.perf_counter() - started, dtype=torch.float64)
        dist.all_reduce(longest, dist.ReduceOp.MAX)
        return longest.item()

    def _step(self) -> float:
        started = time.perf_counter()
        x, y = self._batches.next()
        loss = F.cross_entropy(self._system.model(x).flatten(0, 1), y.flatten())
        loss.backward()
        self._system.optimizer.step()
        self._system.optimizer.zero_grad()
        self._loss = loss.item()
        self._wait()
        return time.perf_counter() - started

    def _wait(self) -> None:
        """For what a GPU still does."""
        if self._work.device == "cuda":
            torch.cuda.synchronize()


def main() -> None:
    """Follows orders until there are no more."""
    say = own_output()
    order = Order(**json.loads(sys.stdin.readline()))
    torch.set_num_threads(THREADS)
    # Tensors of clocks and barriers are the CPU's.
    dist.init_process_group("cpu:gloo,cuda:nccl" if order.work.get("device") == "cuda" else "gloo")
    worker = Worker(order)
    worker.warm_up()
    say({"ready": True})
    for line in sys.stdin:
        say(worker.turn(json.loads(line)["count"]))
    sys.stderr.flush()
    os._exit(0)  # sessions and connections end with their servers; nothing here needs an orderly end


if __name__ == "__main__":
    main()
