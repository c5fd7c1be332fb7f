"""A worker that is late asks others for what their scripts have set, and has nothing to tell them meanwhile."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from ps_protocol.messages.workers import SavedState
from ps_worker.cluster.script import ScriptTelling
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
            stage=0, job=SimpleNamespace(are_some=True), comes_late=lambda: None, adopt=lambda *given: 0
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
