"""`ps-server plan` says what a real shard then reports, and refuses what servers would refuse."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch

from ps_protocol.errors import InvalidRequest, LimitExceeded
from ps_protocol.layout import bucket_layout
from ps_server.ops.plan import Question, advise, as_json, job_spec, plan, table
from ps_server.ops.status import fetch
from tests.tools.launching import environment, resident
from tests.tools.raw_worker import RawWorker

MIB = 2**20
# What a process takes for its first job beside what grows with the job: threads, pools of gRPC, first calls into torch.
FIRST_JOB_BYTES = 24 * MIB

QUESTION = Question(parameters=8_000_000, workers=2, tensors=20, link=10e9)


def held_by(address: str) -> dict[str, Any]:
    [shard] = fetch(address)["shards"]
    [job] = shard["jobs"]
    return dict(job)


@pytest.mark.parametrize(("optimizer", "momentum"), [("adamw", 0.0), ("SGD", 0.9)])
def test_a_shard_takes_the_memory_that_the_plan_says(server: tuple[str, int], optimizer: str, momentum: float) -> None:
    address, pid = server
    question = replace(QUESTION, optimizer=optimizer, momentum=momentum)
    spec = replace(job_spec(question), name=optimizer)
    memory = plan(question, spec, 1).memory
    empty = resident(pid)
    with RawWorker(address, spec, 0) as worker, RawWorker(address, spec, 1) as other:
        worker.initialise()
        gradient = torch.ones(bucket_layout(spec.parameters, spec.bucket_bytes).buckets[-1].numel * 200)
        for each in (worker, other):
            each.step(gradient)
        worker.pull()
        held = held_by(address)
        assert held["parameter_bytes"] == memory.weights
        scalars = len(spec.parameters) * held["bucket_count"] * 8
        assert 0 <= held["optimizer_bytes"] - memory.optimizer <= scalars
        worker.step(gradient)  # as much as ever waits for others: one worker's whole gradient
        taken = resident(pid) - empty
    assert memory.weights + memory.optimizer < taken < memory.training + FIRST_JOB_BYTES
    assert memory.snapshot == memory.weights + memory.optimizer


def test_the_figures_follow_from_the_job() -> None:
    best, alone, *_ = advise(replace(QUESTION, workers=4)).plans
    assert (best.shards, alone.shards) == (4, 1), "as many shards as workers: then no shard's link is the limit"
    assert alone.worker_bytes == pytest.approx(4 * 8e6, rel=0.01)
    assert alone.shard_bytes == 4 * alone.worker_bytes
    assert alone.round_seconds == pytest.approx(8 * alone.shard_bytes / 10e9)
    assert best.round_seconds == pytest.approx(8 * best.worker_bytes / 10e9, rel=0.05)
    assert best.ddp_seconds == pytest.approx(1.5 * 8 * best.worker_bytes / 10e9)
    assert best.memory.weights == pytest.approx(alone.memory.weights / 4, rel=0.05)
    half = advise(replace(QUESTION, workers=4, wire="bfloat16")).plans[0]
    assert half.worker_bytes == pytest.approx(best.worker_bytes / 2, rel=0.01)
    assert half.memory.weights == pytest.approx(best.memory.weights, rel=0.05), "shards keep float32"


def test_on_fast_links_the_shards_processors_are_the_limit() -> None:
    """Each MiB takes so long on a core as `bench crowd` has measured: on fast links longer than on the link."""
    fast = replace(QUESTION, parameters=10**9, workers=64, shards=16, link=100e9, step_seconds=0.1)
    best = advise(fast).plans[0]
    assert best.round_seconds == pytest.approx(64 * 4e9 / 16 * 8 / 100e9, rel=0.02)
    assert best.shard_core_seconds == pytest.approx(1.23e-3 * 64 * 4e9 / 16 / 2**20, rel=0.02)
    [sync, *_] = advise(fast).rates
    assert sync.steps_per_second == pytest.approx(64 / (0.1 + best.shard_core_seconds))
    assert "the shards' processors are the limit" in table(advise(fast))
    slow = table(advise(replace(QUESTION, link=200e6)))
    assert "processors are the limit" not in slow
    shared = advise(replace(QUESTION, link=None)).plans[0]
    assert shared.shard_core_seconds == pytest.approx(0.59e-3 * shared.shard_bytes / 2**20)


def test_long_times_are_in_units_that_people_read() -> None:
    said = table(advise(replace(QUESTION, parameters=10**10, link=1e6)))
    assert "e+" not in said
    assert re.search(r"\d (min|h|days)\b", said)


@pytest.mark.parametrize(
    ("straggler", "stalls", "mode"),
    [(1.0, None, "sync"), (4.0, None, "async"), (5.0, 0.1, "ssp"), (1.05, None, "sync"), (5.0, 0.001, "sync")],
)
def test_the_mode_that_pays_follows_from_the_straggler(straggler: float, stalls: float | None, mode: str) -> None:
    advice = advise(replace(QUESTION, workers=4, step_seconds=0.5, straggler=straggler, stalls=stalls))
    assert advice.mode == mode, advice
    rates = {rate.mode: rate.steps_per_second for rate in advice.rates}
    assert rates["async"] >= rates["ssp"] >= rates["sync"]


def test_a_job_that_servers_would_refuse_is_refused_here() -> None:
    with pytest.raises(InvalidRequest, match=r"expected an optimizer out of SGD, .*, got 'lion'"):
        advise(replace(QUESTION, optimizer="lion"))
    with pytest.raises(InvalidRequest, match="float16, int8, int4 on the wire, got 'int2'"):
        advise(replace(QUESTION, wire="int2"))
    with pytest.raises(LimitExceeded):
        advise(replace(QUESTION, parameters=10**13))


def test_the_command_prints_the_same_as_a_table_and_as_json() -> None:
    words = ["-m", "ps_server", "plan", "--params", "8M", "--workers", "2", "--tensors", "20", "--link", "10G"]
    own: dict[str, Any] = {"env": environment(), "capture_output": True, "text": True, "timeout": 90, "check": True}
    advice = advise(QUESTION)
    assert subprocess.run([sys.executable, *words], **own).stdout == table(advice) + "\n"
    printed = subprocess.run([sys.executable, *words, "--json"], **own).stdout
    assert json.loads(printed) == json.loads(json.dumps(as_json(advice)))
