"""Whether a script comes to its end, or is cut short by a signal or an error: then the loop it was in is not over."""

from __future__ import annotations

import sys
import threading

_told_to_stop = threading.Event()


def note_signal() -> None:
    """Notes that a signal ends this process."""
    _told_to_stop.set()


def is_cut_short() -> bool:
    """Whether the script does not come to its end. Called while an exception goes through, or after it has ended it."""
    return _told_to_stop.is_set() or sys.exc_info()[1] is not None or getattr(sys, "last_value", None) is not None
