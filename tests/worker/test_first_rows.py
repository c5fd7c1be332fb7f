"""What rank 0 sends of the tables that a job begins with, where an earlier one had begun some of them."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future

import pytest
import torch

from ps_worker.cluster.first_rows import RowsBefore
from ps_worker.tables.server_rows import FirstRows

ROWS = {"ids": torch.tensor([1])}


class Tables:
    """Two tables of a worker. warned: of the clocks at which its rows were not taken"""

    def __init__(self, rows: bool) -> None:
        self.rows: dict[str, torch.Tensor] = ROWS if rows else {}
        self.warned: list[int] = []

    def first_rows(self) -> list[FirstRows]:
        return [FirstRows("a", self.rows, 8), FirstRows("b", {}, 9)]

    def warn_of_ignored(self, clock: int) -> None:
        self.warned.append(clock)


@pytest.mark.parametrize("rows", [True, False])
@pytest.mark.parametrize(
    ("begun", "sent"),
    [
        ([None, None, None, None], [8, 9]),
        ([7, None, None, None], [7, 9]),
        ([None, 0, None, 6], [0, 6]),
        ([7, 7, None, 6], [7, 6]),
        ([7, 7, 6, 6], None),
    ],
)
def test_shards_that_have_not_begun_get_the_seed_of_those_that_have(
    begun: list[int | None], sent: list[int] | None, rows: bool
) -> None:
    tables, calls = Tables(rows), list[tuple[bool, list[int]]]()

    def begin(what: Sequence[FirstRows], ask: bool) -> list[Future[int | None]]:
        calls.append((ask, [table.seed for table in what]))
        answers = [Future[int | None]() for _ in begun]
        for answer, seed in zip(answers, begun, strict=True):
            answer.set_result(seed if ask else None)
        return answers

    before = RowsBefore(tables)  # type: ignore[arg-type]
    before.send(begin, lambda: None)
    assert calls == [(True, [8, 9]), *([(False, sent)] if sent else [])]
    before.began(0)
    assert tables.warned == ([0] if rows and sent is None else [])
