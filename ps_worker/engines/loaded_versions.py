"""The version that a vLLM has loaded, told by its first worker; and updates of a vLLM in one's own process.

A worker of vLLM may be a process of its own, whose attributes nobody else sees, and it loads the newest weights, which
may be later than those that were asked for. So it tells their version by a socket on its host.
"""

from __future__ import annotations

import socket
import tempfile
from contextlib import ExitStack, suppress
from typing import Any

from ps_protocol.errors import Unreachable

UNLABELLED = "default"  # what vLLM itself calls weights without a label
_REPORTS = socket.AF_UNIX, socket.SOCK_DGRAM
_SHORT = "/tmp", "/dev/shm"  # folders with short names, if TMPDIR has a long one


def update(llm: Any, version: int = 0, timeout: float = 600.0) -> int:
    """Gives a vLLM in this process the job's newest weights, and returns their version.

    From vLLM 0.27 on the version is its own label, too: `llm.get_weight_version()`. While this runs, no other thread
    may generate with the vLLM: an output would be of the weights before, the new ones, or a mixture.

    Args:
        llm: A `vllm.LLM` that follows a job: `init_weight_transfer_engine` was called.
        version: The least number of updates that the weights are to have.
        timeout: Seconds to wait for them.

    Raises:
        Unreachable: The weights are loaded, and their version is unknown, because the first worker of vLLM is on
            another host; or there is no folder for a socket, and nothing is loaded.
        Exception: What vLLM raises when its workers could not load the weights.

    Example:
        from ps_torch.engines.vllm import update

        version = update(llm, version=40)
        samples = [(version, output) for output in llm.generate(prompts)]
    """
    with ExitStack() as stack:
        found = report_socket(stack)
        if found is None:
            raise Unreachable("there is no folder for a socket: give this process a TMPDIR that is short and writable")
        reports, address = found
        llm.start_weight_update()
        llm.update_weights({"update_info": {"version": version, "timeout": timeout, "report": address}})
        loaded = reported(reports)
    if hasattr(llm, "get_weight_version"):
        # Without a label vLLM would keep the one of the weights before.
        llm.finish_weight_update(weight_version=UNLABELLED if loaded is None else str(loaded))
    else:
        llm.finish_weight_update()
    if loaded is None:
        raise Unreachable("vLLM has loaded weights of no known version: its first worker is not on this host")
    return loaded


def report(address: str, version: int) -> None:
    """Tells who has made the socket, on this host, the version that an engine has loaded, if they still wait for it."""
    with suppress(OSError), socket.socket(*_REPORTS) as reports:
        reports.sendto(str(version).encode(), address)


def report_socket(stack: ExitStack) -> tuple[socket.socket, str] | None:
    """Returns a socket to which engines report, and its address; None if it can be in no folder.

    stack: removes both at its end
    """
    for parent in (None, *_SHORT):  # the address of such a socket has 107 bytes at most, and TMPDIR may have more
        with ExitStack() as undo, suppress(OSError):
            folder = undo.enter_context(tempfile.TemporaryDirectory(prefix="ps-", dir=parent))
            reports, address = undo.enter_context(socket.socket(*_REPORTS)), f"{folder}/version"
            reports.bind(address)
            reports.setblocking(False)
            stack.enter_context(undo.pop_all())
            return reports, address
    return None


def reported(reports: socket.socket) -> int | None:
    """Returns the lowest version that engines have reported; None: none has."""
    versions = []
    with suppress(BlockingIOError):
        while True:
            versions.append(int(reports.recv(32)))
    return min(versions, default=None)
