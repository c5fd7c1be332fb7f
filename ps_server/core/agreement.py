"""How alike workers move in a round of local steps: |mean of the differences|^2 over the mean of |difference|^2.

If W workers all push the same difference, the ratio is 1. If their differences are unrelated, it is about 1/W: then
most of what each worker has learned is lost in the mean, and rounds are too long, or the learning rate is too high.

Both sums are kept instead of their ratio, so that they can be added over a model's buckets on all shards.

This is a file of its own because `ps-server status` reads it, which runs without torch.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Agreement:
    """The two sums for the differences in one update, or in those of several buckets.

    mean_square: the square of the L2 norm of the mean
    square_mean: the mean of the squares of the L2 norms
    """

    mean_square: float = 0.0
    square_mean: float = 0.0

    def __add__(self, other: Agreement) -> Agreement:
        return Agreement(self.mean_square + other.mean_square, self.square_mean + other.square_mean)

    @property
    def ratio(self) -> float | None:
        """`mean_square` over `square_mean`; None if all differences are zero or unknown."""
        return self.mean_square / self.square_mean if self.square_mean > 0 else None
