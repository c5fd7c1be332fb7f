"""Parameter servers on Ray: for Ray Train, and for plain actors and Tune. Needs the extra `ray`.

    trainer = DataParallelTrainer(train, backend_config=PsConfig(shards=2, mode="ssp:4"), ...)  # Ray Train

    with ParameterServer(shards=2) as servers:                                                  # plain actors, Tune
        settings = servers.settings(mode="ssp:4")
        ray.get([train.remote(settings) for _ in range(8)])         # train begins with settings.apply()

    ActorGroups(servers, settings, start, groups=2, members=2).run(lambda actor: actor.train.remote())  # groups

deployment.py What travels between the processes: what servers to start, what a worker is told, which process it is
actors.py    The coordinator and a shard, each an actor of Ray that has one server process
server_actors.py `ParameterServer`: the actors of one cluster, and where Ray puts them
actor_groups.py `ActorGroups`: groups of actors; each group is one worker
train.py     `PsConfig`: the backend for Ray Train
"""

from typing import TYPE_CHECKING, Any

from ps_worker.ray.actor_groups import ActorGroups
from ps_worker.ray.deployment import WorkerProcess, WorkerSettings
from ps_worker.ray.server_actors import ParameterServer

if TYPE_CHECKING:
    from ps_worker.ray.train import PsConfig

__all__ = ["ActorGroups", "ParameterServer", "PsConfig", "WorkerProcess", "WorkerSettings"]


def __getattr__(name: str) -> Any:
    """Imports Ray Train, and pandas with it, when its backend is first used: plain actors run without them."""
    if name == "PsConfig":
        from ps_worker.ray.train import PsConfig

        return PsConfig
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
