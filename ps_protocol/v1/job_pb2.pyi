import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from ps_protocol.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RowDistribution(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROW_DISTRIBUTION_UNSPECIFIED: _ClassVar[RowDistribution]
    ROW_DISTRIBUTION_CONSTANT: _ClassVar[RowDistribution]
    ROW_DISTRIBUTION_UNIFORM: _ClassVar[RowDistribution]
    ROW_DISTRIBUTION_NORMAL: _ClassVar[RowDistribution]

class NonFinitePolicy(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    NON_FINITE_POLICY_UNSPECIFIED: _ClassVar[NonFinitePolicy]
    NON_FINITE_POLICY_REFUSE: _ClassVar[NonFinitePolicy]
    NON_FINITE_POLICY_SKIP: _ClassVar[NonFinitePolicy]
    NON_FINITE_POLICY_ALLOW: _ClassVar[NonFinitePolicy]
ROW_DISTRIBUTION_UNSPECIFIED: RowDistribution
ROW_DISTRIBUTION_CONSTANT: RowDistribution
ROW_DISTRIBUTION_UNIFORM: RowDistribution
ROW_DISTRIBUTION_NORMAL: RowDistribution
NON_FINITE_POLICY_UNSPECIFIED: NonFinitePolicy
NON_FINITE_POLICY_REFUSE: NonFinitePolicy
NON_FINITE_POLICY_SKIP: NonFinitePolicy
NON_FINITE_POLICY_ALLOW: NonFinitePolicy

class JobSpec(_message.Message):
    __slots__ = ("name", "parameters", "optimizers", "groups", "consistency", "bucket_bytes", "world_size", "non_finite", "gradient_wire", "weight_wire", "tables", "local", "group_size")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    OPTIMIZERS_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    CONSISTENCY_FIELD_NUMBER: _ClassVar[int]
    BUCKET_BYTES_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    NON_FINITE_FIELD_NUMBER: _ClassVar[int]
    GRADIENT_WIRE_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_WIRE_FIELD_NUMBER: _ClassVar[int]
    TABLES_FIELD_NUMBER: _ClassVar[int]
    LOCAL_FIELD_NUMBER: _ClassVar[int]
    GROUP_SIZE_FIELD_NUMBER: _ClassVar[int]
    name: str
    parameters: _containers.RepeatedCompositeFieldContainer[ParameterSpec]
    optimizers: _containers.RepeatedScalarFieldContainer[str]
    groups: _containers.RepeatedCompositeFieldContainer[ParameterGroup]
    consistency: Consistency
    bucket_bytes: int
    world_size: int
    non_finite: NonFinitePolicy
    gradient_wire: _types_pb2.WireFormat
    weight_wire: _types_pb2.WireFormat
    tables: _containers.RepeatedCompositeFieldContainer[TableSpec]
    local: Local
    group_size: int
    def __init__(self, name: _Optional[str] = ..., parameters: _Optional[_Iterable[_Union[ParameterSpec, _Mapping]]] = ..., optimizers: _Optional[_Iterable[str]] = ..., groups: _Optional[_Iterable[_Union[ParameterGroup, _Mapping]]] = ..., consistency: _Optional[_Union[Consistency, _Mapping]] = ..., bucket_bytes: _Optional[int] = ..., world_size: _Optional[int] = ..., non_finite: _Optional[_Union[NonFinitePolicy, str]] = ..., gradient_wire: _Optional[_Union[_types_pb2.WireFormat, str]] = ..., weight_wire: _Optional[_Union[_types_pb2.WireFormat, str]] = ..., tables: _Optional[_Iterable[_Union[TableSpec, _Mapping]]] = ..., local: _Optional[_Union[Local, _Mapping]] = ..., group_size: _Optional[int] = ...) -> None: ...

class Local(_message.Message):
    __slots__ = ("steps", "warm_up_steps", "outer_learning_rate", "outer_momentum", "nesterov", "round_duration", "weighted_by_samples", "fragments", "delay_steps", "mixing")
    STEPS_FIELD_NUMBER: _ClassVar[int]
    WARM_UP_STEPS_FIELD_NUMBER: _ClassVar[int]
    OUTER_LEARNING_RATE_FIELD_NUMBER: _ClassVar[int]
    OUTER_MOMENTUM_FIELD_NUMBER: _ClassVar[int]
    NESTEROV_FIELD_NUMBER: _ClassVar[int]
    ROUND_DURATION_FIELD_NUMBER: _ClassVar[int]
    WEIGHTED_BY_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    FRAGMENTS_FIELD_NUMBER: _ClassVar[int]
    DELAY_STEPS_FIELD_NUMBER: _ClassVar[int]
    MIXING_FIELD_NUMBER: _ClassVar[int]
    steps: int
    warm_up_steps: int
    outer_learning_rate: float
    outer_momentum: float
    nesterov: bool
    round_duration: _duration_pb2.Duration
    weighted_by_samples: bool
    fragments: int
    delay_steps: int
    mixing: float
    def __init__(self, steps: _Optional[int] = ..., warm_up_steps: _Optional[int] = ..., outer_learning_rate: _Optional[float] = ..., outer_momentum: _Optional[float] = ..., nesterov: _Optional[bool] = ..., round_duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., weighted_by_samples: _Optional[bool] = ..., fragments: _Optional[int] = ..., delay_steps: _Optional[int] = ..., mixing: _Optional[float] = ...) -> None: ...

class TableSpec(_message.Message):
    __slots__ = ("name", "dim", "initializer", "admit_after", "expire_after", "max_rows", "optimizer", "hyper_parameters", "consistency", "initial_rows")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DIM_FIELD_NUMBER: _ClassVar[int]
    INITIALIZER_FIELD_NUMBER: _ClassVar[int]
    ADMIT_AFTER_FIELD_NUMBER: _ClassVar[int]
    EXPIRE_AFTER_FIELD_NUMBER: _ClassVar[int]
    MAX_ROWS_FIELD_NUMBER: _ClassVar[int]
    OPTIMIZER_FIELD_NUMBER: _ClassVar[int]
    HYPER_PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    CONSISTENCY_FIELD_NUMBER: _ClassVar[int]
    INITIAL_ROWS_FIELD_NUMBER: _ClassVar[int]
    name: str
    dim: int
    initializer: RowInitializer
    admit_after: int
    expire_after: int
    max_rows: int
    optimizer: str
    hyper_parameters: _containers.RepeatedCompositeFieldContainer[HyperParameter]
    consistency: Consistency
    initial_rows: bool
    def __init__(self, name: _Optional[str] = ..., dim: _Optional[int] = ..., initializer: _Optional[_Union[RowInitializer, _Mapping]] = ..., admit_after: _Optional[int] = ..., expire_after: _Optional[int] = ..., max_rows: _Optional[int] = ..., optimizer: _Optional[str] = ..., hyper_parameters: _Optional[_Iterable[_Union[HyperParameter, _Mapping]]] = ..., consistency: _Optional[_Union[Consistency, _Mapping]] = ..., initial_rows: _Optional[bool] = ...) -> None: ...

class RowInitializer(_message.Message):
    __slots__ = ("distribution", "scale", "seed")
    DISTRIBUTION_FIELD_NUMBER: _ClassVar[int]
    SCALE_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    distribution: RowDistribution
    scale: float
    seed: int
    def __init__(self, distribution: _Optional[_Union[RowDistribution, str]] = ..., scale: _Optional[float] = ..., seed: _Optional[int] = ...) -> None: ...

class ParameterSpec(_message.Message):
    __slots__ = ("name", "shape", "data_type", "group", "frozen", "element_type", "not_saved", "member", "piece")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    DATA_TYPE_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    FROZEN_FIELD_NUMBER: _ClassVar[int]
    ELEMENT_TYPE_FIELD_NUMBER: _ClassVar[int]
    NOT_SAVED_FIELD_NUMBER: _ClassVar[int]
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    PIECE_FIELD_NUMBER: _ClassVar[int]
    name: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    data_type: _types_pb2.DataType
    group: int
    frozen: bool
    element_type: str
    not_saved: bool
    member: int
    piece: Piece
    def __init__(self, name: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., data_type: _Optional[_Union[_types_pb2.DataType, str]] = ..., group: _Optional[int] = ..., frozen: _Optional[bool] = ..., element_type: _Optional[str] = ..., not_saved: _Optional[bool] = ..., member: _Optional[int] = ..., piece: _Optional[_Union[Piece, _Mapping]] = ...) -> None: ...

class Piece(_message.Message):
    __slots__ = ("whole_shape", "offsets")
    WHOLE_SHAPE_FIELD_NUMBER: _ClassVar[int]
    OFFSETS_FIELD_NUMBER: _ClassVar[int]
    whole_shape: _containers.RepeatedScalarFieldContainer[int]
    offsets: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, whole_shape: _Optional[_Iterable[int]] = ..., offsets: _Optional[_Iterable[int]] = ...) -> None: ...

class ParameterGroup(_message.Message):
    __slots__ = ("hyper_parameters", "optimizer")
    HYPER_PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    OPTIMIZER_FIELD_NUMBER: _ClassVar[int]
    hyper_parameters: _containers.RepeatedCompositeFieldContainer[HyperParameter]
    optimizer: int
    def __init__(self, hyper_parameters: _Optional[_Iterable[_Union[HyperParameter, _Mapping]]] = ..., optimizer: _Optional[int] = ...) -> None: ...

class HyperParameter(_message.Message):
    __slots__ = ("name", "number", "flag", "numbers")
    NAME_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    FLAG_FIELD_NUMBER: _ClassVar[int]
    NUMBERS_FIELD_NUMBER: _ClassVar[int]
    name: str
    number: float
    flag: bool
    numbers: NumberList
    def __init__(self, name: _Optional[str] = ..., number: _Optional[float] = ..., flag: _Optional[bool] = ..., numbers: _Optional[_Union[NumberList, _Mapping]] = ...) -> None: ...

class NumberList(_message.Message):
    __slots__ = ("values",)
    VALUES_FIELD_NUMBER: _ClassVar[int]
    values: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, values: _Optional[_Iterable[float]] = ...) -> None: ...

class GroupUpdate(_message.Message):
    __slots__ = ("group", "hyper_parameters")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    HYPER_PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    group: int
    hyper_parameters: _containers.RepeatedCompositeFieldContainer[HyperParameter]
    def __init__(self, group: _Optional[int] = ..., hyper_parameters: _Optional[_Iterable[_Union[HyperParameter, _Mapping]]] = ...) -> None: ...

class Consistency(_message.Message):
    __slots__ = ("max_staleness", "aggregate", "quorum", "quorum_grace")
    MAX_STALENESS_FIELD_NUMBER: _ClassVar[int]
    AGGREGATE_FIELD_NUMBER: _ClassVar[int]
    QUORUM_FIELD_NUMBER: _ClassVar[int]
    QUORUM_GRACE_FIELD_NUMBER: _ClassVar[int]
    max_staleness: int
    aggregate: bool
    quorum: int
    quorum_grace: float
    def __init__(self, max_staleness: _Optional[int] = ..., aggregate: _Optional[bool] = ..., quorum: _Optional[int] = ..., quorum_grace: _Optional[float] = ...) -> None: ...
