"""What the tests of servers share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.tools.one_process import OneProcess


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[OneProcess]:
    """A coordinator and its shards in this process; tests of running ones are in tests/cluster."""
    cluster = OneProcess(tmp_path)
    yield cluster
    cluster.stop()
