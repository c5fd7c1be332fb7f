"""Answers of WatchStatus: each has the present view, and the events and samples that its caller lacks.

A view is complete: it is small, and a reader that has missed some needs nothing else. Events and samples only grow in
number, so an answer brings those since the answer before; a position says which the caller has.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from ps_protocol.convert import seconds
from ps_protocol.errors import InvalidRequest
from ps_protocol.v1 import cluster_pb2
from ps_runtime.version import version
from ps_server.coordinator.events import EventLog
from ps_server.core.limits import LONGEST_WATCH, SHORTEST_WATCH
from ps_server.rpc.position import Position, position
from ps_server.rpc.streams import ResponseStream
from ps_server.rpc.view_messages import Sees, event_messages, finished_message, history_message, view_response
from ps_server.view.finished import EndedJobView
from ps_server.view.view import View
from ps_server.view.watch import LOOK_SECONDS, Watch

# A view may be so much early, since the cluster is observed a little more often than once a second
EARLY_SECONDS = 0.25


def period(request: cluster_pb2.WatchStatusRequest) -> float:
    """Returns the seconds between two answers. Raises InvalidRequest for a period outside of the limits."""
    if not request.HasField("period_duration"):
        return LOOK_SECONDS
    wanted = seconds(request.period_duration)
    if not SHORTEST_WATCH <= wanted <= LONGEST_WATCH:
        raise InvalidRequest(
            f"WatchStatus: the period must be {SHORTEST_WATCH:g} to {LONGEST_WATCH:g} s, got {wanted:g}"
        )
    return wanted


class Views:
    """Makes answers from the watched cluster. Thread-safe.

    where: returns the addresses of the coordinator's services and metrics
    """

    def __init__(self, watch: Watch, events: EventLog, shard_count: int, where: Callable[[], tuple[str, str]]) -> None:
        self.watch = watch
        self._events, self._shard_count, self._where = events, shard_count, where

    def about(self) -> cluster_pb2.CoordinatorStatus:
        """Describes the coordinator."""
        address, metrics_address = self._where()
        return cluster_pb2.CoordinatorStatus(
            address=address,
            metrics_address=metrics_address,
            pid=os.getpid(),
            shard_count=self._shard_count,
            software_version=version(),
        )

    def answer(self, sees: Sees, seen: Position, history: bool) -> tuple[cluster_pb2.WatchStatusResponse, Position]:
        """Returns the answer to a caller, and the caller's position after it."""
        watch = self.watch
        if seen.process != watch.process:
            seen = Position(watch.process)
        view = watch.view
        response = view_response(self.about(), view, sees)
        response.process = watch.process
        events = self._events.after(seen.last_event)
        response.events.extend(event_messages(events, sees))
        next_sample = seen.next_sample
        if history:
            samples = watch.samples(seen.next_sample, [name for name in view.jobs if sees(name)])
            response.history.CopyFrom(history_message(samples))
            next_sample = samples.first + len(samples.times)
        for job in watch.finished:
            if sees(job.job.statistics.name):
                curves = history and job.gone >= seen.next_sample
                response.finished_jobs.append(finished_message(job, self._how_it_ended(job), curves))
        last_event = events[-1].number if events else seen.last_event
        return response, Position(watch.process, last_event, next_sample)

    def _how_it_ended(self, job: EndedJobView) -> str:
        """Returns the text of the event with which a job ended."""
        name = job.job.statistics.name
        texts = [
            event.text
            for event in self._events.after(0)
            if (event.kind, event.job) == ("end", name) and event.time >= (job.began or 0.0)
        ]
        return texts[-1] if texts else "the job has ended"


class ViewStream:
    """Sends one caller a view every period, for as long as it reads. A slow reader misses views: an answer is made when
    the one before has been sent.
    """

    def __init__(
        self,
        views: Views,
        stream: ResponseStream,
        sees: Sees,
        request: cluster_pb2.WatchStatusRequest,
        caller: str = "",
    ) -> None:
        self._caller = caller
        self._views, self._stream, self._sees = views, stream, sees
        self._period, self._seen, self._history = period(request), position(request), request.history_wanted
        self._queued = False
        self._due = 0.0

    def begin(self) -> None:
        """Sends the first answer, and then one every period. Raises LimitExceeded for too many watchers."""
        self._stream.on_close(self._views.watch.add(self._changed, self._caller))

    def _changed(self, view: View | None) -> None:
        if view is None:
            self._stream.finish()
            return
        now = time.monotonic()
        if self._queued or now < self._due - EARLY_SECONDS:
            return
        self._queued, self._due = True, now + self._period
        self._stream.put(self._next)

    def _next(self) -> cluster_pb2.WatchStatusResponse:
        self._queued = False
        response, self._seen = self._views.answer(self._sees, self._seen, self._history)
        return response
