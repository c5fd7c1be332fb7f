"""Checks pushed rows against the job's tables, and makes the commands that stage them. Changes no state.

This runs outside of a partition's lock, as checking.py does.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch

from ps_protocol.errors import InvalidRequest, NotFound
from ps_protocol.framing import Buffer
from ps_protocol.hyper_parameters import HyperParameters
from ps_protocol.job import JobSpec
from ps_protocol.messages.rows import RowPushKind, RowsPull, RowsPush, TablePush
from ps_protocol.row_ids import COUNT_BYTES, ID_BYTES, Ids, shards_of
from ps_protocol.row_optimizers import check_row_optimizer, numbers_kept
from ps_protocol.tables import MAX_UPDATES, JobTable
from ps_protocol.tensors import PLAIN, Cast, row_codec
from ps_server.core.checking import GradientChecks
from ps_server.core.commands import AssignRows, BeginRows, StageRows
from ps_server.core.data_commits import check_ranges
from ps_server.core.placement import TableShare
from ps_server.core.sums import GoodValues
from ps_tables.beginning import decoded, row_columns
from ps_tables.contributions import RowGradients, RowValues
from ps_tables.distinct import are_distinct, are_of_shard
from ps_tables.row_sums import are_finite


class PushedRows(NamedTuple):
    """The rows of a push: ids, counts and gradients, in memory that no worker writes to.

    are_finite: whether no gradient is an infinity or a NaN; None: unknown
    """

    payload: Buffer
    are_finite: bool | None = None


class RowChecker:
    """Checks pushes and pulls of one job's rows. Raises InvalidRequest with what was expected and what came.

    share:      this shard's number among the shards that share the tables, and their count
    first:      the index of the job's first table, which follows its buckets
    norm_limit: the largest L2 norm of the gradient in one push
    """

    def __init__(self, spec: JobSpec, share: TableShare, first: int, norm_limit: float = math.inf) -> None:
        self.share, self.first = share, first
        self._spec, self._gradients = spec, GradientChecks(spec, norm_limit)
        self._codec = row_codec(spec.gradient_wire)
        self._good = GoodValues()  # by table

    def push(self, push: RowsPush, principal: str = "", pushed: PushedRows | None = None) -> StageRows | AssignRows:
        """Returns the command for one message of a push.

        principal: the caller, to whom the bytes are accounted
        pushed:    the rows, if they came in the worker's segment; None if they are in the message
        """
        pushed = pushed or PushedRows(push.payload)
        table = self.table(push.table)
        if push.kind is RowPushKind.ASSIGN:
            return self._assign(table, push, principal)
        if push.ranges:
            check_ranges(push.ranges)
        self._check_values(push.table, push.values)
        name = table.rows.name
        if push.kind is not RowPushKind.GRADIENT and (push.total or pushed.payload):
            raise InvalidRequest(f"table {name!r}: only a push of gradients has rows, got one of {push.kind.value}")
        if push.first + push.count > push.total or (push.total and not push.count):
            raise InvalidRequest(
                f"table {name!r}: rows {push.first} to {push.first + push.count} came of {push.total} in all"
            )
        rows, in_mean = self._rows(table, push, pushed.payload), push.kind is not RowPushKind.SKIP
        if not self._is_finite(table, push, rows.gradients, pushed.are_finite):
            rows, in_mean = RowGradients.none(table.rows.dim), False
        return StageRows(
            push.worker,
            self.first + push.table,
            push.clock,
            rows,
            push.first,
            push.count,
            push.total,
            push.kind is RowPushKind.GRADIENT and in_mean,
            in_mean,
            push.values,
            push.ranges,
            push.assignment,
            principal=principal,
        )

    def _assign(self, table: JobTable, push: RowsPush, principal: str) -> AssignRows:
        name, dim = table.rows.name, table.rows.dim
        if push.place is not None or push.values or push.ranges or (push.wire_format or "float32") != "float32":
            raise InvalidRequest(
                f"table {name!r}: rows that are assigned are float32 in the message, and nothing else is with them"
            )
        if not push.assignment:
            raise InvalidRequest(f"table {name!r}: what is assigned has a number from 1, got 0")
        if not 0 < push.count <= push.total - push.first:
            raise InvalidRequest(
                f"table {name!r}: rows {push.first} to {push.first + push.count} came of {push.total} that are assigned"
            )
        row = ID_BYTES + 4 * dim
        if len(push.payload) != push.count * row:
            raise InvalidRequest(
                f"table {name!r}: expected {push.count * row} bytes ({push.count} rows of {row}), "
                f"got {len(push.payload)}"
            )
        ids = np.frombuffer(push.payload, "<i8", push.count)
        values = _elements(PLAIN["float32"], push.payload, ID_BYTES * push.count, push.count * dim)
        self._check_shard(table, ids)
        self._check_distinct(table, ids)
        if not are_finite(values):
            raise InvalidRequest(f"table {name!r}: rows of worker {push.worker.rank} that are assigned are not finite")
        unit, rows = self.first + push.table, RowValues(ids, values.view(push.count, dim))
        which = push.clock, rows, push.first, push.total, push.assignment
        return AssignRows(push.worker, unit, *which, principal=principal)

    def beginning(self, push: TablePush) -> BeginRows:
        """Returns the command for one message of a table's initial content."""
        table, beginning = self.table(push.table), push.beginning
        name, rows = table.rows.name, table.rows
        end = push.first + push.rows + push.waiting
        if push.rows and push.waiting:
            raise InvalidRequest(f"table {name!r}: expected rows or ids that wait in one message, got both")
        if (
            end > beginning.total
            or (push.rows and end > beginning.rows)
            or (push.waiting and push.first < beginning.rows)
        ):
            raise InvalidRequest(
                f"table {name!r}: {push.rows} rows and {push.waiting} ids came behind {push.first}, of "
                f"{beginning.rows} rows and {beginning.waiting} ids in all"
            )
        if not 0 <= beginning.version <= MAX_UPDATES or (beginning.waiting and rows.admit_after <= 1):
            raise InvalidRequest(
                f"table {name!r}: expected up to 2^62 updates, and ids that wait only with admit_after above 1, got "
                f"{beginning.version} updates and {beginning.waiting} ids"
            )
        part, count = self._part(table, push), push.rows + push.waiting
        return BeginRows(push.worker, self.first + push.table, beginning, push.first, part, count, push.last)

    def _part(self, table: JobTable, push: TablePush) -> dict[str, torch.Tensor]:
        """Decodes a payload into the tensors that Table.restore expects: rows, or ids that wait for admission."""
        rows, version = table.rows, push.beginning.version
        part = {
            "ids": torch.empty(0, dtype=torch.int64, device="cpu"),
            "last": torch.empty(0, dtype=torch.int64, device="cpu"),
            "weights": torch.empty(0, rows.dim, dtype=torch.float32, device="cpu"),
            "version": torch.tensor([version], device="cpu"),
        }
        columns = row_columns(table.optimizer, table.values, rows.dim, push.beginning.with_state)
        part |= decoded(push.payload, push.rows + push.waiting, {} if push.waiting else columns)
        prefix = "waiting." if push.waiting else ""
        ids, last = part[f"{prefix}ids"].numpy(), part[f"{prefix}last"].numpy()
        self._check_shard(table, ids)
        self._check_distinct(table, ids)
        if len(last) and not 1 <= last.min() <= last.max() <= version:
            raise InvalidRequest(
                f"table {rows.name!r}: rows were trained by updates 1 to {version}, got {last.min()} to {last.max()}"
            )
        if push.waiting:
            least, most = int(part["waiting.counts"].min()), int(part["waiting.counts"].max())
            if not 0 < least <= most < 2**32:
                raise InvalidRequest(
                    f"table {rows.name!r}: an id that waits has occurred 1 to 2^32 - 1 times, got {least} to {most}"
                )
        return part

    def wanted(self, pull: RowsPull, payload: Buffer | None = None) -> Ids:
        """Returns the ids that a pull asks for.

        payload: the ids in the worker's segment; None if the ids are in the message
        """
        table, payload = self.table(pull.table), pull.payload if payload is None else payload
        if len(payload) % ID_BYTES:
            raise InvalidRequest(f"expected ids of {ID_BYTES} bytes each, got {len(payload)} bytes")
        ids = np.frombuffer(payload, "<i8")
        self._check_shard(table, ids)
        return ids

    def table(self, number: int) -> JobTable:
        """Returns a table by its index in the job's list of tables. Raises NotFound if there is none."""
        if number >= len(self._spec.tables):
            raise NotFound(
                f"job {self._spec.name!r} has {len(self._spec.tables)} tables, and table {number} is asked for"
            )
        return self._spec.tables[number]

    def _rows(self, table: JobTable, push: RowsPush, payload: Buffer) -> RowGradients:
        """Decodes a payload: ids, counts and gradients."""
        name, dim, codec = table.rows.name, table.rows.dim, self._codec
        if push.place is not None:
            codec = PLAIN["float32"]
        if push.count and (push.wire_format or "float32") != codec.dtype:
            raise InvalidRequest(
                f"table {name!r}: expected elements as {codec.dtype}, got {push.wire_format or 'float32'}"
            )
        row = ID_BYTES + COUNT_BYTES + codec.size(dim)
        if len(payload) != push.count * row:
            raise InvalidRequest(
                f"table {name!r}: expected {push.count * row} bytes ({push.count} rows of {row}), got {len(payload)}"
            )
        if not push.count:
            return RowGradients.none(dim)
        ids = np.frombuffer(payload, "<i8", push.count)
        counts = np.frombuffer(payload, "<u4", push.count, ID_BYTES * push.count).astype(np.int64)
        gradients = _elements(codec, payload, (ID_BYTES + COUNT_BYTES) * push.count, push.count * dim)
        self._check_shard(table, ids)
        self._check_distinct(table, ids)
        if not counts.all():
            raise InvalidRequest(f"table {name!r}: expected that each id has occurred, got a count of 0")
        return RowGradients(ids, counts, gradients.view(push.count, dim))

    def _check_shard(self, table: JobTable, ids: Ids) -> None:
        share = self.share
        if not are_of_shard(ids, share.shards, share.shard):
            of = shards_of(ids, share.shards)
            other = int(np.argmax(of != share.shard))
            raise InvalidRequest(
                f"table {table.rows.name!r}: id {ids[other]} is on shard {of[other]}, and came to shard {share.shard} "
                f"of {share.shards}"
            )

    def _check_distinct(self, table: JobTable, ids: Ids) -> None:
        if not are_distinct(ids, self.share.salt):
            ordered = np.sort(ids)
            twice = ordered[1:][ordered[1:] == ordered[:-1]]
            raise InvalidRequest(f"table {table.rows.name!r}: expected each id once, got {twice[0]} twice")

    def _is_finite(self, table: JobTable, push: RowsPush, gradients: torch.Tensor, known: bool | None) -> bool:
        """Whether the gradients count; False if the step leaves them out. Raises NonFiniteGradient, LimitExceeded.

        known: whether they are finite; None: unknown
        """
        what = f"table {table.rows.name!r}"
        if self._gradients.checks_finite and not (are_finite(gradients) if known is None else known):
            self._gradients.refuse_or_skip(push.worker.rank, what)
            return False
        if self._gradients.has_norm_limit:
            self._gradients.check_norm(push.worker.rank, what, float(torch.linalg.vector_norm(gradients)))
        return True

    def _check_values(self, number: int, values: HyperParameters) -> None:
        if values and not self._good.has(number, values):
            table = self._spec.tables[number]
            optimizer, registered, dim = table.optimizer, table.values, table.rows.dim
            now = {**registered, **values}
            check_row_optimizer(optimizer, now)
            if numbers_kept(optimizer, now, dim) > numbers_kept(optimizer, registered, dim):
                raise InvalidRequest(
                    f"table {table.rows.name!r}: {optimizer} with {dict(values)} keeps more for a row than it did "
                    f"with {dict(registered)}, which cannot be switched on in a running job"
                )
            self._good.note(number, values)


def _elements(codec: Cast, payload: Buffer, offset: int, count: int) -> torch.Tensor:
    """Decodes `count` elements of a payload, from byte `offset` on, as float32: [count].

    The result may be a view of the payload: do not write to it.
    """
    return codec.decode(memoryview(payload)[offset:], count).to(torch.float32)
