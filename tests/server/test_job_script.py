"""What a job's script has set: which worker is asked for it, and what a worker that joins late gets."""

from __future__ import annotations

import pytest

from ps_protocol.errors import InvalidRequest
from ps_protocol.job import MAX_SCRIPT_BYTES
from ps_server.coordinator.job_script import JobScript, Report
from tests.tools.one_process import DirectWorker, OneProcess
from tests.tools.raw_worker import vector_job


def joined(
    cluster: OneProcess, count: int, saved: Report | None = None, in_step: bool = True
) -> tuple[JobScript, list[int]]:
    """The script of an elastic job with so many workers, and how often others are to hear that one is asked."""
    spec = vector_job("job", "async", 16, 0)
    for rank in range(count):
        DirectWorker(cluster, spec, rank)
    told: list[int] = []
    members = cluster.coordinator.job("job").workers
    return JobScript(members, True, lambda above: saved, lambda: told.append(1)), told


def test_the_newest_that_was_told_counts(cluster: OneProcess) -> None:
    script, _ = joined(cluster, 2)
    script.tell(0, 0, (5, b"five"))
    script.tell(1, 0, (4, b"four"))
    assert script.ask(1, 2)[0] == (5, b"five")


def test_a_worker_that_has_nothing_to_tell_makes_way_for_the_next(cluster: OneProcess) -> None:
    script, heard = joined(cluster, 3)
    assert script.ask(2, 3) == (None, True)
    rank, number = script.asked_now() or (None, 0)
    assert rank == 0
    script.tell(0, number, None)
    assert script.asked_now() == (1, number)
    assert script.ask(2, 3) == (None, True)
    script.tell(1, number, (7, b"seven"))
    assert script.ask(2, 3) == ((7, b"seven"), False)
    assert script.asked_now() is None
    assert len(heard) == 2


def test_a_worker_that_is_taken_for_gone_while_it_asks_again_still_waits_for_the_answer(cluster: OneProcess) -> None:
    """Another worker's heartbeat has the list of those that were live before this one joined."""
    script, _ = joined(cluster, 3)
    assert script.ask(2, 3) == (None, True)
    lock = script._lock

    class TakenOut:
        def __enter__(self) -> None:
            script._lock = lock
            script._asking.clear()

        def __exit__(self, *_: object) -> None:
            pass

    script._lock = TakenOut()  # type: ignore[assignment]
    assert script.ask(2, 3) == (None, True)
    script.tell(0, script._number, (5, b"five"))
    assert script.ask(2, 3) == ((5, b"five"), False)


def test_another_one_may_answer_in_the_place_of_the_first(cluster: OneProcess) -> None:
    """That one may be dead, and count as live until its lease is over."""
    script, _ = joined(cluster, 3)
    assert script.ask(2, 3) == (None, True)
    _, number = script.asked_now() or (None, 0)
    assert script.asked_by_heartbeat(1) == number
    script.tell(1, number, (7, b"seven"))
    assert script.ask(2, 3) == ((7, b"seven"), False)


def test_a_worker_that_got_no_answer_in_time_is_asked_later(cluster: OneProcess) -> None:
    """It has gone on, and has a schedule by then."""
    script, _ = joined(cluster, 2)
    assert script.ask(0, 1) == (None, True)
    assert script.ask(1, 2) == (None, True)
    rank, number = script.asked_now() or (None, 0)
    assert rank == 0
    script.tell(0, number, (7, b"seven"))
    assert script.ask(1, 2) == ((7, b"seven"), False)


def test_where_all_that_were_asked_have_left_nobody_waits_for_their_answers(cluster: OneProcess) -> None:
    spec = vector_job("job", "async", 16, 0)
    first, second, _ = (DirectWorker(cluster, spec, rank) for rank in range(3))
    script = cluster.coordinator.job("job").script
    script.tell(0, 0, (5, b"five"))
    assert script.ask(2, 3) == ((5, b"five"), True)
    first.leave()
    assert script.ask(2, 3) == ((5, b"five"), True)
    second.leave()
    assert script.ask(2, 3) == ((5, b"five"), False)


def test_an_answer_to_an_earlier_request_is_not_taken_for_one_to_the_last(cluster: OneProcess) -> None:
    script, _ = joined(cluster, 2)
    script.ask(1, 2)
    script.tell(0, 1, (3, b"before"))
    assert script.ask(1, 2) == ((3, b"before"), True)


@pytest.mark.parametrize(("clock", "expected"), [(3, b"told"), (9, b"saved")])
def test_where_nobody_is_left_the_newest_of_what_was_told_and_saved_counts(
    cluster: OneProcess, clock: int, expected: bytes
) -> None:
    script, _ = joined(cluster, 1, None if clock < 5 else (clock, b"saved"))
    script.tell(0, 0, (5, b"told"))
    found, is_coming = script.ask(0, 1)
    assert (found or (0, b""))[1] == expected
    assert not is_coming


def test_a_rollback_makes_void_what_was_told(cluster: OneProcess) -> None:
    script, _ = joined(cluster, 1)
    script.tell(0, 0, (5, b"told"))
    script.forget()
    assert script.ask(0, 1) == (None, False)


def test_what_a_script_has_set_is_bounded(cluster: OneProcess) -> None:
    script, _ = joined(cluster, 1)
    with pytest.raises(InvalidRequest, match="may have 65536 bytes, got 65537"):
        script.tell(0, 0, (5, bytes(MAX_SCRIPT_BYTES + 1)))
