"""How channels and servers are set up: the options that both ends must hold in common.

Keepalive finds hosts that are gone; heartbeats find processes that are stopped. A client may ping only as often as the
server allows, so the two intervals stand here side by side.
"""

from __future__ import annotations

import grpc

DEFAULT_PORT = 50051
MAX_BUCKET_BYTES = 16 * 2**20
# A message is a bucket and its header, or a control message: a job of MAX_PARAMETERS parameters fits.
MAX_MESSAGE_BYTES = MAX_BUCKET_BYTES + 2**20

_KEEPALIVE_MS = 20_000
_LEAST_PING_INTERVAL_MS = 10_000

ChannelOptions = list[tuple[str, int]]


def server_options() -> ChannelOptions:
    """Options of every server of this project."""
    return [
        ("grpc.so_reuseport", 0),  # two shards on one port would both bind and split the traffic
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        ("grpc.keepalive_time_ms", _KEEPALIVE_MS),
        ("grpc.keepalive_timeout_ms", _KEEPALIVE_MS // 2),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", _LEAST_PING_INTERVAL_MS),
        ("grpc.http2.max_ping_strikes", 0),
    ]


def open_channel(address: str) -> grpc.Channel:
    """A channel with a connection of its own, so that control calls never queue behind buckets."""
    return grpc.insecure_channel(
        address,
        options=[
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
        ],
    )
