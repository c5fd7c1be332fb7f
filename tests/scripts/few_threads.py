"""Runs a command whose user may have so many threads: `few_threads.py N COMMAND [WORDS]`.

Root has no such limit: there the command runs as another user, of whom there is no other process, who may read all.
"""

from __future__ import annotations

import os
import resource
import sys

_FIRST_USER = 100_000


def main() -> None:
    """Sets the limit, and becomes the command."""
    most, command = int(sys.argv[1]), sys.argv[2:]
    if os.getuid() == 0:
        reads = "+dac_override,+dac_read_search"
        other = f"--reuid={_FIRST_USER + os.getpid()}", f"--inh-caps={reads}", f"--ambient-caps={reads}"
        command = ["setpriv", *other, *command]
    resource.setrlimit(resource.RLIMIT_NPROC, (most, most))
    os.execvp(command[0], command)


main()
