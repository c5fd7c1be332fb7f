"""A job is a value: it is checked, compared, and carried over the wire without a loss."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ps_protocol.convert import hyper_messages, hyper_parameters, job_spec, job_spec_message
from ps_protocol.errors import InvalidRequest, LimitExceeded, PSError
from ps_protocol.hyper_parameters import HyperParameters
from ps_protocol.job import (
    MAX_BUCKET_BYTES,
    MAX_BUCKETS,
    MAX_DIMENSIONS,
    MAX_ELEMENTS,
    MAX_NAME_LENGTH,
    MAX_PARAMETERS,
    MAX_WORLD_SIZE,
    JobSpec,
    NonFinite,
    difference,
    validate,
)
from ps_protocol.layout import DATA_TYPES, ParameterSpec
from ps_protocol.modes import MAX_STALENESS, Consistency
from ps_protocol.tables import JobTable, TableSpec
from ps_protocol.v1 import job_pb2
from ps_protocol.wire_formats import FORMATS

WEIGHT = ParameterSpec("layer.weight", (3, 4), "float32", 0)
BIAS = ParameterSpec("layer.bias", (3,), "float32", 1)
COUNTER = ParameterSpec("norm.num_batches_tracked", (), "int64", None)

QUORUMS = ((), (-1,), (1, 0.25))  # that go with any number of workers from 2 on, and with an elastic job
JOB = JobSpec(
    name="my-job_1.0",
    parameters=(WEIGHT, BIAS, COUNTER),
    optimizer="AdamW",
    param_groups=({"lr": 1e-3, "betas": (0.9, 0.999)}, {"lr": 1e-2, "betas": (0.9, 0.999)}),
    consistency=Consistency(4),
    bucket_bytes=1024,
    world_size=2,
)


WITH_TABLE = replace(JOB, tables=(JobTable(TableSpec("t", 4), "SGD", {"lr": 0.1}),))


def with_parameter(**changes: object) -> JobSpec:
    return replace(JOB, parameters=(replace(WEIGHT, **changes), BIAS, COUNTER))  # type: ignore[arg-type]


# -- checked ---------------------------------------------------------------------------------------------------------


SMALL = tuple(ParameterSpec(f"p{i}", (2**20,), "float32", 0) for i in range(1000))


@pytest.mark.parametrize(
    "sound",
    [
        JOB,
        replace(JOB, parameters=SMALL, bucket_bytes=4 * 2**20),
        with_parameter(element="complex64", shape=(3, 2)),
        WITH_TABLE,
    ],
)
def test_a_sound_job_passes(sound: JobSpec) -> None:
    validate(sound)


@pytest.mark.parametrize(
    ("bad", "error", "said"),
    [
        (replace(JOB, name=""), InvalidRequest, "a job's name is 1 to 128 of letters"),
        (replace(JOB, name="a b"), InvalidRequest, "got 'a b'"),
        (replace(JOB, name="job\n"), InvalidRequest, "a job's name"),
        (replace(JOB, name="x" * 129), InvalidRequest, "a job's name"),
        (replace(JOB, name="é"), InvalidRequest, "a job's name"),
        (replace(JOB, param_groups=()), InvalidRequest, "at least one parameter group, got none"),
        (replace(JOB, parameters=()), InvalidRequest, "at least one parameter that the optimizer steps"),
        (replace(JOB, parameters=(COUNTER,)), InvalidRequest, "at least one parameter that the optimizer steps"),
        (replace(JOB, parameters=(WEIGHT, BIAS, WEIGHT)), InvalidRequest, "unique, got 'layer.weight' twice"),
        (replace(JOB, parameters=(WEIGHT,) * (MAX_PARAMETERS + 1)), LimitExceeded, "up to 100000 parameters"),
        (replace(JOB, world_size=MAX_WORLD_SIZE + 1), LimitExceeded, "up to 65536 workers"),
        (
            replace(JOB, consistency=Consistency(0, True, 1), weight_wire="int4"),
            InvalidRequest,
            "weights travel as int4 in sync and local:H only, where all workers have the same, and the mode is sync, "
            "quorum 1",
        ),
        (
            replace(JOB, consistency=Consistency(0, True, 2)),
            InvalidRequest,
            "a quorum of 2 makes no sense among 2 workers",
        ),
        (replace(JOB, bucket_bytes=0), InvalidRequest, "positive multiple of 64, got 0"),
        (replace(JOB, bucket_bytes=100), InvalidRequest, "positive multiple of 64, got 100"),
        (replace(JOB, bucket_bytes=2 * MAX_BUCKET_BYTES), LimitExceeded, f"up to {MAX_BUCKET_BYTES} on this server"),
        (with_parameter(name=""), InvalidRequest, "1 to 512 characters, got 0"),
        (with_parameter(name="x" * (MAX_NAME_LENGTH + 1)), InvalidRequest, "got 513"),
        (with_parameter(dtype="complex64"), InvalidRequest, "layer.weight: expected one of float32.*got complex64"),
        (with_parameter(dtype="int64"), InvalidRequest, "layer.weight: an optimizer steps floating-point"),
        (with_parameter(element="Complex 64"), InvalidRequest, "layer.weight: expected the name of an element type"),
        (with_parameter(element="complex64", shape=()), InvalidRequest, "a last dimension that counts its parts"),
        (with_parameter(param_group=2), InvalidRequest, "layer.weight: expected a group below 2, got 2"),
        (with_parameter(param_group=-1), InvalidRequest, "layer.weight: expected a group below 2, got -1"),
        (with_parameter(shape=(-1,)), InvalidRequest, "layer.weight: expected up to 64 dimensions of 0 to "),
        (
            with_parameter(shape=(1,) * (MAX_DIMENSIONS + 1)),
            InvalidRequest,
            "layer.weight: expected up to 64 dimensions of 0 to ",
        ),
        (
            with_parameter(shape=(MAX_ELEMENTS + 1,)),
            InvalidRequest,
            "layer.weight: expected up to 64 dimensions of 0 to ",
        ),
        (with_parameter(shape=(2**40, 2**40)), LimitExceeded, "layer.weight: a parameter may have"),
        (with_parameter(shape=(2**44,)), LimitExceeded, f"up to {MAX_BUCKETS} buckets"),
        # Each tensor is small, and all together make more buckets than a server can list.
        (replace(JOB, parameters=SMALL, bucket_bytes=64), LimitExceeded, f"up to {MAX_BUCKETS} buckets"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_job_that_contradicts_itself_or_passes_a_limit_is_refused_by_name(
    bad: JobSpec, error: type[PSError], said: str
) -> None:
    with pytest.raises(error, match=said):
        validate(bad)


# -- compared --------------------------------------------------------------------------------------------------------


def test_a_learning_rate_that_a_scheduler_moved_makes_no_other_job() -> None:
    assert difference(JOB, replace(JOB)) is None
    later = replace(JOB, param_groups=({"lr": 5e-4, "betas": (0.8, 0.9)}, JOB.param_groups[1]))
    assert difference(JOB, later) is None


def test_an_element_type_is_compared_where_the_servers_have_kept_it() -> None:
    complex_one = with_parameter(element="complex64")
    said = difference(complex_one, with_parameter(element="complex128"))
    assert said == (
        "parameter 'layer.weight' has element type complex64 in the registered job and complex128 in this one"
    )
    assert difference(JOB, complex_one) is None, "a server of an earlier version has kept none"
    assert difference(with_parameter(is_saved=False), JOB) is None


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (with_parameter(shape=(4, 3)), "parameter 'layer.weight' has shape (3, 4) in the registered job and (4, 3) in"),
        (with_parameter(dtype="bfloat16"), "has dtype float32 in the registered job and bfloat16 in this one"),
        (with_parameter(param_group=1), "has optimizer group 0 in the registered job and 1 in this one"),
        (with_parameter(param_group=None), "has optimizer group 0 in the registered job and None in this one"),
        (replace(JOB, parameters=(WEIGHT, BIAS)), "a parameter 'norm.num_batches_tracked' that this one lacks"),
        (with_parameter(name="new"), "the registered model has a parameter 'layer.weight' that this one lacks"),
        (
            replace(JOB, parameters=(*JOB.parameters, replace(BIAS, name="new"), replace(BIAS, name="newer"))),
            "this model has a parameter 'new' that the registered one lacks",
        ),
        (replace(JOB, parameters=(BIAS, WEIGHT, COUNTER)), "registered in another order"),
        (replace(JOB, consistency=Consistency(None)), "the mode is ssp:4 in the registered job and async in this one"),
        (
            replace(JOB, consistency=Consistency(0, True, -1)),
            "the mode is ssp:4 in the registered job and sync, quorum all-1 in this one",
        ),
        (replace(JOB, optimizer="Adam"), "the optimizer is AdamW in the registered job and Adam in this one"),
        (
            replace(JOB, param_groups=JOB.param_groups[:1]),
            "the number of optimizer groups is 2 in the registered job and 1",
        ),
        (replace(JOB, bucket_bytes=2048), "the bucket_bytes is 1024 in the registered job and 2048 in this one"),
        (replace(JOB, world_size=0), "the world_size is 2 in the registered job and elastic in this one"),
        (replace(JOB, non_finite=NonFinite.SKIP), "is refuse in the registered job and skip in this one"),
        (replace(JOB, gradient_wire="bfloat16"), "the wire format of gradients is float32 in the registered job"),
        (replace(JOB, weight_wire="float16"), "the wire format of weights is float32 in the registered job"),
        (
            replace(JOB, param_groups=({"lr": 1e-3}, JOB.param_groups[1])),
            "hyper-parameter 'betas' of group 0 is known to one",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_another_job_is_told_apart_and_the_first_difference_named(other: JobSpec, said: str) -> None:
    assert said in difference(JOB, other)  # type: ignore[operator]


def test_a_worker_that_brings_no_rows_is_refused_where_a_table_waits_for_them() -> None:
    plain = WITH_TABLE
    [table] = plain.tables
    waits = replace(plain, tables=(replace(table, rows=replace(table.rows, initial_rows=True)),))
    assert difference(waits, plain) == "table 't' has initial_rows True in the registered job and False in this one"
    assert difference(plain, waits) is None, "it begins at once, and takes none"


def test_a_table_with_a_rule_of_its_own_is_refused() -> None:
    """Workers of an earlier version may name one."""
    message = job_spec_message(WITH_TABLE)
    message.tables[0].consistency.SetInParent()
    with pytest.raises(InvalidRequest, match="table 't' has a consistency of its own"):
        job_spec(message)


# -- carried over the wire -------------------------------------------------------------------------------------------

NAMES = st.text(min_size=1, max_size=20)
NUMBERS = st.floats(allow_nan=False)
HYPER_PARAMETERS = st.dictionaries(
    NAMES, st.none() | st.booleans() | NUMBERS | st.lists(NUMBERS, max_size=3).map(tuple), max_size=4
)


@st.composite
def jobs(draw: st.DrawFn) -> JobSpec:
    """Any job that validate lets pass, and many that it does not."""
    aggregate = draw(st.booleans())
    staleness = st.just(0) if aggregate else st.none() | st.integers(0, MAX_STALENESS)
    return JobSpec(
        name=draw(NAMES),
        parameters=tuple(
            ParameterSpec(
                name=draw(NAMES),
                shape=tuple(draw(st.lists(st.integers(0, 2**63), max_size=4))),
                dtype=draw(st.sampled_from(list(DATA_TYPES))),
                param_group=draw(st.none() | st.integers(0, 2**32 - 1)),
                element=draw(st.sampled_from(["", "complex64", "float8_e4m3fn"])),
                is_saved=draw(st.booleans()),
            )
            for _ in range(draw(st.integers(0, 3)))
        ),
        optimizer=draw(NAMES),
        param_groups=tuple(draw(st.lists(HYPER_PARAMETERS, max_size=3))),
        consistency=Consistency(draw(staleness), aggregate, *(draw(st.sampled_from(QUORUMS)) if aggregate else ())),
        bucket_bytes=draw(st.integers(0, 2**64 - 1)),
        world_size=draw(st.integers(0, 2**32 - 1)),
        non_finite=draw(st.sampled_from(list(NonFinite))),
        gradient_wire=draw(st.sampled_from(list(FORMATS))),
        weight_wire=draw(st.sampled_from(list(FORMATS))),
        tables=tuple(
            JobTable(TableSpec(draw(NAMES), draw(st.integers(0, 2**32 - 1))), draw(NAMES), {})
            for _ in range(draw(st.integers(0, 2)))
        ),
    )


@settings(max_examples=50)
@given(jobs())
def test_a_job_comes_through_the_wire_as_it_was(job: JobSpec) -> None:
    data = job_spec_message(job).SerializeToString()
    assert job_spec(job_pb2.JobSpec.FromString(data)) == job


@given(HYPER_PARAMETERS)
def test_hyper_parameters_keep_their_values_and_kinds(values: HyperParameters) -> None:
    back = hyper_parameters(hyper_messages(values))
    assert back == values
    assert {name: type(value) for name, value in back.items()} == {name: type(value) for name, value in values.items()}


@pytest.mark.parametrize(
    ("message", "said"),
    [
        (job_pb2.JobSpec(parameters=[job_pb2.ParameterSpec(name="w")]), "data type of 'w': expected one of .* got 0"),
        (job_pb2.JobSpec(parameters=[job_pb2.ParameterSpec(name="w", data_type=99)]), "got 99"),  # type: ignore[arg-type]
        (job_pb2.JobSpec(non_finite=7), "policy for gradients that are not finite: expected one of"),  # type: ignore[arg-type]
        (job_pb2.JobSpec(gradient_wire=9), "wire format of gradients: expected one of .* got 9"),  # type: ignore[arg-type]
        (job_pb2.JobSpec(weight_wire=9), "wire format of weights: expected one of .* got 9"),  # type: ignore[arg-type]
        (job_pb2.JobSpec(consistency=job_pb2.Consistency(aggregate=True)), "averaging needs max_staleness 0"),
        (job_pb2.JobSpec(consistency=job_pb2.Consistency(max_staleness=2**32 - 1)), "staleness must be from 0"),
        (
            job_pb2.JobSpec(groups=[job_pb2.ParameterGroup(hyper_parameters=[job_pb2.HyperParameter(name="lr")] * 2)]),
            "hyper-parameter 'lr' comes twice",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_message_that_describes_no_job_is_refused(message: job_pb2.JobSpec, said: str) -> None:
    with pytest.raises(InvalidRequest, match=said):
        job_spec(message)
