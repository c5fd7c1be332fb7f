"""Checks a server's health. Probes do so every few seconds, each time in a new process, so this loads no torch."""

from __future__ import annotations

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from ps_protocol.errors import PSError, Untrusted
from ps_runtime.channel import open_channel
from ps_runtime.credentials import PLAINTEXT, Access
from ps_runtime.retry import Peer

HEALTH_SECONDS = 5.0


def is_serving(address: str, access: Access = PLAINTEXT) -> bool:
    """Returns whether the server at HOST:PORT answers its health check with SERVING within five seconds.

    Raises Untrusted, with the reason, if the two ends do not trust each other.
    """
    with open_channel(address, access) as channel:
        try:
            stub = health_pb2_grpc.HealthStub(channel)
            answer = stub.Check(health_pb2.HealthCheckRequest(), timeout=HEALTH_SECONDS)
        except grpc.RpcError as call:
            error: PSError = Peer("", address, access).error(call)
            if isinstance(error, Untrusted):
                raise error from None
            return False
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)
