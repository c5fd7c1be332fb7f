"""Every example shows its loss, and how much is left, to those who watch: the page is empty otherwise. It saves what
the job has trained, not what one worker holds."""

from __future__ import annotations

import ast
import math
from pathlib import Path
from typing import Any

import pytest
import torch

import ps_worker
from tests.tools import launching

EXAMPLES = Path(__file__).parents[2] / "examples"
TINY = {
    "train.py": (),
    "char_gpt.py": ("--steps=3", "--batch-size=2", "--layers=1", "--heads=2", "--width=16", "--block=8", "--out=out"),
    "clicks.py": ("--samples=4096", "--batch-size=1024", "--out=out"),
    "wgan_gp.py": ("--epochs=1", "--samples=512"),
}


def calls(script: Path) -> dict[str, list[ast.Call]]:
    """The calls of a script, by the text of what is called."""
    found: dict[str, list[ast.Call]] = {}
    for node in ast.walk(ast.parse(script.read_text())):
        if isinstance(node, ast.Call):
            found.setdefault(ast.unparse(node.func), []).append(node)
    return found


TRAINING = sorted(
    path.name
    for path in EXAMPLES.glob("*.py")
    if any(name.endswith(".backward") for name in calls(path)) and "ps.connect" in calls(path)
)


def test_the_examples_that_train_are_found() -> None:
    assert {*TINY, "fashion_mnist.py", "movielens.py", "ray_train.py", "trackers.py"} <= set(TRAINING)


@pytest.mark.parametrize("name", TRAINING)
def test_every_example_that_trains_logs_its_loss_and_how_much_is_left(name: str) -> None:
    made = calls(EXAMPLES / name)
    logged = {word.arg for call in made.get("session.log", []) for word in call.keywords}
    assert "loss" in logged
    assert "session.progress" in made


def schedulers_of(script: Path) -> dict[str, int]:
    """The names to which a script assigns a scheduler of torch, with their lines."""
    found: dict[str, int] = {}
    for node in ast.walk(ast.parse(script.read_text())):
        if isinstance(node, ast.Assign) and "lr_scheduler." in ast.unparse(node.value):
            found |= {ast.unparse(target): node.lineno for target in node.targets}
    return found


SCHEDULED = [name for name in TRAINING if schedulers_of(EXAMPLES / name)]


def test_the_examples_with_schedules_are_found() -> None:
    assert {"char_gpt.py", "fashion_mnist.py"} <= set(SCHEDULED)


@pytest.mark.parametrize("name", SCHEDULED)
def test_an_example_hands_over_its_schedule(name: str) -> None:
    """Otherwise that begins anew in a worker that joins late."""
    prepared = [call for call in calls(EXAMPLES / name)["session.prepare"] if len(call.args) > 1]
    for scheduler, line in schedulers_of(EXAMPLES / name).items():
        assert any(scheduler in map(ast.unparse, call.args) and call.lineno > line for call in prepared)


SAVING = [name for name in TRAINING if "save_file" in calls(EXAMPLES / name)]


def test_the_examples_that_save_are_found() -> None:
    assert {"train.py", "char_gpt.py", "fashion_mnist.py", "movielens.py", "ray_train.py", "wgan_gp.py"} <= set(SAVING)


@pytest.mark.parametrize("name", SAVING)
def test_an_example_saves_the_weights_of_the_job_after_the_last_step_of_all_workers(name: str) -> None:
    """A worker's own model lacks the others' last updates in ssp and async, and in local:H it is in mid-round."""
    made = calls(EXAMPLES / name)
    [fetched] = made["session.global_weights"]
    assert any(barrier.lineno < fetched.lineno for barrier in made.get("session.barrier", []))
    for save in made["save_file"]:
        assert "state_dict" not in ast.unparse(save.args[0])


@pytest.mark.parametrize("name", TINY)
def test_what_an_example_logs_is_seen_at_each_step(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What it says as it runs: the session's own methods take it, and note it here besides."""
    losses: list[float] = []
    totals: list[int] = []
    clocks: list[int] = []
    log, progress = ps_worker.Session.log, ps_worker.Session.progress

    def noted_log(session: ps_worker.Session, **values: Any) -> None:
        log(session, **values)
        losses.append(float(torch.as_tensor(values["loss"]).item()))
        clocks.append(session.clock)

    def noted_progress(session: ps_worker.Session, total: int) -> None:
        progress(session, total)
        totals.append(total)

    monkeypatch.setattr(ps_worker.Session, "log", noted_log)
    monkeypatch.setattr(ps_worker.Session, "progress", noted_progress)
    monkeypatch.chdir(tmp_path)
    copied = tmp_path / name
    copied.write_text((EXAMPLES / name).read_text())
    launching.run_here(monkeypatch, copied, *TINY[name], PS_MODE="single")
    assert all(map(math.isfinite, losses))
    assert len(losses) >= 3
    [total] = totals
    assert clocks[-1] in (total, total - 1), "the last step is the one that was announced, or a GAN's second half of it"
