"""Predict who likes which film: MovieLens-100k, real ratings, with two tables of rows and two optimizers.

    python examples/movielens.py                                             # one process
    ps-worker run --mode ddp --workers 2 examples/movielens.py               # DDP: each rank has all rows
    ps-worker run --mode ssp:4 --shards 2 --workers 2 examples/movielens.py  # servers: each shard has a part

Three passes bring the AUC on ratings that were held back above 0.785 in every mode. The 100,000 ratings come with the
Python package recbole, or from GroupLens, which collected them; `--data` names the folder they are in. GroupLens's
terms do not let others pass them on, so they are not part of this repository.

A sample is seven values (user, age, sex, job, place, film, year), each hashed with its field's name to an id of 64
bits, and the film's genres, a bag of ids. The model is DeepFM (Guo et al., IJCAI 2017): a factorisation machine, and a
network of two layers over the same vectors.

This is an ordinary training script; the lines marked (ps) are all that tables and workers ask of it. From top to
bottom: the data, the model, the training, and what is left behind in --out.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import shutil
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from hashlib import blake2b
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import ps_torch as ps

LIKED = 4  # stars, of five
FIELDS = 7
HELD_BACK = 5  # one rating of so many is for the test

# --- the data --------------------------------------------------------------------------------------------------------

# Ratings, users and films, as the package has them, and as GroupLens's own folder does.
RECBOLE = ("ml-100k.inter", "ml-100k.user", "ml-100k.item")
GROUPLENS = ("u.data", "u.user", "u.item")
PLACE = Path("runs/ml-100k")  # a folder that git ignores
WHERE_FROM = f"""Get it in one of these ways:
  pip install --no-deps recbole==1.2.1             the package has the data; it is found by itself
  pip download --no-deps recbole==1.2.1 && unzip recbole-1.2.1-*.whl -d {PLACE}
                                                   the same, not installed; found from this folder
  grouplens.org/datasets/movielens/100k            ml-100k.zip, unzipped; then --data FOLDER"""
# In the order of GroupLens's columns.
GENRES = (
    "unknown", "Action", "Adventure", "Animation", "Children's", "Comedy", "Crime", "Documentary", "Drama", "Fantasy",
    "Film-Noir", "Horror", "Musical", "Mystery", "Romance", "Sci-Fi", "Thriller", "War", "Western",
)  # fmt: skip


class NoData(Exception):
    """The data is not there, or is not what it should be; says where to get it."""


@dataclass(frozen=True)
class Film:
    """A film; its year is empty where it is not known."""

    title: str
    year: str
    genres: tuple[str, ...]


@dataclass(frozen=True)
class MovieLens:
    """What the three files hold.

    ratings: user, film and stars
    users:   by name: age, sex, job and postal code
    """

    ratings: list[tuple[str, str, float]]
    users: dict[str, tuple[int, str, str, str]]
    films: dict[str, Film]


def find(folder: Path | None) -> tuple[Path, ...]:
    """Returns the three files, of either kind, from a folder or any below it; None: from where they may be.

    Raises NoData if one is missing.
    """
    for place in [folder] if folder is not None else [*installed(), PLACE]:
        for names in (RECBOLE, GROUPLENS):
            paths = [sorted(place.rglob(name)) for name in names]
            if all(paths):
                return tuple(each[0] for each in paths)
    kinds = " nor ".join(", ".join(names) for names in (RECBOLE, GROUPLENS))
    if folder is not None:
        raise NoData(f"{folder} has neither {kinds}\n{WHERE_FROM}")
    raise NoData(f"MovieLens-100k is neither in an installed package recbole nor in {PLACE}\n{WHERE_FROM}")


def installed() -> list[Path]:
    """Returns where the package's data is, without importing it: it wants many others."""
    try:
        package = metadata.distribution("recbole")
    except metadata.PackageNotFoundError:
        return []
    return [Path(str(package.locate_file("recbole/dataset_example/ml-100k")))]


def read(files: Sequence[Path]) -> MovieLens:
    """Returns what three files hold that `find` has returned. Raises NoData if they are damaged."""
    ratings, users, films = files
    package = ratings.name == RECBOLE[0]
    first, bar = (2, "\t") if package else (1, "|")  # the first line of the package's files names the columns
    try:
        found = MovieLens(
            [(row[0], row[1], number(row[2], 5)) for row in rows(ratings, "\t", 4, first)],
            {row[0]: (int(number(row[1], 120)), *row[2:5]) for row in rows(users, bar, 5, first)},
            {row[0]: film_of(row[1:]) for row in rows(films, bar, 4 if package else 5 + len(GENRES), first)},
        )
    except (OSError, ValueError) as error:
        raise NoData(f"the data cannot be read: {error}") from None
    for user, film, _ in found.ratings:
        if user not in found.users or film not in found.films:
            raise NoData(f"{ratings} has a rating by user {user} of film {film}: {users} or {films} lacks one of them")
    if len(found.ratings) < HELD_BACK:
        raise NoData(f"{ratings} should have {HELD_BACK} ratings at least, and has {len(found.ratings)}")
    return found


def rows(path: Path, separator: str, columns: int, first: int) -> Iterable[list[str]]:
    """Yields the values of each line of a file, from the one with this number on. Raises ValueError for odd ones."""
    encoding = "latin-1" if path.name in GROUPLENS else "utf-8"  # of the titles
    with path.open(encoding=encoding) as lines:
        for count, line in enumerate(lines, 1):
            values = line.rstrip("\n").split(separator)
            if count >= first and len(values) != columns:
                raise ValueError(f"line {count} of {path} should have {columns} columns, and has {len(values)}")
            if count >= first:
                yield values


def number(text: str, most: int) -> float:
    """Returns a number between 0 and the most that it may be. Raises ValueError for another."""
    value = float(text)
    if not 0 <= value <= most:
        raise ValueError(f"a number from 0 to {most} was expected, not {text!r}")
    return value


def film_of(values: Sequence[str]) -> Film:
    """Returns a film by the columns after its number.

    values: title, year and genres; or, from GroupLens: title, two dates, an address and a flag for each genre
    """
    if len(values) == 3:
        title, year, genres = values
        return Film(title, year if year.isdigit() else "", tuple(genres.split()))
    found = re.fullmatch(r"(.*) \((\d{4})\)\s*", values[0])
    title, year = found.groups() if found else (values[0], "")
    return Film(title, year, tuple(genre for genre, flag in zip(GENRES, values[4:], strict=True) if flag == "1"))


def id_of(field: str, value: object) -> int:
    """Returns the id of a field's value: a hash of 64 bits, so that one table may have the values of all fields."""
    return int.from_bytes(blake2b(f"{field}={value}".encode(), digest_size=8).digest(), "little", signed=True)


class Ratings(Dataset[tuple[Tensor, ...]]):
    """Samples of ratings: ids (count, FIELDS) int64, bags of ids of genres, and whether each liked the film, (count,).

    A batch is made at once, many times as fast as one sample after the other: ids [n, FIELDS], those of all genres of
    the batch and where each sample's begin [n], as EmbeddingBag takes them, and labels [n].
    """

    def __init__(self, data: MovieLens, chosen: Sequence[int]) -> None:
        users = {name: user_ids(name, *values) for name, values in data.users.items()}
        films = {name: [id_of("film", name), id_of("year", film.year)] for name, film in data.films.items()}
        ends, genres = {}, []
        for name, film in data.films.items():
            genres += [id_of("genre", genre) for genre in film.genres]
            ends[name] = len(genres)
        ratings = [data.ratings[index] for index in chosen]
        self.ids = torch.tensor([users[user] + films[film] for user, film, _ in ratings])
        self.likes = torch.tensor([float(stars >= LIKED) for *_, stars in ratings])
        self._genres = torch.tensor(genres, dtype=torch.int64)  # of all films, one film's after the other's
        self._ends = torch.tensor([ends[film] for _, film, _ in ratings])
        self._counts = torch.tensor([len(data.films[film].genres) for _, film, _ in ratings])

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        return self.__getitems__([index])

    def __getitems__(self, indices: Sequence[int]) -> tuple[Tensor, ...]:
        """Returns a batch: see above."""
        chosen = torch.as_tensor(indices)
        counts = self._counts[chosen]
        ends = counts.cumsum(0)  # in the batch
        places = torch.arange(int(counts.sum())) + (self._ends[chosen] - ends).repeat_interleave(counts)
        return self.ids[chosen], self._genres[places], ends - counts, self.likes[chosen]


def user_ids(name: str, age: int, sex: str, job: str, place: str) -> list[int]:
    """Returns the ids of what is known of a user: ages by five years, places by the first three signs."""
    values = {"user": name, "age": age // 5, "sex": sex, "job": job, "place": place[:3]}
    return [id_of(field, value) for field, value in values.items()]


def as_it_is(batch: Any) -> Any:
    """The collate_fn of a data set that returns batches."""
    return batch


def divided(data: MovieLens, split: int) -> tuple[Ratings, Ratings]:
    """Returns what to train and what to test with. split: another number holds back other ratings"""
    order = np.random.default_rng(split).permutation(len(data.ratings)).tolist()
    first = len(order) - len(order) // HELD_BACK
    return Ratings(data, order[:first]), Ratings(data, order[first:])


def auc(scores: Tensor, likes: Tensor) -> float:
    """Returns how often a film that was liked has a higher score than one that was not: the area under the ROC curve.

    Not a number where all were liked, or none was.
    """
    ranks = torch.empty(len(scores), dtype=torch.float64)
    ranks[scores.argsort(stable=True)] = torch.arange(1, len(scores) + 1, dtype=torch.float64)
    positive = int(likes.sum())
    pairs = positive * (len(scores) - positive)
    return (float(ranks[likes > 0].sum()) - positive * (positive + 1) / 2) / pairs if pairs else math.nan


# --- the model -------------------------------------------------------------------------------------------------------


class DeepFM(nn.Module):
    """Ids (batch, FIELDS), ids of genres and their offsets (batch,) in; logits (batch,) out."""

    def __init__(self, width: int) -> None:
        super().__init__()
        # (ps) An id's row is its weight and its vector. Any id may have one: they are not counted beforehand.
        self.rows = ps.Embedding(1 + width, scale=0.01)
        self.genres = ps.EmbeddingBag(width, mode="mean", scale=0.01)  # (ps)
        self.deep = nn.Sequential(nn.Linear((FIELDS + 1) * width, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, ids: Tensor, genres: Tensor, offsets: Tensor) -> Tensor:
        rows = self.rows(ids)
        vectors = torch.cat([rows[:, :, 1:], self.genres(genres, offsets)[:, None]], 1)
        pairs = vectors.sum(1).square() - vectors.square().sum(1)
        deep = self.deep(vectors.flatten(1)).squeeze(1)
        return deep + rows[:, :, 0].sum(1) + 0.5 * pairs.sum(1)  # type: ignore[no-any-return]


@torch.no_grad()
def scores_of(model: nn.Module, data: Ratings, device: torch.device) -> Tensor:
    """Returns the model's logits, (count,). Ids that training has not seen get no row by it."""
    model.eval()
    batches = [data.__getitems__(range(i, min(i + 4096, len(data)))) for i in range(0, len(data), 4096)]
    scores = [model(*(tensor.to(device) for tensor in inputs)).cpu() for *inputs, _ in batches]
    model.train()
    return torch.cat(scores)


# --- the training ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Result:
    """What came of a run; result.json holds it."""

    mode: str
    workers: int
    passes: int
    auc: float  # of the last pass, on ratings that were held back
    aucs: tuple[float, ...]  # of each pass
    rows: int  # of both tables
    seconds: float  # of the passes, their tests included


def train(arguments: argparse.Namespace) -> float:
    """Trains, writes on the main worker what came of it to --out, and returns the AUC."""
    data = read(find(arguments.data))
    training, test = divided(data, arguments.split)
    torch.manual_seed(arguments.seed)
    model = DeepFM(arguments.width)
    tables = [model.rows.weight, model.genres.weight]
    rows = torch.optim.Adagrad(tables, lr=arguments.lr, initial_accumulator_value=1e-7)
    dense = torch.optim.AdamW(model.deep.parameters(), lr=1e-3)
    loader = DataLoader(training, arguments.batch_size, shuffle=True, collate_fn=as_it_is, drop_last=True)

    session = ps.connect()  # (ps)
    model, rows, dense, loader = session.prepare(model, rows, dense, loader)  # (ps)
    session.progress(total=arguments.passes * len(loader))  # (ps) for those who watch: how much is left
    own = session.unwrap(model)

    losses: list[float] = []
    aucs: list[float] = []
    started = time.perf_counter()
    for each in range(1, arguments.passes + 1):
        for ids, genres, offsets, likes in with_progress(loader, f"pass {each}", shown=session.is_main):
            loss = F.binary_cross_entropy_with_logits(model(ids, genres, offsets), likes)
            loss.backward()
            for optimizer in (rows, dense):
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
            session.log(loss=losses[-1])  # (ps) for those who watch
        session.barrier()  # (ps) what the other workers pushed last counts in this pass's test, too
        score = auc(scores_of(own, test, session.device), test.likes) if session.is_main else math.nan
        aucs.append(session.broadcast(score))  # (ps)
        if session.is_main:
            recent = losses[-50:] or [math.nan]  # in an elastic job a worker may get no batch of a pass
            print(f"pass {each}: loss {sum(recent) / len(recent):.4f}, AUC {score:.4f}", flush=True)
    seconds = time.perf_counter() - started

    if session.is_main:
        count = len(own.rows) + len(own.genres)
        result = Result(session.mode, session.world_size, len(aucs), aucs[-1], tuple(aucs), count, seconds)
        weights = session.global_weights(model)  # (ps) those of the job, in every mode
        leave_behind(arguments.out, own, weights, losses, result, data)
    return aucs[-1]


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
    out: Path, model: DeepFM, weights: dict[str, Any], losses: Sequence[float], result: Result, data: MovieLens
) -> None:
    """Writes model.safetensors, with all rows, result.json and, if matplotlib is there, movielens.png."""
    from safetensors.torch import save_file

    out.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.cpu() for name, tensor in weights.items()}, out / "model.safetensors")
    (out / "result.json").write_text(json.dumps(asdict(result), indent=2) + "\n")
    try:
        draw(losses, result, most_liked(model, data), out / "movielens.png")
    except ImportError:
        print("no picture, because matplotlib is not installed: pip install '.[examples]'")
    print(f"left in {out}: {', '.join(sorted(file.name for file in out.iterdir()))}", flush=True)


def most_liked(model: DeepFM, data: MovieLens) -> Mapping[str, float]:
    """Returns the weights of the films that were rated most often, by title, the highest first."""
    counts: dict[str, int] = {}
    for _, name, _ in data.ratings:
        counts[name] = counts.get(name, 0) + 1
    names = sorted(counts, key=lambda name: -counts[name])[:40]
    weights = model.rows.rows(torch.tensor([id_of("film", name) for name in names]))[:, 0].tolist()
    found = {data.films[name].title: weight for name, weight in zip(names, weights, strict=True)}
    return dict(sorted(found.items(), key=lambda each: -each[1]))


def draw(losses: Sequence[float], result: Result, films: Mapping[str, float], path: Path) -> None:
    """Draws the loss of every step, the AUC after every pass, and the weights of the films that many have rated."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 6), layout="constrained")
    curve, bars = figure.subplots(1, 2, width_ratios=(3, 2))
    curve.plot([step / len(losses) * result.passes for step in range(len(losses))], losses, color="tab:blue", alpha=0.5)
    curve.set(xlabel="pass", title=f"{result.mode}, {result.workers} worker(s), {result.rows:,} rows: {result.auc:.3f}")
    curve.set_ylabel("loss of a step", color="tab:blue")
    right = curve.twinx()
    right.plot(range(1, result.passes + 1), result.aucs, color="tab:orange", marker="o")
    right.set_ylabel("AUC on ratings held back", color="tab:orange")
    right.set_ylim(min(0.7, *result.aucs), max(0.8, *result.aucs))
    bars.barh(list(films), list(films.values()), color=["tab:green" if it > 0 else "tab:red" for it in films.values()])
    bars.invert_yaxis()
    bars.tick_params(axis="y", labelsize=7)
    bars.set_title("the films rated most often, by their weight", fontsize=9)
    figure.savefig(path, dpi=120)


def parse_arguments() -> argparse.Namespace:
    """Three passes with the defaults take some ten seconds on a laptop."""
    parser = argparse.ArgumentParser(description="Predict who likes which film, with tables of rows: MovieLens-100k.")
    parser.add_argument("--data", type=Path, metavar="DIR", help="the folder of the three files")
    parser.add_argument("--passes", type=int, default=3, help="passes over the data (%(default)s)")
    parser.add_argument("--batch-size", type=int, default=512, help="ratings in one worker's batch (%(default)s)")
    parser.add_argument("--width", type=int, default=16, help="elements of an id's vector (%(default)s)")
    parser.add_argument("--lr", type=float, default=0.05, help="learning rate of the rows (%(default)s)")
    parser.add_argument("--goal", type=float, default=0.0, help="end with code 1 below this AUC (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of first weights and of the order (%(default)s)")
    parser.add_argument("--split", type=int, default=0, help="which ratings are held back (%(default)s)")
    text = "where to leave results (%(default)s)"
    parser.add_argument("--out", type=Path, default=Path("runs/movielens"), help=text)
    arguments = parser.parse_args()
    if min(arguments.passes, arguments.batch_size, arguments.width) < 1:
        parser.error("--passes, --batch-size and --width must be at least 1")
    return arguments


def main() -> None:
    """Runs the example; see the top of this file."""
    arguments = parse_arguments()
    try:
        reached = train(arguments)
    except NoData as error:
        sys.exit(f"movielens: {error}")
    if not reached >= arguments.goal:
        sys.exit(f"movielens: the AUC should be at least {arguments.goal}, and is {reached:.4f}")


if __name__ == "__main__":
    main()
