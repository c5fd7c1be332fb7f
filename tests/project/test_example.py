"""The example that the README, the demo and compose run: its data, its model, and what it leaves behind."""

from __future__ import annotations

import json
import math
import os
import pty
import re
import signal
import statistics
import subprocess
import sys
from functools import partial
from pathlib import Path

import psutil
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from tests.tools import launching
from tests.tools.cases import cases
from tests.tools.cluster import Cluster, until

EXAMPLES = Path(__file__).parents[2] / "examples"
TINY = ["--steps=6", "--batch-size=2", "--layers=1", "--heads=2", "--width=16", "--block=8"]
DEMO_SECONDS = 120.0  # for its start, and for its end: six processes import torch


char_gpt = launching.load(EXAMPLES / "char_gpt.py")
demo = launching.load(EXAMPLES / "demo.py")


def test_text_is_python_and_the_same_every_time() -> None:
    text = char_gpt.library_text()
    assert text == char_gpt.library_text()
    assert len(text) > 1_000_000
    assert b"def __init__(self" in text


def test_an_index_always_names_the_same_block() -> None:
    text = bytes(range(256)) * 4
    first, again, other = (char_gpt.Windows(text, 16, seed) for seed in (1, 1, 2))
    assert len(first) == len(text) // 16
    assert all(torch.equal(first[index][0], again[index][0]) for index in range(len(first)))
    assert any(not torch.equal(first[index][0], other[index][0]) for index in range(len(first)))


def test_the_target_of_each_byte_is_the_byte_after_it() -> None:
    text = bytes(range(256))
    windows = char_gpt.Windows(text, 250)
    for x, y in (windows[index] for index in range(len(windows))):
        assert x.shape == y.shape == (250,)
        assert x.dtype == y.dtype == torch.long
        assert torch.equal(y, x + 1)


def test_a_text_shorter_than_a_block_is_refused() -> None:
    with pytest.raises(ValueError, match="a block of 8 bytes needs a longer text, got 8 bytes"):
        char_gpt.Windows(b"8 bytes.", 8)


def test_default_model_has_a_few_million_parameters_and_starts_by_guessing() -> None:
    shape = char_gpt.Shape()
    model = char_gpt.CharGPT(shape)
    assert 2_000_000 < sum(parameter.numel() for parameter in model.parameters()) < 5_000_000
    windows = char_gpt.Windows(char_gpt.library_text(), shape.block)
    x, y = (torch.stack(tensors) for tensors in zip(*(windows[index] for index in range(8)), strict=True))
    assert F.cross_entropy(model(x).flatten(0, 1), y.flatten()).item() == pytest.approx(math.log(256), abs=0.1)


def test_model_does_not_look_ahead() -> None:
    model = char_gpt.CharGPT(char_gpt.Shape(layers=2, heads=2, width=16, block=8))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    tokens = torch.randint(256, (1, 8))
    changed = tokens.clone()
    changed[0, 5] = (changed[0, 5] + 1) % 256
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :5], after[:, :5])
    assert not torch.equal(before[:, 5:], after[:, 5:])


def test_single_run_leaves_a_result_and_weights_that_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    launching.run_here(monkeypatch, EXAMPLES / "char_gpt.py", *TINY, "--tied", f"--out={tmp_path}")
    printed, errors = capsys.readouterr()
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["mode"], result["shards"], result["workers"], result["steps"]) == ("single", None, 1, 6)
    assert result["first_loss"] == pytest.approx(math.log(256), abs=0.6)
    assert 0 < result["last_loss"] < 6
    assert result["samples_per_second"] > 0
    model = char_gpt.CharGPT(char_gpt.Shape(layers=1, heads=2, width=16, block=8), tied=True)
    assert result["parameters"] == sum(parameter.numel() for parameter in model.parameters())
    model.load_state_dict(load_file(tmp_path / "model.safetensors"))
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert "What the model writes" in printed
    assert "step/s" not in errors  # a progress bar is for terminals


def test_without_tqdm_and_matplotlib_progress_is_in_plain_lines_and_there_is_no_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for missing in ("tqdm", "matplotlib", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, missing, None)
    ours, theirs = pty.openpty()
    with os.fdopen(ours, "rb", buffering=0), os.fdopen(theirs, "w") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)  # where there would be a bar
        launching.run_here(monkeypatch, EXAMPLES / "char_gpt.py", *TINY, f"--out={tmp_path}")
    printed, _ = capsys.readouterr()
    first, *others = re.findall(r"^step (.*)$", printed, re.MULTILINE)
    assert re.fullmatch(r"1/6: loss \d\.\d{3}", first)
    assert len(others) == 5
    assert all(re.fullmatch(r"\d/6: loss \d\.\d{3}, \d+\.\d steps/s, \d+ s left", line) for line in others)
    assert "no picture, because matplotlib is not installed: pip install '.[examples]'\n" in printed
    assert {file.name for file in tmp_path.iterdir()} == {"model.safetensors", "result.json"}


@pytest.mark.long
def test_demo_trains_on_a_cluster_and_says_what_came_of_it(tmp_path: Path) -> None:
    done = launching.python(str(EXAMPLES / "demo.py"), "--goal=0.1", f"--out={tmp_path}", *TINY)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "demo: the loss should have fallen below 0.1, but is " in done.stderr  # after six steps it has not
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["mode"], result["shards"], result["workers"], result["steps"]) == ("sync", 2, 2, 6)
    assert {"loss.png", "model.safetensors", "result.json"} <= {file.name for file in tmp_path.iterdir()}
    first = f"{result['first_loss']:.3f}"
    assert f"{first} in the first step, {result['last_loss']:.3f} at the end" in done.stdout
    assert f"[0] step 1/6: loss {first}\n" in done.stdout
    began, ended = done.stdout.split("What the model writes")
    assert re.search(r"watch the job in a browser, while it trains: http://127\.0\.0\.1:\d+/\n", began)
    assert "http:" not in ended, "no address of a server that has ended"
    assert "docs/training.md" in ended


@pytest.mark.parametrize("loss", [0.1, 0.5, math.nan])
def test_demo_fails_unless_the_loss_is_below_the_goal(loss: float) -> None:
    demo.check(0.09, 0.1)
    with pytest.raises(SystemExit, match=r"demo: the loss should have fallen below 0\.1, but is "):
        demo.check(loss, 0.1)


@pytest.mark.long
def test_ctrl_c_ends_the_demo_and_all_that_it_started(tmp_path: Path) -> None:
    flags = ["--shards=1", "--workers=1", f"--out={tmp_path}", *TINY, "--steps=1000000"]
    command = [sys.executable, str(EXAMPLES / "demo.py"), *flags]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    # A shell that starts the tests in the background has them, and all they start, ignore SIGINT.
    at_terminal = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    with subprocess.Popen(command, text=True, preexec_fn=at_terminal, **pipes) as process:
        try:
            until(lambda: "joins" in read(tmp_path / "server.log"), "a worker's joining", DEMO_SECONDS)
            started = psutil.Process(process.pid).children(recursive=True)
            assert len(started) >= 4  # two commands, a shard, a worker
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=DEMO_SECONDS)
        finally:
            if process.poll() is None:  # a failed test must not wait for a demo that trains for ever
                for each in (*psutil.Process(process.pid).children(recursive=True), process):
                    each.kill()
    assert process.returncode == 130
    assert "Traceback" not in errors
    _, left = psutil.wait_procs(started, timeout=DEMO_SECONDS)
    assert not left


def test_islands_are_far_apart_if_nothing_else_is_said() -> None:
    defaults = launching.load(EXAMPLES / "islands.py").parse_arguments([])
    assert (defaults.mode, defaults.wire, defaults.steps) == ("local:8", "int4", 200)


@pytest.mark.long
@pytest.mark.parametrize("mode", cases(["sync"], ["local:2"]))
def test_islands_train_as_hsdp_does(tmp_path: Path, mode: str) -> None:
    """Two groups of two FSDP2 processes on servers, and torch's own collectives between two pairs. In local:2 and int4
    they begin with the same loss, and learn."""
    flags = [f"--mode={mode}", *(["--wire=float32"] if mode == "sync" else ["--steps=80"])]
    done = launching.python(str(EXAMPLES / "islands.py"), *TINY, *flags, f"--out={tmp_path}")
    assert done.returncode == 0, done.stdout + done.stderr
    hsdp, islands = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("hsdp", "islands"))
    assert (hsdp["name"], islands["name"]) == ("HSDP", mode)
    if mode != "sync":
        assert islands["losses"][0] == pytest.approx(hsdp["losses"][0], abs=1e-5)
        assert islands["losses"] != pytest.approx(hsdp["losses"], abs=1e-5)
        assert statistics.fmean(islands["losses"][-10:]) < statistics.fmean(islands["losses"][:10]) - 0.1
    else:
        assert islands["losses"] == pytest.approx(hsdp["losses"], abs=1e-5)
    assert hsdp["losses"][-1] < hsdp["losses"][0]
    for name, result in (("HSDP", hsdp), (f"islands, {mode}", islands)):
        first, last = result["losses"][0], result["losses"][-1]
        row = rf"^{name} +{first:.4f} +{last:.4f} +{1000 * result['step_seconds']:.0f} ms$"
        assert re.search(row, done.stdout, re.MULTILINE), done.stdout
    assert (tmp_path / "loss.png").exists()


GAN = EXAMPLES / "wgan_gp.py"
SHORT = ("--epochs=2", "--samples=512")


def check_gan(printed: str, weights: Path) -> None:
    assert printed.count("from the nearest of the eight places") == 1  # one worker speaks for all
    state = load_file(weights)
    assert all(torch.isfinite(value).all() for value in state.values())
    assert "module.0.weight" not in state


@pytest.mark.long
def test_two_workers_train_a_gan(tmp_path: Path) -> None:
    weights = tmp_path / "generator.safetensors"
    done = launching.run("--workers=2", "--mode=ddp", str(GAN), *SHORT, f"--save={weights}")
    assert done.returncode == 0, done.stdout + done.stderr
    check_gan(done.stdout, weights)


@pytest.mark.parametrize("mode", ["single", "sync", "async"])
def test_one_worker_trains_a_gan(
    shared: Cluster,
    job: str,
    mode: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    weights = tmp_path / "generator.safetensors"
    where = {"PS_MODE": mode, "PS_SERVER": shared.address, "PS_JOB": job}
    launching.run_here(monkeypatch, GAN, *SHORT, f"--save={weights}", **where)
    check_gan(capsys.readouterr().out, weights)


def read(file: Path) -> str:
    return file.read_text() if file.exists() else ""
