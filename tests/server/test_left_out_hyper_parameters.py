"""A job may be registered with the hyper-parameters that its client means: the servers know the others."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ps_protocol.errors import InvalidRequest, JobMismatch
from ps_protocol.job import JobSpec
from ps_protocol.optimizers import ELEMENTWISE, hyper_parameters, with_defaults
from ps_server.coordinator.checkpoint_policy import CheckpointPolicy
from ps_server.coordinator.state_file import FILE
from ps_server.storage.manifest import seal
from tests.tools.one_process import DirectWorker, OneProcess
from tests.tools.raw_worker import vector_job

FEW = vector_job("job", "async", 64, 0)  # SGD with lr alone, which no script of torch registers


def as_a_script_has_it(spec: JobSpec) -> JobSpec:
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    return replace(spec, param_groups=(hyper_parameters("SGD", optimizer.param_groups[0]),))


ALL = as_a_script_has_it(FEW)


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_every_optimizer_gets_what_torch_gives_it(name: str) -> None:
    optimizer = ELEMENTWISE[name]([torch.zeros(1)], lr=0.25)  # type: ignore[call-arg]
    completed = with_defaults(replace(FEW, optimizer=name, param_groups=({"lr": 0.25},)))
    assert completed.param_groups == (hyper_parameters(name, optimizer.param_groups[0]),)
    assert with_defaults(completed) == completed


@pytest.mark.parametrize(("first", "second"), [(FEW, ALL), (ALL, FEW)])
def test_jobs_that_name_few_and_all_hyper_parameters_are_equal(
    cluster: OneProcess, first: JobSpec, second: JobSpec
) -> None:
    job, created = cluster.coordinator.register_job(first)
    assert (created, job.spec.param_groups) == (True, ALL.param_groups)
    assert cluster.coordinator.register_job(second) == (job, False)


def test_a_value_that_is_given_counts(cluster: OneProcess) -> None:
    job, _ = cluster.coordinator.register_job(replace(FEW, param_groups=({"lr": 1.0, "momentum": 0.5},)))
    assert (job.spec.param_groups[0]["momentum"], job.spec.param_groups[0]["dampening"]) == (0.5, 0.0)
    with pytest.raises(InvalidRequest, match=r"SGD takes .*, got 'rate'"):
        cluster.coordinator.register_job(replace(FEW, name="other", param_groups=({"rate": 1.0},)))
    with pytest.raises(JobMismatch, match="the optimizer is SGD in the registered job and Adagrad in this one"):
        cluster.coordinator.register_job(replace(FEW, optimizer="Adagrad"))


def take_away_what_was_left_out(path: Path) -> None:
    """Makes a file as servers wrote it that kept a job as it was registered."""

    def less(value: object) -> object:
        if isinstance(value, dict):
            return {
                key: [each for each in item if each["name"] == "lr"] if key == "hyper_parameters" else less(item)
                for key, item in value.items()
            }
        return [less(item) for item in value] if isinstance(value, list) else value

    data = less(json.loads(path.read_text()))
    assert isinstance(data, dict)
    data.pop("seal")
    path.write_text(json.dumps({**data, "seal": seal(data)}))


@pytest.mark.parametrize("spec", [FEW, ALL])
def test_the_file_of_an_older_coordinator_has_the_same_job(cluster: OneProcess, tmp_path: Path, spec: JobSpec) -> None:
    DirectWorker(cluster, FEW, 0).initialise()
    cluster.coordinator.stop()
    take_away_what_was_left_out(tmp_path / FILE)
    cluster.start_coordinator(CheckpointPolicy(tmp_path, resume=True))
    job, created = cluster.coordinator.register_job(spec)
    assert (created, job.spec.param_groups) == (False, ALL.param_groups)


@pytest.mark.parametrize("spec", [FEW, ALL])
def test_the_checkpoint_of_an_older_cluster_has_the_same_job(
    cluster: OneProcess, tmp_path: Path, spec: JobSpec
) -> None:
    worker = DirectWorker(cluster, FEW, 0)
    worker.initialise()
    worker.push()
    cluster.while_waiting()
    made = cluster.coordinator.job("job").checkpoint()
    cluster.coordinator.job("job").end()
    take_away_what_was_left_out(tmp_path / "job" / made.name / "manifest.json")
    cluster.start_coordinator(CheckpointPolicy(tmp_path, restore=True))
    worker = DirectWorker(cluster, spec, 0)
    assert set(worker.pull().tolist()) == {1.0}
