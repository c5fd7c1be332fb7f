"""Parameters and gradients of which the session learns that a script may have changed them.

torch counts in-place changes of a tensor (`_version`), but not those by way of `.data`, which is how many scripts clamp
weights and clip gradients. So for as long as a session trains a parameter, its class is a subclass that tells when
`.data` is asked for; so is that of the gradients that a script finds in `.grad`.

The subclass has a second use: a parameter is a view into a flat buffer, and what is copied or saved of it must be a
plain tensor of its own size.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
from torch import nn

# Called with the tensor that `.data` gives out; None when `.data` is set.
Touched = Callable[[torch.Tensor | None], None]

_TOUCHED = "_ps_touched"
_DATA: Any = torch.Tensor.data


class _Watched:
    """What is mixed into the class of a watched tensor."""

    @property
    def data(self) -> torch.Tensor:
        """As torch's; tells that it was asked for."""
        found: torch.Tensor = _DATA.__get__(self)
        touched: Touched | None = self.__dict__.get(_TOUCHED)
        if touched is not None:
            touched(found)
        return found

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        touched: Touched | None = self.__dict__.get(_TOUCHED)
        if touched is not None:
            touched(None)
        _DATA.__set__(self, value)


class _WatchedParameter(_Watched):
    """Of a parameter: copies are plain parameters, and what is saved of it is as large as it is."""

    def detach(self) -> torch.Tensor:
        """As torch's; where that is saved, as by `torch.save(model.state_dict())`, it is saved alone."""
        found: Any = torch.Tensor.detach(self).as_subclass(_Slice)  # type: ignore[arg-type]
        found.__dict__[_TOUCHED] = self.__dict__.get(_TOUCHED)
        return found  # type: ignore[no-any-return]

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = memo[id(self)] = _plain(self)  # type: ignore[arg-type]
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _plain(self).__reduce_ex__(protocol)  # type: ignore[arg-type]


class _Slice(torch.Tensor):
    """A view into a flat buffer that is copied and saved without the rest of the buffer."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def detach(self) -> torch.Tensor:
        """As torch's, and of this class: `nn.Parameter(...)` of it asks for that."""
        found: Any = torch.Tensor.detach(self).as_subclass(_Slice)
        found.__dict__[_TOUCHED] = self.__dict__.get(_TOUCHED)
        return found  # type: ignore[no-any-return]

    def numpy(self, *, force: bool = False) -> Any:
        """As torch's; tells of it, because what is written through numpy changes no version."""
        touched: Touched | None = self.__dict__.get(_TOUCHED)
        if touched is not None:
            touched(self)  # the array keeps this tensor alive
        return torch.Tensor.numpy(self, force=force)

    def _alone(self) -> torch.Tensor:
        """A plain copy: a parameter where one was made of it."""
        copied = self.as_subclass(torch.Tensor).detach().clone()
        return nn.Parameter(copied, self.requires_grad) if isinstance(self, nn.Parameter) else copied

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        copied = memo[id(self)] = self._alone()
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._alone().__reduce_ex__(protocol)


class WatchedGradient(_Watched, torch.Tensor):
    """A gradient as a script finds it in `.grad`."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        copied = memo[id(self)] = values(self).clone()
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return values(self).clone().__reduce_ex__(protocol)


def values(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor's `.data`, without a touch."""
    data: torch.Tensor = _DATA.__get__(tensor)
    return data


def set_values(tensor: torch.Tensor, data: torch.Tensor) -> None:
    """Sets a tensor's `.data`, without a touch."""
    _DATA.__set__(tensor, data)


def watch(parameter: nn.Parameter, touched: Touched) -> None:
    """Has `touched` called whenever a script asks for the parameter's `.data`, or sets it."""
    if not isinstance(parameter, _WatchedParameter):
        parameter.__class__ = _watched_class(type(parameter))
    parameter.__dict__[_TOUCHED] = touched


def unwatch(parameter: torch.Tensor) -> None:
    """Makes a watched parameter what it was before."""
    if isinstance(parameter, _WatchedParameter):
        parameter.__dict__.pop(_TOUCHED, None)
        parameter.__class__ = type(parameter).__bases__[1]


def watched_gradient(view: torch.Tensor, touched: Touched) -> torch.Tensor:
    """Returns the same memory as a tensor that tells when a script asks for its `.data`."""
    watched = view.as_subclass(WatchedGradient)
    watched.__dict__[_TOUCHED] = touched
    return watched


class Touches:
    """Which parameters a script may have changed by way of `.data`, with their values before.

    A reference to `.data` that the script keeps may be written at any time later, so such a parameter stays under
    suspicion for as long as the reference lives.
    """

    def __init__(self) -> None:
        self.before: dict[int, torch.Tensor] = {}  # by parameter
        self._given_out: dict[int, list[weakref.ref[torch.Tensor]]] = {}

    def touched(self, index: int, parameter: torch.Tensor, given_out: torch.Tensor | None) -> None:
        """Notes that a script has asked for a parameter's `.data`, or is about to set it."""
        if index not in self.before:
            self.before[index] = values(parameter).clone()
        if given_out is not None:
            self._given_out.setdefault(index, []).append(weakref.ref(given_out))

    def landed(self, parameters: Mapping[int, torch.Tensor]) -> None:
        """Takes the values as they are for new weights: what the script does from here on counts."""
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
    """A copy of a watched parameter that nothing watches, with what else the script has set on it."""
    kind = type(parameter).__bases__[1] if isinstance(parameter, _WatchedParameter) else type(parameter)
    copied = values(parameter).clone(memory_format=torch.preserve_format)
    made: nn.Parameter = kind(copied, parameter.requires_grad)
    made.__dict__.update({key: value for key, value in parameter.__dict__.items() if key != _TOUCHED})
    return made
