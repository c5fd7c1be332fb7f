"""Stand-ins of vLLM and SGLang, which need GPUs: what the adapters of ps_worker/engines call of them.

tests/feed/test_engine_interfaces.py holds them against facts from the engines' sources.
"""

from __future__ import annotations

import json
import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from safetensors import safe_open
from torch import nn

# -- vLLM ------------------------------------------------------------------------------------------------------------

A, B = TypeVar("A"), TypeVar("B")


class TransferEngine(ABC, Generic[A, B]):
    """The stand-in of WeightTransferEngine."""

    init_info_cls: type[A]
    update_info_cls: type[B]

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: nn.Module) -> None:
        self.config, self.vllm_config, self.device, self.model = config, vllm_config, device, model
        self.model_config = vllm_config.model_config

    def parse_init_info(self, init_dict: dict[str, Any]) -> A:
        return self.init_info_cls(**init_dict)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.update_info_cls(**update_info))

    @abstractmethod
    def init_transfer_engine(self, init_info: A) -> None: ...

    @abstractmethod
    def start_weight_update(self) -> None: ...

    @abstractmethod
    def finish_weight_update(self) -> None: ...

    @abstractmethod
    def receive_weights(self, update_info: B) -> None: ...

    @abstractmethod
    def shutdown(self) -> None: ...

    @staticmethod
    @abstractmethod
    def trainer_send_weights(iterator: Iterator[Any], trainer_args: Any) -> None: ...


class Factory:
    """The stand-in of WeightTransferEngineFactory."""

    _registry: dict[str, type[Any]] = {}  # noqa: RUF012  # as vLLM has it

    @classmethod
    def register_engine(cls, name: str, engine: type[Any], class_name: str | None = None) -> None:
        assert name not in cls._registry
        cls._registry[name] = engine


class Group:
    """The stand-in of the group of an engine's workers; each is a thread here."""

    world_size = 2

    def __init__(self) -> None:
        self._ranks = threading.local()
        self._handed = [queue.SimpleQueue[Any]() for _ in range(self.world_size)]

    def enter(self, rank: int) -> None:
        self._ranks.own = rank

    @property
    def rank_in_group(self) -> int:
        return int(self._ranks.own)

    def broadcast_object(self, obj: Any = None, src: int = 0) -> Any:
        if self.rank_in_group == src:
            for rank in {*range(self.world_size)} - {src}:
                self._handed[rank].put(obj)
            return obj
        return self._handed[self.rank_in_group].get(timeout=60)

    def broadcast(self, input_: torch.Tensor, src: int = 0) -> torch.Tensor:
        return input_.copy_(self.broadcast_object(input_, src))


class EngineModel(nn.Module):
    """The stand-in of vLLM's model: it takes a checkpoint's tensors, and fuses them as it likes."""

    def __init__(self) -> None:
        super().__init__()
        self.loaded: dict[str, torch.Tensor] = {}
        self.is_reloading = False

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        assert self.is_reloading
        self.loaded.update((name, tensor.clone()) for name, tensor in weights)


class InProcess:
    """The stand-in of `vllm.LLM` before 0.27: what `update` calls of it."""

    def __init__(self, workers: Any) -> None:
        self._workers = workers

    def start_weight_update(self) -> None:
        self._call("start_weight_update")

    def update_weights(self, request: dict[str, Any]) -> None:
        self._call("update_weights", request["update_info"])

    def finish_weight_update(self) -> None:
        self._call("finish_weight_update")

    def _call(self, method: str, *arguments: Any) -> None:
        said = self._workers.call(method, *arguments)
        if any(said):
            raise RuntimeError(said[0])


class Labelled(InProcess):
    """From 0.27 on, vLLM has a label of its weights."""

    label = "default"

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        super().finish_weight_update()
        self.label = self.label if weight_version is None else weight_version

    def get_weight_version(self) -> str:
        return self.label


# -- SGLang ----------------------------------------------------------------------------------------------------------

FIELDS = {"model_path", "load_format", "abort_all_requests", "weight_version", "flush_cache"}  # of a request


class Engine(ThreadingHTTPServer):
    """The stand-in of an SGLang server: the two routes that matter, and the answers that 0.5.23 gives there."""

    daemon_threads = True

    def __init__(self, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), Routes)
        self.weights: dict[str, torch.Tensor] = {}
        self.weight_version = "default"
        self.refuses = ""
        self.updates = 0
        self.first_told = ""  # the version that it says first
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def load(self, folder: Path) -> None:
        assert json.loads((folder / "config.json").read_text()) == {"model_type": "tiny"}
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        for name, file in index["weight_map"].items():
            with safe_open(folder / file, "pt") as opened:
                self.weights[name] = opened.get_tensor(name)

    def stop(self) -> None:
        self.shutdown()
        self.server_close()


class Routes(BaseHTTPRequestHandler):
    server: Engine

    def do_GET(self) -> None:
        assert self.path == "/model_info"
        self.server.first_told = self.server.first_told or self.server.weight_version
        self._answer(200, {"model_path": "/models/tiny", "weight_version": self.server.weight_version})

    def do_POST(self) -> None:
        assert self.path == "/update_weights_from_disk"
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert asked.keys() <= FIELDS
        if self.server.refuses:
            self._answer(400, {"success": False, "message": self.server.refuses, "num_paused_requests": 0})
            return
        self.server.load(Path(asked["model_path"]))
        self.server.weight_version = asked["weight_version"]
        self.server.updates += 1
        self._answer(200, {"success": True, "message": "Succeeded to update model weights.", "num_paused_requests": 0})

    def _answer(self, code: int, answer: dict[str, Any]) -> None:
        text = json.dumps(answer).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, format: str, *arguments: Any) -> None: ...
