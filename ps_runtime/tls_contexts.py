"""TLS for connections other than gRPC's, with the same files and the same rules."""

from __future__ import annotations

import socket
import ssl
from typing import Any

from ps_protocol.errors import InvalidRequest
from ps_runtime.credentials import Tls


def server_context(tls: Tls, what: str) -> ssl.SSLContext:
    """Returns the TLS context of a port. With a CA, a client must present a certificate of it.

    what: what the port serves, for the error text
    Raises InvalidRequest if the files cannot be used.
    """
    tls.load()
    if tls.cert is None:
        raise InvalidRequest(f"{what} over TLS need --tls-cert and --tls-key")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION  # or a client of TLS 1.2 could ask for one handshake after the other
    try:
        context.load_cert_chain(tls.cert, tls.key)
        if tls.ca is not None:
            context.load_verify_locations(tls.ca)
            context.verify_mode = ssl.CERT_REQUIRED
    except (ssl.SSLError, OSError) as error:
        raise InvalidRequest(f"{tls.cert} cannot be served with its key ({error.strerror or error})") from None
    return context


def client_context(tls: Tls) -> ssl.SSLContext:
    """Returns the TLS context of a client. Without a CA it trusts the certificate in the client's own file, as this
    project's gRPC channels do.

    Raises InvalidRequest if the files cannot be used.
    """
    material = tls.load()
    roots = material.ca or material.cert
    try:
        context = ssl.create_default_context(cadata=None if roots is None else roots.decode("ascii", "ignore"))
        context.options |= ssl.OP_NO_RENEGOTIATION
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        context.verify_flags &= ~getattr(ssl, "VERIFY_X509_STRICT", 0)  # gRPC is not strict either
        if tls.cert is not None:
            context.load_cert_chain(tls.cert, tls.key)
    except (ssl.SSLError, OSError) as error:
        raise InvalidRequest(f"the files of TLS cannot be used ({error.strerror or error})") from None
    return context


def tls_socket(context: ssl.SSLContext, plain: socket.socket, **how: Any) -> ssl.SSLSocket:
    """Returns a connection with TLS. how: as for SSLContext.wrap_socket

    Raises OSError if it cannot; the caller then closes `plain`. Where a peer has just reset the connection,
    `wrap_socket` alone raises, too, but has detached `plain`, and leaves its descriptor open.
    """
    plain.getpeername()
    return context.wrap_socket(plain, **how)
