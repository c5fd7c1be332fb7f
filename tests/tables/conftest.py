"""Fixtures of the tests of tables."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ps_tables.choosing import AUTO, OFF, choose
from ps_tables.native import in_use


@pytest.fixture(scope="module", params=[AUTO, OFF])
def with_and_without_the_library(request: pytest.FixtureRequest) -> Iterator[None]:
    """Has a module's tests run twice: with the library, where this installation has it, and with numpy."""
    if not choose(request.param).level and request.param == AUTO:
        pytest.skip("this installation has no library: make native")
    yield
    in_use.use(None)
