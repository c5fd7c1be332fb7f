"""Whose hyper-parameters an update is made with: buckets and tables have one rule."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from ps_protocol.hyper_parameters import HyperParameters
from ps_protocol.layout import ParameterSpec, bucket_layout
from ps_protocol.modes import Consistency
from ps_protocol.tables import Initializer, JobTable, TableSpec
from ps_server.core.dense import DenseBucket, Gradient
from ps_server.core.sums import Scratch
from ps_server.core.table_rows import RowsContribution, TableRows
from ps_tables.contributions import RowGradients
from tests.tools.raw_worker import vector_job

# A contribution: the clock of its worker, and the rate that it names.
Update = list[tuple[int, float | None]]

FIRST = 1.0  # the rate that the job begins with


def rates_of_bucket(updates: list[Update]) -> list[object]:
    """The rate of each update of a bucket."""
    spec = replace(vector_job("job", "sync", 16, 0), consistency=Consistency(0, aggregate=True, quorum=2))
    described = bucket_layout((ParameterSpec("w", (16,), "float32", 0),), 64).buckets[0]
    bucket = DenseBucket(spec, described, Scratch(), mixes_clocks=True)
    rates = []
    for update in updates:
        for clock, rate in update:
            groups: dict[int, HyperParameters] = {} if rate is None else {0: {"lr": rate}}
            bucket.add(Gradient(torch.ones(16), groups=groups, clock=clock))
        bucket.step()
        rates.append(bucket.groups()[0]["lr"])
    return rates


def rates_of_table(updates: list[Update]) -> list[object]:
    """The rate of each update of a table."""
    rows = TableRows(JobTable(TableSpec("t", 4, Initializer("constant", 0.0)), "SGD", {"lr": FIRST}), 8, 0)
    rates = []
    for update in updates:
        for clock, rate in update:
            part = RowGradients(np.array([1]), np.array([1]), torch.ones(1, 4))
            rows.add(RowsContribution((part,), values=None if rate is None else {"lr": rate}, clock=clock))
        rows.step()
        rates.append(rows.values["lr"])
    return rates


CASES: dict[str, tuple[list[Update], list[float]]] = {
    "the first counts": ([[(0, 0.5), (0, 0.4)]], [0.5]),
    "one that names none leaves it to the next": ([[(0, None), (0, 0.4)]], [0.4]),
    "the next update has its own": ([[(0, 0.5)], [(0, 0.75)]], [0.5, 0.75]),
    "the furthest counts": ([[(4, 0.4), (5, 0.5)]], [0.5]),
    "one that is furthest and names none does not count": ([[(5, None), (4, 0.4), (5, 0.5)]], [0.5]),
    "of several that are furthest the first": ([[(5, 0.5), (5, 0.6), (4, 0.4)]], [0.5]),
    "late ones alone keep what there is": ([[(5, 0.5)], [(6, None), (4, 0.4)], [(7, 0.7)]], [0.5, 0.5, 0.7]),
}


@pytest.mark.parametrize("rates", [rates_of_bucket, rates_of_table])
@pytest.mark.parametrize(("updates", "expected"), CASES.values(), ids=CASES)
def test_a_late_worker_never_sets_a_schedule_back(
    rates: Callable[[list[Update]], list[object]], updates: list[Update], expected: list[float]
) -> None:
    assert rates(updates) == expected
