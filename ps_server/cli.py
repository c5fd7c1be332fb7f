"""The command `ps-server`."""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import signal
import sys
import threading
from pathlib import Path
from typing import NoReturn

from ps_protocol.errors import PSError
from ps_runtime.channel import DEFAULT_PORT
from ps_runtime.settings import (
    CommandLine,
    add_access_settings,
    add_setting,
    count,
    host_port,
    index,
    port_number,
    seconds,
    unknown_variables,
    version,
)
from ps_server.core.limits import add_limits, limits_of
from ps_server.failpoints import arm
from ps_server.ops.glibc import share_memory_pool

DEFAULT_METRICS_PORT = 9100
SWITCH_SECONDS = 0.0005
DRAIN_SECONDS = 15.0


def parser() -> CommandLine:
    """The command line of ps-server."""
    root = CommandLine(
        prog="ps-server",
        description="Parameter servers for PyTorch. `ps-server up` is all that one machine needs; the other commands "
        "are for several machines, and for looking in. Each flag has the PS_* variable that its help names.",
    )
    root.add_argument("--version", action="version", version=f"ps-server {version()}")
    commands = root.add_subparsers(dest="command", required=True, metavar="COMMAND")

    up = commands.add_parser(
        "up", help="start a coordinator and shards on this machine", usage="ps-server up [options]"
    )
    add_setting(up, "--shards", "how many shard processes", default=2, kind=count, metavar="N")
    _add_listening(up, "shard i listens on the next port but i")

    coordinator = commands.add_parser(
        "coordinator", help="start the coordinator alone", usage="ps-server coordinator [options]"
    )
    add_setting(coordinator, "--shards", "how many shards the cluster has", default=2, kind=count, metavar="N")
    _add_listening(coordinator)
    _add_advertise(coordinator)

    shard = commands.add_parser("shard", help="start one shard", usage="ps-server shard --index I [options]")
    add_setting(shard, "--index", "which shard this is, from 0", kind=index, required=True, metavar="I")
    add_setting(shard, "--coordinator", "where the coordinator is", kind=host_port, metavar="HOST:PORT")
    shard.add_argument("--with-coordinator", action="store_true", help="be the coordinator too (needs --shards)")
    add_setting(shard, "--shards", "how many shards the cluster has, with --with-coordinator", default=2, kind=count)
    _add_listening(shard)
    _add_advertise(shard)
    shard.add_argument("--supervised", action="store_true", help=argparse.SUPPRESS)

    for name, text in (
        ("status", "say what is running, how far it is, and who waits for whom"),
        ("health", "exit 0 if the server at the address serves, 1 if not"),
        ("end", "end a job and give its memory back"),
        ("checkpoint", "make a checkpoint of a job now"),
    ):
        command = commands.add_parser(name, help=text, usage=f"ps-server {name} [options]")
        add_access_settings(command)
        add_setting(command, "--server", "the coordinator", default=f"127.0.0.1:{DEFAULT_PORT}", kind=host_port)
        if name == "status":
            command.add_argument("--json", action="store_true", help="for programs: one JSON object")
        if name == "end":
            add_setting(command, "--job", "the job to end", required=True, metavar="NAME")
        if name == "checkpoint":
            add_setting(command, "--job", "the job", default="default", metavar="NAME")

    export = commands.add_parser(
        "export", help="write a job's last checkpoint as plain PyTorch files", usage="ps-server export [options] OUT"
    )
    add_setting(export, "--checkpoint-dir", "where the checkpoints are", required=True, metavar="DIR")
    add_setting(export, "--job", "the job", default="default", metavar="NAME")
    export.add_argument("--checkpoint", metavar="NAME", help="which checkpoint [default: the last that is whole]")
    export.add_argument("output", metavar="OUT", help="directory that gets model.safetensors and the optimizer's state")

    certs = commands.add_parser(
        "dev-certs",
        help="make a small CA with certificates for servers and clients",
        usage="ps-server dev-certs [options] DIR",
    )
    certs.add_argument(
        "directory", metavar="DIR", help="gets ca.pem, server.pem, client.pem, reader.pem, keys, and roles"
    )
    certs.add_argument("--host", action="append", default=[], metavar="NAME", help="a server's name; may be repeated")
    certs.add_argument("--split", action="store_true", help="into server/, client/ and reader/: no other's key in any")
    certs.add_argument("--days", type=count, default=365, help="for which they are valid [default 365]")
    return root


def _add_listening(command: CommandLine, note: str = "0: any free one") -> None:
    add_setting(command, "--host", "address to listen on", default="127.0.0.1")
    add_setting(command, "--port", f"port to listen on; {note}", default=DEFAULT_PORT, kind=port_number)
    add_setting(command, "--metrics-host", "address to serve metrics on", default="127.0.0.1")
    add_setting(command, "--metrics-port", "port of /metrics", default=DEFAULT_METRICS_PORT, kind=port_number)
    add_setting(command, "--lease", "seconds a silent worker counts as live", default=10.0, kind=seconds)
    add_setting(
        command, "--shared-directory", "where workers on this host may share memory as files", default="/dev/shm"
    )
    add_setting(command, "--apply-threads", "threads a shard applies updates with", default=1, kind=count)
    add_access_settings(command, serves=True)
    add_setting(command, "--tokens", "who may do what: lines ROLE[:JOB] TOKEN and cn:NAME ROLE[:JOB]", metavar="FILE")
    add_setting(command, "--metrics-insecure", "serve metrics beyond this machine without TLS", kind=bool)
    _add_checkpoints(command)
    add_limits(command)


def _add_checkpoints(command: argparse.ArgumentParser) -> None:
    group = command.add_argument_group("checkpoints")
    add_setting(group, "--checkpoint-dir", "where checkpoints are; one directory for all shards", metavar="DIR")
    add_setting(group, "--checkpoint-every", "make one every so often, as in 100steps or 60s", metavar="EVERY")
    add_setting(group, "--keep", "how many checkpoints of a job to keep", default=3, kind=count, metavar="N")
    add_setting(group, "--restore", "go on from what is in the checkpoint directory", kind=bool)
    add_setting(group, "--resume", "take up the jobs that ran when the coordinator ended, and no others", kind=bool)


def _add_advertise(command: argparse.ArgumentParser) -> None:
    add_setting(command, "--advertise", "how others reach this process", kind=host_port, metavar="HOST:PORT")


def main() -> NoReturn:
    """Runs the command and exits with its code."""
    try:
        arguments = parser().read()
        said = unknown_variables(os.environ)
        if said and not getattr(arguments, "supervised", False):  # the parent of a supervised shard has said so
            print(f"ps-server: {said}", file=sys.stderr, flush=True)
        sys.exit(_run(arguments))
    except PSError as error:
        sys.exit(f"ps-server: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)


def _run(arguments: argparse.Namespace) -> int:
    # Imported here, because torch takes seconds to import and --help should not.
    if arguments.command == "up":
        from ps_launch.servers import UpConfig, up

        given = {name: getattr(arguments, name) for name in UpConfig.__dataclass_fields__ if name != "limits"}
        return up(UpConfig(**given, limits=limits_of(arguments)))
    if arguments.command in ("coordinator", "shard"):
        return _serve(arguments)
    if arguments.command == "export":
        from ps_server.storage.export import export

        print(export(Path(arguments.checkpoint_dir), arguments.job, arguments.checkpoint, Path(arguments.output)))
        return 0
    if arguments.command == "dev-certs":
        from ps_server.ops.dev_certs import write

        made = write(Path(arguments.directory), arguments.host, arguments.days, arguments.split)
        print(f"ps-server: {arguments.directory} {'has certificates now' if made else 'has certificates already'}")
        return 0
    from ps_runtime.credentials import access

    files = arguments.tls_cert, arguments.tls_key, arguments.tls_ca
    mine = access(*files, arguments.token_file, arguments.insecure)
    if arguments.command == "health":
        from ps_server.ops.status import is_serving

        return 0 if is_serving(arguments.server, mine) else 1
    from ps_server.ops import status

    if arguments.command == "checkpoint":
        print(status.checkpoint_job(arguments.server, arguments.job, mine))
        return 0
    if arguments.command == "end":
        status.end_job(arguments.server, arguments.job, mine)
        return 0
    found = status.fetch(arguments.server, mine)
    print(json.dumps(found, indent=2) if arguments.json else status.table(found))
    return 0


def _serve(arguments: argparse.Namespace) -> int:
    """Runs one server process until it is told to stop."""
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):  # before the imports: they take seconds, in which it may be told to
        signal.signal(number, lambda *_: stop.set())
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    alone = arguments.command == "coordinator"
    arm(None if alone else arguments.index)
    share_memory_pool()
    from ps_launch.servers import await_coordinator, watch_lifeline
    from ps_runtime.credentials import tls
    from ps_server.server import Server, ServerConfig

    coordinates = alone or arguments.with_coordinator
    where = None if coordinates else arguments.coordinator
    if arguments.command == "shard" and arguments.supervised:
        where = where or (None if coordinates else await_coordinator(sys.stdin))
        watch_lifeline(sys.stdin, stop)
    if not coordinates and not where:
        raise PSError("a shard needs --coordinator HOST:PORT (or --with-coordinator, to be it)")
    server = Server(
        ServerConfig(
            shard_count=arguments.shards if coordinates else None,
            index=None if alone else arguments.index,
            coordinator=where,
            host=arguments.host,
            port=arguments.port,
            advertise=arguments.advertise,
            metrics_host=arguments.metrics_host,
            metrics_port=arguments.metrics_port,
            lease=arguments.lease,
            apply_threads=arguments.apply_threads,
            shared_directory=Path(arguments.shared_directory),
            tls=tls(arguments.tls_cert, arguments.tls_key, arguments.tls_ca),
            tokens=Path(arguments.tokens) if arguments.tokens else None,
            insecure=arguments.insecure,
            metrics_insecure=arguments.metrics_insecure,
            limits=limits_of(arguments),
            checkpoint_dir=Path(arguments.checkpoint_dir) if arguments.checkpoint_dir else None,
            checkpoint_every=arguments.checkpoint_every,
            keep=arguments.keep,
            restore=arguments.restore,
            resume=arguments.resume,
        )
    )
    # What imports have made stays for good: the collector need not walk through it again in the middle of a round,
    # where that takes as long as stepping the buckets (measured).
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)
    # A thread that has a message to answer waits this long for one that computes in Python; the default is 5 ms, and a
    # bucket passes through four threads.
    sys.setswitchinterval(SWITCH_SECONDS)
    while not stop.is_set() and not server.wait_ready(0.2):
        pass
    if not stop.is_set():
        if not alone and arguments.supervised:
            print(json.dumps({"address": server.address, "metrics": server.metrics_address}), flush=True)
        else:
            role = "coordinator" if alone else f"shard {arguments.index}"
            print(f"ps-server: {role} ready at {server.address}", flush=True)
            scheme = "https" if arguments.tls_cert else "http"
            print(f"ps-server: metrics at {scheme}://{server.metrics_address}/metrics", flush=True)
    stop.wait()
    # Told once, it finishes what it has; told again, it ends at once.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: os._exit(128 + number))
    if coordinates or not arguments.supervised:  # the parent stops the coordinator first, which has seen to it
        server.drain(DRAIN_SECONDS)
    server.stop()
    return 0
