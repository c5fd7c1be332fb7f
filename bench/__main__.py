"""`python -m bench round | train | straggler | network | scale`: see each with --help."""

from __future__ import annotations

import argparse
import importlib
import json

NAMES = ("round",)


def main() -> None:
    """Runs one benchmark and prints a line of JSON for each result."""
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    commands = parser.add_subparsers(dest="name", required=True)
    modules = {name: importlib.import_module(f"bench.{name}") for name in NAMES}
    for name, module in modules.items():
        module.flags(commands.add_parser(name, help=(module.__doc__ or "").splitlines()[0]))
    arguments = parser.parse_args()
    for line in modules[arguments.name].run(arguments):
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
