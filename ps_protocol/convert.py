"""Conversions between protobuf messages and values that servers and workers share: jobs, data, measurements, times.
Also the parts that messages of the data path have in common: a separate payload, the header of an answer, the notice of
a wait.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from google.protobuf import json_format
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import DecodeError, Message
from google.protobuf.timestamp_pb2 import Timestamp

from ps_protocol.batches import DataRange
from ps_protocol.errors import InvalidRequest
from ps_protocol.figures import WorkerFigures
from ps_protocol.fragments import Fragments
from ps_protocol.framing import Buffer, Parts, split_head, split_message
from ps_protocol.hyper_parameters import HyperParameters, HyperValue
from ps_protocol.identity import Identity
from ps_protocol.job import JobSpec, NonFinite
from ps_protocol.layout import ParameterSpec, PiecePlace
from ps_protocol.local import Local
from ps_protocol.modes import Consistency
from ps_protocol.stage_spec import StageSpec
from ps_protocol.tables import Initializer, JobTable, TableSpec
from ps_protocol.v1 import data_pb2, figures_pb2, job_pb2, types_pb2

T = TypeVar("T")


def _names(enum: Any, prefix: str) -> dict[int, str]:
    """Returns the names of an enum's values by number, without UNSPECIFIED."""
    return {number: name.removeprefix(prefix).lower() for name, number in enum.items() if number}


_DATA_TYPES = _names(types_pb2.DataType, "DATA_TYPE_")
DATA_TYPE_NUMBERS: dict[str, Any] = {name: number for number, name in _DATA_TYPES.items()}
_WIRE_FORMATS = {0: "", **_names(types_pb2.WireFormat, "WIRE_FORMAT_")}
_WIRE_FORMAT_NUMBERS: dict[str, Any] = {name: number for number, name in _WIRE_FORMATS.items()}
_DISTRIBUTIONS = {0: "constant", **_names(job_pb2.RowDistribution, "ROW_DISTRIBUTION_")}
_DISTRIBUTION_NUMBERS: dict[str, Any] = {name: number for number, name in _DISTRIBUTIONS.items()}
_NON_FINITE = {0: "refuse", **_names(job_pb2.NonFinitePolicy, "NON_FINITE_POLICY_")}
_NON_FINITE_NUMBERS: dict[str, Any] = {name: number for number, name in _NON_FINITE.items()}


def identity(message: types_pb2.WorkerIdentity) -> Identity:
    """Returns the caller that a message of a worker names."""
    return Identity(message.job, message.rank, message.incarnation, message.lease_key, message.run, message.member)


def identity_message(worker: Identity) -> types_pb2.WorkerIdentity:
    """Returns a caller as a message, which every message of a worker carries."""
    return types_pb2.WorkerIdentity(
        job=worker.job,
        rank=worker.rank,
        incarnation=worker.incarnation,
        lease_key=worker.key,
        run=worker.run,
        member=worker.member,
    )


def job_spec(message: job_pb2.JobSpec) -> JobSpec:
    """Returns the job that a message describes. Raises InvalidRequest for enum values that do not exist."""
    of_group = [group.optimizer for group in message.groups]
    return JobSpec(
        name=message.name,
        parameters=tuple(_parameter(parameter, of_group) for parameter in message.parameters),
        optimizer=next(iter(message.optimizers), ""),
        param_groups=tuple(hyper_parameters(group.hyper_parameters) for group in message.groups),
        consistency=consistency(message.consistency),
        bucket_bytes=message.bucket_bytes,
        world_size=message.world_size,
        non_finite=NonFinite(known(_NON_FINITE, message.non_finite, "policy for gradients that are not finite")),
        gradient_wire=wire_format(message.gradient_wire, "wire format of gradients") or "float32",
        weight_wire=wire_format(message.weight_wire, "wire format of weights") or "float32",
        more_optimizers=tuple(message.optimizers[1:]),
        param_group_optimizers=tuple(of_group) if any(of_group) else (),
        tables=tuple(_table(table) for table in message.tables),
        local=_local(message.local) if message.HasField("local") else None,
        group_size=message.group_size or 1,
    )


def job_spec_message(spec: JobSpec) -> job_pb2.JobSpec:
    """Returns the message that describes a job."""
    return job_pb2.JobSpec(
        name=spec.name,
        parameters=[
            job_pb2.ParameterSpec(
                name=p.name,
                shape=p.shape,
                data_type=DATA_TYPE_NUMBERS[p.dtype],
                group=p.param_group or 0,
                frozen=p.param_group is None,
                element_type=p.element,
                not_saved=not p.is_saved,
                member=p.member,
                piece=None if p.piece is None else _piece_message(p.piece),
            )
            for p in spec.parameters
        ],
        optimizers=spec.optimizers,
        groups=[
            job_pb2.ParameterGroup(
                hyper_parameters=hyper_messages(group),
                optimizer=spec.param_group_optimizers[index] if spec.param_group_optimizers else 0,
            )
            for index, group in enumerate(spec.param_groups)
        ],
        consistency=consistency_message(spec.consistency),
        bucket_bytes=spec.bucket_bytes,
        world_size=spec.world_size,
        non_finite=_NON_FINITE_NUMBERS[spec.non_finite.value],
        gradient_wire=_WIRE_FORMAT_NUMBERS[spec.gradient_wire],
        weight_wire=_WIRE_FORMAT_NUMBERS[spec.weight_wire],
        tables=[_table_message(table) for table in spec.tables],
        local=None if spec.local is None else _local_message(spec.local),
        group_size=spec.group_size if spec.group_size > 1 else 0,
    )


def _piece_message(piece: PiecePlace) -> job_pb2.Piece:
    return job_pb2.Piece(whole_shape=piece.whole_shape, offsets=piece.offsets)


def _local(message: job_pb2.Local) -> Local:
    outer = message.outer_learning_rate, message.outer_momentum, message.nesterov
    if message.weighted_by_samples:
        raise InvalidRequest(
            "rounds weighted by samples, which servers of this version do not offer: a worker's round weighs the steps "
            "made in it. Leave out outer={'weight': 'samples'}, and give all workers batches of one size"
        )
    if not message.HasField("round_duration"):
        parts = None
        if message.fragments:
            parts = Fragments(message.steps, message.fragments, message.delay_steps, message.mixing)
        return Local(message.steps, message.warm_up_steps, *outer, fragments=parts)
    if message.fragments:
        raise InvalidRequest(f"rounds that end by time have no fragments, got {message.fragments}")
    if message.steps:
        raise InvalidRequest(
            f"a round ends after so many steps, or after so long, got {message.steps} steps and a time"
        )
    return Local(1, message.warm_up_steps, *outer, seconds(message.round_duration))


def _local_message(local: Local) -> job_pb2.Local:
    parts = local.fragments
    return job_pb2.Local(
        steps=local.steps if local.seconds is None else 0,
        warm_up_steps=local.warm_up,
        outer_learning_rate=local.lr,
        outer_momentum=local.momentum,
        nesterov=local.nesterov,
        round_duration=None if local.seconds is None else duration(local.seconds),
        fragments=0 if parts is None else parts.count,
        delay_steps=0 if parts is None else parts.delay,
        mixing=0.0 if parts is None else parts.mixing,
    )


def consistency(message: job_pb2.Consistency) -> Consistency:
    """Returns the consistency that a message describes."""
    return Consistency(
        message.max_staleness if message.HasField("max_staleness") else None,
        message.aggregate,
        message.quorum if message.HasField("quorum") else None,
        message.quorum_grace,
    )


def consistency_message(rule: Consistency) -> job_pb2.Consistency:
    """Returns the message that describes a job's consistency."""
    return job_pb2.Consistency(
        max_staleness=rule.max_staleness,
        aggregate=rule.aggregate,
        quorum=rule.quorum,
        quorum_grace=rule.quorum_grace,
    )


def job_spec_data(spec: JobSpec) -> dict[str, Any]:
    """Returns a job's spec as plain data for a file: the JSON form of its message."""
    return json_format.MessageToDict(job_spec_message(spec), preserving_proto_field_name=True)


def job_spec_from_data(data: Any) -> JobSpec:
    """Returns the spec in a file's data, also of format 1. Raises InvalidRequest if it has none."""
    try:
        if "optimizer" in data:  # format 1
            data = dict(data)
            data["optimizers"] = [data.pop("optimizer"), *data.pop("more_optimizers", ())]
            renamed = {"held": "frozen"}
            data["parameters"] = [{renamed.get(key, key): p[key] for key in p} for p in data.get("parameters", ())]
        return job_spec(json_format.ParseDict(data, job_pb2.JobSpec()))
    except (TypeError, json_format.ParseError) as error:
        raise InvalidRequest(f"no job's spec: {error}") from None


def _parameter(message: job_pb2.ParameterSpec, of_group: Sequence[int]) -> ParameterSpec:
    dtype = known(_DATA_TYPES, message.data_type, f"data type of {message.name!r}")
    group = None if message.frozen else message.group
    # `validate` refuses a group that does not exist, with the parameter's name.
    optimizer = of_group[group] if group is not None and group < len(of_group) else 0
    more = message.element_type, not message.not_saved, message.member
    piece = None
    if message.HasField("piece"):
        piece = PiecePlace(tuple(message.piece.whole_shape), tuple(message.piece.offsets))
    return ParameterSpec(message.name, tuple(message.shape), dtype, group, optimizer, *more, piece)


def _table(message: job_pb2.TableSpec) -> JobTable:
    if message.HasField("consistency"):
        raise InvalidRequest(
            f"table {message.name!r} has a consistency of its own, which servers of this version do not offer: every "
            "table is under its job's mode"
        )
    spec = TableSpec(
        message.name,
        message.dim,
        row_initializer(message.initializer, message.name),
        message.admit_after,
        message.expire_after,
        message.max_rows,
        message.initial_rows,
    )
    return JobTable(spec, message.optimizer, hyper_parameters(message.hyper_parameters))


def row_initializer(message: job_pb2.RowInitializer, table: str) -> Initializer:
    """Returns the initializer of a table's rows. Raises InvalidRequest for an unknown distribution."""
    kind = known(_DISTRIBUTIONS, message.distribution, f"distribution of table {table!r}")
    return Initializer(kind, message.scale, message.seed)


def row_initializer_message(start: Initializer) -> job_pb2.RowInitializer:
    """Returns the message of a table's initializer."""
    return job_pb2.RowInitializer(distribution=_DISTRIBUTION_NUMBERS[start.kind], scale=start.scale, seed=start.seed)


def _table_message(table: JobTable) -> job_pb2.TableSpec:
    rows = table.rows
    return job_pb2.TableSpec(
        name=rows.name,
        dim=rows.dim,
        initializer=row_initializer_message(rows.initializer),
        admit_after=rows.admit_after,
        expire_after=rows.expire_after,
        max_rows=rows.max_rows,
        optimizer=table.optimizer,
        hyper_parameters=hyper_messages(table.values),
        initial_rows=rows.initial_rows,
    )


def hyper_parameters(messages: Iterable[job_pb2.HyperParameter]) -> HyperParameters:
    """Returns hyper-parameters by name. Raises InvalidRequest for a name that comes twice."""
    values: dict[str, HyperValue] = {}
    for message in messages:
        if message.name in values:
            raise InvalidRequest(f"hyper-parameter {message.name!r} comes twice")
        kind = message.WhichOneof("value")
        value: Any = getattr(message, kind) if kind else None
        values[message.name] = tuple(value.values) if kind == "numbers" else value
    return values


def hyper_messages(values: HyperParameters) -> list[job_pb2.HyperParameter]:
    """Returns hyper-parameters as messages."""
    return [_hyper_message(name, value) for name, value in values.items()]


def _hyper_message(name: str, value: HyperValue) -> job_pb2.HyperParameter:
    if value is None:
        return job_pb2.HyperParameter(name=name)
    if isinstance(value, bool):
        return job_pb2.HyperParameter(name=name, flag=value)
    if isinstance(value, tuple):
        return job_pb2.HyperParameter(name=name, numbers=job_pb2.NumberList(values=value))
    return job_pb2.HyperParameter(name=name, number=value)


def group_updates(messages: Iterable[job_pb2.GroupUpdate]) -> dict[int, HyperParameters]:
    """Returns changed hyper-parameters by group. Raises InvalidRequest for a group that comes twice."""
    groups: dict[int, HyperParameters] = {}
    for message in messages:
        if message.group in groups:
            raise InvalidRequest(f"group {message.group} comes twice")
        groups[message.group] = hyper_parameters(message.hyper_parameters)
    return groups


def group_update_messages(groups: Mapping[int, HyperParameters]) -> list[job_pb2.GroupUpdate]:
    """Returns changed hyper-parameters as messages."""
    return [job_pb2.GroupUpdate(group=index, hyper_parameters=hyper_messages(groups[index])) for index in groups]


def next_optimizer(message: data_pb2.NextOptimizer) -> StageSpec:
    """Reads the stage of a bucket from a message. Raises InvalidRequest for a group that comes twice."""
    members = tuple(None if number == 0 else number - 1 for number in message.slice_groups)
    groups = group_updates(message.groups)
    return StageSpec(message.stage, message.optimizer, members, groups, frozenset(message.kept_slices))


def next_optimizer_message(stage: StageSpec) -> data_pb2.NextOptimizer:
    """Returns the message of a bucket's stage."""
    return data_pb2.NextOptimizer(
        stage=stage.number,
        optimizer=stage.optimizer,
        groups=group_update_messages(stage.groups),
        slice_groups=[0 if group is None else group + 1 for group in stage.group_of_slice],
        kept_slices=sorted(stage.kept),
    )


def data_ranges(messages: Iterable[types_pb2.DataRange]) -> tuple[DataRange, ...]:
    """Reads the data ranges from a message."""
    return tuple(DataRange(each.loader, each.pass_number, each.start, each.stop) for each in messages)


def data_range_messages(ranges: Iterable[DataRange]) -> list[types_pb2.DataRange]:
    """Returns ranges of data as messages."""
    return [
        types_pb2.DataRange(loader=each.loader, pass_number=each.pass_number, start=each.start, stop=each.stop)
        for each in ranges
    ]


def wire_format(number: int, what: str = "wire format") -> str:
    """Returns the name of a wire format; empty if it is not set. Raises InvalidRequest for an unknown one."""
    return known(_WIRE_FORMATS, number, what)


def wire_format_number(name: str) -> Any:
    """Returns the number of a wire format in the contract; an empty name gives UNSPECIFIED."""
    return _WIRE_FORMAT_NUMBERS[name]


def duration(seconds: float) -> Duration:
    """Returns seconds as a message, to the nanosecond."""
    message = Duration()
    message.FromNanoseconds(round(seconds * 1e9))
    return message


def seconds(message: Duration) -> float:
    """Returns the seconds of a message; 0 if it is not set."""
    return message.ToNanoseconds() / 1e9


def timestamp(seconds: float) -> Timestamp:
    """Returns seconds since 1970 as a message, to the millisecond."""
    message = Timestamp()
    message.FromMilliseconds(int(seconds * 1e3))
    return message


def since_1970(message: Timestamp) -> float:
    """Returns the seconds since 1970 of a message."""
    return message.ToMilliseconds() / 1e3


def known(table: Mapping[int, T], number: int, what: str) -> T:
    """Returns the value of an enum's number. Raises InvalidRequest for an unknown number."""
    if number not in table:
        raise InvalidRequest(f"{what}: expected one of {sorted(int(key) for key in table)}, got {number}")
    return table[number]


def worker_figures_message(figures: WorkerFigures) -> figures_pb2.WorkerFigures:
    """Returns the message of a worker's measurements."""
    return figures_pb2.WorkerFigures(
        measured_duration=duration(figures.measured),
        step_count=figures.steps,
        sent_bytes=figures.sent,
        received_bytes=figures.received,
        values=[figures_pb2.LoggedValue(name=v.name, last=v.last, mean=v.mean) for v in figures.values],
        looked_up_id_count=figures.looked_up,
        distinct_id_count=figures.distinct,
        residual_ratio=figures.residual_ratio,
        total_step_count=figures.total,
        done_step_count=figures.done,
        **{f"{phase}_duration": duration(seconds) for phase, seconds in figures.phases.items()},
    )


# -- requests and answers of the data path -----------------------------------------------------------------------------

M = TypeVar("M", bound=Message)

Request = bytes | Parts  # as gRPC brings it, and as a data connection does


def read(kind: type[M], data: Request) -> tuple[M, Buffer | None]:
    """Returns a message without its payload, and the payload; None if it has no payload."""
    if not isinstance(data, Parts):
        fields, payload = split_message(data)
        return parse(kind, fields), payload
    if data.payload is None:
        return read(kind, data.head)
    return parse(kind, split_head(data.head, len(data.payload))), data.payload


def whole(data: Request) -> bytes:
    """Returns the bytes of a request of a kind without a payload. Raises InvalidRequest if it has one."""
    if not isinstance(data, Parts):
        return data
    if data.payload is not None:
        raise InvalidRequest(f"this request has no payload, and {len(data.payload)} bytes of one came")
    return data.head


def parse(kind: type[M], data: bytes) -> M:
    """Parses a message. Raises InvalidRequest for bytes that are not such a message."""
    try:
        return kind.FromString(data)
    except DecodeError as error:
        raise InvalidRequest(f"the bytes are no {kind.DESCRIPTOR.name}") from error


class AnsweringShard(NamedTuple):
    """The shard that an answer comes from.

    process: the number of its process, which the process chose when it started
    run:     the run of the job to which the answer belongs
    """

    shard_index: int
    process: int
    run: str = ""

    def of(self, run: str) -> AnsweringShard:
        """Returns the origin of answers that belong to a run of a job."""
        return self._replace(run=run)

    def header(self, version: int) -> types_pb2.ResponseHeader:
        """Returns the header of an answer. version: that of the bucket or table that the answer is about"""
        return types_pb2.ResponseHeader(
            shard_index=self.shard_index, process=self.process, run=self.run, version=version
        )


class Awaited(NamedTuple):
    """The reason why a pull waits.

    ranks:  the workers that it waits for; empty: it waits for the shard
    reason: the reason in words
    """

    ranks: tuple[int, ...]
    reason: str
