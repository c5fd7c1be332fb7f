"""A rollout process: it writes texts with the weights that training has now, for as long as the job goes on.

    python examples/rl/rollout.py --server HOST:PORT --pool HOST:PORT

The lines marked (ps) are all that follows training. Start as many of these as you like, whenever you like, and kill
them: trainers neither know them nor wait for one of them.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import asdict

import torch
from policy import PROMPTS, make_policy, write_groups
from pool import ask

import ps_torch as ps


def parse_arguments(words: list[str] | None = None) -> argparse.Namespace:
    """Parses the arguments. Options that are not given come from PS_* variables.

    words: the arguments; None: those of the command line
    """
    parser = argparse.ArgumentParser(description="Write texts with the newest weights.")
    parser.add_argument("--server", help="HOST:PORT of the coordinator (PS_SERVER)")
    parser.add_argument("--job", help="the job's name (PS_JOB, default)")
    parser.add_argument("--pool", default="127.0.0.1:8100", help="HOST:PORT of pool.py (%(default)s)")
    parser.add_argument("--name", default=f"rollout-{os.getpid()}", help="whose texts these are (%(default)s)")
    parser.add_argument("--prompts", type=int, default=8, help="groups that are written at a time (%(default)s)")
    parser.add_argument("--group", type=int, default=8, help="texts of a group (%(default)s)")
    parser.add_argument("--bound", type=int, default=2, help="updates that the weights may lack (%(default)s)")
    return parser.parse_args(words)


def write(arguments: argparse.Namespace) -> None:
    """Runs until the job ends."""
    generator = torch.Generator()
    generator.seed()  # each process has other texts
    with ps.subscribe(arguments.server, arguments.job) as feed:  # (ps)
        model = feed.load(make_policy(), timeout=600)  # (ps)
        print(f"{arguments.name} begins with version {feed.version}", flush=True)
        while not feed.ended:  # (ps)
            chosen = torch.randint(len(PROMPTS), (arguments.prompts,), generator=generator)
            prompts = "".join(PROMPTS[each] for each in chosen)
            try:
                with feed.reading(model, max_behind=arguments.bound, timeout=600) as version:  # (ps)
                    groups = write_groups(model, prompts, arguments.group, version, generator)
            except ps.NotFound:  # the job has ended while this process waited for newer weights
                break
            body = [{**asdict(group), "rollout": arguments.name} for group in groups]
            while not feed.ended and not ask(arguments.pool, "/put", body):
                pass  # there was no room: trainers are slower than rollout processes


if __name__ == "__main__":
    write(parse_arguments())
