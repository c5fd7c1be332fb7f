"""The modes of training, and the one rule behind four of them.

`sync`, `ssp:K` and `async` are settings of `Consistency`. `local:H` has the settings of `sync`; its workers push
differences instead of gradients (local.py). `single` and `ddp` need no server.

Bounded staleness is the rule of Ho et al., "More Effective Distributed ML via a Stale Synchronous Parallel Parameter
Server", NeurIPS 2013, https://proceedings.neurips.cc/paper/2013/hash/b7bb35b9c6ca2aee2df08cf09d7016c2-Abstract.html

A quorum is the idea of Chen et al., "Revisiting Distributed Synchronous SGD", 2016, https://arxiv.org/abs/1604.00981,
who start backup workers and drop the gradients of the slowest. This project does not drop them: a late gradient counts
in the next update.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from ps_protocol.errors import InvalidRequest
from ps_protocol.fragments import fragments
from ps_protocol.local import Local

# A larger bound is a typing error: no job can use it, and the wire's uint32 cannot carry it.
MAX_STALENESS = 1_000_000
# No job has so many workers, and none can use so long a grace.
MAX_QUORUM = 1_000_000
MAX_GRACE = 3600.0


@dataclass(frozen=True)
class Consistency:
    """How far workers may drift apart, and which gradients make one update.

    max_staleness: a pull at clock c waits until the updates of every live worker up to clock c - max_staleness are
    applied; None: a pull never waits for another worker
    aggregate: whether one optimizer step applies the mean of one gradient of each live worker; otherwise each gradient
    is a step
    quorum: with aggregate, the number of live workers that an update waits for; below 0, the number that it does not
    wait for; None: all. A gradient that comes later counts in the next update.
    quorum_grace: seconds for which an update that has its quorum still waits for the others
    """

    max_staleness: int | None
    aggregate: bool = False
    quorum: int | None = None
    quorum_grace: float = 0.0

    def __post_init__(self) -> None:
        if self.max_staleness is not None and not 0 <= self.max_staleness <= MAX_STALENESS:
            raise InvalidRequest(f"staleness must be from 0 to {MAX_STALENESS}, got {self.max_staleness}")
        if self.aggregate and self.max_staleness != 0:
            # Without this check a worker that runs ahead would push a gradient for an update that the others have not
            # begun. Its step would then wait for theirs, so it could not run ahead at all.
            raise InvalidRequest(f"averaging needs max_staleness 0 (sync), got {self.max_staleness}")
        if self.quorum is not None and not self.aggregate:
            raise InvalidRequest(
                f"a quorum is for sync, where an update has the gradients of several workers; not {self}"
            )
        if self.quorum is not None and not 1 <= abs(self.quorum) <= MAX_QUORUM:
            raise InvalidRequest(f"a quorum is from 1 to {MAX_QUORUM} workers, or all but so many, got {self.quorum}")
        if not 0 <= self.quorum_grace <= MAX_GRACE:  # also refuses NaN
            raise InvalidRequest(f"the grace of a quorum is from 0 to {MAX_GRACE:g} seconds, got {self.quorum_grace}")
        if self.quorum_grace and self.quorum is None:
            raise InvalidRequest(f"a grace of {self.quorum_grace:g} seconds needs a quorum that it comes after")

    @property
    def one_clock(self) -> bool:
        """Whether update r contains step r of every live worker.

        Workers and buckets then share one clock, a checkpoint belongs to one moment, and two runs are bit-identical.
        """
        return self.aggregate and self.quorum is None

    @property
    def goes_back_together(self) -> bool:
        """Whether all shards go back to a checkpoint if one has lost its data; the steps since then are made again. In
        the other modes the other shards keep their data, and the steps are lost on those that went back.
        """
        return self.one_clock

    @property
    def has_one_version(self) -> bool:
        """Whether all buckets of equal version are one state of the model.

        In the other modes, buckets of equal version may have the updates of different workers.
        """
        return self.one_clock

    @property
    def assigns_once(self) -> bool:
        """Whether all workers begin with the same weights, so that what scripts set before their first step counts from
        the worker of the lowest rank alone.
        """
        return self.aggregate

    @property
    def mixes_clocks(self) -> bool:
        """Whether an update may be made without some live workers, whose contributions count in a later one. The
        contributions of one update then may differ in their clocks.
        """
        return self.quorum is not None

    def needed(self, live: int) -> int:
        """Returns the number of workers that an update waits for, out of the live ones."""
        if self.quorum is None:
            return live
        return min(live, self.quorum) if self.quorum > 0 else min(live, max(1, live + self.quorum))

    @property
    def quorum_text(self) -> str:
        """The quorum as users write it: "3" or "all-1"; empty without one."""
        if self.quorum is None:
            return ""
        return str(self.quorum) if self.quorum > 0 else f"all{self.quorum}"

    def __str__(self) -> str:
        if self.aggregate:
            grace = f", grace {self.quorum_grace:g} s" if self.quorum_grace else ""
            return "sync" if self.quorum is None else f"sync, quorum {self.quorum_text}{grace}"
        return "async" if self.max_staleness is None else f"ssp:{self.max_staleness}"


def parse_mode(text: str) -> Consistency | None:
    """Returns the rule of a mode, given its name; None for `single` and `ddp`, which need no server.

    Raises InvalidRequest for anything but single, ddp, sync, local:H (H a whole number from 1), local:H/F (F divides
    H), local:Ts (T seconds), ssp:K (K a whole number from 0) and async.
    """
    if text in ("single", "ddp"):
        return None
    if text == "sync" or local_rounds(text) is not None:
        return Consistency(max_staleness=0, aggregate=True)
    if text == "async":
        return Consistency(max_staleness=None)
    bound = _number_after("ssp", text)
    if bound is not None:
        return Consistency(max_staleness=bound)
    raise InvalidRequest(
        "mode must be single, ddp, sync, local:H (such as local:8, local:8/4, or local:30s), ssp:K (such as ssp:4) or "
        "async, "
        f"got {text[:100]!r}"
    )


def local_steps(text: str) -> int | None:
    """Returns the H of a mode `local:H`; None for another mode. Raises InvalidRequest if H is not a number of steps."""
    steps = _number_after("local", text)
    return None if steps is None else Local(steps).steps


def local_rounds(text: str) -> Local | None:
    """Returns the rounds of a mode `local:H`, `local:H/F` or `local:Ts`, with the default settings; None for another
    mode.

    Raises InvalidRequest for an invalid H, F or T, and for fragments together with a T.
    """
    match = re.fullmatch(r"local:([0-9]{1,19})/([0-9]{1,19})", text, re.ASCII)
    if match is not None:
        steps = Local(int(match[1])).steps
        return Local(steps, fragments=fragments(steps, int(match[2])))
    if re.fullmatch(r"local:[0-9.]{1,14}s/[0-9]{1,19}", text, re.ASCII):
        raise InvalidRequest(
            "rounds of a time have no fragments: write local:H/F, with H steps in a round, such as local:8/4, got "
            f"{text}"
        )
    whole, seconds = local_steps(text), re.fullmatch(r"local:([0-9]{1,9}(?:\.[0-9]{1,3})?)s", text, re.ASCII)
    if whole is not None:
        return Local(whole)
    return None if seconds is None else Local(1, seconds=float(seconds[1]))


def parse_quorum(text: str) -> int:
    """Returns the number in Consistency.quorum for a text: Q, or all-N for all but N of the live workers.

    Raises InvalidRequest for any other text, and for 0.
    """
    match = re.fullmatch(r"(all-)?([0-9]{1,7})", text, re.ASCII)
    number = int(match[2]) if match is not None else 0
    if match is None or not 1 <= number <= MAX_QUORUM:
        raise InvalidRequest(
            f"quorum must be a number of workers from 1 on, or all-N for all but N of them (such as all-1), "
            f"got {text[:100]!r}"
        )
    return -number if match[1] else number


def with_quorum(mode: str, rule: Consistency | None, quorum: int | None, grace: float) -> Consistency | None:
    """Returns the rule of a mode with a quorum. Raises InvalidRequest for a mode without updates of several workers."""
    if quorum is None and not grace:
        return rule
    if rule is None or not rule.aggregate:
        what = "quorum" if quorum is not None else "quorum-grace"
        raise InvalidRequest(
            f"--{what} is for sync, where an update has the gradients of several workers; mode is {mode}"
        )
    return replace(rule, quorum=quorum, quorum_grace=grace)


def check_quorum(rule: Consistency, world_size: int) -> None:
    """Raises InvalidRequest if a job with this number of workers cannot use the quorum; 0: the number is unknown."""
    if rule.quorum is None or not world_size:
        return
    if not -world_size < rule.quorum < world_size:
        raise InvalidRequest(
            f"a quorum of {rule.quorum_text} makes no sense among {world_size} workers: an update waits for 1 to "
            f"{world_size - 1} of them" + ("" if world_size > 1 else ", and there are no others")
        )


def _number_after(name: str, text: str) -> int | None:
    before, _, number = text.partition(":")
    is_number = number.isascii() and number.isdigit() and len(number) < 20  # int() refuses a text of thousands
    return int(number) if before == name and is_number else None
