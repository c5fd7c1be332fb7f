"""The settings of a relay: `RelayConfig`, and the declaration of each setting in it."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, fields
from pathlib import Path

from ps_protocol.wire_formats import EDITION_WIRES
from ps_runtime.credentials import Access, TokenFile, require_encryption
from ps_runtime.logs import log_settings
from ps_runtime.settings import (
    Setting,
    access_settings,
    count,
    file_path,
    host_port,
    port_number,
    seconds_or_none,
)
from ps_server.config import ADVERTISE, HEALTH_PORT, PROCESS, ServerConfig, config_of


@dataclass(frozen=True)
class RelayConfig:
    """The settings of one relay.

    server:   its ports, certificates, tokens and limits, as for every server process
    upstream: HOST:PORT of the coordinator, or of relays, with commas between them
    token_file: a file with the token for the upstream; None: the token of the role cluster in `server.tokens`, if there
                is one
    jobs:     jobs that it always follows, each in a wire format; it follows others while they have readers
    every, period: the least number of updates, and of seconds, between two editions
    http_host, http_port: the address of downloads; None if there are none
    """

    server: ServerConfig
    upstream: str
    token_file: str | None = None
    jobs: tuple[tuple[str, str], ...] = ()
    every: int = 1
    period: float = 0.0
    http_host: str = "127.0.0.1"
    http_port: int | None = None

    def check_exposure(self) -> bool:
        """Returns whether calls travel in plaintext beyond this machine. Raises InvalidRequest as ServerConfig does."""
        server = self.server
        if self.http_port is not None:
            require_encryption(self.http_host, server.tls is not None, server.insecure, "downloads", "--insecure")
        return server.is_exposed()

    def access(self, cluster_token: Access) -> Access:
        """Returns the credentials for the upstream. cluster_token: used without a token file"""
        if self.token_file is None:
            return cluster_token
        path = Path(self.token_file)
        return Access(self.server.tls, TokenFile(path).get, self.server.insecure, path)


def _addresses(text: str) -> str:
    """Reads HOST:PORT[,HOST:PORT...]."""
    return ",".join(host_port(each) for each in text.split(","))


def _jobs(text: str) -> str:
    """Reads NAME[=WIRE][,NAME...]."""
    for _, wire in _named(text):
        if wire not in EDITION_WIRES:
            raise argparse.ArgumentTypeError(f"expected one of {', '.join(EDITION_WIRES)} behind =, got {wire!r}")
    return text


def _named(text: str) -> list[tuple[str, str]]:
    """Returns each job and the wire format in which it is followed."""
    parts = [each.partition("=") for each in text.split(",") if each]
    return [(name, wire or EDITION_WIRES[0]) for name, _, wire in parts]


def _period(text: str) -> float:
    period = seconds_or_none(text)
    if not 0 <= period <= 3600:
        raise argparse.ArgumentTypeError(f"expected 0 to 3600 seconds, got {text!r}")
    return period


UPSTREAM = Setting(
    "upstream",
    "the coordinator, or a relay; of several with commas between them, the next is asked where one does not answer",
    _addresses,
    metavar="HOST:PORT",
    required=True,
)
_OF_ALL = {
    "host",
    "port",
    "metrics_host",
    "metrics_port",
    "tokens",
    "metrics_insecure",
    "audit_log",
    "shared_directory",
}
RELAY = (
    UPSTREAM,
    Setting(
        "jobs",
        "jobs to follow always, as NAME[=WIRE] with commas between them; others are followed while they are read",
        _jobs,
        metavar="NAMES",
    ),
    Setting("every", "updates between two editions, at least", count, RelayConfig.every, "N"),
    Setting("period", "seconds between two editions, at least", _period, RelayConfig.period, "SECONDS"),
    Setting("http_host", "address to serve downloads on", default=RelayConfig.http_host),
    Setting("http_port", "port of downloads over HTTP; not given: none", port_number, metavar="PORT"),
    ADVERTISE,
    HEALTH_PORT,
    Setting("token_file", "file with the token that the upstream asks for", file_path, metavar="FILE"),
    *(setting for setting in PROCESS if setting.name in _OF_ALL),
    *access_settings(serves=True),
    *log_settings("info"),
)


def relay_config_of(arguments: argparse.Namespace) -> RelayConfig:
    """Returns the settings in a relay's flags. Raises InvalidRequest if a file of TLS cannot be used."""
    given = vars(arguments)
    own = {each.name: given[each.name] for each in fields(RelayConfig) if each.name in given}
    own["jobs"] = tuple(_named(arguments.jobs or ""))
    return RelayConfig(server=config_of(arguments, None, None, None), **own)
