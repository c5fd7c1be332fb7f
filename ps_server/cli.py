"""The command `ps-server`: each subcommand's flags, and the function that it runs."""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import logging
import os
import shutil
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from ps_launch.lifeline import OTHERS_END_SECONDS, WRITE_SECONDS, Lifeline
from ps_protocol.errors import InvalidRequest, PSError
from ps_protocol.wire_formats import EDITION_WIRES, FORMATS
from ps_runtime import audit, logs
from ps_runtime.channel import DEFAULT_PORT
from ps_runtime.command_line import CommandLine
from ps_runtime.completion import add_completion, script
from ps_runtime.logs import Speaker
from ps_runtime.settings import (
    Setting,
    access_settings,
    amount,
    as_variables,
    count,
    environment,
    host_port,
    index,
    magnitude,
    port_number,
    seconds,
    unknown_variables,
    whole_number,
)
from ps_runtime.signals import SignalEvent, exit_at_once, on_further_signals, on_signals
from ps_runtime.thread_limit import thread_limit
from ps_runtime.version import version
from ps_server import failpoints
from ps_server.config import (
    ADVERTISE,
    CHECKPOINTS,
    COORDINATOR,
    HEALTH_PORT,
    INDEX,
    LIMITS,
    MAX_SHARD_RESTARTS,
    PROCESS,
    SETTINGS,
    SHARD_START_TIMEOUT,
    SHARDS,
    ServerConfig,
    checkpoints_at,
    config_of,
)
from ps_server.core.limits import LEAST_THREADS, LONGEST_WATCH, SHORTEST_WATCH
from ps_server.ops.glibc import share_memory_pool, streaming
from ps_server.ops.plan_tables import table_question
from ps_server.relay_config import RELAY, relay_config_of
from ps_server.storage.files import check_directory

if TYPE_CHECKING:
    from ps_server.rpc.own_ports import OwnPorts
    from ps_server.server import Server

# Needed by servers and exports, and not by commands that query a cluster
OF_SERVERS = ("torch", "numpy", "safetensors")
SWITCH_SECONDS = 0.0005
LOOK_SECONDS = 1.0  # the pause between two checks whether this process serves; a signal ends it
_PROCESS = whole_number(1, 2**63 - 1)

SERVER = Setting("server", "the coordinator", host_port, f"127.0.0.1:{DEFAULT_PORT}", "HOST:PORT")
JOB = Setting("job", "the job", default="default", metavar="NAME")
PAGE = (
    Setting(
        "page_host", "address to serve the page on; it answers only where it is called 127.0.0.1", default="127.0.0.1"
    ),
    Setting("page_port", "port of the page, 0: any free one", port_number, 8470),
    Setting("page_insecure", "serve the page beyond this machine, as in a container, to all that reach its port", bool),
)


def parser() -> CommandLine:
    """Returns the command line of ps-server."""
    root = CommandLine(
        prog="ps-server",
        description="Parameter servers for PyTorch. `ps-server up` is all that one machine needs; the other commands "
        "are for several machines, and for looking in. Each flag has the PS_* variable that its help names.",
    )
    root.add_argument("--version", action="version", version=f"ps-server {version()}")

    def add(name: str, text: str, *settings: Setting, words: str = "[options]") -> CommandLine:
        return root.add_command(name, text, f"ps-server {name} {words}", *settings)

    # In the order of --help: the commands that people type most, those that one machine does not need, those of
    # launchers.
    _add_up(add)
    _add_asking(add)
    _add_export(add)
    _add_plan(add)
    _add_single_servers(add)
    _add_relay(add)
    config = add("config", "print the settings of a command, and where each is from", words="[COMMAND [options]]")
    config.add_argument("words", nargs=argparse.REMAINDER, metavar="COMMAND", help="and its options [default up]")
    _add_certificates(add)
    add_completion(root)
    _add_report(add)
    return root


def _add_up(add: Callable[..., CommandLine]) -> None:
    """Adds the command that starts a whole cluster."""
    up = add("up", "start a coordinator and shards on this machine", SHARDS, MAX_SHARD_RESTARTS, SHARD_START_TIMEOUT)
    # No variables: the variables of `ps-server shard` have another meaning for this command.
    up.add_argument("--only", type=index, metavar="I", help="start shard I alone: each machine has one of the shards")
    up.add_argument("--coordinator", type=host_port, metavar="HOST:PORT", help="where shard 0 is, with --only I from 1")
    _add_serving(up)


def _add_single_servers(add: Callable[..., CommandLine]) -> None:
    """Adds the commands that start one server of a cluster each."""
    coordinator = add("coordinator", "start the coordinator alone", SHARDS, ADVERTISE, HEALTH_PORT)
    shard = add("shard", "start one shard", INDEX, COORDINATOR, words="--index I [options]")
    shard.add_argument("--with-coordinator", action="store_true", help="be the coordinator too (needs --shards)")
    shard.add_settings(
        replace(SHARDS, text="how many shards the cluster has, with --with-coordinator"), ADVERTISE, HEALTH_PORT
    )
    # Flags that a parent process gives its servers.
    for command, flag in ((coordinator, "supervised"), (shard, "supervised"), (shard, "drains"), (shard, "ends-last")):
        command.add_argument(f"--{flag}", action="store_true", help=argparse.SUPPRESS)
    shard.add_argument("--restart-count", type=index, default=0, help=argparse.SUPPRESS)
    for command in (coordinator, shard):
        _add_serving(command)


def _add_relay(add: Callable[..., CommandLine]) -> None:
    """Adds the command that runs a relay."""
    text = "hand on the weights of jobs to many readers, or elsewhere"
    relay = add("relay", text, *RELAY, words="--upstream HOST:PORT [options]")
    relay.add_settings(*LIMITS, group=relay.add_hidden_group("limits", "--help-limits"))


def _add_certificates(add: Callable[..., CommandLine]) -> None:
    """Adds the command that makes certificates for trials."""
    certs = add("dev-certs", "make a small CA and certificates, or renew those that end soon", words="[options] DIR")
    files = "gets ca.pem and ca.key; server, worker, reader and admin .pem and .key; roles"
    certs.add_argument("directory", metavar="DIR", help=files)
    certs.add_argument("--host", action="append", default=[], metavar="NAME", help="a server's name; may be repeated")
    certs.add_argument("--relay", action="append", default=[], metavar="NAME", help="a relay's name; may be repeated")
    certs.add_argument(
        "--split", action="store_true", help="a folder for each server, relay and role: no other's key in any"
    )
    certs.add_argument("--days", type=count, default=365, help="for which they are valid [default 365]")
    certs.add_argument("--new-ca", action="store_true", help="make a new CA, and everything anew")
    certs.add_argument("--every", type=seconds, metavar="SECONDS", help="stay, and look again this often")


def _watch_period(text: str) -> float:
    """Returns the seconds between two views. Raises ArgumentTypeError."""
    period = seconds(text)
    if not SHORTEST_WATCH <= period <= LONGEST_WATCH:
        expected = f"{SHORTEST_WATCH:g} to {LONGEST_WATCH:g} seconds"
        raise argparse.ArgumentTypeError(f"expected {expected}, got {text!r}")
    return period


def _add_asking(add: Callable[..., CommandLine]) -> None:
    """Adds the commands that query a running cluster, or request something of it."""
    asking = (*access_settings(), SERVER)
    status = add("status", "show what is running, how far it is, and which worker waits for which", *asking)
    status.add_argument(
        "--json",
        action="store_true",
        help="for programs: GetStatusResponse as JSON, times in seconds; with --watch a WatchStatusResponse a line",
    )
    status.add_argument(
        "--watch",
        nargs="?",
        const=1.0,
        type=_watch_period,
        metavar="SECONDS",
        help="show it again every so many seconds [default 1], with where each worker is",
    )
    page = add("page", "serve a page on this machine that shows what is running, for a browser", *asking)
    page.add_settings(*PAGE)
    feed = add("feed", "follow a job's weights as a reader does", *access_settings(), words="[options] HOST:PORT [JOB]")
    feed.add_argument("address", type=host_port, metavar="HOST:PORT", help="the coordinator, or a relay")
    feed.add_argument("followed", nargs="?", default="default", metavar="JOB", help="the job [default default]")
    feed.add_argument(
        "--as", dest="as_type", choices=EDITION_WIRES, default=EDITION_WIRES[0], help="the type in which weights travel"
    )
    feed.add_argument("--min-updates", type=count, default=1, metavar="N", help="between two editions [default 1]")
    feed.add_argument("--json", action="store_true", help="for programs: a JSON object a line")
    add("health", "exit 0 if the server at the address serves, 1 if not", *asking)
    add("checkpoint", "make a checkpoint of a job now", *asking, JOB)
    add("end", "end a job and give its memory back", *asking, replace(JOB, text="the job to end", required=True))


def _add_report(add: Callable[..., CommandLine]) -> None:
    """Adds the command that a launcher calls."""
    text = "say that a shard's process has ended, as its launcher has seen"
    report = add("report", text, *access_settings(), SERVER, INDEX)
    report.add_argument("--process", type=_PROCESS, required=True, metavar="NUMBER", help="the number that it chose")


def _add_plan(add: Callable[..., CommandLine]) -> None:
    """Adds the command that plans a job's resources."""
    words = "--params N --workers W [options]"
    plan = add("plan", "say how many shards a job needs, how much memory, which mode", words=words)
    plan.add_argument(
        "--params", type=magnitude, required=True, metavar="N", help="parameters, as in 25M or 1.5B, but for tables"
    )
    plan.add_argument("--workers", type=count, required=True, metavar="W", help="workers, each on a machine of its own")
    text = "each worker is a group of N processes, each on a machine of its own [default 1]"
    plan.add_argument("--group", type=count, default=1, metavar="N", help=text)
    plan.add_argument("--optimizer", default="AdamW", metavar="NAME", help="of torch.optim [default AdamW]")
    plan.add_argument("--momentum", type=float, default=0.0, metavar="M", help="of SGD or RMSprop [default 0]")
    plan.add_argument("--tensors", type=count, default=1, metavar="T", help="the parameters are so many [default 1]")
    plan.add_argument("--shards", type=count, metavar="S", help="how many there are to be [default: says how many]")
    plan.add_argument(
        "--link", type=magnitude, metavar="BITS", help="bits a second of each link, as in 10G [default: one machine]"
    )
    plan.add_argument(
        "--wire", default="float32", metavar="FORMAT", help=f"one of {', '.join(FORMATS)} [default float32]"
    )
    plan.add_argument("--transport", default="auto", metavar="NAME", help="auto, shm, tcp or grpc [default auto]")
    plan.add_argument("--tls", action="store_true", help="what travels is encrypted")
    plan.add_argument(
        "--table",
        action="append",
        default=[],
        type=table_question,
        metavar="ROWSxDIM:OPTIMIZER",
        help="a table of rows when it is full, as in 100Mx64:RowWiseAdagrad; may be repeated [default none]",
    )
    plan.add_argument("--lookups", type=count, default=0, metavar="N", help="distinct ids of each table in a step")
    plan.add_argument("--step-seconds", type=seconds, metavar="S", help="of a worker's forward and backward pass")
    plan.add_argument("--straggler", type=amount, default=1.0, metavar="F", help="the slowest takes F times as long")
    plan.add_argument("--stalls", type=amount, metavar="P", help="only in a part P of steps, and any worker")
    plan.add_argument("--json", action="store_true", help="for programs: bytes, seconds and steps a second as JSON")


def _add_export(add: Callable[..., CommandLine]) -> None:
    """Adds the command that exports a checkpoint."""
    directory = Setting("checkpoint_dir", "where the checkpoints are", checkpoints_at, metavar="DIR", required=True)
    text = "write a job's last checkpoint as plain PyTorch files"
    export = add("export", text, directory, JOB, words="[options] OUT")
    export.add_argument("--checkpoint", metavar="NAME", help="which checkpoint [default: the last]")
    text = "end with an error where that one is damaged; by default it is the last that is whole, as for a restore"
    export.add_argument("--no-fallback", action="store_true", help=text)
    text = "of the tables of rows in OUT/tables [default safetensors]"
    export.add_argument("--format", choices=("safetensors", "parquet", "npy"), default="safetensors", help=text)
    text = "write model and optimizer to OUT/dcp, too, for torch.distributed.checkpoint"
    for flag, layout, words in (("--dcp", "nested", text), ("--dcp-flat", "flat", f"{text}, as torchtitan does")):
        export.add_argument(flag, dest="dcp", action="store_const", const=layout, help=words)
    export.add_argument("output", metavar="OUT", help="directory that gets model.safetensors and the optimizer's state")


def _add_serving(command: CommandLine) -> None:
    command.add_settings(*PROCESS)
    checkpoints = command.add_argument_group("checkpoints")
    limits = command.add_hidden_group("limits", "--help-limits")
    command.add_settings(*CHECKPOINTS, group=checkpoints)
    command.add_settings(*LIMITS, group=limits)


def main() -> NoReturn:
    """Runs the command and exits with its code."""
    arguments = parser().read()
    speaker, kind = Speaker("ps-server"), getattr(arguments, "log_format", logs.TEXT)
    try:
        unknown = unknown_variables()
        # The parent of a supervised shard has printed it already
        if unknown and not getattr(arguments, "supervised", False):
            print(logs.line_of(speaker, unknown, kind), file=sys.stderr, flush=True)
        sys.exit(_run(arguments))
    except PSError as error:
        sys.exit(logs.line_of(speaker, str(error), kind))
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in OF_SERVERS:
            raise
        text = f"`ps-server {arguments.command}` needs {error.name}, which this Python does not have: pip install torch"
        sys.exit(logs.line_of(speaker, text, kind))
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)


# Most modules are imported in the functions that use them: torch takes seconds to import, which --help should not, and
# some commands run without torch.


def _run(arguments: argparse.Namespace) -> int:
    if arguments.command == "up":
        return _up(arguments)
    if arguments.command in ("coordinator", "shard"):
        return _serve(arguments)
    if arguments.command == "relay":
        return _relay(arguments)
    if arguments.command == "export":
        check_directory(arguments.checkpoint_dir)
        from ps_server.storage.export import export

        output = Path(arguments.output)
        where = arguments.checkpoint_dir, arguments.job, arguments.checkpoint, output, arguments.format

        def on_skipped(text: str) -> None:
            print(logs.line_of(Speaker("ps-server"), text, logs.TEXT), file=sys.stderr, flush=True)

        print(export(*where, on_skipped=on_skipped, fallback=not arguments.no_fallback, dcp=arguments.dcp))
        return 0
    if arguments.command == "plan":
        return _plan(arguments)
    if arguments.command == "dev-certs":
        return _make_certificates(arguments)
    if arguments.command == "config":
        print(parser().settings_of(arguments.words or ["up"]))
        return 0
    if arguments.command == "completion":
        print(script(parser(), arguments.shell), end="")
        return 0
    return _ask(arguments)


def _plan(arguments: argparse.Namespace) -> int:
    """Prints the plan of a job's resources."""
    from ps_server.ops import plan

    for name, least, most in (("straggler", 1.0, 1e6), ("stalls", 0.0, 1.0)):
        value = getattr(arguments, name)
        if value is not None and not least <= value <= most:
            raise InvalidRequest(f"--{name} is from {least:g} to {most:g}, got {value:g}")
    advice = plan.advise(
        plan.Question(
            parameters=int(arguments.params),
            workers=arguments.workers,
            optimizer=arguments.optimizer,
            momentum=arguments.momentum,
            tensors=arguments.tensors,
            shards=arguments.shards,
            link=arguments.link,
            wire=arguments.wire,
            step_seconds=arguments.step_seconds,
            straggler=arguments.straggler,
            stalls=arguments.stalls,
            transport=arguments.transport,
            tls=arguments.tls,
            tables=tuple(arguments.table),
            lookups=arguments.lookups,
            group_size=arguments.group,
        )
    )
    print(json.dumps(plan.as_json(advice), indent=2) if arguments.json else plan.table(advice, _window()))
    return 0


def _make_certificates(arguments: argparse.Namespace) -> int:
    """Makes missing certificates and renews those that expire soon: once, or again and again until a signal."""
    from ps_server.ops.dev_certs import write

    stop = SignalEvent()
    if arguments.every is not None:
        on_signals(lambda *_: stop.set())
    directory, life, new_ca = Path(arguments.directory), timedelta(days=arguments.days), arguments.new_ca
    is_first = True
    while True:
        try:
            made = write(directory, arguments.host, life, arguments.split, new_ca and is_first, arguments.relay)
        except PSError as error:
            if is_first:
                raise
            print(f"ps-server: {error}; looking again in {arguments.every:g} s", file=sys.stderr, flush=True)
        else:
            said = f"made {', '.join(made)}" if made else "all certificates are there, and none ends soon"
            print(f"ps-server: {directory}: {said}", flush=True)
        is_first = False
        if arguments.every is None or stop.wait(arguments.every):
            return 0


def _ask(arguments: argparse.Namespace) -> int:
    """Runs one of the commands that query a running cluster, or request something of it."""
    from ps_runtime.credentials import access_of

    allowed = access_of(arguments)
    if arguments.command == "health":
        from ps_server.rpc.health_client import is_serving

        return 0 if is_serving(arguments.server, allowed) else 1

    if arguments.command == "feed":
        from ps_server.ops.feed_screen import follow

        what = arguments.address, arguments.followed, allowed, arguments.as_type, arguments.min_updates
        with contextlib.suppress(KeyboardInterrupt):  # its ordinary end
            follow(*what, as_json=arguments.json)
        return 0

    from ps_server.ops import requests, status_text
    from ps_server.rpc.plain import json_text

    if arguments.command == "checkpoint":
        print(requests.checkpoint_job(arguments.server, arguments.job, allowed))
    elif arguments.command == "report":
        print(requests.report_shard_end(arguments.server, arguments.index, arguments.process, allowed))
    elif arguments.command == "page":
        from ps_server.ops.page import serve_page

        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # containers are stopped by SIGTERM, which is no error
        serve_page(arguments.server, arguments.page_host, arguments.page_port, arguments.page_insecure, allowed)
    elif arguments.command == "status" and arguments.watch is not None:
        from ps_server.ops import screen

        with contextlib.suppress(KeyboardInterrupt):  # its ordinary end
            screen.watch(arguments.server, allowed, arguments.watch, arguments.json)
    elif arguments.command == "end":
        requests.end_job(arguments.server, arguments.job, allowed)
    else:
        running = requests.fetch(arguments.server, allowed)
        print(json_text(running, indent=2) if arguments.json else status_text.table(running, _window()))
    return 0


def _window() -> int | None:
    """Returns the number of the terminal's columns; None if the output is no terminal."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def _up(arguments: argparse.Namespace) -> int:
    """Runs a cluster. Its shards get all settings by environment variables, and only those of the parent."""
    from ps_launch.local_cluster import Supervision, up

    for name in OF_SERVERS:  # said once here, rather than by each shard
        if all(finder.find_spec(name, None) is None for finder in sys.meta_path):
            raise ModuleNotFoundError(name=name)
    failpoints.check()  # an error in them is printed once, rather than by each shard
    only = arguments.only
    if only is not None and only >= arguments.shards:
        raise InvalidRequest(f"--only is below --shards {arguments.shards}, got {only}")
    if (arguments.coordinator is not None) != bool(only):
        raise InvalidRequest("--coordinator says where shard 0 is: it goes with --only I, for I from 1")
    # Raises once for settings that every shard would refuse
    config = config_of(arguments, arguments.shards, index=0, coordinator=None)
    config.is_exposed()
    config.checkpoint_policy()
    if arguments.max_threads is None:
        arguments.max_threads = _threads_of_each(1 if only is not None else arguments.shards)
    inherited = streaming(environment())
    foreign = {setting.variable: "" for setting in (COORDINATOR, ADVERTISE, HEALTH_PORT)}
    supervision = Supervision(
        *(arguments.shards, arguments.shard_start_timeout, arguments.drain_seconds, arguments.max_shard_restarts),
        only=only,
        coordinator=arguments.coordinator or "",
    )
    return up(supervision, {**inherited, **as_variables((SHARDS, *SETTINGS), arguments), **foreign})


def _threads_of_each(shards: int) -> int | None:
    """Returns how many threads each of this machine's shards may have: they share the limit."""
    found = thread_limit()
    return None if found is None else max(LEAST_THREADS, found.threads // shards)


def _serve(arguments: argparse.Namespace) -> int:
    """Runs one server process until a signal."""
    stop, begun = SignalEvent(), SignalEvent()

    def end(*_: object) -> None:
        """Ends the server. Before it serves, the process exits at once, even during its imports, which take seconds."""
        if not begun.is_set():
            os._exit(0)
        stop.set()

    on_signals(end)
    alone = arguments.command == "coordinator"
    speaker = Speaker("coordinator") if alone else Speaker("shard", arguments.index)
    logs.start(speaker, arguments.log_level, arguments.log_format)
    audit.start(speaker, arguments.audit_log)
    coordinates = alone or arguments.with_coordinator
    failpoints.arm(None if alone else arguments.index)
    share_memory_pool()
    coordinator = None if coordinates else arguments.coordinator
    lifeline = Lifeline(sys.stdin.fileno(), end) if arguments.supervised else None
    from ps_server.ops.compiler import leave_out_compiler
    from ps_server.server import Server

    if lifeline is not None and not coordinates and not coordinator:
        coordinator = lifeline.line()
    if not coordinates and not coordinator:
        raise PSError("a shard needs --coordinator HOST:PORT (or --with-coordinator, to be it)")
    begun.set()
    leave_out_compiler()
    shard = None if alone else arguments.index
    config = config_of(arguments, arguments.shards if coordinates else None, shard, coordinator)
    server = Server(config)
    _tune_interpreter()
    while not stop.is_set() and not server.wait_ready(0.2):
        pass
    if not stop.is_set():
        role = "coordinator" if alone else f"shard {shard}"
        _announce(role, server, config, arguments.supervised)
    _await_end(stop, server.ports)
    _finish(server, arguments, lifeline)
    return 0


def _finish(server: Server, arguments: argparse.Namespace, lifeline: Lifeline | None) -> None:
    """Makes last checkpoints and stops a server. A second signal ends the process at once.

    It imports nothing: a package may have been upgraded before its servers are stopped.
    """
    on_second_signal = on_signals if lifeline is None else on_further_signals
    on_second_signal(exit_at_once)
    alone = arguments.command == "coordinator"
    by_itself = alone or arguments.with_coordinator or arguments.drains
    if lifeline is not None and not by_itself and server.is_in_checkpoints():
        # The last checkpoints need this shard. Its parent, unless it was killed, closes the input after them.
        lifeline.await_parent(arguments.drain_seconds + WRITE_SECONDS)
        on_second_signal(exit_at_once)
    if lifeline is None or by_itself or lifeline.has_lost_parent():
        server.drain(arguments.drain_seconds)
    if not alone and arguments.ends_last:
        server.outlive(OTHERS_END_SECONDS)
    server.stop()
    audit.flush(all_of_them=True)


def _relay(arguments: argparse.Namespace) -> int:
    """Runs a relay until a signal."""
    stop = SignalEvent()
    on_signals(lambda *_: stop.set())
    speaker = Speaker("relay")
    logs.start(speaker, arguments.log_level, arguments.log_format)
    audit.start(speaker, arguments.audit_log)
    failpoints.arm(None)
    share_memory_pool()
    from ps_server.relay_server import RelayServer

    server = RelayServer(relay_config_of(arguments))
    scheme = "https" if arguments.tls_cert else "http"
    print(f"ps-server: relay of {arguments.upstream} ready at {server.address}", flush=True)
    print(f"ps-server: metrics at {scheme}://{server.metrics_address}/metrics", flush=True)
    if server.http_address:
        print(f"ps-server: downloads at {scheme}://{server.http_address}/jobs/", flush=True)
    _await_end(stop, server.ports)
    on_signals(exit_at_once)
    server.stop()
    audit.flush(all_of_them=True)
    return 0


def _await_end(stop: SignalEvent, ports: OwnPorts) -> None:
    """Waits for a signal to stop. Ends the process with an error if it no longer serves."""
    while not stop.wait(LOOK_SECONDS):
        lost = ports.lost()
        if lost:
            logging.getLogger("ps_server").error("%s: this process ends", lost)
            audit.flush(all_of_them=True)
            logging.shutdown()
            # Not sys.exit: calls in other threads would keep the process alive, and its supervisor from starting it
            # again
            os._exit(1)


def _announce(role: str, server: Server, config: ServerConfig, supervised: bool) -> None:
    """Prints the addresses of a server: for its parent process, or for people."""
    metrics = f"{'https' if config.tls is not None else 'http'}://{server.metrics_address}/"
    page = metrics if config.shows_page() else ""
    if supervised:
        from ps_launch.ready import ready_line

        print(ready_line(server.address, server.metrics_address, page, server.process), flush=True)
        return
    # With this number a launcher reports the end of the process
    number = "" if config.index is None else f" (process {server.process})"
    print(f"ps-server: {role} ready at {server.address}{number}", flush=True)
    print(f"ps-server: metrics at {metrics}metrics", flush=True)
    if server.health.port is not None:
        print(f"ps-server: health at port {server.health.port.port}", flush=True)
    if page:
        print(f"ps-server: the page, for a browser on this machine: {page}", flush=True)


def _tune_interpreter() -> None:
    # What imports have made stays for good: the collector need not walk through it again in the middle of a round,
    # where that takes as long as stepping the buckets (measured).
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)
    # A thread that has a message to answer waits this long for one that computes in Python; the default is 5 ms, and a
    # bucket passes through four threads.
    sys.setswitchinterval(SWITCH_SECONDS)
