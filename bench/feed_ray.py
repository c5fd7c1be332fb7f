"""Ray's object store as a way for weights, beside those of feed_peer.py.

The trainer's process starts a Ray of its own, puts the weights of each version there, and an actor, which has the
model, reads them without a copy. The process reads the same Peer and orders as those of feed_peer.py, and answers for
both ends.
"""

from __future__ import annotations

import json
import logging
import sys
import time
import warnings
from typing import Any

import torch

from bench.feed_peer import Peer, Publisher, State, checksum, followed, trainer
from bench.feed_reader import Twin
from bench.results import MIB, THREADS
from bench.talk import own_output
from bench.training import Task

COPIES = 4  # of the weights, for which the store has room


class Loader:
    """An actor: it has the model."""

    def __init__(self, elements: int, vector: int) -> None:
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")  # nothing writes to it
        torch.set_num_threads(THREADS)
        self._model = Twin(elements, vector)

    def load(self, where: list[Any]) -> float:
        """Puts weights into the model; returns when they were there. where: the reference, which Ray would follow"""
        import ray

        found = {name: torch.from_numpy(bits).view(torch.bfloat16) for name, bits in ray.get(where[0]).items()}
        self._model.load_state_dict(found, assign=True)
        return time.perf_counter()

    def checksum(self) -> int:
        """Returns that of the model's weights."""
        return checksum(dict(self._model.state_dict()))


class ObjectStore(Publisher):
    """Weights that are put into the store."""

    def __init__(self, peer: Peer) -> None:
        import ray

        task = peer.task
        ray.init(
            num_cpus=1,
            object_store_memory=COPIES * 2 * task.parameters + 128 * MIB,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.WARNING,
            _temp_dir=peer.folder,
        )
        self._loader = ray.remote(num_cpus=1)(Loader).remote(task.parameters, task.vector)
        self._loaded: list[Any] = []

    def publish(self, state: State, number: int) -> None:
        import ray

        put = ray.put({name: each.view(torch.int16).numpy() for name, each in state.items()})
        self._loaded.append(self._loader.load.remote([put]))

    def loaded(self) -> dict[str, Any]:
        """Waits for the actor; returns its answer."""
        import ray

        times, self._loaded = ray.get(self._loaded), []
        return {"times": times, "checksum": ray.get(self._loader.checksum.remote())}


def main() -> None:
    """Follows orders until there are no more."""
    import ray

    say = own_output()
    told: dict[str, Any] = json.loads(sys.stdin.readline())
    peer = Peer(**{**told, "task": Task(**told["task"])})
    way = ObjectStore(peer)
    running = trainer(peer.task, way)
    say({"ready": True})
    for line in sys.stdin:
        say({"ends": [followed(running, json.loads(line)["count"]), way.loaded()]})
    ray.shutdown()


if __name__ == "__main__":
    main()
