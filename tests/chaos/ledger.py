"""What each worker process writes down as it goes: a file of JSON lines a life, which kill -9 does not lose.

    {"rank", "pid", "at"}                       its first line
    {"begin": step, "at"}                       a step is about to be pushed
    {"done": step, "clock", "at", "seen"}       it was acknowledged; the counts that had changed, by row, one a bucket
    {"late": step, "clock", "at"}               it is pushed again, for that clock: the worker has lost its place
    {"event": name, "said", "at"}               joined, joined again, held, or the error that it ends with
    {"violation": {...}, "at"}                  what the oracle found

Times are seconds on the machine's monotonic clock, the same for every process on it.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.chaos.oracle import Life, Violation


class Ledger:
    """A new life's file, for writing. `number` is the first that no life in the folder has had."""

    def __init__(self, folder: Path, rank: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.number = len(list(folder.iterdir()))
        while True:
            try:
                path = folder / f"{self.number:04d}.jsonl"
                self._file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_APPEND)
                break
            except FileExistsError:
                self.number += 1
        self._write(rank=rank, pid=os.getpid())

    def begin(self, step: int) -> None:
        """A step is about to be pushed."""
        self._write(begin=step)

    def done(self, step: int, clock: int, seen: dict[int, list[int]]) -> None:
        """A step was acknowledged."""
        self._write(done=step, clock=clock, seen=seen)

    def late(self, step: int, clock: int) -> None:
        """A step is about to be pushed again, for another clock."""
        self._write(late=step, clock=clock)

    def event(self, name: str, said: str = "") -> None:
        """Something else."""
        self._write(event=name, said=said)

    def violation(self, found: Violation) -> None:
        """The oracle found something."""
        self._write(violation=found.data())

    def _write(self, **line: Any) -> None:
        os.write(self._file, (json.dumps({**line, "at": time.monotonic()}) + "\n").encode())


@dataclass
class Record:
    """What is known of one life, from its file.

    steps:  when each acknowledged step was
    events: (when, name, said)
    """

    life: Life
    pid: int
    born: float
    averaged: bool
    steps: list[float] = field(default_factory=list)
    events: list[tuple[float, str, str]] = field(default_factory=list)
    violations: list[Violation] = field(default_factory=list)

    def has(self, event: str) -> bool:
        """Whether it has written down an event of that name."""
        return any(name == event for _, name, _ in self.events)


class Lines:
    """The lines of all files of a folder, read as they grow."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open: dict[int, tuple[Any, bytes]] = {}

    def new(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yields the lines since the last time, each with the number of its life."""
        for path in sorted(self._folder.iterdir()) if self._folder.exists() else ():
            number = int(path.stem)
            if number not in self._open:
                self._open[number] = (path.open("rb"), b"")
            file, rest = self._open[number]
            *lines, rest = (rest + file.read()).split(b"\n")
            self._open[number] = (file, rest)
            yield from ((number, json.loads(line)) for line in lines)

    def close(self) -> None:
        """Closes the files."""
        for file, _ in self._open.values():
            file.close()


class Ledgers:
    """All lives of a folder, read as they grow."""

    def __init__(self, folder: Path, averaged: bool) -> None:
        self._lines = Lines(folder)
        self._averaged = averaged  # steps are told apart by their clock then
        self.records: dict[int, Record] = {}

    def read(self) -> list[Record]:
        """What there is now, by life."""
        for number, line in self._lines.new():
            self._take(number, line)
        return [record for _, record in sorted(self.records.items())]

    def _take(self, number: int, line: dict[str, Any]) -> None:
        if "pid" in line:
            self.records[number] = Record(Life(number, line["rank"]), line["pid"], line["at"], self._averaged)
            return
        record = self.records[number]
        if "begin" in line:
            record.life.attempted.append(line["begin"])
        elif "late" in line:
            record.life.late.append((line["late"], line["clock"]))
        elif "done" in line:
            record.life.done[line["done"]] = line["clock"]
            record.steps.append(line["at"])
            record.life.at[line["done"]] = line["at"]
            if not self._averaged:  # each step is held against one update there and then
                counts = {int(row): counts for row, counts in line["seen"].items()}
                record.life.seen.append((line["clock"], counts, line["at"]))
        elif "event" in line:
            record.events.append((line["at"], line["event"], line["said"]))
        elif "violation" in line:
            where = {**line["violation"]["where"], "life": number, "at": line["at"]}
            record.violations.append(Violation(line["violation"]["kind"], line["violation"]["said"], where))

    def close(self) -> None:
        """Closes the files."""
        self._lines.close()
