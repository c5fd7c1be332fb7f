"""A checkpoint as a folder of torch.distributed.checkpoint (DCP), which scripts with sharded models read.

nested:
    {"model": {NAME: tensor}, "optimizer": {"state": {NAME: {KIND: tensor}}, "param_groups": [{"params": [NAME], ...}]}}

This is what `get_model_state_dict` and `get_optimizer_state_dict` of torch have: names, and not numbers, of parameters.

flat:
    {NAME: tensor, "optimizer": {"state.NAME.KIND": tensor, "param_groups.NAME.SETTING": value}}

This is the same with `flatten_optimizer_state_dict=True`, and the model's names at the top. torchtitan saves and loads
this (`CheckpointManager` in its components/checkpoint.py). The settings have `initial_lr`, too: torchtitan makes its
schedules before it loads, and they add this to the groups of an optimizer.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch

from ps_protocol.optimizers import ELEMENTWISE

DcpLayout = Literal["nested", "flat"]


def write_folder(
    model: Mapping[str, torch.Tensor],
    state: Mapping[str, torch.Tensor],
    groups: Sequence[Mapping[str, Any]],
    names: Sequence[str],
    kinds: Sequence[str],
    folder: Path,
    layout: DcpLayout,
) -> None:
    """Writes a folder. Raises OSError.

    model:  by name
    state:  the optimizer's, `NUMBER/KIND`
    groups: of the optimizer; "params" has the numbers of parameters
    names:  of the parameters, by number
    kinds:  by group, the name of its optimizer's class
    """
    from torch.distributed.checkpoint.api import CheckpointException  # whose import takes as long as torch's own
    from torch.distributed.checkpoint.state_dict_saver import save

    of_optimizer: dict[str, dict[str, torch.Tensor]] = {}
    for key, tensor in state.items():
        number, kind = key.split("/")
        of_optimizer.setdefault(names[int(number)], {})[kind] = tensor
    named = [
        {**_settings(kind), **group, "params": [names[number] for number in group["params"]]}
        for kind, group in zip(kinds, groups, strict=True)
    ]
    content: dict[str, Any] = {"model": dict(model), "optimizer": {"state": of_optimizer, "param_groups": named}}
    if layout == "flat":
        content = {**model, "optimizer": _flat(of_optimizer, named)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that there is no process group, and that a folder is replaced
        try:
            save(content, checkpoint_id=folder, no_dist=True)
        except CheckpointException as error:  # a BaseException, which torch raises for an error of any rank
            raise OSError(f"{folder}: {error}") from None


def _flat(state: Mapping[str, Mapping[str, torch.Tensor]], groups: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns an optimizer's state and settings by parameter, in a single dictionary."""
    flat: dict[str, Any] = {f"state.{name}.{kind}": each for name, own in state.items() for kind, each in own.items()}
    for group in groups:
        settings = {key: value for key, value in group.items() if key != "params"}
        if "lr" in settings:  # a load needs the entry; the schedule has read its own rate by then
            settings.setdefault("initial_lr", settings["lr"])
        flat |= {f"param_groups.{name}.{key}": value for name in group["params"] for key, value in settings.items()}
    return flat


def _settings(kind: str) -> dict[str, Any]:
    """Returns all entries of an optimizer's parameter group, with their defaults.

    A load into a script's optimizer requires each entry that the script's own groups have.
    """
    if kind not in ELEMENTWISE:
        return {}
    [group] = ELEMENTWISE[kind]([torch.zeros(1)]).param_groups  # type: ignore[call-arg]
    return {name: value for name, value in group.items() if name != "params"}
