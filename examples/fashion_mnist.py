"""Train a small convolutional network with BatchNorm to tell clothes apart: Fashion-MNIST, real data.

    python examples/fashion_mnist.py                                                       # one process
    ps-worker run --mode ddp --workers 2 examples/fashion_mnist.py                         # DDP
    ps-worker run --server HOST:PORT --workers 2 --mode ssp:4 examples/fashion_mnist.py    # parameter server

Three passes bring the accuracy on the test images above 0.88 in every mode. The 70,000 images come with Debian's
package `dataset-fashion-mnist`, or in four files from the data set's own page; `--data` names the folder they are in.

This is an ordinary training script; the lines marked (ps) are all that a parameter server asks of it. From top to
bottom: the data, the model, the training, and what is left behind in --out.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import shutil
import struct
import sys
import time
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import ps_torch as ps

CLASSES = ("T-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot")
SIDE = 28  # pixels

# --- the data --------------------------------------------------------------------------------------------------------

FILES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)
# Where Debian's package puts them; and a folder that git ignores.
PLACES = (Path("/usr/share/datasets/fashion-mnist"), Path("runs/fashion-mnist"))
WHERE_FROM = """Get it in one of these ways:
  apt-get install dataset-fashion-mnist            Debian and Ubuntu; it is found by itself
  apt-get download dataset-fashion-mnist && dpkg -x dataset-fashion-mnist_*.deb runs/fashion-mnist
                                                   the same without root; found from this folder
  github.com/zalandoresearch/fashion-mnist         the four *-ubyte.gz files; then --data FOLDER"""


class NoData(Exception):
    """The data is not there, or is not what it should be; says where to get it."""


@dataclass(frozen=True)
class Clothes:
    """Images, bytes of shape (count, 28, 28), and the class of each, (count,), from 0 to 9."""

    images: Tensor
    labels: Tensor


def find(folder: Path | None) -> tuple[Path, ...]:
    """Returns the four files, plain or .gz, from a folder or any below it; None: from the places where they may be.

    Raises NoData if one is missing.
    """
    places = PLACES if folder is None else (folder,)
    for place in places:
        files = [sorted(path for end in ("", ".gz") for path in place.rglob(name + end)) for name in FILES]
        if all(files):
            return tuple(paths[0] for paths in files)
        if folder is not None:
            missing = ", ".join(name for name, paths in zip(FILES, files, strict=True) if not paths)
            raise NoData(f"{folder} lacks {missing} (plain or .gz)\n{WHERE_FROM}")
    raise NoData(f"Fashion-MNIST is not in {' nor in '.join(map(str, places))}\n{WHERE_FROM}")


def read_idx(path: Path) -> Tensor:
    """Returns the array of bytes that an idx file holds, in its shape.

    Such a file begins with two zeros, the type of the elements (8: unsigned bytes), the number of dimensions, and the
    size of each as a big-endian int32. Raises NoData for anything else.
    """
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        if content[:3] != b"\0\0\x08":
            raise NoData(f"{path} is no idx file of bytes: it begins with {content[:4].hex(' ') or 'nothing'}")
        (dimensions,) = struct.unpack_from("B", content, 3)
        header = 4 + 4 * dimensions
        shape = struct.unpack(f">{dimensions}I", content[4:header])
    except (EOFError, gzip.BadGzipFile, zlib.error, struct.error) as error:
        raise NoData(f"{path} is damaged: {error}") from None
    if len(content) - header != math.prod(shape):
        raise NoData(f"{path} should hold {math.prod(shape)} bytes of data, and holds {len(content) - header}")
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)[header:].view(shape)


def read(images: Path, labels: Path) -> Clothes:
    """Returns the images of one file with the labels of another. Raises NoData if they do not fit together."""
    clothes = Clothes(read_idx(images), read_idx(labels).long())
    count, *sides = clothes.images.shape
    if sides != [SIDE, SIDE] or clothes.labels.shape != (count,):
        shapes = f"{tuple(clothes.images.shape)} and {tuple(clothes.labels.shape)}"
        raise NoData(f"{images} and {labels} hold {shapes}, and not images of {SIDE} x {SIDE} with a label each")
    if not count or int(clothes.labels.max()) >= len(CLASSES):
        raise NoData(f"{labels} should hold labels from 0 to {len(CLASSES) - 1}")
    return clothes


# --- the model -------------------------------------------------------------------------------------------------------


def convolution(inputs: int, outputs: int) -> nn.Sequential:
    """Returns a convolution with BatchNorm, at half the resolution."""
    kernel = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)  # BatchNorm has a bias
    return nn.Sequential(kernel, nn.BatchNorm2d(outputs), nn.ReLU(), nn.MaxPool2d(2))


class Network(nn.Module):
    """Images as bytes in, (batch, 28, 28); logits of the ten classes out."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(convolution(1, 16), convolution(16, 32))
        self.classify = nn.Sequential(nn.Flatten(), nn.Linear(32 * 7 * 7, 64), nn.ReLU(), nn.Linear(64, len(CLASSES)))

    def forward(self, images: Tensor) -> Tensor:
        pixels = (images.float() - 73) / 90  # about the mean and the deviation of the data
        return self.classify(self.features(pixels[:, None]))


@torch.no_grad()
def predict(model: nn.Module, images: Tensor, device: torch.device) -> Tensor:
    """Returns the most likely class of each image: (count,)."""
    model.eval()
    classes = [model(batch.to(device)).argmax(dim=1).cpu() for batch in images.split(500)]
    model.train()
    return torch.cat(classes)


# --- the training ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Result:
    """What came of a run; result.json holds it."""

    mode: str
    workers: int
    passes: int
    accuracy: float  # of the last pass, on the test images
    accuracies: tuple[float, ...]  # of each pass
    seconds: float  # of the passes, their tests included


def train(arguments: argparse.Namespace) -> float:
    """Trains, writes on the main worker what came of it to --out, and returns the accuracy."""
    files = find(arguments.data)
    training, test = read(*files[:2]), read(*files[2:])
    torch.manual_seed(arguments.seed)
    model = Network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.lr)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, arguments.passes)  # stepped once a pass
    dataset = TensorDataset(training.images, training.labels)
    loader = DataLoader(dataset, arguments.batch_size, shuffle=True, drop_last=True)

    session = ps.connect()  # (ps)
    model, optimizer, loader, scheduler = session.prepare(model, optimizer, loader, scheduler)  # (ps)
    session.progress(total=arguments.passes * len(loader))  # (ps) for those who watch: how much is left

    losses: list[float] = []
    accuracies: list[float] = []
    started = time.perf_counter()
    for number in range(1, arguments.passes + 1):
        for images, labels in with_progress(loader, f"pass {number}", shown=session.is_main):
            loss = F.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            session.log(loss=losses[-1])  # (ps) for those who watch
        scheduler.step()
        # Each worker tests a share of the images, with its own model: BatchNorm's statistics are each worker's own.
        share = slice(session.rank, None, session.world_size)
        right = predict(session.unwrap(model), test.images[share], session.device) == test.labels[share]
        accuracies.append(session.mean(right.sum().item() / len(right), weight=len(right)))  # (ps)
        if session.is_main:
            recent = losses[-100:] or [math.nan]  # in an elastic job a worker may get no batch of a pass
            print(f"pass {number}: loss {sum(recent) / len(recent):.3f}, accuracy {accuracies[-1]:.4f}", flush=True)
    seconds = time.perf_counter() - started

    session.barrier()  # (ps) all workers have made their last step
    if session.is_main:
        result = Result(session.mode, session.world_size, len(accuracies), accuracies[-1], tuple(accuracies), seconds)
        weights = session.global_weights(model)  # (ps) those of the job, in every mode
        leave_behind(arguments.out, session.unwrap(model), weights, losses, result, test, session.device)
    return accuracies[-1]


def with_progress(batches: Iterable[Any], title: str, shown: bool) -> Iterable[Any]:
    """Returns the batches, under a progress bar if that is shown on a terminal; without tqdm there is none."""
    if not (shown and sys.stderr.isatty()):
        return batches
    try:
        from tqdm import tqdm
    except ImportError:
        return batches
    columns, lines = shutil.get_terminal_size()  # tqdm by itself shows nothing where a terminal's size is unknown
    return tqdm(batches, title, unit="step", ncols=min(100, columns), nrows=lines, leave=False)


# --- what is left behind ---------------------------------------------------------------------------------------------


def leave_behind(
    out: Path,
    model: nn.Module,
    weights: dict[str, Any],
    losses: Sequence[float],
    result: Result,
    test: Clothes,
    device: torch.device,
) -> None:
    """Writes model.safetensors, result.json and, if matplotlib is there, fashion_mnist.png."""
    from safetensors.torch import save_file

    out.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.cpu() for name, tensor in weights.items()}, out / "model.safetensors")
    (out / "result.json").write_text(json.dumps(asdict(result), indent=2) + "\n")
    picture = out / "fashion_mnist.png"
    try:
        draw(losses, result, test, predict(model, test.images[:15], device), picture)
    except ImportError:
        print("no picture, because matplotlib is not installed: pip install '.[examples]'")
    print(f"left in {out}: {', '.join(sorted(file.name for file in out.iterdir()))}", flush=True)


def draw(losses: Sequence[float], result: Result, test: Clothes, predictions: Tensor, path: Path) -> None:
    """Draws the loss of every step, the accuracy after every pass, and a few images with their predictions."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    curves, gallery = figure.subfigures(1, 2, width_ratios=(5, 6))
    axes = curves.subplots()
    axes.plot([step / len(losses) * result.passes for step in range(len(losses))], losses, color="tab:blue", alpha=0.5)
    axes.set(xlabel="pass", title=f"{result.mode}, {result.workers} worker(s): accuracy {result.accuracy:.3f}")
    axes.set_ylabel("loss of a step", color="tab:blue")
    right = axes.twinx()
    right.plot(range(1, result.passes + 1), result.accuracies, color="tab:orange", marker="o")
    right.set_ylabel("accuracy on the test images", color="tab:orange")
    right.set_ylim(min(0.8, *result.accuracies), 1.0)
    for place, image, label, guess in zip(
        gallery.subplots(3, 5).flat, test.images, test.labels.tolist(), predictions.tolist(), strict=False
    ):
        place.imshow(image.numpy(), cmap="gray_r")
        place.set_axis_off()
        said = CLASSES[guess] if guess == label else f"{CLASSES[guess]}\n(is: {CLASSES[label]})"
        place.set_title(said, fontsize=8, color="black" if guess == label else "tab:red")
    figure.savefig(path, dpi=120)


def parse_arguments() -> argparse.Namespace:
    """Three passes with the defaults take a minute or two on a laptop."""
    parser = argparse.ArgumentParser(description="Train a convolutional network with BatchNorm on Fashion-MNIST.")
    parser.add_argument("--data", type=Path, metavar="DIR", help="the folder of the four idx files, plain or .gz")
    parser.add_argument("--passes", type=int, default=3, help="passes over the data (%(default)s)")
    parser.add_argument("--batch-size", type=int, default=64, help="images in one worker's batch (%(default)s)")
    parser.add_argument("--lr", type=float, default=2e-3, help="learning rate of the first pass (%(default)s)")
    parser.add_argument("--goal", type=float, default=0.0, help="end with code 1 below this accuracy (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="(%(default)s)")
    text = "where to leave results (%(default)s)"
    parser.add_argument("--out", type=Path, default=Path("runs/fashion_mnist"), help=text)
    arguments = parser.parse_args()
    if min(arguments.passes, arguments.batch_size) < 1:
        parser.error("--passes and --batch-size must be at least 1")
    return arguments


def main() -> None:
    """Runs the example; see the top of this file."""
    arguments = parse_arguments()
    try:
        accuracy = train(arguments)
    except NoData as error:
        sys.exit(f"fashion_mnist: {error}")
    if accuracy < arguments.goal:
        sys.exit(f"fashion_mnist: the accuracy should be at least {arguments.goal}, and is {accuracy:.4f}")


if __name__ == "__main__":
    main()
