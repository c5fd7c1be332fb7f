"""`ps-server health`: asks the standard gRPC health service, for container and cluster probes."""

from __future__ import annotations

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from ps_runtime.channel import open_channel
from ps_runtime.credentials import PLAINTEXT, Access
from ps_runtime.tls_diagnosis import refusal

CALL_SECONDS = 5.0


def is_serving(address: str, access: Access = PLAINTEXT) -> bool:
    """True when the server at HOST:PORT answers SERVING within five seconds.

    Raises Untrusted, saying why, if the two ends do not trust each other.
    """
    with open_channel(address, access) as channel:
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=CALL_SECONDS)
        except grpc.RpcError:
            untrusted = refusal(address, access)
            if untrusted is not None:
                raise untrusted from None
            return False
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)
