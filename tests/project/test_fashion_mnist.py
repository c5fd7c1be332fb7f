"""The example on real data: its files are read and found, it learns in every mode, and it says what is missing."""

from __future__ import annotations

import gzip
import json
import re
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.tools import launching
from tests.tools.cluster import Cluster
from tests.tools.terminal import terminal

SCRIPT = Path(__file__).parents[2] / "examples" / "fashion_mnist.py"
SLOW_SECONDS = 1200.0  # three passes over 60,000 images, on a machine that has other work

fashion = launching.load(SCRIPT)


def write_idx(path: Path, array: Tensor) -> None:
    """Writes bytes as an idx file; gzipped if its name ends in .gz."""
    content = struct.pack(f">HBB{array.dim()}I", 0, 8, array.dim(), *array.shape) + array.numpy().tobytes()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)


def made_images(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Noise with a bright patch, whose place is the label: (count, 28, 28) and (count,)."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(10, (count,), generator=generator)
    images = torch.randint(100, (count, 28, 28), generator=generator)
    for image, label in zip(images, labels.tolist(), strict=True):
        row, column = 14 * (label // 5), 5 * (label % 5)
        image[row + 4 : row + 9, column + 1 : column + 6] += 120
    return images.to(torch.uint8), labels.to(torch.uint8)


def write_files(folder: Path, end: str = "") -> Path:
    """Writes the four files, small ones; returns their folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, count, seed in (("train", 1280, 0), ("t10k", 200, 1)):
        images, labels = made_images(count, seed)
        write_idx(folder / f"{name}-images-idx3-ubyte{end}", images)
        write_idx(folder / f"{name}-labels-idx1-ubyte{end}", labels)
    return folder


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of the four files, with a structure that a network finds in one pass."""
    return write_files(tmp_path_factory.mktemp("made"), ".gz")


Run = Callable[..., tuple[str, str]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Run]:
    """The script in this process: what it writes to stdout and to stderr."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # two would wait for each other where other tests run

    def run(*arguments: str) -> tuple[str, str]:
        monkeypatch.setattr(sys, "argv", [str(SCRIPT), f"--out={tmp_path / 'out'}", *arguments])
        fashion.main()
        written = capsys.readouterr()
        return written.out, written.err

    yield run
    torch.set_num_threads(threads)


# -- the files -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["", ".gz"])
@pytest.mark.parametrize("shape", [(7,), (2, 3), (3, 28, 28), (0,)])
def test_an_idx_file_is_read_as_it_was_written(shape: tuple[int, ...], end: str, tmp_path: Path) -> None:
    array = torch.randint(256, shape).to(torch.uint8)
    write_idx(tmp_path / f"array{end}", array)
    assert torch.equal(fashion.read_idx(tmp_path / f"array{end}"), array)


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("x", b"", "is no idx file of bytes: it begins with nothing"),
        ("x", b"\x89PNG", "it begins with 89 50 4e 47"),
        ("x", b"\0\0\x0d\x01\0\0\0\x01abcd", "it begins with 00 00 0d 01"),  # floats
        ("x", b"\0\0\x08\x02\0\0\0\x01", "x is damaged"),
        ("x", b"\0\0\x08", "x is damaged"),
        ("x", b"\0\0\x08\x01\0\0\0\x03ab", "should hold 3 bytes of data, and holds 2"),
        ("x", b"\0\0\x08\x01\0\0\0\x03abcd", "should hold 3 bytes of data, and holds 4"),
        ("x.gz", b"\0\0\x08\x01\0\0\0\x01a", "x.gz is damaged"),
        # Without a time: each process of a parallel run collects these by itself, and must find the same names.
        ("x.gz", gzip.compress(b"\0\0\x08\x01\0\0\0\x01a", mtime=0)[:-9], "x.gz is damaged"),
        ("x.gz", gzip.compress(bytes(99), mtime=0)[:12] + b"!!!!!!!!!!", "x.gz is damaged"),
    ],
)
def test_what_is_no_idx_file_is_refused(name: str, content: bytes, says: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(fashion.NoData, match=re.escape(says)):
        fashion.read_idx(tmp_path / name)


@pytest.mark.parametrize(
    ("images", "labels", "says"),
    [
        ((4, 28, 28), torch.arange(3), r"hold \(4, 28, 28\) and \(3,\)"),
        ((4, 27, 28), torch.arange(4), r"hold \(4, 27, 28\) and \(4,\)"),
        ((4, 28, 28), torch.arange(8, 12), "labels from 0 to 9"),
        ((0, 28, 28), torch.arange(0), "labels from 0 to 9"),
    ],
)
def test_images_and_labels_that_do_not_fit_are_refused(
    images: tuple[int, ...], labels: Tensor, says: str, tmp_path: Path
) -> None:
    write_idx(tmp_path / "images", torch.zeros(images, dtype=torch.uint8))
    write_idx(tmp_path / "labels", labels.to(torch.uint8))
    with pytest.raises(fashion.NoData, match=says):
        fashion.read(tmp_path / "images", tmp_path / "labels")


# -- where they are --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["", ".gz"])
def test_the_files_are_found_in_a_folder_and_below_it(end: str, tmp_path: Path) -> None:
    inside = write_files(tmp_path / "usr/share/datasets/fashion-mnist", end)  # as `dpkg -x` leaves them
    assert fashion.find(tmp_path) == fashion.find(inside) == tuple(inside / f"{name}{end}" for name in fashion.FILES)


def test_without_a_folder_the_usual_places_are_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fashion, "PLACES", (tmp_path / "nothing", write_files(tmp_path / "here")))
    assert fashion.find(None)[0] == tmp_path / "here" / "train-images-idx3-ubyte"


def test_what_is_missing_is_named_with_where_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (write_files(tmp_path) / "t10k-labels-idx1-ubyte").unlink()
    with pytest.raises(fashion.NoData, match=r"lacks t10k-labels-idx1-ubyte \(plain or .gz\)\nGet it") as refused:
        fashion.find(tmp_path)
    assert "apt-get install dataset-fashion-mnist" in str(refused.value)
    monkeypatch.setattr(fashion, "PLACES", (Path("/nowhere"), Path("/not/here")))
    with pytest.raises(fashion.NoData, match="is not in /nowhere nor in /not/here\nGet it"):
        fashion.find(None)


def test_a_run_without_data_ends_with_the_reason_alone(tmp_path: Path, run: Run) -> None:
    with pytest.raises(SystemExit, match=f"^fashion_mnist: {re.escape(str(tmp_path))} lacks train-images-idx3-ubyte, "):
        run(f"--data={tmp_path}")
    assert not (tmp_path / "out").exists()


# -- what it learns --------------------------------------------------------------------------------------------------


def result_of(said: str, out: Path) -> dict[str, Any]:
    """What a run left behind, after a look at what it said."""
    result: dict[str, Any] = json.loads((out / "result.json").read_text())
    assert f"accuracy {result['accuracy']:.4f}\n" in said
    assert said.count("pass 1: ") == 1, "one worker speaks for all"
    assert result["accuracies"][-1] == result["accuracy"]
    assert (out / "fashion_mnist.png").read_bytes().startswith(b"\x89PNG")
    fashion.Network().load_state_dict(load_file(out / "model.safetensors"))
    return result


def test_a_run_on_made_images_learns_and_leaves_results(made: Path, tmp_path: Path, run: Run) -> None:
    said, errors = run(f"--data={made}", "--passes=2", "--goal=0.9")
    result = result_of(said, tmp_path / "out")
    assert (result["mode"], result["workers"], result["passes"]) == ("single", 1, 2)
    assert result["accuracy"] >= 0.9
    assert errors == "", "a progress bar is for terminals"


@pytest.mark.long
def test_workers_that_share_the_images_learn_as_much(shared: Cluster, job: str, made: Path, tmp_path: Path) -> None:
    cluster = ["--workers=2", "--mode=sync", f"--server={shared.address}", f"--job={job}"]
    script = [str(SCRIPT), f"--data={made}", f"--out={tmp_path}", "--passes=2", "--goal=0.9"]
    done = launching.run(*cluster, *script, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stdout + done.stderr
    result = result_of(done.stdout, tmp_path)
    assert (result["mode"], result["workers"], result["passes"]) == ("sync", 2, 2)


def test_a_run_that_learns_too_little_fails(made: Path, run: Run) -> None:
    with pytest.raises(SystemExit, match=r"^fashion_mnist: the accuracy should be at least 0.9, and is 0\.\d{4}$"):
        run(f"--data={made}", "--passes=1", "--batch-size=640", "--lr=0", "--goal=0.9")


def test_without_matplotlib_one_line_says_that_there_is_no_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)  # an import of it raises ImportError
    images, labels = made_images(20, 0)
    result = fashion.Result("single", 1, 1, 0.5, (0.5,), 1.0)
    test = fashion.Clothes(images, labels.long())
    model = fashion.Network()
    fashion.leave_behind(tmp_path, model, model.state_dict(), [1.0], result, test, torch.device("cpu"))
    said = capsys.readouterr().out.splitlines()
    assert said == [
        "no picture, because matplotlib is not installed: pip install '.[examples]'",
        f"left in {tmp_path}: model.safetensors, result.json",
    ]


@pytest.mark.parametrize("shown", [True, False], ids=["main", "another"])
def test_there_is_a_progress_bar_on_a_terminal_for_the_main_worker(
    shown: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with terminal(monkeypatch) as written:
        assert list(fashion.with_progress([1, 2, 3], "pass 1", shown)) == [1, 2, 3]
    assert ("pass 1" in written()) is shown


# -- on the real images ----------------------------------------------------------------------------------------------


def real_files() -> bool:
    """Whether the real images are here."""
    try:
        fashion.find(None)
    except fashion.NoData:
        return False
    return True


@pytest.mark.slow
@pytest.mark.timeout(SLOW_SECONDS)
@pytest.mark.skipif(not real_files(), reason="Fashion-MNIST is not here: see examples/fashion_mnist.py")
@pytest.mark.parametrize("mode", ["single", "ddp", "sync", "ssp:4"])
def test_three_passes_bring_the_accuracy_to_88_percent(mode: str, shared: Cluster, job: str, tmp_path: Path) -> None:
    servers = [f"--server={shared.address}", f"--job={job}"] if mode in ("sync", "ssp:4") else []
    workers = "--workers=1" if mode == "single" else "--workers=2"
    command = ["-m", "ps_worker", "run", workers, f"--mode={mode}", *servers, str(SCRIPT)]
    done = subprocess.run(
        [sys.executable, *command, f"--out={tmp_path}", "--goal=0.88"],
        env=launching.environment(OMP_NUM_THREADS="1"),
        capture_output=True,
        text=True,
        timeout=SLOW_SECONDS,
        check=False,
    )
    print(f"{mode}: {done.stdout}")  # shown with -rP
    assert done.returncode == 0, done.stdout + done.stderr
    assert result_of(done.stdout, tmp_path)["accuracy"] >= 0.88
