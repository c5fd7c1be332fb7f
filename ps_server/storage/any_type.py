"""Files of tensors of any element type, in the format of safetensors.

Tensors of types that the format does not know, such as complex128, are written as bytes, with one more dimension. The
file's metadata names the type, and `load_any` restores it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import safetensors
import safetensors.torch
import torch

from ps_protocol.tensors import element_name, parts_of, whole_of
from ps_server.storage.table_files import save_tensors

TYPES = "element_types"  # in the metadata: by the tensor's name, torch's name of its type


def save_any(tensors: Mapping[str, torch.Tensor], path: Path) -> None:
    """Writes tensors. Raises OSError or SafetensorError."""
    unknown = {name: tensor for name, tensor in tensors.items() if not _is_known(tensor.dtype)}
    types = {name: element_name(tensor.dtype) for name, tensor in unknown.items()}
    metadata = {"format": "pt"} | ({TYPES: json.dumps(types)} if types else {})
    save_tensors({**tensors, **{name: parts_of(tensor) for name, tensor in unknown.items()}}, path, metadata)


def load_any(path: Path) -> dict[str, torch.Tensor]:
    """Returns the tensors of a file of `save_any`."""
    tensors = safetensors.torch.load_file(path)
    with safetensors.safe_open(path, "pt") as file:
        types = json.loads((file.metadata() or {}).get(TYPES, "{}"))
    return {name: whole_of(tensor, types[name]) if name in types else tensor for name, tensor in tensors.items()}


def _is_known(dtype: torch.dtype) -> bool:
    try:
        safetensors.torch.load(safetensors.torch.save({"": torch.empty((), dtype=dtype)}))
    except (KeyError, safetensors.SafetensorError):
        return False
    return True
