"""A training script as a user writes it; how it trains is up to who starts it. Leaves its weights in a file.

python tests/scripts/train_everything.py DIRECTORY [STEPS]
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from models import Everything, batch, loss_of
from safetensors.torch import save_file

import ps_worker

BUCKET_BYTES = 256
SAMPLES = 12


def main() -> None:
    directory, steps = Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 20
    with ps_worker.connect() as session:
        model = Everything(seed=session.rank, norm=True)
        optimizer = torch.optim.AdamW(model.groups(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.95)
        model, optimizer = session.prepare(model, optimizer, bucket_bytes=BUCKET_BYTES)
        for step in range(steps):
            loss_of(model, batch(session.rank, step, SAMPLES)).backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        assert session.clock == steps
        plain = session.unwrap(model)
        kind = f"{session.mode} {type(model).__name__} {type(optimizer).__name__}"
        # One write: workers share one output, and nothing may come between a line and its end.
        sys.stdout.write(f"worker {session.rank} of {session.world_size}: {kind}\n")
        weights = {name: parameter.detach().clone() for name, parameter in plain.named_parameters()}
        save_file(weights, directory / f"{session.mode}-{session.rank}.safetensors")


if __name__ == "__main__":
    main()
