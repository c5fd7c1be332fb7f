"""Checks whether this process serves, by calls to its own ports. Health probes get this result.

An answer of the health page alone proves little: its thread is neither the one that hands out gRPC calls, nor the one
that accepts data connections.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Sequence

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from ps_protocol.errors import PSError
from ps_runtime.channel import open_channel
from ps_runtime.credentials import Tls, channel_credentials

ANSWER_SECONDS = 5.0
_FRESH_SECONDS = 1.0  # other probes get the same answer for this long
_NO_FRAME = b"\xff" * 64  # ends a data connection at once, TLS or not
_EVERY = {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1", "[::]": "::1"}


class OwnPorts:
    """Makes the calls to the ports of this process. Thread-safe.

    host, port, data_port: its addresses; data_port 0: no data connections over TCP
    tls:     the server's credentials; None: its ports are in plaintext
    name:    its host name, which its certificate must have
    threads: the threads without which it does not serve
    """

    def __init__(
        self, host: str, port: int, data_port: int, tls: Tls | None, name: str, threads: Sequence[threading.Thread]
    ) -> None:
        self._host = _EVERY.get(host, host).strip("[]")
        self._port, self._data_port, self._tls, self._name, self._threads = port, data_port, tls, name, threads
        self._lock = threading.Lock()
        self._asked, self._found = -_FRESH_SECONDS, ""

    def lost(self) -> str:
        """Returns an error that names a thread which has ended, and without which this process does not serve; empty:
        none has.
        """
        ended = next((thread for thread in self._threads if not thread.is_alive()), None)
        return "" if ended is None else f"the thread {ended.name!r} has ended, without which nothing is served"

    def trouble(self) -> str:
        """Returns why this process does not serve; empty: it does. Takes ANSWER_SECONDS a port at most."""
        with self._lock:
            if time.monotonic() - self._asked >= _FRESH_SECONDS:
                self._found = self.lost() or self._ask_grpc() or self._ask_data()
                self._asked = time.monotonic()
            return self._found

    def _ask_grpc(self) -> str:
        """Returns why no answer comes; empty: one comes. A failed TLS handshake is an answer too."""
        host = f"[{self._host}]" if ":" in self._host else self._host
        try:
            with self._channel(f"{host}:{self._port}") as channel:
                stub = health_pb2_grpc.HealthStub(channel)
                stub.Check(health_pb2.HealthCheckRequest(), timeout=ANSWER_SECONDS)
        except PSError:
            return ""  # the new TLS files are unusable, and the log says so: the old ones stay in use
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                return f"port {self._port} does not answer within {ANSWER_SECONDS:g} s"
        return ""

    def _channel(self, address: str) -> grpc.Channel:
        if self._tls is None:
            return open_channel(address)
        named = ("grpc.ssl_target_name_override", self._name)
        options = [named, ("grpc.use_local_subchannel_pool", 1), ("grpc.enable_http_proxy", 0)]
        return grpc.secure_channel(address, channel_credentials(self._tls.load()), options=options)

    def _ask_data(self) -> str:
        if not self._data_port:
            return ""
        try:
            with socket.create_connection((self._host, self._data_port), ANSWER_SECONDS) as connection:
                connection.sendall(_NO_FRAME)
                connection.recv(1)
        except (TimeoutError, ConnectionRefusedError):
            return f"the data port {self._data_port} takes no connection within {ANSWER_SECONDS:g} s"
        except OSError:  # it was closed before all was sent; or this process is out of file descriptors
            pass
        return ""
