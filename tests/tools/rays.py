"""A real Ray of three nodes on this machine, and the progress of workers that train there."""

from __future__ import annotations

import importlib.util
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.tools import cluster as clusters
from tests.tools.cluster import CONDITION_SECONDS

LOOK_SECONDS = 0.1
NODES, CPUS = 3, 4
needs_ray = [
    pytest.mark.ray,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs the package ray: make test-ray"),
    # Ray leaves sockets and files to the garbage collector, and warns of its own changes to come.
    pytest.mark.filterwarnings("default"),
]


@contextmanager
def three_nodes() -> Iterator[Any]:
    """Yields a cluster of three nodes; this process is its driver."""
    import ray
    from ray.cluster_utils import Cluster

    Path("/tmp/ray").mkdir(exist_ok=True)  # Ray notes there where its clusters are, and makes it only without temp_dir
    cluster = Cluster()
    folder = tempfile.mkdtemp(prefix="ray-")  # a short path: Ray's sockets are in it
    try:
        for _ in range(NODES):
            cluster.add_node(num_cpus=CPUS, object_store_memory=100 * 2**20, include_dashboard=False, temp_dir=folder)
        ray.init(address=cluster.address, log_to_driver=False)
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


def logs(cluster: Any) -> str:
    """All that actors have written to their logs, their servers included."""
    folder = Path(cluster.head_node.get_logs_dir_path())
    return "".join(path.read_text(errors="replace") for path in folder.glob("worker-*.err"))


def until(condition: Callable[[], object], what: str, seconds: float = CONDITION_SECONDS) -> None:
    """Looks at a condition now and then until it holds."""
    clusters.until(condition, what, seconds, LOOK_SECONDS)


def steps(folder: Path) -> dict[tuple[str, int], int]:
    """How many steps each process has made, by its worker's name and process id."""
    found = {}
    for path in folder.glob("[0-9]-*"):
        name, _, pid = path.name.partition("-")
        found[name, int(pid)] = int(path.read_text())
    return found


def until_further(folder: Path, processes: set[tuple[str, int]], by: int = 30) -> None:
    """Waits until each of some processes has made so many steps more."""
    assert processes
    before = steps(folder)

    def are_further() -> bool:
        now = steps(folder)
        return all(now.get(process, 0) >= before.get(process, 0) + by for process in processes)

    until(are_further, f"{by} more steps of {processes}")


def node_of(servers: Any, shard: int) -> str:
    """Returns the id of the node on which a shard's actor is."""
    import ray

    here = servers._shards[shard].__ray_call__.remote(lambda _: ray.get_runtime_context().get_node_id())
    return str(ray.get(here))
