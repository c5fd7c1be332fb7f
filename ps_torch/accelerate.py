"""Accelerate on parameter servers: a `connect` that has each worker see itself as one process, and a `join` for groups
of processes. Needs `accelerate`."""

from ps_worker.accelerate import connect, join

__all__ = ["connect", "join"]
