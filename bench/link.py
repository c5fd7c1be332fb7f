"""A slow link between hosts of this machine's own."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator

from bench.cluster import Host
from tests.tools.network import Network, ip


def why_no_link() -> str:
    """Returns why two hosts with a link cannot be made here; empty: they can."""
    if os.geteuid() != 0:
        return "a link needs network namespaces, and these need root"
    missing = [command for command in ("ip", "tc") if shutil.which(command) is None]
    if missing:
        return f"a link needs `{missing[0]}`, of iproute2"
    try:
        with linked(1000.0):
            return ""
    except subprocess.CalledProcessError as error:
        return f"a link cannot be made here: {error.stderr.decode().strip()}"


@contextlib.contextmanager
def linked(mbit: float) -> Iterator[list[Host]]:
    """Two hosts of this machine's own, each a network namespace whose interface sends so many Mbit/s."""
    with Network(2) as network:
        for number in range(2):
            shaped = f"tc qdisc add dev eth0 root tbf rate {mbit:g}mbit burst 256kb latency 100ms"
            ip(f"netns exec {network.name(number)} {shaped}")
        yield [Host(network.address(number), ("ip", "netns", "exec", network.name(number))) for number in range(2)]
