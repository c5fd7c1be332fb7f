"""The example with two tables on real ratings: its files are read and found, it learns in every mode, and it says what
is missing."""

from __future__ import annotations

import json
import math
import random
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.tools import launching
from tests.tools.cases import cases
from tests.tools.cluster import Cluster
from tests.tools.terminal import terminal

SCRIPT = Path(__file__).parents[2] / "examples" / "movielens.py"
SLOW_SECONDS = 600.0  # three passes over 80,000 ratings, on a machine that has other work
MADE_RATINGS = 4000
MADE = ["--batch-size=64", "--passes=2", "--goal=0.75"]

movielens = launching.load(SCRIPT)


def made_ratings() -> Any:
    """Ratings of 40 users, of whom half like comedies and the others like dramas; all like the films of 1994."""
    chance = random.Random(0)
    jobs = ("artist", "none")
    users = {str(n): (10 + n, "MF"[n % 2], jobs[n // 20], f"9{n:02}10" if n % 5 else "V3N4P") for n in range(40)}
    films = {
        str(n): movielens.Film(
            f"Café {n}, The", str(1990 + n % 8) if n else "", (("Comedy", "War") if n % 2 else ("Drama",)) * (n > 1)
        )
        for n in range(30)
    }
    ratings = []
    for _ in range(MADE_RATINGS):
        user, film = chance.randrange(40), chance.randrange(30)
        likely = 0.85 if (user < 20) == (film % 2 == 1) or films[str(film)].year == "1994" else 0.15
        ratings.append((str(user), str(film), float(chance.randint(4, 5) if chance.random() < likely else 2)))
    return movielens.MovieLens(ratings, users, films)


def write_grouplens(folder: Path, data: Any) -> Path:
    """Writes the files of GroupLens's folder; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    ratings = [f"{user}\t{film}\t{stars:.0f}\t88125094{int(stars)}" for user, film, stars in data.ratings]
    users = [f"{name}|{'|'.join(map(str, values))}" for name, values in data.users.items()]
    films = []
    for name, film in data.films.items():
        flags = "|".join("01"[genre in film.genres] for genre in movielens.GENRES)
        title = f"{film.title} ({film.year})" if film.year else film.title
        films.append(f"{name}|{title}|01-Jan-{film.year}||http://us.imdb.com/M/title-exact?{name}|{flags}")
    for name, lines in zip(movielens.GROUPLENS, (ratings, users, films), strict=True):
        (folder / name).write_text("\n".join(lines) + "\n", "latin-1")
    return folder


def write_recbole(folder: Path, data: Any) -> Path:
    """Writes the files as the package has them; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    ratings = ["user_id:token\titem_id:token\trating:float\ttimestamp:float"]
    ratings += [f"{user}\t{film}\t{stars:.0f}\t881250949" for user, film, stars in data.ratings]
    users = ["user_id:token\tage:token\tgender:token\toccupation:token\tzip_code:token"]
    users += ["\t".join(map(str, (name, *values))) for name, values in data.users.items()]
    films = ["item_id:token\tmovie_title:token_seq\trelease_year:token\tclass:token_seq"]
    films += [
        f"{it}\t{film.title}\t{film.year or 'unkonwn'}\t{' '.join(film.genres)}" for it, film in data.films.items()
    ]
    for name, lines in zip(movielens.RECBOLE, (ratings, users, films), strict=True):
        (folder / name).write_text("\n".join(lines) + "\n", "utf-8")
    return folder


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in GroupLens's form."""
    return write_grouplens(tmp_path_factory.mktemp("made"), made_ratings())


Run = Callable[..., tuple[str, str]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Run]:
    """The script in this process: what it writes to stdout and to stderr."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # two would wait for each other where other tests run

    def run(*arguments: str) -> tuple[str, str]:
        monkeypatch.setattr(sys, "argv", [str(SCRIPT), f"--out={tmp_path / 'out'}", *arguments])
        movielens.main()
        written = capsys.readouterr()
        return written.out, written.err

    yield run
    torch.set_num_threads(threads)


# -- the files -------------------------------------------------------------------------------------------------------


def test_both_kinds_of_files_say_the_same(tmp_path: Path) -> None:
    data = made_ratings()
    one = write_grouplens(tmp_path / "grouplens" / "ml-100k", data)
    other = write_recbole(tmp_path / "package" / "dataset_example" / "ml-100k", data)
    assert movielens.find(tmp_path / "grouplens") == tuple(one / name for name in movielens.GROUPLENS)
    assert movielens.find(tmp_path / "package") == tuple(other / name for name in movielens.RECBOLE)
    assert movielens.read(movielens.find(one)) == movielens.read(movielens.find(other)) == data


def test_a_batch_has_the_ids_of_its_ratings_and_the_genres_of_its_films() -> None:
    data = made_ratings()
    ratings = movielens.Ratings(data, range(len(data.ratings)))
    without = next(index for index, (_, film, _) in enumerate(data.ratings) if not data.films[film].genres)
    chosen = [5, 3, without, 11, 3]
    ids, genres, offsets, likes = ratings.__getitems__(chosen)
    bags = [genres[first:last].tolist() for first, last in zip(offsets, [*offsets[1:], len(genres)], strict=True)]
    for number, index in enumerate(chosen):
        user, film, stars = data.ratings[index]
        assert ids[number, 0] == movielens.id_of("user", user)
        assert ids[number, -2:].tolist() == [
            movielens.id_of("film", film),
            movielens.id_of("year", data.films[film].year),
        ]
        assert bags[number] == [movielens.id_of("genre", genre) for genre in data.films[film].genres]
        assert likes[number] == (stars >= 4)
    assert torch.equal(ratings[3][0][0], ids[1])
    assert bags[2] == []
    assert ids.min() < 0 < ids.max(), "hashes of 64 bits"


def test_ages_and_places_are_taken_together() -> None:
    one, other = (
        movielens.user_ids("7", 21, "F", "artist", "94110"),
        movielens.user_ids("8", 24, "F", "artist", "94199"),
    )
    assert one[0] != other[0]
    assert one[1:] == other[1:]
    assert movielens.user_ids("8", 25, "F", "artist", "94199")[1] != other[1]


def test_four_ratings_of_five_train_and_the_others_test() -> None:
    data = made_ratings()
    training, test = movielens.divided(data, 0)
    assert (len(training), len(test)) == (MADE_RATINGS * 4 // 5, MADE_RATINGS // 5)
    assert torch.equal(movielens.divided(data, 0)[1].ids, test.ids)
    assert not torch.equal(movielens.divided(data, 1)[1].ids, test.ids)


def test_the_auc_is_how_often_what_was_liked_scores_higher() -> None:
    scores, likes = torch.tensor([0.1, 0.4, 0.35, 0.8]), torch.tensor([0.0, 0.0, 1.0, 1.0])
    assert movielens.auc(scores, likes) == pytest.approx(0.75)
    assert math.isnan(movielens.auc(scores, torch.ones(4)))


@pytest.mark.parametrize(
    ("name", "old", "new", "says"),
    [
        ("u.data", "\n", "\tx\n", "line 1 of {path} should have 4 columns, and has 5"),
        ("u.user", "|M|", "|M", "line 1 of {path} should have 5 columns, and has 4"),
        ("u.item", "|0\n", "\n", "line 1 of {path} should have 24 columns, and has 23"),
        ("u.data", "\t4\t", "\tx\t", "could not convert string to float: 'x'"),
        ("u.data", "\t4\t", "\t6\t", "a number from 0 to 5 was expected, not '6'"),
        ("u.user", "0|10|", "0|nan|", "a number from 0 to 120 was expected, not 'nan'"),
        ("u.user", "0|10|", "40|10|", "has a rating by user 0 of film"),
        ("u.item", "0|Caf", "99|Caf", "of film 0: "),
    ],
)
def test_damaged_files_are_refused(name: str, old: str, new: str, says: str, tmp_path: Path) -> None:
    path = write_grouplens(tmp_path, made_ratings()) / name
    text = path.read_text("latin-1")
    assert old in text
    path.write_text(text.replace(old, new, 1), "latin-1")
    with pytest.raises(movielens.NoData, match=re.escape(says.format(path=path))):
        movielens.read(movielens.find(tmp_path))


def test_too_few_ratings_are_refused(tmp_path: Path) -> None:
    data = made_ratings()
    write_grouplens(tmp_path, movielens.MovieLens(data.ratings[:4], data.users, data.films))
    with pytest.raises(movielens.NoData, match="should have 5 ratings at least, and has 4"):
        movielens.read(movielens.find(tmp_path))


# -- where they are --------------------------------------------------------------------------------------------------


def test_without_a_folder_an_installed_package_and_a_usual_place_are_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(movielens, "PLACE", write_grouplens(tmp_path / "here", made_ratings()))
    monkeypatch.setattr(movielens, "installed", list)
    assert movielens.find(None)[0] == tmp_path / "here" / "u.data"
    monkeypatch.undo()
    package = tmp_path / "site" / "recbole"
    write_recbole(package / "dataset_example" / "ml-100k", made_ratings())
    (package / "__init__.py").write_text("raise ImportError('it wants what is not here')\n")
    (tmp_path / "site" / "recbole-1.2.1.dist-info").mkdir()
    (tmp_path / "site" / "recbole-1.2.1.dist-info" / "METADATA").write_text("Name: recbole\nVersion: 1.2.1\n")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    assert movielens.find(None)[0] == package / "dataset_example" / "ml-100k" / "ml-100k.inter"


def test_what_is_missing_is_named_with_where_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (write_grouplens(tmp_path, made_ratings()) / "u.item").unlink()
    with pytest.raises(movielens.NoData, match=r"has neither ml-100k.inter, .* nor u.data, .*\nGet it") as refused:
        movielens.find(tmp_path)
    assert "grouplens.org" in str(refused.value)
    monkeypatch.setattr(movielens, "PLACE", Path("/not/here"))
    monkeypatch.setattr(movielens, "installed", list)
    with pytest.raises(movielens.NoData, match="is neither in an installed package recbole nor in /not/here\nGet it"):
        movielens.find(None)


def test_a_run_without_data_ends_with_the_reason_alone(tmp_path: Path, run: Run) -> None:
    with pytest.raises(SystemExit, match=f"^movielens: {re.escape(str(tmp_path))} has neither ml-100k.inter, "):
        run(f"--data={tmp_path}")
    assert not (tmp_path / "out").exists()


# -- what it learns --------------------------------------------------------------------------------------------------


def result_of(said: str, folder: Path) -> dict[str, Any]:
    """What a run left: its lines, its files and its result agree."""
    result: dict[str, Any] = json.loads((folder / "result.json").read_text())
    aucs = [float(text) for text in re.findall(r"^(?:\[0\] )?pass \d+: loss \d+\.\d{4}, AUC (\d\.\d{4})$", said, re.M)]
    assert len(aucs) == result["passes"]
    assert aucs == [pytest.approx(each, abs=1e-4) for each in result["aucs"]]
    assert result["aucs"][-1] == result["auc"]
    assert (folder / "movielens.png").read_bytes().startswith(b"\x89PNG")
    model = movielens.DeepFM(16)
    model.load_state_dict(load_file(folder / "model.safetensors"))
    assert len(model.rows) + len(model.genres) == result["rows"]
    return result


def test_a_run_on_made_ratings_learns_and_leaves_results(made: Path, tmp_path: Path, run: Run) -> None:
    said, errors = run(f"--data={made}", *MADE)
    result = result_of(said, tmp_path / "out")
    assert (result["mode"], result["workers"], result["passes"]) == ("single", 1, 2)
    assert result["rows"] == 40 + 8 + 2 + 2 + 33 + 30 + 9 + 3, "users, ages, sexes, jobs, places, films, years, genres"
    assert result["auc"] >= 0.75
    assert errors == "", "a progress bar is for terminals"


@pytest.mark.long
@pytest.mark.parametrize("mode", cases(["sync"], ["ssp:4", "async"]))
def test_workers_that_share_the_ratings_learn_as_much(
    mode: str, shared: Cluster, job: str, made: Path, tmp_path: Path
) -> None:
    cluster = ["--workers=2", f"--mode={mode}", f"--server={shared.address}", f"--job={job}"]
    done = launching.run(*cluster, str(SCRIPT), f"--data={made}", f"--out={tmp_path}", *MADE, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stdout + done.stderr
    result = result_of(done.stdout, tmp_path)
    assert (result["mode"], result["workers"], result["passes"]) == (mode, 2, 2)


@pytest.mark.long
def test_workers_of_an_elastic_job_lease_its_batches(shared: Cluster, job: str, made: Path, tmp_path: Path) -> None:
    cluster = ["--workers=2", "--elastic", "--mode=ssp:4", f"--server={shared.address}", f"--job={job}"]
    done = launching.run(*cluster, str(SCRIPT), f"--data={made}", f"--out={tmp_path}", *MADE, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads((tmp_path / "result.json").read_text())["auc"] >= 0.75


def test_a_run_that_learns_too_little_fails(made: Path, run: Run) -> None:
    with pytest.raises(SystemExit, match=r"^movielens: the AUC should be at least 0.99, and is 0\.\d{4}$"):
        run(f"--data={made}", "--passes=1", "--goal=0.99")


def test_without_matplotlib_one_line_says_that_there_is_no_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)  # an import of it raises ImportError
    result = movielens.Result("single", 1, 1, 0.5, (0.5,), 0, 1.0)
    model = movielens.DeepFM(4)
    movielens.leave_behind(tmp_path, model, model.state_dict(), [1.0], result, made_ratings())
    assert capsys.readouterr().out.splitlines() == [
        "no picture, because matplotlib is not installed: pip install '.[examples]'",
        f"left in {tmp_path}: model.safetensors, result.json",
    ]


@pytest.mark.parametrize("shown", [True, False], ids=["main", "another"])
def test_there_is_a_progress_bar_on_a_terminal_for_the_main_worker(
    shown: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with terminal(monkeypatch) as written:
        assert list(movielens.with_progress([1, 2, 3], "pass 1", shown)) == [1, 2, 3]
    assert ("pass 1" in written()) is shown


# -- on the real ratings ---------------------------------------------------------------------------------------------


def real_files() -> bool:
    """Whether the real ratings are here."""
    try:
        movielens.find(None)
    except movielens.NoData:
        return False
    return True


@pytest.mark.slow
@pytest.mark.timeout(SLOW_SECONDS)
@pytest.mark.skipif(not real_files(), reason="MovieLens-100k is not here: see examples/movielens.py")
@pytest.mark.parametrize("mode", ["single", "ddp", "sync", "ssp:4", "async"])
def test_three_passes_bring_the_auc_to_785_thousandths(mode: str, shared: Cluster, job: str, tmp_path: Path) -> None:
    servers = [f"--server={shared.address}", f"--job={job}"] if mode in ("sync", "ssp:4", "async") else []
    workers = "--workers=1" if mode == "single" else "--workers=2"
    goal = 0.780 if mode in ("ssp:4", "async") else 0.785
    command = ["-m", "ps_worker", "run", workers, f"--mode={mode}", *servers, str(SCRIPT)]
    done = subprocess.run(
        [sys.executable, *command, f"--out={tmp_path}", f"--goal={goal}"],
        env=launching.environment(OMP_NUM_THREADS="1"),
        capture_output=True,
        text=True,
        timeout=SLOW_SECONDS,
        check=False,
    )
    print(f"{mode}: {done.stdout}")  # shown with -rP
    assert done.returncode == 0, done.stdout + done.stderr
    assert result_of(done.stdout, tmp_path)["auc"] >= goal
