"""What is wrong with what readers saw: each promise that they could see broken is found broken."""

from __future__ import annotations

import torch

from tests.chaos.audience import ENDED, FELL, HALF, UNEQUAL, ReaderLife, Seen, judge_ends, judge_readers
from tests.chaos.oracle import Rules, Shape, Violation
from tests.chaos.reader import wrong

RULES = Rules.of("sync", 2, Shape(2, 2, 3))


def seen(version: int, checksum: int = 1, restores: int = 0, told: int | None = None, run: str = "a") -> Seen:
    bucket = (restores, version, checksum)
    return Seen(0.0, run, version, restores, restores if told is None else told, 1, (bucket, bucket))


def kinds(*lives: list[Seen]) -> list[str]:
    found = judge_readers(ReaderLife(number, number, seen=each) for number, each in enumerate(lives))
    return [violation.kind for violation in found]


def test_versions_that_rise_and_falls_that_were_told_are_right() -> None:
    assert kinds([seen(1), seen(2, 2), seen(2, 2)], [seen(2, 2), seen(5, 5)]) == []
    assert kinds([seen(9), seen(4, restores=1), seen(5, restores=1)]) == []
    assert kinds([seen(9, told=1), seen(4, restores=1)]) == [], "the rollback was told in the reading before"
    assert kinds([seen(9), seen(4, 7, run="b")]) == [], "another run"
    assert kinds([seen(9)], [seen(4, 4)]) == [], "a reader that was started again, at a relay that has an older edition"


def test_a_version_that_falls_unsaid_is_found() -> None:
    assert kinds([seen(9), seen(4, 4)]) == [FELL]
    assert kinds([seen(9, restores=1), seen(4, 4, restores=1)]) == [FELL]


def test_unequal_bytes_of_one_version_are_found_whoever_has_them() -> None:
    assert kinds([seen(3, 1)], [seen(3, 2)]) == [UNEQUAL, UNEQUAL]
    assert kinds([seen(3, 1), seen(3, 1, restores=1)], [seen(3, 2, restores=1)]) == [UNEQUAL, UNEQUAL]
    assert kinds([seen(3, 1)], [seen(3, 2, restores=1)]) == [], "on another timeline"


def test_what_a_reader_has_written_down_counts() -> None:
    life = ReaderLife(0, 0, seen=[seen(1)], violations=[Violation(HALF, "the model changed")])
    assert [violation.kind for violation in judge_readers([life])] == [HALF]


def test_a_reader_that_ends_by_itself_before_its_job_is_found() -> None:
    first, second = ReaderLife(0, 1, born=1.0), ReaderLife(1, 1, born=5.0)
    kills = [(1, 4.0)]
    assert judge_ends([first, second], kills, until=9.0) == []
    second.ended = 9.5, "left: the job has ended"
    assert judge_ends([first, second], kills, until=9.0) == []
    assert [violation.kind for violation in judge_ends([first, second], [(0, 4.0)], until=9.0)] == [ENDED]
    first.ended = 4.0, "NotFound: no job"
    assert [violation.said for violation in judge_ends([first, second], kills, until=9.0)] == ["NotFound: no job"]


def test_a_reading_that_has_buckets_of_two_versions_is_found() -> None:
    view = torch.zeros(2, 2, 4)
    for update in range(3):
        view[:, :, 0] += RULES.unit / 2
        view[:, :, 1 + update] += RULES.unit / 2
    assert wrong(view, 3, RULES, is_one=True) == []
    assert [violation.kind for violation in wrong(view, 2, RULES, is_one=True)] == [HALF]
    view[1, :, 0] += RULES.unit / 2
    view[1, :, 1] += RULES.unit / 2
    assert [violation.kind for violation in wrong(view, 3, RULES, is_one=True)] == [HALF]
    assert wrong(view, 3, RULES, is_one=False) == [], "in async each bucket has a version of its own"
    view[0, 0, 1] += 0.5
    assert {violation.kind for violation in wrong(view, 3, RULES, is_one=False)} == {"torn"}
