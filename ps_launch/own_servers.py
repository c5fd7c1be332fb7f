"""The servers of one launch: `ps-worker run --shards N` runs `ps-server up` as a child beside its workers.

All that keeps servers up is in that child: it starts shards, brings back those that end, and stops them in order. The
launcher waits for the line that says where it is, and ends it when the workers are done.
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

# For which servers that were told to stop may take. They end their own processes long before: this is for one that is
# stopped (SIGSTOP), and for a --drain-seconds of minutes.
STOP_SECONDS = 900.0
# What `ps-server up` prints: where its own coordinator is, or, after its shard, that of another node.
_READY = re.compile(rb"ps-server: (?:ready at (\S+) \(|shard .* ready at .*; the coordinator is at (\S+)$)")


@dataclass(frozen=True)
class ServersPlan:
    """What `ps-server up` is started with.

    arguments:   its options
    environment: all of its variables
    shared:      workers of other launches use these servers too: they stay until the job has ended
    """

    arguments: tuple[str, ...]
    environment: Mapping[str, str]
    shared: bool = False


class OwnServers:
    """The child that runs the servers. `address`: of the coordinator, once all shards are ready; empty until then."""

    def __init__(self, plan: ServersPlan, console: Console) -> None:
        self.address = ""
        self._plan = plan
        self._console = console

    def program(self) -> Program:
        """Returns what the child runs. It writes its errors where this process does."""
        return Program(own_program("ps_server", "up", *self._plan.arguments), self._plan.environment, out=self)

    def take(self, data: bytes, lines: list[bytes]) -> None:
        """Takes what the servers print: on stderr, because stdout is the script's."""
        for line in lines:
            ready = _READY.match(line)
            if ready:
                self.address = (ready[1] or ready[2]).decode()
            self._console.write(sys.stderr.fileno(), line + b"\n")


def server_options(
    checkpoint_dir: str | None, checkpoint_every: str | None, restore: bool, more: str, name: str
) -> list[str]:
    """Returns what all servers of a launch are told alike. Raises InvalidRequest for more options that are no words.

    more: options in one text; name: of the setting that gives them
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
