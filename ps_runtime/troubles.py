"""Recurring errors: each is logged when it begins, counted every time, and logged when it is over.

A lost shard, for example, fails a check twice a second. The log reports that once, and `ps_troubles_total`
counts it.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field

_counts: Counter[str] = Counter()
_lock = threading.Lock()


def counts() -> Mapping[str, int]:
    """Returns how many recurring errors this process has met, by kind."""
    with _lock:
        return dict(_counts)


@dataclass
class _Trouble:
    """A recurring error that is not over: what was logged, and how often it was met."""

    text: str
    arguments: tuple[object, ...]
    said: set[Hashable] = field(default_factory=set)
    times: int = 0


class Troubles:
    """The recurring errors of one object. Methods may be called from any thread.

    kind: the label under which they are counted, see docs/metrics.md; None: another metric counts them
    open: the errors that are not over, by key. Code that runs often looks here first, and calls `over` only if there
          are some
    """

    def __init__(self, log: logging.Logger, kind: str | None) -> None:
        self._log = log
        self._kind = kind
        self.open: dict[Hashable, _Trouble] = {}

    def met(
        self,
        key: Hashable,
        text: str,
        *arguments: object,
        level: int = logging.WARNING,
        trace: BaseException | None = None,
        detail: Hashable = None,
    ) -> None:
        """Counts an error. Logs it, unless an equal one of this key was logged since the last `over`. Equal: same text,
        detail, and the types and source lines of the exceptions in it.

        key:    what the error is about, such as the shard, the job or the file; `over` names it
        trace:  an exception to log with its traceback; None: none
        detail: part of what makes an error equal, apart from the text
        """
        errors = [each for each in (*arguments, trace) if isinstance(each, BaseException)]
        what = (text, detail, *map(_source_line, errors))
        with _lock:
            if self._kind is not None:
                _counts[self._kind] += 1
            trouble = self.open.setdefault(key, _Trouble(text, tuple(map(_kept, arguments))))
            trouble.times += 1
            if what in trouble.said:
                return
            trouble.said.add(what)
        self._log.log(level, text, *arguments, exc_info=trace)

    def over(self, key: Hashable) -> None:
        """Records that the error of a key is over, so that the next one is logged again. Logs this if it was met more
        than once.
        """
        if key not in self.open:  # without the lock, because there is nearly always no error
            return
        with _lock:
            trouble = self.open.pop(key, None)
        if trouble is not None and trouble.times > 1:
            self._log.info(f"over, after {trouble.times} times: {trouble.text}", *trouble.arguments)


def _source_line(error: BaseException) -> Hashable:
    """Returns the kind of an error and the line that raised it, by which equal errors are recognised."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return type(error), trace and (trace.tb_frame.f_code.co_filename, trace.tb_lineno)


def _kept(argument: object) -> object:
    """Returns an argument in a form that can be stored: an error itself would keep all variables of its traceback's
    frames alive.
    """
    return str(argument) if isinstance(argument, BaseException) else argument
