"""What a table of rows is, as a value that both ends can compare."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from ps_protocol.errors import InvalidRequest
from ps_protocol.hyper_parameters import HyperParameters

MAX_DIM = 4096
MAX_UPDATES = 2**62  # that have trained a table's rows before a job
MAX_PUSHED_BYTES = 2**30  # of one table, that a worker may push in a step to one shard: gradients, or assigned rows
MAX_ROWS = 2**31 - 1  # of one table on one shard: rows are numbered with 32 bits
INITIAL_KINDS = ("constant", "uniform", "normal")


@dataclass(frozen=True)
class Initializer:
    """How a row begins that no update has trained: a function of seed, id and column alone.

    kind:  "constant", "uniform" or "normal"
    scale: the constant; the bound of [-scale, scale); the standard deviation
    seed:  0 to 2**64 - 1
    """

    kind: str = "normal"
    scale: float = 1.0
    seed: int = 0


@dataclass(frozen=True)
class TableSpec:
    """One table: rows named by 64-bit ids. A row comes into being with the update that trains it first.

    name:         that of its module in the model
    dim:          elements of a row, float32
    admit_after:  an id becomes a row with the update in which it has occurred this often; 0 and 1: at once
    expire_after: a row is forgotten when so many updates of the table have not trained it; 0: never
    max_rows:     rows on all shards together; beyond, those trained longest ago go; 0: as many as fit into memory
    initial_rows: rank 0 says which rows the table begins with, and it begins when they are here
    """

    name: str
    dim: int
    initializer: Initializer = Initializer()
    admit_after: int = 0
    expire_after: int = 0
    max_rows: int = 0
    initial_rows: bool = False

    def seeded(self, seed: int | None) -> TableSpec:
        """Returns the table with another seed; None: with its own."""
        return self if seed is None else replace(self, initializer=replace(self.initializer, seed=seed))


@dataclass(frozen=True)
class JobTable:
    """A table in a job: its rows, and what steps them.

    optimizer: a name of row_optimizers.ROW_OPTIMIZERS
    values:    its hyper-parameters when the job began
    """

    rows: TableSpec
    optimizer: str
    values: HyperParameters = field(default_factory=dict)

    def difference(self, other: JobTable) -> str | None:
        """Returns the first difference from a table of another worker's job in words; None when they are the same.

        The seed is none: a script draws it, and that of rank 0 or of the worker that registers the job counts. Nor are
        hyper-parameters, which ride with each push. Where the job waits for no rows, a worker may bring some: none is
        taken. The other way round all would wait for them.
        """
        ours, others = self.rows, other.rows
        for what, a, b in (
            ("name", ours.name, others.name),
            ("dim", ours.dim, others.dim),
            ("initial value", ours.initializer.kind, others.initializer.kind),
            ("scale of initial values", ours.initializer.scale, others.initializer.scale),
            ("admit_after", ours.admit_after, others.admit_after),
            ("expire_after", ours.expire_after, others.expire_after),
            ("max_rows", ours.max_rows, others.max_rows),
            ("initial_rows", ours.initial_rows, ours.initial_rows and others.initial_rows),
            ("optimizer", self.optimizer, other.optimizer),
        ):
            if a != b:
                return f"table {ours.name!r} has {what} {a} in the registered job and {b} in this one"
        return None


@dataclass(frozen=True)
class Beginning:
    """What a table begins with on one shard, in all.

    version:    updates that have trained its rows
    seed:       of rows that are not trained
    rows:       how many there are; waiting: how many ids wait
    with_state: rows have the state of the table's optimizer
    """

    version: int
    seed: int
    rows: int = 0
    waiting: int = 0
    with_state: bool = False

    @property
    def total(self) -> int:
        """Rows and ids that wait."""
        return self.rows + self.waiting


def validate_table(spec: TableSpec) -> None:
    """Raises InvalidRequest naming the first thing wrong with a table."""
    start = spec.initializer
    for what, value, lowest, highest in (
        ("dim", spec.dim, 1, MAX_DIM),
        ("admit_after", spec.admit_after, 0, 2**32 - 1),
        ("expire_after", spec.expire_after, 0, 2**32 - 1),
        ("max_rows", spec.max_rows, 0, 2**63 - 1),
        ("seed", start.seed, 0, 2**64 - 1),
    ):
        if not lowest <= value <= highest:
            raise InvalidRequest(f"table {spec.name!r}: {what} must be from {lowest} to {highest}, got {value}")
    if start.kind not in INITIAL_KINDS:
        known = ", ".join(INITIAL_KINDS)
        raise InvalidRequest(f"table {spec.name!r}: rows begin as one of {known}, got {start.kind[:80]!r}")
    if not math.isfinite(start.scale) or (start.kind != "constant" and start.scale < 0):
        numbers = "finite" if start.kind == "constant" else "finite, and from 0 on"
        raise InvalidRequest(f"table {spec.name!r}: the scale of initial values must be {numbers}, got {start.scale}")


def assigned_bytes(dim: int, rows: int) -> int:
    """Returns the bytes of rows that a script has set, with their ids."""
    return rows * (8 + 4 * dim)
