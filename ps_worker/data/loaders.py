"""Each worker's share of the data, reshuffled every epoch."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol, cast

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, Sampler, SequentialSampler

from ps_protocol.errors import InvalidRequest, Unsupported
from ps_worker.metrics import StepTimer

log = logging.getLogger("ps_worker")

POSITION_METHODS = ("state_dict", "load_state_dict")
NO_POSITION = (
    "a loader that prepare has not divided has no state_dict: this loader divides its data itself, and knows its "
    "position alone. Save what its dataset or sampler has, or hand over torchdata's StatefulDataLoader"
)
LOADED_BEFORE = (
    "the loader has a state that was loaded, and prepare divides its data anew: load it into the loader that prepare "
    "returns, with a state that such a loader gave"
)

Share = Callable[[], tuple[int, int]]  # (index, how many shares)

# The module of the samplers of torchdata's StatefulDataLoader. Comparing its name avoids importing torchdata.
_TORCHDATA_SAMPLERS = "torchdata.stateful_dataloader.sampler"

# A dataset with one of these attributes knows the number of workers. The last one is that of Hugging Face's datasets.
_PARTS = ("world_size", "num_replicas", "_distributed")


class DividingSampler(Protocol):
    """A sampler that yields one of `num_replicas` shares, as DistributedSampler does."""

    rank: int
    num_replicas: int


class EpochSampler(Protocol):
    """A sampler whose order depends on an epoch that the script sets, as DistributedSampler's does."""

    epoch: int

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch of the next iteration."""


class ShareSampler(Sampler[int]):
    """Yields every share_count-th index of a shuffle that all workers share, as DistributedSampler does.

    Share and shuffle change at the start of each epoch, without set_epoch. Shares become equally long by repeating a
    few samples, or with drop_last by leaving a few out.
    """

    def __init__(self, size: int, share: Share, shuffle: bool, drop_last: bool, seed: int = 0) -> None:
        self._size = size
        self.share = share
        self._shuffle = shuffle
        self._drop_last = drop_last
        self._seed = seed
        self.epoch = 0
        self._fixed: tuple[int, int] | None = None
        self._skip = self._over = 0

    def begin(self, epoch: int, share: tuple[int, int] | None, skip: int = 0, over: int = 0) -> None:
        """Sets the next epoch and share, and skips `skip` samples of the share.

        over: the number of samples of the epoch that all workers have used; the others are divided
        """
        self.epoch, self._fixed, self._skip, self._over = epoch, share, skip, over

    def __len__(self) -> int:
        _, count = self._fixed or self.share()
        return self.length(count)

    def length(self, count: int, over: int = 0) -> int:
        """Returns the number of samples of one share, in an epoch of which `over` samples are used."""
        left = max(0, self._size - over)
        return left // count if self._drop_last else -(-left // count)

    def __iter__(self) -> Iterator[int]:
        index, count = self._fixed or self.share()
        if self._shuffle:
            generator = torch.Generator().manual_seed(self._seed + self.epoch)
            order = torch.randperm(self._size, generator=generator).tolist()
        else:
            order = list(range(self._size))
        self.epoch += 1
        length, rest = self.length(count, self._over) * count, order[self._over :]
        while 0 < len(rest) < length:
            rest += order[: length - len(rest)]
        skip, self._skip, self._over, self._fixed = self._skip, 0, 0, None
        return iter(rest[index:length:count][skip:])

    # -- for a script's own file -------------------------------------------------------------------------------------

    def position(self, epoch: int, over: int) -> dict[str, Any]:
        """Returns the position in the data of all workers, from which any number of workers can continue.

        epoch: the current epoch, or the next one
        over: the number of its samples that are used
        """
        order = self._seed + epoch if self._shuffle else None
        return {"order": order, "samples": min(over, self._size), "size": self._size}

    def read_position(self, state: Any) -> tuple[int, int]:
        """Returns the epoch and the number of its used samples from a position. Raises InvalidRequest for anything
        else, and for a position in other data."""
        check_position(state, ("order", "samples", "size"), "that prepare has divided", self._size)
        order, over, size = state["order"], state["samples"], state["size"]
        if (order is not None) != self._shuffle:
            has, wants = ("no shuffle", "shuffles") if order is None else ("a shuffle", "does not shuffle")
            raise InvalidRequest(f"the state is of a loader with {has}, and this one {wants}")
        if not all(isinstance(each, int) for each in (order or 0, over)) or not 0 <= over <= size:
            raise InvalidRequest(f"expected whole numbers, 0 to {size} samples, got order={order!r}, samples={over!r}")
        return (0 if order is None else order - self._seed), over


class ReadPosition(Protocol):
    """A script's position in a loader's data, for the script's own file. A loop that the script has left early
    is over."""

    def state_dict(self) -> dict[str, Any]:
        """Returns the position after the batches that the script has had."""

    def load_state_dict(self, state: Any) -> None:
        """Sets the position of the next loop. Raises InvalidRequest for an invalid position, and during a loop."""


def check_position(state: Any, names: tuple[str, ...], whose: str, size: int | None) -> None:
    """Raises InvalidRequest unless a state is a position in data of this size. whose: the state's name in the
    message"""
    if not isinstance(state, Mapping) or set(state) != set(names):
        got = ", ".join(map(str, state)) or "nothing" if isinstance(state, Mapping) else type(state).__name__
        raise InvalidRequest(f"expected the state_dict of a loader {whose}, with {', '.join(names)}, got {got}")
    if state["size"] != size:
        raise InvalidRequest(f"the state is of a loader of {state['size']} samples, and this one has {size}")


class PreparedLoader:
    """Yields the loader's batches on the session's device. All other attributes are the loader's.

    begin: returns the iterator of one loop over the batches; None: `iter(loader)`
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        device: torch.device,
        timer: StepTimer,
        begin: Callable[[], Iterator[Any]] | None = None,
    ) -> None:
        self._loader = loader
        self._begin = begin or loader.__iter__
        self._device = device
        self._timer = timer

    def __iter__(self) -> Iterator[Any]:
        batches = self._begin()
        while True:
            self._timer.asked()
            try:
                batch = _to(next(batches), self._device)
            except StopIteration:
                self._timer.ended()
                return
            self._timer.yielded()
            yield batch

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        if name in POSITION_METHODS:
            raise AttributeError(NO_POSITION)
        return getattr(self.__dict__["_loader"], name)


class PositionedLoader(PreparedLoader):
    """A prepared loader that knows the script's position in the data.

    It is a class of its own because frameworks save the state of every object that has the two methods.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        device: torch.device,
        timer: StepTimer,
        begin: Callable[[], Iterator[Any]],
        position: ReadPosition,
    ) -> None:
        super().__init__(loader, device, timer, begin)
        self._position = position

    def state_dict(self) -> dict[str, Any]:
        """Returns the position after the batches that the script has had: numbers, and in single two tensors.

        For a divided loader it is the position of all workers, if all have had as many batches as this one. Any number
        of workers can continue from it. A loader that is not divided (torchdata's StatefulDataLoader) returns its own.
        """
        return dict(self._position.state_dict())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Sets the position of the next loop, from `state_dict`. Every worker calls it, after `prepare`.

        Raises InvalidRequest for a position in other data, and during a loop.
        """
        self._position.load_state_dict(state)


def prepared_loader(
    loader: DataLoader[Any],
    device: torch.device,
    timer: StepTimer,
    begin: Callable[[], Iterator[Any]],
    position: ReadPosition | None = None,
) -> PreparedLoader:
    """Returns a prepared loader. position: the script's position in the data; None: the loader's own, if it has one"""
    if position is None and all(hasattr(loader, name) for name in POSITION_METHODS):
        position = cast(ReadPosition, loader)
    if position is None:
        return PreparedLoader(loader, device, timer, begin)
    return PositionedLoader(loader, device, timer, begin, position)


def shard_loader(loader: DataLoader[Any], share: Share, seed: int) -> DataLoader[Any]:
    """Returns the loader with this worker's share of its data.

    An IterableDataset is not changed: it divides itself by session.rank and session.world_size. Neither is a loader
    with a DistributedSampler. Raises InvalidRequest if that sampler divides the data among other workers than these,
    and Unsupported for samplers that cannot be divided without knowing them.
    """
    if isinstance(loader.dataset, IterableDataset):
        return loader
    own = dividing_sampler(loader)
    if own is not None:
        index, count = share()
        if (own.rank, own.num_replicas) != (index, count):
            raise InvalidRequest(
                f"the loader's {type(own).__name__} yields part {own.rank} of {own.num_replicas}, but this worker is "
                f"{index} of {count}: make it with num_replicas=session.world_size, rank=session.rank"
            )
        return loader
    refuse_undividable(loader)
    if getattr(loader, "next_iter_state", None) is not None:  # torchdata's
        raise InvalidRequest(LOADED_BEFORE)
    loader = with_plain_batches(loader)
    size = len(loader.dataset)  # type: ignore[arg-type]
    sampler = ShareSampler(size, share, shuffles(loader.sampler), bool(loader.drop_last), seed)
    return rebuilt(loader, batch_size=loader.batch_size, sampler=sampler, drop_last=loader.drop_last)


def refuse_undividable(loader: DataLoader[Any]) -> None:
    """Raises Unsupported for samplers that cannot be divided among workers without knowing them."""
    if isinstance(loader.dataset, IterableDataset) or dividing_sampler(loader) is not None:
        return
    loader = with_plain_batches(loader)
    sampler, batches = loader.sampler, loader.batch_sampler
    plain = type(sampler) is SequentialSampler or (
        shuffles(sampler) and not sampler.replacement and sampler.num_samples == len(loader.dataset)  # type: ignore[attr-defined, arg-type]
    )
    if not plain or (batches is not None and not _is(batches, BatchSampler)):
        name = type(sampler).__name__ if not plain else type(batches).__name__
        raise Unsupported(
            f"the loader's {name} cannot be divided among workers; use shuffle=True or False, or divide the data by "
            "session.rank and session.world_size and do not hand this loader to prepare"
        )


def shuffles(sampler: object) -> bool:
    """Whether a sampler is the one of shuffle=True in torch's DataLoader or torchdata's StatefulDataLoader."""
    return _is(sampler, RandomSampler)


def _is(sampler: object, cls: type) -> bool:
    """Whether a sampler is of exactly a class of torch, or of torchdata's class of the same name."""
    kind = type(sampler)
    return kind is cls or (kind.__name__ == cls.__name__ and kind.__module__ == _TORCHDATA_SAMPLERS)


def refused_of_loader(loader: DataLoader[Any]) -> list[str]:
    """Returns the messages of the errors that `shard_loader` would raise for a loader."""
    try:
        refuse_undividable(loader)
    except Unsupported as error:
        return [str(error)]
    return []


def with_plain_batches(loader: DataLoader[Any]) -> DataLoader[Any]:
    """Returns an equal loader in which a plain BatchSampler is replaced by its sampler and batch size."""
    batches = loader.batch_sampler
    if loader.batch_size is not None or not _is(batches, BatchSampler):
        return loader
    assert isinstance(batches, BatchSampler)
    return rebuilt(loader, batch_size=batches.batch_size, sampler=batches.sampler, drop_last=batches.drop_last)


def dividing_sampler(loader: DataLoader[Any]) -> DividingSampler | None:
    """Returns the sampler, or batch sampler, that divides the data by its own rank; None without one."""
    for sampler in _samplers(loader):
        if isinstance(getattr(sampler, "rank", None), int) and isinstance(getattr(sampler, "num_replicas", None), int):
            return sampler  # type: ignore[no-any-return]
    return None


def epoch_sampler(loader: DataLoader[Any]) -> EpochSampler | None:
    """Returns the sampler, or batch sampler, whose epoch the script sets; None without one."""
    for sampler in _samplers(loader):
        if callable(getattr(sampler, "set_epoch", None)) and isinstance(getattr(sampler, "epoch", None), int):
            return sampler  # type: ignore[no-any-return]
    return None


def _samplers(loader: DataLoader[Any]) -> list[Any]:
    """Returns the samplers that may determine the order of a map-style dataset."""
    batches = loader.batch_sampler
    return [loader.sampler, batches, getattr(batches, "sampler", None)]


def _divides_itself(dataset: IterableDataset[Any]) -> bool:
    """Whether a dataset, or one that it reads from, evidently knows the number of workers."""
    try:
        attributes = vars(dataset)
    except TypeError:
        return False
    if any(attributes.get(name) is not None for name in _PARTS):
        return True
    if _is_streaming(dataset):  # the number of workers that it has read from the launcher's variables
        return any(getattr(value, "num_ranks", 1) > 1 for value in attributes.values())
    return any(_divides_itself(inner) for inner in attributes.values() if isinstance(inner, IterableDataset))


def _is_streaming(dataset: IterableDataset[Any]) -> bool:
    """Whether a dataset is MosaicML's StreamingDataset, or of a class made of it."""
    return any(kind.__module__.partition(".")[0] == "streaming" for kind in type(dataset).__mro__)


def warning_once(
    loader: DataLoader[Any], share: Share, begin: Callable[[], Iterator[Any]]
) -> Callable[[], Iterator[Any]]:
    """Returns `begin` for a loop over an IterableDataset. It warns once if every worker would read all of the data."""
    warned = False

    def begun() -> Iterator[Any]:
        nonlocal warned
        index, count = share()
        if count > 1 and index == 0 and not warned and not _divides_itself(loader.dataset):  # type: ignore[arg-type]
            warned = True
            if _is_streaming(loader.dataset):  # type: ignore[arg-type]
                log.warning(
                    "the loader's %s divides itself by the variables RANK and WORLD_SIZE, and has found none: each of "
                    "the %d workers reads all of it. Set them before it is made, as docs/training.md shows (Data)",
                    *(type(loader.dataset).__name__, count),
                )
                return begin()
            log.warning(
                "the loader's %s is not seen to be divided among the %d workers: divide an IterableDataset by "
                "session.rank and session.world_size%s, or each worker reads all of it. If it is divided, give it an "
                "attribute `world_size`, and this warning goes",
                *(type(loader.dataset).__name__, count),
                ", and by torch.utils.data.get_worker_info() among the loader's processes" * (loader.num_workers > 1),
            )
        return begin()

    return begun


def rebuilt(loader: DataLoader[Any], **sampling: Any) -> DataLoader[Any]:
    """Returns an equal loader with other sampling: the DataLoader arguments that determine samples and batches."""
    return DataLoader(
        loader.dataset,
        **sampling,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        generator=loader.generator,
        prefetch_factor=loader.prefetch_factor,
        persistent_workers=loader.persistent_workers,
    )


def _to(batch: Any, device: torch.device) -> Any:
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, dict):
        return type(batch)((key, _to(value, device)) for key, value in batch.items())
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(_to(value, device) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(_to(value, device) for value in batch)
    return batch
