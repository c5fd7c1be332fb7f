"""The workers under chaos: `ps-worker run` starts them, and starts those again that die."""

from __future__ import annotations

import json
import signal
import subprocess
from dataclasses import asdict
from pathlib import Path

from tests.chaos.processes import children, send, start, variable
from tests.chaos.worker import Task

RESTARTS = 100_000
STOP_SECONDS = 20.0
SCRIPT = Path(__file__).with_name("worker.py")


class Crew:
    """The workers of one job. Each is known by its slot: its number among those of the launch, in an elastic job too,
    where a worker that comes back may have another rank."""

    def __init__(self, task: Task, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "task.json").write_text(json.dumps(asdict(task)))
        words = ["run", "--server", task.server, "--workers", str(task.workers), "--mode", task.mode]
        words += ["--job", task.job, "--max-restarts", str(RESTARTS), "--log-dir", str(folder)]
        words += ["--elastic"] if task.elastic else []
        self._launcher = start(["ps_worker", *words, str(SCRIPT), str(folder)], {}, folder / "launcher.log")

    def pid(self, slot: int) -> int | None:
        """Returns the process of a slot; None if it has none now."""
        found = (pid for pid in children(self._launcher.pid) if variable(pid, "PS_LOCAL_RANK") == str(slot))
        return next(found, None)

    def signal(self, slot: int, number: int) -> list[int]:
        """Sends a slot's process a signal, and returns the processes that it reached: one or none."""
        pid = self.pid(slot)
        return [pid] if pid is not None and send(pid, number) else []

    def end(self, seconds: float) -> int | None:
        """Waits until the launch ends; its exit code, or None where it had to be forced to."""
        try:
            return self._launcher.wait(seconds)
        except subprocess.TimeoutExpired:
            self._launcher.send_signal(signal.SIGTERM)
        try:
            self._launcher.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._launcher.kill()
            self._launcher.wait()
        return None
