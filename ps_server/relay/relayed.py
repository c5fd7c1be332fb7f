"""The jobs of a relay. Each is followed while it has readers, and for IDLE_SECONDS after; named jobs always."""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path

from ps_feed.subscription import Subscription
from ps_protocol.errors import InvalidRequest, NotFound, PSError, TryLater
from ps_protocol.messages.editions import EditionCall, RelayReport, WeightsAsked, WeightsHere, is_relay_name
from ps_protocol.wire_formats import EDITION_WIRES
from ps_runtime.background import guarded, start
from ps_server.core.limits import check_feeds
from ps_server.relay.followed import FollowedJob
from ps_server.relay.room import EditionRoom
from ps_server.relay.upstream import Upstream
from ps_server.shard.mapped import MappedFiles
from ps_server.shard.outbox import Outbox
from ps_server.shard.relay_reports import RelayReports

log = logging.getLogger("ps_server")

IDLE_SECONDS = 60.0  # how long a job is followed after the last call of a reader
TICK_SECONDS = 0.1


class Relayed:
    """All jobs of a relay. Methods may be called from any thread.

    named:  jobs that are followed always, each in a wire format
    every, period: the least number of updates, and of seconds, between two editions
    limit:  the most feeds of one job; one principal may have half as many
    shared_directory: the directory in which readers on this host wait for shared memory; None: payloads are sent
    name:   the relay's name in its reports to the upstream: see RelayReport; empty: it sends no reports
    """

    def __init__(
        self,
        upstream: Upstream,
        *,
        named: Collection[tuple[str, str]] = (),
        every: int = 1,
        period: float = 0.0,
        limit: float = math.inf,
        shared_directory: Path | None = None,
        name: str = "",
    ) -> None:
        if name and not is_relay_name(name):
            log.warning(
                "the upstream is not told how many readers this relay has: %r cannot be shown as its name", name
            )
            name = ""
        self.upstream, self._directory, self._name = upstream, shared_directory, name
        self._named, self._every, self._period, self._limit = frozenset(named), every, period, limit
        self._room = EditionRoom(is_shared=shared_directory is not None)
        self._followed: dict[tuple[str, str], FollowedJob] = {}
        # Mapped files use memory, and count, even after their job is no longer followed.
        self._mapped: dict[tuple[str, str], MappedFiles] = {}
        self._relay_reports: dict[str, RelayReports] = {}  # by job
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        with self._lock:  # the first subscription reports this relay's readers while others are being added
            for each in sorted(self._named):
                self._followed[each] = self._follow(*each)
        self._thread = threading.Thread(target=self._run, name="relay", daemon=True)
        start(self._thread)

    def jobs(self) -> list[str]:
        """Returns the names of the jobs that readers can follow at this relay."""
        with self._lock:
            names = {each.name for each in self._followed.values() if not each.ended and each.newest is not None}
        with contextlib.suppress(PSError):
            names |= self.upstream.jobs() - self._ended()
        return sorted(names)

    def followed(self) -> list[FollowedJob]:
        """Returns the jobs that are followed now, by name."""
        with self._lock:
            return [self._followed[each] for each in sorted(self._followed)]

    def is_ready(self) -> bool:
        """Whether there is an edition of each job that is followed always."""
        with self._lock:
            return all(self._followed[each].newest is not None for each in self._named)

    def get(self, name: str, wire: str) -> FollowedJob:
        """Returns a job, which is followed from now on.

        Raises NotFound if the upstream has no such job, InvalidRequest for a wire format in which no edition travels,
        TryLater or others if the upstream does not answer.
        """
        if wire not in EDITION_WIRES:
            raise InvalidRequest(f"an edition travels in {', '.join(EDITION_WIRES)}, not in {wire}")
        found = self._followed.get((name, wire))
        if found is None or found.ended:
            self._look_for(name, found)
            with self._lock:
                if self._stopping.is_set():
                    raise TryLater("this relay is stopping")
                found = self._followed.get((name, wire))
                if found is None:
                    found = self._followed[name, wire] = self._follow(name, wire)
        found.asked = time.monotonic()
        return found

    def describe(self, asked: WeightsAsked, caller: str = "") -> WeightsHere:
        """Describes a job's weights. Raises the errors of `get` and FollowedJob.describe.

        caller: the principal that asks; empty: unknown
        """
        job = self.get(asked.job, asked.wire)
        job.relays.tell(asked.relay, caller, time.monotonic())
        return job.describe(asked.with_spec, asked.run)

    def pull(self, call: EditionCall, outbox: Outbox, caller: str) -> None:
        """Sends an edition on the outbox, and ends it. Returns at once.

        Raises the errors of `get` and FollowedJob.pull, or LimitExceeded.
        """
        job = self.get(call.job, call.wire)
        self.check_feeds(call.job, caller)
        job.pull(call, outbox, caller)

    def check_feeds(self, name: str, caller: str) -> None:
        """Raises LimitExceeded if a caller may not begin another feed of a job."""
        callers = [each for job in self.followed() if job.name == name for each in job.callers()]
        check_feeds(name, callers, caller, self._limit)

    def check_joined(self, size: int) -> None:
        """Raises LimitExceeded if there is no memory for joining the pieces of a tensor."""
        if size:
            self._room.check_joined(size)

    def stop(self) -> None:
        """Ends the relay's jobs and its thread."""
        self._stopping.set()
        self._thread.join()
        for each in self.followed():
            each.close()
        for mapped in self._mapped.values():
            mapped.close()
        self.upstream.stop()

    def _follow(self, name: str, wire: str) -> FollowedJob:
        def subscribe(on_event: Callable[[], None]) -> Subscription:
            return Subscription(
                *(self.upstream.servers, name),
                every=self._every,
                wire=wire,
                period=self._period,
                access=self.upstream.access,
                on_event=on_event,
                room=self._room,
                relay=partial(self._report, name),
            )

        mapped = self._mapped.setdefault((name, wire), MappedFiles(self._directory))
        relays = self._relay_reports.setdefault(name, RelayReports())
        return FollowedJob(name, wire, subscribe, self._room, mapped, relays=relays)

    def _report(self, name: str) -> RelayReport | None:
        """Returns the report about a job for the upstream; None: no report, because this relay has no name."""
        if not self._name:
            return None
        jobs = [each for each in self.followed() if each.name == name]
        readers = sum(each.reader_count for each in jobs)
        # All wire formats of a job have the same relays. The version of an ended job may be that of an earlier run.
        behind = max((each.relays.readers(time.monotonic()) for each in jobs), default=0)
        versions = [each.present_version for each in jobs if not each.ended]
        return RelayReport(self._name, readers + behind, max((v for v in versions if v is not None), default=None))

    def _look_for(self, name: str, before: FollowedJob | None) -> None:
        """Makes sure that a job of this name can be followed.

        before: the ended job that was followed under this name. If the upstream has a new run of it, it is followed
                again; otherwise its last edition stays readable. None: none was followed

        Raises NotFound if none was followed, and the upstream has no job of this name.
        """
        if before is None:
            if name not in self.upstream.jobs():
                raise NotFound(f"no job {name!r} at {self.upstream.servers}")
        elif self._is_there_again(before):
            before.follow_again()

    def _is_there_again(self, job: FollowedJob) -> bool:
        """Whether the upstream has reported another run with the name of an ended job."""
        return self.upstream.has_since(job.name, job.ended_at or 0.0)

    def _ended(self) -> set[str]:
        """Returns the jobs that have ended without another run at the upstream. A job with another run is listed even
        before it is followed: further relays ask only for listed jobs.
        """
        return {each.name for each in self.followed() if each.ended and not self._is_there_again(each)}

    def _run(self) -> None:
        while not self._stopping.wait(TICK_SECONDS):
            guarded("relay", self._tick)

    def _tick(self) -> None:
        now = time.monotonic()
        for job in self.followed():
            guarded("relay", partial(job.tick, now))
            key = job.name, job.wire
            if key in self._named:
                if job.ended and self._is_there_again(job):
                    job.follow_again()
            elif now - job.asked > IDLE_SECONDS and not job.callers():
                with self._lock:
                    self._followed.pop(key, None)
                    if not any(name == job.name for name, _ in self._followed):
                        self._relay_reports.pop(job.name, None)
                job.close()
        self._forget_mapped()

    def _forget_mapped(self) -> None:
        """Forgets the mapped files of jobs that are no longer followed, once readers have unmapped them."""
        with self._lock:
            for key in self._mapped.keys() - self._followed.keys():
                self._mapped[key].look()
                if not self._mapped[key].held_bytes():
                    self._mapped.pop(key).close()
