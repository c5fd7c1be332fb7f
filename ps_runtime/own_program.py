"""Starts another program of this project: the installed one, whatever is in the current folder.

`python -m ps_server` puts the current folder first on the child's sys.path. A file `grpc.py` there, in a shared folder
or a cloned repository, would run as the user who starts the servers, with their keys and tokens at hand; a user's own
`queue.py` would break the servers by accident.
"""

from __future__ import annotations

import sys

# Python 3.10 has no -P, which leaves the current folder out.
_FOR_3_10 = (
    "import sys; del sys.path[:1]; import runpy; runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"
)


def own_program(package: str, *arguments: str) -> list[str]:
    """Returns Python's arguments that run an installed package of this project as a program.

    package: `ps_server` or `ps_worker`
    """
    runs = ["-P", "-m"] if sys.version_info >= (3, 11) else ["-c", _FOR_3_10]
    return [*runs, package, *arguments]
