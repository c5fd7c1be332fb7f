"""The command `ps-worker`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from ps_protocol.errors import InvalidRequest, PSError
from ps_protocol.modes import check_quorum, parse_mode
from ps_protocol.pieces import MAX_GROUP_SIZE
from ps_runtime import logs
from ps_runtime.command_line import CommandLine
from ps_runtime.completion import add_completion, script
from ps_runtime.logs import Speaker
from ps_runtime.settings import Setting, as_variables, count, index, path, port_number, unknown_variables
from ps_runtime.version import version
from ps_worker.config import SETTINGS, rule_of
from ps_worker.launch_server_settings import SERVER_SETTINGS, servers_plan, starts_servers

if TYPE_CHECKING:
    from ps_launch.worker_launch import Launch

USAGE = "ps-worker run [options] SCRIPT [ARGUMENTS ...]\n       ps-worker run [options] -m MODULE [ARGUMENTS ...]"


def ranks(text: str) -> str:
    """Checks a text of ranks, with commas between them."""
    for word in text.split(","):
        try:
            index(word.strip())
        except argparse.ArgumentTypeError:
            raise argparse.ArgumentTypeError(f"expected ranks with commas between, as 0 or 0,3, got {text!r}") from None
    return text


# Settings for the launcher only, which its workers do not need.
LAUNCH_SETTINGS = (
    Setting("workers", "how many workers to start here", count, 1, "N"),
    Setting("group", "start each worker as a group of so many processes, as FSDP2 needs", count, metavar="N"),
    Setting("first_rank", "rank of the first worker here", index, 0, "R"),
    Setting("max_restarts", "how often, in all, a worker that fails is started again", index, 0),
    Setting("stop_on_failure", "a worker that fails, and is not started again, ends the others too", bool),
    Setting("log_dir", "also write what worker R says to DIR/worker-R.log", path, metavar="DIR"),
    Setting("show_ranks", "show the output of these alone, as 0 or 0,3; of others when they fail", ranks, metavar="R"),
)

_OF_REPORTS = frozenset({"server", "job", "tls_cert", "tls_key", "tls_ca", "token_file", "insecure"})


def parser() -> CommandLine:
    """Returns the command line of ps-worker."""
    root = CommandLine(
        prog="ps-worker",
        description="Starts worker processes that train a script on a parameter server, with DDP, or alone; with "
        "--shards, the servers too. "
        "Each flag has the PS_* variable that its help names.",
    )
    root.add_argument("--version", action="version", version=f"ps-worker {version()}")
    text = "start workers on this machine, like torchrun, and servers if asked to"
    run = root.add_command("run", text, USAGE, *LAUNCH_SETTINGS, *SETTINGS)
    servers = run.add_argument_group("servers of its own")
    run.add_settings(*SERVER_SETTINGS, group=servers)
    servers.add_argument("--port", type=port_number, metavar="PORT", help="where they listen [default: any free port]")
    run.add_argument("-m", "--module", action="store_true", help="SCRIPT is a module's name, as in python -m")
    run.add_argument("script", metavar="SCRIPT", help="a Python file")
    run.add_argument("arguments", nargs=argparse.REMAINDER, metavar="ARGUMENTS", help="are handed to the script")
    text = "print the settings of `run`, and where each is from"
    config = root.add_command("config", text, "ps-worker config [run [options]]")
    config.add_argument("words", nargs=argparse.REMAINDER, metavar="run", help="and its options")
    add_completion(root)
    report = root.add_command(
        "report",
        "say that a worker's process has ended, as its launcher has seen",
        "ps-worker report --server HOST:PORT --launch NAME --pid PID [options]",
        *(setting for setting in SETTINGS if setting.name in _OF_REPORTS),
    )
    report.add_argument("--launch", required=True, metavar="NAME", help="its PS_LAUNCH_ID")
    report.add_argument("--pid", type=count, required=True, help="its process id")
    report.add_argument("--host", metavar="NAME", help="the host name that it saw [default: this host's]")
    root.add_command(
        "await-end",
        "wait until a job has ended",
        "ps-worker await-end --server HOST:PORT [options]",
        *(setting for setting in SETTINGS if setting.name in {*_OF_REPORTS, "connect_timeout"}),
    )
    return root


def ask(arguments: argparse.Namespace) -> str:
    """Runs a command that calls the coordinator; returns the result as text. Raises PSError."""
    from ps_runtime.credentials import access_of
    from ps_worker.cluster.launcher_reports import await_job_end, report_worker_end

    if not arguments.server:
        raise InvalidRequest(f"{arguments.command} needs --server HOST:PORT")
    allowed = access_of(arguments)
    if arguments.command == "await-end":
        ended = await_job_end(arguments.server, arguments.job, arguments.connect_timeout, allowed)
        return f"job {arguments.job} is over" if ended else f"the coordinator at {arguments.server} is gone"
    who = arguments.job, arguments.launch, arguments.pid, arguments.host
    ranks = report_worker_end(arguments.server, *who, access=allowed)
    return f"taken off: worker {', '.join(map(str, ranks))}" if ranks else "no worker of that process was live"


def launch_of(arguments: argparse.Namespace) -> Launch:
    """Returns the launch of a command line. Raises InvalidRequest for flags that contradict each other."""
    from ps_launch.worker_launch import Launch
    from ps_runtime.credentials import access_of

    with_servers = starts_servers(arguments)
    mode = arguments.mode or ("sync" if arguments.server or with_servers else "single")
    workers, first = arguments.workers, arguments.first_rank
    nodes = arguments.nnodes if arguments.shards_with_workers else 1
    if nodes > 1:
        first = arguments.node_rank * workers
    _check(arguments, mode, with_servers)
    world_size = nodes * workers if nodes > 1 else arguments.world_size or first + workers
    if first + workers > world_size:
        raise InvalidRequest(f"ranks {first} to {first + workers - 1} do not fit into --world-size {world_size}")
    rule = rule_of(mode, arguments.quorum, arguments.quorum_grace)
    if rule is not None and not arguments.elastic:
        check_quorum(rule, world_size)
    # Checked before the workers check it, so that one line reports the error for all of them.
    access_of(arguments)
    settings = as_variables(SETTINGS, arguments)
    if mode != "single" or world_size > 1:
        settings["PS_MODE"] = mode  # otherwise a worker finds the same, and knows that it was not asked for
    return Launch(
        command=(*(["-m"] if arguments.module else []), arguments.script, *arguments.arguments),
        workers=workers,
        first_rank=first,
        world_size=world_size,
        elastic=arguments.elastic,
        mode=mode,
        settings=settings,
        max_restarts=arguments.max_restarts,
        log_dir=arguments.log_dir,
        show_ranks=None if arguments.show_ranks is None else {int(rank) for rank in arguments.show_ranks.split(",")},
        stop_on_failure=arguments.stop_on_failure,
        servers=servers_plan(arguments) if with_servers else None,
        group_size=arguments.group or 0,
    )


def _check(arguments: argparse.Namespace, mode: str, with_servers: bool) -> None:
    """Raises InvalidRequest for a mode that contradicts other flags, or a script that does not exist."""
    if parse_mode(mode) is not None and not arguments.server and not with_servers:
        raise InvalidRequest(f"mode {mode} needs --server HOST:PORT, or --shards N for servers that are started here")
    if not arguments.module and not Path(arguments.script).is_file():
        raise InvalidRequest(f"there is no script {arguments.script}")
    if mode == "single" and arguments.workers > 1:
        raise InvalidRequest(
            f"mode single is one worker, got --workers {arguments.workers}: more need --shards N, --server HOST:PORT, "
            "or --mode ddp"
        )
    if mode == "ddp" and arguments.max_restarts:
        raise InvalidRequest(
            "--max-restarts does not work with --mode ddp, because a DDP worker cannot come back alone; "
            "use torchrun, which restarts all workers"
        )
    if arguments.group is not None:
        _check_group(arguments, mode)


def _check_group(arguments: argparse.Namespace, mode: str) -> None:
    """Raises InvalidRequest if workers of several processes contradict other flags."""
    if mode == "ddp":
        raise InvalidRequest("mode ddp has workers of one process: leave --group out, and count them by --workers")
    if arguments.elastic:
        raise InvalidRequest("an elastic job has workers of one process: leave --elastic or --group out")
    if arguments.group > MAX_GROUP_SIZE:
        raise InvalidRequest(f"--group is up to {MAX_GROUP_SIZE} processes a worker, got {arguments.group}")


def main() -> NoReturn:
    """Runs the command and exits with its code."""
    from ps_launch.worker_launch import launch

    arguments = parser().read()
    speaker, kind = Speaker("ps-worker"), getattr(arguments, "log_format", logs.TEXT)
    try:
        unknown = unknown_variables()
        if unknown:
            print(logs.line_of(speaker, unknown, kind), file=sys.stderr, flush=True)
        if arguments.command == "config":
            print(parser().settings_of(arguments.words or ["run"]))
            sys.exit(0)
        if arguments.command == "completion":
            print(script(parser(), arguments.shell), end="")
            sys.exit(0)
        if arguments.command in ("report", "await-end"):
            print(f"ps-worker: {ask(arguments)}")
            sys.exit(0)
        sys.exit(launch(launch_of(arguments)))
    except PSError as error:
        sys.exit(logs.line_of(speaker, str(error), kind))
    except KeyboardInterrupt:
        sys.exit(130)
