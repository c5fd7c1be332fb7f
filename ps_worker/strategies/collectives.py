"""Numbers and values over all workers: mean, gather, broadcast, barrier, in every mode alike.

All are one exchange: each worker gives some bytes and gets those of all, in the order of ranks. Each worker computes
the result itself, from the same bytes in the same order, so all have the same result, or the same error. The bytes are
a document of ps_worker/state/documents.py.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping
from typing import Any

import torch
from safetensors import SafetensorError

from ps_protocol.errors import InvalidRequest, LimitExceeded, Unsupported
from ps_protocol.job import MAX_BUCKET_BYTES
from ps_protocol.numpy_numbers import as_python
from ps_worker.state.documents import UNREADABLE, plain, read_document, value_of, write_document
from ps_worker.strategies.strategy import Strategy

FORMAT = 1


class Collectives:
    """The collective calls of one session. device: that of results if no argument has one"""

    def __init__(self, strategy: Strategy, device: torch.device) -> None:
        self._strategy = strategy
        self._device = device

    def mean(self, x: Any, weight: float = 1.0) -> Any:
        """See Session.mean."""
        weight = as_python(weight)
        if not isinstance(weight, int | float) or not math.isfinite(weight) or weight < 0:
            raise InvalidRequest(f"session.mean: a weight is a finite number from 0, got {weight!r}")
        leaves = _leaves(x)
        for name, leaf in leaves.items():
            _check_leaf(name, leaf)
        contents = self._gather("mean", [float(weight), x])
        weights = {rank: _weight(rank, content) for rank, content in contents.items()}
        given = {rank: _leaves(content[1]) for rank, content in contents.items()}
        kinds = {rank: _kinds(content[1]) for rank, content in contents.items()}
        _same("session.mean got values that differ between workers", kinds, _kinds(x))
        if not any(weights.values()):
            raise InvalidRequest("session.mean: the weights of all workers are 0")
        weights = {rank: weight for rank, weight in weights.items() if weight}
        means = {name: _mean_of(name, leaf, weights, given) for name, leaf in leaves.items()}
        return means if isinstance(x, Mapping) else means[None]

    def gather(self, x: Any) -> list[Any]:
        """See Session.gather."""
        return list(self._gather("gather", x, self._device_for(x)).values())

    def broadcast(self, x: Any, source: int = 0) -> Any:
        """See Session.broadcast."""
        source = as_python(source)
        if type(source) is not int or source < 0:
            raise InvalidRequest(f"session.broadcast: a source is a rank from 0, got {source!r}")
        device = self._device_for(x)
        while True:
            own = [x] if self._strategy.exchange_rank == source else None
            contents = self._gather(f"broadcast from worker {source}", own, device)
            given = contents.get(source)
            if isinstance(given, list) and len(given) == 1:
                return given[0]
            source = min(contents)  # the source takes no part: all workers see that now, and ask the same other one

    def barrier(self) -> None:
        """See Session.barrier."""
        self._gather("barrier", None)

    def _gather(self, call: str, value: Any, device: torch.device | None = None) -> dict[int, Any]:
        """Returns the values that the workers gave to this call, by rank."""
        given = self._strategy.exchange(_packed(call, value), call)
        read = {rank: _unpacked(rank, data, device) for rank, data in given.items()}
        calls = {rank: f"session.{name}" for rank, (name, _) in read.items()}
        _same("workers met in different calls", calls, f"session.{call}")
        return {rank: content for rank, (_, content) in read.items()}

    def _device_for(self, x: Any) -> torch.device:
        """Returns the device of the first tensor in a value; the session's if there is none."""
        if isinstance(x, torch.Tensor):
            return x.device
        inside = x.values() if isinstance(x, Mapping) else x if isinstance(x, list | tuple) else ()
        devices = (leaf.device for leaf in inside if isinstance(leaf, torch.Tensor))
        return next(devices, self._device)


# -- bytes -----------------------------------------------------------------------------------------------------------


def _packed(call: str, value: Any) -> bytes:
    """Returns a value and its call as bytes. Raises Unsupported or LimitExceeded for what cannot be sent."""
    tensors: dict[str, torch.Tensor] = {}
    name = call.split()[0]
    try:
        document = {"call": call, "value": plain(value, tensors, f"session.{name}: the value")}
        data = write_document(document, tensors, FORMAT)
    except (SafetensorError, RuntimeError, ValueError) as error:  # sparse, on no device, in itself
        raise Unsupported(f"session.{name}: the value cannot be sent: {error}") from None
    if len(data) > MAX_BUCKET_BYTES:
        raise LimitExceeded(f"session.{name}: a value may have {MAX_BUCKET_BYTES} bytes, got {len(data)}")
    return data


def _unpacked(rank: int, data: bytes, device: torch.device | None) -> tuple[str, Any]:
    """Returns the call and the value that bytes hold. Raises InvalidRequest if they hold none."""
    try:
        document, tensors = read_document(data, FORMAT)
        return str(document["call"]), value_of(document["value"], lambda name: tensors[name].to(device))
    except UNREADABLE as error:
        raise InvalidRequest(f"what worker {rank} sent cannot be read: {error}") from None


# -- means -----------------------------------------------------------------------------------------------------------


def _leaves(x: Any) -> dict[Any, Any]:
    """Returns the values that a mean is taken of, by name; a single one by None."""
    return dict(x) if isinstance(x, Mapping) else {None: x}


def _check_leaf(name: Any, leaf: Any) -> None:
    if isinstance(leaf, torch.Tensor) and leaf.dtype != torch.bool and not leaf.dtype.is_complex:
        return
    if isinstance(leaf, numbers.Real) and not isinstance(leaf, bool):
        return
    kind = f"a tensor of {leaf.dtype}" if isinstance(leaf, torch.Tensor) else type(leaf).__name__
    where = "" if name is None else f" under {name!r}"
    raise InvalidRequest(f"session.mean takes numbers and tensors of numbers, or a dict of them, got {kind}{where}")


def _kinds(x: Any) -> str:
    """Describes what must be equal between workers: names, types and shapes."""
    if isinstance(x, Mapping):
        return "{" + ", ".join(f"{name!r}: {_kinds(leaf)}" for name, leaf in sorted(x.items(), key=repr)) + "}"
    if isinstance(x, torch.Tensor):
        return f"{str(x.dtype).removeprefix('torch.')} of shape {tuple(x.shape)}"
    return "a number" if isinstance(x, numbers.Real) else type(x).__name__


def _weight(rank: int, content: Any) -> float:
    if not isinstance(content, list) or len(content) != 2 or not isinstance(content[0], float):
        raise InvalidRequest(f"what worker {rank} sent to session.mean is no value with a weight")
    if not math.isfinite(content[0]) or content[0] < 0:
        raise InvalidRequest(f"what worker {rank} sent to session.mean has the weight {content[0]}")
    for name, leaf in _leaves(content[1]).items():
        _check_leaf(name, leaf)
    return content[0]


def _mean_of(name: Any, own: Any, weights: Mapping[int, float], given: Mapping[int, Mapping[Any, Any]]) -> Any:
    """Returns the weighted mean, summed in the order of ranks, in float64. weights: by rank, without those of 0"""
    whole = sum(weights.values())
    if not isinstance(own, torch.Tensor):
        return sum(weight * float(given[rank][name]) for rank, weight in weights.items()) / whole
    total = torch.zeros(own.shape, dtype=torch.float64)
    for rank, weight in weights.items():
        total += weight * given[rank][name].to(torch.float64)
    total /= whole
    kind = own.dtype if own.dtype.is_floating_point else torch.get_default_dtype()
    return total.to(device=own.device, dtype=kind)


def _same(what: str, by_rank: Mapping[int, str], own: str) -> None:
    """Raises InvalidRequest unless all workers have the same; names the ranks of each.

    own: this worker's, which took no part in a round that was over when it came
    """
    ranks: dict[str, list[str]] = {}
    for rank, text in by_rank.items():
        ranks.setdefault(text, []).append(str(rank))
    if own not in ranks:
        ranks[own] = ["that missed it"]
    if len(ranks) > 1:
        parts = [f"worker{'s' * (len(names) > 1)} {', '.join(names)}: {text}" for text, names in ranks.items()]
        raise InvalidRequest(
            f"{what}: {'; '.join(parts)}. Every worker makes the same calls in the same order, with equal shapes"
        )
