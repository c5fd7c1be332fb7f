"""The Trainer of Hugging Face on parameter servers. Needs `transformers` and `accelerate`."""

from ps_worker.huggingface import OnServers, PsTrainer, connect

__all__ = ["OnServers", "PsTrainer", "connect"]
