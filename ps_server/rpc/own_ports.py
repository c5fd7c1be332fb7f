"""Whether this process serves: it asks its own ports, as a caller would. What probes are told comes from here.

That a page of health is answered says little: its thread is not the one that hands out calls, nor the one that takes
data connections.
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
_FRESH_SECONDS = 1.0  # for which an answer is that of other probes, too
_NO_FRAME = b"\xff" * 64  # ends a data connection at once, TLS or not
_EVERY = {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1", "[::]": "::1"}


class OwnPorts:
    """Asks the ports of this process. Thread-safe.

    host, port, data_port: where it listens; data_port 0: no data connections over TCP
    tls:     that it serves with; None: plaintext
    name:    by which others call it, and for which its certificate is
    threads: without which nothing is served
    """

    def __init__(
        self, host: str, port: int, data_port: int, tls: Tls | None, name: str, threads: Sequence[threading.Thread]
    ) -> None:
        self._host = _EVERY.get(host, host).strip("[]")
        self._port, self._data_port, self._tls, self._name, self._threads = port, data_port, tls, name, threads
        self._lock = threading.Lock()
        self._asked, self._found = -_FRESH_SECONDS, ""

    def lost(self) -> str:
        """Returns which thread has ended without which nothing is served; empty: none."""
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
        """Whether an answer comes is all that counts: also that the two ends do not trust each other is one."""
        host = f"[{self._host}]" if ":" in self._host else self._host
        try:
            with self._channel(f"{host}:{self._port}") as channel:
                stub = health_pb2_grpc.HealthStub(channel)
                stub.Check(health_pb2.HealthCheckRequest(), timeout=ANSWER_SECONDS)
        except PSError:
            return ""  # new files of TLS cannot be used, as the log says: the old ones are served
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
        except OSError:  # it was closed before all was sent; or no file can be opened here
            pass
        return ""
