"""Clients in other languages: what docs/other-languages.md says works, and a client in JavaScript does its work."""

from __future__ import annotations

import json
import re
import shutil
import subprocess

import grpc
import pytest
from google.protobuf import json_format, message_factory
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from tests.tools.cluster import Cluster
from tests.tools.launching import ROOT

PAGE = (ROOT / "docs" / "other-languages.md").read_text()
CLIENT = ROOT / "tests" / "tools" / "foreign_client.cjs"
MODULES = ROOT / ".venv" / "javascript" / "node_modules"
CALLS = re.findall(r"^\$ grpcurl -plaintext (?:-d '(.*?)' )?HOST:50051 (ps_protocol\.\S+)/(\w+)$", PAGE, re.MULTILINE)


def test_the_page_has_a_line_for_looking_and_for_running_jobs() -> None:
    assert {name for _, _, name in CALLS} == {"GetStatus", "WatchStatus", "CheckpointJob", "EndJob"}


@pytest.mark.parametrize(("data", "service", "name"), CALLS)
def test_a_line_of_the_page_is_a_call_that_a_server_understands(
    shared: Cluster, data: str, service: str, name: str
) -> None:
    """As grpcurl makes it: the contract comes from the server, and the request from JSON."""
    with grpc.insecure_channel(shared.address) as channel:
        pool = DescriptorPool(ProtoReflectionDescriptorDatabase(channel))
        method = pool.FindServiceByName(service).methods_by_name[name]
        request = json_format.Parse(data or "{}", message_factory.GetMessageClass(method.input_type)())
        answer = message_factory.GetMessageClass(method.output_type).FromString
        make = channel.unary_stream if method.server_streaming else channel.unary_unary
        call = make(f"/{service}/{name}", lambda message: message.SerializeToString(), answer)
        if name in ("CheckpointJob", "EndJob"):  # of a job that is not here
            with pytest.raises(grpc.RpcError) as refused:
                call(request, timeout=20)
            assert refused.value.code() is grpc.StatusCode.NOT_FOUND
        elif method.server_streaming:
            views = call(request, timeout=20)
            assert next(views).status.coordinator.shard_count == 2
            views.cancel()
        else:
            assert call(request, timeout=20).shards


@pytest.mark.skipif(shutil.which("node") is None, reason="Node.js is not here")
@pytest.mark.skipif(not MODULES.exists(), reason="its gRPC library is not installed: make test-javascript")
def test_a_client_in_javascript_registers_a_job_sees_it_and_ends_it(shared: Cluster, job: str) -> None:
    words = ["node", str(CLIENT), shared.address, str(ROOT / "proto"), job]
    environment = {"NODE_PATH": str(MODULES), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    heard = json.loads(done.stdout)
    assert heard.pop("viewed").count(job) == 1
    assert heard == {"created": [True, False], "shards": 2, "buckets": 1, "refused": "NOT_FOUND"}
    assert job not in shared.coordinator.jobs()
