"""What rank 0 tells of tensors that no optimizer steps, for readers of the weights: BatchNorm's statistics, for one.

Each worker keeps its own. Rank 0 sends those of its tensors that have changed, in the background, once in TELL_SECONDS
at most, and once more before it leaves the job.
"""

from __future__ import annotations

import logging
import time
import zlib
from collections.abc import Callable, Collection
from concurrent.futures import Future, wait

from ps_protocol.messages.workers import JoinResult
from ps_worker.cluster.connection import Connection
from ps_worker.model.flat import FlatModel
from ps_worker.values import PushResult

log = logging.getLogger("ps_worker")

TELL_SECONDS = 1.0  # between two times
LAST_SECONDS = 5.0  # for which a worker that leaves waits until its last values are there


class ToldBuffers:
    """The part of one worker. For the training thread.

    connection: returns that of the worker's present place
    """

    def __init__(self, model: FlatModel, connection: Callable[[], Connection]) -> None:
        self._model, self._connection = model, connection
        self._due = 0.0
        self._place: JoinResult | None = None  # from which it was told: in a later one the shards may have lost it
        self._told: dict[int, int] = {}  # by bucket, the checksum of what was told
        self._numbers: dict[int, int] = {}  # by bucket, of what was told last
        self._sent: list[Future[PushResult]] = []

    def stepped(self, changed: Callable[[], Collection[int]], is_last: bool = False) -> None:
        """Tells, if it is time to, what has changed since the job began.

        changed: returns the indices of these parameters
        """
        now, connection = time.monotonic(), self._connection()
        is_due = now >= self._due or is_last
        if connection.place.identity.rank != 0 or not is_due:
            return
        if connection.place is not self._place:
            self._place = connection.place
            self._told.clear()
        self._due, wanted = now + TELL_SECONDS, set(changed())
        for bucket in self._model.layout.held:
            if bucket.frozen and any(part.parameter in wanted for part in bucket.slices):
                payload = self._model.initial(bucket)
                checksum = zlib.crc32(payload)
                if self._told.get(bucket.index) != checksum:
                    self._told[bucket.index] = checksum
                    # A script may change buffers after its last step, as torch.optim.swa_utils.update_bn does. Shards
                    # take what has a higher number than what they have.
                    number = max(connection.clock, self._numbers.get(bucket.index, 0) + 1)
                    self._numbers[bucket.index] = number
                    self._sent.append(connection.tell(bucket, number, payload))
        self._sent = [each for each in self._sent if not self._is_over(each)]
        if is_last:
            wait(self._sent, LAST_SECONDS)
            self._sent = [each for each in self._sent if not self._is_over(each)]
            if self._sent:
                log.warning("readers of the weights do not get the last buffers of rank 0: %s", self._sent[0])

    def _is_over(self, sent: Future[PushResult]) -> bool:
        """Whether a message has arrived, or is lost: then all are sent again."""
        if not sent.done():
            return False
        if sent.cancelled() or sent.exception() is not None:
            log.info("readers of the weights do not get these buffers of rank 0: %s", sent)
            self._told.clear()
        return True
