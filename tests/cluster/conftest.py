"""What the tests of running clusters share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.tools.forkserver import Nursery, address_in


@pytest.fixture
def server(nursery: Nursery, tmp_path: Path) -> Iterator[tuple[str, int]]:
    """A shard with a coordinator in a process of its own: its address and process id."""
    flags = ["--with-coordinator", "--shards=1", "--index=0", "--port=0", "--metrics-port=0", "--lease=600"]
    process = nursery.serve(["shard", *flags], tmp_path / "log")
    yield address_in(tmp_path / "log"), process.pid
    process.kill()
