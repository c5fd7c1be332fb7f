"""A cable between one worker and the servers, that a test can cut and plug in again."""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
from dataclasses import replace
from typing import Any

import pytest

import ps_worker
from ps_frames.client import ClientConnection
from ps_frames.frames import ConnectionOffer
from ps_protocol.messages.workers import JoinResult, ShardMap
from ps_runtime import channel, retry
from ps_worker import Session
from ps_worker.cluster import calls
from ps_worker.cluster.coordinator_calls import CoordinatorClient
from ps_worker.values import Registration
from tests.tools.cluster import Cluster, until
from tests.tools.heartbeats import come_back_soon

CHUNK = 2**16
LEASE = 30.0  # longer than what is waited for here: it ends where a test says so
BEATS = 60  # heartbeats in a lease
PAUSE_SECONDS = 0.1  # the longest between two attempts: a worker soon learns that the cable is plugged in again


class Proxy:
    """Listens on a free port and passes connections on to a target. While it is cut, connections are reset."""

    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self._target = host, int(port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        self.is_cut = False
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                threading.Thread(target=self._pass, args=(near,), daemon=True).start()

    def _pass(self, near: socket.socket) -> None:
        with contextlib.suppress(OSError), near, socket.create_connection(self._target) as far:
            with self._lock:
                if self.is_cut:
                    return
                self._open |= {near, far}
            other = {near: far, far: near}
            with selectors.DefaultSelector() as ready:
                for end in other:
                    ready.register(end, selectors.EVENT_READ)
                while True:
                    for key, _ in ready.select():
                        found = key.fileobj.recv(CHUNK)  # type: ignore[union-attr]
                        if not found:
                            return
                        other[key.fileobj].sendall(found)  # type: ignore[index]

    def cut(self) -> None:
        with self._lock:
            self.is_cut = True
            for end in self._open:
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)
            self._open.clear()

    def heal(self) -> None:
        self.is_cut = False

    def close(self) -> None:
        self.cut()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # ends the wait of `_accept`, as `close` does not
        self._listener.close()


class Cable:
    """Between the workers that are connected to `address`, and everything that a cluster serves."""

    def __init__(self, coordinator: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self._proxies = {coordinator: Proxy(coordinator)}
        self.address = self._proxies[coordinator].address
        register, join = CoordinatorClient.register, CoordinatorClient.join

        def registered(client: CoordinatorClient, *arguments: Any) -> Registration:
            answer = register(client, *arguments)
            if client.address != self.address:
                return answer
            return replace(answer, shard_map=self._through(answer.shard_map))

        def joined(client: CoordinatorClient, *arguments: object) -> JoinResult:
            found = join(client, *arguments)  # type: ignore[arg-type]
            if client.address != self.address or found.shard_map is None:
                return found
            return replace(found, shard_map=self._through(found.shard_map))

        # What this worker is told of addresses leads through the cable: as behind a router.
        monkeypatch.setattr(CoordinatorClient, "register", registered)
        monkeypatch.setattr(CoordinatorClient, "join", joined)
        come_back_soon(monkeypatch, BEATS)
        monkeypatch.setattr(retry, "LONGEST_PAUSE_SECONDS", PAUSE_SECONDS)
        longest = {"grpc.max_reconnect_backoff_ms": int(1000 * PAUSE_SECONDS)}
        monkeypatch.setattr(channel, "_CLIENT_OPTIONS", [*{**dict(channel._CLIENT_OPTIONS), **longest}.items()])
        opened = calls.open_data_connection

        def open_data_connection(offer: ConnectionOffer, address: str, *more: Any) -> ClientConnection:
            if offer.port and address in {proxy.address for proxy in self._proxies.values()}:
                port = self._proxy_of(f"127.0.0.1:{offer.port}").rpartition(":")[2]
                offer = replace(offer, port=int(port))
            return opened(offer, address, *more)

        monkeypatch.setattr(calls, "open_data_connection", open_data_connection)

    def _proxy_of(self, address: str) -> str:
        """The address by which another is reached through the cable."""
        if address not in self._proxies:
            self._proxies[address] = Proxy(address)
        return self._proxies[address].address

    def _through(self, found: ShardMap) -> ShardMap:
        return ShardMap({i: self._proxy_of(a) for i, a in found.addresses.items()}, found.bucket_shards)

    def cut(self) -> None:
        for proxy in self._proxies.values():
            proxy.cut()

    def heal(self) -> None:
        for proxy in self._proxies.values():
            proxy.heal()

    def close(self) -> None:
        for proxy in self._proxies.values():
            proxy.close()


def live(cluster: Cluster, job: str = "default") -> dict[int, int]:
    """By rank, the incarnations that the coordinator counts as live."""
    known = cluster.coordinator.jobs().get(job)
    return {} if known is None else {member.rank: member.incarnation for member in known.workers.all()}


def lose(cluster: Cluster, cable: Cable, rank: int = 0) -> None:
    """Cuts a worker off for longer than its lease: no shard counts it any more."""
    cable.cut()
    until(lambda: cluster.end_lease(rank) or rank not in live(cluster), "the end of the lease")
    until(lambda: not cluster.coordinator.job("default").workers.pending_removals(), "its removal from all shards")


def session_at(address: str, mode: str, rank: int, transport: str = "auto", world_size: int = 2) -> Session:
    """A worker's session through a cable, or beside it: each has an address of its own."""
    return ps_worker.connect(address, mode, rank=rank, world_size=world_size, transport=transport)
