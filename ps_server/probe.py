"""`ps-server health`: asks the standard gRPC health service, for container and cluster probes."""

from __future__ import annotations

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from ps_protocol.channel import open_channel

CALL_SECONDS = 5.0


def is_serving(address: str) -> bool:
    """True when the server at HOST:PORT answers SERVING within five seconds."""
    with open_channel(address) as channel:
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=CALL_SECONDS)
        except grpc.RpcError:
            return False
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)
