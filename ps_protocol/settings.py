"""How every setting of both commands is found: the flag, then its PS_* variable, then the default."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ps_protocol.errors import InvalidRequest

DEFAULT_SHARED_DIRECTORY = Path("/dev/shm")  # where workers and shards of one host meet

_TRUE, _FALSE = frozenset({"1", "true", "yes", "on"}), frozenset({"0", "false", "no", "off", ""})


def variable(flag: str) -> str:
    """The environment variable of a flag: --metrics-port has PS_METRICS_PORT."""
    return "PS_" + flag.removeprefix("--").replace("-", "_").upper()


def add_setting(
    parser: argparse.ArgumentParser | argparse._ArgumentGroup,
    flag: str,
    text: str,
    *,
    default: Any = None,
    kind: Callable[[str], Any] = str,
    required: bool = False,
    metavar: str | None = None,
) -> None:
    """Adds a flag whose default comes from its variable; both are named in --help. A bool setting is a switch."""
    name = variable(flag)
    given = os.environ.get(name)
    note = f"[{name}]" if default is None or default is False else f"[{name}, default {default}]"
    if kind is bool:
        parser.add_argument(flag, action="store_true", default=_switch(name, given), help=f"{text} {note}")
        return
    # argparse runs `type` over a default that is a string, so a bad variable is refused like a bad flag.
    parser.add_argument(
        flag,
        type=kind,
        default=given if given is not None else default,
        required=required and given is None,
        metavar=metavar,
        help=f"{text} {note}",
    )


def add_access_settings(parser: argparse.ArgumentParser, serves: bool = False) -> None:
    """Adds the flags of ps_protocol.credentials: --tls-cert, --tls-key, --tls-ca, --insecure, and a client's token."""
    whose = "this process" if serves else "this client, if servers ask for one"
    add_setting(parser, "--tls-cert", f"certificate of {whose}, as PEM", metavar="FILE")
    add_setting(parser, "--tls-key", "its private key", metavar="FILE")
    note = "; with it, a server demands a certificate of every client" if serves else ""
    add_setting(parser, "--tls-ca", f"the CA that the other end's certificate is verified by{note}", metavar="FILE")
    if serves:
        add_setting(parser, "--insecure", "listen beyond this machine without TLS, and say so in the log", kind=bool)
    else:
        add_setting(parser, "--token-file", "file with this client's bearer token", metavar="FILE")
        add_setting(parser, "--insecure", "let a token travel to another machine in plaintext", kind=bool)


def _switch(name: str, given: str | None) -> bool:
    value = (given or "").lower()
    if value not in _TRUE | _FALSE:
        raise InvalidRequest(f"{name} must be 1 or 0, got {given!r}")
    return value in _TRUE


def port_number(text: str) -> int:
    """A TCP port; 0 lets the system choose."""
    return _whole_number(text, 0, 65535)


def count(text: str) -> int:
    """A whole number from 1."""
    return _whole_number(text, 1, 2**31 - 1)


def index(text: str) -> int:
    """A whole number from 0."""
    return _whole_number(text, 0, 2**31 - 1)


def seconds(text: str) -> float:
    """A positive number of seconds."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e9:
        raise argparse.ArgumentTypeError(f"expected a positive number of seconds, got {text!r}")
    return value


def amount(text: str) -> float:
    """A positive number; inf is one."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not value > 0:
        raise argparse.ArgumentTypeError(f"expected a positive number, got {text!r}")
    return value


def host_port(text: str) -> str:
    """HOST:PORT."""
    host, _, port = text.rpartition(":")
    if not host or not (port.isascii() and port.isdigit() and 0 < int(port) < 65536):
        raise argparse.ArgumentTypeError(f"expected HOST:PORT, got {text!r}")
    return text


def _whole_number(text: str, low: int, high: int) -> int:
    if not (text.isascii() and text.isdigit() and low <= int(text) <= high):
        raise argparse.ArgumentTypeError(f"expected a whole number from {low} to {high}, got {text!r}")
    return int(text)
