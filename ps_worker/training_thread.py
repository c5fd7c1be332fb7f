"""Where the thread that trains is, as another thread of the process sees it: in a call of the session, in a collective
of torch, or elsewhere in the script.
"""

from __future__ import annotations

import os
import sys
import threading
from contextlib import suppress
from pathlib import Path
from types import FrameType

import torch
from torch.distributed import distributed_c10d

from ps_worker.launched import script_frame

CALL, COLLECTIVE, SCRIPT = "call", "collective", "script"

_TORCH = str(Path(torch.__file__).parent) + os.sep
_DISTRIBUTED = _TORCH + "distributed" + os.sep


class TrainingThread:
    """The thread of a member of a group that trains. It calls `begins_step` and `enters` itself.

    steps: how many steps and calls of the session it has begun
    is_in_call: it is in a call of the session. To set it is no call, before which a signal could act
    """

    def __init__(self) -> None:
        self.steps = 0
        self._ident = threading.get_ident()
        self.is_in_call = False

    def begins_step(self) -> None:
        """Records a step that needs no call of all members."""
        self.steps += 1

    def enters(self) -> None:
        """Records that it enters a call of the session."""
        self._ident, self.is_in_call = threading.get_ident(), True
        self.steps += 1

    def moves(self) -> int:
        """Returns a number that rises with each step, with each call of the session, and with each collective of torch
        that its backend counts.
        """
        return self.steps + _collectives()

    def place(self) -> tuple[str, str]:
        """Returns whether it is in a CALL, a COLLECTIVE or elsewhere in the SCRIPT, and at which line of the script."""
        frame = sys._current_frames().get(self._ident)
        kind = CALL if self.is_in_call else COLLECTIVE if _is_in_collective(frame) else SCRIPT
        own = script_frame(frame) if frame is not None else None
        return kind, "" if own is None else f"{Path(own.filename).name}:{own.lineno} in {own.name}"


def _collectives() -> int:
    """Returns how many collectives this process has begun, of all process groups. Gloo counts sends and receives, too;
    NCCL does not.
    """
    count = 0
    for group in list(distributed_c10d._world.pg_map):
        with suppress(Exception):  # a backend that does not count
            count += group._get_sequence_number_for_group()  # type: ignore[attr-defined]  # torch's stubs lack it
    return count


def _is_in_collective(frame: FrameType | None) -> bool:
    """Whether the innermost Python code is of torch, and torch.distributed has called it: it may wait for others."""
    while frame is not None and frame.f_code.co_filename.startswith(_TORCH):
        if frame.f_code.co_filename.startswith(_DISTRIBUTED):
            return True
        frame = frame.f_back
    return False
