"""The strategy of each mode."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from ps_runtime.launch_id import LauncherReports
from ps_worker.config import WorkerConfig
from ps_worker.metrics import WorkerMetrics
from ps_worker.strategies.ddp import Ddp
from ps_worker.strategies.parameter_server import ServerStrategy
from ps_worker.strategies.single import Single
from ps_worker.strategies.strategy import Strategy
from ps_worker.timeline.recording import Timeline


def _on_servers(config: WorkerConfig, metrics: WorkerMetrics, device: torch.device, timeline: Timeline) -> Strategy:
    return ServerStrategy(config, metrics, device, LauncherReports(), timeline)


# By mode, without the number in `ssp:K` and `local:H`.
STRATEGIES: Mapping[str, Callable[[WorkerConfig, WorkerMetrics, torch.device, Timeline], Strategy]] = {
    "single": lambda config, metrics, device, _: Single(metrics, device, config.mode_given),
    "ddp": lambda config, metrics, device, _: Ddp(config.rank or 0, config.world_size, metrics, device),
    "sync": _on_servers,
    "ssp": _on_servers,
    "async": _on_servers,
    "local": _on_servers,
}
