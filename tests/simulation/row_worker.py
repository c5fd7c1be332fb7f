"""A worker's pushes and pulls of rows, in messages that may come in any order, and what it finds in the rows."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import safetensors.torch
import torch

from ps_protocol.errors import PSError, TryLater
from ps_protocol.identity import Identity
from ps_protocol.messages.rows import (
    PulledRows,
    PulledTable,
    PullOffsets,
    RowPushKind,
    RowsPull,
    RowsPush,
    TablePull,
    TablePush,
    write_exchange,
)
from ps_protocol.row_ids import COUNT_BYTES, ID_BYTES
from ps_protocol.segment_layout import PAGE_BYTES, RowMemory, aligned, pulled_bytes, pushed_bytes
from ps_protocol.tables import Beginning
from tests.chaos.oracle import Violation
from tests.simulation.row_oracle import (
    Content,
    Pulled,
    RowWitness,
    in_counting_order,
    wrong_at_any_time,
    wrong_beginning,
)
from tests.simulation.rows import COUNTS, START, UPDATES_BEFORE, Part, Rows, Table, nothing
from tests.simulation.sharing import STALE, SharedMemory
from tests.simulation.supervision import SHARDS

if TYPE_CHECKING:
    from tests.simulation.runs import Run
    from tests.simulation.worker import Place, Worker

STEPS_BETWEEN_LOOKS = 12  # at whole tables
APART = 0.25  # of the steps of tables in shared memory: their rows are pushed and pulled by calls of their own
TOGETHER = 0.7  # of the steps of other tables, where workers share memory with some shards: one call, in a message
CALL_SECONDS, PULL_SECONDS = 15.0, 60.0  # of ps_worker.cluster


@dataclass(frozen=True)
class StepOfRows:
    """One step of one table on one shard that shares memory.

    first:  where what is pushed begins; wanted: where the ids begin that are pulled; end: of their rows
    """

    shared: SharedMemory
    table: Table
    shard: int
    push: RowsPush
    first: int
    ids: list[int]
    wanted: int
    end: int

    @property
    def _memory(self) -> RowMemory:
        assert self.shared.row_memory is not None
        return self.shared.row_memory

    def pull(self, identity: Identity) -> RowsPull:
        """Writes the ids into the segment; returns the pull that names them."""
        count = len(self.ids)
        self._memory.array(self.wanted, count, np.int64)[:] = self.ids
        places = PullOffsets(self.wanted, count, self.wanted + ID_BYTES * count)
        return RowsPull(identity, self.table.number, self.push.clock, b"", places)

    def rows(self) -> Rows:
        """Overwrites the memory for the rows that are pulled, and returns it."""
        count, dim = len(self.ids), self.table.dim
        rows: Rows = self._memory.array(self.wanted + ID_BYTES * count, count * dim, np.float32).reshape(count, dim)
        rows[:] = STALE
        return rows


class WorkerRows:
    """The rows of one worker.

    saves:   clocks at which it was told to save its state
    parts:   each table on each shard
    content: whole tables as it was asked to fetch them last, by table and shard; None: they have not come
    """

    def __init__(self, worker: Worker, run: Run, row: int) -> None:
        self.worker, self.run, self.row = worker, run, row
        self.saves: set[int] = set()
        self.content: dict[tuple[int, int], Content] | None = None
        self._world, self._network = worker.world, worker.cluster.network
        self._witness = RowWitness(run.rules, row)
        self.parts = list(itertools.product(run.job.tables, range(SHARDS)))
        self._pulled: dict[tuple[int, int], Pulled] = {}

    def lost_track(self) -> None:
        """Something happened between two steps."""
        self._witness.lost_track()

    # -- pushes ------------------------------------------------------------------------------------------------------

    def pushes(self, place: Place, clock: int, step: int, begun: int) -> list[Callable[[], object]]:
        """Returns what pushes the rows of a step, each message by itself. begun: as in Worker.pushes"""
        works: list[Callable[[], object]] = []
        for table, shard in self._apart(place, clock):
            part, had = self._part(place, table, shard, step, begun)
            messages = [*self._messages(place, table, clock, part)]
            left = {message.first for message in messages} if table.number == COUNTS and not had else set()
            works += [partial(self._push_rows, place, shard, message, step, left) for message in messages]
        return works

    def _apart(self, place: Place, clock: int) -> list[tuple[Table, int]]:
        """Returns each table on each shard whose rows are pushed and pulled by calls of their own."""
        sharing = () if place.shared is None else place.shared.row_shards
        together = self._together(place, clock)
        return [part for part in self.parts if part[1] not in sharing and part not in together]

    def _together(self, place: Place, clock: int) -> list[tuple[Table, int]]:
        """Returns each table on each shard to which a step is one call, whose message has the rows."""
        if place.shared is None:
            return []
        draw, sharing = random.Random(f"{self.worker.life.number} {clock}"), place.shared.row_shards
        drawn = [part for part in self.parts if draw.random() < TOGETHER]
        return [part for part in drawn if part[1] not in sharing]

    def _part(self, place: Place, table: Table, shard: int, step: int, begun: int) -> tuple[Part, bool]:
        """Returns what a step pushes to a table on a shard, and whether that had had it when the place was taken."""
        had = self.has_had(place, table, shard, begun)
        return nothing(table) if had else table.pushed(shard, self.row, step, self.run.rules.unit), had

    def _push_rows(self, place: Place, shard: int, message: RowsPush, step: int, left: set[int]) -> None:
        """Pushes rows. left: the messages of a step that are not acknowledged, if the saved rows are to have them"""
        self._push(place, shard, message)
        if left:
            left.discard(message.first)
            if not left:
                self.run.acknowledged.note(len(self.run.buckets) + shard, self.worker.life.number, step)

    def has_had(self, place: Place, table: Table, shard: int, clock: int) -> bool:
        """Whether a shard's part of a table had had what is pushed for a clock when the worker took its place."""
        return place.has_had(shard, self.run.job.shape.buckets + table.number, clock)

    def _messages(self, place: Place, table: Table, clock: int, part: Part) -> Iterator[RowsPush]:
        draw, total, kind = self._world.random, len(part.ids), _kind(part)
        order = draw.sample(range(total), total)
        cuts = sorted(draw.sample(range(1, total), min(total - 1, draw.choice([0, 0, 1, 2])))) if total else []
        for first, end in itertools.pairwise([0, *cuts, total]):
            rows = order[first:end]
            ids = np.array([part.ids[row] for row in rows], "<i8")
            occurrences = np.array([part.occurrences[row] for row in rows], "<u4")
            payload = ids.tobytes() + occurrences.tobytes() + part.gradients[rows].astype("<f4").tobytes()
            counted = first, len(rows), total
            yield RowsPush(self.worker.identity(place), table.number, clock, kind, payload, *counted, {})

    def beginnings(self, place: Place) -> list[Callable[[], object]]:
        """Returns what sends the rows that tables begin with: to each shard one message after the other."""
        return [partial(self._begin, place, table, shard) for table, shard in self.parts]

    def _begin(self, place: Place, table: Table, shard: int) -> None:
        rows = table.first(shard, self.run.number)
        total = len(rows)
        cut = self._world.random.randint(1, total) if total else 0
        for first, end in [(0, 0), (0, cut), (cut, total)] if 0 < cut < total else [(0, 0), (0, total)]:
            is_last = end == total and (first < end or not total)
            self._push(place, shard, self._beginning(place, table, rows, first, end, is_last))

    def _beginning(
        self, place: Place, table: Table, rows: Mapping[int, Rows], first: int, end: int, is_last: bool
    ) -> TablePush:
        ids = [*rows][first:end]
        elements = np.array([rows[number] + START for number in ids], "<f4").reshape(-1, table.dim)
        payload = np.array(ids, "<i8").tobytes() + np.ones(len(ids), "<i8").tobytes() + elements.tobytes()
        what = Beginning(UPDATES_BEFORE, 0, len(rows)), first, len(ids), 0, is_last
        return TablePush(self.worker.identity(place), table.number, *what, payload)

    def _push(self, place: Place, shard: int, message: RowsPush | TablePush) -> None:
        def attempt() -> object:
            return self._network.call(place.addresses[shard], "push_rows", message, seconds=CALL_SECONDS)

        self.worker.retry(attempt, lambda: place.closed)

    # -- pulls -------------------------------------------------------------------------------------------------------

    def pulls(self, place: Place, step: int) -> list[Callable[[], object]]:
        """Returns what fetches the rows that are looked at after a step."""
        return [partial(self._pull, place, table, shard, step) for table, shard in self._apart(place, place.clock)]

    def _pull(self, place: Place, table: Table, shard: int, step: int) -> None:
        ids = table.asked(shard, self.row, step)
        call = self._pull_of(place, table, ids, place.clock)
        self._fetch_rows(place, table, shard, ids, partial(self._answers, place, shard, call))

    def _pull_of(self, place: Place, table: Table, ids: list[int], clock: int) -> RowsPull:
        return RowsPull(self.worker.identity(place), table.number, clock, np.array(ids, "<i8").tobytes())

    def _fetch_rows(
        self,
        place: Place,
        table: Table,
        shard: int,
        ids: list[int],
        answers: Callable[[], Iterator[object]],
        shared: Rows | None = None,
    ) -> None:
        """Takes the rows that answers bring. shared: where they lie if an answer says that they are in the segment"""

        def attempt() -> None:
            pulled, missing = Pulled(ids, np.empty((len(ids), table.dim), np.float32)), set(range(len(ids)))
            for answer in answers():
                if isinstance(answer, PulledRows) and (answer.payload is not None or answer.in_segment):
                    some = slice(answer.first, answer.first + answer.rows)
                    if answer.payload is not None:
                        pulled.rows[some] = np.frombuffer(answer.payload, "<f4").reshape(-1, table.dim)
                    elif place.closed or shared is None:
                        raise TryLater("the connection is closed")
                    else:
                        pulled.rows[some] = shared[some]
                    missing -= set(range(len(ids))[some])
                    pulled.trained, pulled.version = pulled.trained + answer.trained, answer.version
                    if answer.save_state:
                        self.saves.add(place.clock)
            if missing:
                raise TryLater("the answer broke off")
            self._pulled[table.number, shard] = pulled

        self._until_it_comes(place, attempt)

    def _answers(self, place: Place, shard: int, call: RowsPull | TablePull) -> Iterator[object]:
        address, begun = place.addresses[shard], place.calls.append
        return self._network.stream(address, "pull", call, seconds=PULL_SECONDS, begun=begun)

    def _until_it_comes(self, place: Place, attempt: Callable[[], object]) -> None:
        try:
            self.worker.retry(attempt, lambda: place.closed)
        finally:
            place.calls = [call for call in place.calls if not call.over]

    # -- in shared memory --------------------------------------------------------------------------------------------

    def exchanges(self, place: Place, clock: int, step: int, begun: int) -> list[Callable[[], object]]:
        """Returns what pushes the rows of a step to shards that share memory, or in one message, and pulls those that
        are looked at. begun: as in `pushes`"""
        shared, works, end = place.shared, list[Callable[[], object]](), PAGE_BYTES
        if shared is None or shared.row_memory is None:
            return []
        works += [
            partial(self._exchange_in_message, shared, place, *part, clock, step, begun)
            for part in self._together(place, clock)
        ]
        for table, shard in self.parts:
            if shard not in shared.row_shards:
                continue
            part, had = self._part(place, table, shard, step, begun)
            ids = table.asked(shard, self.row, step)
            push, first = self._put(shared.row_memory, place, table, clock, part, end), end
            wanted = first + aligned(pushed_bytes(push.count, table.dim))
            end = wanted + aligned(pulled_bytes(len(ids), table.dim))
            step_of_rows = StepOfRows(shared, table, shard, push, first, ids, wanted, end)
            works += self._calls(place, step_of_rows, step, table.number == COUNTS and not had)
        return works

    def _put(self, memory: RowMemory, place: Place, table: Table, clock: int, part: Part, first: int) -> RowsPush:
        """Writes rows into the segment; returns the push that names them."""
        count = len(part.ids)
        memory.array(first, count, np.int64)[:] = part.ids
        memory.array(first + ID_BYTES * count, count, np.uint32)[:] = part.occurrences
        gradients = first + (ID_BYTES + COUNT_BYTES) * count
        memory.array(gradients, count * table.dim, np.float32)[:] = part.gradients.reshape(-1)
        who = self.worker.identity(place), table.number, clock, _kind(part), b"", 0, count, count, {}
        return RowsPush(*who, place=first if count else None)  # type: ignore[arg-type]

    def _calls(self, place: Place, of: StepOfRows, step: int, counts: bool) -> list[Callable[[], object]]:
        """Returns the calls of a step: an exchange, or a push and a pull. counts: saved rows are to have the step"""
        left, pull = {0} if counts else set[int](), of.pull(self.worker.identity(place))
        if self._world.random.random() >= APART:
            request = write_exchange(of.push, pull.places).whole()
            answers = partial(of.shared.exchanged, of.shard, 0, "exchange_rows", request)
            return [partial(self._exchange, place, of, answers, step, left)]

        def push_alone() -> None:
            self._push_rows(place, of.shard, of.push, step, left)
            of.shared.overwrite_rows(of.first, of.wanted)

        def pull_alone() -> None:
            self._fetch_rows(
                place, of.table, of.shard, of.ids, partial(self._answers, place, of.shard, pull), of.rows()
            )
            of.shared.overwrite_rows(of.wanted, of.end)

        return [push_alone, pull_alone]

    def _exchange(
        self, place: Place, of: StepOfRows, answers: Callable[[], Iterator[object]], step: int, left: set[int]
    ) -> None:
        self._fetch_rows(place, of.table, of.shard, of.ids, answers, of.rows())
        if left:
            self.run.acknowledged.note(len(self.run.buckets) + of.shard, self.worker.life.number, step)
        of.shared.overwrite_rows(of.first, of.end)

    # -- in one message ----------------------------------------------------------------------------------------------

    def _exchange_in_message(
        self, shared: SharedMemory, place: Place, table: Table, shard: int, clock: int, step: int, begun: int
    ) -> None:
        """Pushes the rows of a step, and pulls those that are looked at, in one call; after a failure in two."""
        part, had = self._part(place, table, shard, step, begun)
        ids, count, tried = table.asked(shard, self.row, step), len(part.ids), False
        who, pull = self.worker.identity(place), self._pull_of(place, table, ids, clock)
        payload = b"".join(
            np.asarray(each, kind).tobytes()
            for each, kind in ((part.ids, "<i8"), (part.occurrences, "<u4"), (part.gradients, "<f4"))
        )
        push = RowsPush(who, table.number, clock, _kind(part), payload, 0, count, count, {})
        request = write_exchange(push, None, pull.payload).whole()

        def answers() -> Iterator[object]:
            nonlocal tried
            if not tried:
                tried = True
                yield from shared.exchanged(shard, 0, "exchange_rows", request)
                return
            self._network.call(place.addresses[shard], "push_rows", push, seconds=CALL_SECONDS)
            yield from self._answers(place, shard, pull)

        self._fetch_rows(place, table, shard, ids, answers)
        if table.number == COUNTS and not had:
            self.run.acknowledged.note(len(self.run.buckets) + shard, self.worker.life.number, step)

    # -- what it finds -----------------------------------------------------------------------------------------------

    def look(self, step: int, buckets: torch.Tensor) -> list[Violation]:
        """Returns what is wrong with the rows that were pulled after a step, and writes those of the counting oracle.

        buckets: of that oracle, one for each shard: [SHARDS, LIVES, 1 + COLUMNS]
        """
        found: list[Violation] = []
        for table, shard in self.parts:
            pulled = self._pulled[table.number, shard]
            found += self._witness.check(table, shard, pulled, step)
            if table.number == COUNTS:
                buckets[shard] = in_counting_order(pulled.rows - START)
        if self.parts and step % STEPS_BETWEEN_LOOKS == 0:
            self.worker.host.spawn("tables", self._look_at_all)
        return found

    # -- whole tables ------------------------------------------------------------------------------------------------

    def fetch(self) -> None:
        """Has all tables fetched as they are now."""
        self.content = None
        self.worker.host.spawn("tables", self._fetch)

    def _fetch(self) -> None:
        place = self.worker.place
        try:
            content = {(table.number, shard): self.fetched(place, table, shard) for table, shard in self.parts}
        except PSError as error:
            self._world.trace(f"{self.worker.host.name}: its tables do not come: {error}")
            return
        if self.worker.place is place:
            self.content = content

    def _look_at_all(self) -> None:
        """Looks at whole tables while they are trained."""
        place, run = self.worker.place, self.run
        for table, shard in self.parts:
            try:
                content = self.fetched(place, table, shard)
            except PSError:  # its place is lost
                return
            for wrong in [
                *wrong_at_any_time(table, shard, content, run.writers, run.rules),
                *wrong_beginning(table, shard, content, run.begun_by),
            ]:
                where = {"table": table.name, "shard": shard, **wrong.where}
                self.worker.cluster.violated(replace(wrong, where=where))

    def fetched(self, place: Place, table: Table, shard: int) -> Content:
        """Returns a whole table of a shard, with all that is staged there."""
        call = TablePull(self.worker.identity(place), table.number, place.clock, count_only=False)
        pieces: list[bytes] = []
        count = 0

        def attempt() -> None:
            nonlocal count
            pieces.clear()
            for answer in self._answers(place, shard, call):
                if isinstance(answer, PulledTable) and answer.payload is not None:
                    pieces.append(bytes(answer.payload))
                    count = answer.rows

        self._until_it_comes(place, attempt)
        content = Content.of(safetensors.torch.load(b"".join(pieces)))
        if len(content.rows) != count:
            said = f"{count} rows are announced, and {len(content.rows)} come"
            self.worker.cluster.violated(Violation("wrong row", said, {"table": table.name, "shard": shard}))
        return content


def _kind(part: Part) -> RowPushKind:
    if part.present:
        return RowPushKind.GRADIENT
    return RowPushKind.NO_GRADIENT if part.in_mean else RowPushKind.SKIP
