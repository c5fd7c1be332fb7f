"""The trainers and rollout processes of run.py as actors of Ray, with servers that Ray places: `run.py --ray`.

It starts a Ray of its own, unless RAY_ADDRESS names one. The files of this folder have to be on all nodes, under the
same path, and --out a directory that all nodes share. docs/ray.md explains the servers.
"""

from __future__ import annotations

import argparse
import sys
from contextlib import ExitStack
from typing import Any

import ray
from ray.util import get_node_ip_address

from ps_torch.ray import ParameterServer

JOB = "rl"
CPUS = {"CPU": 0.5}, {"CPU": 0.25}, {"CPU": 0.1}  # that Ray reserves for a trainer, a rollout process and a shard


class Trainer:
    """A worker of the job."""

    def begin(self, settings: Any, rank: int, world_size: int) -> None:
        """Takes the settings by which `connect` finds the servers."""
        settings.apply(rank, world_size)

    def train(self, words: list[str]) -> None:
        """Makes all steps, as train.py does with this command line."""
        import train

        train.train(train.parse_arguments(words))


class Rollout:
    """It follows the job, and takes no part in it."""

    def write(self, words: list[str]) -> None:
        """Writes texts until the job ends, as rollout.py does with this command line."""
        import rollout

        rollout.write(rollout.parse_arguments(words))


class Actors:
    """What run.py starts and kills.

    host: an address of this process for those on other nodes
    """

    def __init__(self, stack: ExitStack, arguments: argparse.Namespace) -> None:
        """All of it ends with `stack`."""
        ray.init()
        stack.callback(ray.shutdown)
        self.host, self._arguments, self._pool = get_node_ip_address(), arguments, ""
        resources = {"resources_per_shard": CPUS[2]}
        # The network is trusted here; certificates="certs" where it is not.
        servers = stack.enter_context(ParameterServer(arguments.shards, insecure=True, **resources))
        self._settings = servers.settings(mode=arguments.mode, job=JOB, elastic=False)
        self._rollouts: list[Any] = []
        self._trainers: list[Any] = []
        self._learning: list[Any] = []

    def train(self, pool: str, words: list[str]) -> None:
        """Starts the trainers. pool: HOST:PORT"""
        count, self._pool = self._arguments.trainers, pool
        self._trainers = [ray.remote(num_cpus=CPUS[0]["CPU"])(Trainer).remote() for _ in range(count)]
        ray.get([each.begin.remote(self._settings, rank, count) for rank, each in enumerate(self._trainers)])
        self._learning = [each.train.remote(["--pool", pool, *words]) for each in self._trainers]

    def add(self, words: list[str]) -> str:
        """Starts a rollout process, and returns its name."""
        name = f"rollout-{len(self._rollouts)}"
        actor = ray.remote(num_cpus=CPUS[1]["CPU"])(Rollout).remote()
        flags = ["--server", self._settings.server, "--job", JOB, "--pool", self._pool, "--name", name, *words]
        self._rollouts.append((actor, actor.write.remote(flags)))
        return name

    def kill(self) -> str:
        """Kills the first rollout process, and returns its name when it has ended."""
        actor, texts = self._rollouts[0]
        ray.kill(actor)
        ray.wait([texts], timeout=60.0)  # it ends a moment later
        return "rollout-0"

    def are_learning(self) -> bool:
        """Whether trainers have steps to make. Ends the program with an error where one of them failed."""
        done, self._learning = ray.wait(self._learning, num_returns=len(self._learning), timeout=0.1)
        try:
            ray.get(done)
        except ray.exceptions.RayError as error:
            sys.exit(f"rl: a trainer failed: {error}")
        return bool(self._learning)
