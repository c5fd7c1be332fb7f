"""The fragments of a model in mode `local:H/F`, and the steps at which each is pushed and mixed in.

The buckets of a model are divided into F fragments in turn. In a round each fragment is pushed once, H/F steps after
the fragment before it. The link therefore carries a part of the model at a time, and never the whole model at once. The
worker continues its steps, and mixes the pulled weights of a fragment into its own weights `delay` steps after the
push. The delay is shorter than H/F, so at most one fragment is in transit.

A round ends when its last fragment is mixed in. At that moment every fragment has had the same number of updates and
none is in transit, so checkpoints are made then, and workers join then.

This is Streaming DiLoCo (Douillard et al., 2025, https://arxiv.org/abs/2501.18512) with the fragments of its "strided"
pattern.
"""

from __future__ import annotations

from dataclasses import dataclass

from ps_protocol.errors import InvalidRequest


@dataclass(frozen=True)
class Fragments:
    """The schedule of a model's fragments. Fragments are numbered from 0, the steps of a round from 1.

    Steps are counted from the step at which the round would begin without a delay. The first round after the warm-up
    has the steps 1 to H + delay. Each later round begins when the one before it ends, so it has the steps delay + 1 to
    H + delay.

    steps: H, the steps of a round
    count: F, the number of fragments; it divides H
    delay: steps between the push of a fragment and its mixing-in: 0 to below H/F
    mixing: the share of the worker's own weights: w becomes mixing * w + (1 - mixing) * pulled
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
        """The number of steps from one push to the next: H/F."""
        return self.steps // self.count

    @property
    def last(self) -> int:
        """The last step of a round."""
        return self.steps + self.delay

    def of(self, position: int) -> int:
        """Returns the fragment of a bucket. Any F neighbouring buckets lie in F different fragments.

        position: the bucket's index among the buckets that train

        Each group of F neighbours begins with another fragment than the group before. Shards, too, get buckets in turn:
        without this shift a job with as many shards as fragments would have all buckets of a fragment on one shard.
        """
        return (position + position // self.count) % self.count

    def leaves(self, fragment: int) -> int:
        """Returns the step of a round after which a fragment is pushed."""
        return (fragment + 1) * self.pause

    def lands(self, fragment: int) -> int:
        """Returns the step of a round after which a fragment is mixed in."""
        return self.leaves(fragment) + self.delay


def fragments(steps: int, count: int) -> Fragments:
    """Returns the fragments of local:H/F with the paper's settings: a delay of one step, and a mixing of one half.

    If a fragment is pushed after each step, there is no delay.
    """
    delay = 1 if 0 < 2 * count <= steps else 0
    return Fragments(steps, count, delay, default_mixing(delay))


def default_mixing(delay: int) -> float:
    """Returns the default share of the worker's own weights: one half, or without a delay 0."""
    return 0.5 if delay else 0.0


def check_mixing(mixing: float) -> None:
    """Raises InvalidRequest for a mixing that would discard all pulled weights, or amplify a worker's own."""
    if not 0 <= mixing < 1:  # also refuses NaN
        raise InvalidRequest(f"the mixing of local:H/F is from 0 to below 1, got {mixing:g}")
