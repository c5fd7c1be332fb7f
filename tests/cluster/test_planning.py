"""`ps-server plan` says what a real shard then reports, and refuses what servers would refuse."""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ps_protocol.errors import InvalidRequest, LimitExceeded
from ps_protocol.layout import bucket_layout
from ps_protocol.pieces import pieces_by_name
from ps_protocol.tables import TableSpec
from ps_runtime.quantities import number_text, size_text, time_text
from ps_server.ops.plan import Question, advise, as_json, job_spec, plan, table
from ps_server.ops.plan_costs import MS_A_BUCKET, MS_A_MIB
from ps_server.ops.plan_tables import most_rows, table_memory, table_question
from ps_server.ops.requests import fetch
from ps_tables.contributions import RowGradients
from ps_tables.sizes import record_bytes
from ps_tables.table import Table
from tests.tools.cases import cases
from tests.tools.cluster import until
from tests.tools.launching import environment, resident
from tests.tools.raw_worker import RawWorker

MIB = 2**20
# What a process takes for its first job beside what grows with the job: threads, pools of gRPC, first calls into torch.
FIRST_JOB_BYTES = 24 * MIB

QUESTION = Question(parameters=8_000_000, workers=2, tensors=20, link=10e9)
BENCHMARKS = Path(__file__).resolve().parents[2] / "docs/benchmarks"


def held_by(address: str) -> dict[str, Any]:
    """What the only shard has of the only job, once it answers: on a busy machine it may need longer than a status
    waits."""
    [shard] = until(lambda: [each for each in fetch(address)["shards"] if each["reachable"]], "an answer of the shard")
    [job] = shard["jobs"]
    return dict(job)


@pytest.mark.parametrize(
    ("optimizer", "momentum", "group_size"), cases([("adamw", 0.0, 1)], [("SGD", 0.9, 1), ("adamw", 0.0, 3)])
)
def test_a_shard_takes_the_memory_that_the_plan_says(
    server: tuple[str, int], optimizer: str, momentum: float, group_size: int
) -> None:
    address, pid = server
    question = replace(QUESTION, optimizer=optimizer, momentum=momentum, transport="grpc", group_size=group_size)
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
    assert alone.link_seconds == pytest.approx(8 * alone.shard_bytes / 10e9)
    assert best.link_seconds == pytest.approx(8 * best.worker_bytes / 10e9, rel=0.05)
    assert best.ddp_seconds == pytest.approx(1.5 * 8 * best.worker_bytes / 10e9)
    assert best.memory.weights == pytest.approx(alone.memory.weights / 4, rel=0.05)
    half = advise(replace(QUESTION, workers=4, wire="bfloat16")).plans[0]
    assert half.worker_bytes == pytest.approx(best.worker_bytes / 2, rel=0.01)
    assert half.memory.weights == pytest.approx(best.memory.weights, rel=0.05), "shards keep float32"


def measured(bench: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (BENCHMARKS / f"{bench}.jsonl").read_text().splitlines()]


def test_processes_of_a_group_hold_pieces_and_share_the_bytes_of_a_worker() -> None:
    question = replace(QUESTION, workers=4, tensors=7)
    alone, *_ = advise(replace(question, shards=1)).plans
    best, grouped, *_ = advise(replace(question, group_size=3)).plans
    assert (best.shards, grouped.shards) == (12, 1), "as many shards as processes"
    assert grouped.shard_bytes == pytest.approx(alone.shard_bytes, rel=0.01)
    assert grouped.worker_bytes == pytest.approx(alone.worker_bytes / 3, rel=0.02)
    assert grouped.ddp_seconds == pytest.approx(8 * 1.5 * grouped.worker_bytes / 10e9)
    assert grouped.memory.weights == pytest.approx(alone.memory.weights, rel=0.01)

    pieces = pieces_by_name(job_spec(replace(question, group_size=3)).parameters)
    assert len(pieces) == 7
    for found in pieces.values():
        assert found[0].piece is not None
        cut = torch.empty(found[0].piece.whole_shape).chunk(3)  # as fully_shard does it
        assert [piece.numel for piece in found] == [each.numel() for each in cut]
    with pytest.raises(InvalidRequest, match="has no tables"):
        advise(replace(question, group_size=3, tables=(table_question("1Mx64:SGD"),)))


def test_the_processors_time_is_what_was_measured_with_many_workers() -> None:
    trained = [line for line in measured("crowd") if line["system"] == "ours"]
    compared = [line for line in trained if line["workers"] >= 8]  # a clock tick is long for one worker
    assert {line["transport"] for line in compared} == {"shm", "tcp", "grpc"}
    for line in compared:
        crowd = Question(parameters=line["bytes"] // 4, workers=line["workers"], optimizer="SGD", shards=1)
        link = None if line["transport"] == "shm" else 1e12
        [made, *_] = advise(replace(crowd, link=link, transport=line["transport"])).plans
        # The benchmark has one bucket for all, which between hosts would be several.
        buckets = (made.buckets - 1) * line["workers"] * MS_A_BUCKET / 1e3
        a_step = 1e3 * (made.shard_cpu - buckets) / line["workers"]
        assert a_step == pytest.approx(line["shards_cpu_ms"], rel=0.3), line


@pytest.mark.parametrize("bench", ["round", "round-tls"])
def test_the_processors_time_is_what_was_measured_with_large_models(bench: str) -> None:
    for line in measured(bench):
        if line["system"] != "ours" or line["wire"] != "float32":
            continue
        way = line["transport"] + "+tls" * bench.endswith("tls")
        moved = 2 * line["workers"] * line["bytes"] / 1e9
        for_both_ends = 1e3 * line["cpu_seconds_per_gigabyte"] * moved
        assert 2 * MS_A_MIB[way] * line["workers"] * line["bytes"] / MIB == pytest.approx(for_both_ends, rel=0.15), line


def test_a_round_takes_as_long_as_the_processors_where_links_are_fast() -> None:
    slow, fast = (advise(replace(QUESTION, workers=4, link=link)).plans[0] for link in (1e9, 100e9))
    assert slow.exchange_seconds == slow.link_seconds
    assert fast.exchange_seconds == fast.shard_cpu == slow.shard_cpu > (fast.link_seconds or 0)
    encrypted = advise(replace(QUESTION, workers=4, link=100e9, tls=True)).plans[0]
    assert encrypted.exchange_seconds > 1.5 * fast.exchange_seconds
    assert "limited by shards' processors" in table(advise(replace(QUESTION, link=100e9)))
    assert "limited by the links" in table(advise(replace(QUESTION, link=1e9)))


@pytest.mark.parametrize("optimizer", ["Adagrad", "rowwiseadagrad", "SGD"])
def test_a_table_takes_the_memory_that_the_plan_says(optimizer: str) -> None:
    rows, dim = 200_000, 16
    asked = table_question(f"200Kx{dim}:{optimizer}")
    memory = table_memory([asked], 1)
    name = {"rowwiseadagrad": "RowWiseAdagrad"}.get(optimizer, optimizer)
    full = Table(TableSpec("table", dim), name, {}, rows)
    full.apply(RowGradients(np.arange(rows), np.ones(rows, np.int64), torch.ones(rows, dim)), 1, 1)
    assert memory.rows == rows * record_bytes(TableSpec("table", dim), name, {})
    assert memory.rows + memory.index == pytest.approx(full.nbytes, rel=0.2)


def test_tables_are_divided_among_shards_and_count_in_memory_and_on_the_links() -> None:
    without, with_tables = (
        QUESTION,
        replace(QUESTION, tables=(table_question("100Mx64:RowWiseAdagrad"),), lookups=20_000),
    )
    plain, made = advise(without).plans[0], advise(with_tables).plans[0]
    assert made.shards == 2
    assert made.memory.tables == pytest.approx(50e6 * (4 * 65 + 40), rel=0.1)
    assert made.memory.training - plain.memory.training == made.memory.tables
    assert made.memory.cold < made.memory.tables / 5
    assert made.worker_bytes - plain.worker_bytes == 20_000 * (8 + 4 * 64)
    assert "with --cold-rows-dir the tables need at least" in table(advise(with_tables))
    assert most_rows(100, 1) == 100
    assert 500 < most_rows(1000, 2) <= 570, "ids are spread by chance"
    large = advise(replace(with_tables, tables=(table_question("4Bx64"),), shards=2))
    assert [each.shards for each in large.plans] == [2], "one shard does not take so many rows"


@pytest.mark.parametrize("text", ["100M", "100Mx", "x64", "100Mx0", "0x64", "100Mx6.5:SGD", "manyx64"])
def test_a_table_that_makes_no_sense_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="expected ROWSxDIM"):
        table_question(text)


def test_what_a_plan_cannot_be_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="a table's optimizer is one of"):
        advise(replace(QUESTION, tables=(table_question("1Mx8:lion"),)))
    with pytest.raises(InvalidRequest, match="take more shards"):
        advise(replace(QUESTION, tables=(table_question("9Bx8"),)))
    with pytest.raises(InvalidRequest, match="expected a transport out of auto, shm, tcp, grpc, got 'udp'"):
        advise(replace(QUESTION, transport="udp"))
    with pytest.raises(InvalidRequest, match="shared memory is for one machine"):
        advise(replace(QUESTION, transport="shm"))


def test_no_number_has_an_exponent_and_each_has_a_unit() -> None:
    asked = Question(
        1_000_000_000, 512, link=1e8, step_seconds=1e-4, tables=(table_question("20Bx256:Adam"),), shards=64
    )
    text = table(advise(asked))
    assert not re.search(r"\de[+-]?\d", text), text
    for line in text.splitlines()[1:]:
        if line.strip() and line.lstrip()[0].isdigit() and "buckets" not in line:
            assert re.fullmatch(r" *\d+(  +[\d.,]+ (B|kB|MB|GB|TB|ms|s|min|h))+", line), line


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        (size_text(999), "999 B"),
        (size_text(999_700), "1 MB"),
        (size_text(5_770_000), "5.77 MB"),
        (size_text(2_345 * 10**12), "2,345 TB"),
        (number_text(0.0000123), "0.0000123"),
        (number_text(1_150.2), "1,150"),
        (time_text(0.0123), "12.3 ms"),
        (time_text(0.9999), "1 s"),
        (time_text(119), "119 s"),
        (time_text(1_150), "19.2 min"),
        (time_text(1e6), "278 h"),
    ],
)
def test_quantities_are_written_for_people(made: str, expected: str) -> None:
    assert made == expected


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
