"""Predict clicks from ids: a factorisation machine over a table of rows, on data whose best possible AUC is known.

    python examples/clicks.py                                            # one process
    ps-worker run --mode ddp --workers 2 examples/clicks.py              # DDP: each rank has a replica of the table
    ps-worker run --mode ssp:4 --shards 2 --workers 2 examples/clicks.py # servers: each shard has a part of it

A sample is eight ids of 64 bits, as hashes of a user, an ad, a site and so on are. Popular ids occur far more often
than others, and with `--drift` new ones come up all the time. Whether somebody clicks is drawn with a probability that
is a function of the ids, so the AUC of a model that knew that function is known, too.

This is an ordinary training script; the lines marked (ps) are all that tables and workers ask of it. From top to
bottom: the data, the model, the training, and what is left behind in --out.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import ps_torch as ps

FIELDS, FACTORS = 8, 4  # of the truth
POPULAR = 5_000  # ids a field that occur at any time
TEST_SAMPLES = 40_000

# --- the data --------------------------------------------------------------------------------------------------------

Words = npt.NDArray[np.uint64]
Numbers = npt.NDArray[np.float64]


def scrambled(words: Words) -> Words:
    """Returns words of 64 bits that look random, and are a function of those given."""
    for _ in range(2):
        words = (words ^ words >> np.uint64(32)) * np.uint64(0xD6E8FEB86659FD93)
    return words ^ words >> np.uint64(32)


def normal(ids: npt.NDArray[np.int64], number: int) -> Numbers:
    """Returns, for each id, value number `number` of those that belong to it: nearly normal, with a deviation of 1."""
    words = scrambled(ids.view(np.uint64) * np.uint64(31) + np.uint64(number))
    parts = [(words >> np.uint64(shift) & np.uint64(0xFFFF)) / 65536 - 0.5 for shift in (0, 16, 32, 48)]
    return np.asarray(sum(parts) * 3**0.5)


class Clicks(Dataset[tuple[Tensor, Tensor]]):
    """Samples: ids (count, FIELDS) int64, and whether there was a click, (count,).

    start: how many samples came before; drift: by how many places popularity moves on with each of them
    logits: what the probability of a click is made of, (count,)
    """

    def __init__(self, count: int, seed: int, start: int = 0, drift: float = 0.0) -> None:
        random = np.random.default_rng(seed)
        shares = np.cumsum(1 / np.arange(1, POPULAR + 1) ** 1.1)
        places = shares.searchsorted(random.random((count, FIELDS)) * shares[-1]).astype(np.int64)
        places += ((np.arange(count) + start)[:, None] * drift).astype(np.int64)
        fields = np.arange(FIELDS, dtype=np.uint64)
        ids = scrambled(places.astype(np.uint64) * np.uint64(FIELDS) + fields).view(np.int64)
        first = normal(ids, 0).sum(1) / FIELDS**0.5
        factors = np.stack([normal(ids, number) for number in range(1, FACTORS + 1)], 2)
        pairs = (factors.sum(1) ** 2).sum(1) - (factors**2).sum((1, 2))
        self.logits = torch.from_numpy(0.825 * first + 0.06 * pairs - 1.1)
        self.ids = torch.from_numpy(ids)
        self.clicks = (torch.from_numpy(random.random(count)) < self.logits.sigmoid()).float()

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.ids[index], self.clicks[index]

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        """Returns a batch at once: many times as fast as one sample after the other."""
        chosen = torch.tensor(indices)
        return self.ids[chosen], self.clicks[chosen]


def as_it_is(batch: Any) -> Any:
    """The collate_fn of a data set that returns batches."""
    return batch


def auc(scores: Tensor, clicks: Tensor) -> float:
    """Returns how often a sample with a click has a higher score than one without: the area under the ROC curve."""
    ranks = torch.empty(len(scores), dtype=torch.float64)
    ranks[scores.argsort(stable=True)] = torch.arange(1, len(scores) + 1, dtype=torch.float64)
    positive = int(clicks.sum())
    wins = float(ranks[clicks > 0].sum()) - positive * (positive + 1) / 2
    return wins / (positive * (len(scores) - positive))


# --- the model -------------------------------------------------------------------------------------------------------


class FactorisationMachine(nn.Module):
    """Rendle, "Factorization Machines", ICDM 2010: a weight for each id, and the products of all pairs of vectors."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.rows = ps.Embedding(1 + width, scale=0.02)  # (ps) any id may have a row: they are not counted beforehand
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, ids: Tensor) -> Tensor:
        rows = self.rows(ids)
        vectors = rows[:, :, 1:]
        pairs = vectors.sum(1).square() - vectors.square().sum(1)
        return self.bias + rows[:, :, 0].sum(1) + 0.5 * pairs.sum(1)  # type: ignore[no-any-return]


@torch.no_grad()
def scores_of(model: nn.Module, data: Clicks) -> Tensor:
    """Returns the model's logits. Ids that training has not seen get no row by it."""
    model.eval()
    scores = torch.cat([model(ids) for ids in data.ids.split(4096)])
    model.train()
    return scores


# --- the training ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Result:
    """What came of a run; result.json holds it."""

    mode: str
    workers: int
    samples: int
    auc: float
    best_auc: float  # of the function that the clicks were drawn by
    rows: int
    seconds: float


def train(arguments: argparse.Namespace) -> Result:
    """Trains, writes on the main worker what came of it to --out, and returns it."""
    data = Clicks(arguments.samples, arguments.seed, drift=arguments.drift)
    test = Clicks(TEST_SAMPLES, arguments.seed + 1, arguments.samples, arguments.drift)
    torch.manual_seed(arguments.seed)
    model = FactorisationMachine(arguments.width)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=arguments.lr, initial_accumulator_value=1e-8)
    loader = DataLoader(data, arguments.batch_size, collate_fn=as_it_is, drop_last=True)  # in order, as clicks come

    session = ps.connect()  # (ps)
    model, optimizer, loader = session.prepare(model, optimizer, loader)  # (ps)
    session.progress(total=len(loader))  # (ps) for those who watch: how much is left
    own = session.unwrap(model)

    losses: list[float] = []
    started = time.perf_counter()
    for ids, clicks in with_progress(loader, shown=session.is_main):
        loss = F.binary_cross_entropy_with_logits(model(ids), clicks)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        session.log(loss=losses[-1])  # (ps) for those who watch
    seconds = time.perf_counter() - started
    session.barrier()  # (ps) what the other workers pushed last counts, too

    result = Result(
        session.mode,
        session.world_size,
        arguments.samples,
        auc(scores_of(own, test), test.clicks),
        auc(test.logits, test.clicks),
        len(own.rows),
        seconds,
    )
    if session.is_main:
        recent = losses[-100:] or [math.nan]  # in an elastic job a worker may get no batch
        print(f"loss {sum(recent) / len(recent):.4f}, {result.rows} rows, {arguments.samples / seconds:.0f} samples/s")
        print(f"AUC {result.auc:.4f} on new samples; the best that can be is {result.best_auc:.4f}", flush=True)
        weights = session.global_weights(model)  # (ps) those of the job, in every mode
        leave_behind(arguments.out, weights, losses, result)
    return result


def with_progress(batches: Iterable[Any], shown: bool) -> Iterable[Any]:
    """Returns the batches, under a progress bar if that is shown on a terminal; without tqdm there is none."""
    if not (shown and sys.stderr.isatty()):
        return batches
    try:
        from tqdm import tqdm
    except ImportError:
        return batches
    columns, lines = shutil.get_terminal_size()  # tqdm by itself shows nothing where a terminal's size is unknown
    return tqdm(batches, "clicks", unit="step", ncols=min(100, columns), nrows=lines, leave=False)


# --- what is left behind ---------------------------------------------------------------------------------------------


def leave_behind(out: Path, weights: dict[str, Any], losses: Sequence[float], result: Result) -> None:
    """Writes model.safetensors, with all rows, result.json and, if matplotlib is there, clicks.png."""
    from safetensors.torch import save_file

    out.mkdir(parents=True, exist_ok=True)
    save_file(weights, out / "model.safetensors")
    (out / "result.json").write_text(json.dumps(asdict(result), indent=2) + "\n")
    try:
        draw(losses, result, out / "clicks.png")
    except ImportError:
        print("no picture, because matplotlib is not installed: pip install '.[examples]'")
    print(f"left in {out}: {', '.join(sorted(file.name for file in out.iterdir()))}", flush=True)


def draw(losses: Sequence[float], result: Result, path: Path) -> None:
    """Draws the loss, and the AUC beside that of guessing and the best that can be."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), layout="constrained")
    curve, bars = figure.subplots(1, 2, width_ratios=(2, 1))
    window = max(1, len(losses) // 50)
    means = [sum(losses[i : i + window]) / len(losses[i : i + window]) for i in range(0, len(losses), window)]
    curve.plot([i * window for i in range(len(means))], means)
    title = f"{result.mode}, {result.workers} worker(s), {result.rows:,} rows"
    curve.set(xlabel="step", ylabel=f"loss, mean of {window} steps", title=title)
    names, values = ("guessing", "this model", "the best"), (0.5, result.auc, result.best_auc)
    bars.bar(names, values, color=("lightgrey", "tab:orange", "tab:blue"))
    bars.set(ylim=(0.45, 0.9), title="AUC on new samples")
    for place, value in enumerate(values):
        bars.text(place, value + 0.005, f"{value:.3f}", ha="center")
    figure.savefig(path, dpi=120)


def parse_arguments() -> argparse.Namespace:
    """A run with the defaults takes less than a minute on a laptop."""
    parser = argparse.ArgumentParser(description="Predict clicks from ids, with a table of rows.")
    parser.add_argument("--samples", type=int, default=1_000_000, help="to train with, once (%(default)s)")
    parser.add_argument("--drift", type=float, default=0.0, help="new ids a sample, such as 0.01 (%(default)s)")
    parser.add_argument("--batch-size", type=int, default=2048, help="samples in one worker's batch (%(default)s)")
    parser.add_argument("--width", type=int, default=8, help="elements of an id's vector (%(default)s)")
    parser.add_argument("--lr", type=float, default=0.05, help="learning rate (%(default)s)")
    parser.add_argument("--goal", type=float, default=0.0, help="end with code 1 below this AUC (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="(%(default)s)")
    text = "where to leave results (%(default)s)"
    parser.add_argument("--out", type=Path, default=Path("runs/clicks"), help=text)
    arguments = parser.parse_args()
    if min(arguments.batch_size, arguments.width) < 1 or arguments.samples < arguments.batch_size:
        parser.error("--batch-size and --width must be at least 1, and --samples at least --batch-size")
    return arguments


def main() -> None:
    """Runs the example; see the top of this file."""
    arguments = parse_arguments()
    result = train(arguments)
    if result.auc < arguments.goal:
        sys.exit(f"clicks: the AUC should be at least {arguments.goal}, and is {result.auc:.4f}")


if __name__ == "__main__":
    main()
