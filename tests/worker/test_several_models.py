"""Several models and several optimizers in one `prepare`: a GAN, two optimizers for one model, a frozen teacher."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from ps_server.coordinator.timing import Timing
from ps_server.storage.manifest import Manifest
from ps_worker import Embedding, InvalidRequest, Session
from tests.tools.cases import cases
from tests.tools.cluster import Cluster, in_parallel, until
from tests.tools.small_models import close, drawn, filled, same, weights_of

MOST_BATCHES = 20_000
BATCHES_AFTER = 10  # of a run after it was disturbed


def make_generator() -> Any:
    return filled(nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 2)), seed=1)


def make_critic() -> Any:
    return filled(nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 1)), seed=2)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.01, betas=(0.5, 0.9))


def rms(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.RMSprop(model.parameters(), lr=0.005)


def make_gan() -> tuple[Any, Any, torch.optim.Optimizer, torch.optim.Optimizer]:
    """A generator, its critic, and the optimizer of each."""
    generator, critic = make_generator(), make_critic()
    return generator, critic, adam(generator), rms(critic)


def prepared(session: Session, *loaders: Any) -> Any:
    return session.prepare(*make_gan(), *loaders, bucket_bytes=64)


def wgan(g: Any, d: Any, opt_g: torch.optim.Optimizer, opt_d: torch.optim.Optimizer, rounds: int = 4) -> Any:
    """WGAN with a gradient penalty (Gulrajani et al., 2017): three steps of the critic, one of the generator."""
    draw = torch.Generator().manual_seed(5)
    for _ in range(rounds):
        for _ in range(3):
            real = torch.randn(16, 2, generator=draw) + 3
            fake = g(torch.randn(16, 4, generator=draw)).detach()
            mix = torch.rand(16, 1, generator=draw)
            between = (mix * real + (1 - mix) * fake).requires_grad_()
            [slope] = torch.autograd.grad(d(between).sum(), between, create_graph=True)
            penalty = (slope.norm(dim=1) - 1).square().mean()
            opt_d.zero_grad()
            (d(fake).mean() - d(real).mean() + 10 * penalty).backward()
            opt_d.step()
        opt_g.zero_grad()
        (-d(g(torch.randn(16, 4, generator=draw))).mean()).backward()
        opt_g.step()
    return weights_of(g, d)


@pytest.mark.parametrize(
    ("way", "overlap"),
    cases(
        [(("single", "auto"), None), (("sync", "grpc"), None), (("ssp:2", "shm"), True)],
        [(("sync", "shm"), True), (("async", "grpc"), None)],
    ),
)
def test_a_gan_trains_as_in_one_process(shared: Cluster, job: str, way: tuple[str, str], overlap: bool | None) -> None:
    mode, transport = way
    with shared.connect(mode, job=job, transport=transport) as session:
        g, d, opt_g, opt_d = make_gan()
        d, opt_g, g, opt_d = session.prepare(d, opt_g, g, opt_d, bucket_bytes=64, overlap=overlap)  # in any order
        assert close(wgan(g, d, opt_g, opt_d), wgan(*make_gan()), atol=1e-5)
        assert session.clock == 16


def test_two_workers_of_a_gan_agree_in_sync(shared: Cluster, job: str) -> None:
    def work(rank: int) -> Any:
        with shared.connect("sync", rank, 2, job=job) as session:
            return wgan(*prepared(session))

    first, second = in_parallel(2, work)
    assert same(first, second)
    assert close(first, wgan(*make_gan()), atol=1e-5)


@pytest.mark.parametrize("mode", cases(["sync", "async"], ["ssp:2"]))
def test_two_optimizers_of_one_model_and_one_backward(shared: Cluster, job: str, mode: str) -> None:
    def make() -> Any:
        model = make_generator()
        return model, torch.optim.SGD(model[0].parameters(), lr=0.1, momentum=0.9), adam(model[2])

    def train(model: Any, first: torch.optim.Optimizer, second: torch.optim.Optimizer) -> list[torch.Tensor]:
        for number in range(6):
            model(drawn(number, 8, 4)).square().mean().backward()
            for optimizer in (first, second):
                optimizer.step()
                optimizer.zero_grad()
        return weights_of(model)

    with shared.connect(mode, job=job, transport="grpc") as session:
        model, first, second = session.prepare(*make(), bucket_bytes=64, overlap=True)
        assert close(train(model, first, second), train(*make()), atol=1e-5)
        assert first.state_dict()["state"].keys() == second.state_dict()["state"].keys() == {0, 1}
        assert set(first.state_dict()["state"][0]) == {"momentum_buffer"}


def test_a_teacher_without_an_optimizer_is_sent_once_and_not_trained(shared: Cluster, job: str) -> None:
    def work(rank: int) -> list[torch.Tensor]:
        with shared.connect("sync", rank, 2, job=job) as session:
            teacher, student = filled(nn.Linear(4, 2), 10 + rank).requires_grad_(False), make_generator()
            teacher, student, optimizer = session.prepare(teacher, student, adam(student))
            for number in range(3):
                data = drawn(number, 8, 4)
                (student(data) - teacher(data)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            return weights_of(teacher, student)

    first, second = in_parallel(2, work)
    assert same(first, second)
    assert torch.equal(second[0], filled(nn.Linear(4, 2), 10).weight)


def test_a_gan_comes_back_from_a_checkpoint_with_both_models(make_cluster: Any, tmp_path: Any) -> None:
    cluster = make_cluster(checkpoint_dir=tmp_path, timing=Timing(asked_checkpoint=0.1))  # between two steps
    with cluster.connect("sync", job="gan") as session:
        g, d, opt_g, opt_d = prepared(session)
        before = wgan(g, d, opt_g, opt_d, rounds=1)
        assert cluster.coordinator.job("gan").checkpoint().name
        cluster.start_again(1)
        until(lambda: not cluster.coordinator.job("gan").lost(), "the job is whole")
        opt_d.zero_grad()
        opt_d.step()  # finds its place lost, goes back to the checkpoint, and is pushed again from there
        assert session.clock == 5
        assert same(before, weights_of(g, d))
        assert opt_g.state_dict()["state"][0]["step"] == 1
        assert opt_d.state_dict()["state"][0]["step"] == 3


Begun = tuple[Any, Callable[[torch.Tensor], None], Callable[[], list[torch.Tensor]]]


def gan_begun(session: Session, points: Any) -> Begun:
    """Returns the loader, what makes a batch's two steps, and what returns all weights."""
    g, d, opt_g, opt_d, loader = prepared(session, points)

    def steps(real: torch.Tensor) -> None:
        opt_d.zero_grad()
        (d(g(real.repeat(1, 2)).detach()).mean() - d(real).mean()).backward()
        opt_d.step()
        opt_g.zero_grad()
        (-d(g(real.repeat(1, 2))).mean()).backward()
        opt_g.step()

    return loader, steps, lambda: weights_of(g, d)


def rows_begun(session: Session, points: Any) -> Begun:
    """As `gan_begun`: a layer and the rows of a table, which have one backward and an optimizer each."""
    table, layer, ids = Embedding(2, initial="constant", scale=1.0), filled(nn.Linear(2, 1), seed=1), torch.arange(8)
    model = nn.ModuleDict({"layer": layer, "table": table})
    dense, sparse = adam(layer), torch.optim.SGD(table.parameters(), lr=0.1)
    _, dense, sparse, loader = session.prepare(model, dense, sparse, points, bucket_bytes=64)

    def steps(real: torch.Tensor) -> None:
        dense.zero_grad()
        sparse.zero_grad()
        layer(table((real[:, 0] * 100).long() % len(ids))).square().mean().backward()
        dense.step()
        sparse.step()

    return loader, steps, lambda: [*weights_of(layer), table.rows(ids)]


@pytest.mark.parametrize("begun", [gan_begun, rows_begun])
def test_after_a_rollback_the_rest_of_a_batchs_steps_is_left_out(
    make_cluster: Any, tmp_path: Any, begun: Callable[[Session, Any], Begun]
) -> None:
    """Two steps a batch, and a shard that is lost before a batch behind a checkpoint: nothing counts twice."""
    cluster = make_cluster(checkpoint_dir=tmp_path)

    def train(job: str, last: int | None) -> tuple[int, list[torch.Tensor]]:
        """How many steps it takes to some time after the disturbance, and what comes of them; `last`: without one."""
        asked: list[Future[Manifest]] = []
        with cluster.connect("sync", job=job) as session, ThreadPoolExecutor(1) as pool:
            points = DataLoader(TensorDataset(drawn(3, 8 * MOST_BATCHES, 2)), batch_size=8)
            points, steps, weights = begun(session, points)
            for (real,) in points:
                if last is None and (not asked or (asked[-1].done() and asked[-1].result().clock % 2)):
                    asked.append(pool.submit(cluster.coordinator.job(job).checkpoint))  # at a clock still to come
                elif last is None and asked[-1].done():
                    cluster.start_again(1)
                    last = session.clock + 2 * BATCHES_AFTER
                steps(real)
                if session.clock == last:
                    return session.clock, weights()
        raise AssertionError("no checkpoint came in time")

    last, disturbed = train("disturbed", None)
    assert same(disturbed, train("undisturbed", last)[1])


def test_what_cannot_be_is_refused_in_words(shared: Cluster, job: str) -> None:
    g, d, opt_g, opt_d = make_gan()
    with shared.connect("sync", job=job) as session:

        def refused(said: str, *things: object) -> None:
            with pytest.raises(InvalidRequest, match=said):
                session.prepare(*things)

        refused("models together with their optimizers, all in one call", g, d)
        refused("hold 4 parameters of no model", g, opt_g, opt_d)
        refused(r"0\.weight is in optimizers 0 and 1; each parameter is stepped by one", g, opt_g, rms(g))
        session.prepare(g, opt_g)
        refused("hand all models and optimizers to one call", d, opt_d)
