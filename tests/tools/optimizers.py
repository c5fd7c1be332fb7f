"""Optimizers that a shard may run, with hyper-parameters that are not the defaults."""

from __future__ import annotations

import torch

from ps_protocol.hyper_parameters import HyperParameters
from ps_protocol.optimizers import ELEMENTWISE

UNUSUAL: dict[str, HyperParameters] = {
    "SGD": {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
    "Adam": {"lr": 0.1, "betas": (0.8, 0.9), "amsgrad": True, "weight_decay": 0.01},
    "AdamW": {"lr": 0.1, "weight_decay": 0.1, "maximize": True},
    "Adagrad": {"lr": 0.1, "lr_decay": 0.1, "initial_accumulator_value": 0.5},
    "RMSprop": {"lr": 0.1, "centered": True, "momentum": 0.5},
    "Adadelta": {"lr": 0.5, "rho": 0.8},
    "Adamax": {"lr": 0.1, "weight_decay": 0.1},
    "NAdam": {"lr": 0.1, "momentum_decay": 0.01},
    "RAdam": {"lr": 0.1, "weight_decay": 0.1},
}


def make(name: str, parameters: list[torch.Tensor], values: HyperParameters | None = None) -> torch.optim.Optimizer:
    return ELEMENTWISE[name](parameters, **(values or {}))  # type: ignore[arg-type]
