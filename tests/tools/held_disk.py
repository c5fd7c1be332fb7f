"""A disk that holds back what is read of checkpoints until a test lets it go."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import BinaryIO

from ps_server.storage.disk import Disk

SECONDS = 30.0


class HeldDisk(Disk):
    """Files of shards are read when `go` is set; `reached` says that one is waited for."""

    def __init__(self) -> None:
        self.go, self.reached = threading.Event(), threading.Event()

    def open(self, path: Path) -> BinaryIO:
        if path.suffix == ".safetensors":
            self.reached.set()
            assert self.go.wait(SECONDS)
        return super().open(path)
