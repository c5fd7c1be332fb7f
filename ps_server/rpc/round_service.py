"""Serves workers that gather values from each other, in rounds."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc

from ps_protocol.v1 import rounds_pb2, rounds_pb2_grpc
from ps_server.coordinator.coordinator import Coordinator
from ps_server.coordinator.rounds import Standing
from ps_server.rpc import convert
from ps_server.rpc.call_limits import check_job, in_pool
from ps_server.rpc.streams import GrpcCall, ResponseStream, Send


class RoundService(rounds_pb2_grpc.RoundServiceServicer):  # type: ignore[misc,unused-ignore]
    """Takes a value of each worker, and hands all to each. `senders`: send to those that wait."""

    NAME = rounds_pb2.DESCRIPTOR.services_by_name["RoundService"].full_name

    def __init__(self, coordinator: Coordinator, senders: ThreadPoolExecutor) -> None:
        self._coordinator = coordinator
        self._senders = senders
        setattr(self, "GatherValues", in_pool(self._gather, None, non_blocking=True))  # noqa: B010

    def register(self, server: grpc.Server) -> None:
        """Adds the methods to a server."""
        rounds_pb2_grpc.add_RoundServiceServicer_to_server(self, server)

    def _gather(self, request: Any, context: grpc.ServicerContext, send: Send) -> None:
        worker = request.worker
        check_job(worker.job)
        stream = ResponseStream(send, GrpcCall(context), self._senders)
        asked = convert.gather_request(request)
        stream.on_close(
            self._coordinator.job(worker.job, worker.run).rounds.gather_values(asked, _RoundListener(stream))
        )


class _RoundListener:
    """Tells a worker over its stream how a round stands; see rounds.Listener."""

    def __init__(self, stream: ResponseStream) -> None:
        self._stream = stream
        self.finish, self.fail = stream.finish, stream.fail

    def tell(self, standing: Standing) -> None:
        for response in convert.gather_responses(standing):
            self._stream.put(lambda response=response: response)  # type: ignore[misc]
        if standing.complete is not None:
            self.finish()
