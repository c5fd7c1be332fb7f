"""A reader's copy of the rows of one shard, from its feed, and the file that keeps it for the next process.

A full copy is written into the same memory, and rows that are not in it are removed at its end. Until then the old rows
stay readable, so a rollback of the servers leaves no moment without rows.
"""

from __future__ import annotations

import json
import os
import secrets
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from ps_protocol.errors import InvalidRequest, LimitExceeded
from ps_protocol.messages.rows import FeedRoundBegin
from ps_protocol.row_ids import Ids
from ps_protocol.tables import Initializer
from ps_protocol.tensors import bytes_of
from ps_tables.entries import Entries
from ps_tables.initial import initial_rows
from ps_tables.row_arrays import RowArray
from ps_tables.sizes import rows_within

_BLOCK = 2**16  # rows that are written to a file at a time
_FORMAT = "ps-torch rows 1"


class ReadRowsMessage(NamedTuple):
    """A message of a round of a feed, decoded: ids [n] of removed rows, ids [m] and values [m, dim] of rows.

    begin:  in the round's first message; cursor: in its last one
    """

    begin: FeedRoundBegin | None
    removed: Ids
    ids: Ids
    values: torch.Tensor
    cursor: bytes


class RowCopy:
    """The rows of one shard. `read`, `all_rows` and `len` are for any thread, all else is for one.

    begin:   the description in the last round's first message
    memory:  bytes that rows may take
    version: the table's version when the last complete round began; -1: there is none
    cursor:  the cursor to continue from; empty: there is none
    """

    def __init__(self, begin: FeedRoundBegin, memory: int) -> None:
        self.begin, self.version, self.cursor = begin, -1, b""
        self._capacity = max(1, rows_within(memory, 4 * begin.dim))
        self._entries = Entries(self._capacity, secrets.randbits(62))
        self._weights = RowArray(self._capacity, begin.dim)
        self._copies = 1  # the number of full copies begun: each entry has that of the last copy with this row
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._entries)

    def read(self, ids: Ids) -> torch.Tensor:
        """Returns rows: [n] ids, which may repeat, to [n, dim] float32; for ids without a row, their initial value."""
        out = torch.empty(len(ids), self.begin.dim, dtype=torch.float32, device="cpu")
        with self._lock:
            numbers = self._entries.find(ids)
            self._weights.read(numbers, out)
        untrained = np.flatnonzero(numbers < 0)
        if len(untrained):
            out[torch.from_numpy(untrained)] = initial_rows(self.begin.initializer, ids[untrained], self.begin.dim)
        return out

    def all_rows(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns a copy of all ids that have a row, [n], and of their rows, [n, dim]."""
        with self._lock:
            ids, numbers = self._entries.entries()
            out = torch.empty(len(ids), self.begin.dim, dtype=torch.float32, device="cpu")
            self._weights.read(numbers, out)
        return torch.from_numpy(ids), out

    def take(self, part: ReadRowsMessage) -> None:
        """Adds the next message of a round. Raises LimitExceeded if rows do not fit into memory."""
        if part.begin is not None:
            self.begin = part.begin
            self._copies += part.begin.full
        if len(part.removed):
            self._remove(np.unique(part.removed))
        if len(part.ids):
            self._put(part.ids, part.values)
        if part.cursor:
            if self.begin.full:
                with self._lock:
                    self._entries.expire(self._copies)
                    self._entries.sweep(everything=True)
            self.version, self.cursor = self.begin.version, part.cursor

    def _remove(self, ids: Ids) -> None:
        with self._lock:
            numbers = self._entries.find(ids)
            here = numbers >= 0
            self._entries.remove(ids[here], numbers[here])

    def _put(self, ids: Ids, values: torch.Tensor) -> None:
        distinct, last = np.unique(ids[::-1], return_index=True)
        if len(distinct) < len(ids):  # if a row comes twice, the later one counts
            ids, values = distinct, values[torch.from_numpy(len(ids) - 1 - last)]
        with self._lock:
            numbers = self._entries.find(ids)
            new = np.flatnonzero(numbers < 0)
            if len(new) > self._capacity - len(self._entries):
                raise LimitExceeded(f"this process has memory for {self._capacity} rows of a shard, and more come")
            numbers[new] = self._entries.add(ids[new], self._copies)
            self._entries.use(numbers, self._copies)
            self._weights.write(numbers, values.contiguous())

    # -- the file ----------------------------------------------------------------------------------------------------

    def save(self, path: Path, about: dict[str, str]) -> None:
        """Writes rows and cursor to a file atomically, after a round. Replaces an existing file.

        about: identifies the table, as text by key
        """
        ids, numbers = self._entries.entries()
        start = self.begin.initializer
        known = {
            "cursor": self.cursor.hex(),
            "version": str(self.version),
            "shards": str(self.begin.shards),
            "initializer": json.dumps([start.kind, start.scale, start.seed]),
        }
        sizes, dim = (8 * len(ids), 4 * self.begin.dim * len(ids)), self.begin.dim
        header = {
            "__metadata__": {"format": _FORMAT, **about, **known},
            "ids": {"dtype": "I64", "shape": [len(ids)], "data_offsets": [0, sizes[0]]},
            "weights": {"dtype": "F32", "shape": [len(ids), dim], "data_offsets": [sizes[0], sum(sizes)]},
        }
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        new = path.with_name(path.name + ".new")
        with new.open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text + ids.tobytes())
            for block in self._blocks(numbers):
                file.write(bytes_of(block.view(-1)))
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)

    def _blocks(self, numbers: np.ndarray) -> Iterator[torch.Tensor]:
        for first in range(0, len(numbers), _BLOCK):
            part = numbers[first : first + _BLOCK]
            block = torch.empty(len(part), self.begin.dim, dtype=torch.float32, device="cpu")
            self._weights.read(part, block)
            yield block


def saved_copy(path: Path, about: dict[str, str], memory: int) -> RowCopy:
    """Returns the rows that `save` wrote. Raises InvalidRequest for a file of other rows, or none of this kind."""
    try:
        with safe_open(path, "pt") as file:
            known = file.metadata() or {}
            if known.get("format") != _FORMAT:
                raise InvalidRequest(f"{path} is no file of rows that a feed has copied")
            differs = {name: (value, known.get(name)) for name, value in about.items() if known.get(name) != value}
            if differs:
                name, (wanted, found) = next(iter(differs.items()))
                raise InvalidRequest(f"{path} has rows of {name} {found!r}, and those of {wanted!r} are asked for")
            ids, weights = file.get_tensor("ids"), file.get_tensor("weights")
    except (SafetensorError, OSError) as error:
        raise InvalidRequest(f"{path} cannot be read ({error}): remove it, and the rows are copied anew") from None
    initializer = Initializer(*json.loads(known["initializer"]))
    version, shards = int(known["version"]), int(known["shards"])
    copy = RowCopy(FeedRoundBegin(True, version, shards, weights.shape[1], initializer), memory)
    for first in range(0, len(ids), _BLOCK):
        part = slice(first, first + _BLOCK)
        copy.take(ReadRowsMessage(None, np.empty(0, np.int64), ids[part].numpy(), weights[part], b""))
    copy.version, copy.cursor = version, bytes.fromhex(known["cursor"])
    return copy
