"""Reinforcement learning on one machine: servers, two trainers, rollout processes, and a picture of what came of it.

    python examples/rl/run.py                      # a minute or two on two cores
    python examples/rl/run.py --mode async --steps 300
    python examples/rl/run.py --ray                # trainers and rollout processes are actors of Ray

A small GPT learns by GRPO to write the letter that its prompt names. Rollout processes follow the trainers' weights and
write texts with them; trainers learn from texts that are at most two updates old. On the way one rollout process is
killed and another one is added, which nobody has to be told. policy.py has the model and the loss, rollout.py and
train.py what the processes do, pool.py what is between them; ray_actors.py has them as actors.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

from pool import Pool, Service

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))
from demo import await_server, running, terminate  # noqa: E402  # from the folder above

Step = dict[str, Any]


def main() -> None:
    """Runs the example; see the top of this file. Exit code 0 means that the model learned."""
    arguments = parse_arguments()
    signal.signal(signal.SIGTERM, terminate)
    signal.signal(signal.SIGHUP, terminate)
    out: Path = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    for old in out.glob("steps-*.jsonl"):  # an old result must not pass for this one
        old.unlink()
    with ExitStack() as stack:
        pool = Pool(room=4 * arguments.rollouts * arguments.trainers)
        events = learn(started(stack, arguments), arguments, pool)
    steps = read_steps(out)
    result = summary(steps, pool.counts(), arguments.bound) | {"events": events, "mode": arguments.mode}
    (out / "result.json").write_text(json.dumps(result, indent=2) + "\n")
    try:
        draw(steps, result, arguments.bound, out / "reward.png")
    except ImportError:
        print("no picture, because matplotlib is not installed: pip install '.[examples]'")
    report(result, out, arguments)


def started(stack: ExitStack, arguments: argparse.Namespace) -> Launch:
    """Returns what starts the others, with servers that run. All of it ends with `stack`."""
    if arguments.ray:
        from ray_actors import Actors

        return Actors(stack, arguments)
    return Processes(stack, arguments)


class Launch(Protocol):
    """What starts trainers and rollout processes.

    host: the address at which they reach this process
    """

    host: str

    def train(self, pool: str, words: list[str]) -> None:
        """Starts the trainers, with these flags. pool: HOST:PORT"""

    def add(self, words: list[str]) -> str:
        """Starts a rollout process, with these flags, and returns its name."""

    def kill(self) -> str:
        """Kills the first rollout process, and returns its name when it has ended."""

    def are_learning(self) -> bool:
        """Whether trainers have steps to make; takes a moment. Ends the program with an error where one has failed."""


class Processes:
    """Servers, trainers and rollout processes on this machine. ray_actors.py has them on a Ray cluster."""

    host = "127.0.0.1"

    def __init__(self, stack: ExitStack, arguments: argparse.Namespace) -> None:
        """All of it ends with `stack`."""
        self._stack, self._arguments, self._pool = stack, arguments, ""
        self._alone = os.environ | {"OMP_NUM_THREADS": "1"}  # there are more processes than cores
        self._rollouts: list[subprocess.Popen[bytes]] = []
        out: Path = arguments.out
        log = stack.enter_context((out / "server.log").open("w"))
        servers = ["ps-server", "up", "--shards", str(arguments.shards), "--port", "0", "--metrics-port", "0"]
        up = stack.enter_context(running(servers, stdout=log, stderr=subprocess.STDOUT))
        self._server, page = await_server(up, out / "server.log")
        print(f"the servers are ready; watch the job in a browser, while it trains: {page}", flush=True)

    def train(self, pool: str, words: list[str]) -> None:
        """Starts the trainers."""
        count, mode, self._pool = str(self._arguments.trainers), self._arguments.mode, pool
        command = ["ps-worker", "run", "--server", self._server, "--workers", count, "--mode", mode]
        command += [str(HERE / "train.py"), "--pool", pool, *words]
        self._trainers = self._stack.enter_context(running(command, env=self._alone))

    def add(self, words: list[str]) -> str:
        """Starts a rollout process."""
        name = f"rollout-{len(self._rollouts)}"
        command = [sys.executable, str(HERE / "rollout.py"), "--server", self._server, "--pool", self._pool]
        self._rollouts.append(self._stack.enter_context(running([*command, "--name", name, *words], env=self._alone)))
        return name

    def kill(self) -> str:
        """Kills the first rollout process, as kill -9 does."""
        self._rollouts[0].kill()
        self._rollouts[0].wait()
        return "rollout-0"

    def are_learning(self) -> bool:
        """Whether the trainers run."""
        time.sleep(0.1)
        if self._trainers.poll() is None:
            return True
        if self._trainers.returncode != 0:
            log = self._arguments.out
            sys.exit(f"rl: the trainers ended with code {self._trainers.returncode}; the server's log is in {log}")
        return False


def learn(launch: Launch, arguments: argparse.Namespace, pool: Pool) -> list[tuple[int, str]]:
    """Runs trainers to their end, and rollout processes meanwhile. Returns what became of these, by version."""
    bound = ["--bound", str(arguments.bound)]
    at = Service((launch.host, 0), pool).start()
    launch.train(at, ["--out", str(arguments.out.resolve()), "--steps", str(arguments.steps), *bound])
    for _ in range(arguments.rollouts):
        launch.add(bound)
    updates = arguments.steps * (1 if arguments.mode == "sync" else arguments.trainers)
    events: list[tuple[int, str]] = []
    while launch.are_learning():
        if len(events) == 0 and pool.version >= updates // 3:
            killed = launch.kill()
            events.append((pool.version, f"{killed} is killed"))
        elif len(events) == 1 and pool.version >= updates // 2:
            events.append((pool.version, f"{launch.add(bound)} is added"))
    return events


# --- what came of it -------------------------------------------------------------------------------------------------


def read_steps(out: Path) -> list[Step]:
    """Returns all trainers' steps, in the order of time."""
    lines = [line for file in out.glob("steps-*.jsonl") for line in file.read_text().splitlines()]
    return sorted(map(json.loads, lines), key=lambda step: float(step["time"]))


def ages(step: Step) -> list[int]:
    """Returns how many updates older each of the step's groups was than the weights that learnt from it."""
    return [step["version"] - used for used in step["used"]]


def summary(steps: list[Step], counts: dict[str, Any], bound: int) -> dict[str, Any]:
    """Returns the figures of a run: of groups, and of the mean reward of the first and the last tenth of the steps."""
    tenth = max(1, len(steps) // 10)
    old = [age for step in steps for age in ages(step)]
    return {
        "first_reward": mean([step["reward"] for step in steps[:tenth]]),
        "last_reward": mean([step["reward"] for step in steps[-tenth:]]),
        "seconds": steps[-1]["time"] - steps[0]["time"],
        "used": len(old),
        "used_by_age": {age: old.count(age) for age in sorted({*old})},
        "used_beyond_bound": sum(age > bound for age in old),
        "used_by_rollout": counts["used"],
        "dropped": sum(counts["dropped"].values()),
    }


def draw(steps: list[Step], result: dict[str, Any], bound: int, path: Path) -> None:
    """Draws the reward, and the age of what was learnt from, over the version of the weights."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 6), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True)
    versions, rewards = [step["version"] for step in steps], [step["reward"] for step in steps]
    above.plot(versions, rewards, ".", color="tab:blue", alpha=0.3, label="each step of a trainer")
    smooth = [mean(rewards[max(0, end - 20) : end]) for end in range(1, len(rewards) + 1)]
    above.plot(versions, smooth, color="tab:blue", label="mean of 20 steps")
    above.axhline(1 / 26, color="gray", linestyle=":", label="guessing, 1/26")
    above.set(
        ylabel="reward: share of the right letter",
        title=f"GRPO, {result['mode']}, {result['seconds']:.0f} s",
        ylim=(-0.05, 1.05),
    )
    old = [mean([float(age) for age in ages(step)]) for step in steps]
    below.plot(versions, old, ".", color="tab:orange", alpha=0.5, label="mean of each step")
    below.axhline(bound, color="tab:red", label=f"bound; {result['dropped']} groups beyond it were dropped")
    below.set(xlabel="version of the weights", ylabel="age of the texts, updates", ylim=(-0.2, bound + 1))
    for version, what in result["events"]:
        for axes in (above, below):
            axes.axvline(version, color="black", linewidth=0.8, linestyle="--")
        above.text(version, 1.0, f"{what} ", rotation=90, va="top", ha="right", fontsize=8)
    above.legend(loc="lower right")
    below.legend(loc="upper left")
    figure.savefig(path, dpi=120)


def report(result: dict[str, Any], out: Path, arguments: argparse.Namespace) -> None:
    """Prints the last lines, and ends the program with an error if the model did not learn."""
    print(
        "",
        f"reward   {result['first_reward']:.3f} in the first tenth of steps, {result['last_reward']:.3f} in the last",
        f"time     {result['seconds']:.0f} s of training",
        f"age      groups used, by the updates that they were old: {result['used_by_age']}",
        f"bound    {result['used_beyond_bound']} used beyond {arguments.bound} updates; {result['dropped']} dropped",
        f"rollout  groups used, by who wrote them: {result['used_by_rollout']}",
        f"left in  {out}/: " + ", ".join(sorted(file.name for file in out.iterdir())),
        "next     the same with --mode async --steps 300; docs/feed.md; your own: rollout.py and train.py",
        sep="\n",
        flush=True,
    )
    if not result["last_reward"] >= arguments.goal:
        sys.exit(f"rl: the reward should have risen to {arguments.goal}, but is {result['last_reward']:.3f}")


def mean(values: list[float]) -> float:
    """The arithmetic mean."""
    return sum(values) / len(values)


def parse_arguments() -> argparse.Namespace:
    """The defaults suit a laptop."""
    parser = argparse.ArgumentParser(description="Learn by GRPO with rollout processes that follow the trainers.")
    parser.add_argument("--mode", default="sync", help="sync, ssp:K or async (%(default)s)")
    parser.add_argument("--steps", type=int, default=150, help="steps of each trainer (%(default)s)")
    parser.add_argument("--trainers", type=int, default=2, help="(%(default)s)")
    parser.add_argument("--rollouts", type=int, default=2, help="rollout processes at the beginning (%(default)s)")
    parser.add_argument("--shards", type=int, default=1, help="(%(default)s)")
    parser.add_argument("--bound", type=int, default=2, help="updates that a text may be old (%(default)s)")
    parser.add_argument("--goal", type=float, default=0.5, help="the reward to end above (%(default)s)")
    parser.add_argument(
        "--ray", action="store_true", help="as actors of Ray: of RAY_ADDRESS, or of one on this machine"
    )
    parser.add_argument("--out", type=Path, default=Path("runs/rl"), help="where to leave results (%(default)s)")
    return parser.parse_args()


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
