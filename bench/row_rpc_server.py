"""A server of torch's RPC. Workers call functions of bench.row_rpc, which must not be this process's main module."""

from __future__ import annotations

import os

from bench.row_rpc import serve

if __name__ == "__main__":
    serve()
    os._exit(0)  # RPC's own end waits for all others
