"""A worker's settings: arguments first, then PS_* variables, then a launcher's, then defaults."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ps_protocol.errors import InvalidRequest
from ps_protocol.job import WIRES
from ps_protocol.modes import Consistency, check_quorum, parse_mode, parse_quorum, with_quorum
from ps_runtime.credentials import access
from ps_runtime.launch_id import launch_id
from ps_runtime.logs import log_settings
from ps_runtime.rank import RankOfProcess, find_rank
from ps_runtime.settings import (
    JOB_NAME,
    JOB_SERVER,
    NATIVE,
    SHARED_DIRECTORY,
    Setting,
    access_settings,
    count,
    index,
    one_of,
    port_number,
    seconds,
    seconds_or_none,
)
from ps_worker.cluster.options import JobOptions

TRANSPORTS = ("auto", "shm", "tcp", "grpc")


def mode_name(text: str) -> str:
    """Reads single, ddp, sync, ssp:K, async or local:H."""
    try:
        parse_mode(text)
    except InvalidRequest as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def wire_formats(text: str) -> str:
    """Reads a wire format for both ways, or one for gradients and one for weights with a comma between."""
    names = text.split(",")
    if len(names) > 2 or not set(names) <= set(WIRES):
        raise argparse.ArgumentTypeError(f"expected one of {', '.join(WIRES)}, or two as PUSH,PULL, got {text!r}")
    return text


def quorum_text(text: str) -> str:
    """Returns the text of a quorum, Q or all-N. Raises ArgumentTypeError for another text."""
    try:
        parse_quorum(text)
    except InvalidRequest as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def new_file(text: str) -> Path:
    """Checks the path of a file to write."""
    path = Path(text).absolute()
    if path.is_dir() or not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"expected a file in a directory that is there, got {text!r}")
    return path


MODES = (
    "single, ddp, sync, ssp:K, async, or local:H (as local:8; local:30s: rounds of 30 seconds; local:8/4: in 4 "
    "fragments); sync where there is a server"
)

TIMELINE = Setting("timeline", "record when buckets travel, as a Chrome trace in this file", new_file, metavar="FILE")
TIMELINE_STEPS = Setting("timeline_steps", "how many steps to record", count, 50, "N")

# Every setting of a worker: a flag of `ps-worker run`, which hands it to its workers as a variable, and a keyword of
# `resolve`. One that is a keyword of `connect` too needs to stand in its signature. For log lines a script has Python's
# logging, so `connect` takes neither log_level nor log_format. The wire is a matter of `prepare`, the library for
# tables one of the whole process.
SETTINGS = (
    JOB_SERVER,
    Setting("mode", MODES, mode_name),
    Setting("quorum", "in sync, how many live workers an update waits for: Q, or all-N", quorum_text, metavar="Q"),
    Setting("quorum_grace", "seconds that it then waits for the others; 0 if not given", seconds, metavar="S"),
    JOB_NAME,
    Setting("world_size", "workers of the whole job, if others start elsewhere", count, metavar="W"),
    Setting("elastic", "no fixed world size: ranks are given out, workers come and go", bool),
    Setting("connect_timeout", "seconds to keep trying a server", seconds, 60.0, "S"),
    Setting(
        "start_timeout",
        "seconds to wait until all workers of the job have joined, and all members of a group have come",
        seconds,
        1800.0,
        "S",
    ),
    Setting(
        "group_timeout",
        "seconds without a sign of a member after which the others of its group end, to be started again; 0: never",
        seconds_or_none,
        60.0,
        "S",
    ),
    Setting(
        "step_timeout",
        "seconds for which members of a group wait for one that makes no step, after which they end; 0: never",
        seconds_or_none,
        0.0,
        "S",
    ),
    Setting(
        "busy_seconds",
        "seconds for which a worker counts as live while C code keeps Python's GIL; 0: no longer than the lease",
        seconds_or_none,
        1800.0,
        "S",
    ),
    Setting("metrics_host", "address to serve metrics on; default: the one that faces the server"),
    Setting("metrics_port", "first worker's port of /metrics; 0: any", port_number, 0),
    Setting(
        "transport",
        "auto, shm, tcp or grpc: how buckets travel; auto takes the fastest that there is",
        one_of(*TRANSPORTS),
        TRANSPORTS[0],
    ),
    Setting("wire", "how gradients and weights travel: int4, say, or PUSH,PULL", wire_formats, metavar="FORMAT"),
    SHARED_DIRECTORY,
    NATIVE,
    *access_settings(),
    Setting("metrics_insecure", "serve metrics beyond this machine without TLS", bool),
    Setting("take_over", "replace the live workers of another launch that train this job", bool),
    TIMELINE,
    Setting("timeline_first", "the first step to record, of those that a worker makes", count, 1, "N"),
    TIMELINE_STEPS,
    *log_settings(None),
)
# Settings that differ from worker to worker, and therefore have no flags.
OWN_SETTINGS = (
    Setting("rank", "this worker's rank", index),
    Setting("local_rank", "this worker's number among those of its host", index),
    Setting("group_size", "how many processes its launcher has started as this worker", count),
)


@dataclass(frozen=True, kw_only=True)
class WorkerConfig(JobOptions):
    """All settings of a worker: for its job, and for its process.

    mode:             single, ddp, sync, ssp:K, async or local:H
    mode_given:       whether an argument or PS_MODE gives the mode; otherwise it follows from other settings
    wire:             the wire formats of gradients and weights, if the script names none
    metrics_insecure: metrics may be served beyond this machine without TLS
    log_level:        the lowest level that is logged; None: the script's, or Python's default
    log_format:       text or json: the format of log lines, if the script sets up no logging
    native:           auto or off: whether tables use the library
    timeline:         the file of a timeline; None if there is none. timeline_first, timeline_steps: its first step, and
                      their number
    """

    mode: str
    mode_given: bool
    wire: tuple[str, str]
    local_rank: int
    metrics_host: str | None
    metrics_port: int
    metrics_insecure: bool
    log_level: str | None
    log_format: str
    native: str
    timeline: Path | None
    timeline_first: int
    timeline_steps: int


def resolve(**arguments: object) -> WorkerConfig:
    """Returns the settings from arguments, which have the settings' names, and from the environment.

    Raises InvalidRequest that names an invalid value and its source.
    """
    settings = {setting.name: setting for setting in (*SETTINGS, *OWN_SETTINGS)}
    if unknown := sorted(arguments.keys() - settings.keys()):
        raise TypeError(f"there is no setting {unknown[0]!r}")
    values = {name: setting.find(arguments.get(name)) for name, setting in settings.items()}
    process = find_rank(values["rank"], values["world_size"], values["local_rank"])
    mode, consistency = _mode(values, process)
    rank, world_size = _checked_rank(mode, consistency, values["elastic"], process)
    if consistency is not None:
        check_quorum(consistency, world_size)
    insecure = values["insecure"]
    return WorkerConfig(
        server=values["server"],
        mode=mode,
        consistency=consistency,
        job=values["job"],
        rank=rank,
        world_size=world_size,
        local_rank=process.local_rank,
        connect_timeout=values["connect_timeout"],
        start_timeout=values["start_timeout"],
        group_timeout=values["group_timeout"],
        step_timeout=values["step_timeout"],
        busy_seconds=values["busy_seconds"],
        metrics_host=values["metrics_host"],
        metrics_port=values["metrics_port"],
        transport=values["transport"],
        shared_directory=values["shared_directory"],
        access=access(values["tls_cert"], values["tls_key"], values["tls_ca"], values["token_file"], insecure),
        metrics_insecure=insecure or values["metrics_insecure"],
        log_level=values["log_level"],
        log_format=values["log_format"],
        native=values["native"],
        timeline=values["timeline"],
        timeline_first=values["timeline_first"],
        timeline_steps=values["timeline_steps"],
        mode_given=values["mode"] is not None,
        wire=wires(values["wire"] or "float32"),
        launch=launch_id(world_size, values["take_over"]),
        group_size=values["group_size"] or 0,
    )


def wires(text: str) -> tuple[str, str]:
    """Returns the wire formats of gradients and of weights that a value of the setting stands for."""
    gradients, _, weights = text.partition(",")
    return gradients, weights or gradients


def rule_of(mode: str, quorum: str | None, grace: float | None) -> Consistency | None:
    """Returns the rule of a mode with a quorum. Raises InvalidRequest if the mode has no quorum, or the values are
    invalid.
    """
    return with_quorum(mode, parse_mode(mode), None if quorum is None else parse_quorum(quorum), grace or 0.0)


def _mode(values: dict[str, Any], process: RankOfProcess) -> tuple[str, Consistency | None]:
    """Returns the given mode, or the one that follows from other settings, and its rule."""
    several = not values["elastic"] and (process.world_size or 1) > 1
    mode: str = values["mode"] or ("sync" if values["server"] else "ddp" if several else "single")
    consistency = rule_of(mode, values["quorum"], values["quorum_grace"])
    if consistency is not None and values["server"] is None:
        raise InvalidRequest(f"mode {mode} needs a server: connect(server='HOST:PORT'), PS_SERVER, or --server")
    return mode, consistency


def _checked_rank(
    mode: str, consistency: Consistency | None, elastic: bool, process: RankOfProcess
) -> tuple[int | None, int]:
    """Returns the rank and the number of workers: None and 0 in an elastic job."""
    if mode == "single":
        return 0, 1
    if elastic:
        if consistency is None:
            raise InvalidRequest(f"an elastic job needs a server; mode {mode} has a fixed world size")
        return None, 0
    if process.missing is not None:
        raise InvalidRequest(process.missing)
    world_size = 1 if process.world_size is None else process.world_size
    if process.rank is None and world_size > 1:
        raise InvalidRequest(f"world_size is {world_size}, but no rank was given (rank=, PS_RANK or RANK)")
    rank = process.rank or 0
    if not 0 <= rank < world_size:
        raise InvalidRequest(f"rank must be from 0 to world_size - 1 = {world_size - 1}, got {rank}")
    return rank, world_size
