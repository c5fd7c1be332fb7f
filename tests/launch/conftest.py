"""What the tests of launches share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.tools.launching import Commands, Start


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts commands that end with the test: start("-m", "ps_server", "up", PS_SHARDS="1")."""
    with closing(Commands(tmp_path)) as commands:
        yield commands.start
