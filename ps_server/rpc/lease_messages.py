"""Messages about leased data as the server's values, and back: what `messages` is for everything else."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ps_protocol.data import BatchLease, DataRange, LeaseReport, LeaseRequest, LoaderSpec
from ps_protocol.v1 import cluster_pb2, leases_pb2, shard_pb2, types_pb2
from ps_server.core.data_commits import Committed
from ps_server.core.data_leases import Progress


def ranges_of(ranges: Iterable[types_pb2.DataRange]) -> tuple[DataRange, ...]:
    """The ranges of data that a message names."""
    return tuple(DataRange(one.loader, one.pass_number, one.start, one.stop) for one in ranges)


def lease_request(request: leases_pb2.LeaseDataRequest) -> LeaseRequest:
    """What a worker asks of a loader's data."""
    seed = request.seed if request.HasField("seed") else None
    return LeaseRequest(
        loader=LoaderSpec(request.loader, request.sample_count, request.batch_size, request.drop_last, seed),
        pass_number=request.pass_number,
        count=request.batch_count,
        report=LeaseReport(ranges_of(request.held), ranges_of(request.committed), ranges_of(request.returned)),
    )


def lease_response(lease: BatchLease) -> leases_pb2.LeaseDataResponse:
    """The batches given."""
    ranges = [
        types_pb2.DataRange(loader=each.loader, pass_number=each.pass_number, start=each.start, stop=each.stop)
        for each in lease.ranges
    ]
    return leases_pb2.LeaseDataResponse(ranges=ranges, complete=lease.complete)


def committed_request(job: str) -> shard_pb2.GetCommittedDataRequest:
    """Asks a shard what is committed."""
    return shard_pb2.GetCommittedDataRequest(job=job)


def committed_response(committed: Committed, has_say: bool) -> shard_pb2.GetCommittedDataResponse:
    """What is committed on a shard."""
    loaders = [
        shard_pb2.CommittedData(
            loader=loader,
            pass_number=number,
            ranges=[types_pb2.DataRange(loader=loader, pass_number=number, start=a, stop=b) for a, b in spans],
        )
        for loader, (number, spans) in committed.items()
    ]
    return shard_pb2.GetCommittedDataResponse(loaders=loaders, no_say=not has_say)


def committed(response: shard_pb2.GetCommittedDataResponse) -> Committed | None:
    """What a shard has committed; None if it has no say."""
    if response.no_say:
        return None
    return {one.loader: (one.pass_number, [(r.start, r.stop) for r in one.ranges]) for one in response.loaders}


def loader_status(loader: int, progress: Progress) -> cluster_pb2.LoaderStatus:
    """How far a job is in a loader's data."""
    return cluster_pb2.LoaderStatus(
        loader=loader,
        pass_number=progress.pass_number,
        sample_count=progress.samples,
        committed_count=progress.committed,
        leased_count=progress.leased,
        returned_count=progress.returned,
    )


def loader_data(loader: cluster_pb2.LoaderStatus) -> dict[str, Any]:
    """How far a job is in a loader's data, as plain data."""
    return {
        "loader": loader.loader,
        "pass": loader.pass_number,
        "samples": loader.sample_count,
        "committed": loader.committed_count,
        "leased": loader.leased_count,
        "returned": loader.returned_count,
    }
