"""How far a script's loops over one loader are, and how they go somewhere else.

A loop of the script is usually one pass over the data. After the job was set back it may be more: the rest of an
earlier pass, and the passes after it up to the one that the script is in. In a new process that goes on from a
checkpoint it may be none: the passes before it yield nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader

from ps_protocol.errors import Unsupported
from ps_worker.data.loaders import ShareSampler, epoch_sampler
from ps_worker.state.encoding import LoaderState, PassStart, RandomState, Settings

if TYPE_CHECKING:
    from ps_worker.state.checkpoint import WorkerCheckpoint

log = logging.getLogger("ps_worker")

# Of so many passes back it is remembered how they began.
REMEMBERED_PASSES = 256

_END = object()


@dataclass(frozen=True)
class Began:
    """What a script had set when it began a pass, and where all loaders were."""

    settings: Settings
    places: list[LoaderState]
    epoch: int | None


class LoaderPosition:
    """The place of one loader. Passes are counted from 1: pass `begun` is the last that was begun.

    going: whether it is under way
    """

    def __init__(self, rewind: WorkerCheckpoint, loader: DataLoader[Any], index: int) -> None:
        self.index = index
        self.going = False
        self._rewind = rewind
        self._loader = loader
        self._sampler = loader.sampler if isinstance(loader.sampler, ShareSampler) else None
        self._epochs = epoch_sampler(loader)
        self._script = 0  # loops that the script has begun; more than `begun` while a loop makes up for earlier passes
        self._begun = 0
        self._taken = 0
        self._start: PassStart | None = None
        self._loop: object = None  # the one under way
        self._since = 0  # steps that were made before it
        self._began: dict[int, Began] = {}  # by pass
        self._broken_off: dict[int, int] = {}  # by pass, after how many batches the script left its loop
        self._target: LoaderState | None = None
        self._leave_out = 0

    def place(self) -> LoaderState:
        """Where it is, now."""
        return LoaderState(self._begun, self.going, self._taken, self._start, self._generator_state())

    def follow(self, place: LoaderState) -> None:
        """Another loader is put back, and this one with it: at once, or when its loop asks for the next batch.

        Raises Unsupported if its loop is over.
        """
        if self.going or (place.going and self._script < place.begun):
            self._target = place
        elif place.going:
            raise Unsupported(
                "the job was set back into a loop over another loader, and this script is past that: start it again"
            )
        else:
            self._begun = self._script = place.begun
            self._set_generator(place.generator)

    # -- one loop of the script --------------------------------------------------------------------------------------

    def batches(self) -> Iterator[Any]:
        """The batches of one loop of the script."""
        loop = self._loop = object()
        iterator = self._begin_loop()
        self._since = self._rewind.steps
        try:
            while iterator is not None:
                iterator = self._asked(iterator)
                batch = _END if iterator is None or self._is_broken_off() else next(iterator, _END)
                if batch is _END:
                    iterator = self._end_pass()
                    continue
                self._taken += 1
                self._rewind.yielded(self)
                yield batch
        except GeneratorExit:
            if self._loop is loop:
                self._leave()
            raise

    def _begin_loop(self) -> Iterator[Any] | None:
        self._script += 1
        self.going = False  # a loop that the script left behind does not count
        if not any(loader.is_asked_after_step for loader in self._rewind.loaders):
            self._rewind.catch(self)
        target = self._rewind.due(self) or self._target
        if target is None:
            return self._begin_pass()
        if target.begun > self._script:
            self._begun = self._script
            return None  # this pass was made before the checkpoint
        return self._go_back()

    @property
    def is_at_begin(self) -> bool:
        """Whether the script has taken no more than one batch of a pass that is not its first."""
        return self._begun > 1 and self._taken <= 1

    @property
    def is_asked_after_step(self) -> bool:
        """Whether a loop is under way that began before the last step: it will ask for a batch again, or end."""
        return self.going and self._since < self._rewind.steps

    def _asked(self, iterator: Iterator[Any]) -> Iterator[Any] | None:
        """The script asks for a batch: what is wanted is caught now, what is to be put back is."""
        if self._rewind.wants() and self.is_asked_after_step:
            self._rewind.catch(self)
        if self._target is not None or self._rewind.due(self) is not None:
            return self._go_back()
        return iterator

    def _is_broken_off(self) -> bool:
        """Whether this pass is made once more, and the script had left its loop at this point."""
        return self._begun < self._script and self._broken_off.get(self._begun) == self._taken

    def _end_pass(self) -> Iterator[Any] | None:
        self.going = False
        return self._cross() if self._begun < self._script else None

    def _leave(self) -> None:
        """The script leaves its loop before the end."""
        wanted = self._rewind.wants() and self.is_asked_after_step
        self.going = False
        if wanted:
            self._rewind.catch(self)
        self._broken_off[self._begun] = self._taken
        self._script = self._begun

    # -- passes ------------------------------------------------------------------------------------------------------

    def _begin_pass(self) -> Iterator[Any]:
        self._begun += 1
        self.going, self._taken = True, 0
        share = None if self._sampler is None else self._sampler.share()
        self._start = PassStart(RandomState.now(self._rewind.device), self._generator_state(), share, self._epoch())
        if self._begun == self._script:
            self._began.setdefault(self._begun, Began(self._rewind.settings(), self._rewind.places(), self._epoch()))
            self._began.pop(self._begun - REMEMBERED_PASSES, None)
        left_out, self._leave_out = self._leave_out, 0
        return self._open(self._start, left_out)

    def _cross(self) -> Iterator[Any]:
        """Goes on with the next pass in the same loop, with what the script had set before it."""
        began = self._began.get(self._begun + 1)
        if began is None:
            log.warning("what the script did between passes %d and %d is not known", self._begun, self._begun + 1)
        else:
            self._rewind.put(began.settings)
            self._set_epoch(began.epoch)
            self._set_generator(began.places[self.index].generator)
            for other, place in zip(self._rewind.loaders, began.places, strict=False):
                if other is not self and not other.going:
                    other.follow(place)
        return self._begin_pass()

    def _go_back(self) -> Iterator[Any] | None:
        """Goes to where it is to be; what it is the loader for is put back first."""
        place, left_out = self._rewind.due(self), 0
        if place is not None:
            left_out = self._rewind.put_back(self)
        else:
            place = self._target
        assert place is not None
        self._target = None
        self._begun, self.going, self._taken, self._start = place.begun, place.going, 0, place.start
        self._leave_out = left_out
        if not place.going:
            self._set_generator(place.generator)
            return self._end_pass()
        assert place.start is not None
        left_out, self._leave_out = self._leave_out, 0
        now = RandomState.now(self._rewind.device)
        place.start.random.restore(self._rewind.device)
        self._set_generator(place.start.generator)
        self._set_epoch(place.start.epoch)
        iterator = self._open(place.start, place.taken + left_out)
        now.restore(self._rewind.device)
        self._set_generator(place.generator)
        return iterator

    def _open(self, start: PassStart, skip: int) -> Iterator[Any]:
        """The batches of the pass `begun`, without so many at its beginning; more than it has: of the next one too."""
        skipped = 0
        if self._sampler is not None:
            self._sampler.begin(self._begun - 1, start.share)
            if self._loader.num_workers == 0:  # nothing is loaded that is not wanted
                skipped = min(skip, len(self._loader))
                self._sampler.begin(self._begun - 1, start.share, skipped * (self._loader.batch_size or 1))
        iterator = iter(self._loader)
        while skipped < skip and next(iterator, _END) is not _END:
            skipped += 1
        self._taken = skipped
        self._leave_out += skip - skipped
        return iterator

    def _epoch(self) -> int | None:
        return None if self._epochs is None else self._epochs.epoch

    def _set_epoch(self, epoch: int | None) -> None:
        if self._epochs is not None and epoch is not None:
            self._epochs.set_epoch(epoch)

    def _generator_state(self) -> torch.Tensor | None:
        return None if self._loader.generator is None else self._loader.generator.get_state()

    def _set_generator(self, state: torch.Tensor | None) -> None:
        if self._loader.generator is not None and state is not None:
            self._loader.generator.set_state(state)
