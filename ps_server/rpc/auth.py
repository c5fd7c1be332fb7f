"""Who a caller is: by its bearer token, by the name in its certificate, or, where nobody is asked, by its host."""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from ps_protocol.errors import InvalidRequest, Unauthenticated
from ps_runtime.credentials import checked_token, warn_if_readable_by_all
from ps_runtime.reloading import ReloadingFiles
from ps_server.rpc.permissions import ALL_GRANTS, Permission, Principal, Role, parse_grant

MAX_LINES = 10_000


class Call(Protocol):
    """What a gRPC call says about who makes it."""

    def invocation_metadata(self) -> Any:
        """Its metadata, as pairs."""

    def auth_context(self) -> Any:
        """What TLS knows of the other end, by name."""

    def peer(self) -> str:
        """Where it comes from."""


@dataclass(frozen=True)
class _Known:
    """One token of the file, kept as its digest, with where it stands and what it grants."""

    digest: bytes = field(repr=False)
    line: int
    grant: Permission


@dataclass(frozen=True)
class Directory:
    """What a tokens file says: who is known, by token and by certificate name."""

    tokens: tuple[_Known, ...]
    names: dict[str, frozenset[Permission]]
    cluster_token: str | None = field(default=None, repr=False)


def parse_directory(text: str, path: str) -> Directory:
    """Lines `ROLE[:JOB] TOKEN` and `cn:NAME ROLE[:JOB]`; # begins a comment. Raises InvalidRequest naming the line."""
    tokens: list[_Known] = []
    names: dict[str, frozenset[Permission]] = {}
    cluster: str | None = None
    lines = text.splitlines()
    if len(lines) > MAX_LINES:
        raise InvalidRequest(f"{path} may have up to {MAX_LINES} lines, got {len(lines)}")
    for number, line in enumerate(lines, 1):
        words, where = line.split(), f"{path}, line {number}"
        if not words or words[0].startswith("#"):
            continue
        if len(words) != 2:
            raise InvalidRequest(
                f"{where}: expected two words, ROLE[:JOB] TOKEN or cn:NAME ROLE[:JOB], got {len(words)}"
            )
        if words[0].startswith("cn:"):
            name = words[0].removeprefix("cn:")
            names[name] = names.get(name, frozenset()) | {parse_grant(words[1], where)}
            continue
        grant, token = parse_grant(words[0], where), checked_token(words[1], where)
        tokens.append(_Known(_digest(token), number, grant))
        if grant.role is Role.CLUSTER and cluster is None:
            cluster = token
    if not tokens and not names:
        raise InvalidRequest(f"{path} names nobody: every call would be refused")
    return Directory(tuple(tokens), names, cluster)


class Callers:
    """Tells who calls. Without a file, everyone who can connect may do everything."""

    def __init__(self, path: Path | None = None) -> None:
        """Raises InvalidRequest naming the first line of the file that is wrong."""
        self._path = path
        self._watched: ReloadingFiles[Directory] | None = None
        if path is not None:
            warn_if_readable_by_all(path)
            self._watched = ReloadingFiles([path], self._load)

    @property
    def asks(self) -> bool:
        """Whether anyone is asked who it is."""
        return self._watched is not None

    def cluster_token(self) -> str | None:
        """What this server shows to the others of its cluster."""
        return None if self._watched is None else self._watched.get().cluster_token

    def identify(self, call: Call) -> Principal:
        """Who makes a call. Raises Unauthenticated for one that shows nothing that is known."""
        if self._watched is None:
            return Principal(f"whoever calls from {host_of(call.peer())}", ALL_GRANTS)
        directory = self._watched.get()
        token = _bearer(call)
        found = [] if token is None else _matching(directory.tokens, token)
        if token is not None and not found:
            raise Unauthenticated("the bearer token is not known here")
        if found:
            return Principal(f"the holder of token {found[0].line}", frozenset(known.grant for known in found))
        for name in _certificate_names(call):
            if name in directory.names:
                return Principal(f"cn:{name}", directory.names[name])
        raise Unauthenticated("say who you are: a bearer token (--token-file) or a certificate that is known here")

    def _load(self) -> Directory:
        assert self._path is not None
        try:
            text = self._path.read_text("utf-8", "replace")
        except OSError as error:
            raise InvalidRequest(f"cannot read {self._path} ({error.strerror})") from None
        return parse_directory(text, str(self._path))


def host_of(peer: str) -> str:
    """The host in gRPC's name of a peer: its port says nothing about who it is."""
    return peer.rpartition(":")[0] or peer


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()


def _matching(tokens: tuple[_Known, ...], token: str) -> list[_Known]:
    """Every one is compared, and each in constant time: how long it takes says nothing about any."""
    digest = _digest(token)
    return [known for known in tokens if hmac.compare_digest(known.digest, digest)]


def _bearer(call: Call) -> str | None:
    for key, value in call.invocation_metadata() or ():
        if key == "authorization":
            kind, _, token = str(value).partition(" ")
            if kind.lower() != "bearer":
                raise Unauthenticated("authorization must be a bearer token")
            return token
    return None


def _certificate_names(call: Call) -> list[str]:
    found = call.auth_context()
    return [name.decode("utf-8", "replace") for name in found.get("x509_common_name", ())]
