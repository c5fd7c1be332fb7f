"""Fragments of one worker (mode local:H/F) whose place is lost, whose push fails, or which a signal interrupts."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ps_server.core.limits import Limits
from ps_server.storage.checkpoints import CheckpointStore
from ps_worker import InvalidRequest, LimitExceeded
from ps_worker.cluster.participation import Participation
from ps_worker.model.local_round import LocalRound
from ps_worker.strategies.job_training import JobTraining
from ps_worker.strategies.local_rounds import LocalRounds
from tests.tools.cluster import Cluster, hear_of_a_lost_place, until
from tests.tools.small_models import step
from tests.tools.small_steps import adamw, batch, make_net, sgd

BUCKET_BYTES = 128


def participation_of(session: Any) -> Participation:
    return session._strategy._training.participation  # type: ignore[no-any-return]


def hears(participation: Participation) -> bool:
    """Asks whether the worker still has its place, sooner than its next heartbeat would; returns whether it lost it."""
    participation.membership.await_change(participation.connection.place)
    return not participation.has_place


def interrupted(*_: Any) -> Any:
    raise KeyboardInterrupt


def test_a_lost_place_is_seen_in_the_next_step_whatever_is_due_there(shared: Cluster, job: str) -> None:
    with shared.connect("local:6/2", job=job) as session:
        model = make_net()
        model, optimizer = session.prepare(model, adamw(model), bucket_bytes=BUCKET_BYTES, outer={"warm_up": 0})
        participation = participation_of(session)
        shared.end_lease(0, job)
        until(lambda: hears(participation), "the worker to hear of it")
        step(model, optimizer, batch(0, 0))  # fragments leave after the third and the sixth
        assert participation.has_place


@pytest.mark.parametrize("at", [2, 4], ids=["first fragment", "last fragment"])
def test_a_fragment_that_cannot_be_pushed_is_told_of_at_once_and_pushed_by_the_next_step(
    shared: Cluster, job: str, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    def refused(*_: Any) -> Any:
        raise LimitExceeded("no thread can be started")

    with shared.connect("local:4/2", job=job) as session:
        model = make_net()
        model, optimizer = session.prepare(model, adamw(model), bucket_bytes=BUCKET_BYTES, outer={"warm_up": 0})
        for number in range(1, at):
            step(model, optimizer, batch(0, number))
        with monkeypatch.context() as replaced:
            for transport in participation_of(session).connection._transports.values():
                replaced.setattr(transport, "exchange", refused)
            with pytest.raises(LimitExceeded, match="no thread can be started"):
                step(model, optimizer, batch(0, at))
        assert session.round == 0
        for number in range(at, 9):
            model.zero_grad()
            step(model, optimizer, batch(0, number))
        assert session.round == 2


def test_what_was_decided_of_a_fragment_does_not_outlive_an_interrupt(
    shared: Cluster, job: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weights are not finite by the time the place is lost, when all that is left of the round would leave."""
    with shared.connect("local:4/2", job=job) as session:
        model = make_net()
        model, optimizer = session.prepare(model, sgd(model), bucket_bytes=BUCKET_BYTES, outer={"warm_up": 0})
        step(model, optimizer, batch(0, 0))
        with monkeypatch.context() as replaced:
            replaced.setattr(LocalRound, "leave", interrupted)
            with pytest.raises(KeyboardInterrupt):
                step(model, optimizer, batch(0, 1))
        with torch.no_grad():
            model[0].bias[0] = float("nan")
        participation = participation_of(session)
        shared.end_lease(0, job)
        until(lambda: hears(participation), "the worker to hear of it")
        step(model, optimizer, batch(0, 2))
        assert all(value.isfinite().all() for value in session.global_weights().values())


def test_a_round_whose_rest_a_shard_refuses_from_a_new_place_is_left_out_there(
    make_cluster: Callable[..., Cluster], job: str
) -> None:
    """The place is lost between two fragments of the second round. The step after the refusal begins a round with the
    servers' weights: the first fragment had left before, and counts.
    """
    cluster = make_cluster(limits=Limits(push_norm=1e6))
    outer = {"warm_up": 0, "lr": 1.0, "momentum": 0.0, "nesterov": False, "delay": 0}
    with cluster.connect("local:4/2", job=job, transport="tcp") as session:
        net = nn.ParameterList(nn.Parameter(torch.zeros(16)) for _ in range(4))
        plain = torch.optim.SGD(net.parameters(), lr=1.0)
        model, optimizer = session.prepare(net, plain, bucket_bytes=64, outer=outer)
        refused: list[int] = []
        for number in range(16):
            if number == 6:
                hear_of_a_lost_place(session, cluster, job)
            optimizer.zero_grad()
            (2.0 ** (30 if number == 6 else number) * sum(layer.sum() for layer in model)).backward()
            try:
                optimizer.step()
            except LimitExceeded:
                refused.append(number)
                with pytest.raises(InvalidRequest, match=r"are gone, as calls have failed, or were interrupted"):
                    session.global_weights()
        assert refused == [6]
        before, others = 2.0**4 - 1, 2.0**16 - 2.0**8
        first = before + 2.0**4 + 2.0**5 + others
        assert sorted(-layer[0].item() for layer in net) == [before + others] * 2 + [first] * 2


@pytest.mark.usefixtures("ctrl_c")
def test_a_signal_that_comes_while_a_worker_goes_back_acts_once_it_has_arrived(
    make_cluster: Callable[..., Cluster], job: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = make_cluster(lease=600.0, checkpoint_dir=tmp_path, checkpoint_every="2steps")
    roll_back, moved, went = JobTraining._roll_back, LocalRounds.moved, list[str]()

    def goes_back(loop: JobTraining, *given: Any) -> None:
        signal.raise_signal(signal.SIGINT)
        roll_back(loop, *given)
        went.append("back")

    def arrives(rounds: LocalRounds, *given: Any) -> None:
        moved(rounds, *given)
        went.append("there")

    monkeypatch.setattr(JobTraining, "_roll_back", goes_back)
    monkeypatch.setattr(LocalRounds, "moved", arrives)
    with cluster.connect("local:2/1", job=job) as session:
        model = make_net()
        model, optimizer = session.prepare(model, adamw(model), bucket_bytes=BUCKET_BYTES, outer={"warm_up": 0})

        def make_step() -> None:
            step(model, optimizer, batch(0, 0))

        coordinated, store = cluster.coordinator.job(job), CheckpointStore(tmp_path)
        until(lambda: (make_step(), store.names(job))[1] != [], "a checkpoint")
        cluster.start_again(1)
        with pytest.raises(KeyboardInterrupt):
            until(lambda: (make_step(), coordinated.workers.restore_count)[1] > 1, "the interrupt")
        assert went == ["back", "there"]
        make_step()
