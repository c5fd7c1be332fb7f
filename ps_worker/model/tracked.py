"""Parameters and gradients that notify the session where a script may change them.

torch counts in-place changes of a tensor (`_version`), but not those by way of `.data`, which is how many scripts clamp
weights and clip gradients. So for as long as a session trains a parameter, its class is a subclass that notifies the
session whenever a script reads `.data`; so is that of the gradients in `.grad`.

The subclass has a second use: copies of a parameter, and saved ones, must be plain tensors, which another process can
load without this package.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
from torch import nn

from ps_worker.model.sharded import is_sharded, local

# Called with the tensor that `.data` returns; with None when `.data` is set.
Touched = Callable[[torch.Tensor | None], None]

_TOUCHED = "_ps_touched"
_DATA: Any = torch.Tensor.data


def _notify(tensor: Any, given_out: torch.Tensor | None) -> None:
    touched: Touched | None = tensor.__dict__.get(_TOUCHED)
    if touched is not None:
        touched(given_out)


def _slice(tensor: Any) -> torch.Tensor:
    """Returns `tensor.detach()` as a `_Slice`, which notifies the same session as the tensor."""
    detached: torch.Tensor = torch.Tensor.detach(tensor).as_subclass(_Slice)
    detached.__dict__[_TOUCHED] = tensor.__dict__.get(_TOUCHED)
    return detached


class _Watched:
    """Mixed into the class of a watched tensor."""

    @property
    def data(self) -> torch.Tensor:
        """As torch's `data`. Also notifies the session."""
        data = values(self)
        _notify(self, data)
        return data

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        _notify(self, None)
        _DATA.__set__(self, value)


class _WatchedParameter(_Watched):
    """Mixed into a parameter's class: copies of it, and saved ones, are plain parameters."""

    def detach(self) -> torch.Tensor:
        """As torch's `detach`. If the result is saved, as by `torch.save(model.state_dict())`, it is a plain tensor."""
        return _slice(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = memo[id(self)] = _plain(self)  # type: ignore[arg-type]
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _plain(self).__reduce_ex__(protocol)  # type: ignore[arg-type]


class _Slice(torch.Tensor):
    """A parameter's values, as returned by `detach` and `state_dict`: copies and saved ones are plain tensors."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def detach(self) -> torch.Tensor:
        """As torch's `detach`. The result is of this class, as `nn.Parameter(...)` requires."""
        return _slice(self)

    def numpy(self, *, force: bool = False) -> Any:
        """As torch's `numpy`. Also notifies the session, because writes through numpy do not change `_version`."""
        _notify(self, self)  # the array keeps this tensor alive
        return torch.Tensor.numpy(self, force=force)

    def _alone(self) -> torch.Tensor:
        """Returns a plain copy; for a parameter, a plain parameter."""
        copied = self.as_subclass(torch.Tensor).detach().clone()
        return nn.Parameter(copied, self.requires_grad) if isinstance(self, nn.Parameter) else copied

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        copied = memo[id(self)] = self._alone()
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._alone().__reduce_ex__(protocol)


class WatchedGradient(_Watched, torch.Tensor):
    """A gradient that a script gets from `.grad`."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        copied = memo[id(self)] = values(self).clone()
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return values(self).clone().__reduce_ex__(protocol)


def values(tensor: Any) -> torch.Tensor:
    """Returns a tensor's `.data` without a notification."""
    data: torch.Tensor = local(tensor).detach() if is_sharded(tensor) else _DATA.__get__(tensor)
    return data


def set_values(tensor: torch.Tensor, data: torch.Tensor) -> None:
    """Sets a tensor's `.data` without a notification."""
    _DATA.__set__(tensor, data)


def watch(parameter: nn.Parameter, touched: Touched) -> None:
    """Calls `touched` whenever a script reads or sets the parameter's `.data`.

    Does nothing for a DTensor: its values are compared instead.
    """
    if is_sharded(parameter):
        return
    if not isinstance(parameter, _WatchedParameter):
        parameter.__class__ = _watched_class(type(parameter))
    parameter.__dict__[_TOUCHED] = touched


def unwatch(parameter: torch.Tensor) -> None:
    """Gives a watched parameter its own class again."""
    if isinstance(parameter, _WatchedParameter):
        parameter.__dict__.pop(_TOUCHED, None)
        parameter.__class__ = type(parameter).__bases__[1]


def watched_gradient(view: torch.Tensor, touched: Touched) -> torch.Tensor:
    """Returns the same memory as a tensor that calls `touched` whenever a script reads or sets its `.data`."""
    watched = view.as_subclass(WatchedGradient)
    watched.__dict__[_TOUCHED] = touched
    return watched


def unwatch_gradient(gradient: torch.Tensor | None) -> None:
    """Removes the hook of a gradient, if it has one."""
    if isinstance(gradient, WatchedGradient):
        gradient.__dict__.pop(_TOUCHED, None)


class Touches:
    """The parameters that a script may have changed through `.data`, with their earlier values.

    The script may keep `.data` and write to it at any time later, so such a parameter counts as touched for as long as
    that reference lives.
    """

    def __init__(self) -> None:
        self.before: dict[int, torch.Tensor] = {}  # by parameter
        self._given_out: dict[int, list[weakref.ref[torch.Tensor]]] = {}

    def touched(self, index: int, parameter: torch.Tensor, given_out: torch.Tensor | None) -> None:
        """Records that a script reads a parameter's `.data`, or is about to set it. given_out: the tensor that it got;
        None: none
        """
        if index not in self.before:
            self.before[index] = values(parameter).clone()
        if given_out is not None:
            self._given_out.setdefault(index, []).append(weakref.ref(given_out))

    def landed(self, parameters: Mapping[int, torch.Tensor]) -> None:
        """Records the current values as new weights: only later changes count as the script's."""
        if not self.before and not self._given_out:
            return
        alive = {index: [ref for ref in refs if ref() is not None] for index, refs in self._given_out.items() if refs}
        self._given_out = {index: refs for index, refs in alive.items() if refs}
        self.before = {index: values(parameters[index]).clone() for index in self._given_out}


@cache
def _watched_class(kind: type[nn.Parameter]) -> type[nn.Parameter]:
    meta: Any = type(kind)
    made: type[nn.Parameter] = meta(kind.__name__, (_WatchedParameter, kind), {"__module__": kind.__module__})
    return made


def _plain(parameter: nn.Parameter) -> nn.Parameter:
    """Returns a copy of a watched parameter that is not watched, with the attributes that the script has set."""
    kind = type(parameter).__bases__[1] if isinstance(parameter, _WatchedParameter) else type(parameter)
    copied = values(parameter).clone(memory_format=torch.preserve_format)
    made: nn.Parameter = kind(copied, parameter.requires_grad)
    made.__dict__.update({key: value for key, value in parameter.__dict__.items() if key != _TOUCHED})
    return made
