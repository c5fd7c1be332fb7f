from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DataType(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DATA_TYPE_UNSPECIFIED: _ClassVar[DataType]
    DATA_TYPE_FLOAT32: _ClassVar[DataType]
    DATA_TYPE_BFLOAT16: _ClassVar[DataType]
    DATA_TYPE_FLOAT16: _ClassVar[DataType]
    DATA_TYPE_FLOAT64: _ClassVar[DataType]
    DATA_TYPE_INT64: _ClassVar[DataType]
    DATA_TYPE_INT32: _ClassVar[DataType]
    DATA_TYPE_BOOL: _ClassVar[DataType]
    DATA_TYPE_UINT8: _ClassVar[DataType]

class WireFormat(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WIRE_FORMAT_UNSPECIFIED: _ClassVar[WireFormat]
    WIRE_FORMAT_FLOAT32: _ClassVar[WireFormat]
    WIRE_FORMAT_BFLOAT16: _ClassVar[WireFormat]
    WIRE_FORMAT_FLOAT16: _ClassVar[WireFormat]

class NonFinitePolicy(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    NON_FINITE_POLICY_UNSPECIFIED: _ClassVar[NonFinitePolicy]
    NON_FINITE_POLICY_REFUSE: _ClassVar[NonFinitePolicy]
    NON_FINITE_POLICY_SKIP: _ClassVar[NonFinitePolicy]
    NON_FINITE_POLICY_ALLOW: _ClassVar[NonFinitePolicy]
DATA_TYPE_UNSPECIFIED: DataType
DATA_TYPE_FLOAT32: DataType
DATA_TYPE_BFLOAT16: DataType
DATA_TYPE_FLOAT16: DataType
DATA_TYPE_FLOAT64: DataType
DATA_TYPE_INT64: DataType
DATA_TYPE_INT32: DataType
DATA_TYPE_BOOL: DataType
DATA_TYPE_UINT8: DataType
WIRE_FORMAT_UNSPECIFIED: WireFormat
WIRE_FORMAT_FLOAT32: WireFormat
WIRE_FORMAT_BFLOAT16: WireFormat
WIRE_FORMAT_FLOAT16: WireFormat
NON_FINITE_POLICY_UNSPECIFIED: NonFinitePolicy
NON_FINITE_POLICY_REFUSE: NonFinitePolicy
NON_FINITE_POLICY_SKIP: NonFinitePolicy
NON_FINITE_POLICY_ALLOW: NonFinitePolicy

class ParameterSpec(_message.Message):
    __slots__ = ("name", "shape", "data_type", "group", "held")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    DATA_TYPE_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    name: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    data_type: DataType
    group: int
    held: bool
    def __init__(self, name: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., data_type: _Optional[_Union[DataType, str]] = ..., group: _Optional[int] = ..., held: bool = ...) -> None: ...

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
    def __init__(self, name: _Optional[str] = ..., number: _Optional[float] = ..., flag: bool = ..., numbers: _Optional[_Union[NumberList, _Mapping]] = ...) -> None: ...

class NumberList(_message.Message):
    __slots__ = ("values",)
    VALUES_FIELD_NUMBER: _ClassVar[int]
    values: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, values: _Optional[_Iterable[float]] = ...) -> None: ...

class ParameterGroup(_message.Message):
    __slots__ = ("hyper_parameters", "optimizer")
    HYPER_PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    OPTIMIZER_FIELD_NUMBER: _ClassVar[int]
    hyper_parameters: _containers.RepeatedCompositeFieldContainer[HyperParameter]
    optimizer: int
    def __init__(self, hyper_parameters: _Optional[_Iterable[_Union[HyperParameter, _Mapping]]] = ..., optimizer: _Optional[int] = ...) -> None: ...

class Consistency(_message.Message):
    __slots__ = ("max_staleness", "aggregate")
    MAX_STALENESS_FIELD_NUMBER: _ClassVar[int]
    AGGREGATE_FIELD_NUMBER: _ClassVar[int]
    max_staleness: int
    aggregate: bool
    def __init__(self, max_staleness: _Optional[int] = ..., aggregate: bool = ...) -> None: ...

class JobSpec(_message.Message):
    __slots__ = ("name", "parameters", "optimizer", "groups", "consistency", "bucket_bytes", "world_size", "non_finite", "gradient_wire", "weight_wire", "more_optimizers")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    OPTIMIZER_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    CONSISTENCY_FIELD_NUMBER: _ClassVar[int]
    BUCKET_BYTES_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    NON_FINITE_FIELD_NUMBER: _ClassVar[int]
    GRADIENT_WIRE_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_WIRE_FIELD_NUMBER: _ClassVar[int]
    MORE_OPTIMIZERS_FIELD_NUMBER: _ClassVar[int]
    name: str
    parameters: _containers.RepeatedCompositeFieldContainer[ParameterSpec]
    optimizer: str
    groups: _containers.RepeatedCompositeFieldContainer[ParameterGroup]
    consistency: Consistency
    bucket_bytes: int
    world_size: int
    non_finite: NonFinitePolicy
    gradient_wire: WireFormat
    weight_wire: WireFormat
    more_optimizers: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, name: _Optional[str] = ..., parameters: _Optional[_Iterable[_Union[ParameterSpec, _Mapping]]] = ..., optimizer: _Optional[str] = ..., groups: _Optional[_Iterable[_Union[ParameterGroup, _Mapping]]] = ..., consistency: _Optional[_Union[Consistency, _Mapping]] = ..., bucket_bytes: _Optional[int] = ..., world_size: _Optional[int] = ..., non_finite: _Optional[_Union[NonFinitePolicy, str]] = ..., gradient_wire: _Optional[_Union[WireFormat, str]] = ..., weight_wire: _Optional[_Union[WireFormat, str]] = ..., more_optimizers: _Optional[_Iterable[str]] = ...) -> None: ...

class ShardInfo(_message.Message):
    __slots__ = ("index", "address")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    index: int
    address: str
    def __init__(self, index: _Optional[int] = ..., address: _Optional[str] = ...) -> None: ...

class ShardMap(_message.Message):
    __slots__ = ("shards", "bucket_shards")
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    BUCKET_SHARDS_FIELD_NUMBER: _ClassVar[int]
    shards: _containers.RepeatedCompositeFieldContainer[ShardInfo]
    bucket_shards: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, shards: _Optional[_Iterable[_Union[ShardInfo, _Mapping]]] = ..., bucket_shards: _Optional[_Iterable[int]] = ...) -> None: ...

class DataRange(_message.Message):
    __slots__ = ("loader", "pass_number", "start", "stop")
    LOADER_FIELD_NUMBER: _ClassVar[int]
    PASS_NUMBER_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    loader: int
    pass_number: int
    start: int
    stop: int
    def __init__(self, loader: _Optional[int] = ..., pass_number: _Optional[int] = ..., start: _Optional[int] = ..., stop: _Optional[int] = ...) -> None: ...
