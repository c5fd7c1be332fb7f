"""A server of this machine that speaks S3, with one bucket; and the places in it."""

from __future__ import annotations

import importlib.util
import itertools
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ps_runtime.free_ports import free_port
from ps_server.storage.files import files_of, parse_path
from tests.tools.cluster import until

BUCKET = "bucket"
MISSING = [name for name in ("s3fs", "moto", "flask") if importlib.util.find_spec(name) is None]
START_SECONDS = 120.0


class ObjectStore:
    """One bucket. address: of the server"""

    def __init__(self, address: str) -> None:
        self.address = address
        self._numbers = itertools.count()

    def place(self) -> Path:
        """A place that nothing was written to."""
        found = parse_path(f"s3://{BUCKET}/tests/{next(self._numbers)}")
        assert found is not None
        return found


@contextmanager
def running() -> Iterator[ObjectStore]:
    """The server, with the variables by which processes find it. Skips where it is missing."""
    if MISSING:
        pytest.skip(f"{' and '.join(MISSING)} not installed: make test-remote")
    port = free_port()
    address = f"http://127.0.0.1:{port}"
    words = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    server = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in {
                "AWS_ENDPOINT_URL": address,
                "AWS_ACCESS_KEY_ID": "key",
                "AWS_SECRET_ACCESS_KEY": "secret",
                "AWS_DEFAULT_REGION": "us-east-1",
                "AWS_CONFIG_FILE": os.devnull,
            }.items():
                patch.setenv(name, value)
            until(lambda: _answers(port), "the S3 server", START_SECONDS)
            import s3fs  # type: ignore[import-untyped,import-not-found,unused-ignore]

            s3fs.S3FileSystem(skip_instance_cache=True).mkdir(BUCKET)
            yield ObjectStore(address)
    finally:
        server.kill()
        server.wait()


def _answers(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 1.0).close()
    except OSError:
        return False
    return True


def keys(path: Path) -> list[str]:
    """The names of all files below a place, as seen from there."""
    if not str(path).startswith("s3://"):
        return sorted(str(each.relative_to(path)) for each in path.rglob("*") if each.is_file())
    start = str(path).removeprefix("s3://") + "/"
    return sorted(key.removeprefix(start) for key in files_of(path)._fs.find(start))  # type: ignore[attr-defined]
