"""The options that benchmarks share: each says once what it is, and a benchmark names its default."""

from __future__ import annotations

import argparse

MEANINGS = {
    "batch": "blocks of 64 bytes in a worker's batch",
    "bucket_kib": "of one bucket on the wire",
    "layers": "of the model; 8 with a width of 512: 25M parameters",
    "mib": "of the model's weights",
    "pause_ms": "computing of a step",
    "rounds": "measured rounds",
    "seconds": "that are measured each time",
    "seed": "of what is drawn at random",
    "shards": "",
    "steps": "in a turn; the first is not counted",
    "transport": "how buckets travel: shm, tcp, grpc, or several",
    "turns": "of each system",
    "width": "of the model, a multiple of 64",
    "wire": "of gradients and weights: float32, bfloat16, float16, or several",
    "workers": "",
}


def add(parser: argparse.ArgumentParser, **defaults: float | str | None) -> None:
    """Adds options by their defaults, of whose type their values are; without one the server chooses a whole number."""
    for name, default in defaults.items():
        text = f"{MEANINGS[name]} ({'what the server chooses' if default is None else '%(default)s'})".strip()
        kind = int if default is None else type(default)
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, default=default, help=text)


def add_only(parser: argparse.ArgumentParser, named_by: str) -> None:
    """Adds --only, which selects some of our systems. named_by: what the name of a system has"""
    text = f"of our systems: those whose {named_by} have this text; repeat it for more"
    parser.add_argument("--only", action="append", metavar="TEXT", help=text)


def is_chosen(arguments: argparse.Namespace, name: str) -> bool:
    """Whether --only selects a system by its name: without it all are."""
    return any(text in name for text in arguments.only or [""])
