"""Memory shared between a worker and the shards on its host: who may map what, and what is left behind."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from ps_protocol.errors import NonFiniteGradient, NotShared
from ps_protocol.job import JobSpec
from ps_protocol.layout import ParameterSpec, bucket_layout
from ps_protocol.modes import Consistency
from ps_protocol.segment_layout import NAME_PREFIX, SegmentMap, SegmentPlan, segment_plan
from ps_server.core.requests import PullCall
from ps_server.shard.job import HostedJob
from ps_server.shard.segments import attach
from ps_server.shard.waiting import Outbox, Pull
from ps_worker.cluster import shared_memory
from ps_worker.cluster.shared_memory import LocalSegment, remove_leftovers
from tests.tools.cluster import Cluster, until

MakeCluster = Callable[..., Cluster]


@pytest.fixture
def plan() -> SegmentPlan:
    """Of a job with one parameter of 1000 floats."""
    parameter = ParameterSpec("w", (1000,), "float32", 0)
    spec = JobSpec("job", (parameter,), "SGD", ({"lr": 1.0},), Consistency(0, True), 1024, 1)
    return segment_plan(spec, bucket_layout(spec.parameters, spec.bucket_bytes))


@pytest.mark.parametrize("as_file", [False, True], ids=["memory file", "file in a directory"])
def test_both_ends_see_the_same_memory(plan: SegmentPlan, tmp_path: Path, as_file: bool) -> None:
    segment = LocalSegment(plan.size, tmp_path if as_file else None)
    there = attach(segment.location, segment.nonce, plan, tmp_path)
    segment.hide()
    here = SegmentMap(segment.memory, plan)
    here.gradients["float32"][:1000] = 3.0
    there.weights["float32"][:1000] = there.gradients["float32"][:1000] + 1
    assert torch.equal(here.weights["float32"][:1000], torch.full((1000,), 4.0))
    assert torch.equal(there.gradients["float32"][:1000], torch.full((1000,), 3.0)), "they do not overlap"
    assert segment.memory[: len(segment.nonce)] == segment.nonce
    assert list(tmp_path.iterdir()) == []


# -- what a shard refuses to map -------------------------------------------------------------------------------------

Handed = tuple[str, bytes]  # location and nonce, as a worker sends them
NAME = NAME_PREFIX + "0" * 32


def handed(segment: LocalSegment) -> Handed:
    return segment.location, segment.nonce


def readable_by_others(plan: SegmentPlan, path: Path) -> Handed:
    segment = LocalSegment(plan.size, path)
    (path / segment.location).chmod(0o644)
    return handed(segment)


def link(plan: SegmentPlan, path: Path) -> Handed:
    (path / NAME).symlink_to("/etc/passwd")
    return NAME, bytes(32)


def hidden(plan: SegmentPlan, path: Path) -> Handed:
    segment = LocalSegment(plan.size, path)
    segment.hide()
    return handed(segment)


def of_a_dead_process(plan: SegmentPlan, path: Path) -> Handed:
    script = "import os, sys; print(f'{os.getpid()}/{os.memfd_create(sys.argv[1])}')"
    child = subprocess.run([sys.executable, "-c", script, "ps-torch"], stdout=subprocess.PIPE, text=True, check=True)
    return child.stdout.strip(), bytes(32)


def unsealed(plan: SegmentPlan, path: Path) -> Handed:
    descriptor = os.memfd_create("ps-torch")
    os.ftruncate(descriptor, plan.size)
    os.fchmod(descriptor, 0o600)
    return f"{os.getpid()}/{descriptor}", bytes(32)


def other_file_of_the_process(plan: SegmentPlan, path: Path) -> Handed:
    (path / "secret").write_bytes(bytes(plan.size))
    return f"{os.getpid()}/{os.open(path / 'secret', os.O_RDWR)}", bytes(32)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda plan, path: handed(LocalSegment(plan.size - 4096, path)), "bytes where this job needs"),
        (lambda plan, path: (LocalSegment(plan.size, path).location, bytes(32)), "another one"),
        (lambda plan, path: ("../" + NAME, bytes(32)), "PID/FD or"),
        (readable_by_others, "mode 0600"),
        (link, "cannot be opened"),
        (hidden, "cannot be opened"),
        (of_a_dead_process, "not to be seen"),
        (unsealed, "sealed"),
        (other_file_of_the_process, "no memory file"),
    ],
)
def test_what_is_no_segment_of_this_worker_is_refused(
    plan: SegmentPlan, tmp_path: Path, make: Callable[[SegmentPlan, Path], Handed], says: str
) -> None:
    with pytest.raises(NotShared, match=says):
        attach(*make(plan, tmp_path), plan, tmp_path)


def test_a_segment_cannot_shrink_under_a_shard_that_reads_it(plan: SegmentPlan, tmp_path: Path) -> None:
    segment = LocalSegment(plan.size, None)
    descriptor = os.open(f"/proc/{segment.location.replace('/', '/fd/')}", os.O_RDWR)
    with pytest.raises(PermissionError):
        os.ftruncate(descriptor, 0)
    os.close(descriptor)


def test_files_of_workers_that_were_killed_are_removed_and_those_of_living_ones_are_not(tmp_path: Path) -> None:
    script = (
        "import sys, time; from pathlib import Path; from ps_worker.cluster.shared_memory import LocalSegment\n"
        "segment = LocalSegment(8192, Path(sys.argv[1])); print(segment.location, flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", script, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        file = tmp_path / child.stdout.readline().strip()
        remove_leftovers(tmp_path)
        assert file.exists()
        child.kill()
        child.wait()
    remove_leftovers(tmp_path)
    assert not file.exists()


# -- training --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("transport", ["shm", "grpc"])
@pytest.mark.parametrize("wire", ["float32", "bfloat16", "float16"])
def test_every_transport_and_wire_format_trains_alike(shared: Cluster, job: str, transport: str, wire: str) -> None:
    # One worker: what differs from plain PyTorch is the rounding of the wire, 8 bits of precision in bfloat16.
    plain = nn.Linear(16, 8)
    model = nn.Linear(16, 8)
    model.load_state_dict(plain.state_dict())
    data = torch.randn(20, 32, 16)
    with shared.connect("sync", job=job, transport=transport) as session:
        ours, optimizer = session.prepare(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
            bucket_bytes=128,
            gradient_wire=wire,
            weight_wire=wire,
        )
        reference = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
        for batch in data:
            for net, stepper in ((ours, optimizer), (plain, reference)):
                net(batch).square().mean().backward()
                stepper.step()
                stepper.zero_grad()
    tolerance = {"float32": 1e-6, "bfloat16": 2e-2, "float16": 2e-3}[wire]
    for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("transport", ["shm", "grpc"])
def test_what_overflows_on_the_way_is_refused_by_the_shard(shared: Cluster, job: str, transport: str) -> None:
    """The worker has looked at float32, where it is finite; what travels is not."""
    model = nn.Linear(4, 4)
    with shared.connect("sync", job=job, transport=transport) as session:
        ours, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), gradient_wire="float16")
        (ours(torch.ones(1, 4)).sum() * 1e6).backward()
        with pytest.raises(NonFiniteGradient):
            optimizer.step()


LENDER = """
import sys, torch, ps_worker
vector = torch.nn.ParameterList([torch.nn.Parameter(torch.zeros(64))])
session = ps_worker.connect(sys.argv[1], "sync", job="lent", rank=1, world_size=2, transport="shm")
vector, optimizer = session.prepare(vector, torch.optim.SGD(vector.parameters(), lr=1.0), bucket_bytes=64)
vector[0].grad = torch.full((64,), -2.0)
optimizer.step()
"""


def test_a_worker_killed_while_shards_read_its_segment_leaves_what_it_pushed(make_cluster: MakeCluster) -> None:
    """Its gradient lies in its own memory, held back for rank 0's, which comes when its worker is gone."""
    cluster = make_cluster(shards=2, lease=1.0)
    vector = nn.ParameterList([nn.Parameter(torch.zeros(64))])
    command = [sys.executable, "-c", LENDER, cluster.address]
    with (
        subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as child,
        cluster.connect("sync", 0, 2, job="lent", transport="shm") as session,
    ):
        try:
            vector, optimizer = session.prepare(vector, torch.optim.SGD(vector.parameters(), lr=1.0), bucket_bytes=64)
            until(lambda: _staged(cluster) == 64 * 4, "all of the other's gradient")
        finally:
            child.kill()
            child.wait()
        vector[0].grad = torch.full((64,), -4.0)
        optimizer.step()
        assert torch.equal(vector[0].detach(), torch.full((64,), 3.0)), "the mean of both"
        until(lambda: _lent(cluster) == {0}, "the end of the other's lease")


def _staged(cluster: Cluster) -> int:
    jobs = [shard.jobs().get("lent") for shard in cluster.shards]
    return sum(job.state.buckets.staged_bytes for job in jobs if job is not None)


def _lent(cluster: Cluster) -> set[int]:
    """The ranks whose segments shards map."""
    return {rank for shard in cluster.shards for rank in shard.jobs()["lent"].segments}


def test_where_shards_cannot_see_the_memory_shm_is_refused_and_auto_takes_the_network(
    shared: Cluster, job: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # Another process' view: a PID that is not this one, and a directory that is not the shards'.
    monkeypatch.setattr(os, "getpid", lambda: 2**22)
    model = nn.Linear(2, 2)
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    place = {"job": job, "shared_directory": str(tmp_path)}
    with shared.connect("sync", transport="shm", **place) as session, pytest.raises(NotShared):
        session.prepare(model, plain)
    with shared.connect("sync", transport="auto", **place) as session:
        ours, optimizer = session.prepare(model, plain)
        ours(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    assert session.clock == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("weight_wire", "notify_bytes"), [("float32", 0), ("bfloat16", 64)])
def test_a_worker_is_told_of_weights_early_only_where_it_has_to_take_them_over(
    make_cluster: MakeCluster, monkeypatch: pytest.MonkeyPatch, weight_wire: str, notify_bytes: int
) -> None:
    monkeypatch.setattr(shared_memory, "NOTIFY_BYTES", 64)  # one bucket: a notice for each, in the middle of a pull
    cluster = make_cluster(shards=1)
    asked = []
    check = cluster.shards[0]._pulls.check

    def checked(job: HostedJob, call: PullCall, outbox: Outbox) -> Pull:
        asked.append((call.in_segment, call.notify_bytes))
        return check(job, call, outbox)

    monkeypatch.setattr(cluster.shards[0]._pulls, "check", checked)
    with cluster.connect("sync", transport="shm") as session:
        model = nn.Linear(16, 8, bias=False)
        model.weight.data.zero_()
        model, optimizer = session.prepare(
            model, torch.optim.SGD(model.parameters(), lr=1.0), bucket_bytes=64, weight_wire=weight_wire
        )
        asked.clear()  # of initial values, which always come over the network
        for _ in range(3):
            model(torch.ones(1, 16)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert torch.equal(model.weight, torch.full((8, 16), -3.0))
    assert set(asked) == {(True, notify_bytes)}
