"""The state of a job, and what limits it: each as a sentence.

state      training, or why it is not: a shard that does not answer, workers that are missing, a rollback
diagnosis  how the workers spent the last seconds, and what limits them
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ps_runtime.quantities import ranks_text

MOST = 0.5  # the fraction of a whole from which a part is called "most" of it
# A worker is named as the slow one if the others wait for it at least so many times as long as for any other worker.
CLEARLY = 2.0
ENOUGH_SECONDS = 0.5  # the least time of all workers together from which a diagnosis is made


@dataclass(frozen=True)
class JobSigns:
    """The observations from which a job's state and diagnosis are made.

    live, world_size: ranks that take part, and how many are declared (0: elastic)
    started:   whether all declared workers had joined
    rolling_back: a shard lost its part of the job, and a checkpoint is being read
    rejoining: ranks that are expected to join again, after a rollback or because no worker was left
    absent:    ranks that were silent, for which the job waits before it ends
    silent:    by shard that does not answer, the seconds since its last answer
    missing:   shards that have not registered
    phases:    seconds of all workers together over the last seconds, by phase
    awaited:   by rank, the seconds that other workers have waited for it, over the last seconds
    """

    live: Sequence[int] = ()
    world_size: int = 0
    started: bool = True
    rolling_back: bool = False
    rejoining: Sequence[int] = ()
    absent: Sequence[int] = ()
    silent: Mapping[int, float] = field(default_factory=dict)
    missing: Sequence[int] = ()
    phases: Mapping[str, float] = field(default_factory=dict)
    awaited: Mapping[int, float] = field(default_factory=dict)


def state(signs: JobSigns) -> str:
    """Returns the state of a job as text: the first reason why it does not train, or "training"."""
    if signs.silent:
        return "; ".join(
            f"shard {index} does not answer for {seconds:.0f} s" for index, seconds in sorted(signs.silent.items())
        )
    if signs.missing:
        names = ", ".join(map(str, signs.missing))
        return f"waits for shard{'s' if len(signs.missing) > 1 else ''} {names} to call in"
    if signs.rolling_back:
        return "is being rolled back to its last checkpoint"
    if signs.rejoining:
        return f"waits for {ranks_text(signs.rejoining)} to join again"
    if signs.absent and not signs.live:
        return f"all others have left, waits for {ranks_text(signs.absent)} to come back"
    if not signs.started:
        return f"waits for {signs.world_size - len(signs.live)} more of {signs.world_size} workers"
    if not signs.live:
        return "has no worker"
    return "training"


def diagnosis(signs: JobSigns) -> str:
    """Returns what limits a training job, as text; empty if it does not train, or too little is known."""
    total = sum(signs.phases.values())
    if state(signs) != "training" or total < ENOUGH_SECONDS:
        return ""
    parts = {
        "waiting": signs.phases.get("wait", 0.0),
        "push and pull": signs.phases.get("push", 0.0) + signs.phases.get("pull", 0.0),
        "forward and backward": signs.phases.get("forward", 0.0) + signs.phases.get("backward", 0.0),
        "waiting for the loader": signs.phases.get("data", 0.0),
    }
    largest = max(parts, key=lambda part: parts[part])
    whose = "the workers' time" if len(signs.live) > 1 else "the worker's time"
    because = {
        "waiting": f", {_for_whom(signs)}",
        "push and pull": ": the servers or the network are the limit",
        "forward and backward": ": the workers' own computing is the limit",
        "waiting for the loader": ": reading the data is the limit",
    }
    return f"{100 * parts[largest] / total:.0f} % of {whose} is {largest}{because[largest]}"


def _for_whom(signs: JobSigns) -> str:
    total = sum(signs.awaited.values())
    if total <= 0.0:
        return "and not for another worker"
    (rank, longest), *others = sorted(signs.awaited.items(), key=lambda item: item[1], reverse=True)
    if longest > MOST * total and all(longest >= CLEARLY * seconds for _, seconds in others):
        return f"most of it for worker {rank}"
    if len(others) == 1:
        return f"for {ranks_text((rank, others[0][0]))} in turn: neither is the slower one"
    return "for no worker in particular"
