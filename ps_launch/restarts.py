"""How often, and after which pause, a worker that failed is started again."""

from __future__ import annotations

from dataclasses import dataclass

FIRST_SECONDS, LONGEST_SECONDS = 0.5, 30.0
# Who ran for longer than any pause was well: its next failure is another one.
WELL_SECONDS = 2 * LONGEST_SECONDS


@dataclass
class Restarts:
    """Those of one worker.

    most:  how many there may be, over the whole run: a worker that runs well for a while does not get more
    count: how many there were
    """

    most: int
    count: int = 0
    _in_a_row: int = 0

    def after(self, seconds: float) -> float | None:
        """The worker failed after running for so long: seconds until it is started again, more each time in a row.

        None: it has been started again as often as it may be.
        """
        if self.count >= self.most:
            return None
        self.count += 1
        self._in_a_row = 1 if seconds >= WELL_SECONDS else self._in_a_row + 1
        return float(min(FIRST_SECONDS * 2.0 ** min(self._in_a_row - 1, 9), LONGEST_SECONDS))
