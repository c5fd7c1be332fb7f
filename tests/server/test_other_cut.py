"""Buckets that are put together from those of the same job with its parameters cut otherwise."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ps_protocol.errors import JobMismatch
from ps_protocol.job import JobSpec, are_cut_alike, difference, difference_of_uncut, validate
from ps_protocol.layout import BucketSpec, ParameterSpec, PiecePlace, bucket_layout
from ps_protocol.modes import parse_mode
from ps_protocol.stage_spec import StageSpec
from ps_protocol.tensors import TORCH_DTYPES
from ps_server.core.other_cut import OtherCut
from ps_server.core.snapshot import BucketSnapshot

ADAM = JobSpec("job", (), "Adam", ({"lr": 0.1, "amsgrad": False},), parse_mode("sync"), 64, world_size=1)
STEPS = 5

Wholes = Mapping[str, torch.Tensor]


def pieces(whole: ParameterSpec, members: int, dimension: int) -> list[ParameterSpec]:
    """A parameter as members hold it: cut as torch.chunk cuts, without what is empty."""
    size, found = -(-whole.shape[dimension] // members), []
    for member in range(members):
        first = min(member * size, whole.shape[dimension])
        length = min(size, whole.shape[dimension] - first)
        shape = tuple(length if d == dimension else n for d, n in enumerate(whole.shape))
        offsets = tuple(first if d == dimension else 0 for d in range(len(whole.shape)))
        if length:
            found.append(replace(whole, shape=shape, member=member, piece=PiecePlace(whole.shape, offsets)))
    return found


GRID = 3  # in place of a dimension


def boxes(whole: ParameterSpec, members: int) -> list[ParameterSpec]:
    """A parameter as a grid of processes holds it: cut along its first dimension by half of them, and along its last
    one in two."""
    found = []
    for row in pieces(whole, members // 2, 0):
        for column in pieces(row, 2, len(whole.shape) - 1):
            assert row.piece is not None
            assert column.piece is not None
            place = PiecePlace(whole.shape, (row.piece.offsets[0], *column.piece.offsets[1:]))
            found.append(replace(column, member=2 * row.member + column.member, piece=place))
    return found


def cut(job: JobSpec, members: int, dimensions: Sequence[int] = ()) -> JobSpec:
    """The job of a group that cuts each parameter along a dimension: its first, or as many as are given. 0 members: of
    workers of one process."""
    if not members:
        return job
    along = [*dimensions, *[0] * len(job.parameters)]
    cuts = [
        boxes(each, members)
        if d == GRID and len(each.shape) > 1 and members % 2 == 0
        else pieces(each, members, d % len(each.shape))
        for each, d in zip(job.parameters, along, strict=False)
        if each.shape
    ]
    scalars = [each for each in job.parameters if not each.shape]
    found = [each for member in range(members) for cut in cuts for each in cut if each.member == member]
    return replace(job, parameters=(*scalars, *found), group_size=members)


def element(parameter: ParameterSpec, wholes: Wholes, name: str = "") -> torch.Tensor:
    """The values of a piece, flat."""
    values = wholes[f"{parameter.name}{name}"]
    if parameter.piece is not None:
        for d, (first, length) in enumerate(zip(parameter.piece.offsets, parameter.shape, strict=True)):
            values = values.narrow(d, first, length)
    return values.reshape(-1)


def snapshots(job: JobSpec, wholes: Wholes) -> dict[int, BucketSnapshot]:
    """The buckets of a job with the elements of whole tensors, and Adam's state where an optimizer steps them."""
    found = {}
    for bucket in bucket_layout(job.parameters, job.bucket_bytes).buckets:
        weights = torch.zeros(bucket.numel, dtype=TORCH_DTYPES[bucket.dtype])
        state: dict[int, dict[str, torch.Tensor]] = {}
        for position, part in enumerate(bucket.slices):
            parameter, own = job.parameters[part.parameter], slice(part.start, part.start + part.length)
            weights[part.offset : part.offset + part.length] = element(parameter, wholes)[own]
            if not bucket.frozen:
                state[position] = {
                    name: element(parameter, wholes, f".{name}")[own].clone() for name in ("exp_avg", "exp_avg_sq")
                }
                state[position]["step"] = torch.tensor(float(STEPS))
        sent = weights.float() * 3 if not bucket.frozen else None
        head = (0, {}) if bucket.frozen else (STEPS, {0: STEPS})
        groups = {} if bucket.frozen else {0: {"lr": 0.5}}
        found[bucket.index] = BucketSnapshot(bucket.index, *head, weights, state, groups, sent=sent)
    return found


def tensors(found: Mapping[int, BucketSnapshot], layout: Sequence[BucketSpec]) -> Iterator[Callable[[OtherCut], None]]:
    """Everything that a checkpoint has of buckets, as it is taken."""
    for bucket in layout:
        snapshot = found[bucket.index]
        head = replace(snapshot, weights=torch.empty(0), state={}, sent=None)

        def weights(cut: OtherCut, b=bucket, h=head, s=snapshot) -> None:  # type: ignore[no-untyped-def]
            cut.take_weights(b, h, s.weights)

        yield weights
        if snapshot.sent is not None:

            def sent(cut: OtherCut, b=bucket, h=head, s=snapshot) -> None:  # type: ignore[no-untyped-def]
                cut.take_weights(b, h, s.sent, sent=True)

            yield sent
        for position, state in snapshot.state.items():
            for name, value in state.items():

                def one(cut: OtherCut, b=bucket, h=head, p=position, n=name, v=value) -> None:  # type: ignore[no-untyped-def]
                    cut.take_state(b, h, p, n, v)

                yield one


def restored(
    before: JobSpec,
    after: JobSpec,
    found: Mapping[int, BucketSnapshot],
    order: random.Random | None = None,
    refuses: bool = True,
) -> dict[int, BucketSnapshot]:
    """What becomes of the buckets of one job in the other."""
    made = OtherCut(before, after, bucket_layout(after.parameters, after.bucket_bytes).buckets, refuses)
    taken = [*tensors(found, made.sources())]
    if order is not None:
        order.shuffle(taken)
    for take in taken:
        take(made)
    return made.snapshots()


def same(one: BucketSnapshot, other: BucketSnapshot) -> bool:
    states = {position: sorted(state) for position, state in one.state.items()}
    assert states == {position: sorted(state) for position, state in other.state.items()}
    pairs = [(one.weights, other.weights), *((s[n], other.state[p][n]) for p, s in one.state.items() for n in s)]
    pairs += [] if one.sent is None or other.sent is None else [(one.sent, other.sent)]
    heads = [replace(each, weights=torch.empty(0), state={}, sent=None) for each in (one, other)]
    assert repr(heads[0]) == repr(heads[1])
    assert (one.sent is None) == (other.sent is None)
    return all(a.dtype == b.dtype and torch.equal(a, b) for a, b in pairs)


@st.composite
def jobs(draw: st.DrawFn) -> JobSpec:
    """A job of whole parameters."""
    names = map(str, count())
    shapes = draw(st.lists(st.lists(st.integers(1, 9), min_size=0, max_size=3), min_size=1, max_size=4))
    found = []
    for shape in shapes:
        kind, group = draw(st.sampled_from([("float32", 0), ("bfloat16", 0), ("float32", None), ("int64", None)]))
        found.append(ParameterSpec(next(names), tuple(shape), kind, group))
    return replace(ADAM, parameters=(ParameterSpec("w", (3, 5), "float32", 0), *found))


def made_up(job: JobSpec) -> Wholes:
    """Tensors of which each element has a value of its own."""
    numbers = count(1)
    found: dict[str, torch.Tensor] = {}
    for each in job.parameters:
        for name in ("", ".exp_avg", ".exp_avg_sq"):
            values = torch.tensor([next(numbers) for _ in range(each.numel)], dtype=TORCH_DTYPES[each.dtype])
            found[f"{each.name}{name}"] = values.reshape(each.shape)
    return found


@given(jobs(), st.data())
def test_what_is_joined_and_cut_is_what_would_have_been_cut_alike(job: JobSpec, data: st.DataObject) -> None:
    each = [
        (data.draw(st.integers(0, 5)), data.draw(st.lists(st.integers(0, GRID), min_size=5, max_size=5)))
        for _ in range(2)
    ]
    before, after = (cut(job, *how) for how in each)
    after = replace(after, bucket_bytes=data.draw(st.sampled_from([64, 128, 4096])))
    found = restored(before, after, snapshots(before, wholes := made_up(job)), random.Random(0))
    expected = snapshots(after, wholes)
    assert found.keys() == expected.keys()
    assert all(same(found[index], expected[index]) for index in expected)
    steps = [state["step"] for each in found.values() for state in each.state.values()]
    assert len({step.data_ptr() for step in steps}) == len(steps), "an optimizer counts each of them on"


@pytest.mark.parametrize("one", range(GRID + 1))
@pytest.mark.parametrize("other", range(GRID + 1))
def test_pieces_of_many_buckets_are_joined_along_each_dimension(one: int, other: int) -> None:
    job = replace(ADAM, parameters=(ParameterSpec("w", (6, 7, 5), "float32", 0),))
    before, after, wholes = (
        cut(job, 4 if one == GRID else 3, [one]),
        cut(job, 6 if other == GRID else 2, [other]),
        made_up(job),
    )
    found, expected = restored(before, after, snapshots(before, wholes)), snapshots(after, wholes)
    assert all(same(found[index], expected[index]) for index in expected)


@given(jobs(), st.integers(1, 5), st.integers(1, 5))
def test_jobs_that_are_cut_otherwise_differ_in_nothing_else(job: JobSpec, one: int, other: int) -> None:
    before, after = cut(job, one, [GRID] * 5), cut(job, other, [1] * 5)
    for each in (before, after):
        validate(each)
    assert difference_of_uncut(before, after) is None
    assert difference_of_uncut(before, job) is None
    wider = replace(job, parameters=(replace(job.parameters[0], shape=(4, 5)), *job.parameters[1:]))
    assert "parameter 'w' has shape" in str(difference_of_uncut(before, wider))
    assert difference(before, job) is not None
    assert difference_of_uncut(job, replace(job, parameters=job.parameters[::-1])) == difference(
        job, replace(job, parameters=job.parameters[::-1])
    ), "what no group cuts has to be as it was"


def stages(job: JobSpec, members: int) -> JobSpec:
    """The job of a pipeline: each member holds every n-th parameter, whole."""
    held = [replace(each, member=index % members) for index, each in enumerate(job.parameters)]
    return replace(job, parameters=tuple(sorted(held, key=lambda each: each.member)), group_size=members)


@given(jobs(), st.integers(2, 4), st.sampled_from(["one process", "other stages", "pieces"]))
def test_stages_of_a_pipeline_become_another_cut_and_are_made_of_one(job: JobSpec, members: int, other: str) -> None:
    one = stages(job, members)
    another = {"one process": job, "other stages": stages(job, members + 1), "pieces": cut(job, members)}[other]
    wholes = made_up(job)
    for before, after in ((one, another), (another, one)):
        validate(after)
        assert not are_cut_alike(before, after)
        assert difference_of_uncut(before, after) is None
        found, expected = restored(before, after, snapshots(before, wholes)), snapshots(after, wholes)
        assert all(same(found[index], expected[index]) for index in expected)


ROWS = replace(ADAM, parameters=(ParameterSpec("w", (4, 4), "float32", 0), ParameterSpec("b", (2,), "float32", None)))


@pytest.fixture
def two() -> dict[int, BucketSnapshot]:
    """The buckets of a group of two: of each member one that trains."""
    return snapshots(cut(ROWS, 2), made_up(ROWS))


def changed(found: BucketSnapshot, **state: torch.Tensor) -> BucketSnapshot:
    return replace(found, state={0: {**found.state[0], **state}})


def test_numbers_that_are_not_the_same_in_all_pieces_are_refused_by_name(two: dict[int, BucketSnapshot]) -> None:
    two[1] = changed(two[1], step=torch.tensor(6.0))
    with pytest.raises(JobMismatch, match=r"state 'step' of 'w' is 5 in one piece and 6 in another"):
        restored(cut(ROWS, 2), ROWS, two)
    two[1] = replace(two[1], version=6)
    for order in range(4):  # the piece that has had most updates counts, whichever comes first
        found = restored(cut(ROWS, 2), ROWS, two, random.Random(order), refuses=False)
        assert found[0].state[0]["step"] == 6.0
    assert restored(cut(ROWS, 2), cut(ROWS, 4), two)[0].state[0]["step"] == 5.0, "these are in one piece each"


def test_state_that_only_some_pieces_have_is_refused_by_name(two: dict[int, BucketSnapshot]) -> None:
    two[1] = replace(two[1], state={})
    with pytest.raises(JobMismatch, match="only some pieces of 'w' have the optimizer's state 'exp_avg'"):
        restored(cut(ROWS, 2), ROWS, two)
    assert restored(cut(ROWS, 2), ROWS, two, refuses=False)[0].state == {}
    assert set(restored(cut(ROWS, 2), cut(ROWS, 4), two)[0].state) == {0}


def test_state_of_another_shape_than_its_parameter_is_refused_by_name(two: dict[int, BucketSnapshot]) -> None:
    two[1] = changed(two[1], exp_avg=torch.ones(1))
    with pytest.raises(JobMismatch, match=r"state 'exp_avg' of 'w' has shape \(1,\)"):
        restored(cut(ROWS, 2), ROWS, two)


def test_a_script_that_has_gone_on_to_another_optimizer_is_refused() -> None:
    found = snapshots(ROWS, made_up(ROWS))
    found[0] = replace(found[0], stage=StageSpec(2, "SGD", (0,), {0: {"lr": 0.1}}))
    with pytest.raises(JobMismatch, match="trained by SGD, in stage 2 of its script"):
        restored(ROWS, cut(ROWS, 2), found)


def test_weights_that_are_not_all_there_are_damage(two: dict[int, BucketSnapshot]) -> None:
    before, layout = cut(ROWS, 2), bucket_layout(ROWS.parameters, 64).buckets
    made = OtherCut(before, ROWS, layout)
    for take in tensors(two, made.sources()[1:]):
        take(made)
    with pytest.raises(ValueError, match="bucket 0 has 16 weights, found 8"):
        made.snapshots()


def test_what_is_joined_of_several_moments_has_had_what_all_have_and_was_pushed_what_one_has(
    two: dict[int, BucketSnapshot],
) -> None:
    two[0] = replace(two[0], version=9, clocks={0: 5, 1: 4}, groups={0: {"lr": 0.25}})
    two[1] = replace(two[1], version=8, clocks={0: 4, 1: 4}, pushed={1: 6}, groups={0: {"lr": 0.5}})
    found = restored(cut(ROWS, 2), ROWS, two)[0]
    assert (found.version, found.clocks, found.pushed) == (9, {0: 4, 1: 4}, {0: 5, 1: 6})
    assert found.groups == {0: {"lr": 0.25}}, "of the one that is furthest"
