"""Records the messages of a worker's life, as bytes, beside the answers of its servers: `record_worker FOLDER`.

A release's messages are kept, so that servers of later ones can be sent them (tests/protocol/test_rolling_upgrade.py).
They are recorded with the code of that release: this file runs on its source tree, too.
"""

from __future__ import annotations

import json
import socket
import sys
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import grpc
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ps_worker
from ps_protocol.v1 import cluster_pb2, cluster_pb2_grpc, jobs_pb2, jobs_pb2_grpc
from tests.tools.cluster import Cluster, until

JOB, STEPS = "released", 6
BETWEEN_SERVERS = "ps_protocol.v1.ShardService"
MANY_ALIKE = ("Heartbeat", "RegisterShard", "Watch")  # the first of each is enough


@dataclass
class Call:
    """One call: its method, its request, and its answers, all as bytes."""

    method: str
    request: bytes
    answers: list[bytes] = field(default_factory=list)


class RecordingChannel:
    """A channel that notes the bytes of its calls, in the order in which they begin."""

    calls: ClassVar[list[Call]] = []

    def __init__(self, channel: grpc.Channel) -> None:
        self._channel = channel

    def __getattr__(self, name: str) -> Any:
        return getattr(self._channel, name)

    def unary_unary(self, *arguments: Any, **options: Any) -> Callable[..., Any]:
        return self._method("unary_unary", *arguments, **options)

    def unary_stream(self, *arguments: Any, **options: Any) -> Callable[..., Any]:
        return self._method("unary_stream", *arguments, **options)

    def _method(
        self,
        kind: str,
        method: str,
        request_serializer: Callable[[Any], bytes] = bytes,
        response_deserializer: Callable[[bytes], Any] = bytes,
        **_: Any,
    ) -> Callable[..., Any]:
        def call(request: Any, **options: Any) -> Any:
            noted = Call(method, (request_serializer or bytes)(request))
            self.calls.append(noted)

            def read(answer: bytes) -> Any:
                noted.answers.append(answer)
                return (response_deserializer or bytes)(answer)

            return getattr(self._channel, kind)(method, None, read)(noted.request, **options)

        return call


class Model(nn.Module):
    """Two groups of parameters, one of them a scalar, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(24.0).reshape(4, 6) / 8)
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.register_buffer("seen", torch.tensor(2**40 + 1))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        """Returns the loss of a batch: linear, so that gradients are numbers that float32 holds."""
        return (batch * self.weight).sum() * 0.5 + self.scale * batch.mean()


def train(address: str) -> None:
    """Trains an elastic job of one worker, and asks what an operator asks."""
    channel = grpc.insecure_channel(address)
    jobs, cluster = jobs_pb2_grpc.JobServiceStub(channel), cluster_pb2_grpc.ClusterServiceStub(channel)
    model = Model()
    groups = [{"params": [model.weight], "momentum": 0.5}, {"params": [model.scale]}]
    data = torch.arange(STEPS * 2 * 24.0).reshape(STEPS * 2, 4, 6).remainder(5)
    checkpoint = jobs_pb2.CheckpointJobRequest(job=JOB)
    asked = threading.Thread(target=lambda: jobs.CheckpointJob(checkpoint, timeout=60))
    loader = DataLoader(TensorDataset(data), batch_size=2)
    with ps_worker.connect(address, "sync", job=JOB, elastic=True, transport="grpc") as session:
        net, optimizer, loader = session.prepare(model, torch.optim.SGD(groups, lr=0.25), loader, bucket_bytes=64)
        for number, (batch,) in enumerate(loader):
            net(batch).backward()
            optimizer.step()
            optimizer.zero_grad()
            if number == 0:
                assert session.gather(number) == [0]
                cluster.GetStatus(cluster_pb2.GetStatusRequest(), timeout=10)
            if number == 1:
                asked.start()
        until(lambda: any(call.method.endswith("/Heartbeat") for call in RecordingChannel.calls), "a heartbeat")
    asked.join()
    again = next(call for call in RecordingChannel.calls if call.method.endswith("/RegisterJob"))
    jobs.RegisterJob(jobs_pb2.RegisterJobRequest.FromString(again.request), timeout=10)
    jobs.EndJob(jobs_pb2.EndJobRequest(job=JOB), timeout=10)


def main(folder: Path) -> None:
    """Writes the calls into a folder."""
    socket.gethostname = lambda: "recorder"
    plain = grpc.insecure_channel
    grpc.insecure_channel = lambda *arguments, **options: RecordingChannel(plain(*arguments, **options))
    with tempfile.TemporaryDirectory() as checkpoints:
        running = Cluster(shards=1, lease=4.0, checkpoint_dir=Path(checkpoints))
        train(running.address)
        running.stop()
    folder.mkdir(parents=True, exist_ok=True)
    index, seen = [], set()
    for call in RecordingChannel.calls:
        service, name = call.method.strip("/").split("/")
        if service == BETWEEN_SERVERS or (name in MANY_ALIKE and name in seen):
            continue
        seen.add(name)
        file = f"{len(index):02}-{name}"
        (folder / f"{file}.request").write_bytes(call.request)
        for number, answer in enumerate(call.answers):
            (folder / f"{file}.answer-{number}").write_bytes(answer)
        index.append({"method": call.method, "file": file, "answers": len(call.answers)})
    (folder / "index.json").write_text(json.dumps(index, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
