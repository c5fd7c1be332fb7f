"""The declaration of a setting, for both commands and for `connect`.

A setting is declared as a `Setting`. Its flag, its PS_* variable, its name in a file of settings and its keyword
argument follow from its name, and one parser reads all of them. The argument or the flag comes first, then the
variable, then a command's file (config_file.py), then the default. A variable that is empty counts as not set. Two
lists repeat the names, known_variables.py and the table in docs/configuration.md; tests compare them with
the declarations.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from ps_protocol.addresses import is_host_port
from ps_protocol.errors import InvalidRequest
from ps_runtime.known_variables import KNOWN_VARIABLES

DEFAULT_SHARED_DIRECTORY = Path("/dev/shm")  # where workers and shards of one host meet

_TRUE, _FALSE = frozenset({"1", "true", "yes", "on"}), frozenset({"0", "false", "no", "off"})
_SERVICE_LINK = re.compile(r"(tcp|udp|sctp)://.*")  # what Kubernetes puts into PS_PORT for a Service called ps
_SERVICE_LINK_ADVICE = (
    "Kubernetes sets it for a Service of that name: say enableServiceLinks: false in the pod's specification"
)


@dataclass(frozen=True)
class Setting:
    """One setting, by the name of its keyword argument: metrics_port is --metrics-port, PS_METRICS_PORT, and in a file
    metrics-port.

    text:     what it is, for --help
    kind:     makes the value of a text, or raises argparse.ArgumentTypeError; bool makes the flag a switch
    default:  the value where it is not given
    metavar:  the word for the value in --help
    required: a command refuses to run without it
    """

    name: str
    text: str
    kind: Callable[[str], Any] = str
    default: Any = None
    metavar: str | None = None
    required: bool = False

    @property
    def key(self) -> str:
        """The name in a file."""
        return self.name.replace("_", "-")

    @property
    def flag(self) -> str:
        """The flag of the commands."""
        return "--" + self.key

    @property
    def variable(self) -> str:
        """The environment variable."""
        return "PS_" + self.name.upper()

    @property
    def unset(self) -> Any:
        """The value if the setting is given nowhere."""
        return False if self.kind is bool and self.default is None else self.default

    def find(self, argument: object = None) -> Any:
        """Returns the argument; if it is None, the variable's value; if that is not set, the default.

        An argument is checked by the same parser as text. Raises InvalidRequest that names the origin of an invalid
        value.
        """
        if argument is not None:
            text = os.fspath(argument) if isinstance(argument, os.PathLike) else str(argument)
            return self._parse_from(self.name, text)
        given = self.given()
        return self._parse_from(self.variable, given, advice(given)) if given else self.unset

    def given(self) -> str | None:
        """Returns the text of the variable; None if it is not set or empty."""
        return os.environ.get(self.variable) or None

    def parse(self, text: str) -> Any:
        """Returns the value of a text. Raises argparse.ArgumentTypeError that says what was expected."""
        return switch(text) if self.kind is bool else self.kind(text)

    def written(self, value: Any) -> str:
        """Returns a value as the text of its variable; empty for None."""
        if value is None:
            return ""
        return str(int(value)) if self.kind is bool else str(value)

    def add_to(self, parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
        """Adds the flag; --help names its variable and its default. Without the flag there is no value: see
        CommandLine, which completes it."""
        unset = self.default is None or self.default is False
        note = f"[{self.variable}]" if unset else f"[{self.variable}, default {self.default}]"
        common: dict[str, Any] = {"default": argparse.SUPPRESS, "help": f"{self.text} {note}"}
        if self.kind is bool:
            parser.add_argument(self.flag, action="store_true", **common)
        else:
            parser.add_argument(self.flag, type=self.kind, metavar=self.metavar, **common)

    def _parse_from(self, origin: str, text: str, advice: str = "") -> Any:
        try:
            return self.parse(text)
        except argparse.ArgumentTypeError as error:
            raise InvalidRequest(f"{origin}: {error}{advice}") from None


def advice(text: str) -> str:
    """Returns a hint to append to the error, if another program has probably set the variable; otherwise an empty
    string.
    """
    return f"; {_SERVICE_LINK_ADVICE}" if _SERVICE_LINK.fullmatch(text) else ""


def as_variables(settings: Iterable[Setting], arguments: argparse.Namespace) -> dict[str, str]:
    """Returns the values of flags as environment variables of a child process.

    If a setting is not given but its variable is in this process's environment, it is returned with an empty text, so
    that the child does not inherit it.
    """
    given = vars(arguments)
    texts = {setting.variable: setting.written(given[setting.name]) for setting in settings}
    return {variable: text for variable, text in texts.items() if text or variable in os.environ}


def environment() -> dict[str, str]:
    """Returns a copy of this process' environment."""
    return dict(os.environ)


def set_environment(variables: Mapping[str, str]) -> None:
    """Sets variables of this process, for a launcher within it. A variable with an empty text is removed."""
    for name, text in variables.items():
        if text:
            os.environ[name] = text
        else:
            os.environ.pop(name, None)


def access_settings(serves: bool = False) -> tuple[Setting, ...]:
    """Returns the settings of ps_runtime.credentials: tls_cert, tls_key, tls_ca, insecure, a client's token_file."""
    whose = "this process" if serves else "this client, if servers ask for one"
    note = "; with it, a server demands a certificate of every client" if serves else ""
    insecure = "listen beyond this machine without TLS, and say so in the log"
    files = (
        Setting("tls_cert", f"certificate of {whose}, as PEM", file_path, metavar="FILE"),
        Setting("tls_key", "its private key", file_path, metavar="FILE"),
        Setting("tls_ca", f"the CA that the other end's certificate is verified by{note}", file_path, metavar="FILE"),
    )
    if serves:
        return *files, Setting("insecure", insecure, bool)
    token = Setting("token_file", "file with this client's bearer token", file_path, metavar="FILE")
    return *files, token, Setting("insecure", "let a token travel to another machine in plaintext", bool)


def switch(text: str) -> bool:
    """Reads 1, true, yes or on; 0, false, no or off; in small or capital letters."""
    if text.lower() not in _TRUE | _FALSE:
        raise argparse.ArgumentTypeError(f"expected 1 or 0, got {text!r}")
    return text.lower() in _TRUE


def path(text: str) -> Path | None:
    """Returns a path; None for an empty text."""
    return Path(text) if text else None


def file_path(text: str) -> str:
    """Returns the absolute path of a file, so that it stays valid in a child process and after a change of
    directory.
    """
    return str(Path(text).absolute()) if text else text


class OneOf:
    """A parser that accepts only these names."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = names

    def __call__(self, text: str) -> str:
        """Returns the name. Raises ArgumentTypeError for any other."""
        if text not in self.names:
            raise argparse.ArgumentTypeError(f"expected one of {', '.join(self.names)}, got {text!r}")
        return text


def one_of(*names: str) -> OneOf:
    """Returns a parser that accepts only these names. Shell completion offers them."""
    return OneOf(names)


def seconds(text: str) -> float:
    """Reads a positive number of seconds."""
    return _positive(text, "a positive number of seconds", 1e9)


def seconds_or_none(text: str) -> float:
    """Reads a number of seconds from 0; 0 means none."""
    with contextlib.suppress(ValueError):
        if float(text) == 0.0:
            return 0.0
    return _positive(text, "a number of seconds from 0", 1e9)


def amount(text: str) -> float:
    """Reads a positive number, or inf."""
    return _positive(text, "a positive number", math.inf)


def magnitude(text: str) -> float:
    """Reads a positive number with an optional suffix: K, M, G or B, T for thousands, millions, billions, trillions."""
    scale = _SCALES.get(text[-1:].upper())
    try:
        return _positive(text if scale is None else text[:-1], "", 1e15) * (scale or 1.0)
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(
            f"expected a positive number, such as 500K, 25M or 10G, got {text!r}"
        ) from None


_SCALES = {"K": 1e3, "M": 1e6, "G": 1e9, "B": 1e9, "T": 1e12}


def _positive(text: str, expected: str, most: float) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= most:
        raise argparse.ArgumentTypeError(f"expected {expected}, got {text!r}")
    return value


def host_port(text: str) -> str:
    """Reads HOST:PORT. Refuses a URL."""
    if "://" in text:
        scheme = text.partition("://")[0]
        raise argparse.ArgumentTypeError(f"expected HOST:PORT, without {scheme}://, got {text!r}")
    if not is_host_port(text):
        raise argparse.ArgumentTypeError(f"expected HOST:PORT, got {text!r}")
    return text


def whole_number(low: int, high: int) -> Callable[[str], int]:
    """Returns a parser of whole numbers from `low` to `high`, both inclusive."""

    def number(text: str) -> int:
        """Reads a whole number between `low` and `high`."""
        if not (text.isascii() and text.isdigit() and len(text) <= 20 and low <= int(text) <= high):
            raise argparse.ArgumentTypeError(f"expected a whole number from {low} to {high}, got {text!r}")
        return int(text)

    return number


# Of servers and workers.
NATIVE = Setting(
    "native",
    "the library for tables: auto takes it where it is, off takes numpy; the bits are the same",
    one_of("auto", "off"),
    "auto",
)

port_number = whole_number(0, 65535)  # 0 lets the system choose
count = whole_number(1, 2**31 - 1)
index = whole_number(0, 2**31 - 1)


# -- variables that nothing reads ------------------------------------------------------------------------------------

_OF_OTHERS = frozenset({"PS_COLORS", "PS_FORMAT", "PS_PERSONALITY"})  # those of the program `ps`
# Variables that Kubernetes sets for the ports of a Service whose name begins with ps.
_SERVICE_VARIABLE = re.compile(r"PS_(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_\w+)?)")


def unknown_variables(variables: Mapping[str, str] | None = None) -> str | None:
    """Returns one line about the PS_* variables that no setting reads, with the nearest known names; None if there are
    none.

    variables: None: those of this process
    """
    unknown = [
        name
        for name, value in sorted((os.environ if variables is None else variables).items())
        if name.startswith("PS_") and name not in KNOWN_VARIABLES | _OF_OTHERS and not _is_service_link(name, value)
    ]
    return "; ".join(map(_about, unknown)) or None


def _is_service_link(name: str, value: str) -> bool:
    return bool(_SERVICE_VARIABLE.fullmatch(name)) or (name.endswith("_PORT") and "://" in value)


def _about(name: str) -> str:
    near = get_close_matches(name, sorted(KNOWN_VARIABLES), 1)
    return f"the variable {name} is not known and has no effect" + (f", did you mean {near[0]}?" if near else "")


# Settings of workers and of processes that follow their job.
JOB_SERVER = Setting("server", "the coordinator; not needed for single and ddp", host_port, metavar="HOST:PORT")
JOB_NAME = Setting("job", "the job's name", default="default", metavar="NAME")
SHARED_DIRECTORY = Setting(
    "shared_directory", "where memory is shared with servers on this host", Path, DEFAULT_SHARED_DIRECTORY
)
