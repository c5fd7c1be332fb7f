"""Serves workers of elastic jobs that lease data."""

from __future__ import annotations

from typing import Any

import grpc

from ps_protocol.convert import data_range_messages
from ps_protocol.messages.workers import read_lease
from ps_protocol.v1 import leases_pb2, leases_pb2_grpc
from ps_server.coordinator.coordinator import Coordinator
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
        data, asked = self._coordinator.job(worker.job, worker.run).data, read_lease(request)
        lease = data.lease((worker.rank, worker.incarnation), worker.lease_key, asked)
        return leases_pb2.LeaseDataResponse(ranges=data_range_messages(lease.ranges), complete=lease.complete)
