"""A folder with a module for each name that servers and launchers import: each says that it ran, and ends."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

IMPORTED = ("ps_server.cli", "ps_server.server", "ps_worker.cli", "ps_launch.local_cluster", "torch")


def plant(folder: Path) -> Path:
    """Fills a folder; returns where the modules that ran leave their names.

    Names that the tests import are there, too: asking a process of its own would take seconds.
    """
    for name in IMPORTED:
        importlib.import_module(name)
    names = {name.partition(".")[0] for name in sys.modules} - {"__main__", "sitecustomize", "usercustomize"}
    assert {"grpc", "torch", "google", "ps_server", "ps_worker", "numpy", "queue"} <= names
    ran = folder / "ran"
    ran.mkdir()
    for name in names:
        text = f"open({str(ran / name)!r}, 'w').close()\nraise SystemExit('planted {name}')\n"
        (folder / f"{name}.py").write_text(text)
    return ran
