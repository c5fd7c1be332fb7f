"""What a script's loops over loaders tell and ask at each turn: there a worker's state is captured, or put back."""

from __future__ import annotations

from typing import Protocol

import torch

from ps_worker.state.encoding import LoaderState, ScriptState


class LoopHooks(Protocol):
    """The turns of a loop, and what a loop needs to know of all that is around it. Loaders are named by their index."""

    @property
    def device(self) -> torch.device:
        """The device whose random state counts."""

    @property
    def steps(self) -> int:
        """Steps made by this process, whatever the clock."""

    def loop_begins(self, loader: int) -> None:
        """A loop begins: captures the state that is wanted, unless a loop that is under way will do so."""

    def capture(self, loader: int | None = None) -> None:
        """Captures the state that is wanted, if one is, at this turn of a loader's loop."""

    def yielded(self, loader: int) -> None:
        """The loop yields a batch."""

    def target(self, loader: int) -> LoaderState | None:
        """Returns where the loop has to go if a state is to be restored at this turn, otherwise None."""

    def restore(self, loader: int) -> int:
        """Restores all but the position of the loader that asks; returns how many batches that one has to leave out."""

    def script_state(self) -> ScriptState:
        """Returns what the script has set, and where all its loops are."""

    def set_script_state(self, state: ScriptState, loader: int) -> None:
        """Sets what the script had set, and sends all loaders but this one, and those under way, to where they were."""
