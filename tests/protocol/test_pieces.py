"""Pieces of parameters, which the members of a group hold: what a job may say of them, and what is made of it."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from ps_protocol.convert import identity, identity_message, job_spec, job_spec_message
from ps_protocol.errors import InvalidRequest, LimitExceeded
from ps_protocol.identity import Identity
from ps_protocol.job import JobSpec, difference, validate
from ps_protocol.layout import ParameterSpec, PiecePlace, bucket_layout
from ps_protocol.modes import parse_mode
from ps_protocol.pieces import Stretches, stretches_of, whole_parameters
from ps_protocol.tables import JobTable, TableSpec

PLAIN = JobSpec("job", (), "SGD", ({"lr": 0.1},), parse_mode("sync"), 64, world_size=2)


def piece(member: int, rows: int, first: int, name: str = "w", whole: tuple[int, ...] = (5, 4)) -> ParameterSpec:
    """Rows of a parameter that one member holds."""
    return ParameterSpec(
        name, (rows, *whole[1:]), "float32", 0, member=member, piece=PiecePlace(whole, (first, *whole[1:-1], 0))
    )


def box(member: int, shape: tuple[int, ...], at: tuple[int, ...], whole: tuple[int, ...] = (5, 4)) -> ParameterSpec:
    """A piece that one member holds, cut along any dimensions."""
    return ParameterSpec("w", shape, "float32", 0, member=member, piece=PiecePlace(whole, at))


def cut(*parameters: ParameterSpec, group_size: int = 2) -> JobSpec:
    return replace(PLAIN, parameters=parameters, group_size=group_size)


GROUP = cut(piece(0, 3, 0), ParameterSpec("buffer", (2,), "float32", None), piece(1, 2, 3))


def test_a_job_of_groups_travels_as_it_is() -> None:
    validate(GROUP)
    assert job_spec(job_spec_message(GROUP)) == GROUP
    assert difference(GROUP, GROUP) is None
    worker = Identity("job", 1, 7, b"key", "run", member=1)
    assert identity(identity_message(worker)) == worker


def test_a_worker_of_one_process_sends_what_it_sent_before_there_were_groups() -> None:
    plain = replace(PLAIN, parameters=(ParameterSpec("w", (5, 4), "float32", 0),))
    message = job_spec_message(plain)
    assert not message.group_size
    assert not message.parameters[0].HasField("piece")
    assert {field.name for field, _ in message.parameters[0].ListFields()} == {"name", "shape", "data_type"}
    fields = {field.name for field, _ in identity_message(Identity("job", 1, 7, b"key", "run")).ListFields()}
    assert fields == {"job", "rank", "incarnation", "lease_key", "run"}


def test_each_member_has_buckets_of_its_own() -> None:
    layout = bucket_layout(GROUP.parameters, 64)
    held = {member: replace(layout, member=member) for member in (0, 1)}
    assert {bucket.member for bucket in layout.buckets} == {0, 1}
    assert sorted(b.index for each in held.values() for b in each.held) == [b.index for b in layout.buckets]
    assert [part.parameter for bucket in held[1].trained for part in bucket.slices] == [2]
    assert [GROUP.parameters[0], GROUP.parameters[2]] == [p for p in GROUP.parameters if p.param_group == 0]
    assert held[0].trains(GROUP.parameters[0])
    assert not held[0].trains(GROUP.parameters[2])
    assert layout.trains(GROUP.parameters[2])


def test_pieces_make_whole_parameters() -> None:
    wholes = whole_parameters(GROUP.parameters)
    assert [(each.name, each.shape, each.piece) for each in wholes] == [("w", (5, 4), None), ("buffer", (2,), None)]


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        (cut(piece(0, 3, 0), piece(2, 2, 3)), "w: expected a member below 2, of as many in the group, got 2"),
        (cut(piece(0, 3, 0), piece(1, 3, 3)), r"w: expected a piece within \(5, 4\), got \(3, 4\) from \(3, 0\) on"),
        (cut(piece(0, 3, 0), piece(1, 1, 4)), "expected the next one at 3 of dimension 0"),
        (cut(piece(0, 3, 0), piece(1, 3, 2)), "expected the next one at 3 of dimension 0"),
        (cut(piece(0, 3, 0), piece(1, 1, 3)), "end at 4 of dimension 0, and it has 5 there"),
        (cut(piece(0, 3, 0), piece(1, 3, 0)), r"members 0 and 1 both have the piece from \(0, 0\) on of 'w'"),
        (cut(piece(0, 3, 0), piece(0, 3, 0)), "parameter names must be unique, got 'w' twice"),
        (cut(piece(0, 5, 0), ParameterSpec("w", (5, 4), "float32", 0)), "'w' is whole and in pieces"),
        (
            cut(ParameterSpec("w", (4,), "float32", 0), ParameterSpec("w", (4,), "float32", 0, member=1)),
            "members 0 and 1 both have all of 'w'",
        ),
        (cut(piece(0, 3, 0), replace(piece(1, 2, 3), dtype="float64")), "members 0 and 1 have pieces of unlike"),
        (cut(piece(0, 3, 0), piece(1, 2, 3, whole=(6, 4))), "members 0 and 1 have pieces of unlike"),
        (
            cut(replace(piece(0, 3, 0), piece=PiecePlace((5,), (0,))), piece(1, 2, 3)),
            r"expected a piece in 2 dimensions, got offsets \(0,\) in \(5,\)",
        ),
        (cut(box(0, (3, 2), (0, 0)), box(1, (3, 2), (0, 2))), "end at 3 of dimension 0, and it has 5 there"),
        (
            cut(box(0, (3, 2), (0, 0)), box(1, (3, 2), (0, 2)), box(2, (2, 2), (3, 0)), group_size=3),
            r"are to cover its \(5, 4\), each element once: expected 4 at as many places, got 3 at 3",
        ),
        (
            cut(box(0, (3, 2), (0, 0)), box(1, (2, 2), (0, 2)), box(2, (2, 4), (3, 0)), group_size=3),
            "expected the next one at 3 of dimension 0",
        ),
        (
            cut(
                *(box(2 * a + b, (2, 1, 2), (0, a, 2 * b), (2, 2, 4)) for a in (0, 1) for b in (0, 1)),
                group_size=4,
            ),
            r"'w' is cut along its dimensions \[1, 2\]: .* along the first and one other",
        ),
    ],
)
def test_pieces_that_do_not_make_one_parameter_are_refused(spec: JobSpec, said: str) -> None:
    with pytest.raises(InvalidRequest, match=said):
        validate(spec)


def test_pieces_may_be_a_grid() -> None:
    """Where each row of it has the same cuts. The last one has fewer rows."""
    columns = [(0, 2), (2, 1), (3, 1)]
    rows = [(0, 3), (3, 2)]
    places = [(row, column) for row in rows for column in columns]
    boxes = [box(index, (n, m), (y, x)) for index, ((y, n), (x, m)) in enumerate(places)]
    validate(cut(*boxes, group_size=6))
    found = [stretches_of(each) for each in boxes]
    numbers = [lies.first + i * lies.step + j for lies in found for i in range(lies.count) for j in range(lies.length)]
    assert sorted(numbers) == list(range(20))
    assert found[4] == Stretches(first=14, length=1, step=4, count=2)


def test_a_job_of_groups_has_no_tables() -> None:
    table = JobTable(TableSpec("rows", 4), "SGD", {"lr": 0.1})
    validate(replace(PLAIN, tables=(table,)))
    with pytest.raises(InvalidRequest, match="a job whose workers are groups has no tables of rows, got 1"):
        validate(replace(GROUP, tables=(table,)))


def test_a_group_has_a_greatest_size() -> None:
    with pytest.raises(LimitExceeded, match="a group may have up to 256 members, got 257"):
        validate(replace(GROUP, group_size=257))


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (
            cut(replace(piece(0, 5, 0)), ParameterSpec("buffer", (2,), "float32", None), group_size=1),
            "the number of members of a group is 2 in the registered job and 1 in this one",
        ),
        (
            cut(piece(0, 2, 0), ParameterSpec("buffer", (2,), "float32", None), piece(1, 3, 2)),
            r"the registered model has a piece of parameter 'w' at \(3, 0\) that this one lacks",
        ),
        (
            cut(piece(1, 3, 0), ParameterSpec("buffer", (2,), "float32", None), piece(0, 2, 3)),
            "parameter 'w' has member 0 in the registered job and 1 in this one",
        ),
    ],
)
def test_groups_that_are_cut_otherwise_train_another_job(other: JobSpec, said: str) -> None:
    assert re.fullmatch(said, difference(GROUP, other) or "")
