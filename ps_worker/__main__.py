"""`python -m ps_worker` is `ps-worker`."""

from ps_worker.cli import main

if __name__ == "__main__":
    main()
