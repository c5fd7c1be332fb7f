"""Sets up channels and servers: the options that both ends must have in common.

Keepalive finds hosts that are gone; heartbeats find processes that are stopped. A client may ping only as often as the
server allows, so the two intervals stand here side by side.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import grpc

from ps_protocol.errors import InvalidRequest
from ps_protocol.job import MAX_MESSAGE_BYTES
from ps_runtime.credentials import PLAINTEXT, Access, channel_credentials, is_loopback
from ps_runtime.reloading import ReloadingFiles

DEFAULT_PORT = 50051

_KEEPALIVE_MS = 20_000
_LEAST_PING_INTERVAL_MS = 10_000

ChannelOptions = list[tuple[str, int]]

# Neither servers nor workers compress. Older versions of gRPC unpack a message before they check its size.
NO_DECOMPRESSION = ("grpc.per_message_decompression", 0)


def server_options() -> ChannelOptions:
    """Returns the options of every server of this project, besides its limits."""
    return [
        ("grpc.so_reuseport", 0),  # two shards on one port would both bind and split the traffic
        ("grpc.keepalive_time_ms", _KEEPALIVE_MS),
        ("grpc.keepalive_timeout_ms", _KEEPALIVE_MS // 2),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", _LEAST_PING_INTERVAL_MS),
        ("grpc.http2.max_ping_strikes", 0),
        NO_DECOMPRESSION,
    ]


def open_channel(address: str, access: Access = PLAINTEXT, reads_itself: bool = False) -> grpc.Channel:
    """Opens a gRPC channel with its own connection, so that control calls never queue behind buckets.

    reads_itself: the thread that iterates over a stream of answers reads them. Otherwise gRPC has a thread for that,
                  and both wake all the time while nothing comes: 15 times a second instead of 5 (measured)

    With certificate files, the channel is replaced when they change; calls under way end on the old one. With a token,
    every call carries it. A call on a channel that is closed raises ChannelClosed. Raises InvalidRequest if a token
    would leave this machine in plaintext.
    """
    is_shown = access.tls is None and access.token is not None
    if is_shown and not access.insecure and not is_loopback(address.rpartition(":")[0]):
        raise InvalidRequest(
            f"a token for {address} would travel in plaintext: give --tls-ca, or --insecure to allow it"
        )
    return RenewedChannel(address, access, _options(reads_itself))


def _options(reads_itself: bool) -> ChannelOptions:
    own = [("SingleThreadedUnaryStream", 1)] if reads_itself else []
    return [*_CLIENT_OPTIONS, *own]


_CLIENT_OPTIONS: ChannelOptions = [
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),  # an http_proxy variable must not capture calls inside a cluster
    ("grpc.enable_retries", 0),  # they stop silently above 256 KiB; retrying is the caller's loop
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", _KEEPALIVE_MS),
    ("grpc.keepalive_timeout_ms", _KEEPALIVE_MS // 2),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    # How long one attempt to connect may take, by default 10 s (measured): an address where nobody is any more may give
    # no answer, and only after the attempt is the address asked for again.
    ("grpc.min_reconnect_backoff_ms", 5_000),
    # gRPC connects again by itself, and asks for the address again after each attempt that failed, but by default only
    # every 30 s: a pod that came back at another address would be away for that long.
    ("grpc.dns_min_time_between_resolutions_ms", 2_000),
    NO_DECOMPRESSION,
]

# Longer than the deadline of any call of this project: calls under way on a replaced channel may end on it.
RETIRED_SECONDS = 120.0


class ChannelClosed(grpc.RpcError):  # type: ignore[misc]  # grpcio ships no types
    """A call on a closed channel. gRPC itself raises a bare ValueError, which no caller treats as a failed call. This
    error has the code and text of gRPC's error for a call that was under way when the channel was closed.
    """

    def code(self) -> grpc.StatusCode:
        """Returns the code with which gRPC ends the calls that are under way when a channel is closed."""
        return grpc.StatusCode.CANCELLED

    def details(self) -> str:
        """Returns the text."""
        return "the connection is closed"


class RenewedChannel(grpc.Channel):  # type: ignore[misc]  # grpcio ships no types
    """A channel that reloads its certificates, attaches the current token to each call, and knows that it is closed."""

    def __init__(self, address: str, access: Access, options: ChannelOptions) -> None:
        self._address, self._options = address, options
        self._token = access.token
        self._watched = None if access.tls is None else ReloadingFiles(access.tls.paths(), access.tls.load)
        self._lock = threading.Lock()
        self._retired: list[tuple[float, grpc.Channel]] = []
        self._generation = 0
        self.is_closed = False
        self._channel = self._make()

    def current(self) -> tuple[int, grpc.Channel]:
        """Returns the number of the current channel, and the channel. Raises ChannelClosed."""
        if self.is_closed:
            raise ChannelClosed
        if self._watched is not None:
            self._watched.get()
            with self._lock:
                if self._watched.generation != self._generation and not self.is_closed:
                    self._generation = self._watched.generation
                    self._retired.append((time.monotonic(), self._channel))
                    self._channel = self._make()
                while self._retired and time.monotonic() - self._retired[0][0] > RETIRED_SECONDS:
                    self._retired.pop(0)[1].close()
        return self._generation, self._channel

    def metadata(self) -> tuple[tuple[str, str], ...] | None:
        """Returns the metadata with the current token; None without a token."""
        token = self._token() if self._token is not None else None
        return None if token is None else (("authorization", f"Bearer {token}"),)

    def _make(self) -> grpc.Channel:
        if self._watched is None:
            return grpc.insecure_channel(self._address, options=self._options)
        return grpc.secure_channel(self._address, channel_credentials(self._watched.get()), options=self._options)

    def close(self) -> None:
        with self._lock:
            self.is_closed = True
            for _, channel in self._retired:
                channel.close()
            self._channel.close()

    def subscribe(self, callback: Any, try_to_connect: bool | None = None) -> None:
        self.current()[1].subscribe(callback, try_to_connect)

    def unsubscribe(self, callback: Any) -> None:
        self.current()[1].unsubscribe(callback)

    def unary_unary(self, *arguments: Any, **options: Any) -> Any:
        return _Method(self, "unary_unary", arguments, options)

    def unary_stream(self, *arguments: Any, **options: Any) -> Any:
        return _Method(self, "unary_stream", arguments, options)

    def stream_unary(self, *arguments: Any, **options: Any) -> Any:
        return _Method(self, "stream_unary", arguments, options)

    def stream_stream(self, *arguments: Any, **options: Any) -> Any:
        return _Method(self, "stream_stream", arguments, options)

    def __enter__(self) -> RenewedChannel:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


class _Method:
    """One method, called on the current channel."""

    def __init__(self, channel: RenewedChannel, kind: str, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        self._channel = channel
        self._make: Callable[[grpc.Channel], Any] = lambda channel: getattr(channel, kind)(*arguments, **options)
        self._made: tuple[int, Any] = (-1, None)

    def __call__(self, request: Any, **options: Any) -> Any:
        return self._begin(lambda made: made, request, options)

    def future(self, request: Any, **options: Any) -> Any:
        """Begins a call whose answer is not waited for, and returns it."""
        return self._begin(lambda made: made.future, request, options)

    def _begin(self, way: Callable[[Any], Any], request: Any, options: dict[str, Any]) -> Any:
        """way: returns what begins a call, given gRPC's method"""
        generation, channel = self._channel.current()
        signed = self._channel.metadata()
        if signed is not None:
            options["metadata"] = (*(options.get("metadata") or ()), *signed)
        try:
            if self._made[0] != generation:
                self._made = (generation, self._make(channel))
            return way(self._made[1])(request, **options)
        except ValueError:
            if self._channel.is_closed:  # since a moment ago
                raise ChannelClosed from None
            raise
