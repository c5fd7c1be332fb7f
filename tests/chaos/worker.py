"""One worker under chaos: a training script whose weights are the counting oracle, and whose ledger survives it.

`ps-worker run` starts it, or a test that names its rank too, with a folder that has a `task.json`. It trains until the
file `stop` names a clock, and holds its place at that clock. When there is a file `save`, rank 0 saves the weights of
the job as a script does. The worker leaves when there is a file `leave`.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import torch

from ps_protocol.messages.workers import JoinResult

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # where this script is started as a file

import ps_worker
from ps_worker.strategies.unfinished import Fate
from tests.chaos.ledger import Ledger
from tests.chaos.oracle import Cells, Rules, Shape, Witness

LOOK_SECONDS = 0.05
SAVED = "saved.pt"  # what rank 0 has saved
SPARE = 2


@dataclass(frozen=True)
class Task:
    """What all workers of one job do.

    pause:      seconds that stand in for computing a step
    transports: of the slots, in turn: a worker's slot is its number among those of its launch
    routes:     by slot, the addresses to call instead of the servers' own
    elastic:    the job has no fixed world size
    """

    mode: str
    job: str
    server: str
    workers: int
    pause: float
    shape: Shape
    transports: tuple[str, ...] = ("shm", "tcp", "grpc")
    connect_timeout: float = 60.0
    routes: dict[str, dict[str, str]] = field(default_factory=dict)
    elastic: bool = False

    @property
    def most(self) -> int:
        """How many workers a mean may have: in an elastic job a dead one counts until its lease is over."""
        return self.workers + (SPARE if self.elastic else 0)

    @classmethod
    def read(cls, folder: Path) -> Task:
        """The task in a folder."""
        found = json.loads((folder / "task.json").read_text())
        return cls(**{**found, "shape": Shape(**found["shape"]), "transports": tuple(found["transports"])})


def take_routes(routes: dict[str, str]) -> None:
    """Has every channel and data connection of this process made to another address: of a link that can be cut."""
    real, connect = grpc.insecure_channel, socket.create_connection

    def routed(address: str, *arguments: Any, **options: Any) -> Any:
        return real(routes.get(address, address), *arguments, **options)

    def connected(address: tuple[str, int], *arguments: Any, **options: Any) -> socket.socket:
        host, _, port = routes.get(f"{address[0]}:{address[1]}", f"{address[0]}:{address[1]}").rpartition(":")
        return connect((host, int(port)), *arguments, **options)

    grpc.insecure_channel = routed
    socket.create_connection = connected


def incarnation_of(session: ps_worker.Session) -> int:
    """Which of its places in the job a session has."""
    return place_of(session).identity.incarnation


def place_of(session: ps_worker.Session) -> JoinResult:
    """A session's place in the job. Users have no need to know, so that it is not public."""
    return session._strategy._training.participation.connection.place  # type: ignore[attr-defined]


class Late(logging.Handler):
    """Writes down when the step at hand is pushed again, because the worker has lost its place.

    step: its number
    """

    def __init__(self, ledger: Ledger) -> None:
        super().__init__()
        self._ledger, self.step = ledger, 0

    def emit(self, record: logging.LogRecord) -> None:
        """Reads what the worker logs before it does so."""
        if isinstance(record.args, tuple) and Fate.AGAIN.value in record.args:
            self._ledger.late(self.step, int(record.args[2]) + 1)  # type: ignore[call-overload]


class Stop:
    """The clock at which everybody stops, once it is known."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "stop"

    def reached(self, clock: int) -> bool:
        """Whether this clock is it, or past it."""
        return self._path.exists() and clock >= int(self._path.read_text())


def main() -> None:
    """Trains, in the folder that the command line names: as the rank that it names too, or as the launcher says."""
    folder, ranks = Path(sys.argv[1]), [int(word) for word in sys.argv[2:]]
    slot = ranks[0] if ranks else int(os.environ["PS_LOCAL_RANK"])
    torch.set_num_threads(1)
    task = Task.read(folder)
    ledger = Ledger(folder / "lives", slot)
    take_routes(task.routes.get(str(slot), {}))
    place = (task.server, task.mode, task.job, slot, task.workers) if ranks else ()
    transport = task.transports[slot % len(task.transports)]
    try:
        with ps_worker.connect(*place, connect_timeout=task.connect_timeout, transport=transport) as session:
            train(task, session, ledger, Stop(folder))
            ledger.event("held", str(session.clock))
            while not (folder / "leave").exists():
                if session.is_main and (folder / "save").exists() and not (folder / SAVED).exists():
                    save(session, folder / SAVED, ledger.number)
                time.sleep(LOOK_SECONDS)
    except BaseException as error:
        ledger.event(type(error).__name__, str(error))
        raise
    ledger.event("left")


def save(session: ps_worker.Session, path: Path, number: int) -> None:
    """Saves the weights of the job. number: of this life, so that two that take themselves for rank 0 write apart"""
    torch.save(session.global_weights(), path.with_suffix(f".{number}"))
    path.with_suffix(f".{number}").rename(path)


def train(task: Task, session: ps_worker.Session, ledger: Ledger, stop: Stop) -> None:
    """Steps until everybody stops; looks at the weights after each."""
    model = Cells(task.shape)
    model, optimizer = session.prepare(model, model.optimizer(), bucket_bytes=task.shape.bucket_bytes)
    rules = Rules.of(task.mode, task.most, task.shape)
    # A rank of an elastic job may go to another worker while the first still has a step under way.
    witness = Witness(rules, session.rank if rules.averaged and not task.elastic else ledger.number)
    ledger.event("joined", str(session.clock))
    late = Late(ledger)
    logging.getLogger("ps_worker").addHandler(late)
    counts = torch.zeros(task.shape.buckets, task.shape.rows)
    step = 0
    while not stop.reached(session.clock):
        time.sleep(task.pause)
        step += 1
        number = session.clock + 1 if rules.averaged else step
        incarnation = incarnation_of(session)
        ledger.begin(number)
        late.step = number
        witness.mark(model, number)
        optimizer.step()
        if incarnation_of(session) != incarnation:  # it lost its place, and with it perhaps this step
            ledger.event("joined again", str(session.clock))
            witness.lost_track()
            continue
        view = model.view()
        for violation in witness.check(view, number):
            ledger.violation(violation)
        grown = (view[:, :, 0] != counts).any(dim=0).nonzero().flatten().tolist()
        counts = view[:, :, 0]
        seen = {row: [int(count) for count in counts[:, row].tolist()] for row in grown}
        ledger.done(number, session.clock, {} if rules.averaged else seen)


if __name__ == "__main__":
    main()
