"""The interface of a strategy, one way to train, for a session. Each strategy is a class in a file of its own.

made       by `connect`, for one mode; it talks to no server yet
prepare    takes the models and their optimizers, and joins the other workers. The optimizers that it returns are the
           rest of the training: `step` trains, `state_dict` and `load_state_dict` take optimizer state out and in,
           `add_param_group` unfreezes parameters
loaders    each worker gets its share of the data
state      schedulers and the like go back to a checkpoint together with the job
exchange   the one collective: mean, gather, broadcast and barrier are made of it (collectives.py)
close      leaves; the models stay as they are
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils.data import DataLoader

from ps_worker.values import PrepareOptions

# The models and optimizers that a script trains with, in the order in which it has handed them over.
Prepared = tuple[Sequence[nn.Module], Sequence[torch.optim.Optimizer]]


class Batches(Protocol):
    """The loader that the script iterates over. Attributes that it does not define are those of the user's own
    loader.
    """

    def __iter__(self) -> Iterator[Any]:
        """Yields this worker's batches of one pass, on the session's device."""

    def __len__(self) -> int:
        """Returns how many batches a pass has for this worker."""


class Strategy(Protocol):
    """One way to train, for one session. Methods raise PSError and are for the thread that trains, but `close`."""

    @property
    def rank(self) -> int:
        """This worker's rank; 0 while it has none yet."""

    @property
    def exchange_rank(self) -> int:
        """This process's number among all that exchange values: its rank, unless workers are groups of processes."""

    @property
    def world_size(self) -> int:
        """How many workers take part: declared, or live now."""

    @property
    def is_main(self) -> bool:
        """Whether this worker logs and saves for all. Raises InvalidRequest while that is not known yet."""

    @property
    def clock(self) -> int:
        """Steps finished."""

    @property
    def round(self) -> int:
        """The number of updates that this worker has taken part in: rounds in local modes, otherwise steps."""

    def refresh(self) -> None:
        """Updates the model's weights with every update that the servers have acknowledged, in modes where a step does
        not.
        """

    def global_values(self) -> Mapping[int, torch.Tensor]:
        """Returns the servers' weights by the id of the parameter; only of parameters whose weights in the model may
        differ.
        """

    def prepare(
        self, models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer], options: PrepareOptions
    ) -> Prepared:
        """Returns the models and the optimizers to train with. Blocks until all declared workers have joined."""

    def begin_stage(
        self, models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer]
    ) -> Sequence[torch.optim.Optimizer]:
        """Returns the optimizers to go on with. They replace all optimizers that had any of their parameters."""

    def prepare_loader(self, loader: DataLoader[Any], seed: int) -> Batches:
        """Returns the loader with this worker's share of its data. seed: the seed of the shuffle"""

    def keep(self, things: Sequence[Any], own: Sequence[Any] = ()) -> None:
        """Saves and restores objects with a state_dict, such as schedulers, together with the worker from now on.

        own: the objects whose state belongs to this worker alone; workers that join late get the state of all others
        """

    def no_sync(self) -> AbstractContextManager[None]:
        """Returns a context in which backward passes only add to the gradients."""

    def exchange(self, value: bytes, what: str) -> dict[int, bytes]:
        """Gives a value, waits until all live workers have given theirs, and returns all of them, by rank, ascending.

        what: the name of the call, for messages
        """

    def close(self) -> None:
        """Leaves cleanly; may be called more than once, and by another thread while `prepare` waits."""
