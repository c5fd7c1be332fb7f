"""Every sample exactly once per pass, on real clusters: whoever trains on it, dies with it, or comes for the rest."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import ps_worker
from ps_protocol.errors import Fenced, Forbidden, InvalidRequest, JobMismatch, LimitExceeded, UnknownWorker
from ps_protocol.v1.types_pb2 import DataRange
from ps_server.coordinator.timing import Timing
from ps_server.ops import requests, status_text
from ps_worker import Session
from tests.tools import counting
from tests.tools.cases import cases
from tests.tools.cluster import TEST_SECONDS, Cluster, in_parallel, scrape, until
from tests.tools.counting import BATCH, BUCKET_BYTES, PASSES, SAMPLES, Cells, Indices, optimizer_for, train
from tests.tools.forkserver import Nursery
from tests.tools.raw_worker import RawWorker, vector_job
from tests.tools.rollbacks import CELLS, LEASE, join_again, make_checkpoint

MODES = ["sync", "ssp:2", "async"]


def cells(cluster: Cluster, job: str) -> torch.Tensor:
    """What the shards have of every vector, when all that is staged is applied: [vectors, cells]."""
    found: dict[int, torch.Tensor] = {}
    for shard in cluster.shards:
        hosted = shard.jobs()[job]
        until(lambda h=hosted: all(b.rule.next() is None for b in h.buckets.values()), "applying")  # type: ignore[misc]
        for bucket in hosted.buckets.values():
            with bucket.tensors:
                for part in bucket.unit.spec.slices:
                    vector = found.setdefault(part.parameter, torch.zeros(hosted.partition.spec.parameters[0].numel))
                    values = bucket.unit.weights.flat[part.offset : part.offset + part.length]
                    vector[part.start : part.start + part.length] = values
    return torch.stack([vector for _, vector in sorted(found.items())])


def assert_each_once(found: torch.Tensor) -> None:
    """Every cell is 1, but for the rounding of a division."""
    wrong = ((found - 1).abs() > 1e-4).nonzero()
    assert not len(wrong), {tuple(where): found[tuple(where)].item() for where in wrong.tolist()[:10]}


def progress(cluster: Cluster, job: str) -> dict[str, int]:
    """How far the job's first loader is, as `ps-server status` tells it."""
    [known] = [known for known in requests.fetch(cluster.address)["jobs"] if known["name"] == job]
    loader: dict[str, int] = known["loaders"][0]
    return loader


def elastic(cluster: Cluster, job: str, mode: str = "async", **more: Any) -> Session:
    return ps_worker.connect(cluster.address, mode, job=job, elastic=True, **more)


@pytest.mark.parametrize(
    ("mode", "transport"), cases([("sync", "shm"), ("async", "grpc")], [("sync", "grpc"), ("ssp:2", "shm")])
)
def test_every_sample_is_used_once_per_pass_while_workers_die_join_and_differ_in_speed(
    shared: Cluster, nursery: Nursery, job: str, tmp_path: Path, mode: str, transport: str
) -> None:
    together, pause, lock = threading.Event(), threading.Event(), threading.Lock()
    found: list[torch.Tensor] = []
    ended = 0

    def work(index: int) -> list[int]:
        nonlocal ended

        def each(taken: int) -> None:
            if index == 1:
                pause.wait(0.01)  # the slow one
            if index == 0 and taken == 2:
                together.set()

        if index == 2:
            assert together.wait(TEST_SECONDS), "joins in the middle of the first pass"
        with elastic(shared, job, mode, transport=transport) as session:
            counts = train(session, mode, each)
            with lock:
                ended += 1
                if ended == 3:  # the job ends with the last
                    found.append(cells(shared, job))
                    assert progress(shared, job)["returned_count"] >= BATCH
        return counts

    log = tmp_path / "log"
    victim = nursery.run(Path(counting.__file__), [shared.address, mode, job, transport, 3], log)

    def has_taken(batch: int) -> bool:
        return log.exists() and str(batch) in log.read_text().splitlines()

    def kill(_: int) -> list[int]:
        until(lambda: has_taken(3), "the victim's third batch")
        victim.kill()
        victim.wait(30)
        shared.end_lease(0, job)
        return []

    try:
        until(lambda: has_taken(1), "it trains before the others come")
        results = in_parallel(4, lambda index: (work if index < 3 else kill)(index))
    finally:
        victim.kill()
    assert_each_once(found[0])
    assert sum(sum(counts) for counts in results) >= PASSES * -(-SAMPLES // BATCH) - 3


# -- one worker or two, which a test steps by itself -----------------------------------------------------------------


class Loop:
    """A worker of an elastic job: a model of cells for one pass, its optimizer, and a loader."""

    def __init__(self, session: Session, seed: int = 0, samples: int = SAMPLES, **loading: Any) -> None:
        model = Cells(samples)
        loader = DataLoader(Indices(samples), **{"batch_size": BATCH, "shuffle": True, **loading})
        optimizer = optimizer_for(session.mode, model)
        self.model, self.optimizer, self.loader = session.prepare(
            model, optimizer, loader, bucket_bytes=BUCKET_BYTES, seed=seed
        )

    def step(self, batch: torch.Tensor) -> None:
        self.model(batch).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def train(self, most: int = 1000) -> list[list[int]]:
        """The batches of a pass, or of its beginning, on each of which it makes a step."""
        taken: list[list[int]] = []
        for batch in self.loader:
            taken.append(torch.as_tensor(batch).reshape(-1).tolist())
            self.step(torch.as_tensor(batch).reshape(-1))
            if len(taken) == most:
                break
        return taken


def flat(batches: list[list[int]]) -> list[int]:
    return [sample for batch in batches for sample in batch]


@pytest.fixture
def pair(shared: Cluster, job: str) -> Iterator[tuple[Session, Session]]:
    """Two workers of an elastic job, in async."""
    with elastic(shared, job) as first, elastic(shared, job) as second:
        yield first, second


@pytest.mark.parametrize(
    "loading",
    [
        {},
        {"shuffle": False},
        {"num_workers": 2},
        {"num_workers": 1, "persistent_workers": True},
        {"batch_size": None},
        {"batch_size": 1},
        {"batch_size": 500},
    ],
    ids=str,
)
def test_one_worker_gets_every_sample_of_every_pass(shared: Cluster, job: str, loading: dict[str, Any]) -> None:
    samples = 30  # as many steps of a pass, where a batch is a sample
    with elastic(shared, job) as session:
        loop, in_order = Loop(session, samples=samples, **loading), list(range(samples))
        first, second = flat(loop.train()), flat(loop.train())
        assert sorted(first) == sorted(second) == in_order
        assert (cells(shared, job) == 2).all()
        shuffled = loading.get("shuffle", True)
        assert (first == second) is not shuffled
        assert (first == in_order) is not shuffled


def test_with_drop_last_a_pass_has_full_batches_only(shared: Cluster, job: str) -> None:
    with elastic(shared, job) as session:
        loop = Loop(session, drop_last=True)
        assert len(loop.loader) == SAMPLES // BATCH
        for _ in range(2):
            assert [len(batch) for batch in loop.train()] == [BATCH] * (SAMPLES // BATCH)


def test_a_length_is_this_workers_part(pair: tuple[Session, Session]) -> None:
    loaders = [Loop(session).loader for session in pair]
    until(lambda: all(session.world_size == 2 for session in pair), "both know of each other")
    assert [len(loader) for loader in loaders] == [12, 12]
    assert loaders[0].batch_size == BATCH, "everything else is the user's loader's"


def test_a_loop_that_is_broken_off_goes_on_with_the_pass(shared: Cluster, job: str) -> None:
    with elastic(shared, job) as session:
        loop = Loop(session, num_workers=1)
        seen = [sample for most in (3, 5, 1000) for sample in flat(loop.train(most))]
        assert sorted(seen) == list(range(SAMPLES))
        assert_each_once(cells(shared, job))


def test_what_a_broken_off_loop_had_ahead_goes_to_others(
    shared: Cluster, job: str, pair: tuple[Session, Session]
) -> None:
    Loop(pair[0], num_workers=2).train(most=1)
    assert len(flat(Loop(pair[1]).train())) == SAMPLES - BATCH
    assert_each_once(cells(shared, job))


def test_a_second_iteration_ends_the_first(shared: Cluster, job: str) -> None:
    with elastic(shared, job) as session:
        loader = Loop(session).loader
        first = iter(loader)
        next(first)
        next(iter(loader))
        with pytest.raises(InvalidRequest, match="another iteration over this loader has begun"):
            next(first)


@pytest.mark.parametrize("mode", cases(["ssp:2", "async"], ["sync"]))
def test_a_worker_that_leaves_in_the_middle_leaves_the_rest_to_the_others(shared: Cluster, job: str, mode: str) -> None:
    def work(index: int) -> torch.Tensor | None:
        with elastic(shared, job, mode) as session:
            loop = Loop(session)
            both.wait(TEST_SECONDS)
            loop.train(most=1000 if index == 0 else 3)
            return cells(shared, job) if index == 0 else None

    both = threading.Barrier(2)
    found, _ = in_parallel(2, work)
    assert found is not None
    assert_each_once(found)


def test_a_worker_that_joins_late_skips_the_passes_that_are_over(
    shared: Cluster, job: str, pair: tuple[Session, Session]
) -> None:
    early = Loop(pair[0])
    for _ in range(2):
        early.train()
    late = Loop(pair[1])
    assert [len(late.train()) for _ in range(3)] == [0, 0, -(-SAMPLES // BATCH)]
    ended = {"sample_count": SAMPLES, "committed_count": SAMPLES, "leased_count": 0, "returned_count": 0}
    assert progress(shared, job) == {"loader": 0, "pass_number": 2, **ended}


@pytest.mark.parametrize("mode", cases(["sync"], ["ssp:2", "async"]))
def test_the_rest_of_an_accumulation_is_not_waited_for(shared: Cluster, job: str, mode: str) -> None:
    """Its gradients go into the next pass's first step; the pass is complete without them."""
    with elastic(shared, job, mode) as session:
        loop = Loop(session, samples=5 * BATCH)
        for _ in range(2):
            for number, batch in enumerate(loop.loader, 1):
                loop.model(batch).backward()
                if number % 2 == 0:
                    loop.optimizer.step()
                    loop.optimizer.zero_grad()
        assert progress(shared, job)["committed_count"] == 5 * BATCH
        assert session.clock == 6, "two steps and an empty one in each pass"


def test_without_gradients_a_loader_yields_a_share_and_commits_nothing(
    shared: Cluster, job: str, pair: tuple[Session, Session]
) -> None:
    loaders = [Loop(session).loader for session in pair]
    until(lambda: all(session.world_size == 2 for session in pair), "both know of each other")
    with torch.no_grad():
        seen = [int(x) for loader in loaders for batch in loader for x in batch]
    assert sorted(seen) == list(range(SAMPLES))
    [known] = [known for known in requests.fetch(shared.address)["jobs"] if known["name"] == job]
    assert known["loaders"] == []


def test_several_loaders_are_leased_each_for_itself(shared: Cluster, job: str) -> None:
    with elastic(shared, job) as session:
        loop = Loop(session, shuffle=False)
        short = session.prepare(DataLoader(Indices(10), batch_size=BATCH))
        for batch, other in zip(loop.loader, short, strict=False):
            loop.step(torch.cat([batch, other]))
        expected = torch.zeros(SAMPLES)
        expected[:12] += 1
        expected[:10] += 1
        assert (cells(shared, job) == expected).all()


def test_workers_whose_loaders_differ_are_refused(pair: tuple[Session, Session]) -> None:
    next(iter(Loop(pair[0]).loader))
    with pytest.raises(JobMismatch, match="loader 0 differs: seed is 0, got 1"):
        next(iter(Loop(pair[1], seed=1).loader))


def test_status_and_metrics_say_how_far_the_data_is(shared: Cluster, job: str) -> None:
    with elastic(shared, job) as session:
        Loop(session).train(most=3)
        samples = scrape(shared.servers[0].metrics_address)
        text = status_text.table(requests.fetch(shared.address))
        back = progress(shared, job)["returned_count"]
        assert f"loader 0: pass 0, 12 of {SAMPLES} samples committed, 0 leased; {back} came back so far" in text
        label = f'job="{job}",loader="0"'
        assert samples[f'ps_data_samples{{{label},state="committed"}}'] == 12
        assert samples[f"ps_data_pass{{{label}}}"] == 0


# -- by hand ---------------------------------------------------------------------------------------------------------


def push(worker: RawWorker, bucket: int, ranges: Any, clock: int = 1) -> None:
    """Pushes a gradient of -1 for every cell of a bucket."""
    gradient = torch.full((worker.layout.buckets[bucket].numel,), -1.0)
    worker.send(worker.message(bucket, clock, gradient.numpy().tobytes(), ranges=ranges))


def train_on(worker: RawWorker, ranges: Any) -> torch.Tensor:
    """One step that uses these ranges, and the weights after it."""
    worker.clock += 1
    for bucket in worker.trained:
        push(worker, bucket, ranges, worker.clock)
    return worker.pull()


@pytest.mark.parametrize("mode", cases(["sync", "async"], ["ssp:2"]))
def test_what_a_shard_lost_with_its_memory_is_given_out_again(
    make_cluster: Callable[..., Cluster], tmp_path: Path, mode: str
) -> None:
    """In sync to all shards, which were rolled back together; else the shards that kept theirs leave it out."""
    cluster = make_cluster(checkpoint_dir=tmp_path, timing=Timing(asked_checkpoint=0.1), lease=LEASE)
    with RawWorker(cluster.address, vector_job("job", mode, CELLS, 0), 0) as worker:
        worker.initialise()
        first = worker.lease_batches().ranges
        train_on(worker, first)
        make_checkpoint(cluster, worker)
        train_on(worker, worker.lease_batches(committed=first).ranges)
        cluster.start_again(1)
        join_again(worker)
        taken, last = 0, []
        while not (answer := worker.lease_batches(committed=last)).complete:
            last = list(answer.ranges)
            assert len(last) == 1
            found = train_on(worker, last)
            taken += 1
        assert taken == 2, "the one that was lost, and the last"
        assert (found == 3).all()


@pytest.mark.parametrize("mode", MODES)
def test_a_step_that_was_half_pushed_is_finished_by_another_worker(shared: Cluster, job: str, mode: str) -> None:
    spec = vector_job(job, mode, cells=32, world_size=0)
    with RawWorker(shared.address, spec, 0) as first, RawWorker(shared.address, spec, 1) as second:
        first.initialise()
        batch = first.lease_batches().ranges
        push(first, 0, batch)
        first.leave()
        removals = shared.coordinator.job(job).workers.removals
        until(lambda: not removals.pending(), "every shard has heard that the worker left")
        assert second.lease_batches().ranges == batch, "not every bucket has had it"
        for bucket in second.trained:
            push(second, bucket, batch)
        second.clock = 1
        assert (second.pull() == 1).all(), "each bucket had it from one of them"
        pages = [scrape(server.metrics_address) for server in shared.servers]
        assert sum(samples.get(f'ps_data_spent_total{{job="{job}"}}', 0.0) for samples in pages) == 1
        left = [(part.start, part.stop) for _ in range(2) for part in second.lease_batches(committed=batch).ranges]
        assert left == [(4, 8)] * 2, "an answer is given again until it is known to have come"


def test_only_live_workers_of_elastic_jobs_lease(shared: Cluster, job: str) -> None:
    own = pytest.raises(InvalidRequest, match="has a world size: its workers divide the data by their ranks")
    with RawWorker(shared.address, vector_job(f"{job}.fixed", "sync", 32, 1), 0) as fixed, own:
        fixed.lease_batches()
    with RawWorker(shared.address, vector_job(job, "sync", 32, 0), 0) as worker:
        with pytest.raises(Forbidden, match="does not come from worker 0"):
            worker.lease_batches(lease_key=bytes(16))
        with pytest.raises(UnknownWorker):
            worker.lease_batches(rank=5)
        with RawWorker(shared.address, worker.spec, 0), pytest.raises(Fenced):
            worker.lease_batches()


@pytest.mark.parametrize(
    ("fields", "error", "expected"),
    [
        ({"batch_size": 0}, InvalidRequest, "a batch has at least one sample, got batch_size 0"),
        ({"loader": 64}, LimitExceeded, "at most 64 loaders, got loader 64"),
        ({"sample_count": 2**41}, LimitExceeded, "max-samples is 1099511627776"),
        ({"leased": [DataRange(stop=4)] * 1025}, LimitExceeded, "max-leases is 1024, got a report of 1025"),
        ({"returned": [DataRange(start=2, stop=14)]}, InvalidRequest, "batches of 4 out of 12 samples, got .2, 14."),
        ({"sample_count": 13}, JobMismatch, "size is 12, got 13"),
    ],
)
def test_an_odd_request_for_data_is_refused_and_changes_nothing(
    shared: Cluster, job: str, fields: dict[str, Any], error: type[Exception], expected: str
) -> None:
    with RawWorker(shared.address, vector_job(job, "sync", 32, 0), 0) as worker:
        first = worker.lease_batches()
        before = progress(shared, job)
        with pytest.raises(error, match=expected):
            worker.lease_batches(**fields)
        assert progress(shared, job) == before
        assert worker.lease_batches() == first
