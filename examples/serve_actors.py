"""The trainers and services of serve.py as actors of Ray, with servers that Ray places: `serve.py --ray`.

    python examples/serve.py --ray
    RAY_ADDRESS=10.0.0.1:6379 python examples/serve.py --ray --host 0.0.0.0 --services 4 --out /nfs/serve

It starts a Ray of its own, unless RAY_ADDRESS names one. The files of this folder have to be on all nodes, under the
same path, and --out a directory that all nodes share. Ray starts an actor whose process was killed again: a trainer
goes on with the job, a service with its newest weights. docs/ray.md explains the servers.
"""

from __future__ import annotations

import argparse
import signal
import sys
from contextlib import ExitStack
from copy import copy
from typing import Any

import char_gpt
import ray
from demo import terminate

import ps_torch as ps
from ps_torch.ray import ParameterServer

SHARDS, TRAINERS = 2, 2
CPUS = {"CPU": 0.5}, {"CPU": 0.25}, {"CPU": 0.1}  # that Ray reserves for a trainer, a service and a shard
COMES_BACK = {"max_restarts": -1, "max_task_retries": -1}  # an error that a method raises ends it all the same


class Trainer:
    """A worker of the job."""

    def __init__(self, settings: Any, rank: int) -> None:
        settings.apply(rank, TRAINERS)

    def train(self, arguments: argparse.Namespace) -> None:
        """Makes all steps, as char_gpt.py does."""
        char_gpt.train(arguments)


class Service:
    """It follows the job, and takes no part in it."""

    def serve(self, server: str, arguments: argparse.Namespace) -> None:
        """Answers requests, as serve.py does."""
        from serve import serve

        with ps.subscribe(server, arguments.job, wire=arguments.wire) as feed:
            serve(feed, arguments)


def run(arguments: argparse.Namespace, words: list[str]) -> None:
    """Trains, and serves the model until Ctrl-C. words: the arguments of char_gpt.py"""
    training = char_gpt.parse_arguments(words)
    training.out = training.out.resolve()  # an actor has another working directory
    with ExitStack() as stack:
        ray.init()
        stack.callback(ray.shutdown)
        for number in (signal.SIGTERM, signal.SIGHUP):  # Ray has a handler of its own until here
            signal.signal(number, terminate)
        # The network is trusted here; certificates="certs" where it is not.
        servers = stack.enter_context(ParameterServer(SHARDS, insecure=True, resources_per_shard=CPUS[2]))
        settings = servers.settings(job=arguments.job or "default", elastic=False)
        running: dict[Any, Any] = {}  # the actors, by their calls
        stack.callback(end, running)  # before their servers
        for rank in range(TRAINERS):
            trainer = ray.remote(num_cpus=CPUS[0]["CPU"], **COMES_BACK)(Trainer).remote(settings, rank)
            running[trainer.train.remote(training)] = trainer
        for number in range(arguments.services):
            own = copy(arguments)
            own.port = arguments.port + number if arguments.port else 0
            service = ray.remote(num_cpus=CPUS[1]["CPU"], **COMES_BACK)(Service).remote()
            running[service.serve.remote(settings.server, own)] = service
        await_ends(running)


def end(running: dict[Any, Any]) -> None:
    """Kills the actors that are left."""
    for actor in running.values():
        ray.kill(actor)


def await_ends(running: dict[Any, Any]) -> None:
    """Waits for actors, by their calls. Ends the program with an error where a method has raised one.

    Nobody refers to an actor any more whose call has come to its end, so its process ends, too: a trainer leaves the
    job.
    """
    while running:
        ended, _ = ray.wait(list(running))
        try:
            ray.get(ended)
        except ray.exceptions.RayError as error:
            sys.exit(f"serve: an actor failed: {error}")
        for each in ended:
            del running[each]
