"""An edition as tensors: a job's weights at one version; as files, and as the tensors of a model with other names."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import safetensors.torch
import torch

from ps_feed.edition import EditionArrays
from ps_protocol.errors import InvalidRequest
from ps_protocol.tensors import element_name, parts_of, tensor_from, whole_of

# The names by which transformers, vLLM and SGLang know a checkpoint.
_WHOLE, _INDEX = "model.safetensors", "model.safetensors.index.json"


class Edition:
    """An unchanging copy of a job's weights.

    Attributes:
        run: The run of the job, as `ps-server status` shows it.
        version: The number of updates that all tensors contain. In sync and local modes every tensor contains exactly
            these; in the other modes it is the lowest number.
        buffers_version: The number of steps after which rank 0 had the values of the buffers, such as BatchNorm's
            statistics. 0: they have the values with which the job began. They are those of the moment at which the feed
            asked for the edition, so with a large `every` they are older than the weights.
    """

    def __init__(self, arrays: EditionArrays, job: str) -> None:
        self.arrays, self._job = arrays, job
        self.run, self.version = arrays.run, arrays.version
        self.buffers_version = arrays.buffers_version

    def state_dict(self, names: Mapping[str, str | MadeOf] | None = None) -> dict[str, torch.Tensor]:
        """Returns the tensors on the CPU. They share the edition's memory: do not write to them.

        Args:
            names: Other names than the job's: for each new name the tensor's name in the job, or a `MadeOf`. Tensors of
                the job that it uses are returned under the new names alone, and all others under their own.

        Raises:
            InvalidRequest: The job has no such tensors, or one has a new name already and is not used.
        """
        saved = [name for name in self.arrays.names() if self.arrays.contents.is_saved(name)]
        sources = {new: MadeOf(made) if isinstance(made, str) else made for new, made in (names or {}).items()}
        used = {name for source in sources.values() for name in source.names}
        unknown = sorted(used - set(self.arrays.names()))
        if unknown:
            raise InvalidRequest(f"job {self._job!r} has no {', '.join(unknown[:3])}, of which others are to be made")
        twice = [name for name in saved if name in sources and name not in used]
        if twice:
            raise InvalidRequest(f"job {self._job!r} has {', '.join(twice[:3])}, which is also to be made of others")
        own = {name: self.tensor(name) for name in saved if name not in used}
        return own | {new: source.tensor(self) for new, source in sources.items()}

    def tensor(self, name: str) -> torch.Tensor:
        """Returns a tensor: do not write to it. It is no copy, unless groups of processes hold it in pieces: then it is
        joined of them at each call. Raises KeyError for a name that it has not."""
        values, dtype, element = self.arrays.tensor(name)
        tensor = tensor_from(values.reshape(-1).view("uint8").data, dtype).view(values.shape)
        return whole_of(tensor, element) if element else tensor

    def names(self) -> list[str]:
        """Returns the names of all tensors, even of those that are in no state_dict."""
        return list(self.arrays.names())

    def save(
        self,
        path: str | Path,
        max_shard_bytes: int | None = None,
        names: Mapping[str, str | MadeOf] | None = None,
    ) -> None:
        """Writes safetensors with the version, the run and the job in their metadata.

        Without `max_shard_bytes` it writes one file, which appears whole or not at all. Otherwise it writes a directory
        as `transformers` does: several files and `model.safetensors.index.json`, which is replaced last and names the
        version's own files. Those that the index before named stay until the next save, so that who has read it can go
        on.

        Args:
            path: A file, or with `max_shard_bytes` a directory, which may have other files, such as config.json.
            max_shard_bytes: The largest size of a file; one with a single larger tensor is larger.
            names: As for `state_dict`. Tensors that are made of others take memory until they are written.

        Raises:
            InvalidRequest: The directory has a model.safetensors, which would be loaded in place of these files; others
                as for `state_dict`.
            OSError: As the file system raises it.
        """
        tensors = self.state_dict(names)
        if names:
            tensors = _with_own_memory(tensors)
        unknown = {name: each for name, each in tensors.items() if element_name(each.dtype)}
        about = {"format": "pt", "job": self._job, "run": self.run, "version": str(self.version)}
        if unknown:
            about["element_types"] = json.dumps({name: element_name(each.dtype) for name, each in unknown.items()})
        tensors |= {name: parts_of(each) for name, each in unknown.items()}
        if max_shard_bytes is None:
            _write(Path(path), tensors, about)
        else:
            _write_shards(Path(path), tensors, about, max_shard_bytes)


class MadeOf:
    """A tensor of a model that is made of one or several tensors of the job.

    Args:
        names: The job's names.
        make: Returns the model's tensor for the job's tensors, in the order of their names. It must not write to them.
            None: they are joined along their first dimension.

    Example:
        names = {
            "qkv.weight": ps_torch.MadeOf(["q.weight", "k.weight", "v.weight"]),           # fused
            "up.weight": ps_torch.MadeOf("gate_up.weight", lambda both: both.chunk(2)[1]),  # split
            "head.weight": ps_torch.MadeOf("embedding.weight", torch.t),                   # transposed
        }
    """

    def __init__(self, names: str | Sequence[str], make: Callable[..., torch.Tensor] | None = None) -> None:
        self.names = (names,) if isinstance(names, str) else tuple(names)
        self._make = make
        self.is_one = len(self.names) == 1 and make is None  # a tensor of the job as it is
        if not self.names:
            raise InvalidRequest("a tensor is made of at least one tensor of the job")

    def tensor(self, edition: Edition) -> torch.Tensor:
        """Returns the model's tensor. Raises KeyError for a name that the edition has not."""
        parts = [edition.tensor(name) for name in self.names]
        if self._make is not None:
            return self._make(*parts)
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def _with_own_memory(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copies tensors that are transposed or share their memory: safetensors writes none of these."""
    seen: set[int] = set()
    own = {}
    for name, tensor in tensors.items():
        storage = tensor.untyped_storage().data_ptr()
        is_own = tensor.is_contiguous() and storage not in seen
        own[name] = tensor if is_own else tensor.clone(memory_format=torch.contiguous_format)
        seen.add(storage)
    return own


def _write(target: Path, tensors: dict[str, torch.Tensor], about: dict[str, str]) -> None:
    """Writes one file. It appears whole, or not at all."""
    beside = target.with_name(f"{target.name}.{secrets.token_hex(4)}.tmp")
    try:
        safetensors.torch.save_file(tensors, beside, about)
        os.replace(beside, target)
    finally:
        beside.unlink(missing_ok=True)


def _write_shards(folder: Path, tensors: dict[str, torch.Tensor], about: dict[str, str], most: int) -> None:
    """Writes files of up to `most` bytes, then the index that names them."""
    if most < 1:
        raise InvalidRequest(f"max_shard_bytes must be from 1, got {most}")
    if (folder / _WHOLE).exists():
        raise InvalidRequest(f"{folder} has a {_WHOLE}, which would be loaded in place of what is written: remove it")
    folder.mkdir(parents=True, exist_ok=True)
    before = _named_by(folder / _INDEX)
    parts: list[dict[str, torch.Tensor]] = [{}]
    for name, tensor in tensors.items():
        if parts[-1] and sum(each.nbytes for each in parts[-1].values()) + tensor.nbytes > most:
            parts.append({})
        parts[-1][name] = tensor
    # The run is in the name because another run of the job has other weights at the same version; what follows, because
    # versions may come again after a rollback, and a file that somebody reads is not written again.
    stem = f"model-{about['run']}-{about['version']}-{secrets.token_hex(4)}"
    files = [f"{stem}-{number:05}-of-{len(parts):05}.safetensors" for number in range(1, len(parts) + 1)]
    total = sum(each.nbytes for each in tensors.values())
    weight_map = {name: file for file, part in zip(files, parts, strict=True) for name in part}
    beside = folder / f"{_INDEX}.{secrets.token_hex(4)}.tmp"
    try:
        for file, part in zip(files, parts, strict=True):
            _write(folder / file, part, about)
        beside.write_text(json.dumps({"metadata": {**about, "total_size": total}, "weight_map": weight_map}, indent=2))
        os.replace(beside, folder / _INDEX)
    except BaseException:
        for file in (*files, beside.name):
            (folder / file).unlink(missing_ok=True)
        raise
    for old in folder.glob("model-*-of-*.safetensors"):
        if old.name not in before and old.name not in files:
            with contextlib.suppress(FileNotFoundError):  # another process tidies up as well
                old.unlink()


def _named_by(index: Path) -> set[str]:
    """Returns the files that an index names; none if there is no index."""
    try:
        return set(json.loads(index.read_text())["weight_map"].values())
    except (FileNotFoundError, ValueError, KeyError, AttributeError, TypeError):
        return set()
