"""Certificate files for TLS and bearer tokens: a process's own credentials, and how it verifies those of its peers.

Servers and clients have the same kind of values. A server with `cert` and `key` serves TLS; with `ca` it also requires
a certificate of that CA from every client (mutual TLS). A client with `ca` verifies its servers by it; with `cert` and
`key` it presents its own certificate.
"""

from __future__ import annotations

import datetime
import ipaddress
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import grpc

from ps_protocol.errors import InvalidRequest
from ps_runtime.reloading import ReloadingFiles

if TYPE_CHECKING:
    import argparse

    from cryptography import x509

log = logging.getLogger("ps_runtime")

MIN_TOKEN_LENGTH = 16
MAX_TOKEN_LENGTH = 512


@dataclass(frozen=True)
class Material:
    """The contents of the files, as PEM."""

    cert: bytes | None
    key: bytes | None = field(repr=False)
    ca: bytes | None


@dataclass(frozen=True)
class Tls:
    """The files of one end of TLS; `key` belongs to `cert`, `ca` verifies the other end."""

    cert: Path | None = None
    key: Path | None = field(default=None, repr=False)
    ca: Path | None = None

    def paths(self) -> list[Path]:
        """Returns the files that are given."""
        return [path for path in (self.cert, self.key, self.ca) if path is not None]

    def load(self) -> Material:
        """Reads and checks the files. Raises InvalidRequest saying in one line which file is wrong, and how."""
        cert, key, ca = (_read(path) for path in (self.cert, self.key, self.ca))
        if (cert is None) != (key is None):
            raise InvalidRequest("a certificate needs its key and a key its certificate: give --tls-cert and --tls-key")
        if cert is not None and key is not None:
            self._check_pair(cert, key)
        if ca is not None:
            for certificate in _certificates(ca, self.ca):
                _check_dates(certificate, self.ca)
        return Material(cert, key, ca)

    def _check_pair(self, cert: bytes, key: bytes) -> None:
        from cryptography.exceptions import UnsupportedAlgorithm
        from cryptography.hazmat.primitives import serialization

        first = _certificates(cert, self.cert)[0]
        try:
            private = serialization.load_pem_private_key(key, password=None)
        except (ValueError, TypeError, UnsupportedAlgorithm):
            raise InvalidRequest(
                f"{self.key} holds no private key in PEM form that can be read without a password"
            ) from None
        form = serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
        if first.public_key().public_bytes(*form) != private.public_key().public_bytes(*form):
            raise InvalidRequest(f"the key {self.key} does not belong to the certificate {self.cert}")
        _check_dates(first, self.cert)


def _read(path: Path | None) -> bytes | None:
    if path is None:
        return None
    try:
        return path.read_bytes()
    except OSError as error:
        raise InvalidRequest(f"cannot read {path} ({error.strerror})") from None


def _certificates(pem: bytes, path: Path | None) -> list[x509.Certificate]:
    from cryptography import x509

    try:
        certificates = x509.load_pem_x509_certificates(pem)
    except ValueError:
        certificates = []
    if not certificates:
        raise InvalidRequest(f"{path} holds no certificate in PEM form")
    return certificates


def _check_dates(certificate: x509.Certificate, path: Path | None) -> None:
    now = datetime.datetime.now(datetime.timezone.utc)
    if certificate.not_valid_after_utc < now:
        raise InvalidRequest(f"the certificate {path} expired on {certificate.not_valid_after_utc:%Y-%m-%d %H:%M} UTC")
    if certificate.not_valid_before_utc > now:
        raise InvalidRequest(
            f"the certificate {path} is valid from {certificate.not_valid_before_utc:%Y-%m-%d %H:%M} UTC"
        )


@dataclass(frozen=True)
class Access:
    """The credentials with which a process calls servers.

    tls:        None: plaintext
    token:      returns the current bearer token; None if no token is sent
    insecure:   allow a token to be sent in plaintext to another machine
    token_file: the file of the token; None if the token is not in a file
    """

    tls: Tls | None = None
    token: Callable[[], str | None] | None = field(default=None, repr=False)
    insecure: bool = False
    token_file: Path | None = None


PLAINTEXT = Access()


def access(
    cert: str | Path | None = None,
    key: str | Path | None = None,
    ca: str | Path | None = None,
    token_file: str | Path | None = None,
    insecure: bool = False,
) -> Access:
    """Returns a client's access, after a check of the files. Raises InvalidRequest that names the error."""
    token_path = None if token_file is None else Path(token_file)
    token = None if token_path is None else TokenFile(token_path).get
    return Access(tls(cert, key, ca), token, insecure, token_path)


def access_of(arguments: argparse.Namespace) -> Access:
    """Returns the access that a command line gives; see `access`."""
    files = arguments.tls_cert, arguments.tls_key, arguments.tls_ca, arguments.token_file
    return access(*files, arguments.insecure)


def tls(cert: str | Path | None, key: str | Path | None, ca: str | Path | None) -> Tls | None:
    """Returns the files as one value, after a check; None if no file is given. Raises InvalidRequest that names the
    error.
    """
    given = [Path(path) if path else None for path in (cert, key, ca)]
    if not any(given):
        return None
    files = Tls(*given)
    files.load()
    return files


class TokenFile:
    """A client's bearer token, which is the only line of a file. The file is read again when it changes."""

    def __init__(self, path: Path) -> None:
        self._path = path
        warn_if_readable_by_all(path)
        self._watched = ReloadingFiles([path], self._load)

    def get(self) -> str:
        """Returns the current token."""
        return self._watched.get()

    def __repr__(self) -> str:
        return f"TokenFile({str(self._path)!r})"

    def _load(self) -> str:
        words = (_read(self._path) or b"").decode("utf-8", "replace").split()
        if len(words) != 1:
            raise InvalidRequest(f"{self._path} must hold one token and nothing else, got {len(words)} words")
        return checked_token(words[0], str(self._path))


def checked_token(token: str, where: str) -> str:
    """Returns the token if it is valid. Raises InvalidRequest with `where` it is from, and never with the
    token itself.
    """
    if not MIN_TOKEN_LENGTH <= len(token) <= MAX_TOKEN_LENGTH or not token.isascii() or not token.isprintable():
        raise InvalidRequest(
            f"{where}: a token is {MIN_TOKEN_LENGTH} to {MAX_TOKEN_LENGTH} printable ASCII characters, got {len(token)}"
        )
    return token


def warn_if_readable_by_all(path: Path) -> None:
    """Logs a warning if every user of this machine can read a secret."""
    try:
        if path.stat().st_mode & 0o004:
            log.warning("%s holds a secret, and every user of this machine can read it: chmod 600", path)
    except OSError:
        pass  # reading the file raises the error


def server_credentials(files: Tls) -> grpc.ServerCredentials:
    """Returns the credentials of a server port. A new connection gets the current content of the files."""
    if files.cert is None:
        raise InvalidRequest("a server needs --tls-cert and --tls-key to serve TLS; --tls-ca alone is for clients")
    if files.key is not None:
        warn_if_readable_by_all(files.key)
    watched = ReloadingFiles(files.paths(), files.load)
    served = -1

    def configuration() -> grpc.ServerCertificateConfiguration | None:
        nonlocal served
        material = watched.get()
        if served == watched.generation:
            return None
        served = watched.generation
        return grpc.ssl_server_certificate_configuration([(material.key, material.cert)], material.ca)

    return grpc.dynamic_ssl_server_credentials(
        configuration(), configuration, require_client_authentication=files.ca is not None
    )


def certificate_expiry(files: Tls) -> Callable[[], dict[Path, float]]:
    """Returns a function that returns, for each file, when its first certificate expires, in seconds since 1970.

    As the ports do, it reads changed files again; files that are invalid are ignored, and the last valid ones count.
    """
    paths = [path for path in (files.cert, files.ca) if path is not None]

    def load() -> dict[Path, float]:
        material = files.load()
        contents = {files.cert: material.cert, files.ca: material.ca}
        ends = {path: _certificates(contents[path] or b"", path) for path in paths}
        return {path: min(each.not_valid_after_utc for each in held).timestamp() for path, held in ends.items()}

    return ReloadingFiles(files.paths(), load).get


def channel_credentials(material: Material) -> grpc.ChannelCredentials:
    """Returns a client's credentials. Without a CA, the client trusts the certificate in its own file, such as a
    server's.
    """
    return grpc.ssl_channel_credentials(material.ca or material.cert, material.key, material.cert)


def require_encryption(host: str, encrypted: bool, allowed: bool, what: str, flag: str) -> bool:
    """Returns whether a port serves plaintext to other machines, which `flag` has allowed. Raises InvalidRequest if it
    would and this is not allowed.

    host: the address to listen at
    """
    if encrypted or is_loopback(host):
        return False
    if not allowed:
        raise InvalidRequest(
            f"{what} on {host} would be open to the network in plaintext: give --tls-cert and --tls-key, "
            f"listen on 127.0.0.1, or say {flag}"
        )
    return True


def is_loopback(host: str) -> bool:
    """Returns whether only this machine can reach an address; a name other than localhost counts as open to others."""
    name = host.strip("[]").lower()
    if name == "localhost":
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
