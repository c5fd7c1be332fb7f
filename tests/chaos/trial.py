"""One job from its first worker to its last, with faults or without, and what came of it."""

from __future__ import annotations

import contextlib
import heapq
import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from tests.chaos.audience import KILL_SECONDS, Audience, judge_ends, judge_readers
from tests.chaos.cluster import read_weights
from tests.chaos.crew import Crew
from tests.chaos.faults import KINDS, Arena, Fault
from tests.chaos.ledger import Ledgers, Record
from tests.chaos.links import Link
from tests.chaos.oracle import Rules, Violation, judge, judge_saved, missing, too_stale, unexplained
from tests.chaos.plans import Plan
from tests.chaos.servers import Servers, unforeseen
from tests.chaos.trace import Trace
from tests.chaos.worker import SAVED, Task

LOOK_SECONDS = 0.05
START_SECONDS = 120.0
PATIENCE_SECONDS = 45.0  # for what no fault holds up
STEP_SECONDS = 0.2  # more than a step takes beside its computing
MISSED_SECONDS = 5.0  # for which a fault is tried, beyond its time, where nothing is there to do it to
SAVING_SECONDS = 30.0  # the same of one that waits for a checkpoint
SAY_SECONDS = 60.0
SETTLE_SECONDS = 2.0  # after a fault's end: a step before that may be one that was under way
QUIET_EVENTS = {"joined", "joined again", "held", "left"}


@dataclass(frozen=True)
class Terms:
    """How a trial is run.

    bound: seconds within which every worker steps again after a fault's end
    stop:  ends the window early once it is set
    say:   takes a line now and then
    """

    bound: float
    stop: threading.Event = field(default_factory=threading.Event)
    say: Callable[[str], object] = lambda text: None


class Stuck(Exception):
    """Nothing moves any more."""


class Trial:
    """Runs one job. What goes wrong is a Violation, never an exception.

    lost_steps:  acknowledged steps that are not in the weights at the end
    saved_steps: acknowledged steps that were looked for in what rank 0 saved; 0: the run did not come that far
    """

    def __init__(
        self,
        servers: Servers,
        links: Mapping[int, Sequence[Link]],
        task: Task,
        folder: Path,
        terms: Terms,
        readers: int = 0,
    ) -> None:
        self._task = task
        self._folder = folder
        self._terms = terms
        self._rules = Rules.of(task.mode, task.most, task.shape)
        self._ledgers = Ledgers(folder / "lives", self._rules.averaged)
        crew = Crew(task, folder)
        self.audience = Audience(servers.address, folder, readers)
        self._arena = Arena(servers, crew, self.audience, links)
        self._faults: list[Fault] = []
        self._missed = 0
        self._second: tuple[float, Plan, str] | None = None  # when, what, and the kind of the first
        self._restored: dict[int, float | None] = {}  # by bucket, when its shard was killed first
        self.lost_steps = self.saved_steps = 0
        self._healed: list[tuple[float, int, Callable[[], object]]] = []  # (when, order, what ends the fault)

    def run(self, seconds: float, plans: Sequence[Plan] = ()) -> Trace:
        """Trains for so long once all workers step, with these faults; then lets everybody finish, and judges."""
        violations: list[Violation] = []
        begun = ended = time.monotonic()
        try:
            self._until(self._all_step, START_SECONDS, "start")
            self._until(lambda: self.audience.all_read(0.0), START_SECONDS, "start to read")
            begun = ended = time.monotonic()
            self._window(begun, seconds, list(plans))
            ended = time.monotonic()
            violations += self._finish()
        except Stuck as error:
            ended = max(ended, time.monotonic())
            violations.append(Violation("stuck", str(error), {"status": self._status()}))
        finally:
            self._heal(float("inf"))
            left = time.monotonic()
            (self._folder / "leave").touch()
            code = self._arena.crew.end(PATIENCE_SECONDS)
            if code != 0:
                said = "not all workers left" if code is None else f"the launcher ended with code {code}"
                violations.append(Violation("stuck" if code is None else "gave up", said))
            self.audience.close()
            records = self._ledgers.read()
            self._ledgers.close()
        lives = [record.life for record in records]
        seen = [violation for record in records for violation in record.violations]
        violations += unexplained(seen, lives, self._rules)
        violations += too_stale(lives, self._rules, self._restored)
        readers = self.audience.lives()
        kills = [(fault.victim, fault.at) for fault in self._faults if fault.kind == "kill-reader"]
        violations += [*self._odd_ends(records), *judge_readers(readers), *judge_ends(readers, kills, left)]
        violations += [Violation("relay error", text, {}) for text in unforeseen(self.audience.logs())]
        return Trace(begun, ended, records, self._faults, violations, self._missed)

    # -- the window --------------------------------------------------------------------------------------------------

    def _window(self, begun: float, seconds: float, plans: list[Plan]) -> None:
        said = begun
        while (now := time.monotonic()) < begun + seconds and not self._terms.stop.is_set():
            self._heal(now)
            self._strike(begun, now, plans)
            self._watch(begun, now)
            if now >= said + SAY_SECONDS:
                said = now
                self._say(now - begun)
            time.sleep(LOOK_SECONDS)  # faults last real time, and other processes tell nothing

    def _strike(self, begun: float, now: float, plans: list[Plan]) -> None:
        """Does what is due: a first fault when every worker has stepped since the last one, a second one at its time,
        whatever state the cluster is in."""
        if self._second is not None:
            due, plan, first = self._second
            if now >= due and (self._inject(plan, first) or self._is_missed(plan, now - due)):
                self._second = None
        elif plans and now >= begun + plans[0].after and self._all_step(self._settled()):
            plan = plans[0]
            if self._inject(plan):
                plans.pop(0)
                self._second = plan.second and (now + plan.second.after, plan.second, plan.kind)
            elif self._is_missed(plan, now - begun - plan.after):
                plans.pop(0)

    def _inject(self, plan: Plan, first: str | None = None) -> bool:
        """Does it to the first victim to which it can be done; False if there is none: it is tried again then."""
        kind, now = KINDS[plan.kind], time.monotonic()
        for victim in plan.victims:
            heal = kind.begin(self._arena, kind.to, victim)
            if heal is not None:
                killed = self._arena.servers.shards_of(kind.to, victim) if kind.ends_shards else ()
                self._faults.append(Fault(plan.kind, victim, now, now + plan.seconds, killed, first))
                with (self._folder / "faults.jsonl").open("a") as file:
                    file.write(json.dumps(self._faults[-1].data()) + "\n")
                heapq.heappush(self._healed, (now + plan.seconds, len(self._faults), heal))
                return True
        return False

    def _is_missed(self, plan: Plan, late: float) -> bool:
        """Gives a fault up for which there was no victim for too long."""
        missed = late > (SAVING_SECONDS if plan.kind == "kill-saving" else MISSED_SECONDS)
        self._missed += missed
        return missed

    def _last_fault(self) -> float:
        """When the last fault ended."""
        return max((fault.until for fault in self._faults), default=0.0)

    def _settled(self) -> float:
        """When what is acknowledged was begun after the last fault's end, as far as can be told."""
        return self._last_fault() + SETTLE_SECONDS if self._faults else 0.0

    def _watch(self, begun: float, now: float) -> None:
        """Raises Stuck if a worker has not stepped for longer than it may."""
        since = self._settled()
        if self._faults and now - since > self._terms.bound and not self._all_step(since):
            late = [slot for slot, record in self._newest().items() if not record.steps or record.steps[-1] <= since]
            kinds = " + ".join(fault.kind for fault in self._faults[-2:])
            raise Stuck(f"workers {late} did not step within {self._terms.bound:g} s after {kinds}")
        last = max((record.steps[-1] for record in self._records() if record.steps), default=begun)
        if now - max(last, since) > max(PATIENCE_SECONDS, self._terms.bound):
            raise Stuck(f"no step for {now - last:.0f} s")

    def _heal(self, now: float) -> None:
        while self._healed and self._healed[0][0] <= now:
            heapq.heappop(self._healed)[2]()

    def _say(self, seconds: float) -> None:
        records = self._records()
        pairs = sum(fault.first is not None for fault in self._faults)
        broken = sum(len(record.violations) for record in records)
        steps = sum(len(record.life.done) for record in records)
        said = f"{seconds / 60:.0f} min: {len(self._faults)} faults, {pairs} pairs, {steps} steps, {len(records)} lives"
        self._terms.say(f"{said}, {broken} violations that workers saw")

    # -- the end -----------------------------------------------------------------------------------------------------

    def _finish(self) -> list[Violation]:
        """Everybody heals, steps once more, stops at one clock and holds; then the weights are judged."""
        while self._healed:  # a second fault that was still to come is left out
            time.sleep(max(0.0, self._healed[0][0] - time.monotonic()))  # a fault lasts real time
            self._heal(time.monotonic())
        healed = max(time.monotonic(), self._settled())
        self._until(lambda: self._all_step(healed), self._terms.bound, "come back")
        self._until(lambda: self.audience.all_read(healed), self._terms.bound, "read again")
        clocks = [max(record.life.done.values(), default=0) for record in self._newest().values()]
        target = max(max(record.life.done.values()) for record in self._records() if record.life.done) + 50
        path = self._folder / "stop.new"
        path.write_text(str(target))
        path.rename(self._folder / "stop")
        # In async one may be far behind: the others were killed, and have gone on at the highest clock.
        left = PATIENCE_SECONDS + (target - min(clocks)) * (self._task.pause + STEP_SECONDS)
        self._until(self._all_hold, left, f"reach clock {target}")
        last = target if self._task.mode == "sync" else 0  # where workers share a clock, it is that of the weights
        self._until(lambda: self.audience.all_read(healed, last), self._terms.bound, f"read version {last}")
        view, shard_of = read_weights(self._task)
        lives = [record.life for record in self._records()]
        self._restored = {bucket: self._first_kill(shard) for bucket, shard in enumerate(shard_of)}
        lost = {} if self._rules.averaged else {b: at for b, at in self._restored.items() if at is not None}
        found = judge(view, lives, self._rules, frozenset(lost))
        # Saved at the clock at which all hold: what is acknowledged by now is to be in it.
        (self._folder / "save").touch()
        self._until((self._folder / SAVED).exists, self._terms.bound, "save (rank 0)")
        found += judge_saved(torch.load(self._folder / SAVED), lives, self._rules, frozenset(lost))
        self.saved_steps = sum(len(life.done) for life in lives)
        self.lost_steps, counted = missing(view, lives, self._rules), self._counted()
        if self.lost_steps > counted:
            said = f"{self.lost_steps} acknowledged steps are not in, and the servers count {counted} as lost"
            kills = [fault.data() for fault in self._faults if fault.killed]
            found.append(Violation("lost uncounted", said, {"faults": kills}))
        return found

    def _first_kill(self, shard: int) -> float | None:
        kills = (fault.at for fault in self._faults if shard in fault.killed)
        return min(kills, default=None)

    def _counted(self) -> int:
        """How many steps the servers say that restored shards lost."""
        jobs = self._arena.servers.status()["jobs"]
        return sum(job["lost_step_count"] for job in jobs if job["name"] == self._task.job)

    def _until(self, condition: Callable[[], bool], seconds: float, what: str) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline:
                raise Stuck(f"not all did {what} within {seconds:.0f} s")
            time.sleep(LOOK_SECONDS)  # the workers' files change: nothing tells of it

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
            killed = any(
                fault.kind == "kill" and fault.hits(record.life.rank) and fault.at + KILL_SECONDS >= record.born
                for fault in self._faults
            )
            if record is not newest[record.life.rank] and not errors and not killed:
                found.append(Violation("died", "a worker process ended without a word", where))
        return found

    def _status(self) -> object:
        with contextlib.suppress(Exception):
            return self._arena.servers.status()
        return None
