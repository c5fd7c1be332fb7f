"""The calls by which a reader follows a table: it asks the coordinator for the shards, and a shard for changed rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grpc
import numpy as np
import torch

from ps_protocol.errors import InvalidRequest
from ps_protocol.framing import split_message
from ps_protocol.messages import rows
from ps_protocol.row_ids import ID_BYTES
from ps_protocol.tensors import row_codec
from ps_protocol.v1 import cluster_pb2, feed_pb2
from ps_protocol.v1.cluster_pb2_grpc import ClusterServiceStub
from ps_runtime.channel import open_channel
from ps_runtime.credentials import PLAINTEXT, Access
from ps_runtime.retry import Peer
from ps_worker.tables.row_copy import ReadRowsMessage

STATUS_SECONDS = 10.0
_WATCH_ROWS = f"/{feed_pb2.DESCRIPTOR.services_by_name['FeedService'].full_name}/WatchRows"


def shard_addresses(server: str, access: Access = PLAINTEXT) -> tuple[dict[int, str], int]:
    """Returns the addresses of the shards that have registered, by index, and the number of shards of the cluster.

    server: HOST:PORT of the coordinator
    access: its role must be that of a reader

    Raises PSError.
    """
    status = _status(server, access)
    return {shard.index: shard.address for shard in status.shards}, status.coordinator.shard_count


def upstream_of(server: str, access: Access = PLAINTEXT) -> str:
    """Returns the addresses that a relay follows; empty: the server is a coordinator. Raises PSError."""
    return str(_status(server, access).coordinator.upstream)


def _status(server: str, access: Access) -> Any:
    with open_channel(server, access) as channel:
        try:
            return ClusterServiceStub(channel).GetStatus(cluster_pb2.GetStatusRequest(), timeout=STATUS_SECONDS)
        except grpc.RpcError as error:
            raise Peer("coordinator", server, access).error(error) from None


class RowWatch:
    """One call of WatchRows: an iterator over its messages. Raises PSError if it ends in any other way than by
    `cancel`.

    cursor: the last cursor of an earlier call to this shard; empty: all rows are wanted
    period: the least time between two rounds, in seconds
    """

    def __init__(
        self, shard: int, address: str, access: Access, job: str, table: str, cursor: bytes, period: float
    ) -> None:
        self._peer, self._dim = Peer(f"shard {shard}", address, access), 0
        request = rows.write_watch(rows.RowsWatch(job, table, cursor, period))
        self._channel = open_channel(address, access)
        self._call: Any = self._channel.unary_stream(_WATCH_ROWS)(request)
        self.is_cancelled = False

    def __iter__(self) -> Iterator[ReadRowsMessage]:
        try:
            for message in self._call:
                yield self._part(message)
        except grpc.RpcError as error:
            if not self.is_cancelled:
                raise self._peer.error(error) from None
        finally:
            self.cancel()

    def cancel(self) -> None:
        """Ends the call. For any thread."""
        self.is_cancelled = True
        self._call.cancel()
        self._channel.close()

    def _part(self, message: bytes) -> ReadRowsMessage:
        part = rows.read_feed_part(*split_message(message))
        if part.begin is not None:
            self._dim = part.begin.dim
        codec = row_codec(part.wire_format or "float32")
        got = part.payload if part.payload is not None else b""
        expected = (part.removed + part.rows) * ID_BYTES + codec.size(part.rows * self._dim)
        if len(got) != expected:
            raise InvalidRequest(f"{self._peer}: expected {expected} bytes for {part.rows} rows, got {len(got)}")
        ids = np.frombuffer(got, "<i8", part.removed + part.rows).astype(np.int64)
        elements = codec.decode(memoryview(got)[ids.nbytes :], part.rows * self._dim) if part.rows else torch.empty(0)
        values = elements.to(torch.float32).view(part.rows, self._dim)
        return ReadRowsMessage(part.begin, ids[: part.removed], ids[part.removed :], values, part.cursor)
