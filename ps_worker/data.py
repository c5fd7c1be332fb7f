"""Each worker's share of the data, reshuffled every epoch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, Sampler, SequentialSampler

from ps_protocol.errors import Unsupported
from ps_worker.metrics import StepTimer

Share = Callable[[], tuple[int, int]]


class ShareSampler(Sampler[int]):
    """Every share_count-th index of one shuffle that all workers agree on, as DistributedSampler does.

    The share is asked for anew at the start of each epoch, and so is the shuffle: no set_epoch is needed. Shares are
    made equally long by repeating a few samples, or, with drop_last, by leaving a few out.
    """

    def __init__(self, size: int, share: Share, shuffle: bool, drop_last: bool, seed: int = 0) -> None:
        self._size = size
        self.share = share
        self._shuffle = shuffle
        self._drop_last = drop_last
        self._seed = seed
        self.epoch = 0
        self._fixed: tuple[int, int] | None = None
        self._skip = 0

    def begin(self, epoch: int, share: tuple[int, int] | None, skip: int = 0) -> None:
        """The next epoch is this one, with this share, and begins after so many samples."""
        self.epoch, self._fixed, self._skip = epoch, share, skip

    def __len__(self) -> int:
        _, count = self._fixed or self.share()
        return self._size // count if self._drop_last else -(-self._size // count)

    def __iter__(self) -> Iterator[int]:
        index, count = self._fixed or self.share()
        if self._shuffle:
            generator = torch.Generator().manual_seed(self._seed + self.epoch)
            order = torch.randperm(self._size, generator=generator).tolist()
        else:
            order = list(range(self._size))
        self.epoch += 1
        length = (self._size // count if self._drop_last else -(-self._size // count)) * count
        while 0 < len(order) < length:
            order += order[: length - len(order)]
        skip, self._skip, self._fixed = self._skip, 0, None
        return iter(order[index:length:count][skip:])


class PreparedLoader:
    """Yields the loader's batches on the session's device. Everything else is the loader's.

    begin: begins a loop over the batches; by default over the loader
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
        return getattr(self.__dict__["_loader"], name)


def shard_loader(loader: DataLoader[Any], share: Share, seed: int) -> DataLoader[Any]:
    """The loader with this worker's share of its data.

    An IterableDataset is left as it is: it shards itself by session.rank and session.world_size. Raises Unsupported for
    samplers that cannot be divided without knowing them.
    """
    if isinstance(loader.dataset, IterableDataset):
        return loader
    sampler, batches = loader.sampler, loader.batch_sampler
    plain = type(sampler) is SequentialSampler or (
        type(sampler) is RandomSampler and not sampler.replacement and sampler.num_samples == len(loader.dataset)  # type: ignore[arg-type]
    )
    if not plain or (batches is not None and type(batches) is not BatchSampler):
        name = type(sampler).__name__ if not plain else type(batches).__name__
        raise Unsupported(
            f"the loader's {name} cannot be divided among workers; use shuffle=True or False, or divide the data by "
            "session.rank and session.world_size and do not hand this loader to prepare"
        )
    size = len(loader.dataset)  # type: ignore[arg-type]
    mine = ShareSampler(size, share, type(sampler) is RandomSampler, bool(loader.drop_last), seed)
    return rebuilt(loader, batch_size=loader.batch_size, sampler=mine, drop_last=loader.drop_last)


def rebuilt(loader: DataLoader[Any], **sampling: Any) -> DataLoader[Any]:
    """The same loader with other sampling: the arguments of DataLoader that say in which batches samples come."""
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
    """The batch with every tensor in it on the device."""
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, dict):
        return type(batch)((key, _to(value, device)) for key, value in batch.items())
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(_to(value, device) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(_to(value, device) for value in batch)
    return batch
