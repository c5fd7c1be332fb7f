"""The counting oracle finds what it is for: each kind of damage, done to weights by hand, and nothing where none is."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.chaos.oracle import (
    LATE,
    Cells,
    Life,
    Rules,
    Shape,
    Violation,
    Witness,
    judge,
    judge_saved,
    too_stale,
    unexplained,
)

SHAPE = Shape(buckets=2, rows=4, columns=3)
STEPS = 10


def trained(rules: Rules, workers: int = 2, steps: int = STEPS) -> tuple[torch.Tensor, list[Life]]:
    """The weights after so many steps of each worker, and what the workers know of it."""
    model = Cells(rules.shape)
    optimizer = model.optimizer()
    lives = [Life(row, row) for row in range(workers)]
    for number in range(1, steps + 1):
        total = [torch.zeros_like(bucket) for bucket in model.buckets]
        for life in lives:
            Witness(rules, life.number).mark(model, number)
            life.attempted.append(number)
            life.done[number] = number
            for sums, bucket in zip(total, model.buckets, strict=True):
                sums += bucket.grad
        for sums, bucket in zip(total, model.buckets, strict=True):
            bucket.grad = sums / workers if rules.averaged else sums
        optimizer.step()
    return model.view(), lives


def kinds(found: list[Violation]) -> set[str]:
    return {violation.kind for violation in found}


@pytest.mark.parametrize("mode", ["sync", "ssp:2", "async"])
def test_weights_that_are_right_pass(mode: str) -> None:
    rules = Rules.of(mode, 2, SHAPE)
    view, lives = trained(rules)
    assert judge(view, lives, rules) == []


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize(
    ("times", "kind"), [(-1.0, "lost"), (1.0, "doubled"), (0.5, "torn")], ids=["lost", "doubled", "torn"]
)
def test_one_push_that_is_lost_doubled_or_torn_in_one_bucket_is_found(mode: str, times: float, kind: str) -> None:
    rules = Rules.of(mode, 2, SHAPE)
    view, lives = trained(rules)
    push = rules.unit
    view[1, 0, 0] += times * push
    view[1, 0, 1] += times * push
    assert kind in kinds(judge(view, lives, rules))
    view, lives = trained(rules)
    view[1, 0, 0] += push  # the count alone
    assert "torn" in kinds(judge(view, lives, rules))


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_step_that_was_never_acknowledged_may_be_in_once_or_not(mode: str) -> None:
    rules = Rules.of(mode, 2, SHAPE)
    view, lives = trained(rules)
    with_it, _ = trained(rules, steps=STEPS + 1)
    twice, _ = trained(rules, steps=STEPS + 1)
    column = 1 + (STEPS + 1) % SHAPE.columns
    twice[0, 0, 0] += rules.unit
    twice[0, 0, column] += rules.unit
    for life in lives:
        life.attempted.append(STEPS + 1)
    assert judge(view, lives, rules) == []
    assert judge(with_it, lives, rules) == []
    assert kinds(judge(twice, lives, rules)) == {"doubled"}


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_what_rank_0_saves_without_the_last_step_of_another_is_found(mode: str) -> None:
    rules = Rules.of(mode, 2, SHAPE)
    view, lives = trained(rules)
    saved = {f"buckets.{number}": bucket.clone() for number, bucket in enumerate(view)}
    assert judge_saved(saved, lives, rules) == []
    saved["buckets.1"][1, [0, 1 + STEPS % SHAPE.columns]] -= rules.unit / (2 if rules.averaged else 1)
    found = judge_saved(saved, lives, rules)
    assert kinds(found) == {"saved"}
    assert {each.where["bucket"] for each in found} == {1}
    assert all(each.said.startswith("rank 0 has saved the weights: ") for each in found)


def test_a_view_that_goes_back_or_lacks_the_own_update_is_found() -> None:
    rules = Rules.of("async", 2, SHAPE)
    witness = Witness(rules, 0)
    views = [trained(rules, steps=steps)[0] for steps in (1, 2, 3, 3)]
    assert witness.check(views[0], 1) == []
    assert witness.check(views[1], 2) == []
    assert "lost" in kinds(witness.check(views[1], 3))
    witness.lost_track()
    assert witness.check(views[2], 3) == []
    older = views[3].clone()
    older[0, 1] = 0.0  # the other worker's row, as it was before
    older[:, 0, [0, witness.column(4)]] += 1
    assert kinds(witness.check(older, 4)) == {"went back"}
    assert kinds(Witness(rules, 3).check(views[2], 1)) == {"own update missing"}


def test_an_average_that_leaves_somebody_out_is_found_by_who_sees_it() -> None:
    rules = Rules.of("sync", 3, SHAPE)
    steps = [trained(rules, workers=3, steps=count)[0] for count in (1, 2)]
    witness = Witness(rules, 0)
    assert witness.check(steps[0], 1) == []
    assert witness.check(steps[1], 2) == []
    witness = Witness(rules, 0)
    witness.check(steps[0], 1)
    wrong = steps[1].clone()
    column = witness.column(2)
    wrong[0, 1, [0, column]] -= rules.unit / 3  # divided by three, with two in it
    assert "wrong update" in kinds(witness.check(wrong, 2))


def test_a_late_step_counts_in_the_update_that_its_worker_says_and_in_no_other() -> None:
    rules = Rules.of("sync", 2, SHAPE)
    before, _ = trained(rules, steps=STEPS - 1)
    view, lives = trained(rules)
    witness, half = Witness(rules, 0), rules.unit / 2
    here, early = witness.column(STEPS), witness.column(STEPS - 1)
    view[:, 1, here] -= half
    view[:, 1, early] += half
    lives[1].attempted.remove(STEPS)
    del lives[1].done[STEPS - 1], lives[1].done[STEPS]
    witness.check(before, STEPS - 1)
    seen = witness.check(view, STEPS)
    assert kinds(seen) == {LATE}
    assert (unexplained(seen, lives, rules), kinds(judge(view, lives, rules))) == (seen, {"torn"})
    lives[1].late = [(STEPS - 1, STEPS)]
    assert (unexplained(seen, lives, rules), judge(view, lives, rules)) == ([], [])
    view[0, 1, [0, early]] += half  # once more, in one bucket
    assert kinds(judge(view, lives, rules)) == {"torn"}
    view[0, 1, [0, early]] += half
    assert kinds(judge(view, lives, rules)) == {"doubled"}


@pytest.mark.parametrize(("bound", "found"), [(3, set()), (2, {"too stale"})])
def test_a_pull_beyond_the_bound_is_found(bound: int, found: set[str]) -> None:
    rules = Rules.of(f"ssp:{bound}", 2, SHAPE)
    fast, slow = Life(0, 0), Life(1, 1)
    for step in range(1, 6):
        slow.attempted.append(step)
        slow.done[step] = step
    fast.seen = [(5, {0: [5, 5], 1: [3, 2]}, 0.0)]  # one bucket has only two of the other's steps, at clock 5
    assert kinds(too_stale([fast, slow], rules)) == found
    slow.found, slow.at = (
        {3},
        {3: 1.0},
    )  # settled after the pull
    assert too_stale([fast, slow], rules) == []
    slow.at[3] = -1.0
    assert kinds(too_stale([fast, slow], rules)) == found
    assert too_stale([fast, slow], replace(rules, bound=None)) == []
