"""SGLang follows a job: a process beside it has it load each version from disk."""

from ps_worker.engines.sglang import DiskFollower, main

__all__ = ["DiskFollower"]

if __name__ == "__main__":
    main()
