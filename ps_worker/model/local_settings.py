"""Parses the settings of a job of local steps: `prepare(..., outer={...})`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ps_protocol.errors import InvalidRequest
from ps_protocol.fragments import check_mixing, default_mixing
from ps_protocol.local import Local
from ps_protocol.modes import local_rounds
from ps_protocol.numpy_numbers import as_python

KNOWN: Mapping[str, tuple[type, ...]] = {
    "lr": (int, float),
    "momentum": (int, float),
    "nesterov": (bool,),
    "warm_up": (int,),
    "delay": (int,),
    "mixing": (int, float),
}
WORDS = {
    "nesterov": "True or False",
    "warm_up": "a whole number",
    "delay": "a whole number",
}


def local_settings(mode: str, outer: Mapping[str, Any]) -> Local | None:
    """Returns the settings of mode local:H, local:H/F or local:Ts; None in other modes.

    outer: as for `prepare`. Raises InvalidRequest for invalid settings in every mode, so that one script runs in all.
    """
    rounds = local_rounds(mode)
    outer = {name: as_python(value) for name, value in outer.items()}
    for name, value in outer.items():
        if name == "weight":
            raise InvalidRequest(
                "outer['weight'] is no more: a round weighs the steps made in it. Leave it out, and give all workers "
                "batches of one size"
            )
        if name not in KNOWN:
            raise InvalidRequest(f"outer takes {', '.join(KNOWN)}, got {name!r}")
        if not isinstance(value, KNOWN[name]) or (isinstance(value, bool) and name != "nesterov"):
            raise InvalidRequest(f"outer[{name!r}] is {WORDS.get(name, 'a number')}, got {value!r}")
    given: dict[str, Any] = {
        name: float(value) if KNOWN[name] == (int, float) else value for name, value in outer.items()
    }
    delay, mixing = given.pop("delay", None), given.pop("mixing", None)
    if delay is not None and delay < 0:
        raise InvalidRequest(f"outer['delay'] is a number of steps from 0, got {delay}")
    if mixing is not None:
        check_mixing(mixing)
    if rounds is None:
        Local(1, **given)
        return None
    return replace(_mixed(rounds, delay, mixing), **given)


def _mixed(rounds: Local, delay: int | None, mixing: float | None) -> Local:
    """Returns rounds with these settings of their fragments; None is the default."""
    parts = rounds.fragments
    if parts is None:
        name = "delay" if delay is not None else "mixing"
        if delay is not None or mixing is not None:
            raise InvalidRequest(
                f"outer[{name!r}] is for fragments, such as local:8/4: in {rounds.mode} the model is pulled as a "
                "whole, and all of it counts"
            )
        return rounds
    if delay is not None:
        parts = replace(parts, delay=delay, mixing=default_mixing(delay))
    return replace(rounds, fragments=parts if mixing is None else replace(parts, mixing=mixing))
