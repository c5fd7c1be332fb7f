"""The upstream of a relay: the cluster or the relays from which it gets its editions, and the jobs that these have."""

from __future__ import annotations

import threading
import time

from ps_feed.edition_client import cluster
from ps_protocol.errors import PSError, TryLater, anew
from ps_runtime.background import guarded, start
from ps_runtime.credentials import Access

FRESH_SECONDS = 1.0  # the pause between two queries for the jobs
ASKED_SECONDS = 10.0  # how long it keeps querying after a call
FIRST_LOOK_SECONDS = 2.0  # the longest wait of a first caller


class Upstream:
    """Lists the upstream's jobs, in a thread of its own, while callers ask for them: an upstream that does not answer
    delays no caller. Methods may be called from any thread.

    servers: HOST:PORT of each, with a comma between them
    access:  needs the role of a reader
    """

    def __init__(self, servers: str, access: Access) -> None:
        self.servers, self.access = servers, access
        self._order = servers.split(",")
        self._jobs: frozenset[str] | None = None  # None: not known yet
        self._error: PSError | None = None
        self._asked, self._seen = 0.0, 0.0  # when a caller last asked, and when the last query ended
        self.looked = 0.0  # when the query began that found the present jobs
        self._changed = threading.Condition()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="upstream", daemon=True)
        start(self._thread)

    @property
    def trouble(self) -> PSError | None:
        """The error of the last query; None if it succeeded, or there was none."""
        return self._error

    def jobs(self) -> frozenset[str]:
        """Returns the upstream's jobs as of a second ago; older ones if it does not answer.

        Raises TryLater, or the upstream's error, if they are not known yet.
        """
        with self._changed:
            now = time.monotonic()
            is_asleep, self._asked = now - self._asked > ASKED_SECONDS, now
            if is_asleep:
                self._changed.notify_all()
            # After a pause, wait for a new query: the jobs from before the pause may be long over.
            self._changed.wait_for(lambda: self._seen > now - ASKED_SECONDS or self._stopping, FIRST_LOOK_SECONDS)
            if self._jobs is None:
                raise anew(self._error or TryLater(f"{self.servers} does not answer this relay yet"))
            return self._jobs

    def has_since(self, job: str, moment: float) -> bool:
        """Whether a query that began after `moment` has found a job. Does not wait, and keeps the queries going."""
        with self._changed:
            self._asked = time.monotonic()
            self._changed.notify_all()
            return self.looked > moment and self._jobs is not None and job in self._jobs

    def stop(self) -> None:
        """Ends the thread, after the query under way."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        self._thread.join(FIRST_LOOK_SECONDS)

    def _run(self) -> None:
        while not self._stopping:
            with self._changed:
                self._changed.wait_for(lambda: self._stopping or time.monotonic() - self._asked <= ASKED_SECONDS)
            if not self._stopping:
                guarded("upstream", self._look)
            with self._changed:
                self._changed.wait_for(lambda: self._stopping, FRESH_SECONDS)

    def _look(self) -> None:
        """Queries one server, and the next ones if it does not answer."""
        error: PSError | None = None
        began = time.monotonic()
        for server in list(self._order):
            try:
                jobs = cluster(server, self.access).jobs
            except PSError as failed:
                error = error or failed
                self._order.append(self._order.pop(0))
                continue
            with self._changed:
                self._jobs, self.looked = jobs, began
            error = None
            break
        with self._changed:
            self._error = error
            self._seen = time.monotonic()
            self._changed.notify_all()
