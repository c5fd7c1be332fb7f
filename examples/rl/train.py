"""A trainer: it learns from texts that rollout processes have written. An ordinary training script otherwise.

    ps-worker run --server HOST:PORT --workers 2 --mode sync examples/rl/train.py --pool HOST:PORT

The lines marked (ps) are all that a parameter server asks of it. Texts whose weights are more than --bound updates
older than the weights that learn from them are not used. Each trainer leaves a line for each of its steps in
--out/steps-RANK.jsonl.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from policy import Group, grpo_loss, make_policy, reward
from pool import ask

import ps_torch as ps


def version_of(session: ps.Session) -> Callable[[], int]:
    """Returns what tells the version of the weights that a step is going to change.

    In sync all workers make each update together, so it is the clock. In ssp:K and async each worker's push is an
    update: the servers tell how many there are, to a feed of a small part of the model. It lags behind by up to 0.05 s.
    """
    if session.mode == "sync":
        return lambda: session.clock
    feed = ps.subscribe(parameters=["norm.weight"])
    feed.wait_for()
    return lambda: feed.version + feed.behind


def take(pool: str, count: int, version: Callable[[], int], bound: int) -> tuple[int, list[dict[str, Any]]]:
    """Waits for groups that are new enough. Returns the version with which their ages were compared, and the groups.

    Where none come, the pool may know of a version that there is no more: the job went back to a checkpoint, or this is
    another run. Then the pool starts over with this trainer's version.
    """
    anew = False
    while True:
        now, found = ask(pool, "/take", {"count": count, "version": version(), "bound": bound, "anew": anew})
        if found:
            return now, found
        anew = True


def train(arguments: argparse.Namespace) -> None:
    """Joins the job, and leaves it when all steps are made."""
    with ps.connect() as session:  # (ps)
        make_steps(session, arguments)


def make_steps(session: ps.Session, arguments: argparse.Namespace) -> None:
    """Makes the steps."""
    model = make_policy()
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.lr, weight_decay=0.0)
    model, optimizer = session.prepare(model, optimizer)  # (ps)
    session.progress(total=arguments.steps)  # (ps) for those who watch
    version = version_of(session)
    arguments.out.mkdir(parents=True, exist_ok=True)
    with (arguments.out / f"steps-{session.rank}.jsonl").open("w") as record:
        for step in range(arguments.steps):
            now, taken = take(arguments.pool, arguments.groups, version, arguments.bound)
            groups = [Group(each["version"], each["prompt"], each["texts"], each["logs"]) for each in taken]
            loss = grpo_loss(model, groups)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            rewards = [reward(group.prompt, text) for group in groups for text in group.texts]
            mean = sum(rewards) / len(rewards)
            session.log(reward=mean)  # (ps) for those who watch
            line = {"time": time.time(), "reward": mean, "version": now, "used": [group.version for group in groups]}
            record.write(json.dumps({**line, "rollouts": [each["rollout"] for each in taken]}) + "\n")
            if session.rank == 0 and (step + 1) % max(1, arguments.steps // 10) == 0:
                wrote = f"{groups[0].prompt}: {groups[0].texts[0]}"
                print(f"step {step + 1}/{arguments.steps}: reward {mean:.3f}, {wrote}", flush=True)


def parse_arguments(words: list[str] | None = None) -> argparse.Namespace:
    """Parses the arguments. Options that are not given come from PS_* variables.

    words: the arguments; None: those of the command line
    """
    parser = argparse.ArgumentParser(description="Learn from what rollout processes write.")
    parser.add_argument("--pool", default="127.0.0.1:8100", help="HOST:PORT of pool.py (%(default)s)")
    parser.add_argument("--steps", type=int, default=150, help="steps of each trainer (%(default)s)")
    parser.add_argument("--groups", type=int, default=4, help="groups of texts in a trainer's batch (%(default)s)")
    parser.add_argument("--bound", type=int, default=2, help="updates that a text may be old (%(default)s)")
    parser.add_argument("--lr", type=float, default=2e-3, help="learning rate (%(default)s)")
    parser.add_argument("--out", type=Path, default=Path("runs/rl"), help="where to leave results (%(default)s)")
    return parser.parse_args(words)


if __name__ == "__main__":
    train(parse_arguments())
