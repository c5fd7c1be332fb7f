"""Serves workers of elastic jobs that lease data."""

from __future__ import annotations

from typing import Any

import grpc

from ps_protocol.v1 import leases_pb2, leases_pb2_grpc
from ps_server.coordinator.coordinator import Coordinator
from ps_server.rpc import lease_messages
from ps_server.rpc.call_limits import check_job


class DataLeaseService(leases_pb2_grpc.DataLeaseServiceServicer):  # type: ignore[misc,unused-ignore]
    """Leases batches of data."""

    NAME = leases_pb2.DESCRIPTOR.services_by_name["DataLeaseService"].full_name

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator

    def register(self, server: grpc.Server) -> None:
        """Adds the methods to a server."""
        leases_pb2_grpc.add_DataLeaseServiceServicer_to_server(self, server)

    def LeaseData(self, request: Any, context: grpc.ServicerContext) -> Any:
        worker = request.worker
        check_job(worker.job)
        who, ask = (worker.rank, worker.incarnation), lease_messages.lease_request(request)
        return lease_messages.lease_response(self._coordinator.job(worker.job).data.lease(who, worker.lease_key, ask))
