"""Serve a model over HTTP while it trains: the GPT of examples/char_gpt.py, with the weights that training has now.

    ps-server up --shards 2
    ps-worker run --server 127.0.0.1:50051 --workers 2 examples/char_gpt.py --steps 2000
    python examples/serve.py --server 127.0.0.1:50051
    curl -si localhost:8000/generate --json '{"prompt": "def ", "length": 80}'

`python examples/serve.py --demo` does all of this on one machine: it starts servers and workers, too, and ends them.
With `--ray` all of it are actors of Ray: serve_actors.py.

This process is no worker: training neither knows it nor waits for it. The lines marked (ps) are all that this takes.
Every answer says in `x-model-version` how many updates its weights have. A request reads one version from its beginning
to its end, however often weights arrive meanwhile. If the trainer or the servers are gone, the last weights go on being
served, and /healthz says how old they are.
"""

from __future__ import annotations

import argparse
import os
import queue
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import uvicorn
from char_gpt import CharGPT, Shape, write_text
from demo import SCRIPT, await_server, running, terminate, threads
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field

import ps_torch as ps

VERSION = "x-model-version"


class Prompt(BaseModel):
    """What POST /generate takes."""

    prompt: str = Field("def ", min_length=1, max_length=10_000)
    length: int = Field(80, ge=1, le=1000)
    seed: int = Field(0, ge=0, lt=2**63)


class Text(BaseModel):
    """What POST /score takes."""

    text: str = Field(min_length=2, max_length=10_000)


# --- the model -------------------------------------------------------------------------------------------------------


class Served:
    """Models that follow training.

    Each request has one of them for itself, and so need not wait for another's end to get newer weights. Models of one
    version share its memory. An idle model keeps the version that it read last, so the one used last is used next.

    count:  models, and so requests that are computed at a time
    heads, block: as the model was trained; all else is seen in its weights
    """

    def __init__(self, feed: ps.WeightFeed, count: int, heads: int, block: int, wait: float) -> None:
        self.feed = feed
        self.since = time.monotonic()  # when the newest weights arrived
        self._free: queue.LifoQueue[CharGPT] = queue.LifoQueue()
        weights = feed.wait_for(timeout=wait)  # (ps)
        names = weights.names()
        layers = len({each[1] for name in names if (each := re.match(r"blocks\.(\d+)\.", name))})
        shape = Shape(layers, heads, weights.tensor("embedding.weight").shape[1], block)
        for _ in range(count):
            self._free.put(feed.load(CharGPT(shape, tied="head.weight" not in names)))  # (ps)
        threading.Thread(target=self._follow, name="arrivals", daemon=True).start()

    def _follow(self) -> None:
        for _ in self.feed:  # (ps)
            self.since = time.monotonic()

    @contextmanager
    def reading(self) -> Iterator[tuple[CharGPT, int]]:
        """Gives a model that does not change in the block, and its version."""
        model = self._free.get()
        try:
            with self.feed.reading(model) as version:  # (ps)
                yield model, version
        finally:
            self._free.put(model)


def trouble(served: Served, late: float, max_behind: int | None) -> str | None:
    """Returns why the model is too far behind training; None: it is not."""
    feed = served.feed
    if feed.ended:
        return None  # nothing newer will come
    # While training makes updates fast, there is always one that is on its way. Then weights arrive all the time.
    if feed.age > late and time.monotonic() - served.since > late:
        return f"nothing has come for {late:g} s: {feed.trouble or 'the servers do not answer'}"
    if max_behind is not None and feed.behind > max_behind:
        return f"{feed.behind} updates behind, more than {max_behind}"
    return None


# --- the service -----------------------------------------------------------------------------------------------------


def application(served: Served, late: float, max_behind: int | None) -> FastAPI:
    """Returns the service: POST /generate, POST /score, GET /healthz."""
    app = FastAPI(title="A GPT, while it trains")
    feed = served.feed

    @app.middleware("http")
    async def tell_version(request: Request, call: Callable[[Request], Awaitable[Response]]) -> Response:
        """Has every answer say a version: also those that read no weights, which say the newest."""
        answer = await call(request)
        answer.headers.setdefault(VERSION, str(feed.version))
        return answer

    @app.exception_handler(ps.PSError)
    async def not_now(request: Request, error: Exception) -> Response:
        """Answers where another job has taken the name, whose weights do not fit."""
        return JSONResponse({"detail": str(error)}, 503)

    # Plain functions: FastAPI runs them in threads, beside the loop that takes requests.
    @app.post("/generate")
    def generate(asked: Prompt, answer: Response) -> dict[str, Any]:
        with served.reading() as (model, version):
            text = "".join(write_text(model, asked.prompt, asked.length, asked.seed))
        answer.headers[VERSION] = str(version)
        return {"text": text, "version": version}

    @app.post("/score")
    def score(asked: Text, answer: Response) -> dict[str, Any]:
        """Says how surprising a text is to the model, in nats a byte: the loss that training lowers."""
        tokens = torch.tensor([list(asked.text.encode())])
        with served.reading() as (model, version), torch.no_grad():
            parts = tokens[0, 1:].split(model.shape.block)
            starts = range(0, tokens.shape[1] - 1, model.shape.block)
            losses = [
                F.cross_entropy(model(tokens[:, start : start + len(part)])[0], part, reduction="sum")
                for start, part in zip(starts, parts, strict=True)
            ]
        answer.headers[VERSION] = str(version)
        return {"loss": torch.stack(losses).sum().item() / (tokens.shape[1] - 1), "version": version}

    @app.get("/healthz")
    def healthz(answer: Response) -> dict[str, Any]:
        """Is 503 where the model is too far behind training. It goes on answering all the same."""
        why = trouble(served, late, max_behind)
        answer.status_code = 503 if why else 200
        return {
            "version": feed.version,
            "behind": feed.behind,
            "restores": feed.restores,
            "ended": feed.ended,
            "unchanged_seconds": round(time.monotonic() - served.since, 3),  # rises, too, where nobody trains
            "trouble": why or (str(feed.trouble) if feed.trouble else None),
        }

    return app


def words(arguments: argparse.Namespace) -> list[str]:
    """Returns the arguments of char_gpt.py with which --demo and --ray train."""
    shape = f"--heads={arguments.heads}", f"--block={arguments.block}"
    return ["--steps=2000", *shape, f"--out={arguments.out}", *arguments.training]


@contextmanager
def training(arguments: argparse.Namespace) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """Starts servers of two shards, and two workers that train the model; gives the servers' address and the workers'
    process. They end with the block.
    """
    signal.signal(signal.SIGTERM, terminate)
    signal.signal(signal.SIGHUP, terminate)
    out: Path = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    server = ["ps-server", "up", "--shards", "2", "--port", "0", "--metrics-port", "0"]
    with (out / "server.log").open("w") as log, running(server, stdout=log, stderr=subprocess.STDOUT) as process:
        address, page = await_server(process, out / "server.log")
        print(f"the servers are ready; watch the job in a browser, while it trains: {page}", flush=True)
        job = ["--job", arguments.job] if arguments.job else []
        workers = ["ps-worker", "run", "--server", address, "--workers", "2", *job, str(SCRIPT), *words(arguments)]
        share = os.environ | {"OMP_NUM_THREADS": threads(2)}
        with (
            (out / "workers.log").open("w") as said,
            running(workers, env=share, stdout=said, stderr=subprocess.STDOUT) as process,
        ):
            yield address, process


def await_weights(feed: ps.WeightFeed, workers: subprocess.Popen[bytes] | None, arguments: argparse.Namespace) -> None:
    """Waits for the first weights. Ends the script if the workers that --demo has started end before."""
    deadline = time.monotonic() + arguments.wait
    while workers is not None and time.monotonic() < deadline:
        code = workers.poll()
        with suppress(ps.PSError):
            feed.wait_for(timeout=1.0)
            return
        if code is not None:
            sys.exit(f"serve: the workers ended with code {code}; their log is {arguments.out / 'workers.log'}")


def serve(feed: ps.WeightFeed, arguments: argparse.Namespace) -> None:
    """Answers requests until this process is told to end."""
    served = Served(feed, arguments.models, arguments.heads, arguments.block, arguments.wait)
    app = application(served, arguments.late, arguments.max_behind)
    # Listens before the server runs, so that the line below tells the port and comes before the first request.
    with socket.create_server((arguments.host, arguments.port), backlog=128) as listening:
        host, port = listening.getsockname()[:2]
        print(f"serving version {feed.version} at http://{host}:{port}", flush=True)
        uvicorn.Server(uvicorn.Config(app, log_level="warning")).run(sockets=[listening])


def parse_arguments() -> argparse.Namespace:
    """Parses the arguments. Options that are not given come from PS_* variables, as for a training script."""
    parser = argparse.ArgumentParser(description="Serve the GPT of char_gpt.py while it trains.", allow_abbrev=False)
    parser.add_argument("--server", help="HOST:PORT of the coordinator (PS_SERVER)")
    parser.add_argument("--job", help="the job's name (PS_JOB, default)")
    parser.add_argument("--wire", default="bfloat16", help="element type of transfer: bfloat16, float16 or float32")
    parser.add_argument("--heads", type=int, default=Shape.heads, help="as the model was trained (%(default)s)")
    parser.add_argument("--block", type=int, default=Shape.block, help="as the model was trained (%(default)s)")
    parser.add_argument("--models", type=int, default=4, help="requests that are computed at a time (%(default)s)")
    parser.add_argument("--late", type=float, default=10.0, help="seconds until /healthz is 503 (%(default)s)")
    parser.add_argument("--max-behind", type=int, help="updates behind training at which /healthz is 503 (any number)")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (%(default)s)")
    parser.add_argument("--port", type=int, default=8000, help="0: any (%(default)s)")
    parser.add_argument("--wait", type=float, default=600.0, help="seconds to wait for the weights (%(default)s)")
    started = parser.add_mutually_exclusive_group()
    started.add_argument("--demo", action="store_true", help="start servers, and workers with all other flags, too")
    started.add_argument(
        "--ray", action="store_true", help="as --demo, as actors of Ray: of RAY_ADDRESS, or of its own"
    )
    parser.add_argument("--services", type=int, default=2, help="with --ray, at ports from --port on (%(default)s)")
    parser.add_argument("--out", type=Path, default=Path("runs/serve"), help="for what training leaves (%(default)s)")
    arguments, arguments.training = parser.parse_known_args()
    if arguments.training and not (arguments.demo or arguments.ray):
        parser.error(f"unrecognized arguments: {' '.join(arguments.training)}")
    return arguments


def main() -> None:
    """Runs the example; see the top of this file."""
    arguments = parse_arguments()
    if arguments.ray:
        # Ray would show one of several lines that differ in their numbers alone. It reads this when it is imported.
        os.environ.setdefault("RAY_DEDUP_LOGS_ALLOW_REGEX", "serving version")
        from serve_actors import run

        run(arguments, words(arguments))
        return
    with (
        training(arguments) if arguments.demo else nullcontext((arguments.server, None)) as (server, workers),
        ps.subscribe(server, arguments.job, wire=arguments.wire) as feed,  # (ps)
    ):
        await_weights(feed, workers, arguments)
        serve(feed, arguments)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
