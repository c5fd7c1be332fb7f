"""The specification of a table of rows, which servers compare between workers."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from ps_protocol.errors import InvalidRequest
from ps_protocol.hyper_parameters import HyperParameters

MAX_DIM = 4096
MAX_UPDATES = 2**62  # the highest version that a table may begin with
MAX_PUSHED_BYTES = 2**30  # the limit for one table in one step of one worker to one shard: gradients or assigned rows
MAX_ROWS = 2**31 - 1  # the most rows of a table on one shard: their indices are int32
INITIAL_KINDS = ("constant", "uniform", "normal")


@dataclass(frozen=True)
class Initializer:
    """The first value of a row, a function of seed, id and column alone. Every process computes it alike.

    kind: "constant", "uniform" or "normal"
    scale: the constant; the bound of [-scale, scale); the standard deviation
    seed: 0 to 2**64 - 1
    """

    kind: str = "normal"
    scale: float = 1.0
    seed: int = 0


@dataclass(frozen=True)
class TableSpec:
    """One table: rows named by 64-bit ids. A row is created by the update that trains it first.

    name: that of its module in the model
    dim: elements of a row, float32
    admit_after: an id becomes a row with the update that contains its admit_after-th occurrence; 0 and 1: with the
    first
    expire_after: a row is removed after this many updates of the table that did not train it; 0: never
    max_rows: the most rows on all shards together; beyond it, the rows trained longest ago are removed; 0: no limit
    initial_rows: whether rank 0 sends the table's initial rows; the table waits for them
    """

    name: str
    dim: int
    initializer: Initializer = Initializer()
    admit_after: int = 0
    expire_after: int = 0
    max_rows: int = 0
    initial_rows: bool = False

    def seeded(self, seed: int | None) -> TableSpec:
        """Returns the table with another seed; None: unchanged."""
        return self if seed is None else replace(self, initializer=replace(self.initializer, seed=seed))


@dataclass(frozen=True)
class JobTable:
    """A table in a job: its rows, and their optimizer.

    optimizer: a name of row_optimizers.ROW_OPTIMIZERS
    values: its hyper-parameters when the job began
    """

    rows: TableSpec
    optimizer: str
    values: HyperParameters = field(default_factory=dict)

    def difference(self, other: JobTable) -> str | None:
        """Describes the first difference from another worker's table; None if the two are compatible.

        Two things are not compared. Scripts draw different seeds, and the seed of rank 0, or of the worker that
        registers the job, counts. Hyper-parameters travel with each push.

        If the registered table waits for no initial rows, a worker may still offer some; the shards ignore them. If it
        waits for them, a worker that offers none would make all others wait, so this is a difference.
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
    """The state that a table begins with on one shard.

    version: the number of updates that have trained its rows
    seed: the seed of rows that are not trained yet
    rows: the number of rows
    waiting: the number of ids that are not admitted yet
    with_state: whether rows come with the state of the table's optimizer
    """

    version: int
    seed: int
    rows: int = 0
    waiting: int = 0
    with_state: bool = False

    @property
    def total(self) -> int:
        """The number of rows and of ids that are not admitted yet."""
        return self.rows + self.waiting


def validate_table(spec: TableSpec) -> None:
    """Raises InvalidRequest that names the first error of a table."""
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
    """Returns the size of assigned rows with their ids, in bytes."""
    return rows * (8 + 4 * dim)
