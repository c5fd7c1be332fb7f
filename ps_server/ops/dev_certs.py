"""`ps-server dev-certs`: makes and renews a small CA, and a certificate for each kind of caller, for trials.

Servers, relays, workers, readers and admins have a certificate each, and the file `roles` has the permissions of each.
Running the command again makes missing certificates and renews those that expire soon, with the same CA, so that all
keep trusting one another.
"""

from __future__ import annotations

import datetime
import ipaddress
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from ps_protocol.errors import InvalidRequest

SERVER, RELAY, WORKER, READER, ADMIN, AUTHORITY = "server", "relay", "worker", "reader", "admin", "ca"
_SERVES = (SERVER, RELAY)  # they have callers, and so a file of roles
# A name in the certificates of all servers with metrics, so that Prometheus can use one server name for all.
SCRAPE_NAME = "ps-torch"
LIFE = datetime.timedelta(days=365)
# The CA lives this many times as long as the certificates that it signs: they are renewed, and it stays.
CA_LIVES = 10
_BACKDATED = datetime.timedelta(minutes=5)  # clocks of two machines are never quite the same
_LOCAL = ("localhost", "127.0.0.1", "::1")
_LONGEST_NAME = 64  # the longest common name in X.509
_PRIVATE = 0o600


@dataclass(frozen=True)
class Holder:
    """A process that gets a certificate of its own.

    file:   NAME of its NAME.pem and NAME.key
    name:   the common name in its certificate, by which `roles` knows it
    role:   its permissions: a server calls other servers, and a relay reads from them
    folder: where its files are, under the directory; empty: in the directory itself
    hosts:  its names and addresses
    """

    file: str
    name: str
    role: str
    folder: str = ""
    hosts: tuple[str, ...] = ()

    def role_line(self) -> str:
        """Returns the roles of a certificate as a line of the `roles` file."""
        return f"cn:{self.name} {self.role}"


def holders(hosts: Sequence[str] = (), split: bool = False, relays: Sequence[str] = ()) -> list[Holder]:
    """Returns the holders of certificates: servers, relays if some are named, workers, readers and admins.

    hosts:  names and addresses of servers, besides localhost and this machine's own
    relays: the same of relays
    split:  each holder has a folder, which contains no other holder's key. Each of `hosts` and `relays` is then a
            process with a certificate of its own, in a folder of its name

    Raises InvalidRequest for a name that no certificate or folder can have.
    """
    local = (*_LOCAL, socket.gethostname())
    if not split:
        servers = [Holder(SERVER, "ps-server", "cluster", "", (*local, *hosts))]
        handing_on = [Holder(RELAY, "ps-relay", READER, "", (*local, *relays))] if relays else []
    else:
        named = [Holder(SERVER, f"ps-server.{host}", "cluster", host, (*_LOCAL, host)) for host in hosts]
        servers = named or [Holder(SERVER, "ps-server", "cluster", SERVER, local)]
        handing_on = [Holder(RELAY, f"ps-relay.{name}", READER, name, (*_LOCAL, name)) for name in relays]
        _refuse_folders(servers, handing_on)
    callers = [Holder(role, f"ps-{role}", role, role if split else "") for role in (WORKER, READER, ADMIN)]
    return [*servers, *handing_on, *callers]


def _refuse_folders(servers: Sequence[Holder], relays: Sequence[Holder]) -> None:
    """Raises InvalidRequest for a name that cannot be a folder, belongs to another holder, or is too long for a
    certificate.
    """
    taken = {AUTHORITY, WORKER, READER, ADMIN, ".", ".."}
    for flag, named in (("--host", servers), ("--relay", relays)):
        for holder in named:
            if holder.folder in taken or "/" in holder.folder or len(holder.name) > _LONGEST_NAME:
                raise InvalidRequest(
                    f"{flag} {holder.folder}: with --split, that cannot name a certificate and its folder"
                )
        taken |= {holder.folder for holder in named}


def write(
    directory: Path,
    hosts: Sequence[str] = (),
    life: datetime.timedelta = LIFE,
    split: bool = False,
    new_ca: bool = False,
    relays: Sequence[str] = (),
) -> list[str]:
    """Makes the certificates that are missing and those that end within a third of their life. Returns their files.

    A holder's folder has ca.pem and its certificate and key; a server's and a relay's also `roles`, which is never
    overwritten. The CA's key, ca.key, is in the directory, with `split` in ca/: its holder can make certificates that
    all processes trust. The CA is kept until it ends within a third of `life`, or `new_ca`, which makes everything
    anew. `hosts`, `split` and `relays`: see `holders`. Raises InvalidRequest if there are files, but no CA that could
    have made them.
    """
    wanted = holders(hosts, split, relays)
    home = directory / AUTHORITY if split else directory
    try:
        authority = None if new_ca else _Authority.read(home)
        if authority is None and not new_ca:
            _refuse_files_of_others(directory, wanted)
        if authority is None or _remaining(authority.certificate) < life / 3:
            authority = _Authority.make(home, life * CA_LIVES)
            due = wanted
        else:
            due = [holder for holder in wanted if _is_due(directory, holder, authority.certificate, (*hosts, *relays))]
        if due and authority.key is None:
            names = ", ".join(_name(holder, f"{holder.file}.pem") for holder in due)
            raise InvalidRequest(f"{home / 'ca.key'} is not there to sign {names}: bring it back, or give --new-ca")
        for holder in due:
            _issue(directory, holder, authority, life)
        for folder in {directory / holder.folder for holder in wanted}:
            _replace(folder / "ca.pem", _pem(authority.certificate), 0o644)
        _add_roles(directory, wanted, due)
    except OSError as error:
        raise InvalidRequest(f"cannot write to {directory} ({error.strerror})") from None
    return [_name(holder, f"{holder.file}.pem") for holder in due]


@dataclass(frozen=True)
class _Authority:
    """The CA; its key is None if the operator has removed it."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey | None = field(repr=False)

    @staticmethod
    def read(home: Path) -> _Authority | None:
        """Returns the CA that is in a folder, if there is one."""
        certificate = _read_certificate(home / "ca.pem")
        if certificate is None:
            return None
        key = _read_key(home / "ca.key")
        if key is not None and key.public_key() != certificate.public_key():
            raise InvalidRequest(f"the key {home / 'ca.key'} does not belong to {home / 'ca.pem'}")
        return _Authority(certificate, key)

    @staticmethod
    def make(home: Path, life: datetime.timedelta) -> _Authority:
        """Makes a CA, and writes it into a folder."""
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = _certificate("ps-torch development CA", key, life)
        _replace(home / "ca.key", _key_pem(key), _PRIVATE)
        _replace(home / "ca.pem", _pem(certificate), 0o644)
        return _Authority(certificate, key)


def _refuse_files_of_others(directory: Path, wanted: list[Holder]) -> None:
    names = [_name(holder, f"{holder.file}{suffix}") for holder in wanted for suffix in (".pem", ".key")]
    there = [name for name in names if (directory / name).exists()]
    if there:
        raise InvalidRequest(
            f"{directory} holds {', '.join(there)} already, but no ca.pem: remove them, or replace them with --new-ca"
        )


def _is_due(directory: Path, holder: Holder, ca: x509.Certificate, hosts: Sequence[str]) -> bool:
    """Returns whether a certificate is missing, ends soon, is of another CA or lacks one of the names in `hosts`."""
    folder = directory / holder.folder
    certificate, key = _read_certificate(folder / f"{holder.file}.pem"), _read_key(folder / f"{holder.file}.key")
    if certificate is None or key is None or key.public_key() != certificate.public_key():
        return True
    try:
        certificate.verify_directly_issued_by(ca)
    except (ValueError, TypeError, InvalidSignature):
        return True
    life = certificate.not_valid_after_utc - certificate.not_valid_before_utc
    missing = {host for host in hosts if host in holder.hosts} - set(_hosts_of(certificate))
    return _remaining(certificate) < life / 3 or bool(missing)


def _issue(directory: Path, holder: Holder, authority: _Authority, life: datetime.timedelta) -> None:
    """Writes a new key and certificate, which keeps the names that the last one had."""
    folder = directory / holder.folder
    before = _read_certificate(folder / f"{holder.file}.pem")
    hosts = dict.fromkeys((holder.name, *holder.hosts, *(_hosts_of(before) if before is not None else ())))
    if holder.file in (*_SERVES, WORKER):
        hosts[SCRAPE_NAME] = None
    key = ec.generate_private_key(ec.SECP256R1())
    certificate = _certificate(holder.name, key, life, list(hosts), authority)
    _replace(folder / f"{holder.file}.key", _key_pem(key), _PRIVATE)
    _replace(folder / f"{holder.file}.pem", _pem(certificate), 0o644)


def _add_roles(directory: Path, wanted: list[Holder], made: list[Holder]) -> None:
    """Writes `roles` beside the certificate of each server and relay; only adds holders to an existing file."""
    for folder in {directory / holder.folder for holder in wanted if holder.file in _SERVES}:
        path = folder / "roles"
        if not path.exists():
            head = '# What each caller may do, for --tokens: lines "cn:NAME ROLE[:JOB]" and "ROLE[:JOB] TOKEN".'
            _replace(path, "\n".join([head, *(holder.role_line() for holder in wanted), ""]).encode(), _PRIVATE)
            continue
        text = path.read_text("utf-8", "replace")
        new = [holder.role_line() for holder in made if f"cn:{holder.name} " not in text]
        if new:
            _replace(path, "\n".join([text.rstrip("\n"), *new, ""]).encode(), _PRIVATE)


def _certificate(
    name: str,
    key: ec.EllipticCurvePrivateKey,
    life: datetime.timedelta,
    hosts: Sequence[str] = (),
    issuer: _Authority | None = None,
) -> x509.Certificate:
    """Returns a certificate for a key; without an issuer, a CA's own."""
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.timezone.utc)
    end, signer, signed_by = now + life, key, subject
    if issuer is not None:
        assert issuer.key is not None
        end, signer, signed_by = (
            min(end, issuer.certificate.not_valid_after_utc),
            issuer.key,
            issuer.certificate.subject,
        )
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(signed_by)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _BACKDATED)
        .not_valid_after(end)
        .add_extension(x509.BasicConstraints(ca=issuer is None, path_length=None), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False)
        .add_extension(_usage(issuer is None), critical=True)
    )
    if issuer is not None:
        # Each certificate is for both ends of a connection: servers also call each other, and workers serve metrics.
        both = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        names = [_general_name(host) for host in hosts]
        builder = builder.add_extension(x509.ExtendedKeyUsage(both), critical=False)
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    return builder.sign(signer, hashes.SHA256())


def _usage(authority: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not authority,
        key_cert_sign=authority,
        crl_sign=authority,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _hosts_of(certificate: x509.Certificate) -> list[str]:
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return []
    return [str(name.value) for name in names]


def _remaining(certificate: x509.Certificate) -> datetime.timedelta:
    return certificate.not_valid_after_utc - datetime.datetime.now(datetime.timezone.utc)


def _name(holder: Holder, file: str) -> str:
    """Returns a file's path below the directory."""
    return f"{holder.folder}/{file}" if holder.folder else file


def _read_certificate(path: Path) -> x509.Certificate | None:
    """Returns a certificate, or None if the file is missing or has other content."""
    try:
        return x509.load_pem_x509_certificate(path.read_bytes())
    except (FileNotFoundError, ValueError):
        return None


def _read_key(path: Path) -> ec.EllipticCurvePrivateKey | None:
    try:
        key = serialization.load_pem_private_key(path.read_bytes(), password=None)
    except (FileNotFoundError, ValueError, TypeError):
        return None
    return key if isinstance(key, ec.EllipticCurvePrivateKey) else None


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    form = serialization.PrivateFormat.PKCS8
    return key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())


def _replace(path: Path, content: bytes, mode: int) -> None:
    """Writes a file atomically, and never readable by others, not even before its chmod. An equal file stays
    untouched.
    """
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    if path.exists() and path.read_bytes() == content:
        return
    half = path.with_name(f".{path.name}.new")
    half.unlink(missing_ok=True)
    descriptor = os.open(half, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(half, path)
