"""vLLM follows a job: an engine for its weight transfer. Needs `vllm`."""

from ps_worker.engines.loaded_versions import update
from ps_worker.engines.vllm import BACKEND, FeedTransferEngine, FollowInfo, WantedVersion, register

__all__ = ["BACKEND", "FeedTransferEngine", "FollowInfo", "WantedVersion", "register", "update"]
