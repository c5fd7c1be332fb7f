"""Exchanges and shared memory that are broken on purpose: a simulation whose workers share memory has to find each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from ps_protocol.messages import rows
from ps_protocol.messages.data import PushCall, read_exchange, write_exchange
from ps_protocol.messages.rows import RowsPull, RowsPush
from ps_protocol.segment_layout import RowMemory, SegmentMap, pushed_bytes
from ps_server.core.checking_rows import PushedRows
from ps_server.core.sums import Sum
from ps_server.rpc.data_service import _KnownExchange
from ps_server.shard.hosted_job import HostedJob
from ps_server.shard.pushes import Checked
from tests.simulation.mutations import IN_ROWS, LOSSES, MIXED, Mutation
from tests.simulation.servers import DataConnection, ShardProcess

# -- what is known of the exchange before ----------------------------------------------------------------------------


def _changes_what_is_known(patch: pytest.MonkeyPatch, known: Any) -> None:
    following = _KnownExchange.next
    patch.setattr(_KnownExchange, "next", lambda self, request: known(self, request, partial(following, self)))


def counts_two_clocks(patch: pytest.MonkeyPatch) -> None:
    """The exchange after one that is known is taken for that of one clock later."""

    def later(self: _KnownExchange, request: Any, following: Any) -> _KnownExchange | None:
        found = following(request)
        if found is None:
            return None
        clock = found.push.clock + 1
        return replace(found, push=replace(found.push, clock=clock), pull=replace(found.pull, clock=clock))

    _changes_what_is_known(patch, later)


def takes_a_repeat_for_the_next(patch: pytest.MonkeyPatch) -> None:
    """An exchange that comes again over its connection is taken for that of the next clock."""

    def again(self: _KnownExchange, request: Any, following: Any) -> _KnownExchange | None:
        kept, clock = self.request, self.push.clock
        return following(kept.at(clock + 1) if kept is not None and request == kept.at(clock) else request)  # type: ignore[no-any-return]

    _changes_what_is_known(patch, again)


def takes_another_incarnation_for_the_same(patch: pytest.MonkeyPatch) -> None:
    """What is known of a rank's exchange outlives its connection, and nothing compares whose the next one is."""
    kept: dict[Any, dict[str, Any]] = {}
    add = ShardProcess._open

    def opened(self: ShardProcess, worker: Any) -> int:
        number = add(self, worker)
        of_rank = kept.setdefault((id(self), worker.job, worker.rank, worker.member), {})
        self._connections[number] = DataConnection(worker, self._connections[number].reading, of_rank)
        return number

    def whoever(self: _KnownExchange, request: Any, following: Any) -> _KnownExchange | None:
        push, pull = read_exchange(request)
        who = self.push.worker
        return following(write_exchange(replace(push, worker=who), replace(pull, worker=who)))  # type: ignore[no-any-return]

    patch.setattr(ShardProcess, "_open", opened)
    _changes_what_is_known(patch, whoever)


def reads_a_segment_that_was_replaced(patch: pytest.MonkeyPatch) -> None:
    """A known exchange is staged from the segment with which it was checked, though its worker has another since."""
    commands_of = Checked.commands_of

    def of_the_first(
        self: Checked, job: HostedJob, call: PushCall, principal: str, segment: SegmentMap | None
    ) -> Sequence[Any]:
        return commands_of(self, job, call, principal, self.segment if self.job is job else segment)

    patch.setattr(Checked, "commands_of", of_the_first)


# -- what is read late -----------------------------------------------------------------------------------------------


def reads_late_what_workers_overwrite(patch: pytest.MonkeyPatch) -> None:
    """With a quorum a worker gets its answer before the update with its gradient, which is not copied for that."""
    add = Sum.add
    patch.setattr(
        Sum, "add", lambda self, values, own, copy=False, is_last=False: add(self, values, own, False, is_last)
    )


def reads_rows_late(patch: pytest.MonkeyPatch) -> None:
    """Rows are not copied when they come, but read where they lie when their update is made."""

    def where_they_lie(self: HostedJob, push: RowsPush, place: int, memory: RowMemory | None = None) -> PushedRows:
        memory, dim = memory or self.row_memory(push.worker), self.partition.row_checker.table(push.table).rows.dim
        return PushedRows(memory.array(place, pushed_bytes(push.count, dim), np.uint8).data)

    patch.setattr(HostedJob, "pushed", where_they_lie)


def reads_wanted_ids_late(patch: pytest.MonkeyPatch) -> None:
    """The ids that an exchange asks for are not copied out of its message, and the next message is received there."""
    read, received = rows.read_exchange, list[bytearray]()

    def where_it_was_received(request: Any) -> tuple[RowsPush, RowsPull]:
        push, pull = read(request)
        if not len(pull.payload):  # in the segment, or there are none
            return push, pull
        for before in received:
            count = min(len(before), len(pull.payload))
            before[:count] = pull.payload[:count]
        received[:] = [bytearray(pull.payload)]
        return push, replace(pull, payload=received[0])

    patch.setattr(rows, "read_exchange", where_it_was_received)


ALL = MIXED | IN_ROWS | {"own update missing", "went back"}
shared = partial(Mutation, kinds=ALL, sharing=True)

SHARED = (
    shared(counts_two_clocks, ("sync", "async"), known=("sync", 0)),
    shared(takes_a_repeat_for_the_next, ("async", "ssp:2"), known=("ssp:2", 1)),
    shared(
        takes_another_incarnation_for_the_same,
        ("sync", "async"),
        kinds=ALL | {"lost its place"},
        faults=LOSSES,
        known=("async", 0),
    ),
    shared(reads_a_segment_that_was_replaced, ("sync", "async"), known=("async", 0)),
    shared(reads_late_what_workers_overwrite, ("sync quorum all-1",), known=("sync quorum all-1", 0)),
    shared(reads_rows_late, ("sync",), tables=True, known=("sync", 0)),
    shared(reads_wanted_ids_late, ("sync",), tables=True, known=("sync", 1)),
)
