"""Other ways to bring a trained model's weights to a process that reads them: the peers of a feed.

A trainer and a loader, each a process. The trainer takes steps as `bench.training` does, with a local optimizer, and
publishes its weights in bfloat16 after each. The loader has a model of that type and puts each version into it. The
first line of a process' input is its Peer, each line after it {"count": N}: the trainer answers when its steps ended,
the loader when the weights of each were in the model, both by the machine's own clock and with a checksum of what they
have at the end.

folder:  a safetensors file in a folder that both have; the loader looks every millisecond whether there is one
copied:  such a file is sent over a socket, written at the loader's host, and loaded
gloo:    torch.distributed broadcasts each tensor over gloo, into the loader's model
sockets: the same bytes over a plain socket, into one buffer: what the kernel moves, without any model
"""

from __future__ import annotations

import json
import os
import socket
import struct
import sys
import time
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils.data import DataLoader

from bench.computing import compute
from bench.feed_reader import Twin
from bench.results import MIB
from bench.talk import own_output
from bench.training import Task, build

MESSAGE = 4 * MIB
LOOK_SECONDS = 0.001
LENGTH_BYTES = 8

State = dict[str, Tensor]


@dataclass(frozen=True)
class Peer:
    """The settings of a trainer and its loader.

    kind:   see above
    task:   the model and its training; task.pauses are the seconds between two steps
    port:   where the trainer listens for its loader
    folder: for files, of each process' host
    """

    kind: str
    task: Task
    port: int
    folder: str


class Publisher(ABC):
    """The trainer's end of a way for weights."""

    @abstractmethod
    def publish(self, state: State, number: int) -> None:
        """Called by the trainer: has the loader get these weights."""


class Way(Publisher):
    """One way for weights, as the trainer and the loader take it."""

    def __init__(self, peer: Peer, model: nn.Module) -> None:
        """model: the loader's, or the trainer's"""
        self.peer, self.model = peer, model

    @abstractmethod
    def load(self, number: int) -> State:
        """Called by the loader: puts the next weights into its model, and returns what they are."""


class Folder(Way):
    """A file that is renamed when it is whole."""

    def publish(self, state: State, number: int) -> None:
        path = self._path(number)
        save_file(state, path.with_suffix(".tmp"))
        os.replace(path.with_suffix(".tmp"), path)

    def load(self, number: int) -> State:
        path = self._path(number)
        while not path.exists():
            time.sleep(LOOK_SECONDS)
        return self._loaded(path)

    def _loaded(self, path: Path) -> State:
        self.model.load_state_dict(load_file(path), assign=True)  # without another copy
        path.unlink()
        return dict(self.model.state_dict())

    def _path(self, number: int) -> Path:
        return Path(self.peer.folder) / f"{self.peer.kind}-{number}.safetensors"


class Copied(Folder):
    """A file that is saved, and then copied to another host."""

    def __init__(self, peer: Peer, model: nn.Module) -> None:
        super().__init__(peer, model)
        self._connection = connected(peer.port)

    def publish(self, state: State, number: int) -> None:
        super().publish(state, number)
        path = self._path(number)
        with path.open("rb") as file:
            self._connection.sendall(path.stat().st_size.to_bytes(LENGTH_BYTES, "little"))
            self._connection.sendfile(file)
        path.unlink()

    def load(self, number: int) -> State:
        length = bytearray(LENGTH_BYTES)
        receive(self._connection, memoryview(length))
        left, path = int.from_bytes(length, "little"), self._path(number).with_suffix(".copy")
        buffer = memoryview(bytearray(MESSAGE))
        with path.open("wb") as file:
            while left:
                count = self._connection.recv_into(buffer[: min(left, MESSAGE)])
                file.write(buffer[:count])
                left -= count
        return self._loaded(path)


class Gloo(Way):
    """A broadcast of each tensor."""

    def __init__(self, peer: Peer, model: nn.Module) -> None:
        super().__init__(peer, model)
        dist.init_process_group("gloo")

    def publish(self, state: State, number: int) -> None:
        self._broadcast(state)

    def load(self, number: int) -> State:
        state = dict(self.model.state_dict())
        self._broadcast(state)
        return state

    def _broadcast(self, state: State) -> None:
        for tensor in state.values():
            dist.broadcast(tensor.view(torch.uint8), 0)


class Sockets(Way):
    """Bytes alone."""

    def __init__(self, peer: Peer, model: nn.Module) -> None:
        super().__init__(peer, model)
        self._connection = connected(peer.port)
        self._landing = {name: torch.empty_like(each) for name, each in model.state_dict().items()}

    def publish(self, state: State, number: int) -> None:
        for tensor in state.values():
            self._connection.sendall(tensor.view(torch.uint8).numpy().data)

    def load(self, number: int) -> State:
        for tensor in self._landing.values():
            receive(self._connection, tensor.view(torch.uint8).numpy().data)
        return self._landing


WAYS: dict[str, type[Way]] = {"folder": Folder, "copied": Copied, "gloo": Gloo, "sockets": Sockets}


def connected(port: int) -> socket.socket:
    """Returns the connection of trainer and loader."""
    address = os.environ["MASTER_ADDR"], port
    if os.environ["RANK"] == "0":
        with socket.create_server(address) as listener:
            connection, _ = listener.accept()
    else:
        connection = _dialled(address)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def _dialled(address: tuple[str, int]) -> socket.socket:
    while True:
        try:
            connection = socket.create_connection(address)
        except ConnectionRefusedError:  # the trainer is still importing
            time.sleep(0.05)
            continue
        # Where nobody listens yet at a port of this host, the kernel may give that port to the connecting socket: TCP
        # then connects the socket to itself, and the trainer could not listen there.
        if connection.getsockname() != connection.getpeername():
            return connection
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # the port is free at once
        connection.close()


def receive(connection: socket.socket, into: memoryview) -> None:
    """Receives until a buffer is full. Raises EOFError where the other end has closed the connection before."""
    while len(into):
        count = connection.recv_into(into)
        if not count:
            raise EOFError(f"the connection was closed {len(into)} bytes too early")
        into = into[count:]


# -- the processes ---------------------------------------------------------------------------------------------------


def trainer(task: Task, way: Publisher) -> Iterator[tuple[float, State]]:
    """Trains; yields when each step ended, and the weights that were published after it."""
    built, optimizer, data, loss_of = build(task)
    number = 0
    while True:
        for x, y in DataLoader(data, task.batch, drop_last=True):
            for pause in task.pauses[:1]:
                compute("wait", pause)
            loss_of(built(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            ended = time.perf_counter()
            state = {name: each.bfloat16() for name, each in built.state_dict().items()}
            way.publish(state, number)
            number += 1
            yield ended, state


def loader(way: Way) -> Iterator[tuple[float, State]]:
    """Loads; yields when each version was in the model, and what it is."""
    number = 0
    while True:
        state = way.load(number)
        yield time.perf_counter(), state
        number += 1


def checksum(state: State) -> int:
    """Returns a number that two processes have in common only if they have the same weights."""
    found = 0
    for name in sorted(state):
        found = zlib.crc32(state[name].view(torch.uint8).numpy().data, found)
    return found


def followed(running: Iterator[tuple[float, State]], count: int) -> dict[str, Any]:
    """Takes `count` steps; returns when each ended, and the checksum of the weights after the last."""
    times: list[float] = []
    state: State = {}
    for _ in range(count):
        ended, state = next(running)
        times.append(ended)
    return {"times": times, "checksum": checksum(state)}


def main() -> None:
    """Follows orders until there are no more."""
    say = own_output()
    told: dict[str, Any] = json.loads(sys.stdin.readline())
    peer = Peer(**{**told, "task": Task(**told["task"])})
    is_trainer = os.environ["RANK"] == "0"
    model = Twin(peer.task.parameters, peer.task.vector)
    way = WAYS[peer.kind](peer, model)
    running = trainer(peer.task, way) if is_trainer else loader(way)
    say({"ready": True})
    for line in sys.stdin:
        say(followed(running, json.loads(line)["count"]))


if __name__ == "__main__":
    main()
