"""The settings of servers that `ps-worker run` starts, and the options that their `ps-server up` gets."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from ps_protocol.errors import InvalidRequest
from ps_runtime.own_address import own_address
from ps_runtime.settings import Setting, count, environment, index
from ps_worker.config import SETTINGS

if TYPE_CHECKING:
    from ps_launch.own_servers import ServersPlan

# Their names are those of `ps-server up`, which reads the values. --port has no variable: Kubernetes sets PS_PORT for a
# Service that is called ps, and a worker has no use for it.
SERVER_SETTINGS = (
    Setting("shards", "start servers here too, of so many shards, and end them after the workers", count, None, "N"),
    Setting("shards_with_workers", "start one shard here, and one beside the workers of each other node", bool),
    Setting("nnodes", "how many nodes there are, each with one launch, with --shards-with-workers", count, 1, "N"),
    Setting("node_rank", "which of them this is, from 0; node 0 has the coordinator, at --server", index, 0, "I"),
    Setting("checkpoint_dir", "where these servers have their checkpoints", metavar="DIR"),
    Setting("checkpoint_every", "how often they make one, as in 100steps or 60s"),
    Setting("restore", "they start jobs from their last checkpoints", bool),
    Setting("server_options", "more options for these servers, as of `ps-server up`, in one text", metavar="TEXT"),
)
_NODES = ("shards", "shards_with_workers", "nnodes", "node_rank")
WITHOUT_SERVERS = ("single", "ddp")
# Settings of a worker about this machine, which its servers need too. Others, such as certificates and ports of
# metrics, differ between processes.
_OF_BOTH = frozenset({"insecure", "metrics_insecure", "shared_directory", "native", "log_format"})


def starts_servers(arguments: argparse.Namespace) -> bool:
    """Returns whether a launch has servers of its own.

    One environment may serve servers and workers: PS_SHARDS alone starts none where the launch needs none. Raises
    InvalidRequest where flags, or a file, contradict each other.
    """
    if arguments.shards_with_workers:
        _check_nodes(arguments)
        return True
    wanted = arguments.shards is not None
    without = arguments.mode in WITHOUT_SERVERS
    if wanted and _is_asked_for(arguments, "shards"):
        if arguments.server:
            origin = arguments.origins["server"]
            raise InvalidRequest(
                f"--shards starts servers here, and {origin} names some elsewhere: give one of the two"
            )
        if without:
            raise InvalidRequest(f"mode {arguments.mode} has no servers: leave --shards out")
        return True
    wanted = wanted and not arguments.server and not without
    names = [setting.name for setting in SERVER_SETTINGS if setting.name not in _NODES]
    stray = [name for name in names if _is_asked_for(arguments, name)] + ["port"] * (arguments.port is not None)
    if stray and not wanted:
        raise InvalidRequest(f"--{stray[0].replace('_', '-')} is for servers that are started here: give --shards too")
    return wanted


def servers_plan(arguments: argparse.Namespace) -> ServersPlan:
    """Returns the plan for starting a launch's servers. Raises InvalidRequest for options that are no list of words."""
    from ps_launch.own_servers import ServersPlan, server_options

    if arguments.shards_with_workers:
        options = _node_options(arguments)
    else:
        options = ["--shards", str(arguments.shards), "--port", str(arguments.port or 0)]
    checkpoints = arguments.checkpoint_dir, arguments.checkpoint_every, arguments.restore
    options += server_options(*checkpoints, arguments.server_options or "", "--server-options")
    given = vars(arguments)
    own = {setting.variable: setting for setting in SETTINGS}
    variables = {name: value for name, value in environment().items() if name not in own}
    shared = {name: setting.written(given[setting.name]) for name, setting in own.items() if setting.name in _OF_BOTH}
    own_variables = {**variables, **{name: text for name, text in shared.items() if text}}
    return ServersPlan(tuple(options), own_variables, shared=arguments.shards_with_workers)


def _check_nodes(arguments: argparse.Namespace) -> None:
    """Raises InvalidRequest for a launch on several machines whose flags do not fit together."""
    if not arguments.server:
        raise InvalidRequest("--shards-with-workers needs --server HOST:PORT, an address of node 0, on each node")
    if arguments.mode in WITHOUT_SERVERS:
        raise InvalidRequest(f"mode {arguments.mode} has no servers: leave --shards-with-workers out")
    if arguments.node_rank >= arguments.nnodes:
        raise InvalidRequest(f"--node-rank is below --nnodes {arguments.nnodes}, got {arguments.node_rank}")
    for name in ("shards", "first_rank", "world_size"):
        if _is_asked_for(arguments, name):
            flag = name.replace("_", "-")
            raise InvalidRequest(f"--{flag} follows from --nnodes and --node-rank: leave it out")


def _node_options(arguments: argparse.Namespace) -> list[str]:
    """Returns the options of the one shard of a node: node 0 has the coordinator too, at the address that all know."""
    host, _, port = arguments.server.rpartition(":")
    rank = arguments.node_rank
    options = ["--shards", str(arguments.nnodes), "--only", str(rank)]
    if rank == 0:  # which may be started again in the middle of the job: the other nodes train on
        resume = ["--resume"] * (arguments.checkpoint_dir is not None)
        return [*options, "--host", host.strip("[]"), "--port", port, *resume]
    where = own_address(arguments.server)
    port = str(arguments.port - rank) if arguments.port else "0"  # shard I listens at it plus I
    return [*options, "--coordinator", arguments.server, "--host", where, "--port", port]


def _is_asked_for(arguments: argparse.Namespace, name: str) -> bool:
    """Whether a flag or a file gives a setting, rather than a variable, which may be meant for other commands."""
    origin = arguments.origins[name]
    return origin.startswith("--") or (bool(arguments.config) and origin == arguments.config)
