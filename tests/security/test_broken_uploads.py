"""A caller that ends its call before its request is whole: nobody's error, and no line in the log."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator

import pytest

from ps_runtime.channel import open_channel
from tests.tools.cluster import Cluster, until

PUSH, PULL = "/ps_protocol.v1.DataService/Push", "/ps_protocol.v1.DataService/Pull"
HEARTBEAT = "/ps_protocol.v1.MembershipService/Heartbeat"
REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"


@pytest.mark.parametrize("path", [PUSH, PULL, HEARTBEAT, REFLECTION])
def test_a_call_that_its_caller_ends_before_its_request_came_leaves_no_line(
    make_cluster: Callable[..., Cluster], caplog: pytest.LogCaptureFixture, path: str
) -> None:
    """A line with a traceback for each: anyone who may call could fill the disk."""
    server = make_cluster(shards=1).servers[0]
    release = threading.Event()

    def nothing() -> Iterator[bytes]:
        release.wait()
        yield b""

    with caplog.at_level(logging.WARNING), open_channel(server.address) as channel:
        calls = [channel.stream_stream(path)(nothing(), timeout=600) for _ in range(3)]
        until(lambda: server.calls_in_flight() == 3, "the start of every call")
        for call in calls:
            call.cancel()
        until(lambda: not server.calls_in_flight(), "the end of every call")
        release.set()
    server.stop()
    said = [record.message for record in caplog.records]
    assert [each for each in said if not each.startswith("job ")] == [], "but for jobs of tests that share a cluster"
