"""Bytes that nobody should send: never a crash, a hang, a stack trace to the caller, or a change of state."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ps_protocol.errors import BY_REASON, PSError
from ps_protocol.v1 import data_pb2, types_pb2
from ps_runtime.channel import open_channel
from ps_runtime.grpc_status import error_from
from ps_server.rpc.permissions import METHODS
from tests.tools.cluster import Cluster
from tests.tools.fuzz_requests import KEY, SEEDS, SPEC, WORKER
from tests.tools.fuzzing import Target

EXAMPLES = settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))


@pytest.fixture(scope="module")
def target() -> Iterator[Target]:
    made = Target()
    yield made
    made.stop()


@st.composite
def damaged(draw: st.DrawFn, whole: bytes) -> bytes:
    """A well-formed request with some bytes replaced, cut out, repeated, or cut off."""
    raw = bytearray(whole)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(raw)))
        end = draw(st.integers(at, min(len(raw), at + 8)))
        match draw(st.sampled_from(["replace", "remove", "repeat", "cut"])):
            case "replace":
                raw[at:end] = draw(st.binary(max_size=8))
            case "remove":
                del raw[at:end]
            case "repeat":
                raw[at:at] = raw[at:end]
            case _:
                del raw[at:]
    return bytes(raw)


@pytest.mark.parametrize("name", sorted(SEEDS))
def test_no_handler_fails_on_random_or_damaged_bytes(target: Target, name: str) -> None:
    @EXAMPLES
    @given(st.one_of(st.binary(max_size=200), st.sampled_from(SEEDS[name]).flatmap(damaged)))
    def check(raw: bytes) -> None:
        target.throw(name, raw)

    check()


def test_the_seeds_are_what_the_handlers_take(target: Target) -> None:
    """Else the fuzzing above would stop at the door."""
    fresh = Target()
    assert fresh.handlers.keys() == SEEDS.keys()
    assert {name for name in ("Push", "Pull", "CreateJob", "AddWorker") if fresh.throw(name, SEEDS[name][0])} == set()
    in_blocks = [seed for seed in SEEDS["Push"] if b"blocks" in seed]
    assert len(in_blocks) == 2
    assert [fresh.throw("Push", seed) for seed in in_blocks] == [None] * 2
    fresh.stop()


WORKERS = st.fixed_dictionaries(
    {
        "rank": st.integers(0, 2**32 - 1),
        "incarnation": st.integers(0, 2**64 - 1),
        "lease_key": st.sampled_from([KEY, b"", bytes(16)]),
    }
)
PUSHED = st.fixed_dictionaries(
    {
        "bucket": st.integers(0, 2**32 - 1),
        "kind": st.integers(-(2**31), 2**31 - 1),
        "absent_slices": st.lists(st.integers(0, 2**32 - 1), max_size=4),
    }
)


@EXAMPLES
@given(worker=WORKERS, pushed=PUSHED, clock=st.integers(0, 2**64 - 1), payload=st.binary(max_size=80))
def test_a_push_with_any_numbers_is_taken_or_refused_whole(
    target: Target, worker: dict[str, Any], pushed: dict[str, Any], clock: int, payload: bytes
) -> None:
    identity = types_pb2.WorkerIdentity(job=SPEC.name, **worker)
    header = data_pb2.PushHeader(worker=identity, clock=clock, buckets=[data_pb2.BucketPush(**pushed)])
    refused = target.throw("Push", data_pb2.PushRequest(header=header, payload=payload).SerializeToString())
    assert refused is not None or identity == WORKER


@EXAMPLES
@given(method=st.sampled_from(sorted(METHODS)), raw=st.binary(max_size=100))
def test_what_a_real_server_says_to_random_bytes_names_a_reason_and_no_code_of_ours(
    live: Cluster, method: str, raw: bytes
) -> None:
    error = None
    with open_channel(live.address) as channel:
        try:
            for _ in channel.unary_stream(method)(raw, timeout=1.0):
                break
        except grpc.RpcError as raised:
            error = raised
    if error is None:
        return
    found: PSError = error_from(error, "the server")
    assert "Traceback" not in str(found)
    assert 'File "' not in str(found)
    if "health" not in method and error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED:
        assert found.reason in BY_REASON
        assert error.code() not in (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN), found


@pytest.fixture(scope="module")
def live() -> Iterator[Cluster]:
    running = Cluster(shards=1)
    yield running
    running.stop()
