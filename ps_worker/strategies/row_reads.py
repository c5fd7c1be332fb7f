"""Reads the rows of a job's tables from its shards.

If the worker has lost its place, it takes the next one, and reads the rows as they are there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TypeVar

import torch

from ps_protocol.errors import UnknownWorker
from ps_protocol.row_ids import Ids
from ps_worker.cluster.connection import Connection
from ps_worker.cluster.participation import Participation, end_last_step
from ps_worker.metrics import WorkerMetrics, added
from ps_worker.tables.ahead import RowsAhead
from ps_worker.tables.server_rows import RowsOfShard
from ps_worker.values import PullResult

T = TypeVar("T")


class RowReads:
    """Reads rows for one worker. For the training thread.

    in_place: runs a function in the worker's place, see JobTraining.in_place: returns None, or a bool if the place was
              lost and another one taken
    is_past:  see the property
    """

    def __init__(
        self,
        participation: Participation,
        in_place: Callable[[Callable[[], None]], bool | None],
        metrics: WorkerMetrics,
        is_past: Callable[[], bool],
    ) -> None:
        self._participation, self._in_place, self._metrics = participation, in_place, metrics
        self._is_past = is_past

    @property
    def is_past(self) -> bool:
        """Whether the job was rolled back and the script has not reached its loader yet: its current batch will come
        again.
        """
        return self._is_past()

    def pull_rows(self, table: int, ids: Ids, out: torch.Tensor, ends: Ids) -> None:
        """Reads rows of a table at this worker's clock; see Servers.pull_rows."""
        pulls = self._fetched(lambda connection: connection.pull_rows(table, ids, out, ends))
        self._metrics.fetched(added(pull.sizes for pull in pulls))

    def pull_table(self, table: int, count_only: bool) -> list[RowsOfShard]:
        """Returns a table's rows at this worker's clock, one part for each shard. count_only: only the
        number of rows
        """
        parts = self._fetched(lambda connection: connection.pull_table(table, count_only))
        self._metrics.fetched({"float32": sum(len(part.content) for part in parts)})
        return parts

    def await_rows(self, ahead: RowsAhead) -> bool:
        """Waits for rows that were pulled ahead. Returns False if they do not come, because the place that asked is
        lost.
        """
        self._refuse_closed()
        pulls = ahead.pulls
        if not self._have_come(pulls) and self._in_place(lambda: self._settle(pulls)) is not None:
            return False
        if not ahead.ends:
            self._metrics.fetched_ahead(added(pull.result().sizes for pull in pulls))
        return True

    def _have_come(self, pulls: Sequence[Future[PullResult]]) -> bool:
        """Whether rows that were pulled ahead are here, and there is nothing to wait for: the last step has ended, and
        the place that asked for them is not lost, as far as this worker knows.

        In a group it is False: its members compare what they know.
        """
        part = self._participation
        if part.group is not None or part.membership.error is not None or not part.has_place:
            return False
        return part.connection.is_at_rest and all(pull.done() and pull.exception() is None for pull in pulls)

    def _settle(self, pulls: Sequence[Future[PullResult]]) -> None:
        end_last_step(self._participation)
        self._participation.connection.await_with_others(pulls)
        self._participation.settle()

    def _fetched(self, ask: Callable[[Connection], list[Future[T]]]) -> list[T]:
        self._refuse_closed()
        futures: list[Future[T]] = []

        def fetch() -> None:
            end_last_step(self._participation)  # a lookup waits for this worker's own push
            futures[:] = ask(self._participation.connection)
            self._participation.settle()

        while self._in_place(fetch) is not None:
            pass
        return [future.result() for future in futures]

    def _refuse_closed(self) -> None:
        if self._participation.is_closed:
            raise UnknownWorker("the session is closed, and the rows of its tables went with its place in the job")
