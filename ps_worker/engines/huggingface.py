"""Hugging Face transformers in a small HTTP server, with a job's newest weights. Needs `transformers`, 5 or later.

    python -m ps_torch.engines.huggingface --server trainer:50051 --model /models/llama --port 8000
    curl -si localhost:8000/generate -d '{"ids": [[1, 2, 3]], "max_new_tokens": 16}'

Every answer says its version in the header `x-model-version`. A request reads one version. There is no answer before
the first weights of training have come: of --model nothing but the configuration is read.
"""

from __future__ import annotations

import argparse
import json
import queue
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from ps_protocol.errors import PSError
from ps_protocol.tensors import TORCH_DTYPES
from ps_protocol.wire_formats import EDITION_WIRES
from ps_worker.followed_model import WeightFeed, subscribe

LARGEST_REQUEST = 2**20  # bytes
MOST_TOKENS = 4096  # the longest answer


class FollowingModels:
    """Models that follow a job. Each request has one for itself, and so gets the newest weights though others are busy.

    Args:
        feed: From `ps_torch.subscribe`.
        make: Returns a model of transformers. Models of one version share its memory. An idle model keeps the version
            that it read last, so the one used last is used next.
        count: Models, and so requests at a time.
        timeout: Seconds to wait for the first weights.

    Raises:
        PSError: There are no weights, or they do not fit.
    """

    def __init__(self, feed: WeightFeed, make: Callable[[], Any], count: int = 2, timeout: float = 600.0) -> None:
        self.feed = feed
        self._free: queue.LifoQueue[Any] = queue.LifoQueue()
        for _ in range(count):
            self._free.put(feed.load(make().eval(), timeout))

    @contextmanager
    def reading(self) -> Iterator[tuple[Any, int]]:
        """A `with` block with a model that does not change in it, and the model's version."""
        model = self._free.get()
        try:
            with self.feed.reading(model) as version:
                yield model, version
        finally:
            self._free.put(model)

    def generate(self, ids: list[list[int]], **settings: Any) -> tuple[list[list[int]], int]:
        """Returns what a model's `generate` returns for tokens, and its version. Raises ValueError, PSError."""
        if not ids or not all(isinstance(each, list) and len(each) == len(ids[0]) > 0 for each in ids):
            raise ValueError("ids must be rows of tokens, all of one length")
        with self.reading() as (model, version):
            size = model.get_input_embeddings().num_embeddings
            if not all(isinstance(token, int) and 0 <= token < size for row in ids for token in row):
                raise ValueError(f"a token must be a whole number from 0 to {size - 1}")
            tokens = torch.tensor(ids, device=model.device)
            found = model.generate(tokens, attention_mask=torch.ones_like(tokens), **settings)
        return found.tolist(), version


class GenerationServer(ThreadingHTTPServer):
    """POST /generate takes {"ids": [[...]], "max_new_tokens": 16, "temperature": 0.7}; GET /healthz."""

    daemon_threads = True

    def __init__(self, address: tuple[str, int], models: FollowingModels, late: float = 10.0) -> None:
        super().__init__(address, _Request)
        self.models, self.late = models, late


class _Request(BaseHTTPRequestHandler):
    server: GenerationServer
    timeout = 30

    def do_GET(self) -> None:
        feed = self.server.models.feed
        is_late = feed.age > self.server.late and not feed.ended and feed.trouble is not None
        body = {"version": feed.version, "behind": feed.behind, "trouble": str(feed.trouble) if feed.trouble else None}
        self._answer(503 if is_late else 200, body, feed.version)

    def do_POST(self) -> None:
        newest = self.server.models.feed.version
        try:
            size = int(self.headers.get("Content-Length") or 0)
            if not 0 < size <= LARGEST_REQUEST:
                raise ValueError(f"expected a body of up to {LARGEST_REQUEST} bytes, got {size}")
            asked = json.loads(self.rfile.read(size))
            count, temperature = int(asked.get("max_new_tokens", 16)), float(asked.get("temperature", 0.0))
            if not 1 <= count <= MOST_TOKENS or not 0 <= temperature < 100:
                raise ValueError(f"expected 1 to {MOST_TOKENS} tokens at a temperature from 0 to 100")
            settings: dict[str, Any] = {"max_new_tokens": count, "do_sample": temperature > 0}
            if temperature > 0:
                settings["temperature"] = temperature
            ids, version = self.server.models.generate(asked["ids"], **settings)
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
            self._answer(400, {"error": str(error) or repr(error)}, newest)
        except Exception as error:
            self._answer(503 if isinstance(error, PSError) else 500, {"error": str(error) or repr(error)}, newest)
        else:
            self._answer(200, {"ids": ids, "version": version}, version)

    def _answer(self, code: int, body: dict[str, Any], version: int) -> None:
        text = json.dumps(body).encode() + b"\n"
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("x-model-version", str(version))
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Writes no line for a request."""


def main() -> None:
    """Serves until it is interrupted."""
    parser = argparse.ArgumentParser(description="Generate with a job's newest weights.")
    parser.add_argument("--server", help="HOST:PORT of the coordinator (PS_SERVER)")
    parser.add_argument("--job", help="the job's name (PS_JOB, default)")
    parser.add_argument("--wire", default="bfloat16", choices=EDITION_WIRES, help="(%(default)s)")
    parser.add_argument("--model", required=True, help="a name or directory with the model's configuration")
    parser.add_argument("--models", type=int, default=2, help="requests that are computed at a time (%(default)s)")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (%(default)s)")
    parser.add_argument("--port", type=int, default=8000, help="0: any (%(default)s)")
    arguments = parser.parse_args()
    config, dtype = AutoConfig.from_pretrained(arguments.model), TORCH_DTYPES[arguments.wire]
    with subscribe(arguments.server, arguments.job, wire=arguments.wire) as feed:
        models = FollowingModels(feed, lambda: AutoModelForCausalLM.from_config(config, dtype=dtype), arguments.models)
        with GenerationServer((arguments.host, arguments.port), models) as server:
            host, port = server.server_address[:2]
            print(f"serving version {feed.version} at http://{host!s}:{port}", flush=True)
            server.serve_forever()


if __name__ == "__main__":
    main()
