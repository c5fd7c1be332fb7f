"""Serves the health of each server, and reflection."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2

from ps_server.rpc.permissions import REFLECTION_V1

HEALTH_THREADS = 8  # apart from all others: a probe waits for nothing, not even for its own request


def add_health(server: grpc.Server, pool: ThreadPoolExecutor, services: list[str]) -> health.HealthServicer:
    """Adds the standard health service, which answers while all other pools are busy; and reflection.

    pool: threads for health alone
    """
    servicer = health.HealthServicer(experimental_non_blocking=True, experimental_thread_pool=pool)
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    for name in ("", *services):
        servicer.set(name, health_pb2.HealthCheckResponse.SERVING)
    names = (*services, health.SERVICE_NAME, reflection.SERVICE_NAME)
    reflection.enable_server_reflection(names, server)
    _add_reflection_v1(names, server)
    return servicer


def _add_reflection_v1(names: tuple[str, ...], server: grpc.Server) -> None:
    """Serves reflection by its newer name, which grpcio-reflection does not have yet.

    It is not in the list of services: clients request the file of each listed service, and grpcio-reflection lacks this
    one.
    """
    answer = grpc.stream_stream_rpc_method_handler(
        reflection.ReflectionServicer(names).ServerReflectionInfo,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    handler = grpc.method_handlers_generic_handler(REFLECTION_V1, {"ServerReflectionInfo": answer})
    server.add_generic_rpc_handlers((handler,))
