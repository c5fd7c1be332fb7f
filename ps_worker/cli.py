"""The command `ps-worker`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import NoReturn

from ps_protocol.errors import InvalidRequest, PSError
from ps_protocol.modes import parse_mode
from ps_protocol.settings import add_access_settings, add_setting, count, host_port, index, port_number, seconds
from ps_worker.config import TRANSPORTS


def parser() -> argparse.ArgumentParser:
    """The command line of ps-worker."""
    root = argparse.ArgumentParser(
        prog="ps-worker",
        description="Starts worker processes that train a script on a parameter server, with DDP, or alone. "
        "Each flag has the PS_* variable that its help names.",
    )
    commands = root.add_subparsers(dest="command", required=True, metavar="COMMAND")
    run = commands.add_parser(
        "run",
        help="start workers on this machine, like torchrun",
        usage="ps-worker run [options] SCRIPT [ARGUMENTS ...]",
    )
    add_setting(run, "--server", "the coordinator; not needed for single and ddp", kind=host_port, metavar="HOST:PORT")
    add_setting(run, "--workers", "how many workers to start here", default=1, kind=count, metavar="N")
    add_setting(run, "--mode", "single, ddp, sync, ssp:K or async; sync where there is a server", kind=_mode)
    add_setting(run, "--job", "the job's name", default="default", metavar="NAME")
    add_setting(run, "--world-size", "workers of the whole job, if others start elsewhere", kind=count, metavar="W")
    add_setting(run, "--first-rank", "rank of the first worker here", default=0, kind=index, metavar="R")
    add_setting(run, "--elastic", "no fixed world size: ranks are given out, workers come and go", kind=bool)
    add_setting(run, "--take-over", "replace the live workers of another launch that train this job", kind=bool)
    add_setting(run, "--max-restarts", "how often, in all, a worker that fails is started again", default=0, kind=index)
    add_setting(run, "--connect-timeout", "seconds to keep trying a server", default=60.0, kind=seconds, metavar="S")
    add_setting(run, "--metrics-host", "address to serve metrics on; default: the one that faces the server")
    add_setting(run, "--metrics-port", "first worker's port of /metrics; 0: any", default=0, kind=port_number)
    add_setting(run, "--transport", "auto, shm or grpc: shared memory with shards on this host", default="auto")
    add_setting(run, "--shared-directory", "where memory is shared as files if it must be", default="/dev/shm")
    add_access_settings(run)
    add_setting(run, "--metrics-insecure", "serve metrics beyond this machine without TLS", kind=bool)
    run.add_argument("script", metavar="SCRIPT", help="a Python file")
    run.add_argument("arguments", nargs=argparse.REMAINDER, metavar="ARGUMENTS", help="are handed to the script")
    return root


def _mode(text: str) -> str:
    try:
        parse_mode(text)
    except InvalidRequest as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def _access_variables(arguments: argparse.Namespace) -> dict[str, str]:
    """The workers' certificates and token as variables, checked here, where one line says what is wrong for all."""
    from ps_protocol.credentials import access

    given = {name: getattr(arguments, name) for name in ("tls_cert", "tls_key", "tls_ca", "token_file")}
    access(given["tls_cert"], given["tls_key"], given["tls_ca"], given["token_file"], arguments.insecure)
    found = {"PS_" + name.upper(): str(Path(path).absolute()) for name, path in given.items() if path}
    switches = {"PS_INSECURE": arguments.insecure, "PS_METRICS_INSECURE": arguments.metrics_insecure}
    return found | {name: "1" for name, on in switches.items() if on}


def main() -> NoReturn:
    """Runs the command and exits with its code."""
    from ps_worker.launcher import Launch, launch

    try:
        arguments = parser().parse_args()
        mode = arguments.mode or ("sync" if arguments.server else "single")
        if parse_mode(mode) is not None and not arguments.server:
            raise InvalidRequest(f"mode {mode} needs --server HOST:PORT")
        if arguments.transport not in TRANSPORTS:
            raise InvalidRequest(f"--transport must be one of {', '.join(TRANSPORTS)}, got {arguments.transport!r}")
        if not Path(arguments.script).is_file():
            raise InvalidRequest(f"there is no script {arguments.script}")
        if mode == "single" and arguments.workers > 1:
            raise InvalidRequest(f"mode single is one worker, got --workers {arguments.workers}")
        if mode == "ddp" and arguments.max_restarts:
            raise InvalidRequest("in ddp no worker can come back alone: no --max-restarts; torchrun restarts all")
        world_size = arguments.world_size or arguments.first_rank + arguments.workers
        if arguments.first_rank + arguments.workers > world_size:
            raise InvalidRequest(
                f"ranks {arguments.first_rank} to {arguments.first_rank + arguments.workers - 1} "
                f"do not fit into --world-size {world_size}"
            )
        sys.exit(
            launch(
                Launch(
                    script=arguments.script,
                    arguments=tuple(arguments.arguments),
                    workers=arguments.workers,
                    first_rank=arguments.first_rank,
                    world_size=world_size,
                    elastic=arguments.elastic,
                    mode=mode,
                    server=arguments.server,
                    job=arguments.job,
                    connect_timeout=arguments.connect_timeout,
                    metrics_host=arguments.metrics_host,
                    metrics_port=arguments.metrics_port,
                    transport=arguments.transport,
                    shared_directory=arguments.shared_directory,
                    access=_access_variables(arguments),
                    max_restarts=arguments.max_restarts,
                    take_over=arguments.take_over,
                )
            )
        )
    except PSError as error:
        sys.exit(f"ps-worker: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
