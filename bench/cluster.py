"""The processes of a benchmark: where they run, the servers, and workers that do as they are told."""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from bench.results import THREADS
from bench.talk import answer, end, tell
from bench.training import Task
from ps_runtime.credentials import is_loopback
from ps_runtime.free_ports import free_port
from ps_server.ops.dev_certs import AUTHORITY, SERVER, WORKER, write

ROOT = Path(__file__).resolve().parent.parent
START_SECONDS = 180.0


@dataclass(frozen=True)
class Host:
    """Where a process runs.

    address:   by which the other hosts reach it
    prefix:    the command that runs another one there; none is needed on this machine
    python:    the interpreter there; `directory`: where this project is there
    variables: for every process there
    """

    address: str = "127.0.0.1"
    prefix: tuple[str, ...] = ()
    python: str = sys.executable
    directory: str = str(ROOT)
    variables: tuple[str, ...] = ()

    def start(self, module: str, *arguments: str, log: IO[str] | None = None, **more: str) -> subprocess.Popen[str]:
        """`python -m module ARGUMENTS`, with one thread for computing and `more` in its environment."""
        variables = [f"OMP_NUM_THREADS={THREADS}", "PYTHONUNBUFFERED=1", *self.variables]
        variables += [f"{name}={value}" for name, value in more.items()]
        command = [*self.prefix, "env", "-C", self.directory, *variables, self.python, "-m", module, *arguments]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True)


HERE = Host()


@contextlib.contextmanager
def encrypted() -> Iterator[tuple[Host, Host]]:
    """This machine, for servers and for workers that are encrypted and show each other certificates (mutual TLS)."""
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder))
        names = ("PS_TLS_CERT", "{}.pem"), ("PS_TLS_KEY", "{}.key"), ("PS_TLS_CA", f"{AUTHORITY}.pem")
        server, worker = (
            replace(HERE, variables=tuple(f"{name}={folder}/{file.format(holder)}" for name, file in names))
            for holder in (SERVER, WORKER)
        )
        yield server, worker


def host_flags(parser: argparse.ArgumentParser, required: bool) -> None:
    """The flags that say which hosts there are, and how a command is run on them."""
    parser.add_argument(
        "--addresses", default="", required=required, help="the hosts', separated by commas: workers, then shards"
    )
    parser.add_argument("--exec", dest="template", default="", help="what runs a command on a host")
    parser.add_argument("--interface", default="", help="the hosts' network interface, if gloo would pick another")
    parser.add_argument("--port", type=int, default=29500, help="where DDP's processes meet (%(default)s)")
    parser.add_argument("--python", default=sys.executable, help="the interpreter there (the same as here)")
    parser.add_argument("--directory", default=str(ROOT), help="where this project is there (the same as here)")
    parser.add_argument("--link-mbit", type=float, default=0.0, help="what a host's link carries in each direction")


def hosts(arguments: argparse.Namespace) -> list[Host]:
    """A host for each address that was given; in --exec {host} is its address, {number} its number from 1."""
    interface = (f"GLOO_SOCKET_IFNAME={arguments.interface}",) if arguments.interface else ()
    return [
        Host(
            address,
            tuple(shlex.split(arguments.template.format(host=address, number=number))),
            arguments.python,
            arguments.directory,
            interface,
        )
        for number, address in enumerate(arguments.addresses.split(","), start=1)
    ]


def halves(arguments: argparse.Namespace, what: str) -> tuple[list[Host], list[Host]]:
    """Returns the hosts of workers, which are the first half, and those of shards. Raises SystemExit for a single host.

    what: needs both
    """
    places = hosts(arguments)
    middle = len(places) // 2
    if not middle:
        raise SystemExit(f"{what} need at least one host for a worker and one for a shard")
    return places[:middle], places[middle:]


# -- servers ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Servers:
    """Running servers: the coordinator's address, and the shards' process ids if they are on this machine."""

    address: str
    pids: tuple[int, ...]


@contextlib.contextmanager
def servers(places: Sequence[Host], more: Sequence[str] = ()) -> Iterator[Servers]:
    """A shard on each host, the first one with the coordinator, on free ports; `more` flags for all.

    In plaintext between hosts too: DDP beside them is not encrypted either.
    """
    shards: list[subprocess.Popen[str]] = []
    with tempfile.TemporaryFile("w+") as log:
        try:
            for index, host in enumerate(places):
                flags = ["--host", host.address, "--port", "0", "--metrics-host", host.address, "--metrics-port", "0"]
                if not is_loopback(host.address):
                    flags.append("--insecure")
                flags += more
                if index == 0:
                    flags += ["--with-coordinator", "--shards", str(len(places))]
                shards.append(host.start("ps_server", "shard", "--supervised", "--index", str(index), *flags, log=log))
            address = answer(shards[0], START_SECONDS)["address"]
            for shard in shards[1:]:
                tell(shard, address)
            for shard in shards[1:]:
                answer(shard, START_SECONDS)
            yield Servers(address, tuple(shard.pid for shard in shards))
        except BaseException:
            log.seek(0)
            sys.stderr.write(log.read())
            raise
        finally:
            end(shards)


# -- workers ---------------------------------------------------------------------------------------------------------


class Group:
    """Processes that run a module and do as they are told, one on each host; DDP's find each other by their variables.

    orders: what each is told first, by rank
    port:   where DDP's processes meet on the first host; by default one that is free on this machine
    """

    def __init__(self, places: Sequence[Host], module: str, orders: Sequence[Any], port: int | None = None) -> None:
        world = {"WORLD_SIZE": str(len(places)), "MASTER_ADDR": places[0].address}
        world["MASTER_PORT"] = str(port or free_port(HERE.address))
        self._running: list[subprocess.Popen[str]] = []
        try:
            for rank, (host, order) in enumerate(zip(places, orders, strict=True)):
                self._running.append(host.start(module, RANK=str(rank), **world))
                tell(self._running[-1], json.dumps(order))
        except BaseException:
            end(self._running)
            raise

    @property
    def pids(self) -> tuple[int, ...]:
        """The processes' ids, by rank, if they are on this machine."""
        return tuple(process.pid for process in self._running)

    def answers(self, seconds: float = START_SECONDS) -> list[Any]:
        """Waits so long for the next answer of each; by rank."""
        return [answer(process, seconds) for process in self._running]

    def run(self, seconds: float = START_SECONDS, /, **order: Any) -> list[dict[str, Any]]:
        """Gives all the same order at the same time; their answers, by rank. `seconds` is how long they may take."""
        self.tell(**order)
        return self.answers(seconds)

    def tell(self, **order: Any) -> None:
        """Sends one order to all processes. `answers` waits for their answers."""
        for process in self._running:
            tell(process, json.dumps(order))

    def __enter__(self) -> Group:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        end(self._running)


@contextlib.contextmanager
def trainers(
    places: Sequence[Host], task: Task, pauses: Sequence[Sequence[float]] = (), port: int | None = None
) -> Iterator[Group]:
    """The workers of one system, one on each host, which are ready and have taken their warm-up steps.

    pauses: by rank, the task's pauses where they differ
    """
    tasks = [replace(task, rank=rank, world_size=len(places)) for rank in range(len(places))]
    if pauses:
        tasks = [replace(one, pauses=tuple(own)) for one, own in zip(tasks, pauses, strict=True)]
    with Group(places, "bench.training", [asdict(one) for one in tasks], port) as group:
        group.answers()
        yield group


def take_turns(groups: Mapping[str, Group], turns: int, steps: int) -> dict[str, list[list[dict[str, Any]]]]:
    """Has the groups take so many steps in turn, again and again; by group, its workers' answers in each turn."""
    found: dict[str, list[list[dict[str, Any]]]] = {name: [] for name in groups}
    for _ in range(turns):
        for name, group in groups.items():
            found[name].append(group.run(steps=steps))
    return found


def job_name(text: str) -> str:
    """Returns a text as the name of a job."""
    return re.sub("[:/+. ]", "-", text)
