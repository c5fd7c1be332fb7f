"""Hyper-parameters of optimizers, as plain values: a number, a boolean, several numbers, or None."""

from __future__ import annotations

from collections.abc import Mapping

HyperValue = float | bool | tuple[float, ...] | None
HyperParameters = Mapping[str, HyperValue]
