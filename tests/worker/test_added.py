"""`optimizer.add_param_group` after `prepare`: layers that are unfrozen train as they would in one process."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import grpc
import pytest
import torch
from torch import nn

import ps_worker
from ps_protocol.job import added_name
from ps_worker import InvalidRequest, Session, Unsupported
from ps_worker.cluster import coordinator_calls
from tests.tools.cases import cases
from tests.tools.cluster import Cluster, in_parallel
from tests.tools.small_models import close, drawn, filled, same, step, weights_of

UNFREEZE = 3


def make_net() -> Any:
    net = filled(nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 2)))
    net[:4].requires_grad_(False)  # type: ignore[index]
    return net


def of_head(model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model[4].parameters(), lr=0.01)


def prepared(session: Session) -> Any:
    """A model, and the optimizer of its head."""
    model = make_net()
    return session.prepare(model, of_head(model), bucket_bytes=256)


def train(model: Any, optimizer: torch.optim.Optimizer, first: int = 0, last: int = 9) -> list[torch.Tensor]:
    """The usual recipe: the head first, then layer after layer with learning rates of their own."""
    for number in range(first, last):
        for layer, start in ((2, UNFREEZE), (0, 2 * UNFREEZE)):
            if number == start:
                model[layer].requires_grad_(True)
                optimizer.add_param_group({"params": model[layer].parameters(), "lr": 0.001 * (1 + layer)})
        step(model, optimizer, drawn(number, 8, 6))
        optimizer.param_groups[-1]["lr"] *= 0.9
    return weights_of(model)


def train_alone() -> list[torch.Tensor]:
    model = make_net()
    return train(model, of_head(model))


class Unanswered(grpc.RpcError):
    """The error of a call that nobody answers."""

    def __init__(self, code: grpc.StatusCode) -> None:
        self._code = code

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return "nobody answers"


@pytest.mark.parametrize("code", [grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED])
def test_all_added_jobs_share_the_time_for_a_farewell_that_is_not_answered(
    make_cluster: Callable[..., Cluster], monkeypatch: pytest.MonkeyPatch, code: grpc.StatusCode
) -> None:
    """The job itself, in which the worker's state is left, has its own. The coordinator is gone, or hangs."""
    tried: list[str] = []
    seconds: dict[str, float] = {}  # that the first farewell to each job waits for its answer

    def leave(request: Any, timeout: float) -> None:
        tried.append(request.worker.job)
        seconds.setdefault(request.worker.job, timeout)
        raise Unanswered(code)

    monkeypatch.setattr(coordinator_calls, "LEAVE_SECONDS", 0.2)
    monkeypatch.setattr(coordinator_calls, "LEAVE_PAUSE_SECONDS", 0.02)
    session = make_cluster().connect("async", job="job")
    train(*prepared(session))
    training = session._strategy._training  # type: ignore[attr-defined]
    for job in (training, *(added.job for added in training._added.groups)):
        monkeypatch.setattr(job.participation.coordinator._membership, "Leave", leave)
    session.close()
    counts = Counter(tried)
    assert list(counts) == [added_name("job", 1), added_name("job", 2), "job"]
    assert counts[added_name("job", 1)] > 1
    assert counts[added_name("job", 2)] == 1
    assert counts["job"] > 1
    assert list(seconds.values()) == [coordinator_calls.CALL_SECONDS, 0.2, coordinator_calls.CALL_SECONDS]


@pytest.mark.parametrize(
    ("mode", "transport"),
    cases([("single", "auto"), ("ssp:2", "shm"), ("async", "grpc")], [("sync", "grpc"), ("sync", "shm")]),
)
def test_layers_are_unfrozen_one_after_the_other(shared: Cluster, job: str, mode: str, transport: str) -> None:
    with shared.connect(mode, job=job, transport=transport) as session:
        model, optimizer = prepared(session)
        assert close(train(model, optimizer), train_alone())
        assert session.clock == 9
        state = optimizer.state_dict()["state"]
        assert [float(state[index]["step"]) for index in sorted(state)] == [9, 9, 6, 6, 3, 3]
    assert not any(name.startswith(job) for name in shared.coordinator.jobs())


def test_two_workers_agree_and_the_state_goes_into_a_resumed_run(shared: Cluster, job: str) -> None:
    def work(rank: int) -> tuple[list[torch.Tensor], Any]:
        with shared.connect("sync", rank, 2, job=job) as session:
            model, optimizer = prepared(session)
            return train(model, optimizer, 0, 5), optimizer.state_dict()

    (first, state), (second, _) = in_parallel(2, work)
    assert same(first, second)
    model = make_net()
    for parameter, value in zip(model.parameters(), first, strict=True):
        parameter.data.copy_(value)
    model[2].requires_grad_(True)
    optimizer = of_head(model)
    optimizer.add_param_group({"params": model[2].parameters()})
    optimizer.load_state_dict(state)
    with shared.connect("sync", job=job) as session:
        model, optimizer = session.prepare(model, optimizer, bucket_bytes=256)
        assert close(train(model, optimizer, 5), train_alone())


def test_what_the_script_changes_of_an_added_layer_counts(shared: Cluster, job: str) -> None:
    def changing(model: Any, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
        train(model, optimizer, 0, 5)
        model[2].weight.data.clamp_(-0.05, 0.05)
        optimizer.load_state_dict({**optimizer.state_dict(), "state": {}})
        return train(model, optimizer, 5, 6)

    alone = make_net()
    expected = changing(alone, of_head(alone))
    with shared.connect("sync", job=job) as session:
        assert close(changing(*prepared(session)), expected)


def test_what_cannot_be_added_is_refused_and_changes_nothing(shared: Cluster, job: str) -> None:
    with shared.connect("sync", job=job) as session:
        model, optimizer = prepared(session)

        def refused(error: type[Exception], said: str, parameters: object, **more: float) -> None:
            with pytest.raises(error, match=said):
                optimizer.add_param_group({"params": parameters, **more})

        stranger = nn.Linear(6, 2).parameters()
        refused(Unsupported, r"of the models that were handed to prepare, got a tensor of \(2, 6\)", stranger)
        refused(InvalidRequest, r"4\.weight is in an optimizer already", model[4].parameters())
        optimizer.add_param_group({"params": model[2].weight})
        refused(InvalidRequest, r"2\.weight is in an optimizer already", model[2].parameters())
        refused(InvalidRequest, "at least one parameter", [])
        refused(InvalidRequest, "lr", model[2].bias, lr=-1.0)
        assert len(optimizer.param_groups) == 2
        train(model, optimizer, 0, 2)


def test_a_worker_that_adds_a_layer_late_gets_it_as_others_have_trained_it(shared: Cluster, job: str) -> None:
    """Also where these have left by then: the job of the layer lasts as long as that of the head."""

    def connect() -> Session:
        return ps_worker.connect(shared.address, "async", job=job, elastic=True)

    with connect() as last:
        model, optimizer = prepared(last)
        with connect() as first:
            trained = train(*prepared(first), last=UNFREEZE + 2)
        assert added_name(job, 1) in shared.coordinator.jobs()
        model[2].requires_grad_(True)
        optimizer.add_param_group({"params": model[2].parameters(), "lr": 0.1})
        assert same(weights_of(model[2]), trained[2:4])
    assert not any(name.startswith(job) for name in shared.coordinator.jobs())


def test_a_job_of_added_layers_ends_with_the_first_job_however_that_ends(shared: Cluster, job: str) -> None:
    with shared.connect("sync", job=job) as session:
        train(*prepared(session), last=UNFREEZE + 1)
        added = shared.coordinator.job(added_name(job, 1))
        session._strategy._training._added.groups[0].job.close()  # type: ignore[attr-defined]
        assert not added.life.has_ended
        shared.coordinator.job(job).end("of a test")
        assert added.life.has_ended
