"""When a fragment of a model is pushed, and when it is mixed in: the schedule of mode local:H/F."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ps_protocol.convert import job_spec, job_spec_message
from ps_protocol.errors import InvalidRequest
from ps_protocol.fragments import Fragments, default_mixing, fragments
from ps_protocol.job import JobSpec
from ps_protocol.layout import ParameterSpec
from ps_protocol.local import Local
from ps_protocol.modes import Consistency, local_rounds, parse_mode

SYNC = Consistency(max_staleness=0, aggregate=True)
JOB = JobSpec("job", (ParameterSpec("w", (8,), "float32", 0),), "SGD", ({"lr": 1.0},), SYNC, 64, 2)

EVERY = [
    Fragments(steps, count, delay)
    for steps in range(1, 13)
    for count in range(1, steps + 1)
    if steps % count == 0
    for delay in range(steps // count)
]


@pytest.mark.parametrize("parts", EVERY, ids=lambda parts: f"{parts.steps}/{parts.count} delay {parts.delay}")
def test_in_a_round_each_fragment_leaves_once_and_is_mixed_in_before_the_next_one_leaves(parts: Fragments) -> None:
    steps = [step for fragment in range(parts.count) for step in (parts.leaves(fragment), parts.lands(fragment))]
    assert steps == sorted(steps), "one is under way at a time"
    assert all(parts.lands(each) < parts.leaves(each + 1) for each in range(parts.count - 1))
    assert [parts.leaves(each) for each in range(parts.count)] == [
        (each + 1) * parts.steps // parts.count for each in range(parts.count)
    ]
    assert all(parts.lands(each) == parts.leaves(each) + parts.delay for each in range(parts.count))
    assert steps[-1] == parts.last, "with which the round is over"
    assert parts.leaves(0) > parts.delay, "in the next round, no fragment was to leave before that"


def test_of_every_h_steps_each_fragment_has_one_and_the_same_all_the_time() -> None:
    parts, local = Fragments(8, 4, 1, 0.5), Local(8, warm_up=3, fragments=Fragments(8, 4, 1, 0.5))
    left, made, number = [], 0, 4
    while number < 8:
        first = 1 if number == local.warm_up + 1 else 1 + parts.delay
        steps = range(first, parts.last + 1)
        assert len(steps) == local.steps_of(number)
        leaves = {parts.leaves(fragment): fragment for fragment in range(parts.count)}
        left += [(made + at + 1, leaves[step]) for at, step in enumerate(steps) if step in leaves]
        made += len(steps)
        assert local.clock(number) == local.warm_up + made
        number += 1
    assert left == [(2 * each, (each - 1) % 4) for each in range(1, 17)], "counted from the end of the warm-up"
    assert [local.steps_of(each) for each in (1, 3, 4, 5, 6)] == [1, 1, 9, 8, 8]
    assert [local.clock(each) for each in (0, 3, 4, 5)] == [0, 3, 12, 20]


@pytest.mark.parametrize("count", [1, 2, 3, 4, 6, 8])
@pytest.mark.parametrize("shards", [1, 2, 3, 4, 8])
def test_a_fragment_has_as_many_buckets_as_the_others_on_each_shard(count: int, shards: int) -> None:
    """Equal buckets go to shards in turn: a fragment of one shard alone would have one link carry it."""
    parts, buckets = Fragments(count, count), count * count * shards
    assert all({parts.of(b) for b in range(at, at + count)} == set(range(count)) for at in range(0, buckets, count))
    for fragment in range(count):
        homes = [position % shards for position in range(buckets) if parts.of(position) == fragment]
        each = [homes.count(shard) for shard in range(shards)]
        assert sum(each) == buckets // count
        assert max(each) <= 2 * count, f"no shard has more than twice its share: {each}"


@pytest.mark.parametrize(
    ("mode", "delay", "mixing"), [("local:8/4", 1, 0.5), ("local:8/1", 1, 0.5), ("local:4/4", 0, 0)]
)
def test_a_modes_name_says_h_and_f_and_the_rest_has_defaults(mode: str, delay: int, mixing: float) -> None:
    rounds = local_rounds(mode)
    assert rounds is not None
    assert rounds.fragments is not None
    assert rounds.mode == mode
    assert (rounds.fragments.delay, rounds.fragments.mixing) == (delay, mixing)
    assert parse_mode(mode) == SYNC
    assert default_mixing(0) == 0.0, "without a delay nothing was trained meanwhile"


@pytest.mark.parametrize(
    ("mode", "message"),
    [
        ("local:8/3", "takes an F from 1 that divides H, got local:8/3"),
        ("local:8/0", "takes an F from 1 that divides H, got local:8/0"),
        ("local:4/8", "takes an F from 1 that divides H, got local:4/8"),
        ("local:0/1", "local:H takes an H from 1"),
        ("local:30s/4", "rounds of a time have no fragments: write local:H/F"),
        ("local:0.5s/2", "rounds of a time have no fragments: write local:H/F"),
        ("local:8/", "mode must be single, ddp, sync, local:H (such as local:8, local:8/4"),
        ("local:8/4/2", "mode must be single"),
        ("local:/4", "mode must be single"),
        ("local:8/-4", "mode must be single"),
    ],
)
def test_fragments_that_no_job_can_have_are_refused_in_one_sentence(mode: str, message: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        parse_mode(mode)
    assert message in str(refused.value)


@pytest.mark.parametrize("delay", [-1, 2, 8])
def test_a_delay_as_long_as_the_pause_between_two_pushes_is_refused(delay: int) -> None:
    with pytest.raises(InvalidRequest, match="delay of local:8/4 is from 0 to below 2 steps"):
        Fragments(8, 4, delay)


@pytest.mark.parametrize("mixing", [-0.1, 1.0, float("nan")])
def test_a_mixing_that_takes_nothing_of_what_is_pulled_is_refused(mixing: float) -> None:
    with pytest.raises(InvalidRequest, match="mixing of local:H/F is from 0 to below 1"):
        Fragments(8, 4, 1, mixing)


def test_rounds_of_a_time_or_of_another_length_have_no_such_fragments() -> None:
    for local in ({"steps": 1, "seconds": 30.0}, {"steps": 4}):
        with pytest.raises(InvalidRequest, match="a round with fragments has a number of steps"):
            Local(**local, fragments=Fragments(8, 4))  # type: ignore[arg-type]


@pytest.mark.parametrize("parts", [None, fragments(8, 4), Fragments(8, 2, 3, 0.25)])
def test_a_job_keeps_its_fragments_on_the_wire(parts: Fragments | None) -> None:
    spec = replace(JOB, local=Local(8, fragments=parts))
    assert job_spec(job_spec_message(spec)) == spec


def test_a_message_of_rounds_of_a_time_with_fragments_is_refused() -> None:
    message = job_spec_message(replace(JOB, local=Local(1, seconds=30.0)))
    message.local.fragments = 2
    with pytest.raises(InvalidRequest, match="rounds that end by time have no fragments, got 2"):
        job_spec(message)
