"""A WGAN with a gradient penalty on eight points in a ring: two models, two optimizers, a double backward.

    python examples/wgan_gp.py                                                        # one process
    ps-worker run --mode ddp --workers 2 examples/wgan_gp.py                          # DistributedDataParallel
    ps-server up --shards 2 & ps-worker run --server 127.0.0.1:50051 --workers 2 --mode sync examples/wgan_gp.py

The critic makes two steps for each step of the generator (Gulrajani et al., "Improved Training of Wasserstein GANs",
2017). Only the lines that call `ps` and `session` tell this from a script for one process.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ps_torch as ps


def ring(count: int) -> torch.Tensor:
    """Points around eight places on a circle of radius 2: [count, 2]."""
    generator = torch.Generator().manual_seed(0)
    angle = torch.randint(8, (count,), generator=generator) * (2 * math.pi / 8)
    centers = 2 * torch.stack([angle.cos(), angle.sin()], dim=1)
    return centers + 0.05 * torch.randn(count, 2, generator=generator)


def network(inputs: int, outputs: int, width: int = 64) -> nn.Module:
    """A small network with two hidden layers."""
    return nn.Sequential(
        nn.Linear(inputs, width),
        nn.LeakyReLU(0.2),
        nn.Linear(width, width),
        nn.LeakyReLU(0.2),
        nn.Linear(width, outputs),
    )


def penalty(critic: nn.Module, real: torch.Tensor, fake: torch.Tensor) -> torch.Tensor:
    """How far the critic's slope is from one, at points between real and made ones."""
    mix = torch.rand(len(real), 1, device=real.device)
    between = (mix * real + (1 - mix) * fake).requires_grad_()
    [slope] = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
    return (slope.norm(dim=1) - 1).square().mean()


def distance(points: torch.Tensor) -> float:
    """How far points are from the nearest of the eight places, on average."""
    angle = torch.arange(8) * (2 * math.pi / 8)
    centers = 2 * torch.stack([angle.cos(), angle.sin()], dim=1)
    return float(torch.cdist(points.cpu(), centers).min(dim=1).values.mean())


def main() -> None:
    """Trains, and says how good the generator is."""
    arguments = argparse.ArgumentParser(description="A WGAN with a gradient penalty on eight points in a ring.")
    arguments.add_argument("--epochs", type=int, default=40, help="passes over the data")
    arguments.add_argument("--samples", type=int, default=4096, help="points in the data")
    arguments.add_argument("--save", type=Path, help="a safetensors file for the generator's weights")
    options = arguments.parse_args()

    session = ps.connect()
    torch.manual_seed(session.rank)
    generator, critic = network(8, 2), network(2, 1)
    generator_optimizer = torch.optim.Adam(generator.parameters(), lr=2e-3, betas=(0.0, 0.9))
    critic_optimizer = torch.optim.Adam(critic.parameters(), lr=2e-3, betas=(0.0, 0.9))
    loader = DataLoader(TensorDataset(ring(options.samples)), batch_size=128, shuffle=True, drop_last=True)
    generator, critic, generator_optimizer, critic_optimizer, loader = session.prepare(
        generator, critic, generator_optimizer, critic_optimizer, loader
    )

    batches = options.epochs * len(loader)
    session.progress(total=batches + batches // 2)  # steps of both optimizers count
    steps = 0
    for epoch in range(options.epochs):
        for (real,) in loader:
            with torch.no_grad():
                fake = generator(torch.randn(len(real), 8, device=session.device))
            loss = critic(fake).mean() - critic(real).mean() + 0.1 * penalty(critic, real, fake)
            critic_optimizer.zero_grad()
            loss.backward()
            critic_optimizer.step()
            session.log(loss=loss)
            steps += 1
            if steps % 2 == 0:
                critic.requires_grad_(False)  # its gradients are of no use here
                generator_optimizer.zero_grad()
                (-critic(generator(torch.randn(len(real), 8, device=session.device))).mean()).backward()
                generator_optimizer.step()
                critic.requires_grad_(True)
        if session.is_main and (epoch + 1) % 10 == 0:
            print(f"epoch {epoch + 1}: critic's loss {loss.item():.3f}")
    session.barrier()  # all workers have made their last step
    with torch.no_grad():
        found = distance(generator(torch.randn(1024, 8, device=session.device)))
    found = session.mean(found)
    if session.is_main:
        print(f"made points are {found:.3f} from the nearest of the eight places, on average")
        if options.save:
            save_file(session.global_weights(generator), options.save)  # those of the job, in every mode
    session.close()


if __name__ == "__main__":
    main()
