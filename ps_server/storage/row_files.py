"""Files of rows that do not fit into a shard's memory. They are scratch files: without names, and gone with the
process.

A file has its full length from the beginning. Its blocks on disk are allocated step by step, before anything is written
to them. Rows are read through a read-only mapping and written with system calls, which report a full disk. Through a
writable mapping, a full disk would kill the process (SIGBUS).
"""

from __future__ import annotations

import logging
import mmap
import os
import tempfile
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ps_protocol.errors import InvalidRequest, LimitExceeded
from ps_tables.cold import Records
from ps_tables.row_arrays import RowNumbers

log = logging.getLogger("ps_server")

PIECE_BYTES = 64 * 2**20  # the disk is allocated in pieces of this size
_READERS = 32  # parallel reads: a disk answers many at a time faster (measured: 37 k rows/s instead of 9 k/s)
_FEW = 64  # rows that one thread reads


class RowFiles:
    """The files of one shard. Thread-safe. Raises InvalidRequest for a directory in which no file can be made.

    limit: bytes of all files together; None: half of the disk's free bytes when a job begins
    pool:  makes a pool of reader threads, from their number and a name
    """

    def __init__(
        self,
        directory: Path,
        limit: int | None = None,
        pool: Callable[[int, str], ThreadPoolExecutor] = ThreadPoolExecutor,
    ) -> None:
        self._directory, self._limit = directory, limit
        self._promised = 0
        # Reentrant: `_forget` runs where a file is collected as garbage, possibly in a thread that holds the lock.
        self._lock = threading.RLock()
        self._readers = pool(_READERS, "cold-rows")
        try:
            directory.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=directory):
                pass
        except OSError as error:
            raise InvalidRequest(f"no files of rows can be made in {directory}: {error.strerror}") from None

    def stop(self) -> None:
        """Ends the reader threads. Nothing can be read afterwards."""
        self._readers.shutdown()

    def free_bytes(self) -> int:
        """Bytes that further files may have, all together."""
        with self._lock:
            if self._limit is not None:
                return max(0, self._limit - self._promised)
            try:
                disk = os.statvfs(self._directory)
            except OSError:
                return 0
            return max(0, disk.f_bavail * disk.f_frsize - self._promised) // 2

    def open(self, elements: int, places: int) -> DiskRows:
        """Makes a file for `places` records of `elements` elements. Raises LimitExceeded if the disk is too small."""
        size = 4 * elements * places
        try:
            rows = DiskRows(self._directory, elements, places, self._readers)
        except OSError as error:
            raise LimitExceeded(
                f"a file of {size} bytes for rows cannot be made in {self._directory}: {error.strerror}"
            ) from None
        with self._lock:
            self._promised += size
        weakref.finalize(rows, self._forget, size)
        return rows

    def _forget(self, size: int) -> None:
        with self._lock:
            self._promised -= size


class DiskRows:
    """One file of float32 records. Not thread-safe. The file is gone with this object.

    room:   how many records can be written; fewer once the disk is full
    nbytes: bytes that are allocated on disk
    """

    def __init__(self, directory: Path, elements: int, places: int, readers: ThreadPoolExecutor) -> None:
        self._elements, self._readers = elements, readers
        self._size = 4 * elements  # bytes of a record
        self.room, self.nbytes = places, 0
        self._where = directory
        self._length = max(1, places) * self._size
        file = tempfile.TemporaryFile(dir=directory, buffering=0)  # noqa: SIM115 - 0600, and without a name
        self._file = file.fileno()
        weakref.finalize(self, file.close)
        os.truncate(self._file, self._length)
        memory = mmap.mmap(self._file, self._length, mmap.MAP_SHARED, mmap.PROT_READ)
        memory.madvise(mmap.MADV_RANDOM)
        self._memory = memory
        self._records: npt.NDArray[Any] = np.frombuffer(memory, dtype=f"V{self._size}")

    def read(self, places: RowNumbers) -> Records:
        """Returns the records at these positions, which must have been written."""
        records = np.empty((len(places), self._elements), np.float32)
        out = records.reshape(-1).view(self._records.dtype)
        if len(places) <= _FEW:
            np.take(self._records, places, out=out, mode="clip")
            return records
        count = min(_READERS, -(-len(places) // _FEW))
        pieces = zip(np.array_split(places, count), np.array_split(out, count), strict=True)
        for _ in self._readers.map(lambda piece: np.take(self._records, piece[0], out=piece[1], mode="clip"), pieces):
            pass
        return records

    def write(self, places: RowNumbers, records: Records) -> bool:
        """Writes records at ascending positions. Returns False if the disk is full."""
        if not len(places):
            return True
        ends = np.append(np.flatnonzero(np.diff(places) != 1) + 1, len(places))  # ends of runs of adjacent records
        begins = np.append(0, ends[:-1])
        try:
            self._grow((int(places[-1]) + 1) * self._size)
            if len(ends) > 1:  # a partly written page is read first: read all of these together
                self.read(places[np.union1d(begins, ends - 1)])
            data = np.ascontiguousarray(records).reshape(-1).view(np.uint8).data
            for begin, end in zip(begins.tolist(), ends.tolist(), strict=True):
                self._put(data[begin * self._size : end * self._size], int(places[begin]) * self._size)
        except OSError as error:
            log.warning(
                "rows stay in memory, and tables have room for fewer: %s takes no more of them: %s",
                self._where,
                error.strerror,
            )
            return False
        return True

    def let_go(self) -> None:
        """Drops the file from the page cache as far as possible, so that the next reads come from the disk."""
        os.fdatasync(self._file)
        self._memory.madvise(mmap.MADV_DONTNEED)
        os.posix_fadvise(self._file, 0, 0, os.POSIX_FADV_DONTNEED)

    def _grow(self, size: int) -> None:
        """Allocates blocks up to `size` bytes. If it raises OSError, `room` stays at what is allocated."""
        if size <= self.nbytes:
            return
        size = min(self._length, -(-size // PIECE_BYTES) * PIECE_BYTES)
        try:
            os.posix_fallocate(self._file, self.nbytes, size - self.nbytes)
        except OSError:
            self.room = self.nbytes // self._size
            raise
        self.nbytes = size

    def _put(self, data: memoryview, position: int) -> None:
        try:
            while data:
                count = os.pwrite(self._file, data, position)
                data, position = data[count:], position + count
        except OSError:
            self.room = 0  # the disk fails although it gave the room: it is written to no more
            raise
