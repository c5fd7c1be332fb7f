"""Sends rank 0's tensors that no optimizer steps, such as BatchNorm's statistics, to the shards for readers of the
weights.

Each worker keeps its own. Rank 0 sends those of its tensors that have changed, in the background, once in TELL_SECONDS
at most, and once more before it leaves the job. If a shard refuses them, for example for lack of memory, they are sent
again. Each further attempt waits twice as long, because they use bandwidth that training may need.
"""

from __future__ import annotations

import logging
import time
import zlib
from collections.abc import Callable, Collection
from concurrent.futures import CancelledError, Future, wait

from ps_protocol.messages.workers import JoinResult
from ps_runtime.troubles import Troubles
from ps_worker.cluster.connection import Connection
from ps_worker.model.flat import FlatModel
from ps_worker.values import PushResult

log = logging.getLogger("ps_worker")

TELL_SECONDS = 1.0  # between two times
LONGEST_SECONDS = 60.0  # the longest pause between two attempts, while shards refuse
_MOST_DOUBLED = 16  # the longest pause is reached by then in any case
LAST_SECONDS = 5.0  # how long a worker that leaves waits until its last values have arrived


class ReaderBuffers:
    """The sender of one worker. For the training thread.

    connection: returns the connection of the worker's present place
    """

    def __init__(self, model: FlatModel, connection: Callable[[], Connection]) -> None:
        self._model, self._connection = model, connection
        self._due = 0.0
        # The place with which the values were sent: by a later one the shards may have lost them
        self._place: JoinResult | None = None
        self._checksums: dict[int, int] = {}  # by bucket, the checksum of the last values sent
        self._numbers: dict[int, int] = {}  # by bucket, the number of the last values sent
        self._sent: list[Future[PushResult]] = []
        self._failures = 0  # in a row
        self._troubles = Troubles(log, None)

    def stepped(self, changed: Callable[[], Collection[int]], is_last: bool = False) -> None:
        """Sends the tensors that have changed since the job began, if it is time to.

        changed: returns the indices of these parameters
        """
        now, connection = time.monotonic(), self._connection()
        is_due = now >= self._due or is_last
        if connection.place.identity.rank != 0 or not is_due:
            return
        if connection.place is not self._place:
            self._place, self._failures = connection.place, 0
            self._checksums.clear()
        wanted = set(changed())
        for bucket in self._model.layout.held:
            if bucket.frozen and any(part.parameter in wanted for part in bucket.slices):
                payload = self._model.initial(bucket)
                checksum = zlib.crc32(payload)
                if self._checksums.get(bucket.index) != checksum:
                    self._checksums[bucket.index] = checksum
                    # A script may change buffers after its last step, as torch.optim.swa_utils.update_bn does. Shards
                    # take what has a higher number than what they have.
                    number = max(connection.clock, self._numbers.get(bucket.index, 0) + 1)
                    self._numbers[bucket.index] = number
                    self._sent.append(connection.tell(bucket, number, payload))
        self._look()
        self._due = now + min(LONGEST_SECONDS, TELL_SECONDS * 2**self._failures)
        if is_last:
            wait(self._sent, LAST_SECONDS)
            self._look()
            if self._sent:
                log.warning("readers of the weights do not get the last buffers of rank 0: %s", self._sent[0])

    def _look(self) -> None:
        """Checks which messages have been acknowledged. If one is lost, all are sent again."""
        over = [each for each in self._sent if each.done()]
        self._sent = [each for each in self._sent if not each.done()]
        errors = [CancelledError() if each.cancelled() else each.exception() for each in over]
        error = next((each for each in errors if each is not None), None)
        if error is not None:
            self._failures = min(self._failures + 1, _MOST_DOUBLED)
            self._checksums.clear()
            what = "readers of the weights do not get these buffers of rank 0, which are sent again later: %s"
            self._troubles.met("buffers", what, error)
        elif over:
            self._failures = 0
            self._troubles.over("buffers")
