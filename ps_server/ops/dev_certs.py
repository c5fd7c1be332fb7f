"""`ps-server dev-certs`: a small CA with a certificate each for servers, clients and readers, for trying things out."""

from __future__ import annotations

import datetime
import ipaddress
import os
import socket
from collections.abc import Iterable
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from ps_protocol.errors import InvalidRequest

SERVER_NAME, CLIENT_NAME, READER_NAME = "ps-server", "ps-client", "ps-reader"
# In the first two certificates: what Prometheus may take for the server name of every process, at any address.
SCRAPE_NAME = "ps-torch"
# Which holder needs which files: `--split` gives each a directory of its own.
HOLDERS = {
    "server": ("ca.pem", "server.pem", "server.key", "roles"),
    "client": ("ca.pem", "client.pem", "client.key"),
    "reader": ("ca.pem", "reader.pem", "reader.key"),
}
FILES = tuple(dict.fromkeys(name for names in HOLDERS.values() for name in names))
_BACKDATED = datetime.timedelta(minutes=5)  # clocks of two machines are never quite the same

_ROLES = f"""# What each caller may do, for --tokens: lines "cn:NAME ROLE[:JOB]" and "ROLE[:JOB] TOKEN".
cn:{SERVER_NAME} cluster
cn:{CLIENT_NAME} worker
cn:{CLIENT_NAME} admin
cn:{READER_NAME} reader
"""


def write(directory: Path, hosts: Iterable[str] = (), days: int = 365, split: bool = False) -> bool:
    """Writes ca.pem, a certificate and a key each for servers, clients and readers, and roles; False if all are there.

    The CA's key is forgotten: no other certificate can be made that these would trust. `hosts`: names and addresses
    of servers besides localhost and this machine's own. `split`: into server/, client/ and reader/, what each needs and
    no other's key. Raises InvalidRequest if only some of the files are there.
    """
    wanted = [f"{holder}/{name}" for holder, names in HOLDERS.items() for name in names] if split else list(FILES)
    there = [name for name in wanted if (directory / name).exists()]
    if len(there) == len(wanted):
        return False
    if there:
        raise InvalidRequest(f"{directory} holds {', '.join(there)} already; remove all of {', '.join(wanted)} first")
    try:
        made = _make(["localhost", "127.0.0.1", "::1", socket.gethostname(), *hosts], days)
        for path in (directory / name for name in wanted):
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            _write(path, made[path.name], 0o644 if path.suffix == ".pem" else 0o600)
    except OSError as error:
        raise InvalidRequest(f"cannot write to {directory} ({error.strerror})") from None
    return True


def _make(hosts: list[str], days: int) -> dict[str, bytes]:
    authority, ca = _certificate("ps-torch development CA", days)
    server_key, server = _certificate(SERVER_NAME, days, [SERVER_NAME, SCRAPE_NAME, *hosts], (authority, ca))
    client_key, client = _certificate(CLIENT_NAME, days, [CLIENT_NAME, SCRAPE_NAME], (authority, ca))
    reader_key, reader = _certificate(READER_NAME, days, [READER_NAME], (authority, ca))
    pem = serialization.Encoding.PEM
    return {
        "ca.pem": ca.public_bytes(pem),
        "server.pem": server.public_bytes(pem),
        "server.key": _pem(server_key),
        "client.pem": client.public_bytes(pem),
        "client.key": _pem(client_key),
        "reader.pem": reader.public_bytes(pem),
        "reader.key": _pem(reader_key),
        "roles": _ROLES.encode(),
    }


def _certificate(
    name: str,
    days: int,
    hosts: list[str] | None = None,
    issuer: tuple[ec.EllipticCurvePrivateKey, x509.Certificate] | None = None,
) -> tuple[ec.EllipticCurvePrivateKey, x509.Certificate]:
    """Returns a key and its certificate; without an issuer, a CA of its own."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.timezone.utc)
    signer, signed_by = (key, None) if issuer is None else issuer
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject if signed_by is None else signed_by.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _BACKDATED)
        .not_valid_after(now + datetime.timedelta(days=days))
        .add_extension(x509.BasicConstraints(ca=signed_by is None, path_length=None), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False)
        .add_extension(_usage(signed_by is None), critical=True)
    )
    if hosts is not None:
        # Servers call each other, and workers serve metrics: both ends of both.
        both = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        names = [_general_name(host) for host in dict.fromkeys(hosts)]
        builder = builder.add_extension(x509.ExtendedKeyUsage(both), critical=False)
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    return key, builder.sign(signer, hashes.SHA256())


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


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    form = serialization.PrivateFormat.PKCS8
    return key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())


def _write(path: Path, content: bytes, mode: int) -> None:
    """Writes a file that is never open to others, not even for the moment between making it and its chmod."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
