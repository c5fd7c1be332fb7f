"""The script's position in the data in the modes without servers (single, ddp), for the script's own file.

A batch counts once the script has it, however far the loader has read ahead. A loop that the script leaves early is
over: the next loop begins a pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader

from ps_protocol.errors import InvalidRequest
from ps_worker.data.loaders import ShareSampler, check_position

UNDER_WAY = "a loop over this loader is under way: load its state before the loop begins"


class PassesUnderWay:
    """The loops of a script over one loader. `taken`: the batches that the script has had in the current one"""

    def __init__(self) -> None:
        self.taken = 0
        self._loop: object = None  # the current loop

    @property
    def is_going(self) -> bool:
        """Whether a loop over the data is in progress."""
        return self._loop is not None

    def over(self, batches: Iterator[Any], ended: Callable[[], None], taken: int = 0) -> Iterator[Any]:
        """Yields the batches of a loop, after those taken before. Calls `ended` at its end, unless another loop has
        begun."""
        loop = self._loop = object()
        self.taken = taken
        try:
            for batch in batches:
                if self._loop is loop:
                    self.taken += 1
                yield batch
        finally:
            if self._loop is loop:
                self._loop, self.taken = None, 0
                ended()


class SharePass:
    """A loader of this worker's share. Its position is that of all workers, if they have had as many batches."""

    def __init__(self, loader: DataLoader[Any], sampler: ShareSampler) -> None:
        self._loader, self._sampler = loader, sampler
        self._loops = PassesUnderWay()
        self._epoch = self._over = 0

    def batches(self) -> Iterator[Any]:
        """Yields the batches of one loop."""
        if self._loops.is_going:  # the script left that one behind
            self._next()
        self._sampler.begin(self._epoch, None, 0, self._over)
        yield from self._loops.over(iter(self._loader), self._next)

    def _next(self) -> None:
        self._epoch, self._over = self._epoch + 1, 0

    def state_dict(self) -> dict[str, Any]:
        """Returns the position: see ReadPosition."""
        _, count = self._sampler.share()
        own = min(self._loops.taken * (self._loader.batch_size or 1), self._sampler.length(count, self._over))
        return self._sampler.position(self._epoch, self._over + own * count)

    def load_state_dict(self, state: Any) -> None:
        """Sets the position of the next loop."""
        if self._loops.is_going:
            raise InvalidRequest(UNDER_WAY)
        self._epoch, self._over = self._sampler.read_position(state)


class WholeLoop:
    """A loader that is not divided. torch's random numbers determine its order.

    To resume a pass it starts again with the random states of its beginning, and skips the first batches.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._loader = loader
        self._loops = PassesUnderWay()
        self._began: tuple[torch.Tensor, torch.Tensor | None] | None = None  # the pass, with these random states
        self._skip = 0  # batches that the next loop leaves out

    def batches(self) -> Iterator[Any]:
        """Yields the batches of one loop."""
        skip, self._skip = self._skip, 0
        if skip and self._began is not None:
            batches = self._behind(self._began, skip)
        else:
            own = self._loader.generator
            self._began = torch.get_rng_state(), None if own is None else own.get_state()
            batches = iter(self._loader)
        yield from self._loops.over(batches, lambda: None, skip)

    def _behind(self, began: tuple[torch.Tensor, torch.Tensor | None], skip: int) -> Iterator[Any]:
        """Returns the batches of a pass after the first ones. torch's random state stays as the script has set it; the
        loader's own generator is left as after the whole pass."""
        now = torch.get_rng_state()
        torch.set_rng_state(began[0])
        if self._loader.generator is not None and began[1] is not None:
            self._loader.generator.set_state(began[1])
        batches = iter(self._loader)
        for _ in range(skip):
            next(batches, None)
        torch.set_rng_state(now)
        return batches

    def state_dict(self) -> dict[str, Any]:
        """Returns the position: see ReadPosition."""
        random, generator = self._began if self._loops.is_going and self._began is not None else (None, None)
        return {"batches": self._loops.taken, "size": self._size, "random": random, "generator": generator}

    @property
    def _size(self) -> int | None:
        try:
            return len(self._loader.dataset)  # type: ignore[arg-type]
        except TypeError:  # an IterableDataset
            return None

    def load_state_dict(self, state: Any) -> None:
        """Sets the position of the next loop."""
        if self._loops.is_going:
            raise InvalidRequest(UNDER_WAY)
        check_position(
            state, ("batches", "size", "random", "generator"), "that is used as it is, in single", self._size
        )
        self._skip = int(state["batches"])
        self._began = (state["random"], state["generator"]) if self._skip else None
