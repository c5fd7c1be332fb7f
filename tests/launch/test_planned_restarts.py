"""Servers that are ended by SIGTERM and started again, as for an upgrade: every step of a worker counts, as a whole.

Each step adds 1 to two buckets, which are on two shards, and to rows on both: one that counts on one shard alone would
leave them apart for ever.
"""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from tests.chaos.cluster import free_ports
from tests.tools.cases import cases
from tests.tools.cluster import until
from tests.tools.launching import ROOT, Command, Start

SCRIPT = ROOT / "tests" / "scripts" / "count_steps.py"
WAIT_SECONDS = 120
MORE_STEPS = 200  # that are to be made from here on: a multiple of those between two looks
RESTARTS = 2


class Training:
    """Servers and workers of one job."""

    def __init__(self, start: Start, directory: Path, mode: str, workers: int, *arguments: str) -> None:
        self._start, self.directory, self.workers = start, directory, workers
        port = free_ports(2)
        self._up = "-m", "ps_server", "up", "--shards=2", f"--port={port}", f"--checkpoint-dir={directory}/checkpoints"
        self.servers = self._serve()
        where = f"--server=127.0.0.1:{port}", f"--mode={mode}", f"--workers={workers}"
        self.launch = start("-m", "ps_worker", "run", *where, str(SCRIPT), str(directory), *arguments)

    def _serve(self, *flags: str) -> Command:
        servers = self._start(*self._up, "--metrics-port=0", *flags)
        servers.says(r"ps-server: ready at (\S+) \(2 shards\)\n")
        return servers

    def steps(self) -> list[int]:
        """Of each worker."""
        paths = [self.directory / f"steps-{rank}" for rank in range(self.workers)]
        return [int(path.read_text()) if path.exists() else 0 for path in paths]

    def advances(self) -> None:
        """Until each worker has made more steps."""
        before = self.steps()

        def advanced() -> bool:
            assert self.launch.process.poll() is None, self.launch.err
            return all(now >= then + 40 for now, then in zip(self.steps(), before, strict=True))

        until(advanced, "more steps of all workers", WAIT_SECONDS)

    def restart_servers(self) -> None:
        """In the middle of some step."""
        assert self.servers.end(signal.SIGTERM) == 0
        self.servers = self._serve("--resume")

    def end(self) -> list[tuple[int, list[float]]]:
        """What each worker leaves: its steps and the weights."""
        steps = max(self.steps()) + MORE_STEPS
        (self.directory / "stop.new").write_text(str(steps))
        (self.directory / "stop.new").rename(self.directory / "stop")
        assert self.launch.process.wait(WAIT_SECONDS) == 0, self.launch.err
        return [tuple(json.loads((self.directory / f"found-{rank}").read_text())) for rank in range(self.workers)]


@pytest.mark.long
@pytest.mark.parametrize(
    ("mode", "workers", "arguments"),
    cases(
        [("async", 1, ())],
        [
            ("sync", 1, ("table",)),
            ("async", 2, ("table",)),
            ("sync", 2, ("table",)),
            ("ssp:1", 2, ("table",)),
            ("local:2", 1, ()),
        ],
    ),
)
def test_no_step_is_lost_or_cut_in_half_when_the_servers_are_restarted(
    start: Start, tmp_path: Path, mode: str, workers: int, arguments: tuple[str, ...]
) -> None:
    training = Training(start, tmp_path, mode, workers, *arguments)
    for _ in range(RESTARTS):
        training.advances()
        training.restart_servers()
    training.advances()
    found = training.end()
    made = [steps for steps, _ in found]
    counted = max(made) if mode == "sync" else sum(made)
    assert set(found[0][1]) == {float(counted)}
