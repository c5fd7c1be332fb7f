"""The modes of training, and the one rule behind three of them.

`sync`, `ssp:K` and `async` are settings of `Consistency`; `single` and `ddp` need no server. Bounded staleness is the
rule of Ho et al., "More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server", NIPS 2013.
"""

from __future__ import annotations

from dataclasses import dataclass

from ps_protocol.errors import InvalidRequest

# A larger bound than any job can use is a typing error, and would not fit the wire's uint32.
MAX_STALENESS = 1_000_000


@dataclass(frozen=True)
class Consistency:
    """How far workers may drift apart, and what one update is made of.

    max_staleness: a pull at clock c waits until every live worker's updates up to clock c - max_staleness are in;
                   None never waits for another worker.
    aggregate:     one optimizer step with the mean of one gradient of each live worker, instead of one step a gradient.
    """

    max_staleness: int | None
    aggregate: bool = False

    def __post_init__(self) -> None:
        if self.max_staleness is not None and not 0 <= self.max_staleness <= MAX_STALENESS:
            raise InvalidRequest(f"staleness must be from 0 to {MAX_STALENESS}, got {self.max_staleness}")
        if self.aggregate and self.max_staleness != 0:
            # A worker that runs ahead would push a gradient for an update that its peers have not even started on, and
            # its own step would then wait for theirs while theirs wait for nothing: a deadlock in all but name.
            raise InvalidRequest(f"averaging needs max_staleness 0 (sync), got {self.max_staleness}")

    def __str__(self) -> str:
        if self.aggregate:
            return "sync"
        return "async" if self.max_staleness is None else f"ssp:{self.max_staleness}"


def parse_mode(text: str) -> Consistency | None:
    """Returns the rule that a mode's name stands for, or None for `single` and `ddp`, which need no server.

    Raises InvalidRequest for anything but single, ddp, sync, ssp:K (K a whole number from 0) and async.
    """
    if text in ("single", "ddp"):
        return None
    if text == "sync":
        return Consistency(max_staleness=0, aggregate=True)
    if text == "async":
        return Consistency(max_staleness=None)
    name, _, bound = text.partition(":")
    if name == "ssp" and bound.isascii() and bound.isdigit() and len(bound) < 20:  # int() refuses a text of thousands
        return Consistency(max_staleness=int(bound))
    raise InvalidRequest(f"mode must be single, ddp, sync, ssp:K (such as ssp:4) or async, got {text[:100]!r}")
