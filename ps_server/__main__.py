"""The program `ps-server`, also as `python -m ps_server`."""

import sys

from ps_server.cli import main
from ps_server.ops.glibc import stream_large_copies


def program() -> None:
    """Runs `main`. A shard may first start its program again, with other settings of the C library."""
    if sys.argv[1:2] == ["shard"]:
        stream_large_copies()
    main()


if __name__ == "__main__":
    program()
