"""What else a feed is: the bytes that an update changes, answers of a relay, requests while weights change, memory."""

from __future__ import annotations

import argparse
import socket
import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from dataclasses import asdict, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader

from bench.cluster import HERE, START_SECONDS, Group, servers, trainers
from bench.feed_reader import Followed
from bench.feed_training import host_of_others, relays
from bench.feed_ways import EDITIONS_IN_MEMORY, ELEMENT_BYTES, OURS, WAYS, reader_result
from bench.machine import cpu_seconds
from bench.results import MIB, THREADS, Result, median_ms, result
from bench.talk import answer, end, own_output
from bench.training import Task, adamw
from examples.char_gpt import CharGPT, Shape, Windows, library_text
from ps_protocol.changes import apply_change, encode_change
from ps_protocol.tensors import bytes_of

SECONDS = 300.0  # for an answer
BUCKET_BYTES = 4 * MIB
BLOCK = 64
CLIENTS = 2  # of a relay, at the same time
ALONE = "without editions"
MOST_COUNTED = 256  # updates that bfloat16 tells apart


# -- changes ---------------------------------------------------------------------------------------------------------


def changes(arguments: argparse.Namespace) -> list[Result]:
    """Calculates: what an update of a GPT by AdamW changes of its weights in bfloat16, at several learning rates."""
    torch.set_num_threads(THREADS)
    torch.manual_seed(0)
    model = CharGPT(Shape(arguments.changes_layers, arguments.changes_width // BLOCK, arguments.changes_width, BLOCK))
    batches = iter(DataLoader(Windows(library_text(), BLOCK), arguments.batch, shuffle=True, drop_last=True))
    # Weights that begin with zero, as biases, change with every step as long as they are small.
    deque(_trained(model, adamw(model.parameters()), batches, arguments.trained), maxlen=0)
    rates = map(float, arguments.learning_rates.split(","))
    return [_changes(arguments, deepcopy(model), batches, rate) for rate in rates]


def _changes(arguments: argparse.Namespace, model: CharGPT, batches: Iterator[Any], rate: float) -> Result:
    parts, seconds, size = [], [], 0
    for before, after in pairwise(_versions(arguments, model, batches, rate)):
        size, sent, began = before.numel() * ELEMENT_BYTES, 0, time.perf_counter()
        buckets = [each.split(BUCKET_BYTES // ELEMENT_BYTES) for each in (before, after)]
        for base, new in zip(*buckets, strict=True):
            change = encode_change(bytes_of(base), bytes_of(new), ELEMENT_BYTES, sparse=True)
            if change is None:
                sent += bytes_of(new).nbytes
                continue
            sent += len(change.payload)
            made = apply_change(change.payload, bytes_of(base), ELEMENT_BYTES, sparse=change.is_sparse)
            if made.data != bytes_of(new):
                raise SystemExit("wrong result: a change does not lead to the weights that it was made for")
        seconds.append(time.perf_counter() - began)
        parts.append(sent / size)
    return result(
        "feed",
        f"AdamW, learning rate {rate:g}",
        wire="bfloat16",
        workers=1,
        shards=0,
        size=2 * size,
        ms=median_ms(seconds),
        ratios={"bfloat16 bytes": statistics.median(parts)},
        scenario="changed bytes of an update",
        learning_rate=rate,
        gigabytes_per_second=round(size / 1e9 / statistics.median(seconds), 2),
    )


def _versions(arguments: argparse.Namespace, model: CharGPT, batches: Iterator[Any], rate: float) -> Iterator[Tensor]:
    """The weights of a model after each of some steps, in bfloat16, once AdamW has warmed up."""
    optimizer = torch.optim.AdamW(model.parameters(), rate, fused=True)
    deque(_trained(model, optimizer, batches, arguments.changes_warm_up), maxlen=0)
    for _ in _trained(model, optimizer, batches, arguments.updates + 1):
        yield torch.cat([each.detach().flatten() for each in model.parameters()]).bfloat16()


def _trained(model: CharGPT, optimizer: torch.optim.Optimizer, batches: Iterator[Any], steps: int) -> Iterator[None]:
    """Takes steps; yields after each."""
    for _ in range(steps):
        x, y = next(batches)
        F.cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
        yield


# -- 304 -------------------------------------------------------------------------------------------------------------


def unchanged(arguments: argparse.Namespace) -> list[Result]:
    """Measures: how often a relay answers 304 in a second of a core, beside Python's own HTTP server."""
    task = Task("vectors", "sync", parameters=int(arguments.relayed_mb * 1e6) // ELEMENT_BYTES, batch=2)
    with (
        servers([HERE]) as cluster,
        trainers([HERE], replace(task, server=cluster.address)),
        relays(host_of_others(0), cluster.address, 1, "--jobs", f"{task.job}=bfloat16", downloads=True) as [relay],
    ):
        path = f"/jobs/{task.job}/latest.safetensors?wire=bfloat16"
        ours = _asked(relay.downloads, path, relay.process.pid, arguments.seconds)
    peer = HERE.start("bench.feed_costs")
    try:
        theirs = _asked(f"127.0.0.1:{answer(peer, START_SECONDS)}", "/", peer.pid, arguments.seconds)
    finally:
        end([peer])
    rates = {"ours": ours, "http.server": theirs}
    return [
        result(
            "feed",
            name,
            workers=0,
            shards=int(name == "ours"),
            size=2 * ELEMENT_BYTES * task.parameters,
            ms=round(1e3 * CLIENTS / a_second, 4),
            ratios={"http.server": a_core / theirs[1]},
            scenario=f"304 answers to {CLIENTS} connections",
            answers_a_second=round(a_second),
            answers_per_core=round(a_core),
        )
        for name, (a_second, a_core) in rates.items()
    ]


def _asked(address: str, path: str, pid: int, seconds: float) -> tuple[float, float]:
    """Asks for what has not changed, over several connections; returns the answers a second, and a second of a core."""
    before = cpu_seconds([pid])
    with ThreadPoolExecutor(CLIENTS) as pool:
        counts = list(pool.map(lambda _: _ask(address, path, seconds), range(CLIENTS)))
    used = cpu_seconds([pid]) - before
    return sum(counts) / seconds, sum(counts) / max(used, 0.01)  # a clock tick is 10 ms


def _ask(address: str, path: str, seconds: float) -> int:
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port))) as connection:
        request = f"HEAD {path} HTTP/1.1\r\nHost: localhost\r\n"
        head = _answer(connection, f"{request}\r\n")
        tag = next(line.partition(": ")[2] for line in head.splitlines() if line.lower().startswith("etag:"))
        asked = f"{request.replace('HEAD', 'GET')}If-None-Match: {tag}\r\n\r\n"
        count, over = 0, time.monotonic() + seconds
        while time.monotonic() < over:
            head = _answer(connection, asked)
            if " 304 " not in head.partition("\r\n")[0]:
                raise SystemExit(f"wrong result: expected 304, got {head!r}")
            count += 1
        return count


def _answer(connection: socket.socket, request: str) -> str:
    connection.sendall(request.encode())
    found = b""
    while not found.endswith(b"\r\n\r\n"):
        more = connection.recv(4096)
        if not more:
            raise SystemExit(f"wrong result: a connection ended after {found!r}")
        found += more
    return found.decode()


class _NotModified(BaseHTTPRequestHandler):
    """Answers as a relay does to those who have the newest edition."""

    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._say(200)

    def do_GET(self) -> None:
        self._say(304)

    def _say(self, code: int) -> None:
        self.send_response(code)
        self.send_header("ETag", '"1-1"')
        self.end_headers()

    def log_message(self, format: str, *arguments: object) -> None:
        """Says nothing."""


def main() -> None:
    """Serves until there is no more input."""
    say = own_output()
    server = ThreadingHTTPServer(("127.0.0.1", 0), _NotModified)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    say(server.server_address[1])
    sys.stdin.read()
    server.shutdown()


# -- a reader --------------------------------------------------------------------------------------------------------


def requests(arguments: argparse.Namespace) -> list[Result]:
    """Measures: requests in a loop while weights change beneath them, in both ways, and while training stands still."""
    if arguments.seconds > MOST_COUNTED * arguments.pause_ms / 1e3:
        raise SystemExit(f"--seconds must be less than {MOST_COUNTED} of --pause-ms: bfloat16 counts no further")
    return [line for way in WAYS for line in _requests(arguments, way)]


def _requests(arguments: argparse.Namespace, way: str) -> list[Result]:
    elements, pause = int(arguments.mb * 1e6) // ELEMENT_BYTES, arguments.pause_ms / 1e3
    task = Task("counted", "sync", parameters=elements, batch=2, pauses=(pause,))
    found = {}
    with servers([HERE] * arguments.shards) as cluster:
        followed = Followed([cluster.address], model=elements, shared_directory=WAYS[way])
        with (
            trainers([HERE], replace(task, server=cluster.address)) as training,
            Group([HERE], "bench.feed_reader", [asdict(followed)]) as reader,
        ):
            reader.answers(SECONDS)
            reader.run(SECONDS, open=True)
            for name in (ALONE, way):
                reader.tell(answer=arguments.seconds)
                if name == way:
                    training.run(SECONDS, seconds=arguments.seconds - pause)
                [found[name]] = reader.answers(SECONDS)
    return [
        reader_result(
            "requests of a model that follows",
            name,
            arguments.shards,
            2 * ELEMENT_BYTES * elements,
            round(1e3 * seen["median"], 3),
            ratios={ALONE: seen["longest"] / found[ALONE]["longest"]},
            worst_ms=round(1e3 * seen["longest"], 3),
            stalled_ms=round(1e3 * seen["entry"], 3),
            requests=seen["requests"],
            editions=seen["versions"],
            torn=seen["torn"],
            **({"violations": seen["torn"]} if seen["torn"] else {}),
        )
        for name, seen in found.items()
        if name != ALONE or way == OURS  # it is the same
    ]


def memory(arguments: argparse.Namespace) -> list[Result]:
    """Measures: the peak of a process that follows in messages, with whole editions and with changes."""
    elements = int(arguments.mb * 1e6) // ELEMENT_BYTES
    task = Task("vectors", "sync", parameters=elements, batch=2, lr=1e-6, pauses=(arguments.pause_ms / 1e3,))
    held, lines = EDITIONS_IN_MEMORY * ELEMENT_BYTES * elements, []
    with (
        servers([HERE] * arguments.shards) as cluster,
        trainers([HERE], replace(task, server=cluster.address)) as training,
    ):
        version = task.warmup
        for system, wants in (("whole editions", False), ("changes", True)):
            followed = Followed([cluster.address], model=elements, changes=wants)
            with Group([HERE], "bench.feed_reader", [asdict(followed)]) as reader:
                reader.answers(SECONDS)
                reader.run(SECONDS, open=True)
                version += arguments.editions
                reader.tell(until=version)
                training.run(SECONDS, steps=arguments.editions)
                [answered] = reader.answers(SECONDS)
            sizes = answered["memory"]
            lines.append(
                reader_result(
                    "memory of a reader's process",
                    system,
                    arguments.shards,
                    2 * ELEMENT_BYTES * elements,
                    None,
                    ratios={"two copies": (sizes["peak"] - sizes["imports"]) / held},
                    not_measured="it is about memory",
                    peak_bytes=sizes["peak"],
                    imports_bytes=sizes["imports"],
                    held_bytes=held,
                )
            )
    return lines


if __name__ == "__main__":
    main()
