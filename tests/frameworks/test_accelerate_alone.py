"""What Accelerate does on each worker, as it takes itself for the only one: loaders of its own, which the log tells of,
and trackers.
"""

from __future__ import annotations

from tests.tools.cluster import Cluster
from tests.tools.framework_processes import needs, run_workers

pytestmark = needs("accelerate")
SAMPLES = [float(number) for number in range(8)]


def test_a_loader_that_accelerate_alone_prepares_is_whole_on_each_worker_which_the_log_says_once(
    shared: Cluster, job: str
) -> None:
    for seen, said in run_workers("accelerate_alone", "samples_and_warnings", False, cluster=shared, job=job):
        assert seen == SAMPLES
        assert [text for text in said if "each of the 2 workers goes through all of its data" in text] == said[:1]
        assert said


def test_a_loader_that_the_session_has_prepared_before_is_divided_and_nothing_is_said(
    shared: Cluster, job: str
) -> None:
    found = run_workers("accelerate_alone", "samples_and_warnings", True, cluster=shared, job=job)
    assert sorted(sample for seen, _ in found for sample in seen) == SAMPLES
    assert [said for _, said in found] == [[], []]


def test_a_worker_that_is_alone_is_not_warned(shared: Cluster, job: str) -> None:
    [(seen, said)] = run_workers("accelerate_alone", "samples_and_warnings", False, cluster=shared, job=job, workers=1)
    assert (seen, said) == (SAMPLES, [])


def test_trackers_that_rank_0_alone_starts_keep_one_run(shared: Cluster, job: str) -> None:
    kept = run_workers("accelerate_alone", "tracked", True, cluster=shared, job=job)
    assert kept == [[{"clock": 1}], []]


def test_trackers_that_each_worker_starts_keep_as_many_runs(shared: Cluster, job: str) -> None:
    """What frameworks.md warns of: once Accelerate leaves it to rank 0 by itself, that passage may go."""
    kept = run_workers("accelerate_alone", "tracked", False, cluster=shared, job=job)
    assert kept == [[{"clock": 1}]] * 2


def test_an_elastic_job_is_refused_as_all_of_its_workers_would_write_the_files_of_rank_0(
    shared: Cluster, job: str
) -> None:
    for said in run_workers("accelerate_alone", "refused_elastic", cluster=shared, job=job):
        assert "an elastic job gives out ranks when it is joined, and Accelerate asks for this worker's before" in said
