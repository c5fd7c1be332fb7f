"""Values that travel between the processes of a Ray cluster: the servers to start, and the settings of workers."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ps_launch.own_servers import server_options
from ps_protocol.errors import InvalidRequest
from ps_protocol.modes import parse_mode
from ps_runtime.launch_id import GROUP_SIZE, LAUNCH_ID
from ps_runtime.settings import set_environment

# The files of `ps-server dev-certs`, and of anything that names its files so.
SERVER, WORKER = "server", "worker"


@dataclass(frozen=True)
class Certificates:
    """The contents of TLS files, which go to other nodes as arguments of actors.

    roles: the permissions by certificate, for `ps-server --tokens`; empty: servers require no certificate
    """

    ca: bytes
    cert: bytes
    key: bytes = field(repr=False)
    roles: bytes = field(default=b"", repr=False)  # it may hold tokens

    @classmethod
    def read(cls, directory: Path, holder: str) -> Certificates:
        """Reads ca.pem, HOLDER.pem, HOLDER.key and, if it exists, roles. Raises InvalidRequest."""
        roles = directory / "roles"
        try:
            ca, cert, key = ((directory / name).read_bytes() for name in ("ca.pem", f"{holder}.pem", f"{holder}.key"))
            return cls(ca, cert, key, roles.read_bytes() if holder == SERVER and roles.exists() else b"")
        except OSError as error:
            raise InvalidRequest(
                f"certificates: cannot read {error.filename} ({error.strerror}); `ps-server dev-certs {directory} "
                "--host ADDRESS`, with the address of each node, makes them"
            ) from None

    def unpack(self) -> dict[str, str]:
        """Writes the files to this process's memory; returns the environment variables with their paths. A process that
        is killed so leaves no key on a disk. Its children can read the files while it lives.
        """
        contents = {"PS_TLS_CA": self.ca, "PS_TLS_CERT": self.cert, "PS_TLS_KEY": self.key, "PS_TOKENS": self.roles}
        return {variable: _in_memory(variable, content) for variable, content in contents.items() if content}


def _in_memory(name: str, content: bytes) -> str:
    """Returns the path of a file in memory, which stays open until this process ends."""
    descriptor = os.memfd_create(name)
    os.fchmod(descriptor, 0o600)
    with open(descriptor, "wb", closefd=False) as file:
        file.write(content)
    return f"/proc/{os.getpid()}/fd/{descriptor}"


@dataclass(frozen=True)
class Deployment:
    """The servers to start, with their settings; see `ParameterServer`. Raises InvalidRequest for impossible ones."""

    shards: int = 2
    checkpoint_dir: str | None = None
    checkpoint_every: str | None = None
    restore: bool = False
    server_options: str = ""
    certificates: str | None = None
    insecure: bool = False
    resources_per_shard: Mapping[str, float] | None = None

    def __post_init__(self) -> None:
        if self.shards < 1:
            raise InvalidRequest(f"shards must be 1 or more, got {self.shards}")
        if (self.checkpoint_every or self.restore) and self.checkpoint_dir is None:
            raise InvalidRequest("checkpoint_every and restore need a checkpoint_dir, on storage that all nodes share")

    @property
    def resources(self) -> dict[str, float]:
        """The resources that Ray reserves for each shard."""
        return dict(self.resources_per_shard or {"CPU": 1})

    def options(self) -> tuple[str, ...]:
        """Returns the options that coordinator and shards share. Raises InvalidRequest for a text that is no list of
        words.
        """
        checkpoints = self.checkpoint_dir, self.checkpoint_every, self.restore
        options = server_options(*checkpoints, self.server_options, "server_options")
        return *["--insecure"] * self.insecure, *options

    def held_by(self, holder: str) -> Certificates | None:
        """Returns the certificate of a kind of process. Raises InvalidRequest if it cannot be read."""
        return Certificates.read(Path(self.certificates), holder) if self.certificates is not None else None


@dataclass(frozen=True)
class WorkerProcess:
    """The identity of a worker's process. A launcher reports the process's end to the coordinator with it."""

    job: str
    launch: str
    host: str
    pid: int


@dataclass(frozen=True)
class GroupRank:
    """The place of a process in a group: several processes that are one worker.

    member:  which of them it is, from 0
    size:    how many there are
    address: HOST:PORT at which they meet, on the first one's node
    """

    member: int
    size: int
    address: str

    def variables(self) -> dict[str, str]:
        """Returns what `torch.distributed` and `prepare` read."""
        host, _, port = self.address.rpartition(":")
        # Ray has a process see its own GPUs alone, so each is the first one.
        own = {"RANK": str(self.member), "WORLD_SIZE": str(self.size), "LOCAL_RANK": "0", GROUP_SIZE: str(self.size)}
        return {**own, "MASTER_ADDR": host.strip("[]"), "MASTER_PORT": port}


@dataclass(frozen=True)
class WorkerSettings:
    """The settings of a job's workers. They may be passed to any actor or task.

    more: other settings of a worker, by name: start_timeout=60
    """

    server: str
    mode: str
    job: str
    elastic: bool
    launch: str
    certificates: Certificates | None = None
    insecure: bool = False
    more: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if parse_mode(self.mode) is None:
            raise InvalidRequest(f"mode {self.mode} has no servers: use sync, ssp:K or async")

    def apply(
        self, rank: int | None = None, world_size: int | None = None, *, member: GroupRank | None = None
    ) -> WorkerProcess:
        """Sets the PS_* variables of this process, so that `ps_torch.connect()` and the frameworks find them.

        Args:
            rank, world_size: Those of a worker of a job that is not elastic.
            member: The place in a group, if several processes are this worker; torch's variables are set, too.

        Returns:
            The identity of this process, for `ParameterServer.report_end`.

        Raises:
            InvalidRequest: The job is not elastic, and the rank or the world size is missing.
        """
        if not self.elastic and (rank is None or world_size is None):
            raise InvalidRequest("a job that is not elastic needs each worker's rank and world_size")
        # Ray has a worker see its own GPUs alone, so each is the first of its process.
        place = {"PS_RANK": "", "PS_WORLD_SIZE": "", "PS_LOCAL_RANK": "0"}
        if not self.elastic:
            place |= {"PS_RANK": str(rank), "PS_WORLD_SIZE": str(world_size)}
        own = {"PS_SERVER": self.server, "PS_MODE": self.mode, "PS_JOB": self.job, LAUNCH_ID: self.launch}
        switches = {"PS_ELASTIC": "1" if self.elastic else "", "PS_INSECURE": "1" if self.insecure else ""}
        files = self.certificates.unpack() if self.certificates is not None else {}
        more = {f"PS_{name.upper()}": str(value) for name, value in self.more.items()}
        in_group = member.variables() if member is not None else {GROUP_SIZE: ""}
        set_environment({**more, **own, **switches, **place, **files, **in_group})
        return WorkerProcess(self.job, self.launch, socket.gethostname(), os.getpid())
