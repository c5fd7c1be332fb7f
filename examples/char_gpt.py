"""Train a small GPT, byte by byte, on the source of Python's own standard library.

    python examples/char_gpt.py                                                            # one process
    torchrun --nproc-per-node 2 examples/char_gpt.py                                       # DDP
    ps-worker run --server HOST:PORT --workers 2 --mode ssp:4 examples/char_gpt.py         # parameter server

This is an ordinary training script. The lines marked (ps) are all that a parameter server asks of it; the way it
trains (single, ddp, sync, ssp:K, async) is chosen from outside.

From top to bottom: the data, the model, the training, and what is left behind in --out.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import sys
import sysconfig
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import ps_torch as ps

try:
    from tqdm import tqdm
except ImportError:  # then progress is in plain lines
    tqdm = None

VOCABULARY = 256  # every byte is a token: no tokenizer, and any text will do
WARMUP_STEPS = 20
LAST_STEPS = 20  # last_loss is their mean: one batch's loss jumps by 0.1

# --- the data --------------------------------------------------------------------------------------------------------


def library_text() -> bytes:
    """The modules at the top of the running interpreter's standard library, by name: about 5 MB of Python."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return b"".join(file.read_bytes() for file in files)


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """Blocks of text that begin at random places; an index always names the same block.

    There are as many as cover the text once on average. The target of each byte is the byte after it.
    """

    def __init__(self, text: bytes, block: int, seed: int = 0) -> None:
        if len(text) <= block:
            raise ValueError(f"a block of {block} bytes needs a longer text, got {len(text)} bytes")
        generator = torch.Generator().manual_seed(seed)
        self._text = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self._starts = torch.randint(len(text) - block, (len(text) // block,), generator=generator).tolist()
        self._block = block

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        start = self._starts[index]
        window = self._text[start : start + self._block + 1].long()
        return window[:-1], window[1:]  # (block,), (block,)


def endless(loader: DataLoader[Any]) -> Iterator[Any]:
    """Epoch after epoch: training ends after a number of steps."""
    if len(loader) == 0:
        raise ValueError("a batch is larger than this worker's share of the data")
    while True:
        yield from loader


# --- the model -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shape:
    """The model's size; width must divide by 2 * heads, because positions rotate pairs of numbers within a head."""

    layers: int = 3
    heads: int = 4
    width: int = 256
    block: int = 64

    def __post_init__(self) -> None:
        if self.width % (2 * self.heads):
            raise ValueError(f"width must divide by 2 * heads = {2 * self.heads}, got {self.width}")


def rotation(length: int, size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines of rotary position embedding (Su et al., 2021), each (length, size / 2).

    What a head sees of two bytes' positions is their distance. Learned positions would have to find that out: they
    end 0.3 above this loss after 200 steps.
    """
    speeds = 10000.0 ** (-torch.arange(0, size, 2, device=device) / size)
    angles = torch.outer(torch.arange(length, device=device), speeds)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turns each pair of numbers by its position's angle: (batch, heads, length, size) to the same."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1)


class Block(nn.Module):
    """Attention to the bytes before, then an MLP; each adds to the residual stream."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width = shape.width
        self.heads = shape.heads
        self.attention_norm = nn.LayerNorm(width, bias=False)
        self.query_key_value = nn.Linear(width, 3 * width, bias=False)
        self.attention_out = nn.Linear(width, width, bias=False)
        self.mlp_norm = nn.LayerNorm(width, bias=False)
        self.mlp_in = nn.Linear(width, 4 * width, bias=False)
        self.mlp_out = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, width = x.shape
        heads = self.query_key_value(self.attention_norm(x)).view(batch, length, 3, self.heads, -1)
        query, key, value = heads.permute(2, 0, 3, 1, 4)  # (batch, heads, length, width / heads) each
        query, key = rotate(query, cos, sin), rotate(key, cos, sin)
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attention_out(seen.transpose(1, 2).reshape(batch, length, width))
        hidden = F.relu(self.mlp_in(self.mlp_norm(x))).square()  # squared ReLU (So et al., 2021)
        return x + self.mlp_out(hidden)


class CharGPT(nn.Module):
    """Bytes in, logits of the next byte out."""

    def __init__(self, shape: Shape, tied: bool = False) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = nn.Embedding(VOCABULARY, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width, bias=False)
        self.head = nn.Linear(shape.width, VOCABULARY, bias=False)
        for name, parameter in self.named_parameters():
            if name.endswith("_out.weight"):
                nn.init.zeros_(parameter)  # each block starts as the identity
            elif name == "head.weight":
                nn.init.normal_(parameter, std=0.01)  # the first guess is almost even; from zero, learning is slow
            elif parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.02)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """(batch, length) bytes to (batch, length, 256) logits."""
        cos, sin = rotation(tokens.shape[1], self.shape.width // self.shape.heads, tokens.device)
        x = self.embedding(tokens)  # (batch, length, width)
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.head(self.norm(x))


@torch.no_grad()
def write_text(model: CharGPT, prompt: str, length: int, seed: int = 0) -> Iterator[str]:
    """The prompt, then one by one `length` bytes that the model finds likely after it."""
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.tensor([list(prompt.encode())], device=device)
    yield prompt
    for _ in range(length):
        logits = model(tokens[:, -model.shape.block :])[0, -1].float().cpu()
        likely = torch.softmax(logits / 0.7, dim=-1)  # below 1: more careful than the model is
        token = torch.multinomial(likely, 1, generator=generator)
        tokens = torch.cat((tokens, token.to(device)[None]), dim=1)
        byte = token.item()
        # What is no printable ASCII could upset a terminal.
        yield chr(int(byte)) if byte == 10 or 32 <= byte < 127 else "?"


# --- the training ----------------------------------------------------------------------------------------------------


def train(arguments: argparse.Namespace) -> None:
    """Trains, and on rank 0 writes what came of it to --out."""
    torch.manual_seed(arguments.seed)
    shape = Shape(arguments.layers, arguments.heads, arguments.width, arguments.block)
    model = CharGPT(shape, arguments.tied)
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    gains = [parameter for parameter in model.parameters() if parameter.ndim == 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": gains, "weight_decay": 0.0}],
        lr=arguments.lr,
        betas=(0.9, 0.95),
    )
    windows = Windows(library_text(), arguments.block, arguments.seed)
    loader = DataLoader(windows, arguments.batch_size, shuffle=True, drop_last=True)

    def warmup_then_cosine(step: int) -> float:
        cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, step / arguments.steps)))
        return min(1.0, (step + 1) / WARMUP_STEPS) * (0.05 + 0.95 * cosine)

    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, warmup_then_cosine)

    session = ps.connect()  # (ps)
    model, optimizer, loader, scheduler = session.prepare(model, optimizer, loader, scheduler)  # (ps)
    session.progress(total=arguments.steps)  # (ps) for those who watch: how much is left

    losses: list[float] = []
    progress = Progress(arguments.steps, shown=session.rank == 0)
    started = time.perf_counter()
    for _, (x, y) in zip(range(arguments.steps), endless(loader), strict=False):  # x, y: (batch, block)
        logits = model(x)  # (batch, block, 256)
        loss = F.cross_entropy(logits.flatten(0, 1), y.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        losses.append(loss.item())
        session.log(loss=losses[-1])  # (ps) for those who watch
        progress.step(losses)
    seconds = time.perf_counter() - started
    progress.close()

    session.barrier()  # (ps) all workers have made their last step
    if session.rank == 0:
        # All workers' samples, taking the others to be as fast as this one.
        samples = arguments.steps * arguments.batch_size * session.world_size
        result = {
            "mode": session.mode,
            "shards": None,  # a worker does not know how many there are
            "workers": session.world_size,
            "steps": arguments.steps,
            "first_loss": losses[0],
            "last_loss": mean(losses[-LAST_STEPS:]),
            "samples_per_second": samples / seconds,
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
        }
        weights = session.global_weights(model)  # (ps) those of the job, in every mode
        leave_behind(arguments.out, session.unwrap(model), weights, losses, result)


class Progress:
    """How far the training is: a bar on a terminal, if tqdm is installed; otherwise the first step and ten lines more,
    with the pace and the time that is left; nothing if not shown."""

    def __init__(self, steps: int, shown: bool) -> None:
        self._steps = steps
        self._bar: Any = None
        if tqdm is not None and shown and sys.stderr.isatty():
            columns, lines = shutil.get_terminal_size()  # tqdm alone shows nothing where a terminal's size is unknown
            self._bar = tqdm(total=steps, unit="step", ncols=min(100, columns), nrows=lines)
        self._every = max(1, steps // 10) if shown and self._bar is None else 0
        self._first = 0.0  # when the first step was over: it is slower than the rest, and says nothing of the pace

    def step(self, losses: Sequence[float]) -> None:
        """One more step is done."""
        loss = f"{mean(losses[-LAST_STEPS:]):.3f}"
        if self._bar is not None:
            self._bar.set_postfix(loss=loss, refresh=False)
            self._bar.update()
        if self._every and len(losses) == 1:
            self._first = time.perf_counter()
            print(f"step 1/{self._steps}: loss {loss}", flush=True)
        elif self._every and len(losses) % self._every == 0:
            pace = (len(losses) - 1) / (time.perf_counter() - self._first)
            left = f"{(self._steps - len(losses)) / pace:.0f} s left"
            print(f"step {len(losses)}/{self._steps}: loss {loss}, {pace:.1f} steps/s, {left}", flush=True)

    def close(self) -> None:
        """Ends the bar's line."""
        if self._bar is not None:
            self._bar.close()


# --- what is left behind ---------------------------------------------------------------------------------------------


def leave_behind(
    out: Path, model: CharGPT, weights: dict[str, Any], losses: Sequence[float], result: dict[str, Any]
) -> None:
    """Writes model.safetensors, result.json and, if matplotlib is there, loss.png; prints what the model writes."""
    from safetensors.torch import save_file

    out.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.cpu() for name, tensor in weights.items()}, out / "model.safetensors")
    try:
        draw(losses, result, out / "loss.png")
    except ImportError:
        print("no picture, because matplotlib is not installed: pip install '.[examples]'")
    (out / "result.json").write_text(json.dumps(result, indent=2) + "\n")
    print(f"\nWhat the model writes after {result['steps']} steps:\n")
    for piece in write_text(model, "def ", 300):
        print(piece, end="", flush=True)
    print()


def draw(losses: Sequence[float], result: dict[str, Any], path: Path) -> None:
    """The loss of every step, and its running mean."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot(losses, color="tab:blue", alpha=0.3, label="each step")
    smooth = [mean(losses[max(0, end - LAST_STEPS) : end]) for end in range(1, len(losses) + 1)]
    axes.plot(smooth, color="tab:blue", label=f"mean of {LAST_STEPS} steps")
    axes.axhline(math.log(VOCABULARY), color="gray", linestyle=":", label="guessing, ln 256")
    axes.set(xlabel="step", ylabel="loss, nats per byte", title=f"{result['mode']}, {result['workers']} worker(s)")
    axes.legend()
    figure.savefig(path, dpi=120)


def mean(values: Sequence[float]) -> float:
    """The arithmetic mean."""
    return sum(values) / len(values)


def parse_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The defaults are those of the demo: 100 steps of two workers bring the loss to about 2.3 within a minute.

    words: the arguments; None: those of the command line
    """
    parser = argparse.ArgumentParser(description="Train a small GPT on the source of Python's standard library.")
    parser.add_argument("--steps", type=int, default=100, help="steps of each worker (%(default)s)")
    parser.add_argument("--batch-size", type=int, default=16, help="blocks in one worker's batch (%(default)s)")
    parser.add_argument("--layers", type=int, default=Shape.layers, help="(%(default)s)")
    parser.add_argument("--heads", type=int, default=Shape.heads, help="attention heads in a layer (%(default)s)")
    parser.add_argument("--width", type=int, default=Shape.width, help="(%(default)s)")
    parser.add_argument("--block", type=int, default=Shape.block, help="bytes the model sees at a time (%(default)s)")
    parser.add_argument("--tied", action="store_true", help="one matrix for embedding and output")
    parser.add_argument("--lr", type=float, default=1e-3, help="highest learning rate (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="(%(default)s)")
    parser.add_argument("--out", type=Path, default=Path("runs/char_gpt"), help="where to leave results (%(default)s)")
    arguments = parser.parse_args(words)
    if min(arguments.steps, arguments.batch_size, arguments.layers) < 1:
        parser.error("--steps, --batch-size and --layers must be at least 1")
    return arguments


if __name__ == "__main__":
    train(parse_arguments())
