"""Answer predictions over HTTP while training goes on: the rows of examples/clicks.py, as they are learnt.

    ps-server up --shards 2
    ps-worker run --server 127.0.0.1:50051 --workers 2 --mode ssp:4 examples/clicks.py --samples 20_000_000
    python examples/predict.py --server 127.0.0.1:50051
    curl -s localhost:8080/predict -d '{"ids": [[1, 2, 3, 4, 5, 6, 7, 8]]}'

This process is no worker: training neither knows it nor waits for it. It has a copy of all rows, and gets what changes
about once a second; the lines marked (ps) are all that this takes. With --directory it begins with the rows that it had
when it ended, also where the servers are away. The dense part of the model, here one number, is no table and changes
little: --model takes it from a file that the training script, or `ps-server export`, has left.
"""

from __future__ import annotations

import argparse
import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

import ps_torch as ps

FIELDS = 8  # ids of a sample
LARGEST_REQUEST = 2**20  # bytes
LATE_SECONDS = 30.0  # after which /healthz says that predictions do not follow training


class Model:
    """The factorisation machine of clicks.py, whose rows are in a feed.

    dense: a file with the other weights; None: they are zeros
    """

    def __init__(self, feed: ps.RowFeed, dense: Path | None) -> None:
        self.feed, self.bias = feed, torch.zeros(1)
        if dense is not None:
            with safe_open(dense, "pt") as file:  # it may have rows, too, of the time when it was written
                self.bias = file.get_tensor("bias")

    def probabilities(self, ids: Tensor) -> Tensor:
        """Returns how likely a click is: [n, FIELDS] ids to [n]. Ids that training has not met are as rows begin."""
        rows = self.feed.rows(ids)  # (ps)
        vectors = rows[:, :, 1:]
        pairs = vectors.sum(1).square() - vectors.square().sum(1)
        return (self.bias + rows[:, :, 0].sum(1) + 0.5 * pairs.sum(1)).sigmoid()


class Service(ThreadingHTTPServer):
    """POST /predict takes {"ids": [[...], ...]}; GET /healthz says whether predictions follow training."""

    daemon_threads = True

    def __init__(self, address: tuple[str, int], model: Model) -> None:
        super().__init__(address, Request)
        self.model = model


class Request(BaseHTTPRequestHandler):
    """One request."""

    server: Service
    timeout = 10

    def do_GET(self) -> None:
        """Answers /healthz."""
        if self.path != "/healthz":
            self._answer(404, {"error": f"there is no {self.path}; POST to /predict, or GET /healthz"})
            return
        feed = self.server.model.feed
        follows = feed.age < LATE_SECONDS  # (ps)
        trouble = None if follows else str(feed.trouble or "nothing has come for long")
        self._answer(200 if follows else 503, {"version": feed.version, "rows": len(feed), "trouble": trouble})

    def do_POST(self) -> None:
        """Answers /predict."""
        if self.path != "/predict":
            self._answer(404, {"error": f"there is no {self.path}; POST to /predict"})
            return
        try:
            ids = self._ids()
        except ValueError as error:
            self._answer(400, {"error": str(error)})
            return
        model = self.server.model
        version = model.feed.version  # before the rows are read: they are of this version at least
        self._answer(200, {"probabilities": model.probabilities(ids).tolist(), "version": version})

    def _ids(self) -> Tensor:
        size = int(self.headers.get("Content-Length") or 0)
        if not 0 < size <= LARGEST_REQUEST:
            raise ValueError(f"expected a body of up to {LARGEST_REQUEST} bytes, got {size}")
        body = json.loads(self.rfile.read(size))
        found = body.get("ids") if isinstance(body, dict) else None
        wanted = f'expected {{"ids": [[{FIELDS} whole numbers of 64 bits], ...]}}'
        try:
            ids = torch.tensor(found)
        except (TypeError, ValueError, RuntimeError, OverflowError) as error:
            raise ValueError(f"{wanted} ({error})") from None
        if ids.dtype != torch.int64 or ids.dim() != 2 or ids.shape[1] != FIELDS:
            raise ValueError(f"{wanted}, got {list(ids.shape)} of {str(ids.dtype).removeprefix('torch.')}")
        return ids

    def _answer(self, code: int, answer: dict[str, Any]) -> None:
        text = json.dumps(answer).encode() + b"\n"
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Writes no line for a request."""


def parse_arguments() -> argparse.Namespace:
    """Parses the arguments. Options that are not given come from PS_* variables, as for a training script."""
    parser = argparse.ArgumentParser(description="Answer predictions of clicks while training goes on.")
    parser.add_argument("--server", help="HOST:PORT of the coordinator (PS_SERVER)")
    parser.add_argument("--job", help="the job's name (PS_JOB, default)")
    parser.add_argument("--table", default="rows", help="the table's name in the model (%(default)s)")
    parser.add_argument("--model", type=Path, help="model.safetensors with the weights that are no rows")
    parser.add_argument("--directory", type=Path, help="where to keep the rows for the next start")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (%(default)s)")
    parser.add_argument("--port", type=int, default=8080, help="0: any (%(default)s)")
    parser.add_argument("--wait", type=float, default=600.0, help="seconds to wait for the rows (%(default)s)")
    return parser.parse_args()


def main() -> None:
    """Runs the example; see the top of this file."""
    arguments = parse_arguments()
    with ps.RowFeed(  # (ps)
        arguments.table, arguments.server, arguments.job, directory=arguments.directory
    ) as feed:
        version = feed.wait_for(timeout=arguments.wait)  # (ps)
        service = Service((arguments.host, arguments.port), Model(feed, arguments.model))
        host, port = service.server_address[:2]
        print(f"predicting at http://{host!s}:{port}/predict with {len(feed)} rows of version {version}", flush=True)
        try:
            service.serve_forever()
        except KeyboardInterrupt:
            service.server_close()


if __name__ == "__main__":
    main()
