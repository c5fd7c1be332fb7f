"""Several models and several optimizers in one `prepare`: a GAN, two optimizers for one model, a frozen teacher."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from ps_server.storage.checkpoints import Manifest
from ps_worker import InvalidRequest
from tests.tools.cluster import Cluster, in_parallel, until

MODES = ["sync", "ssp:2", "async"]
BATCHES = 300


def _filled(net: nn.Module, seed: int) -> nn.Module:
    generator = torch.Generator().manual_seed(seed)
    for parameter in net.parameters():
        nn.init.normal_(parameter, std=0.3, generator=generator)
    return net


def _generator() -> nn.Module:
    return _filled(nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 2)), 1)


def _critic() -> nn.Module:
    return _filled(nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 1)), 2)


def _penalty(critic: nn.Module, real: torch.Tensor, fake: torch.Tensor, draw: torch.Generator) -> torch.Tensor:
    mix = torch.rand(len(real), 1, generator=draw)
    between = (mix * real + (1 - mix) * fake).requires_grad_()
    [slope] = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
    return (slope.norm(dim=1) - 1).square().mean()


def _wgan(g: Any, d: Any, opt_g: torch.optim.Optimizer, opt_d: torch.optim.Optimizer, rounds: int = 4) -> None:
    """WGAN with a gradient penalty (Gulrajani et al., 2017): three steps of the critic, one of the generator."""
    draw = torch.Generator().manual_seed(5)
    for _ in range(rounds):
        for _ in range(3):
            real = torch.randn(16, 2, generator=draw) + 3
            fake = g(torch.randn(16, 4, generator=draw)).detach()
            loss = d(fake).mean() - d(real).mean() + 10 * _penalty(d, real, fake, draw)
            opt_d.zero_grad()
            loss.backward()
            opt_d.step()
        opt_g.zero_grad()
        (-d(g(torch.randn(16, 4, generator=draw))).mean()).backward()
        opt_g.step()


def _adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.01, betas=(0.5, 0.9))


def _rms(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.RMSprop(model.parameters(), lr=0.005)


def _alone() -> list[torch.Tensor]:
    g, d = _generator(), _critic()
    _wgan(g, d, _adam(g), _rms(d))
    return [*g.parameters(), *d.parameters()]


def _close(found: Any, expected: Any) -> bool:
    return all(torch.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("transport", ["shm", "grpc"])
@pytest.mark.parametrize("mode", ["single", *MODES])
@pytest.mark.parametrize("overlap", [None, True])
def test_a_gan_trains_as_in_one_process(
    shared: Cluster, job: str, mode: str, transport: str, overlap: bool | None
) -> None:
    with shared.connect(mode, job=job, transport=transport) as session:
        g, d = _generator(), _critic()
        opt_g, opt_d = _adam(g), _rms(d)
        d, opt_g, g, opt_d = session.prepare(d, opt_g, g, opt_d, bucket_bytes=64, overlap=overlap)  # in any order
        _wgan(g, d, opt_g, opt_d)
        assert session.clock == 16
        assert _close([*g.parameters(), *d.parameters()], _alone())


def test_two_workers_of_a_gan_agree_in_sync(shared: Cluster, job: str) -> None:
    def work(rank: int) -> list[torch.Tensor]:
        with shared.connect("sync", rank, 2, job=job) as session:
            g, d = _generator(), _critic()
            g, d, opt_g, opt_d = session.prepare(g, d, _adam(g), _rms(d), bucket_bytes=64)
            _wgan(g, d, opt_g, opt_d)
            return [parameter.detach().clone() for parameter in (*g.parameters(), *d.parameters())]

    found = in_parallel(2, work)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert _close(found[0], _alone())


@pytest.mark.parametrize("mode", MODES)
def test_two_optimizers_of_one_model_and_one_backward(shared: Cluster, job: str, mode: str) -> None:
    def train(model: Any, first: torch.optim.Optimizer, second: torch.optim.Optimizer) -> list[torch.Tensor]:
        for number in range(6):
            data = torch.randn(8, 4, generator=torch.Generator().manual_seed(number))
            model(data).square().mean().backward()
            first.step()
            second.step()
            first.zero_grad()
            second.zero_grad()
        return list(model.parameters())

    def optimizers(model: Any) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
        return torch.optim.SGD(model[0].parameters(), lr=0.1, momentum=0.9), _adam(model[2])

    alone = _generator()
    expected = train(alone, *optimizers(alone))
    with shared.connect(mode, job=job, transport="grpc") as session:
        model = _generator()
        model, first, second = session.prepare(model, *optimizers(model), bucket_bytes=64, overlap=True)
        assert _close(train(model, first, second), expected)
        assert first.state_dict()["state"].keys() == second.state_dict()["state"].keys() == {0, 1}
        assert set(first.state_dict()["state"][0]) == {"momentum_buffer"}


def test_a_teacher_without_an_optimizer_is_sent_once_and_not_trained(shared: Cluster, job: str) -> None:
    def work(rank: int) -> list[torch.Tensor]:
        with shared.connect("sync", rank, 2, job=job) as session:
            teacher, student = _filled(nn.Linear(4, 2), 10 + rank).requires_grad_(False), _generator()
            teacher, student, optimizer = session.prepare(teacher, student, _adam(student))
            for number in range(3):
                data = torch.randn(8, 4, generator=torch.Generator().manual_seed(number))
                (student(data) - teacher(data)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            return [*teacher.parameters(), *student.parameters()]

    found = in_parallel(2, work)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert torch.equal(found[1][0], _filled(nn.Linear(4, 2), 10).weight)


def test_a_gan_comes_back_from_a_checkpoint_with_both_models(make_cluster: Any, tmp_path: Any) -> None:
    cluster = make_cluster(checkpoint_dir=tmp_path)
    with cluster.connect("sync", job="gan") as session:
        g, d = _generator(), _critic()
        g, d, opt_g, opt_d = session.prepare(g, d, _adam(g), _rms(d), bucket_bytes=64)
        _wgan(g, d, opt_g, opt_d, rounds=1)
        name = cluster.coordinator.job("gan").checkpoint().name
        before = [parameter.detach().clone() for parameter in (*g.parameters(), *d.parameters())]
        cluster.start_again(1)
        until(lambda: not cluster.coordinator.job("gan").lost(), "the job is whole")
        opt_d.zero_grad()
        opt_d.step()  # finds its place lost, and goes back to the checkpoint
        assert session.clock == 4
        assert name
        assert all(torch.equal(a, b) for a, b in zip(before, (*g.parameters(), *d.parameters()), strict=True))
        assert opt_g.state_dict()["state"][0]["step"] == 1
        assert opt_d.state_dict()["state"][0]["step"] == 3


def test_after_a_rollback_the_rest_of_a_batchs_steps_is_left_out(make_cluster: Any, tmp_path: Any) -> None:
    """Two steps a batch, and a shard that is lost before a batch behind a checkpoint: nothing counts twice."""
    cluster = make_cluster(checkpoint_dir=tmp_path)
    points = torch.randn(8 * BATCHES, 2, generator=torch.Generator().manual_seed(3))

    def train(job: str, disturbed: bool) -> tuple[int, list[torch.Tensor]]:
        asked: list[Future[Manifest]] = []
        with cluster.connect("sync", job=job) as session, ThreadPoolExecutor(1) as pool:
            g, d = _generator(), _critic()
            data = DataLoader(TensorDataset(points), batch_size=8)
            g, d, opt_g, opt_d, data = session.prepare(g, d, _adam(g), _rms(d), data, bucket_bytes=64)
            for (real,) in data:
                if disturbed and (not asked or (asked[-1].done() and asked[-1].result().clock % 2)):
                    asked.append(pool.submit(cluster.coordinator.job(job).checkpoint))  # at a clock still to come
                elif disturbed and asked[-1].done():
                    cluster.start_again(1)
                    disturbed = False
                opt_d.zero_grad()
                (d(g(real.repeat(1, 2)).detach()).mean() - d(real).mean()).backward()
                opt_d.step()
                opt_g.zero_grad()
                (-d(g(real.repeat(1, 2))).mean()).backward()
                opt_g.step()
            assert not disturbed, "no checkpoint came in time"
            return session.clock, [parameter.detach().clone() for parameter in (*g.parameters(), *d.parameters())]

    undisturbed, disturbed = train("undisturbed", False), train("disturbed", True)
    assert undisturbed[0] == disturbed[0] == 2 * BATCHES
    assert all(torch.equal(a, b) for a, b in zip(undisturbed[1], disturbed[1], strict=True))


def test_what_cannot_be_is_refused_in_words(shared: Cluster, job: str) -> None:
    g, d = _generator(), _critic()
    with shared.connect("sync", job=job) as session:
        with pytest.raises(InvalidRequest, match="models together with their optimizers, all in one call"):
            session.prepare(g, d)
        with pytest.raises(InvalidRequest, match="hold 4 parameters of no model"):
            session.prepare(g, _adam(g), _adam(d))
        with pytest.raises(InvalidRequest, match="a parameter is in two optimizers"):
            session.prepare(g, _adam(g), _rms(g))
        session.prepare(g, _adam(g))
        with pytest.raises(InvalidRequest, match="hand all models and optimizers to one call"):
            session.prepare(d, _adam(d))
