"""Memory files (memfd_create), which processes of one host can map: made, filled, sealed, and checked. Linux only.

No process can write, shrink or grow a sealed file any more. So a process that maps one never reads beyond its end,
which would kill it, and the content does not change. The memory stays as long as any process maps it, even after the
process that made it has ended.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import mmap
import os
import threading
import weakref

import numpy as np
import numpy.typing as npt

from ps_protocol.errors import NotShared

Bytes = npt.NDArray[np.uint8]
_numbers = itertools.count()
_MAP_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)  # Python has the name from 3.13 on
_MADV_POPULATE_READ = 22  # Linux 5.14; Python has no name for it
_POPULATED_BYTES = 2**22  # at a time: meanwhile no other thread of this process runs Python


class SharedFile:
    """A new memory file of `size` bytes, from 1. The kernel allocates its memory as it is filled.

    number: counts the memory files of this process; descriptors are reused, this number is not

    Raises NotShared if there are no memory files.
    """

    def __init__(self, size: int) -> None:
        self.size, self.number = size, next(_numbers)
        if not hasattr(os, "memfd_create"):
            raise NotShared("this system has no memory files (memfd_create)")
        try:
            self.descriptor = os.memfd_create("ps-torch-edition", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            weakref.finalize(self, os.close, self.descriptor)
            os.fchmod(self.descriptor, 0o600)
            os.ftruncate(self.descriptor, size)
            self._map()
        except OSError as error:
            raise NotShared(f"no memory file of {size} bytes can be made ({error.strerror})") from None

    def _map(self) -> None:
        """Maps it as this process needs it. Raises OSError."""

    def _add_seals(self) -> None:
        """Raises NotShared if the kernel does not seal it."""
        seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        try:
            fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, seals)
        except OSError as error:
            raise NotShared(f"a memory file cannot be sealed ({error.strerror})") from None


class MemoryFile(SharedFile):
    """A memory file that this process fills through a mapping: `fill`, then `seal`. WrittenFile is written through its
    descriptor.
    """

    def _map(self) -> None:
        self._memory = mmap.mmap(self.descriptor, self.size)

    def fill(self) -> Bytes:
        """Returns the file's bytes, to be written. No reference to them may be left when `seal` is called."""
        return np.frombuffer(self._memory, np.uint8)

    def seal(self) -> Bytes:
        """Seals the file against all changes, and returns its bytes.

        Raises NotShared, and leaves the file unsealed, if a reference to the result of `fill` is left, or if the kernel
        does not seal it. Raises OSError if it cannot be mapped again: then its bytes are of no use to this process.
        """
        try:
            self._memory.close()  # the kernel seals nothing that is mapped for writing
        except BufferError:
            raise NotShared("a memory file is still in use where it was filled") from None
        try:
            self._add_seals()
        except NotShared:
            self._map()
            raise
        return mapped(self.descriptor, self.size, populate=False)


class WrittenFile(SharedFile):
    """A memory file that is filled by writing to its descriptor: whoever does that waits for no page that is not there
    yet, and nothing keeps the kernel from sealing it. Thread-safe.

    content: its bytes, also while it is filled
    """

    def _map(self) -> None:
        self.content: Bytes = mapped(self.descriptor, self.size, populate=False)
        self._is_sealed, self._sealing = False, threading.Lock()

    def write(self, offset: int, content: memoryview) -> None:
        """Fills a part of it. Raises NotShared if there is no memory for that."""
        try:
            while content:
                written = os.pwrite(self.descriptor, content, offset)
                offset, content = offset + written, content[written:]
        except OSError as error:
            raise NotShared(f"a memory file cannot be filled ({error.strerror})") from None

    def seal(self) -> None:
        """Seals it against all changes; it may be sealed already. Raises NotShared if the kernel does not seal it."""
        with self._sealing:
            if not self._is_sealed:
                self._add_seals()
                self._is_sealed = True


def mapped(descriptor: int, size: int, closes_with: int | None = None, populate: bool = True) -> Bytes:
    """Returns the bytes of a sealed memory file, without a copy. The descriptor may be closed afterwards.

    closes_with: another descriptor, which is closed when nothing refers to these bytes any more
    populate:    map all pages now, so that the first reader does not wait for each page

    Raises OSError.
    """
    # Private, because older kernels (before 6.7) map a sealed file in no other way. Where a process writes to these
    # bytes although it must not, it gets a copy of the page, and is not killed.
    flags = mmap.MAP_PRIVATE | _MAP_NORESERVE
    memory = mmap.mmap(descriptor, size, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    if closes_with is not None:
        weakref.finalize(memory, os.close, closes_with)
    with contextlib.suppress(OSError):  # kernels before 5.14
        for start in range(0, size if populate else 0, _POPULATED_BYTES):
            memory.madvise(_MADV_POPULATE_READ, start, min(_POPULATED_BYTES, size - start))
    found = np.frombuffer(memory, np.uint8)
    found.flags.writeable = False
    return found


def check_file(descriptor: int, seals: int, what: str, size: int | None = None) -> int:
    """Returns the size of a memory file. Raises NotShared for any other file, and for one without these seals or with
    huge pages.

    size: the bytes that it must have; None: any number from 1

    Reading beyond the end of a mapped file kills the reader, and so does a huge page that is not there. The seals are
    checked first: that never waits for another process, as fstat may on a file that a process serves.
    """
    try:
        found = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
    except OSError:
        raise NotShared(f"{what} is no memory file (memfd_create)") from None
    names = {fcntl.F_SEAL_SHRINK: "shrinking (F_SEAL_SHRINK)", fcntl.F_SEAL_WRITE: "writing (F_SEAL_WRITE)"}
    for seal, name in names.items():
        if seals & seal & ~found:  # a file on a tmpfs is refused here, too: it cannot be sealed
            raise NotShared(f"{what} must be a memory file that is sealed against {name}")
    page = os.fstatvfs(descriptor).f_bsize
    if page != mmap.PAGESIZE:
        raise NotShared(f"{what} has pages of {page} bytes, and must have ordinary ones of {mmap.PAGESIZE}")
    found = os.fstat(descriptor).st_size
    if found != size and (size is not None or not found):
        raise NotShared(f"{what} has {found} bytes where {size or 'some'} are needed")
    return found
