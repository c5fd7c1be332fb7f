"""One worker of `python -m bench lowcomm`: trains a GPT by one system, and says how good it is.

The first line of its input is its Order; each line after it is told to all workers at the same time:

    {"steps": N}        takes N steps, and those that end a round of local steps; answers with the mean of their losses,
                        how long they took, and the bytes that went through this host's interfaces meanwhile
    {"evaluate": true}  the loss on this worker's part of the held-out text
    {"save": PATH}      writes weights and optimizer state, from which other systems begin (`start`)
"""

from __future__ import annotations

import json
import math
import random
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.func import functional_call
from torch.utils.data import DataLoader

import ps_worker
from bench.machine import traffic
from bench.talk import own_output
from examples.char_gpt import CharGPT, Shape, Windows, endless, library_text
from ps_protocol.job import BLOCK_WIRES

HELD_OUT = 20  # one byte of so many is for the held-out loss, at the end of the text
ONE_BUCKET_MB = 4096
RISING_STEPS = 20  # the learning rate rises over so many
LAST_SHARE = 0.05  # what is left of the learning rate at the end of a run whose length is known
STALLED = 0.1  # of all steps


@dataclass(frozen=True)
class Order:
    """What a worker trains, and how.

    mode:     as ps_worker.connect takes it
    hook:     in ddp, what narrows gradients: "bf16" or "powersgd"; empty: nothing
    wire:     on servers, how gradients and weights travel
    warm_up:  steps of local:H that are rounds of their own; None: its default
    bucket_bytes: of the job's buckets; None: the servers choose
    total:    steps until the learning rate has come down; 0: it stays
    start:    a file with weights and optimizer state to begin with, after `before` steps: the learning rate goes on
    held_out: bytes of text that a worker evaluates on
    clip:     the largest norm of a worker's gradient; 0: any
    quorum:   as ps_worker.connect takes it; grace: its quorum_grace
    stall:    seconds that one step of ten takes longer, which ones is drawn from seed and rank
    """

    mode: str
    rank: int = 0
    world_size: int = 1
    server: str | None = None
    job: str = "default"
    transport: str = "auto"
    hook: str = ""
    wire: str = "float32"
    warm_up: int | None = None
    bucket_bytes: int | None = None
    layers: int = 8
    width: int = 512
    block: int = 64
    batch: int = 8
    lr: float = 1e-3
    seed: int = 0
    total: int = 0
    start: str = ""
    before: int = 0
    held_out: int = 1024
    clip: float = 0.0
    quorum: str | None = None
    grace: float = 0.0
    stall: float = 0.0


class Training:
    """The model, and the steps that a worker takes with it."""

    def __init__(self, order: Order, session: ps_worker.Session) -> None:
        torch.manual_seed(order.seed)
        self._order, self._session = order, session
        text = library_text()
        cut = len(text) - len(text) // HELD_OUT
        self._held_out = text[cut:]
        model = CharGPT(Shape(order.layers, max(1, order.width // 64), order.width, order.block))
        optimizer = torch.optim.AdamW(model.parameters(), lr=order.lr, betas=(0.9, 0.95), fused=True)
        if order.start:
            begin_with(Path(order.start), model, optimizer)
        data = DataLoader(Windows(text[:cut], order.block, order.seed), order.batch, shuffle=True, drop_last=True)
        # PowerSGD's all-reduces of several buckets are begun by callbacks, in an order that may differ between ranks:
        # gloo ends with an error then. One bucket has them all in one order.
        more = {"ddp_options": {"bucket_cap_mb": ONE_BUCKET_MB}} if order.hook == "powersgd" else self._wires()
        self._model, self._optimizer, self._loader = session.prepare(model, optimizer, data, **more)
        if order.hook == "bf16":
            self._model.register_comm_hook(None, bfloat16_hook)
        elif order.hook == "powersgd":
            state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=10)
            self._model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        self._scheduler = torch.optim.lr_scheduler.LambdaLR(self._optimizer, self._rate)
        self._batches = endless(self._loader)
        self._luck = random.Random(f"{order.seed} {order.rank}")

    def _wires(self) -> dict[str, Any]:
        if self._order.server is None:
            return {}
        wire, mode, warm_up = self._order.wire, self._order.mode, self._order.warm_up
        alike = self._order.quorum is None and (mode == "sync" or mode.startswith("local:"))
        both = alike or wire not in BLOCK_WIRES  # blocks: where all workers have the same weights
        outer = None if warm_up is None else {"warm_up": warm_up}
        wires = {"gradient_wire": wire, "weight_wire": wire if both else "bfloat16"}
        return {**wires, "outer": outer, "bucket_bytes": self._order.bucket_bytes}

    def _rate(self, made: int) -> float:
        step = made + self._order.before
        rising = min(1.0, (step + 1) / RISING_STEPS)
        if not self._order.total:
            return rising
        cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, step / self._order.total)))
        return rising * (LAST_SHARE + (1 - LAST_SHARE) * cosine)

    def take(self, steps: int) -> tuple[int, float]:
        """Takes so many steps, and those that end a round of local steps; returns how many, and their mean loss."""
        losses = []
        for x, y in self._batches:
            before = self._rounds()
            if self._luck.random() < STALLED:
                time.sleep(self._order.stall)
            loss = self._loss(x, y)
            loss.backward()
            if self._order.clip:
                torch.nn.utils.clip_grad_norm_(self._model.parameters(), self._order.clip)
            self._optimizer.step()
            self._optimizer.zero_grad()
            self._scheduler.step()
            losses.append(loss.item())
            if len(losses) >= steps and self._rounds() != before:
                break
        if self._order.quorum is not None:
            self._session.barrier()  # those that take their last steps need a quorum, too
        return len(losses), sum(losses) / len(losses)

    def _rounds(self) -> int:
        """Returns how often the workers have exchanged what they learned."""
        return self._session.round if self._order.mode.startswith("local:") else self._session.clock

    def _loss(self, x: Tensor, y: Tensor) -> Tensor:
        """(batch, block) bytes and those after them to the mean loss, in nats."""
        return F.cross_entropy(self._model(x).flatten(0, 1), y.flatten())

    @torch.no_grad()
    def evaluate(self) -> float:
        """Returns the loss of the weights that all workers share (with a quorum, this worker's), on this worker's part
        of the held-out text."""
        model, weights = self._session.unwrap(self._model), self._session.global_weights()
        block, begin = self._order.block, self._order.rank * self._order.held_out
        part = torch.frombuffer(bytearray(self._held_out[begin : begin + self._order.held_out + 1]), dtype=torch.uint8)
        x, y = part[:-1].long().view(-1, block), part[1:].long().view(-1, block)
        parts = zip(x.split(8), y.split(8), strict=True)  # all of one size, or the mean would be another
        return statistics.mean(
            F.cross_entropy(functional_call(model, weights, (a,)).flatten(0, 1), b.flatten()).item() for a, b in parts
        )

    def save(self, path: Path) -> None:
        """Writes weights and optimizer state."""
        weights = {f"model.{name}": value for name, value in self._session.unwrap(self._model).state_dict().items()}
        state = {
            f"optimizer.{index}.{name}": value
            for index, values in self._optimizer.state_dict()["state"].items()
            for name, value in values.items()
        }
        save_file({name: value.detach().clone().contiguous() for name, value in (weights | state).items()}, path)


def bfloat16_hook(group, bucket):  # type: ignore[no-untyped-def]  # DDP compares types, and annotations are texts here
    """Does what torch's own hook does, under a name by which DDP does not know that it was made for NCCL."""
    return default_hooks.bf16_compress_hook(group, bucket)


def begin_with(path: Path, model: CharGPT, optimizer: torch.optim.Optimizer) -> None:
    """Gives a model and its optimizer what `save` wrote."""
    saved = load_file(path)
    model.load_state_dict({name[6:]: value for name, value in saved.items() if name.startswith("model.")})
    state: dict[int, dict[str, Tensor]] = {}
    for name, value in saved.items():
        if name.startswith("optimizer."):
            _, index, key = name.split(".", 2)
            state.setdefault(int(index), {})[key] = value
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def answers(training: Training, lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    """Does what each line says."""
    for line in lines:
        told = json.loads(line)
        if "save" in told:
            training.save(Path(told["save"]))
            yield {"saved": True}
        elif "evaluate" in told:
            yield {"loss": training.evaluate()}
        else:
            before, started = traffic(), time.perf_counter()
            steps, loss = training.take(told["steps"])
            moved = [now - then for now, then in zip(traffic(), before, strict=True)]
            yield {"steps": steps, "loss": loss, "seconds": time.perf_counter() - started, "traffic": moved}


def main() -> None:
    """Follows orders until there are no more."""
    say = own_output()
    order = Order(**json.loads(sys.stdin.readline()))
    with ps_worker.connect(
        order.server,
        order.mode,
        order.job,
        order.rank,
        order.world_size,
        transport=order.transport,
        quorum=order.quorum,
        quorum_grace=order.grace or None,
    ) as session:
        training = Training(order, session)
        say({"ready": True})
        for found in answers(training, sys.stdin):
            say(found)


if __name__ == "__main__":
    main()
