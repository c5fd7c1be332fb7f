"""The servers under chaos, as a user starts them: by `ps-server up`, or as the containers of docker-compose.yml.

Addresses stay the same, however often a process is started again. `ps-server up` starts its shards again by itself;
what ends of the containers, and `ps-server up` where it was killed, starts again as `restart: unless-stopped` says.
"""

from __future__ import annotations

import contextlib
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ps_protocol.errors import PSError
from ps_server.ops.requests import fetch
from tests.chaos.cluster import free_ports
from tests.chaos.links import Link, Links
from tests.chaos.processes import Kept, argument, children, send

START_SECONDS = 60.0
STOP_SECONDS = 30.0
LOOK_SECONDS = 0.05
SAVING_SECONDS = 1.0  # since its file changed last: an older one without a manifest is what an earlier fault has left
FORMS = ("up", "containers")
# What a slow disk holds up: half of each file that servers write is there, and the rest comes later.
SLOW_PLACES = ("shard-file-half-written", "manifest-half-written", "coordinator-file-half-written")


@dataclass(frozen=True)
class ServerFlags:
    """What the servers are started with; `slow_disk`: seconds by which each file of theirs takes longer to write."""

    shards: int
    lease: float
    checkpoints: Path
    every: str
    slow_disk: float = 0.0

    @property
    def process(self) -> list[str]:
        """For every server process."""
        return ["--metrics-port", "0", "--checkpoint-dir", str(self.checkpoints)]

    @property
    def coordinator(self) -> list[str]:
        """For the one that coordinates, besides."""
        return ["--shards", str(self.shards), "--lease", str(self.lease), "--checkpoint-every", self.every, "--resume"]

    @property
    def variables(self) -> dict[str, str]:
        """Of every server process' environment."""
        points = ",".join(f"{place}=delay:{self.slow_disk:.3f}" for place in SLOW_PLACES)
        return {"PS_FAILPOINTS": points} if self.slow_disk else {}


def unforeseen(text: str) -> list[str]:
    """Returns the errors of a log that nothing foresaw: those with a traceback."""
    found = re.findall(r"^\S+ \S+ ERROR .*(?:\n(?!\d{4}-\d\d-\d\d ).*)*", text, re.MULTILINE)
    return [error[:2000] for error in found if "Traceback" in error]


class Servers(ABC):
    """A coordinator and shards.

    address:   of the coordinator
    addresses: of all of them, where they listen
    data_addresses: of the shards, where workers open data connections
    known_as:  by where a shard listens, the address that the others are told where it differs
    between:   by shard, the links between it and the coordinator; none where there can be none
    """

    def __init__(self, flags: ServerFlags, folder: Path, count: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.flags = flags
        self.log = folder / "servers.log"
        self._first_port = free_ports(2 * count)
        self.addresses = [f"127.0.0.1:{self._first_port + number}" for number in range(count)]
        self._data_port = self._first_port + count
        self.data_addresses = [f"127.0.0.1:{self._data_port + number}" for number in range(flags.shards)]
        self.address = self.addresses[0]
        self.known_as: dict[str, str] = {}
        self.between: Mapping[int, Sequence[Link]] = {}

    @abstractmethod
    def pids(self, to: str, victim: int) -> list[int]:
        """Returns the processes of a shard, of the coordinator, or of the whole cluster, that run now."""

    @abstractmethod
    def shards_of(self, to: str, victim: int) -> tuple[int, ...]:
        """Returns the shards that end with these processes."""

    @abstractmethod
    def close(self) -> None:
        """Stops them in order: shards last."""

    def signal(self, to: str, victim: int, number: int) -> list[int]:
        """Sends processes a signal, and returns those that it reached."""
        return [pid for pid in self.pids(to, victim) if send(pid, number)]

    def status(self) -> dict[str, Any]:
        """What they say about themselves. Raises PSError."""
        return fetch(self.address)

    def is_saving(self, shard: int) -> bool:
        """Whether a shard is writing a checkpoint, or has just written it and the manifest is not there yet."""
        with contextlib.suppress(FileNotFoundError):
            for file in self.flags.checkpoints.glob(f"*/*/shard-{shard}.safetensors"):
                if time.time() - file.stat().st_mtime < SAVING_SECONDS and not (file.parent / "manifest.json").exists():
                    return True
        return False

    def errors(self) -> list[str]:
        """Returns the errors that nothing foresaw."""
        return unforeseen(self.log.read_text(errors="replace"))

    def _await_ready(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            with contextlib.suppress(PSError):
                if len(self.status()["shards"]) == self.flags.shards:
                    return
            time.sleep(LOOK_SECONDS)  # other processes start: nothing tells this one of it
        self.close()
        raise RuntimeError(f"the servers did not start:\n{self.log.read_text()}")


class Supervised(Servers):
    """`ps-server up`: shard 0's process is the coordinator too. The cluster is its supervisor's process alone."""

    def __init__(self, flags: ServerFlags, folder: Path) -> None:
        super().__init__(flags, folder, flags.shards)
        ports = ["--port", str(self._first_port), "--data-port", str(self._data_port)]
        words = ["ps_server", "up", *ports, *flags.coordinator, *flags.process]
        self._up = Kept(words, flags.variables, self.log)
        self._await_ready()

    def pids(self, to: str, victim: int) -> list[int]:
        """Returns the supervisor for the cluster, and its child for a shard or the coordinator."""
        if to == "cluster":
            return [] if self._up.pid is None else [self._up.pid]
        index = str(victim if to == "shard" else 0)
        return [pid for pid in children(self._up.pid) if argument(pid, "--index") == index][:1]

    def shards_of(self, to: str, victim: int) -> tuple[int, ...]:
        """Returns the shard; all of them for the supervisor, without which none stays."""
        return tuple(range(self.flags.shards)) if to == "cluster" else (victim if to == "shard" else 0,)

    def close(self) -> None:
        """Stops the supervisor, which stops its shards."""
        self._up.end(STOP_SECONDS)


class Containers(Servers):
    """What docker-compose.yml starts: a coordinator, and each shard, in a process of its own; the cluster is all.

    Shards call the coordinator, and it calls each shard, through a link for each such pair.
    """

    def __init__(self, flags: ServerFlags, folder: Path, network: Links) -> None:
        super().__init__(flags, folder, flags.shards + 1)
        links = {index: (network.to(self.address), network.to(where)) for index, where in enumerate(self.addresses[1:])}
        self.between = links
        self.known_as = {where: links[index][1].address for index, where in enumerate(self.addresses[1:])}
        commands = [["coordinator", *self._listens(0, self.address), *flags.coordinator, *flags.process]]
        for index, (to_coordinator, to_shard) in links.items():
            place = ["shard", "--index", str(index), "--coordinator", to_coordinator.address]
            place += ["--data-port", str(self._data_port + index)]
            commands.append([*place, *self._listens(1 + index, to_shard.address), *flags.process])
        self._kept = [Kept(["ps_server", *words], flags.variables, self.log) for words in commands]
        self._await_ready()

    def _listens(self, number: int, advertise: str) -> list[str]:
        return ["--host", "127.0.0.1", "--port", str(self._first_port + number), "--advertise", advertise]

    def pids(self, to: str, victim: int) -> list[int]:
        """Returns the process of a container; of all of them for the cluster."""
        kept = {"coordinator": self._kept[:1], "cluster": self._kept}.get(to, self._kept[1 + victim : 2 + victim])
        return [one.pid for one in kept if one.pid is not None]

    def shards_of(self, to: str, victim: int) -> tuple[int, ...]:
        """Returns the shard; all of them for the cluster, none for the coordinator."""
        return {"coordinator": (), "cluster": tuple(range(self.flags.shards))}.get(to, (victim,))

    def close(self) -> None:
        """Stops them in order: shards last."""
        for kept in self._kept:
            kept.end(STOP_SECONDS)


def start_servers(form: str, flags: ServerFlags, folder: Path, network: Links) -> Servers:
    """Starts them in one of FORMS, and waits until they are ready."""
    return Supervised(flags, folder) if form == "up" else Containers(flags, folder, network)
