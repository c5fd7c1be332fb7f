"""Hugging Face transformers in a small HTTP server, with a job's newest weights. Needs `transformers`."""

from ps_worker.engines.huggingface import FollowingModels, GenerationServer, main

__all__ = ["FollowingModels", "GenerationServer"]

if __name__ == "__main__":
    main()
