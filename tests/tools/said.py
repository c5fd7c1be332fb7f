"""What workers of a test have logged: servers that tests share log beside it, of jobs of tests before."""

from __future__ import annotations

import logging

import pytest


def said_by_workers(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    """Returns the records of workers' logs, in their order."""
    return [record for record in caplog.records if record.name.partition(".")[0] == "ps_worker"]
