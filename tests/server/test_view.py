"""What people see who watch: the rules behind it, without a cluster."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from ps_protocol.errors import InvalidRequest, PSError, Unreachable
from ps_protocol.figures import PHASES, LoggedValue, WorkerFigures
from ps_protocol.modes import Consistency
from ps_server.coordinator.events import EVENTS_KEPT, EventLog
from ps_server.coordinator.heard import HeardFigures
from ps_server.coordinator.shards import RegisteredShard
from ps_server.coordinator.timing import Clock
from ps_server.core.membership import LiveWorker
from ps_server.core.server_figures import ShardFigures, ShardJobFigures, check_worker_figures
from ps_server.core.statistics import JobStatistics, ShardJobStatistics, ShardStatistics, Wait
from ps_server.view.diagnosis import JobSigns, diagnosis, state
from ps_server.view.history import MAX_SERIES, History
from ps_server.view.making import Answer, Sources, ViewMaker, samples
from ps_server.view.rates import WINDOW_SECONDS, Window
from ps_server.view.view import View
from ps_server.view.watch import Watch

FOUR = (0, 1, 2, 3)


def phases(**seconds: float) -> dict[str, float]:
    return dict.fromkeys(PHASES, 0.0) | seconds


# -- in words ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("signs", "says"),
    [
        (JobSigns(live=FOUR), "training"),
        (JobSigns(live=(0, 3), world_size=4, started=False), "waits for 2 more of 4 workers"),
        (JobSigns(live=FOUR, silent={1: 4.2}), "shard 1 does not answer for 4 s"),
        (
            JobSigns(live=FOUR, silent={1: 4.2, 0: 61}),
            "shard 0 does not answer for 61 s; shard 1 does not answer for 4 s",
        ),
        (JobSigns(live=FOUR, missing=(1,)), "waits for shard 1 to call in"),
        (JobSigns(live=FOUR, missing=(1, 2)), "waits for shards 1, 2 to call in"),
        (JobSigns(live=FOUR, rolling_back=True), "is being rolled back to its last checkpoint"),
        (JobSigns(live=(0, 2), started=False, world_size=4, rejoining=(1, 3)), "waits for workers 1, 3 to join again"),
        (JobSigns(live=()), "has no worker"),
    ],
)
def test_what_a_job_is_doing_is_said_in_words(signs: JobSigns, says: str) -> None:
    assert state(signs) == says


@pytest.mark.parametrize(
    ("seconds", "awaited", "says"),
    [
        ({"wait": 53, "forward": 47}, {3: 9, 0: 2}, "53 % of the workers' time is waiting, most of it for worker 3"),
        (
            {"wait": 53, "forward": 47},
            {0: 3, 1: 3, 2: 3},
            "53 % of the workers' time is waiting, for no worker in particular",
        ),
        (
            {"wait": 53, "forward": 47},
            {1: 5.5, 0: 4.5},
            "53 % of the workers' time is waiting, for workers 0 and 1 in turn: neither is the slower one",
        ),
        (
            {"wait": 53, "forward": 47},
            {0: 2, 2: 5, 3: 3},
            "53 % of the workers' time is waiting, for no worker in particular",
        ),
        ({"wait": 53, "forward": 47}, {}, "53 % of the workers' time is waiting, and not for another worker"),
        (
            {"push": 20, "pull": 28, "wait": 22, "backward": 30},
            {1: 1},
            "48 % of the workers' time is push and pull: the servers or the network are the limit",
        ),
        (
            {"forward": 40, "backward": 41, "wait": 19},
            {1: 1},
            "81 % of the workers' time is forward and backward: the workers' own computing is the limit",
        ),
        (
            {"data": 70, "forward": 30},
            {},
            "70 % of the workers' time is waiting for the loader: reading the data is the limit",
        ),
        ({"forward": 0.3}, {}, ""),
    ],
)
def test_what_limits_a_job_is_said_in_one_line(seconds: dict[str, float], awaited: dict[int, float], says: str) -> None:
    assert diagnosis(JobSigns(live=FOUR, phases=phases(**seconds), awaited=awaited)) == says


def test_what_limits_a_job_that_does_not_train_is_not_guessed() -> None:
    busy = phases(forward=40, wait=60)
    assert diagnosis(JobSigns(live=FOUR, silent={1: 5.0}, phases=busy)) == ""
    assert "the worker's time" in diagnosis(JobSigns(live=(0,), phases=busy))


# -- figures -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrong",
    [
        {"measured": math.nan},
        {"measured": -1.0},
        {"phases": phases(wait=math.inf)},
        {"phases": phases(wait=-0.1)},
        {"values": tuple(LoggedValue(f"v{i}", 0.0, 0.0) for i in range(9))},
        {"values": (LoggedValue("a", 0.0, 0.0), LoggedValue("a", 0.0, 0.0))},
        *({"values": (LoggedValue(name, 0.0, 0.0),)} for name in ("", "A", "1a", "a-b", "a" * 41, "ä", "<img>")),
    ],
    ids=str,
)
def test_figures_that_no_worker_can_measure_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match=r"^figures: "):
        check_worker_figures(WorkerFigures(**wrong))


def test_a_value_that_is_not_a_number_is_one_that_people_want_to_see() -> None:
    check_worker_figures(
        WorkerFigures(values=(LoggedValue("loss", math.nan, math.nan), LoggedValue("a", math.inf, 1.0)))
    )


def test_figures_of_workers_that_are_gone_are_forgotten() -> None:
    heard, figures = HeardFigures(), WorkerFigures(steps=3)
    heard.heard(0, 1, figures)
    heard.heard(1, 2, figures)
    assert heard.of({(0, 1), (1, 3)}) == {(0, 1): figures}
    assert heard.of({(1, 2)}) == {}, "it was forgotten"


# -- rates -------------------------------------------------------------------------------------------------------------


def test_a_rate_is_by_the_clock_of_the_process_and_not_by_when_its_report_comes() -> None:
    window: Window[int] = Window()
    assert window.span() is None
    window.report(10.0, 100)
    window.report(10.0, 100)  # the same once more
    assert window.span() is None
    window.report(14.0, 108)
    span = window.span()
    assert span is not None
    assert (span.last - span.first) / span.seconds == 2.0


def test_a_window_keeps_the_last_seconds_and_begins_anew_with_another_process() -> None:
    window: Window[int] = Window()
    for second in range(100):
        window.report(float(second), second)
        span = window.span()
        assert span is None or span.seconds <= WINDOW_SECONDS + 1
    assert span is not None
    assert span.seconds == WINDOW_SECONDS
    window.report(1.0, 5)
    assert window.span() is None
    window.report(2.0, 6)
    assert window.span() is not None


# -- what is kept ------------------------------------------------------------------------------------------------------


def test_the_history_is_bounded_and_numbered() -> None:
    history = History(capacity=5)
    for second in range(12):
        values = {("steps_per_second", None): float(second)}
        history.add(1000.0 + second, {"job": values, **({"early": values} if second < 3 else {})})
    kept = history.after(0, ["job", "early"])
    assert (kept.first, list(kept.times)) == (7, [1007.0, 1008.0, 1009.0, 1010.0, 1011.0])
    assert list(kept.series["job"]["steps_per_second", None]) == [7.0, 8.0, 9.0, 10.0, 11.0]
    assert "early" not in kept.series, "no sample that is kept has it"
    assert list(history.after(10, ["job"]).times) == [1010.0, 1011.0]
    assert list(history.after(12, ["job"]).times) == list(history.after(99, ["job"]).times) == []
    assert history.after(0, []).series == {}


def test_a_series_that_begins_late_has_no_value_before() -> None:
    history = History()
    history.add(0.0, {"job": {("a", None): 1.0}})
    history.add(1.0, {"job": {("a", None): 1.0, ("a", 3): 2.0}})
    late = history.after(0, ["job"]).series["job"]["a", 3]
    assert math.isnan(late[0])
    assert late[1] == 2.0


def test_a_job_whose_values_are_not_numbers_is_forgotten_too() -> None:
    history = History(capacity=2)
    history.add(0.0, {"job": {("value.loss", None): math.nan}})
    for second in range(1, 4):
        history.add(float(second), {})
    assert history.after(0, ["job"]).series == {}


def test_a_job_with_many_names_keeps_a_bounded_number_of_series() -> None:
    history = History()
    history.add(0.0, {"job": {("steps_per_second", rank): 1.0 for rank in range(1000)}})
    assert len(history.after(0, ["job"]).series["job"]) == MAX_SERIES


def events() -> tuple[EventLog, SimpleNamespace]:
    clock = SimpleNamespace(time=1000.0, since_1970=lambda: clock.time)
    return EventLog(clock), clock  # type: ignore[arg-type]


def test_the_last_events_are_kept_and_repeats_are_counted() -> None:
    log, clock = events()
    for number in range(EVENTS_KEPT + 5):
        log.note("join", "job", f"worker {number} joins")
    kept = log.after(0)
    assert (len(kept), kept[0].number, kept[-1].number) == (EVENTS_KEPT, 6, EVENTS_KEPT + 5)
    clock.time = 1001.0
    log.note("join", "job", f"worker {EVENTS_KEPT + 4} joins")
    [again] = log.after(EVENTS_KEPT + 5)
    assert (again.number, again.first, again.count, again.time) == (EVENTS_KEPT + 6, EVENTS_KEPT + 5, 2, 1001.0)


def test_what_is_rare_is_not_lost_behind_what_comes_all_the_time() -> None:
    log, _ = events()
    log.note("rollback", "job", "it goes back to clock 7")
    for number in range(3 * EVENTS_KEPT):
        log.note("checkpoint", "job", f"checkpoint {number}")
    kept = log.after(0)
    assert (len(kept), kept[0].kind) == (EVENTS_KEPT, "rollback")
    assert [event.number for event in kept] == sorted(event.number for event in kept)


def test_a_caller_that_is_refused_again_and_again_pushes_no_event_out() -> None:
    log, _ = events()
    log.note("join", "job", "worker 0 joins")
    for attempt in range(1000):
        log.note("refused", "job", f"a worker at host-{attempt} is refused " + "x" * 10_000)
    first, refused = log.after(0)
    assert (first.kind, refused.kind, refused.count) == ("join", "refused", 1000)
    assert "host-999" in refused.text
    assert len(refused.text) <= 500


# -- the view ----------------------------------------------------------------------------------------------------------


def job(workers: list[LiveWorker], **other: Any) -> JobStatistics:
    fields: dict[str, Any] = {
        "name": "job", "consistency": Consistency(4, False), "world_size": len(workers), "started": True,
        "parameter_bytes": 64, "buckets": 1, "imbalance": 1.0, "restore_count": 0, "lost_steps": 0, "redone_steps": 0,
        "rejoining": (), "now": 100.0, "loaders": {}, "checkpoints": None, "run": "1",
    }  # fmt: skip
    return JobStatistics(workers=tuple(workers), **{**fields, **other})


def held(clocks: dict[int, int], waits: tuple[Wait, ...] = (), **figures: Any) -> ShardJobStatistics:
    return ShardJobStatistics(1, 64, 0, 0, 0, 0, clocks, waits, 0, "1", ShardJobFigures(**figures))


def registered(index: int, process: int = 7) -> RegisteredShard:
    return RegisteredShard(index, f"host:{index + 1}", None, "", 1, process, 100.0, 0)  # type: ignore[arg-type]


def made(maker: ViewMaker, now: float, jobs: JobStatistics, *answers: Answer) -> View:
    shards = {index: registered(index) for index in range(len(answers))}
    return maker.make(Sources(now, 1e9 + now, 10.0, len(answers), {"job": jobs}, shards, dict(enumerate(answers))))


def member(rank: int, clock: int = 0, expires: float = 110.0) -> LiveWorker:
    return LiveWorker(rank, rank + 1, expires, clock, host="h")


def test_clocks_are_those_of_one_moment_on_a_shard_and_not_of_heartbeats_at_several() -> None:
    """A heartbeat that is newer than another would put workers further apart than their mode allows."""
    workers = [member(0, clock=14), member(1, clock=2)]
    busy = Answer(7, ShardStatistics({"job": held({0: 10, 1: 8})}))
    behind = Answer(7, ShardStatistics({"job": held({0: 9, 1: 8})}))
    trains_nothing = Answer(7, ShardStatistics({"job": held({0: 0, 1: 0})}))
    view = made(ViewMaker(), 100.0, job(workers), busy, behind, trains_nothing)
    assert [worker.clock for worker in view.jobs["job"].statistics.workers] == [9, 8]
    view = made(ViewMaker(), 100.0, job(workers), trains_nothing)
    assert [worker.clock for worker in view.jobs["job"].statistics.workers] == [14, 2], "no shard knows"


def test_what_each_worker_is_doing_is_said_in_words() -> None:
    workers = [member(0), member(1), member(2, expires=104.0), member(3)]
    waits = (Wait(0, 5, 2, frozenset({3}), "", 1.2), Wait(1, 5, 2, frozenset(), "", 0.1))
    view = made(ViewMaker(), 100.0, job(workers), Answer(7, ShardStatistics({"job": held({}, waits)})))
    assert [worker.activity for worker in view.jobs["job"].workers] == [
        "waits 1.2 s for worker 3",
        "waits 0.1 s for its shard",
        "silent, lease ends in 4 s",
        "training",
    ]
    assert [worker.awaited for worker in view.jobs["job"].workers] == [(3,), (), (), ()]


def test_the_members_that_make_a_group_silent_are_named() -> None:
    """Member 1 is done, and need send nothing more."""
    heard = {0: 99.0, 1: math.inf, 2: 93.0}
    groups = [replace(member(rank, expires=103.0), signs=signs) for rank, signs in enumerate([heard, {0: 99.0}])]
    view = made(ViewMaker(), 100.0, job(groups, group_size=3), Answer(7, ShardStatistics({"job": held({})})))
    assert [group.activity for group in view.jobs["job"].workers] == [
        "silent, lease ends in 3 s: no sign of member 2",
        "silent, lease ends in 3 s: no sign of members 1-2",
    ]


def test_a_few_silent_members_are_named_with_their_hosts_and_processes() -> None:
    """The first one as it has joined, the others as their heartbeats have told; one has told nothing."""
    signs = [{0: 99.0, 1: 93.0, 2: 99.0, 3: 99.0}, {0: 93.0, 1: 99.0, 2: 93.0, 3: 99.0}, {0: 99.0, 1: 99.0}, {}]
    processes = {1: ("node-7", 4711), 3: ("node-7", 4712)}
    groups = [
        replace(member(rank, expires=103.0), host="node-6", pid=12, signs=each, processes=processes)
        for rank, each in enumerate(signs)
    ]
    view = made(ViewMaker(), 100.0, job(groups, group_size=4), Answer(7, ShardStatistics({"job": held({})})))
    assert [group.activity.partition(": ")[2] for group in view.jobs["job"].workers] == [
        "no sign of member 1 (node-7, pid 4711)",
        "no sign of member 0 (node-6, pid 12), member 2",
        "no sign of member 2, member 3 (node-7, pid 4712)",
        "no sign of members 0-3",
    ]


def test_a_shard_that_does_not_answer_is_told_with_how_long_and_its_last_answer_is_kept() -> None:
    answer = Answer(7, ShardStatistics({"job": held({0: 5})}), asked=96.0)
    asked = Answer(7, ShardStatistics({"job": held({0: 6})}), asked=99.5)
    view = made(ViewMaker(), 100.0, job([member(0)]), answer, asked)
    assert [shard.silent for shard in view.shards] == [4.0, 0.0]
    assert view.jobs["job"].state == "shard 0 does not answer for 4 s"
    assert view.jobs["job"].workers[0].activity == "needs shard 0, which does not answer"
    assert view.jobs["job"].statistics.workers[0].clock == 6, "what a silent shard said last counts no more"
    assert view.shards[0].statistics is not None
    replaced = Answer(6, answer.statistics, asked=50.0)
    [shard] = made(ViewMaker(), 100.0, job([member(0)]), replaced).shards
    assert (shard.statistics, shard.silent) == (None, 0.0), "another process serves it by now"


class AskedShard(Clock):
    """A shard, and the clock by which each of its answers takes so long. error: what it raises in place of one"""

    def __init__(self) -> None:
        self.time, self.seconds = 100.0, 0.0
        self.error: PSError | None = None
        self.asked_at: list[float] = []
        self.jobs: dict[str, ShardJobStatistics] = {}

    def now(self) -> float:
        return self.time

    def statistics(self) -> ShardStatistics:
        self.asked_at.append(self.time)
        self.time += self.seconds
        if self.error is not None:
            raise self.error
        return ShardStatistics(dict(self.jobs))


def watch_of(asked: AskedShard, events: EventLog) -> Watch:
    """The watch of a cluster of one shard, without jobs."""
    shards = {0: replace(registered(0), api=asked)}
    coordinator = SimpleNamespace(
        shards=lambda: shards,
        shard_directory=SimpleNamespace(count=1),
        jobs=dict,
        lease=10.0,
        events=events,
    )
    return Watch(coordinator, 1, asked)  # type: ignore[arg-type]


def test_a_shard_on_which_nothing_changes_is_asked_less_often_until_somebody_looks() -> None:
    asked = AskedShard()
    watch = watch_of(asked, EventLog(Clock()))

    def asked_in(seconds: int) -> int:
        """How often, in so many looks, a second apart."""
        before = len(asked.asked_at)
        for _ in range(seconds):
            asked.time += 1.0
            watch.look()
        return len(asked.asked_at) - before

    assert asked_in(2) == 2, "the second answer is the first that says nothing new"
    assert asked_in(20) == 4
    asked.jobs["j"] = held({0: 1})
    asked_in(5)  # one of these answers has the job
    for clock in range(2, 7):
        asked.jobs["j"] = held({0: clock})
        assert asked_in(1) == 1
    asked_in(1)
    assert asked_in(20) == 4
    stop = watch.add(lambda view: None)
    assert asked_in(20) == 20
    stop()
    assert asked_in(60) < 45
    assert asked_in(20) == 4
    assert watch.view.shards[0].statistics == ShardStatistics(asked.jobs)
    assert asked_in(20) == 20


def test_a_shard_is_silent_since_it_was_asked_and_not_while_it_is_left_alone() -> None:
    """One that takes long is asked again after a pause. On a busy machine that was told as a shard that is away."""
    asked, events = AskedShard(), EventLog(Clock())
    watch = watch_of(asked, events)

    def silent() -> float:
        watch.look()
        [shard] = watch.view.shards
        return shard.silent

    asked.seconds = 0.5
    assert silent() == 0.0
    asked.time += 9.0
    assert silent() == 0.0, "it was not asked meanwhile"
    asked.time += 1.5
    asked.seconds, asked.error = 2.0, Unreachable("no answer")
    assert silent() == 0.0, "a call that failed, of two seconds"
    assert silent() == 4.0
    asked.error = None
    assert silent() == 0.0
    texts = [event.text for event in events.after(0)]
    assert texts == ["shard 0 does not answer", "shard 0 answers again"]


def test_the_straggler_is_named_from_what_workers_and_shards_report() -> None:
    maker, view = ViewMaker(), None
    for second in (0, 10):
        fast, slow = phases(wait=0.8 * second, forward=0.2 * second), phases(forward=1.0 * second)
        values = (LoggedValue("loss", 0.5, 0.4),), (LoggedValue("loss", math.nan, 0.6),)
        figures = {
            (0, 1): WorkerFigures(50.0 + second, 2 * second, fast, values=values[0]),
            (1, 2): WorkerFigures(70.0 + second, 2 * second, slow, values=values[1]),
        }
        hosted = held(
            {}, applies=40 * second, apply_seconds=0.1 * second, sent=1000 * second, awaited={1: 0.8 * second}
        )
        answer = Answer(7, ShardStatistics({"job": hosted}, ShardFigures(20.0 + second, 1, 2)))
        view = made(maker, float(second), job([member(0), member(1)], figures=figures), answer)
    assert view is not None
    seen = view.jobs["job"]
    assert (
        seen.diagnosis == "60 % of the workers' time is forward and backward: the workers' own computing is the limit"
    )
    assert [worker.steps_per_second for worker in seen.workers] == [2.0, 2.0]
    assert seen.workers[0].fractions["wait"] == pytest.approx(0.8)
    assert [worker.awaited_fraction for worker in seen.workers] == [0.0, 1.0]
    [shard] = view.shards
    assert (shard.work["job"].applies, shard.work["job"].sent) == (40.0, 1000.0)
    assert shard.work["job"].apply_seconds == pytest.approx(0.0025)
    sample = samples(view)["job"]
    assert sample["value.loss", None] == pytest.approx(0.4), "one that logs NaN does not hide the others"
    assert ("least.loss", None) not in sample, "one worker's values have no spread"
    assert sample["steps_per_second", None] == 4.0
    assert sample["wait_fraction", None] == pytest.approx(0.4)


def test_how_long_a_job_still_takes_is_known_from_the_second_report_of_each_worker_on() -> None:
    maker, workers = ViewMaker(), [member(0), member(1)]

    def look(*measured: float) -> tuple[float | None, float | None]:
        figures = {
            (rank, rank + 1): WorkerFigures(seconds, int(2 * seconds), phases(), total=100, done=int(2 * seconds))
            for rank, seconds in enumerate(measured)
        }
        seen = made(maker, 100.0, job(workers, figures=figures), Answer(7)).jobs["job"]
        return seen.done, seen.left

    assert look(10.0, 20.0) == (pytest.approx(0.3), None)
    assert look(15.0, 20.0) == (pytest.approx(0.35), None), "of the other one there is one report"
    assert look(15.0, 25.0) == (pytest.approx(0.4), pytest.approx(35.0)), (
        "the slower one has 70 steps to make, two a second"
    )


def test_what_several_workers_log_is_sampled_with_its_least_and_its_most() -> None:
    figures = {
        (rank, rank + 1): WorkerFigures(1.0, 1, values=(LoggedValue("loss", last, mean),))
        for rank, (last, mean) in enumerate([(1.0, 1.5), (2.0, 0.5), (math.nan, 9.0), (3.0, 4.0)])
    }
    view = made(ViewMaker(), 100.0, job([member(rank) for rank in range(4)], figures=figures), Answer(7))
    sample = samples(view)["job"]
    assert [sample[f"{what}.loss", None] for what in ("value", "least", "most")] == [2.0, 0.5, 4.0]


def test_a_worker_of_an_earlier_version_is_seen_without_figures() -> None:
    view = made(ViewMaker(), 100.0, job([member(0)]), Answer(7))
    [worker] = view.jobs["job"].workers
    assert (worker.steps_per_second, worker.fractions, worker.activity) == (None, {}, "training")
    assert view.jobs["job"].diagnosis == ""
