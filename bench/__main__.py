"""`python -m bench NAME`: one benchmark; `all`: each that this machine can run; `report`: the page of all results.

A result is a line of JSON, on standard output or in --json FILE.
"""

from __future__ import annotations

import argparse
import importlib
import json
import shlex
import sys
from pathlib import Path
from types import ModuleType

from bench.report import write_page
from bench.results import Result
from bench.runs import merged

NAMES = (
    "round",
    "train",
    "peers",
    "straggler",
    "network",
    "lowcomm",
    "scale",
    "crowd",
    "flood",
    "memory",
    "idle",
    "rows",
    "restore",
    "recovery",
    "launches",
    "feed",
    "groups",
    "chaos",
)
PRIVATE = (
    "--addresses",
    "--exec",
    "--interface",
    "--python",
    "--directory",
    "--cold-rows-dir",
    "--json",
    "--picture",
    "--folder",
    "--folder-of-files",
    "--keep",
    "--where",
)


def modules() -> dict[str, ModuleType]:
    """The benchmarks, by name: each has `flags`, `run`, `draw` and SHORT, the settings of its short form."""
    return {
        name: importlib.import_module("tests.chaos.benchmark" if name == "chaos" else f"bench.{name}") for name in NAMES
    }


def parser(short: bool) -> argparse.ArgumentParser:
    """The command line; `short` makes the short form's settings the defaults."""
    root = argparse.ArgumentParser(
        prog="python -m bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = root.add_subparsers(dest="name", required=True, metavar="NAME")
    for name, module in modules().items():
        text = module.__doc__ or ""
        command = commands.add_parser(
            name,
            help=text.splitlines()[0],
            description=text,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.flags(command)
        if short:
            command.set_defaults(**module.SHORT)
        command.add_argument("--short", action="store_true", help="smaller and faster; flags beside it still count")
        command.add_argument("--runs", type=int, default=1, help="one after the other (%(default)s)")
        command.add_argument("--json", type=Path, metavar="FILE", help="where to write results (standard output)")
        command.add_argument("--picture", type=Path, metavar="FILE", help="where to draw them, as PNG or SVG")
    for name, text in (("all", "run each benchmark, then write the page"), ("report", "write the page of results")):
        command = commands.add_parser(name, help=text)
        command.add_argument("--short", action="store_true", help="the short form of each")
        command.add_argument("--folder", type=Path, default=Path("docs/benchmarks"), help="of results (%(default)s)")
    return root


def run(arguments: argparse.Namespace, command: str) -> None:
    """Runs one benchmark; writes its results, each with the command that makes it, and its picture."""
    module = modules()[arguments.name]
    numbers = [{"run": number} for number in range(1, arguments.runs + 1)] if arguments.runs > 1 else [{}]
    lines: list[Result] = [
        {**line, **number, "command": command} for number in numbers for line in module.run(arguments)
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    if arguments.json is None:
        sys.stdout.write(text)
    else:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(text)
    if arguments.picture is not None:
        module.draw(merged(lines), arguments.picture)
    if any(line.get("violations") for line in lines):
        raise SystemExit("promises were broken: see the violations above")


def run_all(folder: Path, short: bool, words: list[str]) -> None:
    """Each benchmark in turn; `network` only if hosts were given, by the same flags as its own."""
    for name in NAMES:
        given = [name, *(["--short"] if short else []), *(words if name == "network" else [])]
        if name == "network" and not words:
            print("network: left out, because it needs hosts: see python -m bench network --help", file=sys.stderr)
            continue
        print(f"{name} ...", file=sys.stderr, flush=True)
        output = ["--json", str(folder / f"{name}.jsonl"), "--picture", str(folder / f"{name}.png")]
        run(parser(short).parse_args([*given, *output]), command_line(given))


def command_line(words: list[str]) -> str:
    """The command as anyone can give it: without what only names places on this machine or its network."""
    kept, rest = ["python -m bench"], iter(words)
    for word in rest:
        name, equals, _ = word.partition("=")
        if name not in PRIVATE:
            kept.append(shlex.quote(word))
            continue
        if not equals:
            next(rest, None)  # its value
        if name in ("--addresses", "--exec"):
            kept.append(f"{name} ...")
    return " ".join(kept)


def main() -> None:
    """Runs what the command line says."""
    words = sys.argv[1:]
    arguments, rest = parser("--short" in words).parse_known_args(words)
    if arguments.name == "all":
        run_all(arguments.folder, arguments.short, rest)
        write_page(arguments.folder, modules())
    elif rest:
        parser(False).error(f"unrecognized arguments: {' '.join(rest)}")
    elif arguments.name == "report":
        write_page(arguments.folder, modules())
    else:
        run(arguments, command_line(words))


if __name__ == "__main__":
    main()
