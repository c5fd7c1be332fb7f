"""The coordinator and a shard, each an actor of Ray that has one server process.

An actor lives as long as its process: when the process ends, so does the actor, and Ray starts it again; when the actor
is killed, the process notices that its standard input closes, and ends. Ray is the only supervisor, so there is one way
back from every failure: `__init__` runs again. A shard that comes back tells the coordinator's actor, which knows the
process that the shard had before, and reports its end.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

from ps_launch.one_server import OneServer
from ps_launch.restarts import ShardRestarts
from ps_protocol.errors import NotFound, PSError, TryLater
from ps_runtime.background import start
from ps_runtime.credentials import access
from ps_runtime.own_program import own_program
from ps_runtime.settings import environment
from ps_worker.cluster.launcher_reports import report_shard_end, report_worker_end
from ps_worker.ray.deployment import Certificates, WorkerProcess

LOOK_SECONDS = 1.0  # a server that is not ready is looked after so often
STATUS_SECONDS = 30.0
_HIDDEN = ("PS_", "RAY_TRAIN_")  # variables of the actor's process that are not meant for a server


@dataclass(frozen=True)
class ServerPlan:
    """The command line of the process of one actor.

    arguments: the command of `ps-server` and its options; the same each time
    again:     further options for a process that replaces an earlier one
    """

    arguments: tuple[str, ...]
    again: tuple[str, ...] = ()
    certificates: Certificates | None = None


class _ServerActor:
    """An actor with one server process. `addresses`: see ServerProcess.await_ready."""

    def __init__(self, plan: ServerPlan, meanwhile: Callable[[], object] = lambda: None) -> None:
        """Returns when the server is ready.

        meanwhile: called now and then until the server is ready
        Raises PSError with the server's own words if the first process of this actor does not start.
        """
        self._files = plan.certificates.unpack() if plan.certificates is not None else {}
        self._is_wanted = True
        is_first = not ray.get_runtime_context().was_current_actor_reconstructed
        restarts = ShardRestarts()
        while True:
            self._server = OneServer([*plan.arguments, *(() if is_first else plan.again)], self._environment())
            addresses = self._await_ready(meanwhile)
            if addresses is not None:
                break
            if is_first:
                raise PSError(f"ps-server {plan.arguments[0]} does not start: {self._server.last_words()}")
            # A resource that it needs, such as its port, may still be in use by the old process.
            threading.Event().wait(restarts.after(0.0))
        self.addresses = addresses
        try:
            start(threading.Thread(target=self._end_with_server, name="server's end", daemon=True))
        except TryLater:  # nothing would end the actor with it
            self.stop(0.0)
            raise

    def _await_ready(self, meanwhile: Callable[[], object]) -> dict[str, str] | None:
        while not self._server.has_ended():
            meanwhile()
            addresses = self._server.await_ready(LOOK_SECONDS)
            if addresses is not None:
                return addresses
        return None

    def _environment(self) -> dict[str, str]:
        own = {name: text for name, text in environment().items() if not name.startswith(_HIDDEN)}
        return {**own, **self._files}

    def _end_with_server(self) -> None:
        code = self._server.await_end()
        if self._is_wanted:
            print(f"ps-server (process {self._server.pid}) ended with code {code}", file=sys.stderr, flush=True)
            os._exit(1)  # to Ray this is a crash, so it restarts this actor

    def stop(self, seconds: float) -> bool:
        """Ends the server in order, and kills it after `seconds`. Returns whether it has ended by itself. The actor has
        no server afterwards, and must be killed.
        """
        self._is_wanted = False
        return self._server.stop(seconds)


class CoordinatorActor(_ServerActor):
    """The coordinator's actor. It also reports ended processes to the coordinator, as Ray notices them, and knows the
    process of each shard.
    """

    def __init__(self, plan: ServerPlan, address: str, insecure: bool) -> None:
        self._address = address
        self._processes: dict[int, int] = {}  # by shard, the process that was last ready
        self._insecure = insecure
        super().__init__(plan)
        files = (self._files.get(name) for name in ("PS_TLS_CERT", "PS_TLS_KEY", "PS_TLS_CA"))
        cert, key, ca = (Path(name) if name else None for name in files)
        self._access = access(cert, key, ca, None, insecure)

    def is_ready(self) -> bool:
        """Returns True: this actor's `__init__` is over."""
        return True

    def shard_is_ready(self, index: int, process: int) -> None:
        """Records a shard's process."""
        self._processes[index] = process

    def shard_has_ended(self, index: int) -> bool:
        """Reports that a shard's process has ended; returns whether it was the shard until now."""
        process = self._processes.get(index)
        return process is not None and report_shard_end(self._address, index, process, self._access)

    def worker_has_ended(self, worker: WorkerProcess) -> tuple[int, ...]:
        """Reports that a worker's process has ended; returns the removed ranks, none if the job has ended.

        Raises PSError.
        """
        who = worker.job, worker.launch, worker.pid, worker.host
        with contextlib.suppress(NotFound):
            return report_worker_end(self._address, *who, access=self._access)
        return ()

    def status(self) -> dict[str, Any]:
        """Returns the cluster's status, as `ps-server status --json` prints it. Raises PSError with the command's
        error.
        """
        command = [sys.executable, *own_program("ps_server", "status", "--json", "--server", self._address)]
        variables = {name: text for name, text in self._environment().items() if name != "PS_TOKENS"}
        done = subprocess.run(
            [*command, *["--insecure"] * self._insecure],
            env=variables,
            capture_output=True,
            text=True,
            timeout=STATUS_SECONDS,
            check=False,
        )
        if done.returncode:
            raise PSError(done.stderr.strip().removeprefix("ps-server: "))
        found: dict[str, Any] = json.loads(done.stdout)
        return found


class ShardActor(_ServerActor):
    """A shard's actor. It is started again where Ray puts it, at any port."""

    def __init__(self, plan: ServerPlan, index: int, coordinator: str) -> None:
        """Returns when the coordinator knows the shard.

        plan:        without the address to listen at: it is this node's
        coordinator: the name of its actor. A handle would be an object of the driver's that Ray might lose
        """
        self._index, self._coordinator = index, ray.get_actor(coordinator)
        host = ray.util.get_node_ip_address()
        here = ServerPlan((*plan.arguments, "--host", host, "--port", "0"), plan.again, plan.certificates)
        # A report that comes before the old process has ended has no effect. So it is repeated.
        super().__init__(here, meanwhile=self._report_predecessor)
        self._tell(self._coordinator.shard_is_ready, index, int(self.addresses["process"]))

    def address(self) -> str:
        """Returns the shard's address."""
        return self.addresses["address"]

    def _report_predecessor(self) -> None:
        if ray.get_runtime_context().was_current_actor_reconstructed:
            self._tell(self._coordinator.shard_has_ended, self._index)

    def _tell(self, method: Any, *arguments: int) -> None:
        """Calls the coordinator's actor. Without its answer a shard's end is noticed, only later."""
        with contextlib.suppress(ray.exceptions.RayError, PSError):
            ray.get(method.remote(*arguments), timeout=STATUS_SECONDS)
