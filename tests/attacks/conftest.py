"""Attacks run against the same real servers as the other tests, and against the fuzzer's target."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from fuzzing import Target


@pytest.fixture
def target() -> Iterator[Target]:
    made = Target()
    yield made
    made.stop()
