"""Workers of a framework, each in a process of its own: frameworks keep their state in globals of the process.

The processes are forks of one that has imported the frameworks, so that a worker starts in a moment.
"""

from __future__ import annotations

import atexit
import importlib
import importlib.util
import multiprocessing
import os
import traceback
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import Any

import pytest

from ps_runtime.free_ports import free_port
from tests.tools.cluster import Cluster

Weights = list[list[float]]
SECONDS = 200.0
PRELOADED = ["torch", "ps_worker", "lightning.pytorch", "lightning.fabric", "accelerate", "transformers.trainer"]


def needs(*packages: str) -> list[pytest.MarkDecorator]:
    """The marks of a file's tests: they are skipped where a framework is not installed."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    why = f"needs the package {', '.join(missing)}: make test-frameworks"
    return [pytest.mark.frameworks, pytest.mark.skipif(bool(missing), reason=why)]


def run_workers(
    module: str, function: str, *arguments: Any, cluster: Cluster | None = None, job: str = "", **more: Any
) -> list[Any]:
    """What module.function(*arguments) returns in each worker, by rank. Raises AssertionError with its traceback.

    more: mode ("sync" with a cluster, else "single"), workers (2 with a cluster, else 1), and members: of each worker,
    which is a group of processes then; they come one group after the other
    """
    count = more.pop("workers", 2 if cluster else 1)
    members = more.pop("members", 0)
    mode = more.pop("mode", "sync" if cluster else "single")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([name for name in PRELOADED if importlib.util.find_spec(name.split(".")[0])])
    begun = []
    ports: set[int] = set()
    for number in range(count * (members or 1)):
        rank = number // (members or 1)
        if members and number % members == 0:
            ports.add(port := free_port(taken=ports))
        here, there = context.Pipe(duplex=False)
        variables = {"PS_MODE": mode, "PS_RANK": str(rank), "PS_WORLD_SIZE": str(count), "PS_LOCAL_RANK": str(number)}
        if members:  # as `ps-worker run --group` tells them
            place = {"RANK": str(number % members), "WORLD_SIZE": str(members), "LOCAL_RANK": str(number)}
            variables |= place | {"PS_GROUP_SIZE": str(members), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        if cluster is not None:
            variables |= {"PS_SERVER": cluster.address, "PS_JOB": job[-100:], "PS_METRICS_HOST": "127.0.0.1"}
        process = context.Process(target=_work, args=(there, variables, module, function, arguments, more), daemon=True)
        process.start()
        there.close()
        begun.append((process, here))
    try:
        found = [_result(here) for _, here in begun]
    finally:
        for process, here in begun:
            here.close()
            process.join(0 if process.exitcode is not None else 10)
            process.kill()
    return found


def close(found: Weights, expected: Weights, within: float = 1e-5) -> bool:
    """Whether all weights are equal but for rounding."""
    return all(abs(a - b) < within for x, y in zip(found, expected, strict=True) for a, b in zip(x, y, strict=True))


def _result(here: Connection) -> Any:
    assert here.poll(SECONDS), "a worker gave no result in time"
    error, result = here.recv()
    assert error is None, error
    return result


def _work(
    there: Connection,
    variables: Mapping[str, str],
    module: str,
    function: str,
    arguments: tuple[Any, ...],
    more: dict[str, Any],
) -> None:
    os.environ |= {**variables, "HF_HUB_OFFLINE": "1"}
    import torch

    torch.set_num_threads(1)
    try:
        result = getattr(importlib.import_module(f"tests.scripts.{module}"), function)(*arguments, **more)
    except BaseException:
        there.send((traceback.format_exc(), None))
    else:
        there.send((None, result))
    atexit._run_exitfuncs()  # sessions leave their jobs; a process of multiprocessing ends without this
