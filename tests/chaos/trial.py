"""One job from its first worker to its last, with faults or without, and what came of it."""

from __future__ import annotations

import contextlib
import heapq
import itertools
import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.chaos.cluster import Crew, Servers, read_weights
from tests.chaos.faults import KINDS, Arena, Fault, Plan
from tests.chaos.ledger import Ledgers, Record
from tests.chaos.links import Link
from tests.chaos.oracle import Rules, Violation, judge, missing, too_stale
from tests.chaos.worker import Task

LOOK_SECONDS = 0.05
START_SECONDS = 120.0
# Longer than any fault may hold up everybody, by far: beyond it a job counts as stuck.
PATIENCE_SECONDS = 45.0
QUIET_EVENTS = {"joined", "joined again", "held", "left"}


@dataclass
class Trace:
    """What happened in the window that counts, from `begun` to `ended`."""

    begun: float
    ended: float
    records: list[Record]
    faults: list[Fault]
    violations: list[Violation] = field(default_factory=list)

    def steps(self) -> list[tuple[float, int]]:
        """When each step of the window was acknowledged, and its rank."""
        return sorted(
            (at, record.life.rank) for record in self.records for at in record.steps if self.begun <= at <= self.ended
        )

    def useful(self) -> int:
        """Steps of the window that are in the weights: one that was undone and made again counts once."""
        return len(
            {
                (record.life.rank, number) if record.averaged else (-1 - record.life.number, number)
                for record in self.records
                for number, at in record.life.at.items()
                if self.begun <= at <= self.ended
            }
        )

    def missing(self) -> float:
        """Worker-seconds of the window in which a worker was not there, from its fault to its first step after it."""
        found = 0.0
        for fault in self.faults:
            back = self.back(fault)
            if fault.kind == "kill" or (KINDS[fault.kind].to == "worker" and fault.until > fault.at):
                found += min(self.ended, fault.at + back if back is not None else self.ended) - fault.at
        return found

    def back(self, fault: Fault) -> float | None:
        """Seconds from a fault's beginning until its victim's first step after its end; of a server's, the time
        for which nobody stepped."""
        if KINDS[fault.kind].to != "worker":
            return self.stall(fault)
        after = (at for at, rank in self.steps() if rank == fault.victim and at > fault.until)
        first = next(after, None)
        return None if first is None else first - fault.at

    def stall(self, fault: Fault) -> float:
        """The longest time in which none of the other workers finished a step, between this fault and the next."""
        following = min((other.at for other in self.faults if other.at > fault.at), default=self.ended)
        others = [at for at, rank in self.steps() if not fault.hits(rank)]
        before = [max((at for at in others if at <= fault.at), default=fault.at)]
        after = [next((at for at in others if at > following), following)]
        times = before + [at for at in others if fault.at < at <= following] + after
        return max(end - start for start, end in itertools.pairwise(times))

    def step_ms(self) -> float:
        """A worker's median time from one step to the next."""
        gaps = [end - start for record in self.records for start, end in itertools.pairwise(record.steps)]
        return round(1e3 * statistics.median(gaps), 2) if gaps else 0.0


class Stuck(Exception):
    """Nothing moves any more."""


class Trial:
    """Runs one job. What goes wrong is a Violation, never an exception."""

    def __init__(self, servers: Servers, links: Mapping[int, Sequence[Link]], task: Task, folder: Path) -> None:
        self._task = task
        self._folder = folder
        self._rules = Rules.of(task.mode, task.workers, task.shape)
        self._ledgers = Ledgers(folder / "lives", self._rules.averaged)
        self._crew = Crew(task, folder)
        self._arena = Arena(servers, self._crew, links)
        self._faults: list[Fault] = []
        self._restored: dict[int, float | None] = {}  # by bucket, when its shard was killed first
        self.lost_steps = 0
        self._healed: list[tuple[float, int, Callable[[], object]]] = []  # (when, order, what ends the fault)

    def run(self, seconds: float, plans: Sequence[Plan] = ()) -> Trace:
        """Trains for so long once all workers step, with these faults; then lets everybody finish, and judges."""
        violations: list[Violation] = []
        begun = ended = time.monotonic()
        try:
            self._until(self._all_step, START_SECONDS, "start")
            begun = ended = time.monotonic()
            self._window(begun, seconds, list(plans))
            ended = time.monotonic()
            violations += self._finish()
        except Stuck as error:
            ended = max(ended, time.monotonic())
            violations.append(Violation("stuck", str(error), {"status": self._status()}))
        finally:
            self._heal(float("inf"))
            (self._folder / "leave").touch()
            if not self._crew.end(PATIENCE_SECONDS):
                violations.append(Violation("stuck", "a worker did not leave", {}))
            records = self._ledgers.read()
            self._ledgers.close()
            (self._folder / "faults.json").write_text(json.dumps([fault.data() for fault in self._faults], indent=1))
        violations += [violation for record in records for violation in record.violations]
        violations += too_stale([record.life for record in records], self._rules, self._restored)
        violations += self._odd_ends(records)
        return Trace(begun, ended, records, self._faults, violations)

    # -- the window --------------------------------------------------------------------------------------------------

    def _window(self, begun: float, seconds: float, plans: list[Plan]) -> None:
        while (now := time.monotonic()) < begun + seconds:
            self._heal(now)
            if plans and now >= begun + plans[0].after and self._inject(plans[0], now):
                plans.pop(0)
            last = max((record.steps[-1] for record in self._ledgers.read() if record.steps), default=begun)
            if now - last > PATIENCE_SECONDS:
                raise Stuck(f"no step for {now - last:.0f} s")
            time.sleep(LOOK_SECONDS)

    def _inject(self, one: Plan, now: float) -> bool:
        """Does it to the first victim that is well; False if nobody is: then it is tried again in a moment."""
        worker = KINDS[one.kind].to == "worker"
        well = (victim for victim in one.victims if self._is_well(victim) or not worker)
        victim = next(well, None) if worker or self._all_step(self._last_fault()) else None
        heal = None if victim is None else KINDS[one.kind].begin(self._arena, victim)
        if victim is None or heal is None:
            return False
        self._faults.append(Fault(one.kind, victim, now, now + one.seconds))
        heapq.heappush(self._healed, (now + one.seconds, len(self._faults), heal))
        return True

    def _last_fault(self) -> float:
        """When the last fault ended."""
        return max((fault.until for fault in self._faults), default=0.0)

    def _is_well(self, rank: int) -> bool:
        """Whether it has finished a step since the last fault that hit it, or a server, ended."""
        hit = (fault.until for fault in self._faults if fault.hits(rank) or KINDS[fault.kind].to != "worker")
        since = max(hit, default=0.0)
        return any(record.life.rank == rank and record.steps and record.steps[-1] > since for record in self._records())

    def _heal(self, now: float) -> None:
        while self._healed and self._healed[0][0] <= now:
            heapq.heappop(self._healed)[2]()

    # -- the end -----------------------------------------------------------------------------------------------------

    def _finish(self) -> list[Violation]:
        """Everybody heals, steps once more, stops at one clock and holds; then the weights are judged."""
        while self._healed:
            time.sleep(max(0.0, self._healed[0][0] - time.monotonic()))
            self._heal(time.monotonic())
        healed = time.monotonic()
        self._until(lambda: self._all_step(healed), PATIENCE_SECONDS, "come back")
        target = max(max(record.life.done.values()) for record in self._records() if record.life.done) + 50
        path = self._folder / "stop.new"
        path.write_text(str(target))
        path.rename(self._folder / "stop")
        self._until(self._all_hold, PATIENCE_SECONDS + 60 * self._task.pause, f"reach clock {target}")
        view, shard_of = read_weights(self._task)
        lives = [record.life for record in self._records()]
        self._restored = {bucket: self._first_kill(shard) for bucket, shard in enumerate(shard_of)}
        lost = {} if self._rules.averaged else {b: at for b, at in self._restored.items() if at is not None}
        found = judge(view, lives, self._rules, frozenset(lost))
        self.lost_steps, counted = missing(view, lives, self._rules), self._counted()
        if self.lost_steps > counted:
            said = f"{self.lost_steps} acknowledged steps are not in, and the servers count {counted} as lost"
            kills = [fault.data() for fault in self._faults if fault.killed_shard is not None]
            found.append(Violation("lost uncounted", said, {"faults": kills}))
        return found

    def _first_kill(self, shard: int) -> float | None:
        kills = (fault.at for fault in self._faults if fault.killed_shard == shard)
        return min(kills, default=None)

    def _counted(self) -> int:
        """How many steps the servers say that restored shards lost."""
        jobs = self._arena.servers.status()["jobs"]
        return sum(job["lost_step_count"] for job in jobs if job["name"] == self._task.job)

    def _until(self, condition: Callable[[], bool], seconds: float, what: str) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline:
                raise Stuck(f"not all workers did {what} within {seconds:.0f} s")
            time.sleep(LOOK_SECONDS)

    def _records(self) -> list[Record]:
        return self._ledgers.read()

    def _newest(self) -> dict[int, Record]:
        """By rank, its latest life."""
        return {record.life.rank: record for record in self._records()}

    def _all_step(self, since: float = 0.0) -> bool:
        newest = self._newest()
        return len(newest) == self._task.workers and all(r.steps and r.steps[-1] > since for r in newest.values())

    def _all_hold(self) -> bool:
        newest = self._newest()
        return len(newest) == self._task.workers and all(record.has("held") for record in newest.values())

    def _odd_ends(self, records: list[Record]) -> list[Violation]:
        """Workers that ended otherwise than by leaving or by being killed: none has a reason to."""
        found = []
        newest = {record.life.rank: record for record in records}
        for record in records:
            where = {"life": record.life.number, "rank": record.life.rank}
            errors = [event for event in record.events if event[1] not in QUIET_EVENTS]
            for at, name, said in errors:
                found.append(Violation("gave up", f"{name}: {said}", {**where, "at": at}))
            killed = any(f.kind == "kill" and f.hits(record.life.rank) and f.at >= record.born for f in self._faults)
            if record is not newest[record.life.rank] and not errors and not killed:
                found.append(Violation("died", "a worker process ended without a word", where))
        return found

    def _status(self) -> object:
        with contextlib.suppress(Exception):
            return self._arena.servers.status()
        return None
