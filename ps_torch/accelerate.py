"""Accelerate on parameter servers: a `connect` that has each worker see itself as one process. Needs `accelerate`."""

from ps_worker.accelerate import connect

__all__ = ["connect"]
