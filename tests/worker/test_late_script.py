"""A worker that is late asks others for what their scripts have set, and has nothing to tell them meanwhile."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import ExponentialLR, ReduceLROnPlateau

from ps_protocol.errors import TryLater
from ps_protocol.messages.workers import SavedState
from ps_worker.cluster import participation
from ps_worker.cluster.participation import Participation
from ps_worker.cluster.script import ScriptTelling
from ps_worker.state.job_state import has_schedule
from ps_worker.strategies.late_script import LateScript


class Asking:
    """A worker that asks others: `answers` are what it hears, and the last one of them again and again.

    at: the clocks at which it has asked
    sent: its own answers, by the request's number
    """

    def __init__(self, *answers: tuple[SavedState | None, bool], in_step: bool = True) -> None:
        self._answers, self.clock = list(answers), 0
        self.at: list[int] = []
        self.sent: dict[int, SavedState | None] = {}
        self.telling = ScriptTelling()
        self.telling.send = self.sent.__setitem__
        self._tell()
        checkpoint: Any = SimpleNamespace(
            stage=0,
            job=SimpleNamespace(are_some=True),
            comes_late=lambda: None,
            adopt=lambda *given: 0,
            has_unknown_scheduler=False,
        )
        part: Any = SimpleNamespace(ask_script=self._ask, rank=0, script=self.telling)
        self.late = LateScript(part, checkpoint, lambda: self.clock, self._tell, in_step)

    def _tell(self) -> None:
        self.telling.begin(lambda: SavedState(self.clock, b"own"))

    def _ask(self, seconds: float | None = None) -> tuple[SavedState | None, bool]:
        self.at += [self.clock] if self.clock not in self.at else []
        return self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]

    def steps(self, count: int) -> None:
        """Begins so many steps."""
        for _ in range(count):
            self.late.follow()
            self.clock += 1


def test_a_worker_that_went_back_has_nothing_to_tell_until_it_has_asked_itself() -> None:
    """Otherwise all that went back would wait for each other."""
    worker = Asking((SavedState(3, b"theirs"), False))
    worker.telling.want(1)
    assert worker.sent == {}, "it tells while its script stands still"
    worker.late.goes_back()
    assert worker.sent == {1: None}
    worker.telling.want(2)
    assert worker.sent == {1: None, 2: None}
    worker.steps(1)
    with worker.telling.standing():
        worker.telling.want(3)
    assert worker.sent[3] == SavedState(1, b"own")


def test_a_worker_that_has_not_gone_back_yet_has_nothing_to_tell() -> None:
    is_ahead, sent = True, {}
    telling = ScriptTelling(lambda: is_ahead)
    telling.send = sent.__setitem__
    telling.begin(lambda: SavedState(5, b"own"))
    telling.want(1)
    assert (sent, telling.last()) == ({1: None}, None)
    is_ahead = False
    with telling.standing():
        telling.want(2)
    assert (sent[2], telling.last()) == (SavedState(5, b"own"), SavedState(5, b"own"))


def test_an_interrupt_as_a_call_begins_does_not_leave_the_script_standing() -> None:
    """What it has set would be told in the middle of its own code from then on."""
    sent: dict[int, SavedState | None] = {}

    def interrupted(request: int, script: SavedState | None) -> None:
        telling.send = sent.__setitem__
        raise KeyboardInterrupt

    telling = ScriptTelling()
    telling.send = interrupted
    telling.begin(lambda: SavedState(5, b"own"))
    telling.want(1)
    with pytest.raises(KeyboardInterrupt), telling.standing():
        pass
    telling.want(2)
    assert sent == {}
    with telling.standing():
        assert sent == {2: SavedState(5, b"own")}


@pytest.mark.parametrize("in_step", [True, False])
def test_after_vain_questions_a_worker_asks_with_fewer_steps(in_step: bool) -> None:
    """A coordinator that is away would hold up each step, and in sync those of all workers."""
    worker = Asking((None, True), in_step=in_step)
    worker.late.joins()
    worker.steps(50)
    assert worker.at == [0, 1, 3, 7, 15, 31, 47]
    worker.late.goes_back()
    worker.steps(3)
    assert worker.at[-2:] == [50, 51]


class Broken:
    """An object of a script, whose state cannot be read."""

    def state_dict(self) -> dict[str, Any]:
        raise OSError("gone")


class Wrapper:
    """What a framework wraps around a scheduler, or around anything else. held: as it keeps it; state: its state"""

    def __init__(self, held: Any, state: Any = None) -> None:
        self.held, self._state = held, state

    def state_dict(self) -> dict[str, Any]:
        return {"state": self._state}


def exponential() -> ExponentialLR:
    return ExponentialLR(torch.optim.SGD([torch.zeros(1)], lr=1.0), 0.9)


PLATEAU = ReduceLROnPlateau(torch.optim.SGD([torch.zeros(1)], lr=1.0))
HANDED_OVER: dict[str, tuple[Any, bool]] = {
    "a scheduler": (exponential(), True),
    "a wrapper of one": (Wrapper(exponential()), True),
    "in a list": (Wrapper([exponential()]), True),
    "in a dict": (Wrapper({"main": exponential()}), True),
    "its state, two objects deep": (Wrapper(None, {"loops": [{"main": exponential().state_dict()}]}), True),
    "the state of ReduceLROnPlateau": (Wrapper(None, [PLATEAU.state_dict()]), True),
    "a scaler": (torch.amp.GradScaler("cpu"), False),
    "a state that cannot be read": (Broken(), False),
    "an epoch": (Wrapper(None, {"last_epoch": 3}), False),
}


@pytest.mark.parametrize("what", HANDED_OVER)
def test_a_schedule_is_handed_over_in_whatever_has_its_state(what: str) -> None:
    thing, has_one = HANDED_OVER[what]
    assert has_schedule(thing) is has_one


class Away:
    """A coordinator that is gone, or hangs, and the time that passes meanwhile."""

    def __init__(self, hangs: bool) -> None:
        self._hangs, self.now = hangs, 0.0

    def monotonic(self) -> float:
        return self.now

    def wait(self, seconds: float) -> None:
        self.now += seconds

    def heartbeat(self, worker: Any, clock: int, timeout: float, script_wanted: bool) -> Any:
        self.now += timeout if self._hangs else 0.001
        raise TryLater("nobody answers")


@pytest.mark.parametrize("hangs", [False, True])
@pytest.mark.parametrize(("seconds", "longest"), [(None, 4.0), (60.0, 0.8), (0.0, 0.3)])
def test_a_question_that_is_asked_again_waits_less_for_a_coordinator_that_is_away(
    hangs: bool, seconds: float | None, longest: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    away = Away(hangs)
    monkeypatch.setattr(participation, "time", away)
    asks: Any = SimpleNamespace(
        coordinator=away, connection=SimpleNamespace(clock=3), call=lambda ask: ask(None), wait=away.wait
    )
    assert Participation._asked_script(asks, seconds) == (None, True)
    assert away.now < longest


def test_a_new_process_asks_others_that_may_have_to_go_back_some_more_times_before_it_tells() -> None:
    """They have nothing to tell until they have asked themselves."""
    worker = Asking((None, False))
    worker.late.goes_back()
    worker.steps(1)
    assert not worker.late.is_late, "it knows best what the job has"
    worker = Asking((None, False))
    worker.telling.end()
    worker.late.joins()
    worker.steps(7)
    worker.telling.want(1)
    assert worker.sent == {1: None}
    worker.steps(20)
    assert worker.at == [0, 1, 3, 7]
    with worker.telling.standing():
        worker.telling.want(2)
    assert worker.sent[2] == SavedState(27, b"own")
    worker = Asking((None, False), (None, False), (SavedState(3, b"theirs"), False))
    worker.late.joins()
    worker.steps(2)
    assert not worker.late.is_late
