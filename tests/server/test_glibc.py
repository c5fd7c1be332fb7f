"""What a server asks of the C library."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

from ps_server.ops.glibc import streaming

NAME = "glibc.cpu.x86_non_temporal_threshold"


def test_what_the_environment_says_already_stays() -> None:
    found = streaming({"A": "b"})
    assert found == {"A": "b", "GLIBC_TUNABLES": f"{NAME}=0x100000"}
    assert streaming(found) == found
    assert streaming({"GLIBC_TUNABLES": "glibc.malloc.check=1"})["GLIBC_TUNABLES"] == (
        f"glibc.malloc.check=1:{NAME}=0x100000"
    )
    mine = {"GLIBC_TUNABLES": f"{NAME}=0x7"}
    assert streaming(mine) == mine


@pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc" or platform.machine() != "x86_64", reason="needs glibc on an x86-64 processor"
)
def test_a_program_that_does_not_stream_is_started_anew_with_its_arguments() -> None:
    program = (
        "import os, sys; from ps_server.ops.glibc import stream_large_copies; print(os.getpid(), flush=True); "
        "stream_large_copies(); print(sys.argv[1:], os.environ['GLIBC_TUNABLES'])"
    )
    environment = {name: value for name, value in os.environ.items() if name != "GLIBC_TUNABLES"}
    command = [sys.executable, "-c", program, "a b", "--c"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60, check=True)
    first, again, said = done.stdout.splitlines()
    assert first == again, "the same process"
    assert said == f"['a b', '--c'] {NAME}=0x100000"
