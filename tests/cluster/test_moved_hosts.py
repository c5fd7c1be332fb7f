"""A server that comes back at another address, under the same name, as a pod does."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import grpc
import pytest

from ps_runtime.channel import open_channel
from tests.tools.cluster import until

CALL_SECONDS = 25.0  # less than the 30 s for which gRPC keeps an address by default
SILENT_SECONDS = 8.5  # less than the 10 s that an attempt to connect took by default
HEADER_BYTES, ADDRESSES = 12, 1  # of a message of DNS; the type of a question for addresses of IPv4


class Names:
    """A server of DNS that has one address for every name. Ended with the `with`.

    address: what it answers from now on
    asked:   how often it has answered
    """

    def __init__(self, address: str) -> None:
        self.address, self.asked = address, 0
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind(("127.0.0.1", 0))
        self._port = self._socket.getsockname()[1]
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def __enter__(self) -> Names:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.sendto(b"", ("127.0.0.1", self._port))
        self._thread.join()
        self._socket.close()

    def target(self, name: str, port: int) -> str:
        """What gRPC is to connect to: a port of the host of this name."""
        return f"dns://127.0.0.1:{self._port}/{name}:{port}"

    def _serve(self) -> None:
        while True:
            message, client = self._socket.recvfrom(512)
            if not message:
                return
            end = message.index(b"\0", HEADER_BYTES) + 5  # behind the name are its type and class
            kind = struct.unpack_from(">H", message, end - 4)[0]
            found = kind == ADDRESSES
            answer = b"\xc0\x0c" + struct.pack(">HHIH", ADDRESSES, 1, 0, 4) + socket.inet_aton(self.address)
            head = message[:2] + b"\x84\x00" + struct.pack(">HHHH", 1, found, 0, 0)
            self._socket.sendto(head + message[HEADER_BYTES:end] + answer * found, client)
            self.asked += found


@pytest.fixture
def port_there() -> Iterator[int]:
    """The port of a server at 127.0.0.3 that knows no method. Nothing listens there at 127.0.0.2."""
    server = grpc.server(ThreadPoolExecutor(1))
    port = server.add_insecure_port("127.0.0.3:0")
    server.start()
    yield port
    server.stop(None)


def test_a_channel_finds_a_server_that_has_moved_within_seconds(port_there: int) -> None:
    with Names("127.0.0.2") as names, open_channel(names.target("shard.test", port_there)) as channel:
        call = channel.unary_unary("/service/method")
        with pytest.raises(grpc.RpcError) as refused:
            call(b"", timeout=CALL_SECONDS)
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
        names.address = "127.0.0.3"
        with pytest.raises(grpc.RpcError) as answered:
            call(b"", timeout=CALL_SECONDS, wait_for_ready=True)
        assert answered.value.code() is grpc.StatusCode.UNIMPLEMENTED


@pytest.fixture
def silent_port(port_there: int) -> Iterator[int]:
    """The same port. At 127.0.0.2 no attempt to connect is answered: the queue there is full, and nobody takes from
    it.
    """
    with ExitStack() as stack:
        full = stack.enter_context(socket.create_server(("127.0.0.2", port_there), backlog=0))
        for _ in range(3):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(full.getsockname())
        yield port_there


def test_a_channel_whose_old_address_gives_no_answer_soon_looks_for_another_one(silent_port: int) -> None:
    with Names("127.0.0.2") as names, open_channel(names.target("shard.test", silent_port)) as channel:
        call = channel.unary_unary("/service/method")
        began = time.monotonic()
        trying = call.future(b"", timeout=CALL_SECONDS, wait_for_ready=True)
        until(lambda: names.asked > 0, "the first look")
        names.address = "127.0.0.3"
        assert trying.code() is grpc.StatusCode.UNIMPLEMENTED
        assert time.monotonic() - began < SILENT_SECONDS
