"""A crowd of readers that never read takes a bounded part of the memory of a shard or a relay, and is cut off."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

import ps_torch as ps
from ps_protocol.messages.editions import (
    EditionCall,
    WeightsAsked,
    read_weights_here,
    write_edition_call,
    write_weights_asked,
)
from ps_protocol.v1 import feed_pb2
from ps_server.ops import requests
from tests.tools.cluster import TEST_SECONDS, until
from tests.tools.followed_trainer import FollowedTrainer
from tests.tools.launching import Commands, resident

READERS, OF_A_CONNECTION = 1000, 40  # a connection may have STREAMS_OF_A_CONNECTION calls at a time
BUCKET_BYTES = 128 * 1024
WIDTH = 100_000  # 16 MB of weights
# Without these gRPC's client takes in, on a fast link, what nobody has asked for.
SMALL_WINDOW = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 65_535)]
OPTIONS = [*SMALL_WINDOW, ("grpc.use_local_subchannel_pool", 1)]  # each channel has a connection of its own
SERVICE = f"/{feed_pb2.DESCRIPTOR.services_by_name['FeedService'].full_name}"
A_READER_BYTES = 2 * BUCKET_BYTES + 256 * 1024  # a message, as it is made and as it is sent; the thread that sends it
FLAGS = ["--port=0", "--metrics-port=0", f"--max-feeds={2 * READERS}", "--max-calls=4096", "--max-stall-seconds=45"]
SLOWEST_STEP_SECONDS = 25.0  # less than a reader may stall: a step that waited for one would take longer


@pytest.fixture
def commands(tmp_path: Path) -> Iterator[Commands]:
    started = Commands(tmp_path)
    yield started
    started.close()


def readers(server: str) -> int:
    """How many the only shard, or a relay, has of the only job; -1: all that ask it keep it from answering `status` in
    time.
    """
    jobs = requests.fetch(server)["shards"][0]["jobs"]
    if not jobs:
        return -1
    return jobs[0]["feed"]["reader_count"] if jobs[0]["feed"] else 0


def held(pid: int) -> int:
    """Bytes of a process' own memory, and of what it shares with readers: a relay's editions are there."""
    shared = re.search(r"^RssShmem:\s+(\d+) kB$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    assert shared
    return resident(pid) + int(shared[1]) * 1024


class Crowd:
    """So many readers, each of which asks for an edition and reads nothing of it. Half of them want a newer one."""

    def __init__(self, address: str) -> None:
        self._channels = [grpc.insecure_channel(address, OPTIONS) for _ in range(READERS // OF_A_CONNECTION)]
        describe = self._channels[0].unary_unary(f"{SERVICE}/DescribeWeights")
        self._run = read_weights_here(describe(write_weights_asked(WeightsAsked("default")))).run
        self._calls: list[tuple[int, Any]] = []  # with the versions that they ask for

    def add_half(self, version: int) -> None:
        for _ in range(READERS // 2):
            self._calls.append((version, self._pull(len(self._calls), version)))

    def ask_again(self) -> None:
        """Makes calls again that were cut off as their requests arrived: others may have a claim to their places."""
        for number, (version, call) in enumerate(self._calls):
            if not call.is_active():
                self._calls[number] = version, self._pull(number, version)

    def _pull(self, number: int, version: int) -> Any:
        pull = self._channels[number // OF_A_CONNECTION].unary_stream(f"{SERVICE}/PullEdition")
        return pull(write_edition_call(EditionCall("default", self._run, 0, version, "float32", ())), timeout=600)

    def close(self) -> None:
        for channel in self._channels:
            channel.close()


@pytest.mark.long
@pytest.mark.parametrize(("place", "editions"), [("shard", 2), ("relay", 4)])
def test_a_thousand_readers_that_never_read_take_a_few_editions_and_a_message_each(
    commands: Commands, place: str, editions: int
) -> None:
    servers = commands.start("-m", "ps_server", "up", "--shards=1", *FLAGS)
    [server] = servers.says(r"ps-server: ready at (\S+) \(\d shards?\)\n")
    with ps.connect(server, "sync", rank=0, world_size=1) as session:
        trainer = FollowedTrainer(session, BUCKET_BYTES, WIDTH)
        trainer.step()
        [shard] = requests.fetch(server)["shards"]
        pid, address, asked = shard["pid"], shard["address"], server
        if place == "relay":
            relay = commands.start("-m", "ps_server", "relay", f"--upstream={server}", *FLAGS)
            [asked] = relay.says(r"ready at (\S+)")
            pid, address = relay.process.pid, asked
            with ps.subscribe(asked) as feed:
                feed.wait_for(session.clock)
        size = sum(each.nbytes for each in trainer.model.state_dict().values())
        before, most = held(pid), editions * size + READERS * A_READER_BYTES
        with contextlib.closing(Crowd(address)) as crowd:
            crowd.add_half(session.clock)
            crowd.add_half(trainer.step())

            def all_have_one() -> bool:
                crowd.ask_again()
                return readers(asked) == READERS

            until(all_have_one, "that all have an edition")
            for _ in range(3):
                began = time.monotonic()
                trainer.step()
                assert time.monotonic() - began < SLOWEST_STEP_SECONDS
            assert held(pid) - before < most
            with ps.subscribe(asked) as feed:  # it is served once those who hold both editions are cut off
                last = trainer.step()
                edition = feed.wait_for(last, timeout=TEST_SECONDS)
                assert trainer.has(edition.state_dict(), edition.version)
            until(lambda: readers(asked) == 0, "that all are cut off")
            assert held(pid) - before < most
