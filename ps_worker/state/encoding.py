"""The state of a worker without the weights, as values and as bytes.

values  The position in the data, random states, schedulers, hyper-parameters, and the model's buffers.
bytes   The same, as a document (documents.py).
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ps_protocol.errors import InvalidRequest
from ps_protocol.layout import FROZEN
from ps_worker.state.documents import UNREADABLE, plain, read_document, value_of, write_document

FORMAT = 1
RESIDUAL = "residual-"  # before a bucket's index


@dataclass(frozen=True)
class RandomState:
    """The states of torch's generators, on the host and on the worker's GPU, of Python's `random`, and of numpy."""

    cpu: torch.Tensor
    gpu: torch.Tensor | None
    python: tuple[Any, ...]
    numpy: tuple[Any, ...] | None

    @staticmethod
    def now(device: torch.device) -> RandomState:
        """Returns the present states. numpy's is included only if numpy is imported."""
        numpy = sys.modules.get("numpy")
        return RandomState(
            torch.get_rng_state(),
            torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
            random.getstate(),
            None if numpy is None else _numpy_state(numpy.random.get_state()),
        )

    def restore(self, device: torch.device) -> None:
        """Sets all generators to these states."""
        torch.set_rng_state(self.cpu)
        if self.gpu is not None and device.type == "cuda":
            torch.cuda.set_rng_state(self.gpu, device)
        random.setstate(self.python)
        numpy = sys.modules.get("numpy")
        if numpy is not None and self.numpy is not None:
            numpy.random.set_state(self.numpy)


def _numpy_state(state: Any) -> tuple[Any, ...]:
    kind, keys, *rest = state
    return (kind, [int(key) for key in keys], *rest)


@dataclass(frozen=True)
class PassStart:
    """The beginning of a pass over a loader: the random states, that of the loader's own generator, and the share of
    data.

    epoch: of a sampler whose epoch the script sets (DistributedSampler); None without one
    """

    random: RandomState
    generator: torch.Tensor | None
    share: tuple[int, int] | None
    epoch: int | None = None


@dataclass(frozen=True)
class LoaderState:
    """The position of a loop over a loader.

    begun: the number of passes that have begun
    going: whether the last of them is in progress, with `taken` of its batches taken, from `start` on
    shift: pass k is the data's pass k + shift, if the script has loaded a position from its own file
    over: the samples of the current or the next pass that all workers had used before it began
    """

    begun: int
    going: bool
    taken: int
    start: PassStart | None
    generator: torch.Tensor | None
    shift: int = 0
    over: int = 0


@dataclass(frozen=True)
class Settings:
    """The settings of a script outside of the model: random states, and the objects given to `prepare`.

    stateful: the state_dict of each scheduler and each other object, in the order of `prepare`
    groups: the hyper-parameters of each parameter group
    stage: the stage of the script that has these optimizers
    """

    random: RandomState
    stateful: list[Any]
    groups: list[dict[str, Any]]
    stage: int = 0


@dataclass(frozen=True)
class ScriptState:
    """The settings of a script, and the positions of its loops over all loaders."""

    settings: Settings
    loaders: list[LoaderState]


# The residuals of a worker's gradients (model/residual.py), by bucket: [numel] float32.
Residual = Mapping[int, torch.Tensor]


@dataclass(frozen=True)
class OwnTensors:
    """The worker's own part of the model.

    frozen: by index among the job's parameters, the frozen tensors that have changed since the start
    residual: None if it is too large to be saved
    """

    frozen: Mapping[int, torch.Tensor] = field(default_factory=dict)
    residual: Residual | None = field(default_factory=dict)


@dataclass(frozen=True)
class WorkerState:
    """A worker's own state at the end of one step.

    feeding: the index of the loader that fed the step; None without a loader
    per_step: the number of batches of one step
    own: the worker's own part of the model
    inner: the state of optimizers that step on the worker (inner.py); None without one, or if it is too large
    at_step: without a loader, the settings when the script began its next step, after its code between two steps; None:
    unknown
    feeders: the loaders in whose loops steps were made
    """

    clock: int
    script: ScriptState
    feeding: int | None
    per_step: int
    own: OwnTensors = field(default_factory=OwnTensors)
    inner: list[dict[int, dict[str, Any]]] | None = None
    at_step: Settings | None = None
    feeders: frozenset[int] = frozenset()


# -- bytes -----------------------------------------------------------------------------------------------------------


def encode(state: WorkerState) -> bytes:
    """Returns a state as bytes. Raises Unsupported for a value of an unknown type, with its position."""
    tensors: dict[str, torch.Tensor] = {}
    settings = state.script.settings
    document = {
        "clock": state.clock,
        "random": _random(settings.random, tensors),
        "stateful": plain(settings.stateful, tensors, "state"),
        "groups": plain(settings.groups, tensors, "groups"),
        "stage": settings.stage,
        "loaders": [_loader(loader, tensors) for loader in state.script.loaders],
        "positions": [[loader.shift, loader.over] for loader in state.script.loaders],
        "feeding": state.feeding,
        "feeders": sorted(state.feeders),
        "per_step": state.per_step,
        "held": sorted(state.own.frozen),
        "residual": None if state.own.residual is None else sorted(state.own.residual),
        "inner": plain(state.inner, tensors, "the optimizer's state"),
        "at_step": None if state.at_step is None else _settings(state.at_step, tensors),
        "stage_at_step": 0 if state.at_step is None else state.at_step.stage,
    }
    frozen = {f"{FROZEN}{index}": tensor.detach().to("cpu").contiguous() for index, tensor in state.own.frozen.items()}
    residual = {f"{RESIDUAL}{index}": error for index, error in (state.own.residual or {}).items()}
    return write_document(document, tensors | frozen | residual, FORMAT)


def _settings(settings: Settings, tensors: dict[str, torch.Tensor]) -> Any:
    stateful, groups = plain(settings.stateful, tensors, "state"), plain(settings.groups, tensors, "groups")
    return [_random(settings.random, tensors), stateful, groups]


def _random(state: RandomState, tensors: dict[str, torch.Tensor]) -> Any:
    return plain([state.cpu, state.gpu, state.python, state.numpy], tensors, "random state")


def _loader(loader: LoaderState, tensors: dict[str, torch.Tensor]) -> Any:
    position, start = plain([loader.begun, loader.going, loader.taken, loader.generator], tensors), loader.start
    if start is None:
        return [position, None]
    return [position, [_random(start.random, tensors), plain([start.generator, start.share, start.epoch], tensors)]]


def decode(data: bytes) -> WorkerState:
    """Returns the state in some bytes. Raises InvalidRequest for other bytes."""
    try:
        document, tensors = read_document(data, FORMAT)
        tensor = tensors.__getitem__

        def decoded(value: Any) -> Any:
            return value_of(value, tensor)

        return WorkerState(
            clock=_whole(document["clock"]),
            script=ScriptState(
                _settings_of(
                    (document["random"], document["stateful"], document["groups"]), decoded, document.get("stage", 0)
                ),
                _loaders_of(document["loaders"], document.get("positions"), decoded),
            ),
            feeding=None if document["feeding"] is None else _whole(document["feeding"]),
            per_step=_whole(document["per_step"]),
            own=OwnTensors(
                {_whole(index): tensors[f"{FROZEN}{index}"] for index in document["held"]},
                _residual_of(document.get("residual", []), tensor),
            ),
            inner=_inner_of(decoded(document.get("inner"))),  # earlier versions have none
            at_step=_at_step_of(document.get("at_step"), decoded, document.get("stage_at_step", 0)),  # nor this
            feeders=frozenset(map(_whole, document.get("feeders", []))),  # nor these
        )
    except UNREADABLE as error:
        raise InvalidRequest(f"what the servers keep of this worker's state cannot be read: {error}") from None


def _settings_of(value: Any, decoded: Callable[[Any], Any], stage: Any) -> Settings:
    random, stateful, groups = value
    return Settings(_random_of(decoded(random)), list(decoded(stateful)), _groups_of(decoded(groups)), _whole(stage))


def _at_step_of(value: Any, decoded: Callable[[Any], Any], stage: Any) -> Settings | None:
    return None if value is None else _settings_of(value, decoded, stage)


def _residual_of(indices: Any, tensor: Callable[[str], torch.Tensor]) -> Residual | None:
    """Decodes the residuals. States of earlier versions have none."""
    return None if indices is None else {_whole(index): tensor(f"{RESIDUAL}{index}") for index in indices}


def _whole(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"expected a whole number from 0, got {str(value)[:60]}")
    return value


def _tensor(value: Any) -> torch.Tensor:
    if not isinstance(value, torch.Tensor):
        raise ValueError(f"expected a tensor, got {type(value).__name__}")
    return value


def _kind_of(value: Any) -> str:
    """Describes a value that should be a list of dicts, for an error."""
    if not isinstance(value, list):
        return type(value).__name__
    return "one of " + ", ".join(sorted({type(each).__name__ for each in value}))


def _groups_of(value: Any) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not all(isinstance(group, dict) for group in value):
        raise ValueError(f"expected its groups as a list of dicts, got {_kind_of(value)}")
    return value


def _inner_of(value: Any) -> list[dict[int, dict[str, Any]]] | None:
    if value is None:
        return None
    if not isinstance(value, list) or not all(isinstance(states, dict) for states in value):
        raise ValueError(f"expected its optimizers' state as a list of dicts, got {_kind_of(value)}")
    return [
        {_whole(position): {str(key): item for key, item in dict(state).items()} for position, state in states.items()}
        for states in value
    ]


def _random_of(value: Any) -> RandomState:
    cpu, gpu, python, numpy = value
    expected = torch.get_rng_state()
    if _tensor(cpu).dtype != expected.dtype or cpu.shape != expected.shape:
        raise ValueError(
            f"expected torch's random state as {expected.dtype} {tuple(expected.shape)}, got {cpu.dtype} "
            f"{tuple(cpu.shape)}"
        )
    random.Random(0).setstate(python)  # raises for anything but a state of Python's generator
    return RandomState(cpu, None if gpu is None else _tensor(gpu), python, numpy)


def _loaders_of(values: list[Any], positions: Any, decoded: Callable[[Any], Any]) -> list[LoaderState]:
    """Decodes the positions of loaders. positions: None in states of earlier versions"""
    loaders = [_loader_of(value, decoded) for value in values]
    if positions is None:
        return loaders
    pairs = zip(loaders, positions, strict=True)
    return [replace(loader, shift=int(shift), over=_whole(over)) for loader, (shift, over) in pairs]


def _loader_of(value: Any, decoded: Callable[[Any], Any]) -> LoaderState:
    position, pass_start = value
    begun, going, taken, generator = decoded(position)
    start = None
    if pass_start is not None:
        own, share, epoch = decoded(pass_start[1])
        share = None if share is None else (int(share[0]), int(share[1]))
        start = PassStart(_random_of(decoded(pass_start[0])), own, share, None if epoch is None else _whole(epoch))
    if going and (start is None or begun == 0):
        raise ValueError("a pass is under way that never began")
    return LoaderState(_whole(begun), bool(going), _whole(taken), start, generator)
