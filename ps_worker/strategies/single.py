"""Training in one process, without servers: the reference for all other modes.

It is also a dry run: the log lists what the modes with servers would refuse.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from ps_worker.data.loaders import PreparedLoader, prepared_loader, refused_of_loader
from ps_worker.data.pass_position import WholeLoop
from ps_worker.metrics import ModelNumbers, WorkerMetrics
from ps_worker.model.job_spec import refused_of
from ps_worker.model.optimizer import SteppedAlone
from ps_worker.model.refused import LATER_IN_GROUP
from ps_worker.strategies.strategy import Prepared
from ps_worker.tables.modules import looked_up, prepare_tables
from ps_worker.values import PrepareOptions

log = logging.getLogger("ps_worker")


class Single:
    """The only worker. wanted: the mode was asked for by name, so what servers would refuse is logged as a warning"""

    rank = exchange_rank = 0
    world_size = 1
    is_main = True

    def __init__(self, metrics: WorkerMetrics, device: torch.device, wanted: bool) -> None:
        self.clock = 0
        self._metrics = metrics
        self._device = device
        self._level = logging.WARNING if wanted else logging.INFO
        self._refused: set[str] = set()  # what the log has
        self._alone: SteppedAlone | None = None  # from `prepare` on
        self._in_group = False  # `prepare` got a group

    @property
    def round(self) -> int:
        """Steps finished."""
        return self.clock

    def refresh(self) -> None:
        """Does nothing: the model has the only weights."""

    def global_values(self) -> Mapping[int, torch.Tensor]:
        """Returns an empty mapping: the model has the only weights."""
        return {}

    def prepare(
        self, models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer], options: PrepareOptions
    ) -> Prepared:
        """Returns model, optimizers and loaders unchanged."""
        self._in_group = options.group is not None
        self._log_refused(refused_of(models, optimizers, options.group))
        tables = prepare_tables(models, optimizers)
        self._metrics.watch_model(ModelNumbers(lambda: looked_up(tables)))
        self._alone = SteppedAlone(models, lambda message: self._log_refused([message]))
        self._alone.know(optimizers, optimizers)
        for optimizer in optimizers:
            self._metrics.watch_optimizer(optimizer, self._stepped)
        return models, optimizers

    def begin_stage(
        self, models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer]
    ) -> Sequence[torch.optim.Optimizer]:
        """Returns the optimizers unchanged. Earlier optimizers may step, too; servers would refuse that."""
        self._log_refused([LATER_IN_GROUP] if self._in_group else refused_of(models, optimizers))
        assert self._alone is not None
        self._alone.check_new(optimizers)
        self._alone.take_over(optimizers, optimizers)
        for optimizer in optimizers:
            self._metrics.watch_optimizer(optimizer, self._stepped)
        return optimizers

    def _stepped(self) -> int:
        self.clock += 1
        return self.clock

    def prepare_loader(self, loader: DataLoader[Any], seed: int) -> PreparedLoader:
        """Returns a loader of all of the data."""
        self._log_refused(refused_of_loader(loader))
        if hasattr(loader, "state_dict"):  # torchdata's, which has its own
            return prepared_loader(loader, self._device, self._metrics.timer, loader.__iter__)
        position = WholeLoop(loader)
        return prepared_loader(loader, self._device, self._metrics.timer, position.batches, position)

    def keep(self, things: Sequence[Any], own: Sequence[Any] = ()) -> None:
        """Does nothing: there is no checkpoint to go back to."""

    def no_sync(self) -> AbstractContextManager[None]:
        """Returns a context that does nothing."""
        return nullcontext()

    def exchange(self, value: bytes, what: str) -> dict[int, bytes]:
        """Returns this worker's own value."""
        return {0: value}

    def close(self) -> None:
        """Stops watching for steps of other optimizers."""
        if self._alone is not None:
            self._alone.close()

    def _log_refused(self, findings: list[str]) -> None:
        for text in findings:
            if text not in self._refused:
                self._refused.add(text)
                log.log(self._level, "in sync, ssp and async this is refused: %s", text)
