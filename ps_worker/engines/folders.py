"""Directories from which an engine loads weights: JOB/WIRE/VERSION, one for each version, each complete or absent."""

from __future__ import annotations

import secrets
import shutil
import time
import zlib
from collections.abc import Mapping
from pathlib import Path

from ps_worker.edition_tensors import Edition, MadeOf

LEFT_SECONDS = 3600.0  # an unfinished directory of this age belongs to a dead process
Names = Mapping[str, str | MadeOf]
_UNFINISHED = ".unfinished"
_WEIGHTS = (".safetensors", ".bin", ".pt")


def label(edition: Edition, names: Names | None = None) -> str:
    """Returns a label that no edition with other weights has, even after a restart of this process. The version is not
    enough: another run, or a rollback, has other weights at the same version.

    names: the names under which the tensors are saved: an engine that has them under others has other weights
    """
    arrays, more = edition.arrays, list[object]()
    if arrays.buffers_version or not arrays.contents.spec.consistency.has_one_version:  # each bucket has its own
        more += sorted((index, version, arrays.timelines.get(index)) for index, version in arrays.versions.items())
    for name, source in sorted((names or {}).items()):
        more.append((name, (source,) if isinstance(source, str) else source.names))
    check = f"-{zlib.crc32(repr(more).encode()):08x}" if more else ""
    return f"{edition.version}-{edition.run}-{arrays.timeline}{check}"


def saved(edition: Edition, folder: Path, base: Path | None, max_shard_bytes: int, names: Names | None = None) -> Path:
    """Returns the directory of an edition, and writes it if it is missing.

    base:  a checkpoint, whose other files (configuration, tokenizer) are copied beside the weights
    names: as for Edition.save
    """
    contents, version = edition.arrays.contents, label(edition, names)
    place = folder / contents.spec.name / contents.wire / version
    beside = place.with_name(
        f"{version}.{secrets.token_hex(4)}{_UNFINISHED}"
    )  # another follower may be writing it, too
    if not place.exists():
        try:
            edition.save(beside, max_shard_bytes, names)
            for file in base.iterdir() if base is not None else ():
                if file.is_file() and file.suffix not in _WEIGHTS and ".index." not in file.name:
                    shutil.copy2(file, beside / file.name)
            _move(beside, place)
        finally:  # the next attempt may be at another version
            shutil.rmtree(beside, ignore_errors=True)
    return place


def _move(beside: Path, place: Path) -> None:
    """Moves a directory to its final path, unless another follower has written the same one meanwhile."""
    try:
        beside.rename(place)
    except OSError:
        if not place.exists():
            raise


def tidy(place: Path) -> None:
    """Removes all other versions except the newest, and unfinished directories of processes that died."""
    whole: list[tuple[float, Path]] = []
    for each in place.parent.iterdir():
        try:
            written = each.stat().st_mtime
        except FileNotFoundError:  # another follower has been faster
            continue
        if each.suffix != _UNFINISHED:
            whole.append((written, each))
        elif time.time() - written > LEFT_SECONDS:
            shutil.rmtree(each, ignore_errors=True)
    for _, old in sorted(whole)[:-2]:
        if old != place:
            shutil.rmtree(old, ignore_errors=True)
