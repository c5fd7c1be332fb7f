"""A small GPT on two islands: each is two processes that hold one model in pieces, by `fully_shard` (FSDP2).

    python examples/islands.py                    # after 64 steps they meet every 8, in 4 bits; and HSDP beside them
    python examples/islands.py --mode local:8/2   # and they train while half of the model is away
    python examples/islands.py --mode sync --wire float32 --steps 40   # they meet in each step, as HSDP does

Within an island the processes reduce their gradients among themselves, in every step. Between islands is a parameter
server: that level may be slow, far away, or gone for a while. HSDP (hybrid sharding) has the same shape, with
collectives of torch at both levels. Both train with the same batches, so in sync and float32 they end with the same
loss.

The lines marked (ps) are all that a parameter server asks of the training. Each of the two commands that this script
runs is one that you can run by itself:

    ps-worker run --shards 2 --workers 2 --group 2 --mode local:8 --wire int4 examples/islands.py
    torchrun --nproc-per-node 4 examples/islands.py
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from char_gpt import CharGPT, Shape, Windows, library_text
from demo import running, terminate, threads
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import ps_torch as ps

ISLANDS, RANKS = 2, 2  # how many islands there are, and processes in each
FIRST_STEPS = 3  # not timed: memory is allocated in them, and connections are made

# --- one process of an island, or of HSDP ----------------------------------------------------------------------------


def train(arguments: argparse.Namespace) -> None:
    """Trains with all other processes; the first of them leaves the losses and the time of a step in --out."""
    on_servers = bool(os.environ.get("PS_SERVER"))
    dist.init_process_group("gloo")  # of this island under `ps-worker run --group`; of all processes under torchrun
    torch.manual_seed(arguments.seed)
    model = CharGPT(Shape(arguments.layers, arguments.heads, arguments.width, arguments.block))
    own, count = dist.get_rank(), dist.get_world_size()
    if on_servers:
        mesh = init_device_mesh("cpu", (count,))
    else:  # one copy of the model for each island, cut within it
        mesh = init_device_mesh("cpu", (ISLANDS, count // ISLANDS), mesh_dim_names=("islands", "ranks"))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.lr, betas=(0.9, 0.95), weight_decay=0.1)

    session = None
    if on_servers:
        session = ps.connect()  # (ps)
        model, optimizer = session.prepare(model, optimizer, group=mesh)  # (ps)
        own, count = session.rank * count + own, session.world_size * count  # (ps)
        session.progress(total=arguments.steps)  # (ps) for those who watch

    windows = Windows(library_text(), arguments.block, arguments.seed)
    losses = torch.zeros(2, arguments.steps, dtype=torch.float64)  # of each step, and whether this process has made it
    seconds: list[float] = []
    # An island that is started again goes on with the job. Servers that roll back take the clock back.
    while (step := len(seconds) if session is None else session.clock) < arguments.steps:
        began = time.perf_counter()
        first = (step * count + own) * arguments.batch_size  # windows begin at random places of the text
        batch = [windows[(first + index) % len(windows)] for index in range(arguments.batch_size)]
        x, y = (torch.stack(each) for each in zip(*batch, strict=True))
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses[:, step] = torch.tensor([loss.item(), 1.0])
        if session is not None:
            session.log(loss=loss.item())  # (ps) for those who watch
        seconds.append(time.perf_counter() - began)
        if own == 0 and (step + 1) % max(1, arguments.steps // 5) == 0:
            print(f"step {step + 1}/{arguments.steps}: loss {loss.item():.3f} on this process", flush=True)

    leave_result(arguments.out, session, losses, seconds, own == 0)
    dist.destroy_process_group()


def leave_result(
    out: Path, session: ps.Session | None, losses: torch.Tensor, seconds: Sequence[float], is_first: bool
) -> None:
    """Writes what came of it: of each step, the loss over the batches of the processes that have made it."""
    if session is not None:
        losses = session.mean(losses)  # (ps)
    else:
        dist.all_reduce(losses)
    if is_first:
        sums, counts = losses[:, losses[1] > 0]
        out.mkdir(parents=True, exist_ok=True)
        step = statistics.fmean(
            seconds[FIRST_STEPS:] or seconds or [0.0]
        )  # some may wait for the other island, others not
        result = {"name": session.mode if session else "HSDP", "losses": (sums / counts).tolist(), "step_seconds": step}
        (out / ("islands.json" if session else "hsdp.json")).write_text(json.dumps(result) + "\n")
    if session is not None:
        session.close()  # (ps)


# --- both, one after the other ---------------------------------------------------------------------------------------


def compare(arguments: argparse.Namespace, words: Sequence[str]) -> None:
    """Runs HSDP and the islands, and says what came of them. words: of the command line, for the processes"""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, terminate)
    arguments.out.mkdir(parents=True, exist_ok=True)
    processes = ISLANDS * RANKS
    hsdp = ["torchrun", "--standalone", "--nproc-per-node", str(processes), __file__, *words]
    islands = ["ps-worker", "run", "--shards", "2", "--workers", str(ISLANDS), "--group", str(RANKS)]
    islands += ["--mode", arguments.mode, "--wire", arguments.wire, __file__, *words]
    results = [run(hsdp, arguments.out / "hsdp.json"), run(islands, arguments.out / "islands.json")]
    print(f"\n{'':<16}{'first loss':>12}{'last loss':>12}{'time of a step':>18}")
    for name, result in zip(("HSDP", f"islands, {arguments.mode}"), results, strict=True):
        losses, step = result["losses"], result["step_seconds"]
        print(f"{name:<16}{losses[0]:>12.4f}{losses[-1]:>12.4f}{1000 * step:>15.0f} ms")
    try:
        draw(results, arguments.out / "loss.png")
        print(f"\nthe losses of all steps: {arguments.out}/loss.png")
    except ImportError:
        print("\nno picture, because matplotlib is not installed: pip install '.[examples]'")


def run(command: Sequence[str], result: Path) -> dict[str, Any]:
    """Runs a command to its end; returns what its first process has left."""
    result.unlink(missing_ok=True)  # an old one must not pass for this one
    # What chooses how a process trains comes from the command alone.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PS_")}
    with running(command, env=environment | {"OMP_NUM_THREADS": threads(ISLANDS * RANKS)}) as process:
        process.wait()
    if process.returncode or not result.exists():
        sys.exit(f"islands: the processes ended with code {process.returncode}")
    found: dict[str, Any] = json.loads(result.read_text())
    return found


def draw(results: Sequence[dict[str, Any]], path: Path) -> None:
    """The loss of every step of both."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for result, line in zip(results, ("-", "--"), strict=True):
        axes.plot(result["losses"], line, label=result["name"])
    axes.set(xlabel="step", ylabel="loss, nats per byte", title=f"{ISLANDS} islands of {RANKS} FSDP2 ranks")
    axes.legend()
    figure.savefig(path, dpi=120)


def parse_arguments(words: Sequence[str]) -> argparse.Namespace:
    """The defaults are for a laptop: a few minutes in all."""
    parser = argparse.ArgumentParser(description="Train a small GPT on two islands, and with HSDP beside them.")
    parser.add_argument("--mode", default="local:8", help="how islands train with each other (%(default)s)")
    parser.add_argument("--wire", default="int4", help="how weights and gradients travel between them (%(default)s)")
    parser.add_argument("--steps", type=int, default=200, help="(%(default)s)")
    parser.add_argument("--batch-size", type=int, default=4, help="blocks in a batch of one process (%(default)s)")
    parser.add_argument("--layers", type=int, default=Shape.layers, help="(%(default)s)")
    parser.add_argument("--heads", type=int, default=Shape.heads, help="attention heads in a layer (%(default)s)")
    parser.add_argument("--width", type=int, default=Shape.width, help="(%(default)s)")
    parser.add_argument("--block", type=int, default=Shape.block, help="bytes the model sees at a time (%(default)s)")
    parser.add_argument("--lr", type=float, default=1e-3, help="(%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="(%(default)s)")
    parser.add_argument("--out", type=Path, default=Path("runs/islands"), help="where to leave results (%(default)s)")
    arguments = parser.parse_args(words)
    if min(arguments.steps, arguments.batch_size, arguments.layers) < 1:
        parser.error("--steps, --batch-size and --layers must be at least 1")
    return arguments


def main() -> None:
    """Trains where a launcher has started this process; starts both launchers where none has."""
    words = sys.argv[1:]
    arguments = parse_arguments(words)
    if "RANK" in os.environ:
        train(arguments)
    else:
        compare(arguments, words)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
