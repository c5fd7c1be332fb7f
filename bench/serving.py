"""`python -m bench.serving NAME`: a server of a peer, in a process whose main module is this one.

Workers name the server's functions by module and name, so that module must not be the process's main one.
"""

from __future__ import annotations

import os
import sys

from bench import peer_ray, peer_rpc, row_rpc

SERVERS = {"peer_ray": peer_ray.serve, "peer_rpc": peer_rpc.serve, "row_rpc": row_rpc.serve}

if __name__ == "__main__":
    SERVERS[sys.argv[1]]()
    os._exit(0)  # RPC's own end waits for all others
