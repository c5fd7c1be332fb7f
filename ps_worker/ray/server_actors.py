"""`ParameterServer`: a coordinator and shards as actors of Ray, their nodes, and their end."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from ps_launch.own_servers import STOP_SECONDS
from ps_protocol.errors import InvalidRequest, PSError
from ps_runtime.credentials import is_loopback
from ps_runtime.free_ports import free_port
from ps_runtime.launch_id import new_launch_id
from ps_runtime.quantities import counted, size_text
from ps_worker.config import SETTINGS
from ps_worker.ray.actors import CoordinatorActor, ServerPlan, ShardActor
from ps_worker.ray.deployment import SERVER, WORKER, Certificates, Deployment, WorkerProcess, WorkerSettings

log = logging.getLogger("ps_worker")

PLACE_SECONDS = 60.0  # the time for Ray to find nodes with room for the shards
START_SECONDS = 120.0  # the time for servers to start: nodes import torch, some for the first time
SHARDS_STOP_SECONDS = 60.0  # for the end of the shards
ANSWER_SECONDS = 10.0  # for an actor to say how its server has ended
CALLS = 8  # to the coordinator's actor at a time
_GIVEN = frozenset({"server", "mode", "job", "elastic", "tls_cert", "tls_key", "tls_ca", "token_file", "insecure"})


class ParameterServer:
    """Servers on a Ray cluster: a coordinator on this node, and shards on as many nodes as possible.

    The servers outlive all workers, and Ray starts a server that ends again. As a context manager it stops them in
    order at the end of the block.

    Args:
        shards: The number of shards. Ray places each on a different node if it can (SPREAD).
        checkpoint_dir: The directory of checkpoints, on storage that all nodes share. Without it a job ends when a
            shard is lost.
        checkpoint_every: The interval of checkpoints, such as "100steps" or "60s".
        restore: Whether jobs begin from their last checkpoints.
        server_options: More options of `ps-server shard`, in one text: "--lease 30 --keep 5".
        certificates: A directory on this machine with ca.pem, server.pem, server.key, worker.pem, worker.key and roles,
            as `ps-server dev-certs` makes it. The contents travel to the nodes as arguments of actors.
        insecure: Whether servers without certificates may listen beyond this machine: all traffic is then plaintext.
        resources_per_shard: Resources that Ray reserves for each shard: {"CPU": 1, "memory": 8e9}.

    Raises:
        InvalidRequest: Settings contradict each other.
        PSError: The servers do not start.
    """

    def __init__(
        self,
        shards: int = 2,
        *,
        checkpoint_dir: str | None = None,
        checkpoint_every: str | None = None,
        restore: bool = False,
        server_options: str = "",
        certificates: str | None = None,
        insecure: bool = False,
        resources_per_shard: Mapping[str, float] | None = None,
    ) -> None:
        files = checkpoint_dir, checkpoint_every, restore
        access = certificates, insecure
        self._start(Deployment(shards, *files, server_options, *access, resources_per_shard))

    @classmethod
    def of(cls, deployment: Deployment) -> ParameterServer:
        """Returns the servers that a deployment describes. Raises as the constructor does."""
        servers = cls.__new__(cls)
        servers._start(deployment)
        return servers

    def _start(self, deployment: Deployment) -> None:
        self._insecure = deployment.insecure
        self._of_workers, own = deployment.held_by(WORKER), deployment.held_by(SERVER)
        self._launch = new_launch_id()
        options = deployment.options()
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        find = ray.remote(num_cpus=0, scheduling_strategy=here)(free_address)
        self.address: str = ray.get(find.remote())
        host = self.address.rpartition(":")[0]
        if not (is_loopback(host) or own is not None or deployment.insecure):
            raise InvalidRequest(
                f"servers listen at {host}, beyond this machine: "
                "give certificates, or insecure=True if the network is trusted"
            )
        self._group = placement_group([deployment.resources] * deployment.shards, strategy="SPREAD")
        self._coordinator: Any = None
        self._shards: list[Any] = []
        try:
            if not self._group.wait(PLACE_SECONDS):
                raise PSError(_no_room(deployment))
            self._coordinator = self._start_coordinator(deployment, here, options, own)
            self._await([self._coordinator.is_ready.remote()])
            for index in range(deployment.shards):
                words = "shard", "--index", str(index), "--coordinator", self.address, *options
                self._shards.append(self._start_shard(index, deployment, ServerPlan(words, (), own)))
            self._await([shard.address.remote() for shard in self._shards])
        except BaseException:
            self._kill()
            raise

    def _start_coordinator(
        self, deployment: Deployment, here: Any, options: tuple[str, ...], own: Certificates | None
    ) -> Any:
        host, _, port = self.address.rpartition(":")
        words = "coordinator", "--shards", str(deployment.shards), "--host", host.strip("[]"), "--port", port, *options
        resume = ("--resume",) if deployment.checkpoint_dir is not None else ()
        return (
            ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1, max_concurrency=CALLS)(CoordinatorActor)
            .options(name=self._launch, scheduling_strategy=here)
            .remote(ServerPlan(words, resume, own), self.address, self._insecure)
        )

    def _start_shard(self, index: int, deployment: Deployment, plan: ServerPlan) -> Any:
        resources = deployment.resources
        return (
            ray.remote(max_restarts=-1, max_task_retries=-1)(ShardActor)
            .options(
                num_cpus=resources.pop("CPU", 0),
                num_gpus=resources.pop("GPU", 0),
                memory=resources.pop("memory", None),
                resources=resources,
                scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=index),
            )
            .remote(plan, index, self._launch)
        )

    def _await(self, answers: Sequence[Any]) -> None:
        """Waits for actors that start. Raises PSError with the reason of the first that does not."""
        try:
            ray.get(answers, timeout=START_SECONDS)
        except ray.exceptions.GetTimeoutError:
            raise PSError(f"the servers are not ready after {START_SECONDS:g} s; Ray's log says why") from None
        except ray.exceptions.RayError as error:
            raise PSError(error_text(error)) from None

    def settings(
        self, mode: str = "sync", job: str = "default", elastic: bool = True, **more: object
    ) -> WorkerSettings:
        """Returns the settings of a job's workers. Each worker begins with `settings.apply()`, then
        `ps_torch.connect()`.

        Args:
            mode: "sync", "ssp:K" or "async".
            job: The job's name. Jobs of one cluster are separate, so each trial of Tune has its own.
            elastic: Whether ranks are given out and workers come and go. Otherwise each worker calls `apply(rank,
                world_size)`.
            more: Other settings of a worker, such as start_timeout=60.

        Raises:
            InvalidRequest: A setting is unknown or out of range.
        """
        known = {setting.name: setting for setting in SETTINGS if setting.name not in _GIVEN}
        unknown = sorted(more.keys() - known.keys())
        if unknown:
            raise InvalidRequest(
                f"there is no setting {unknown[0]!r} of a worker; there are {', '.join(sorted(known))}"
            )
        for name, value in more.items():
            known[name].find(value)
        access = self._of_workers, self._insecure
        texts = {name: known[name].written(value) for name, value in more.items()}
        return WorkerSettings(self.address, mode, job, elastic, self._launch, *access, texts)

    def report_end(self, worker: WorkerProcess) -> tuple[int, ...]:
        """Reports that a worker's process has ended, so that other workers no longer wait for it.

        Args:
            worker: The value that `settings.apply()` returned in that process.

        Returns:
            The ranks that were removed; none if the worker had left already.

        Raises:
            PSError: The coordinator does not answer, or the servers were stopped.
        """
        ranks: tuple[int, ...] = self._ask(self._actor().worker_has_ended.remote(worker))
        return ranks

    def status(self) -> dict[str, Any]:
        """Returns the status that `ps-server status --json` prints. Raises PSError."""
        status: dict[str, Any] = self._ask(self._actor().status.remote())
        return status

    def stop(self) -> None:
        """Stops the coordinator, which makes last checkpoints first, and then the shards. Further calls do nothing.

        Ctrl-C ends the wait for last checkpoints: all servers are then killed.
        """
        if self._coordinator is None:
            return
        try:
            _stop("the coordinator (last checkpoints may be missing)", [self._coordinator], STOP_SECONDS)
            _stop("a shard", self._shards, SHARDS_STOP_SECONDS)
        finally:
            self._kill()

    def _kill(self) -> None:
        actors = [actor for actor in (*self._shards, self._coordinator) if actor is not None]
        self._shards, self._coordinator = [], None
        for end in (*(partial(ray.kill, actor) for actor in actors), partial(remove_placement_group, self._group)):
            with suppress(Exception):  # Ray was shut down meanwhile, and has ended it
                end()

    def _actor(self) -> Any:
        """Returns the coordinator's actor. Raises PSError if there is none any more."""
        if self._coordinator is None:
            raise PSError("the servers were stopped")
        return self._coordinator

    def _ask(self, answer: Any) -> Any:
        try:
            return ray.get(answer, timeout=START_SECONDS)
        except ray.exceptions.GetTimeoutError:
            raise PSError(f"the coordinator's actor does not answer in {START_SECONDS:g} s") from None
        except ray.exceptions.RayError as error:
            raise PSError(error_text(error)) from None

    def __enter__(self) -> ParameterServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def _stop(which: str, actors: Sequence[Any], seconds: float) -> None:
    """Stops the servers of some actors. Warns if one does not end in time, or in order. which: one of them, in words"""
    stops = [actor.stop.remote(seconds) for actor in actors]
    ended, late = ray.wait(stops, num_returns=len(stops), timeout=seconds + ANSWER_SECONDS)
    in_time = not late
    for answer in ended:
        try:
            in_time = ray.get(answer) and in_time
        except ray.exceptions.RayError as error:
            log.warning("%s was not stopped in order: %s", which, error_text(error))
    if not in_time:
        log.warning("%s did not end within %g s and was killed", which, seconds)


def asked_status(servers: ParameterServer) -> Any:
    """Returns Ray's reference to what `servers.status()` returns, without waiting for it. Raises PSError if the servers
    were stopped.
    """
    return servers._actor().status.remote()


def free_address() -> str:
    """Returns an unused address of this node: for the coordinator, which keeps it, and for the members of a group."""
    host = ray.util.get_node_ip_address()
    return f"[{host}]:{free_port(host)}" if ":" in host else f"{host}:{free_port(host)}"


def _no_room(deployment: Deployment) -> str:
    """Returns the text of an error: which resources are requested, how much the cluster has, and what to change."""
    asked, there, free = deployment.resources, ray.cluster_resources(), ray.available_resources()

    def text(kind: str, amount: float) -> str:
        return size_text(int(amount)) if kind == "memory" else f"{amount:g}"

    each = ", ".join(f"{kind} {text(kind, amount)}" for kind, amount in asked.items())
    has = ", ".join(f"{kind} {text(kind, there.get(kind, 0))} ({text(kind, free.get(kind, 0))} free)" for kind in asked)
    return (
        f"Ray has no room for {counted(deployment.shards, 'shard')} with {each} each: it has {has}; "
        "ask for fewer shards, or for less in resources_per_shard, or add nodes"
    )


def error_text(error: Exception) -> str:
    """Returns an actor's own error message, out of the trace in which Ray wraps it."""
    cause = getattr(error, "cause", None)
    text = str(cause if cause is not None else error).strip()
    _, mark, own = text.rpartition("PSError: ")
    return own if mark else text or type(cause or error).__name__
