"""Messages about leased data as the server's values, and back: what convert.py is for everything else."""

from __future__ import annotations

from ps_protocol.convert import data_range_messages, data_ranges
from ps_protocol.data import BatchLease, LeaseReport, LeaseRequest, LoaderSpec
from ps_protocol.v1 import cluster_pb2, leases_pb2, shard_pb2, types_pb2
from ps_server.core.data_commits import Committed
from ps_server.core.data_leases import Progress


def lease_request(request: leases_pb2.LeaseDataRequest) -> LeaseRequest:
    """What a worker asks of a loader's data."""
    loader = request.loader
    seed = loader.seed if loader.HasField("seed") else None
    return LeaseRequest(
        loader=LoaderSpec(loader.loader, loader.sample_count, loader.batch_size, loader.drop_last, seed),
        pass_number=request.pass_number,
        count=request.batch_count,
        report=LeaseReport(data_ranges(request.leased), data_ranges(request.committed), data_ranges(request.returned)),
    )


def lease_response(lease: BatchLease) -> leases_pb2.LeaseDataResponse:
    """The batches given."""
    return leases_pb2.LeaseDataResponse(ranges=data_range_messages(lease.ranges), complete=lease.complete)


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
    return shard_pb2.GetCommittedDataResponse(loaders=loaders, trains_buckets=has_say)


def committed(response: shard_pb2.GetCommittedDataResponse) -> Committed | None:
    """What a shard has committed; None if it has no say."""
    if not response.trains_buckets:
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
