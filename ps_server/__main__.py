"""`python -m ps_server` is `ps-server`."""

from ps_server.cli import main

if __name__ == "__main__":
    main()
