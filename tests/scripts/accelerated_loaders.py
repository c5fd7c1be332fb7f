"""A loader that Accelerate alone prepares, or that the session has prepared before: functions that workers run."""

from __future__ import annotations

import logging

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ps_worker.accelerate


def samples_and_warnings(is_ours: bool) -> tuple[list[float], list[str]]:
    """The samples that this worker sees of eight, and what the log warns of; with two loaders."""
    said: list[str] = []

    class Warnings(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    logging.getLogger("ps_worker").addHandler(Warnings(logging.WARNING))
    session = ps_worker.accelerate.connect()
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(1, 1)
    loaders = [DataLoader(TensorDataset(torch.arange(8.0)), batch_size=1) for _ in range(2)]
    model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    if is_ours:
        loaders = [session.prepare(loader) for loader in loaders]
    model, optimizer, *loaders = accelerator.prepare(model, optimizer, *loaders)
    session.barrier()
    seen = [float(batch[0]) for batch in loaders[0]]
    model(torch.ones(1)).sum().backward()
    optimizer.step()
    session.close()
    return seen, said
