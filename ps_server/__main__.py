"""The program `ps-server`, also as `python -m ps_server`."""

import sys

from ps_server.cli import main
from ps_server.ops.glibc import stream_large_copies


def program() -> None:
    """Runs `main` in a process of its own: a shard may start it anew."""
    if sys.argv[1:2] == ["shard"]:
        stream_large_copies()
    main()


if __name__ == "__main__":
    program()
