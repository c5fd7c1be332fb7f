"""The fragments of a model in mode `local:H/F`: which one is pushed, and which one is mixed in, after which step.

The buckets of a model are dealt out to F fragments, one to each in turn. In the course of a round each fragment is
pushed once, H/F steps after the one before, so that the link carries a part of the model all the time and never the
whole at once. The worker mixes the pulled weights of a fragment into its own some steps later: the delay. It goes on
with its steps until then.
The delay is shorter than H/F. So one fragment is under way at a time, and between two of them none is.

The round is over when its last fragment is mixed in: then every fragment has had as many updates, and nothing is under
way. It is the moment that checkpoints are of, and at which workers join. This is Streaming DiLoCo (Douillard et al.,
2025, arXiv 2501.18512), with the fragments of its "strided" pattern.
"""

from __future__ import annotations

from dataclasses import dataclass

from ps_protocol.errors import InvalidRequest


@dataclass(frozen=True)
class Fragments:
    """When each fragment of a model is pushed and mixed in. Fragments have numbers from 0, steps of a round from 1.

    Steps are counted from where a round would begin without a delay: the first round after the warm-up has the steps 1
    to H + delay, and each later one, which begins when the one before is over, delay + 1 to H + delay.

    steps:  H, of a round
    count:  F, of the fragments; it divides H
    delay:  steps between a fragment's push and the moment at which what was pulled is mixed in: 0 to below H/F
    mixing: what a worker keeps of its own weights then: w becomes mixing * w + (1 - mixing) * pulled
    """

    steps: int
    count: int
    delay: int = 0
    mixing: float = 0.0

    def __post_init__(self) -> None:
        if not 1 <= self.count <= self.steps or self.steps % self.count:
            raise InvalidRequest(f"local:H/F takes an F from 1 that divides H, got local:{self.steps}/{self.count}")
        if not 0 <= self.delay < self.pause:
            raise InvalidRequest(
                f"the delay of local:{self.steps}/{self.count} is from 0 to below {self.pause} steps, as a fragment is "
                f"mixed in before the next one is pushed, got {self.delay}"
            )
        check_mixing(self.mixing)

    @property
    def pause(self) -> int:
        """Steps from one push to the next: H/F."""
        return self.steps // self.count

    @property
    def last(self) -> int:
        """The step with which a round is over."""
        return self.steps + self.delay

    def of(self, position: int) -> int:
        """Returns the fragment of a bucket: of each F neighbours, each has one. position: among the buckets that train

        Each F neighbours begin with another fragment than those before. Otherwise a fragment of a job with as many
        shards as fragments would have all its buckets on one shard, as shards get them in turn, too.
        """
        return (position + position // self.count) % self.count

    def leaves(self, fragment: int) -> int:
        """Returns the step of a round after which a fragment is pushed."""
        return (fragment + 1) * self.pause

    def lands(self, fragment: int) -> int:
        """Returns the step of a round after which a fragment is mixed in."""
        return self.leaves(fragment) + self.delay


def fragments(steps: int, count: int) -> Fragments:
    """Returns the fragments of local:H/F with the default settings: those of the paper, a delay of one step, after
    which half of the own weights stay; no delay where a fragment is pushed after each step."""
    delay = 1 if 0 < 2 * count <= steps else 0
    return Fragments(steps, count, delay, default_mixing(delay))


def default_mixing(delay: int) -> float:
    """Returns what a worker keeps of its own weights if it is not told: half of them, or without a delay nothing."""
    return 0.5 if delay else 0.0


def check_mixing(mixing: float) -> None:
    """Raises InvalidRequest for a mixing with which a worker would take nothing of what it pulls, or too much."""
    if not 0 <= mixing < 1:  # nor NaN
        raise InvalidRequest(f"the mixing of local:H/F is from 0 to below 1, got {mixing:g}")
