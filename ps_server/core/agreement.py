"""How alike workers move in a round of local steps: |mean of the differences|^2 over the mean of |difference|^2.

Of W workers that all push the same it is 1. Where their differences have nothing to do with each other it is about 1/W:
then most of what each has learned is lost in the mean, and rounds are too long, or the learning rate too high.

Both sums are kept, not their ratio: those of a model's buckets add up, on whatever shards they are.

A file of its own because `ps-server status` reads it, and runs without torch.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Agreement:
    """Of the differences in one update, or in those of several buckets.

    mean_square: the square of the L2 norm of their mean
    square_mean: the mean of the squares of their L2 norms
    """

    mean_square: float = 0.0
    square_mean: float = 0.0

    def __add__(self, other: Agreement) -> Agreement:
        return Agreement(self.mean_square + other.mean_square, self.square_mean + other.square_mean)

    @property
    def ratio(self) -> float | None:
        """The first over the second; None where all differences are zero, or none is known."""
        return self.mean_square / self.square_mean if self.square_mean > 0 else None
