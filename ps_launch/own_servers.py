"""The servers of one launch: `ps-worker run --shards N` runs `ps-server up` as a child beside its workers.

That child starts the shards, restarts those that end, and stops them in order. The launcher waits for the line with the
coordinator's address, and ends the child when the workers are done.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from ps_launch.children import Program
from ps_launch.output import Console
from ps_protocol.errors import InvalidRequest
from ps_runtime.own_program import own_program

# The time limit for servers to stop. They end their own processes long before: the limit is for a process that is
# stopped (SIGSTOP), and for a --drain-seconds of minutes.
STOP_SECONDS = 900.0
# The line in which `ps-server up` prints the address of its own coordinator, or of another node's.
_READY = re.compile(rb"ps-server: (?:ready at (\S+) \(|shard .* ready at .*; the coordinator is at (\S+)$)")


@dataclass(frozen=True)
class ServersPlan:
    """How `ps-server up` is started.

    arguments:   its options
    environment: its complete environment
    shared:      workers of other launches use these servers, too: they run until the job has ended
    """

    arguments: tuple[str, ...]
    environment: Mapping[str, str]
    shared: bool = False


class OwnServers:
    """The child that runs the servers. address: that of the coordinator; empty until all shards are ready"""

    def __init__(self, plan: ServersPlan, console: Console) -> None:
        self.address = ""
        self._plan = plan
        self._console = console

    def program(self) -> Program:
        """Returns what the child runs. Its stderr is that of this process."""
        return Program(own_program("ps_server", "up", *self._plan.arguments), self._plan.environment, out=self)

    def take(self, data: bytes, lines: list[bytes]) -> None:
        """Processes the servers' output, which goes to stderr: stdout belongs to the script."""
        for line in lines:
            ready = _READY.match(line)
            if ready:
                self.address = (ready[1] or ready[2]).decode()
            self._console.write(sys.stderr.fileno(), line + b"\n")


def server_options(
    checkpoint_dir: str | None, checkpoint_every: str | None, restore: bool, more: str, name: str
) -> list[str]:
    """Returns the options that all servers of a launch get. Raises InvalidRequest if `more` cannot be split into words.

    more: further options as one text
    name: the name of the setting that has `more`, for the error
    """
    try:
        words = shlex.split(more)
    except ValueError as error:
        raise InvalidRequest(f"{name}: {error}, got {more!r}") from None
    options = ["--metrics-port", "0"]
    if checkpoint_dir is not None:
        options += ["--checkpoint-dir", checkpoint_dir]
    if checkpoint_every is not None:
        options += ["--checkpoint-every", checkpoint_every]
    return [*options, *["--restore"] * restore, *words]
