"""Loaders that Accelerate alone prepares, or that the session has prepared before, and trackers: functions that workers
run.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.tracking import GeneralTracker
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ps_worker.accelerate
from tests.scripts.models import refusal


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


class Notes(GeneralTracker):  # type: ignore[misc,unused-ignore]
    """A tracker that keeps what it is told."""

    name, requires_logging_directory = "notes", False
    main_process_only = False

    def __init__(self) -> None:
        super().__init__()
        self.found: list[dict[str, Any]] = []

    @property
    def tracker(self) -> list[dict[str, Any]]:
        return self.found

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        pass

    def log(self, values: dict[str, Any], step: int | None = None, **more: Any) -> None:
        self.found.append(values)


def tracked(is_main_alone: bool) -> list[dict[str, Any]]:
    """What a worker's tracker has kept. is_main_alone: trackers are started on rank 0 alone, as the page says"""
    with ps_worker.accelerate.connect() as session:
        notes = Notes()
        accelerator = Accelerator(cpu=True, log_with=notes)
        model = nn.Linear(1, 1)
        model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        model, optimizer = accelerator.prepare(model, optimizer)
        if session.is_main or not is_main_alone:
            accelerator.init_trackers("run")
        model(torch.ones(1)).sum().backward()
        optimizer.step()
        accelerator.log({"clock": session.clock})
        return notes.found


def refused_elastic() -> str:
    """What `connect` says of an elastic job."""
    return refusal(lambda: ps_worker.accelerate.connect(elastic=True))
