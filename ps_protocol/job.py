"""The specification of a job, which servers compare between workers."""

from __future__ import annotations

import enum
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ps_protocol.errors import InvalidRequest, LimitExceeded
from ps_protocol.hyper_parameters import HyperParameters
from ps_protocol.layout import ALIGNMENT_BYTES, DATA_TYPES, ParameterSpec
from ps_protocol.local import OUTER_OPTIMIZER, Local
from ps_protocol.modes import Consistency, check_quorum
from ps_protocol.pieces import validate_pieces, whole_parameters
from ps_protocol.tables import JobTable, validate_table
from ps_protocol.wire_formats import BLOCK_FORMATS, FORMATS

MAX_BUCKET_BYTES = 16 * 2**20
# A message is a bucket with its header, or a control message. The largest of these is a job of MAX_PARAMETERS.
MAX_MESSAGE_BYTES = MAX_BUCKET_BYTES + 2**20
MAX_SCRIPT_BYTES = 2**16  # the limit for values that a script sets: they travel with heartbeats
MAX_NAME_LENGTH = 512
MAX_PARAMETERS = 100_000
MAX_ELEMENTS = 2**50  # keeps each product of sizes below 64 bits
MAX_WORLD_SIZE = 65_536
MAX_OPTIMIZERS = 64
MAX_DIMENSIONS = 64
MAX_TABLES = 1_024
MAX_BUCKETS = 2**18  # 1 TiB in buckets of 4 MiB; every server and worker keeps a list of all buckets

# The name of a setting, its value in the registered job, and its value in the other job.
Compared = tuple[str, object, object]

_JOB_NAME = re.compile(r"[A-Za-z0-9._-]{1,128}")
_ELEMENT = re.compile(r"[a-z][a-z0-9_]{0,39}")


# The wire formats of float32 gradients and weights. tensors.py has a codec for each. With a block format the sender
# adds the rounding error to its next payload.
BLOCK_WIRES = tuple(BLOCK_FORMATS)
WIRES = tuple(FORMATS)


class NonFinite(enum.Enum):
    """How shards treat a gradient with an infinity or a NaN."""

    REFUSE = "refuse"
    SKIP = "skip"
    ALLOW = "allow"


@dataclass(frozen=True)
class JobSpec:
    """One model being trained. Workers with equal specs train the same job.

    parameters: every tensor of the model, in registration order
    optimizer: the name of a torch.optim class
    param_groups: the hyper-parameters of all parameter groups when the job began
    bucket_bytes: bytes of a full bucket, a multiple of 64; before registration 0 lets the server choose
    world_size: the number of workers; 0: elastic, as many as have joined
    gradient_wire, weight_wire: the wire formats of float32 gradients and weights, out of WIRES
    more_optimizers: the names of a script's further optimizers
    param_group_optimizers: the optimizer of each group, 0 being `optimizer`; empty with one optimizer
    tables: the tables of rows
    local: the settings of local steps; None in all modes but `local:H`
    group_size: how many processes each worker consists of: more than one where workers are groups
    """

    name: str
    parameters: tuple[ParameterSpec, ...]
    optimizer: str
    param_groups: tuple[HyperParameters, ...]
    consistency: Consistency
    bucket_bytes: int
    world_size: int
    non_finite: NonFinite = NonFinite.REFUSE
    gradient_wire: str = "float32"
    weight_wire: str = "float32"
    more_optimizers: tuple[str, ...] = ()
    param_group_optimizers: tuple[int, ...] = ()
    tables: tuple[JobTable, ...] = ()
    local: Local | None = None
    group_size: int = 1

    @property
    def mode(self) -> str:
        """The name of its mode."""
        return str(self.consistency) if self.local is None else self.local.mode

    @property
    def optimizers(self) -> tuple[str, ...]:
        """The names of all optimizers."""
        return (self.optimizer, *self.more_optimizers)

    @property
    def has_separate_base(self) -> bool:
        """Whether a worker keeps the last pulled weights in addition to its own.

        `local:H/F` mixes them into its own some steps later. With int8 and int4 the next pull is added to them.
        """
        return self.local is not None and (self.local.fragments is not None or self.weight_wire in BLOCK_WIRES)

    def optimizer_of(self, group: int) -> str:
        """Returns the name of a group's optimizer."""
        return self.optimizers[self.param_group_optimizers[group] if self.param_group_optimizers else 0]


def added_name(name: str, number: int) -> str:
    """Returns the name of a job that has the parameters added to another job. name: the other job's; number: from 1"""
    return f"{name}.added{number}"


def is_added_to(name: str, other: str) -> bool:
    """Returns whether `other` is the name of a job that has parameters added to the job `name`; see `added_name`."""
    return other.startswith(f"{name}.added") and other[len(name) + len(".added") :].isdecimal()


def validate(spec: JobSpec) -> None:
    """Raises InvalidRequest or LimitExceeded that names the first error of a spec."""
    if not _JOB_NAME.fullmatch(spec.name):
        raise InvalidRequest(f"a job's name is 1 to 128 of letters, digits, '.', '_' and '-', got {spec.name[:200]!r}")
    if not spec.param_groups:
        raise InvalidRequest("a job needs at least one parameter group, got none")
    if len(spec.more_optimizers) >= MAX_OPTIMIZERS:
        raise LimitExceeded(f"a job may have up to {MAX_OPTIMIZERS} optimizers, got {len(spec.optimizers)}")
    if spec.param_group_optimizers and len(spec.param_group_optimizers) != len(spec.param_groups):
        raise InvalidRequest(
            f"expected {len(spec.param_groups)} groups with an optimizer, got {len(spec.param_group_optimizers)}"
        )
    unknown = next((index for index in spec.param_group_optimizers if not 0 <= index < len(spec.optimizers)), None)
    if unknown is not None:
        raise InvalidRequest(f"expected an optimizer below {len(spec.optimizers)} for each group, got {unknown}")
    if len(spec.parameters) > MAX_PARAMETERS:
        raise LimitExceeded(f"a job may have up to {MAX_PARAMETERS} parameters, got {len(spec.parameters)}")
    if spec.world_size > MAX_WORLD_SIZE:
        raise LimitExceeded(f"a job may have up to {MAX_WORLD_SIZE} workers, got world_size {spec.world_size}")
    check_quorum(spec.consistency, spec.world_size)
    if spec.bucket_bytes < ALIGNMENT_BYTES or spec.bucket_bytes % ALIGNMENT_BYTES:
        raise InvalidRequest(f"bucket_bytes must be a positive multiple of {ALIGNMENT_BYTES}, got {spec.bucket_bytes}")
    if spec.bucket_bytes > MAX_BUCKET_BYTES:
        raise LimitExceeded(f"bucket_bytes may be up to {MAX_BUCKET_BYTES} on this server, got {spec.bucket_bytes}")
    for parameter in spec.parameters:
        _validate_parameter(parameter, len(spec.param_groups))
    _validate_tables(spec, _unique_names(spec))
    validate_pieces(spec.parameters, spec.group_size)
    if spec.group_size > 1 and spec.tables:
        raise InvalidRequest(f"a job whose workers are groups has no tables of rows, got {len(spec.tables)}")
    _validate_wires(spec)
    buckets = sum(parameter.nbytes for parameter in spec.parameters) // spec.bucket_bytes
    if buckets > MAX_BUCKETS:
        raise LimitExceeded(f"a job may have up to {MAX_BUCKETS} buckets, got {buckets}: use larger bucket_bytes")
    _validate_local(spec)
    if not spec.tables and all(parameter.param_group is None for parameter in spec.parameters):
        raise InvalidRequest("a job needs at least one parameter that the optimizer steps, got none")


def _unique_names(spec: JobSpec) -> set[str]:
    """Returns the names of the parameters. Raises InvalidRequest if one comes twice, unless these are its pieces."""
    by_key: dict[tuple[str, tuple[int, ...]], int] = {}
    for parameter in spec.parameters:
        if parameter.key not in by_key:
            by_key[parameter.key] = parameter.member
            continue
        before = by_key[parameter.key]
        if before == parameter.member:
            raise InvalidRequest(f"parameter names must be unique, got {parameter.name!r} twice")
        what = "all of" if parameter.piece is None else f"the piece from {parameter.piece.offsets} on of"
        raise InvalidRequest(f"members {before} and {parameter.member} both have {what} {parameter.name!r}")
    wholes = {parameter.name for parameter in spec.parameters if parameter.piece is None}
    both = next((each.name for each in spec.parameters if each.piece is not None and each.name in wholes), None)
    if both is not None:
        raise InvalidRequest(f"{both!r} is whole and in pieces, in one job")
    return {parameter.name for parameter in spec.parameters}


def _validate_wires(spec: JobSpec) -> None:
    if spec.weight_wire in BLOCK_WIRES and not spec.consistency.one_clock:
        raise InvalidRequest(
            f"weights travel as {spec.weight_wire} in sync and local:H only, where all workers have the same, and the "
            f"mode is {spec.consistency}: write --wire {spec.gradient_wire},bfloat16, or "
            "prepare(..., weight_wire='bfloat16')"
        )


def _validate_local(spec: JobSpec) -> None:
    if spec.local is None:
        return
    if not spec.consistency.aggregate:
        raise InvalidRequest(f"local:H needs the consistency of sync, got {spec.consistency}")
    if spec.consistency.quorum is not None:
        raise InvalidRequest("local:H takes no quorum: its rounds have the differences of all live workers")
    if spec.optimizers != (OUTER_OPTIMIZER,):
        got = ", ".join(spec.optimizers)
        raise InvalidRequest(f"the servers' optimizer is one {OUTER_OPTIMIZER} in local:H, got {got}")
    if spec.tables:
        raise InvalidRequest(f"a job of local:H has no tables of rows, got {len(spec.tables)}")


def _validate_tables(spec: JobSpec, names: set[str]) -> None:
    """Raises InvalidRequest for the first invalid table, or for a name that comes twice. Adds the tables' names to
    `names`.
    """
    if len(spec.tables) > MAX_TABLES:
        raise LimitExceeded(f"a job may have up to {MAX_TABLES} tables, got {len(spec.tables)}")
    for table in spec.tables:
        _validate_name(table.rows.name, "table")
        validate_table(table.rows)
        if table.rows.name in names:
            raise InvalidRequest(f"names of parameters and tables must be unique, got {table.rows.name!r} twice")
        names.add(table.rows.name)


def _validate_name(name: str, what: str) -> None:
    if not 1 <= len(name) <= MAX_NAME_LENGTH:
        raise InvalidRequest(f"a {what}'s name has 1 to {MAX_NAME_LENGTH} characters, got {len(name)}")
    if not name.isprintable():  # errors show it on other users' terminals: control characters could deceive them
        raise InvalidRequest(f"a {what}'s name has printable characters only, got {name[:80]!r}")


def _validate_parameter(parameter: ParameterSpec, group_count: int) -> None:
    _validate_name(parameter.name, "parameter")
    if parameter.dtype not in DATA_TYPES:
        raise InvalidRequest(f"{parameter.name}: expected one of {', '.join(DATA_TYPES)}, got {parameter.dtype}")
    if parameter.param_group is not None and not 0 <= parameter.param_group < group_count:
        raise InvalidRequest(f"{parameter.name}: expected a group below {group_count}, got {parameter.param_group}")
    if parameter.param_group is not None and not DATA_TYPES[parameter.dtype].floating:
        raise InvalidRequest(f"{parameter.name}: an optimizer steps floating-point parameters, got {parameter.dtype}")
    if parameter.element and not (_ELEMENT.fullmatch(parameter.element) and parameter.shape):
        raise InvalidRequest(
            f"{parameter.name}: expected the name of an element type, and a last dimension that counts its parts, got "
            f"{parameter.element[:80]!r} and {parameter.shape}"
        )
    if len(parameter.shape) > MAX_DIMENSIONS or any(not 0 <= size <= MAX_ELEMENTS for size in parameter.shape):
        expected = f"up to {MAX_DIMENSIONS} dimensions of 0 to {MAX_ELEMENTS}"
        raise InvalidRequest(f"{parameter.name}: expected {expected}, got {parameter.shape}")
    if parameter.numel > MAX_ELEMENTS:
        raise LimitExceeded(f"{parameter.name}: a parameter may have {MAX_ELEMENTS} elements, got {parameter.numel}")


def _first_unlike(settings: Sequence[Compared]) -> str | None:
    for what, ours, theirs in settings:
        if ours != theirs:
            return f"the {what} is {ours} in the registered job and {theirs} in this one"
    return None


def _local_settings(registered: JobSpec, offered: JobSpec) -> list[Compared]:
    left, right = registered.local, offered.local
    if left is None or right is None:
        return []  # their modes differ
    ours, theirs = left.fragments, right.fragments
    return [
        ("seconds of a round", left.seconds, right.seconds),
        ("warm-up", left.warm_up, right.warm_up),
        ("outer optimizer's lr", left.lr, right.lr),
        ("outer optimizer's momentum", left.momentum, right.momentum),
        ("outer optimizer's nesterov", left.nesterov, right.nesterov),
        ("delay of a fragment", ours and ours.delay, theirs and theirs.delay),
        ("mixing of a fragment", ours and ours.mixing, theirs and theirs.mixing),
    ]


def _named(name: str, offsets: tuple[int, ...]) -> str:
    return f"a piece of parameter {name!r} at {offsets}" if offsets else f"a parameter {name!r}"


def _parameter_difference(registered: JobSpec, offered: JobSpec) -> str | None:
    expected = {parameter.key: parameter for parameter in registered.parameters}
    got = {parameter.key: parameter for parameter in offered.parameters}
    for key in expected:
        if key not in got:
            return f"the registered model has {_named(*key)} that this one lacks"
    for key in got:
        if key not in expected:
            return f"this model has {_named(*key)} that the registered one lacks"
    for key, left in expected.items():
        right, name = got[key], key[0]
        for what, a, b in (
            ("shape", left.shape, right.shape),
            ("shape of the whole", left.piece and left.piece.whole_shape, right.piece and right.piece.whole_shape),
            ("member", left.member, right.member),
            ("dtype", left.dtype, right.dtype),
            # Servers of an earlier version stored no element types.
            ("element type", left.element or right.element, right.element or left.element),
            ("optimizer group", left.param_group, right.param_group),
        ):
            if a != b:
                return f"parameter {name!r} has {what} {a} in the registered job and {b} in this one"
    if tuple(expected) != tuple(got):
        return "the parameters are registered in another order"
    return None


def difference(registered: JobSpec, offered: JobSpec) -> str | None:
    """Describes the first difference between two jobs; None if they are the same job."""
    # The mode first: local:H also changes the groups and the optimizer, which would be a misleading message.
    differs = _first_unlike([("mode", registered.mode, offered.mode), *_local_settings(registered, offered)])
    if differs is not None:
        return differs
    differs = _first_unlike([("number of members of a group", registered.group_size, offered.group_size)])
    if differs is not None:
        return differs
    differs = _parameter_difference(registered, offered)
    if differs is not None:
        return differs
    settings: list[Compared] = [
        ("optimizer", ", ".join(registered.optimizers), ", ".join(offered.optimizers)),
        ("number of optimizer groups", len(registered.param_groups), len(offered.param_groups)),
        ("optimizer of each group", registered.param_group_optimizers, offered.param_group_optimizers),
        ("bucket_bytes", registered.bucket_bytes, offered.bucket_bytes),
        ("world_size", registered.world_size or "elastic", offered.world_size or "elastic"),
        ("policy for gradients that are not finite", registered.non_finite.value, offered.non_finite.value),
        ("wire format of gradients", registered.gradient_wire, offered.gradient_wire),
        ("wire format of weights", registered.weight_wire, offered.weight_wire),
        ("number of tables", len(registered.tables), len(offered.tables)),
    ]
    differs = _first_unlike(settings)
    if differs is not None:
        return differs
    for table, other in zip(registered.tables, offered.tables, strict=True):
        differs = table.difference(other)
        if differs is not None:
            return differs
    for index, (ours, others) in enumerate(zip(registered.param_groups, offered.param_groups, strict=True)):
        for name in sorted(ours.keys() | others.keys()):
            # Names are compared, values are not: they travel with each push, and a scheduler may have changed the
            # learning rate of a worker that joins late.
            if (name in ours) != (name in others):
                return f"hyper-parameter {name!r} of group {index} is known to one of the two jobs only"
    return None


def are_cut_alike(one: JobSpec, other: JobSpec) -> bool:
    """Whether the members of groups hold the same in two jobs of one model, in the same order: pieces, or as stages of
    a pipeline whole parameters. Jobs whose workers have one process each are cut alike.
    """
    if one.group_size != other.group_size:
        return False
    if not any(each.piece is not None or each.member for spec in (one, other) for each in spec.parameters):
        return True
    each = [[(p.key, p.shape, p.member) for p in spec.parameters] for spec in (one, other)]
    return each[0] == each[1]


def difference_of_uncut(registered: JobSpec, offered: JobSpec) -> str | None:
    """Describes the first difference between two jobs, however groups of processes cut their parameters; None if they
    train the same model in the same way.
    """
    if are_cut_alike(registered, offered):
        return difference(registered, offered)
    return difference(_uncut(registered), _uncut(offered))


def _uncut(spec: JobSpec) -> JobSpec:
    """Returns a job with whole parameters, sorted by name. Parameters without elements are left out, because no member
    has a piece of them.
    """
    wholes = [parameter for parameter in whole_parameters(spec.parameters) if parameter.numel]
    return replace(spec, parameters=tuple(sorted(wholes, key=lambda each: each.name)), group_size=1)
