"""Heartbeats while C code keeps the GIL: a small child process of the worker sends them instead of the worker's thread.

The thread that sends heartbeats needs the GIL, and C code may keep that for long: `json.load` or `pickle.load` of a
large file, a sort of many objects. The worker is computing then, and must not lose its place. The child process is
started, and has its first message, before `prepare` returns. The thread sends it a message at each turn. If the next
turn is late, the child repeats the thread's last heartbeat (heartbeat_child.py). It ends with the worker, and sends
nothing while the worker is stopped. A thread that has no turn for `busy_seconds` counts as hung: then the lease runs
out.

A thread without the GIL would have to be written in C, and compiled. The child process takes 5 MB of its own memory (11
MB with shared pages) and 40 ms of a core. With gRPC it would take 14 MB (31 MB) and twice the time (measured).
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import subprocess
import sys
import time
from pathlib import Path

from ps_protocol.v1 import membership_pb2
from ps_worker.cluster.options import JobOptions

log = logging.getLogger("ps_worker")

CHILD = Path(__file__).with_name("heartbeat_child.py")
AGAIN_SECONDS = 60.0  # the least time until a child that has ended is started again
_METHOD = membership_pb2.DESCRIPTOR.services_by_name["MembershipService"].methods_by_name["Heartbeat"]


class HeartbeatProcess:
    """The child process beside one worker. The first `turn` starts it, in the thread that joins; all others are the
    heartbeat thread's.

    pause: seconds between two turns of the thread
    """

    def __init__(self, options: JobOptions, pause: float) -> None:
        self._options, self._pause = options, pause
        self._process: subprocess.Popen[bytes] | None = None
        self._next = 0.0  # not started before

    def turn(self, message: bytes) -> None:
        """Reports to the child that the thread is alive. message: the heartbeat that the thread is about to send"""
        options = self._options
        if not options.busy_seconds or not sys.executable or options.server is None:
            return
        if self._process is None or self._process.poll() is not None:
            if time.monotonic() < self._next:
                return
            self._next = time.monotonic() + AGAIN_SECONDS
            self.close()
            self._start()
        self._tell(message.hex().encode())

    def _start(self) -> None:
        command = [sys.executable, "-I", "-S", str(CHILD)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        try:
            self._process = subprocess.Popen(command, **pipes)  # type: ignore[call-overload]
        except OSError as error:  # no process left: the worker does without it
            log.info("no process for heartbeats could be started: %s", error)
            return
        assert self._process is not None
        assert self._process.stdin is not None
        os.set_blocking(self._process.stdin.fileno(), False)
        self._tell(json.dumps(self._plan()).encode())

    def _plan(self) -> dict[str, object]:
        """Returns the first message to the child: the fields of heartbeat_child.Plan."""
        access = self._options.access
        files = None if access.tls is None else {"cert": access.tls.cert, "key": access.tls.key, "ca": access.tls.ca}
        token = access.token() if access.token is not None and access.token_file is None else None
        return {
            "parent": os.getpid(),
            "address": self._options.server,
            "path": f"/{_METHOD.containing_service.full_name}/{_METHOD.name}",
            "pause": self._pause,
            "busy": self._options.busy_seconds,
            "token": token,
            "token_file": None if access.token_file is None else str(access.token_file.absolute()),
            "tls": None if files is None else {name: path and str(path.absolute()) for name, path in files.items()},
        }

    def _tell(self, line: bytes) -> None:
        if self._process is not None and self._process.stdin is not None:
            # It has ended, or is stopped and its pipe is full: the thread beats all the same.
            with contextlib.suppress(OSError):
                os.write(self._process.stdin.fileno(), line + b"\n")

    def close(self) -> None:
        """Ends the process, if there is one."""
        process, self._process = self._process, None
        if process is not None:
            assert process.stdin is not None
            process.stdin.close()
            process.kill()  # it holds nothing
            process.wait()
