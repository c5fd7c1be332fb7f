"""`PsConfig`: Ray Train over parameter servers.

A worker of Ray Train is a replica group of one: when one fails, Ray replaces that worker alone, and this backend has
the coordinator told. Ray calls `on_shutdown` before it restarts all workers too, so servers do not end there: they end
with the run, or are those of a `ParameterServer` and outlive it.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Any

import ray
from ray.train.backend import Backend, BackendConfig

from ps_protocol.errors import InvalidRequest, PSError
from ps_worker.ray.deployment import Deployment, WorkerProcess, WorkerSettings
from ps_worker.ray.server_actors import ParameterServer

log = logging.getLogger("ps_worker")


@contextlib.contextmanager
def _leaving() -> Iterator[None]:
    """A context around a worker's function: when the function returns, the worker leaves its job, as Ray kills the
    process later. A worker that fails is reported.
    """
    from ps_worker.connecting import close_open_sessions

    yield
    close_open_sessions()


class PsConfig(BackendConfig):
    """The backend of a `DataParallelTrainer` whose workers train on parameter servers, with `ps_torch.connect()`.

    Args:
        mode: "sync", "ssp:K" or "async".
        job: The job's name.
        elastic: Whether the coordinator gives out ranks and leases data batch by batch. Otherwise workers have the
            ranks of Ray Train.
        servers: Servers that outlive the run. None: the run starts its own servers and ends them.
        server_settings: The arguments of `ParameterServer` for the run's own servers: shards=4,
            checkpoint_dir="/nfs/run".

    Raises:
        InvalidRequest: Settings contradict each other.
    """

    def __init__(
        self,
        mode: str = "sync",
        job: str = "default",
        elastic: bool = True,
        servers: ParameterServer | None = None,
        **server_settings: Any,
    ) -> None:
        if servers is not None and server_settings:
            raise InvalidRequest(f"servers= has them already: leave out {', '.join(sorted(server_settings))}")
        self.mode, self.job, self.elastic = mode, job, elastic
        self.servers = servers
        self.deployment = Deployment(**server_settings)
        WorkerSettings("", mode, job, elastic, "")  # which refuses a mode without servers

    @property
    def backend_cls(self) -> type[Backend]:
        """Returns the class that Ray Train runs beside its controller."""
        return _PsBackend

    @property
    def train_func_context(self) -> Callable[[], contextlib.AbstractContextManager[None]]:
        """Returns the context around the training function in each worker."""
        return _leaving


class _PsBackend(Backend):
    """Starts servers with the first workers, tells each worker where they are, and reports workers that end."""

    has_replica_groups = True

    def __init__(self) -> None:
        self._servers: ParameterServer | None = None
        self._settings: WorkerSettings | None = None
        self._ended: list[WorkerProcess] = []  # workers that Ray was about to kill

    def on_start(self, worker_group: Any, backend_config: PsConfig) -> None:
        """Sets the variables for `ps_torch.connect()` in starting workers: all of a run, or one that replaces
        another.
        """
        if self._servers is None:
            self._servers = backend_config.servers or ParameterServer.of(backend_config.deployment)
        if self._settings is None:
            self._settings = self._servers.settings(backend_config.mode, backend_config.job, backend_config.elastic)
        # A process that lived when it was reported may have joined again before Ray killed it.
        self._report(self._ended)
        self._ended = []
        places = [worker.distributed_context for worker in worker_group.get_workers()]
        answers = [
            worker.execute_async(self._settings.apply, place.world_rank, place.world_size)
            for worker, place in zip(worker_group.get_workers(), places, strict=True)
        ]
        ray.get(answers)

    def on_shutdown(self, worker_group: Any, backend_config: PsConfig) -> None:
        """Reports workers that failed, or are about to be killed, to the coordinator. Workers that have left are not
        reported.
        """
        settings = self._settings
        if settings is None:
            return
        ended = [
            WorkerProcess(settings.job, settings.launch, worker.metadata.hostname, worker.metadata.pid)
            for worker in worker_group.get_workers()
        ]
        self._report(ended)
        self._ended += ended

    def _report(self, workers: list[WorkerProcess]) -> None:
        """Reports to the coordinator that these worker processes have ended. An error is only logged: without a report
        they count as live until their lease runs out.
        """
        for worker in workers:
            try:
                if self._servers is not None:
                    self._servers.report_end(worker)
            except PSError as error:
                log.warning("the end of worker process %d on %s is not reported: %s", worker.pid, worker.host, error)
