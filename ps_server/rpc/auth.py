"""Identifies the principal of a call by its bearer token or the name in its certificate, on servers that
require one.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import math
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path

from ps_frames.server import ServerCall
from ps_protocol.errors import InvalidRequest, Unauthenticated
from ps_runtime.credentials import checked_token, warn_if_readable_by_all
from ps_runtime.dates import date_text
from ps_runtime.reloading import ReloadingFiles
from ps_server.rpc.permissions import Permission, Principal, Role, parse_permission

log = logging.getLogger("ps_server")

MAX_LINES = 10_000
_NAME = re.compile(r"[A-Za-z0-9._@-]{1,64}")
_DATE = re.compile(r"\d{4}-\d\d-\d\d(T\d\d:\d\d(:\d\d)?Z)?")


@dataclass(frozen=True)
class _TokenEntry:
    """One token of the file, kept as its digest, with its line and its permissions.

    name:  the name of the token's holder; empty: the holder has no name
    until: when it expires, in seconds since 1970
    """

    digest: bytes = field(repr=False)
    line: int
    permission: Permission
    name: str = ""
    until: float = math.inf

    @property
    def principal(self) -> str:
        """Returns the name of its holder as a principal."""
        return f"token:{self.name}" if self.name else f"the holder of token {self.line}"


@dataclass(frozen=True)
class AccessList:
    """The content of a tokens file: permissions by token and by certificate name."""

    tokens: tuple[_TokenEntry, ...]
    names: dict[str, frozenset[Permission]]
    cluster_tokens: tuple[tuple[str, float], ...] = field(default=(), repr=False)  # each with when it ends


def parse_access_list(text: str, path: str) -> AccessList:
    """Reads lines `ROLE[:JOB] TOKEN [name=NAME] [until=DATE]` and `cn:NAME ROLE[:JOB]`; # begins a comment.

    Raises InvalidRequest naming the first line that is wrong.
    """
    tokens: list[_TokenEntry] = []
    names: dict[str, frozenset[Permission]] = {}
    cluster: list[tuple[str, float]] = []
    lines = text.splitlines()
    if len(lines) > MAX_LINES:
        raise InvalidRequest(f"{path} may have up to {MAX_LINES} lines, got {len(lines)}")
    for number, line in enumerate(lines, 1):
        words, where = line.split(), f"{path}, line {number}"
        if not words or words[0].startswith("#"):
            continue
        if len(words) < 2 or (len(words) > 2 and words[0].startswith("cn:")):
            raise InvalidRequest(
                f"{where}: expected two words, ROLE[:JOB] TOKEN or cn:NAME ROLE[:JOB], got {len(words)}"
            )
        if words[0].startswith("cn:"):
            name = words[0].removeprefix("cn:")
            names[name] = names.get(name, frozenset()) | {parse_permission(words[1], where)}
            continue
        permission, token = parse_permission(words[0], where), checked_token(words[1], where)
        tokens.append(_TokenEntry(_digest(token), number, permission, *_options(words[2:], where)))
        if permission.role is Role.CLUSTER:
            cluster.append((token, tokens[-1].until))
    if not tokens and not names:
        raise InvalidRequest(f"{path} names no token and no certificate: every call would be refused")
    return AccessList(tuple(tokens), names, tuple(cluster))


def _options(words: list[str], where: str) -> tuple[str, float]:
    """Returns the name and the end of a token. Raises InvalidRequest, which names no word: it may be a secret."""
    name, until = "", math.inf
    for word in words:
        option, _, value = word.partition("=")
        if option == "name" and not name and _NAME.fullmatch(value):
            name = value
        elif option == "until" and until == math.inf and (end := _end(value)) is not None:
            until = end
        else:
            raise InvalidRequest(
                f"{where}: after the token come name=NAME, of up to 64 letters, digits and . _ @ -, and until=DATE, "
                "such as 2027-01-31 or 2027-01-31T12:00Z"
            )
    return name, until


def _end(text: str) -> float | None:
    """Parses the end of a token's validity; returns seconds since 1970, or None for another text.

    A date without a time means the beginning of that day, UTC.
    """
    if not _DATE.fullmatch(text):
        return None
    try:
        moment = datetime.fromisoformat(text.replace("Z", ""))
    except ValueError:
        return None
    return moment.replace(tzinfo=timezone.utc).timestamp()


class Authenticator:
    """Identifies the principal of each call. Thread-safe.

    Without a file callers show no token, and every caller may do everything: see `CallLimits.enter`.
    """

    def __init__(self, path: Path | None = None, clock: Callable[[], float] = time.time) -> None:
        """clock: in seconds since 1970. Raises InvalidRequest naming the first line of the file that is wrong."""
        self._clock = clock
        self._path = path
        self._watched: ReloadingFiles[AccessList] | None = None
        if path is not None:
            warn_if_readable_by_all(path)
            self._watched = ReloadingFiles([path], self._load)

    @property
    def is_required(self) -> bool:
        """Whether callers must show a token or a certificate."""
        return self._watched is not None

    def cluster_token(self) -> str | None:
        """Returns the token that this server sends to the other servers of its cluster; None if there is none."""
        if self._watched is None:
            return None
        now = self._clock()
        return next((token for token, until in self._watched.get().cluster_tokens if now < until), None)

    def identify(self, call: ServerCall) -> Principal:
        """Returns the principal of a call. Raises Unauthenticated without a known token or certificate.

        Call it only if `is_required`.
        """
        assert self._watched is not None
        known = self._watched.get()
        token = _bearer(call)
        if token is not None:
            entries = _matching(known.tokens, token)
            if not entries:
                raise Unauthenticated("the bearer token is not known here")
            return self._holder(entries)
        for name in _certificate_names(call):
            if name in known.names:
                return Principal(f"cn:{name}", known.names[name])
        raise Unauthenticated("say who you are: a bearer token (--token-file) or a certificate that is known here")

    def _holder(self, entries: list[_TokenEntry]) -> Principal:
        """Returns the principal of a token, from the lines that name it. Raises Unauthenticated if all of them have
        expired.
        """
        now = self._clock()
        good = [entry for entry in entries if now < entry.until]
        if not good:
            last = max(entries, key=lambda entry: entry.until)
            whose = f" of {last.name}" if last.name else ""
            raise Unauthenticated(f"the bearer token{whose} ended on {date_text(last.until)}: ask for a new one")
        return Principal(good[0].principal, frozenset(entry.permission for entry in good))

    def _load(self) -> AccessList:
        assert self._path is not None
        try:
            text = self._path.read_text("utf-8", "replace")
        except OSError as error:
            raise InvalidRequest(f"cannot read {self._path} ({error.strerror})") from None
        found = parse_access_list(text, str(self._path))
        now = self._clock()
        for entry in found.tokens:
            if entry.until <= now:
                log.warning("%s, line %d: this token ended on %s", self._path, entry.line, date_text(entry.until))
        return found


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()


def _matching(tokens: tuple[_TokenEntry, ...], token: str) -> list[_TokenEntry]:
    """Returns the entries of a token. It compares all entries, each in constant time, so the duration reveals
    nothing.
    """
    digest = _digest(token)
    return [entry for entry in tokens if hmac.compare_digest(entry.digest, digest)]


def _bearer(call: ServerCall) -> str | None:
    for key, value in call.invocation_metadata():
        if key == "authorization":
            kind, _, token = str(value).partition(" ")
            if kind.lower() != "bearer":
                raise Unauthenticated("authorization must be a bearer token")
            return token
    return None


def _certificate_names(call: ServerCall) -> list[str]:
    names = call.auth_context().get("x509_common_name", ())
    return [name.decode("utf-8", "replace") for name in names]
