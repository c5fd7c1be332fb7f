"""ASGI middleware for an engine's HTTP server: every answer says its version, and there is none before the first."""

from ps_worker.engines.answers import TellsVersion

__all__ = ["TellsVersion"]
