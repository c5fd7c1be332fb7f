"""A checkpoint as a folder of torch.distributed.checkpoint (DCP), which scripts with sharded models read.

    {"model": {NAME: tensor}, "optimizer": {"state": {NAME: {KIND: tensor}}, "param_groups": [{"params": [NAME], ...}]}}

This is what `get_model_state_dict` and `get_optimizer_state_dict` of torch have: names, and not numbers, of parameters.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ps_protocol.optimizers import ELEMENTWISE


def write_folder(
    model: Mapping[str, torch.Tensor],
    state: Mapping[str, torch.Tensor],
    groups: Sequence[Mapping[str, Any]],
    names: Sequence[str],
    kinds: Sequence[str],
    folder: Path,
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
    content = {"model": dict(model), "optimizer": {"state": of_optimizer, "param_groups": named}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that there is no process group, and that a folder is replaced
        try:
            save(content, checkpoint_id=folder, no_dist=True)
        except CheckpointException as error:  # a BaseException, which torch raises for an error of any rank
            raise OSError(f"{folder}: {error}") from None


def _settings(kind: str) -> dict[str, Any]:
    """Returns all entries of an optimizer's parameter group, with their defaults.

    A load into a script's optimizer requires each entry that the script's own groups have.
    """
    if kind not in ELEMENTWISE:
        return {}
    [group] = ELEMENTWISE[kind]([torch.zeros(1)]).param_groups  # type: ignore[call-arg]
    return {name: value for name, value in group.items() if name != "params"}
