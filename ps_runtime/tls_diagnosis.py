"""Explains in one line why a TLS handshake fails. gRPC only reports that it failed.

It repeats the handshake with Python's ssl module, whose errors have codes, so no error is recognised by its text.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
from collections.abc import Callable

from ps_protocol.errors import InvalidRequest, Untrusted
from ps_runtime.credentials import Access, Tls
from ps_runtime.tls_contexts import client_context

SECONDS = 3.0
_READ_BYTES = 2**14

# X509_V_ERR_* of OpenSSL.
_EXPIRED, _NOT_YET, _WRONG_HOST, _WRONG_ADDRESS = 10, 9, 62, 64


def explain(address: str, access: Access) -> Untrusted | None:
    """Returns the reason why the TLS handshake with HOST:PORT fails; None if it succeeds, or nothing answers."""
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    with contextlib.suppress(OSError), socket.create_connection((host, int(port)), SECONDS) as plain:
        plain.settimeout(SECONDS)
        why = _without_tls(plain) if access.tls is None else _with_tls(plain, host, access.tls)
        return None if why is None else Untrusted(f"{address}: {why}")
    return None


def _without_tls(plain: socket.socket) -> str | None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE  # nothing is sent: only whether the other end speaks TLS is asked
    context.set_alpn_protocols(["h2"])
    try:
        _Connection(plain, context, None)
    except OSError:  # an error of TLS, or a connection that broke
        return None
    return "the server wants TLS: give --tls-ca, and --tls-cert and --tls-key if it asks for a certificate"


def _with_tls(plain: socket.socket, host: str, tls: Tls) -> str | None:
    try:
        context = client_context(tls)
    except InvalidRequest as error:
        return str(error)
    context.set_alpn_protocols(["h2"])
    try:
        # In TLS 1.3 a server checks a client's certificate after the client's handshake is done. A server that accepts
        # it sends first, as HTTP/2 requires; otherwise gRPC's server closes the connection without a message.
        if _Connection(plain, context, host).first_byte() == b"":
            return _refused(tls)
    except ssl.SSLCertVerificationError as error:
        return _verification(error, host, tls)
    except ssl.SSLError as error:
        return _alert(error, tls)
    return None


class _Connection:
    """TLS over a connection, from the handshake on.

    It drives the handshake itself. SSLContext.wrap_socket treats a connection that has just been reset as one that was
    never connected: it then skips the handshake without an error, or leaves the socket open.
    """

    def __init__(self, plain: socket.socket, context: ssl.SSLContext, host: str | None) -> None:
        self._plain = plain
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_hostname=host)
        if not self._until_done(self._tls.do_handshake):
            raise ConnectionError("the connection ended in the middle of the handshake")

    def first_byte(self) -> bytes:
        """Returns the first byte that the other end sends; empty if it closes the connection."""
        received: list[bytes] = []
        self._until_done(lambda: received.append(self._tls.read(1)))
        return b"".join(received)

    def _until_done(self, step: Callable[[], object]) -> bool:
        """Passes bytes to and fro until a step is done; returns False if the connection ends before."""
        while True:
            try:
                step()
                return True
            except ssl.SSLWantReadError:
                pass
            finally:  # after an error, too, there is something to send
                self._plain.sendall(self._outgoing.read())
            data = self._plain.recv(_READ_BYTES)
            if not data:
                return False
            self._incoming.write(data)


def _verification(error: ssl.SSLCertVerificationError, host: str, tls: Tls) -> str:
    if error.verify_code == _EXPIRED:
        return "the server's certificate has expired"
    if error.verify_code == _NOT_YET:
        return "the server's certificate is not valid yet; are the clocks of both machines right?"
    if error.verify_code in (_WRONG_HOST, _WRONG_ADDRESS):
        return f"the server's certificate is not for the host name {host!r}; use a name that it lists"
    return f"the server's certificate is not signed by the CA in {tls.ca or tls.cert}"


def _alert(error: ssl.SSLError, tls: Tls) -> str | None:
    reason = error.reason or ""
    if reason in ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "PACKET_LENGTH_TOO_LONG", "RECORD_LAYER_FAILURE"):
        return "the server speaks no TLS: leave out --tls-ca, --tls-cert and --tls-key, or give the server its own"
    return _refused(tls) if "ALERT" in reason else None


def _refused(tls: Tls) -> str:
    if tls.cert is None:
        return "the server asks for a client certificate: give --tls-cert and --tls-key"
    return f"the server refuses the client certificate {tls.cert}: is it signed by the CA that the server trusts?"
