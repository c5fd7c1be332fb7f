"""Who follows a job's weights under chaos: readers, and a relay through which most of them read.

They are killed and stopped as servers and workers are, and started again. What each reader saw is in its ledger, and is
judged when the trial is over.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.chaos.cluster import free_ports
from tests.chaos.ledger import Ledger, Lines
from tests.chaos.oracle import Violation
from tests.chaos.processes import Kept, send

STOP_SECONDS = 10.0
KILL_SECONDS = 0.5  # at most, from a kill's time to the kill
HALF = "two versions in one reading"
FELL = "a version fell unsaid"
UNEQUAL = "unequal bytes of one version"
ENDED = "a reader ended by itself"


@dataclass(frozen=True)
class Seen:
    """An edition that a reader has had in its model.

    restores: the rollbacks that its feed had told of before the reading; told: those once it had begun
    buckets:  of each tensor, its timeline, its version, and the CRC-32 of its bytes in the model
    readings: how often this life has read anything by then
    """

    at: float
    run: str
    version: int
    restores: int
    told: int
    readings: int
    buckets: tuple[tuple[int, int, int], ...]


@dataclass
class ReaderLife:
    """What one reader process saw.

    born:  when it began
    ended: when it ended by itself, and why; None: it has not said so
    """

    number: int
    slot: int
    born: float = 0.0
    ended: tuple[float, str] | None = None
    seen: list[Seen] = field(default_factory=list)
    violations: list[Violation] = field(default_factory=list)


class ReaderLedger(Ledger):
    """A reader's file."""

    def read(self, seen: Seen) -> None:
        """Writes down an edition that is in the model."""
        about = {"run": seen.run, "version": seen.version, "restores": seen.restores, "told": seen.told}
        self._write(**about, readings=seen.readings, buckets=seen.buckets)


def judge_readers(lives: Iterable[ReaderLife]) -> list[Violation]:
    """What is wrong with what readers saw: in each life, and between all of them."""
    found: list[Violation] = []
    known: dict[tuple[Any, ...], tuple[int, int]] = {}  # a bucket's bytes, and who has seen them first
    for life in lives:
        found += [*life.violations, *_falls(life)]
        for seen in life.seen:
            for bucket, (timeline, version, checksum) in enumerate(seen.buckets):
                first, other = known.setdefault((seen.run, bucket, timeline, version), (checksum, life.number))
                if first != checksum:
                    where = {"bucket": bucket, "version": version, "timeline": timeline, "at": seen.at}
                    found.append(Violation(UNEQUAL, f"reader lives {other} and {life.number}", where))
    return found


def judge_ends(lives: Sequence[ReaderLife], kills: Iterable[tuple[int, float]], until: float) -> list[Violation]:
    """What is wrong with how readers ended: the job goes on for all that is done to them and to servers.

    kills: the slot of each reader that was killed, and when
    until: when the job began to end, and readers with it
    """
    found: list[Violation] = []
    for number, life in enumerate(lives):
        where = {"life": life.number, "slot": life.slot}
        following = next((other for other in lives[number + 1 :] if other.slot == life.slot), None)
        if life.ended is not None:
            at, why = life.ended
            if at < until:
                found.append(Violation(ENDED, why, {**where, "at": at}))
        elif following is not None and not life.violations:
            times = [at for slot, at in kills if slot == life.slot]
            if not any(life.born - KILL_SECONDS <= at <= following.born for at in times):
                found.append(Violation(ENDED, "without a word", where))
    return found


def _falls(life: ReaderLife) -> Iterator[Violation]:
    for before, after in zip(life.seen, life.seen[1:], strict=False):
        is_told = after.told > before.restores or after.run != before.run
        if after.version < before.version and not is_told:
            where = {"life": life.number, "slot": life.slot, "at": after.at}
            yield Violation(FELL, f"version {after.version} came after {before.version}", where)


class Audience:
    """Readers of one job, by slot, and a relay. Slot 0 reads from the servers, the others from the relay."""

    def __init__(self, server: str, folder: Path, count: int) -> None:
        """folder: of the trial, with its `task.json`"""
        self._folder, self.count = folder, count
        relay = f"127.0.0.1:{free_ports(1)}"
        words = ["ps_server", "relay", "--upstream", server, "--port", relay.rpartition(":")[2], "--metrics-port", "0"]
        self._relays = [Kept(words, {}, folder / "relay.log")] if count else []
        self._readers = [
            Kept(["tests.chaos.reader", str(folder), str(slot), relay if slot else server], {}, folder / "readers.log")
            for slot in range(count)
        ]
        self._lines = Lines(folder / "readers")
        self._lives: dict[int, ReaderLife] = {}

    def signal(self, to: str, victim: int, number: int) -> list[int]:
        """Sends a reader or the relay a signal, and returns the processes that it reached: one or none."""
        kept = (self._readers if to == "reader" else self._relays)[victim]
        pid = kept.pid
        return [pid] if pid is not None and send(pid, number) else []

    def lives(self) -> Sequence[ReaderLife]:
        """Returns all lives of all readers, as far as they have written."""
        for number, line in self._lines.new():
            life = self._lives.setdefault(number, ReaderLife(number, line.get("rank", 0), line["at"]))
            if "event" in line:
                life.ended = line["at"], f"{line['event']}: {line['said']}"
            elif "version" in line:
                buckets = tuple((timeline, version, checksum) for timeline, version, checksum in line["buckets"])
                about = line["run"], line["version"], line["restores"], line["told"], line["readings"]
                life.seen.append(Seen(line["at"], *about, buckets))
            elif "violation" in line:
                where = {**line["violation"]["where"], "life": number, "at": line["at"]}
                life.violations.append(Violation(line["violation"]["kind"], line["violation"]["said"], where))
        return [life for _, life in sorted(self._lives.items())]

    def all_read(self, since: float, version: int = 0) -> bool:
        """Whether each reader had a new edition after a moment, and has had this version."""
        ready = {
            life.slot
            for life in self.lives()
            if any(seen.at > since for seen in life.seen) and any(seen.version >= version for seen in life.seen)
        }
        return len(ready) == self.count

    @property
    def readings(self) -> int:
        """How often readers have read."""
        return sum(life.seen[-1].readings for life in self.lives() if life.seen)

    @property
    def editions(self) -> int:
        """How many different editions they have had."""
        return len({(seen.run, seen.version, seen.buckets) for life in self.lives() for seen in life.seen})

    def logs(self) -> str:
        """What the relay and the readers have written."""
        files = (self._folder / name for name in ("relay.log", "readers.log"))
        return "".join(file.read_text(errors="replace") for file in files if file.exists())

    def close(self) -> None:
        """Stops all of them."""
        for kept in (*self._readers, *self._relays):
            kept.end(STOP_SECONDS)
