"""What every worker has of one bucket, where weights travel in blocks (int8, int4): the weights as they were sent.

Each update sends the codes of what is missing, weights - sent, and adds their values to `sent`. So what one update
rounds off is part of what the next one sends, and nothing is lost for good. All workers get the same codes, and add the
same values to what they have: they have the same bits, which are those here.

A worker that has not what the codes are to be added to asks for the whole, and gets `sent` as it is. So do all after an
update before which a script had set weights: those have to arrive as they were set.
"""

from __future__ import annotations

import torch

from ps_protocol.codecs import Blocks


class SentWeights:
    """What workers have of a bucket's weights. Whoever steps the bucket advances it, likewise one at a time.

    flat:  [numel] float32
    codes: what leads here from the version before; None: this version comes whole
    """

    def __init__(self, codec: Blocks, numel: int) -> None:
        self.codec = codec
        self.flat = torch.zeros(numel)
        self.codes: torch.Tensor | None = None

    def begin(self, values: torch.Tensor) -> None:
        """Begins, or goes on, with what workers will have: [numel]."""
        self.flat.copy_(values)
        self.codes = None

    def advance(self, weights: torch.Tensor, whole: bool) -> None:
        """Sends the weights of the next version: [numel]. whole: as they are"""
        if whole:
            self.begin(weights)
            return
        self.codes = self.codec.encode(weights - self.flat)
        self.flat += self.codec.values(self.codes, len(self.flat))
