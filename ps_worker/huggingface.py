"""The Trainer of Hugging Face on parameter servers. Needs `transformers` and `accelerate`.

    session = ps_torch.huggingface.connect()          # before TrainingArguments
    trainer = PsTrainer(model=..., args=TrainingArguments(...), train_dataset=..., session=session)
    trainer.train()

`OnServers` does the same for any subclass of Trainer: `class MyTrainer(OnServers, Seq2SeqTrainer)`.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import BatchSampler, DistributedSampler, IterableDataset, RandomSampler
from transformers import Trainer, TrainerCallback

from ps_protocol.errors import Unsupported
from ps_runtime.launch_id import launched_group_size
from ps_worker.accelerate import connect, divides_itself, hide_launcher
from ps_worker.data.loaders import rebuilt
from ps_worker.session import Session

__all__ = ["OnServers", "PsTrainer", "connect"]

RNG_FILE = "rng_state.pth"  # the file of a Trainer with a single process


class OnServers:
    """A mixin for a Trainer, placed before it in the bases, that trains in the session's mode. Mode ddp changes
    nothing.

    Each worker trains on its share of the data, as with DDP. The metrics of an evaluation are taken over all workers,
    and are the same on all. Rank 0 alone writes files and calls loggers. A checkpoint contains the whole optimizer
    state, and the random state of every worker.

    Args:
        session: From `ps_torch.huggingface.connect`.
        prepare_options: Options of `Session.prepare`, such as bucket_bytes and gradient_wire.
        arguments, more: The arguments of the Trainer.
    """

    args: Any  # these are the Trainer's
    model: Any
    optimizer: Any
    accelerator: Any
    compute_metrics: Any
    _train_batch_size: int

    def __init__(
        self, *arguments: Any, session: Session, prepare_options: dict[str, Any] | None = None, **more: Any
    ) -> None:
        self.session = session
        self._prepare_options = prepare_options or {}
        self._on_servers = session.mode != "ddp"
        self._stepper: Any = None  # the optimizer that the session has prepared
        self._scheduler_given = False
        if self._on_servers:
            if launched_group_size() > 1:
                raise Unsupported(
                    "the Trainer trains one process a worker, and its launcher has started this one as a member of a "
                    "group: train with Accelerate and ps_torch.accelerate.join, or leave --group out"
                )
            hide_launcher(session)
            divides_itself()
        super().__init__(*arguments, **more)
        self.add_callback(_Progress(session))  # type: ignore[attr-defined]
        if self._on_servers:
            # Otherwise Accelerate would have rank 0 read an IterableDataset for all, over torch.distributed.
            self.accelerator.dataloader_config.dispatch_batches = False

    # -- preparing ---------------------------------------------------------------------------------------------------

    def create_optimizer(self, model: Any = None) -> Any:
        """Returns the Trainer's optimizer, prepared once: with it the worker joins the job. Raises PSError."""
        optimizer = super().create_optimizer(model)  # type: ignore[misc]
        plain = getattr(optimizer, "optimizer", optimizer)  # on the second call Accelerate has wrapped it
        if not self._on_servers or (self._stepper is not None and plain is self._stepper):
            return optimizer
        _, self._stepper = self.session.prepare(self.model, optimizer, **self._prepare_options)
        self.optimizer = self._stepper
        return self.optimizer

    def get_train_dataloader(self) -> Any:
        """Returns this worker's share of the training data. Raises Unsupported for samplers that cannot be divided."""
        loader = super().get_train_dataloader()  # type: ignore[misc]
        if not self._on_servers:
            return loader
        self.create_optimizer()  # the share is known when the worker has joined
        if isinstance(loader.dataset, IterableDataset):  # such a data set divides its data itself
            return self.session.prepare(rebuilt(loader, batch_size=loader.batch_size, drop_last=loader.drop_last))
        sampler = getattr(loader.batch_sampler, "sampler", None)
        if not isinstance(sampler, RandomSampler | torch.utils.data.SequentialSampler):
            raise Unsupported(
                f"the Trainer's {type(sampler or loader.batch_sampler).__name__} cannot be divided among workers: use "
                "train_sampling_strategy='random' or 'sequential'"
            )
        seed = self.args.seed if self.args.data_seed is None else self.args.data_seed
        share: DistributedSampler[Any] = DistributedSampler(
            loader.dataset,
            self.session.world_size,
            self.session.rank,
            shuffle=isinstance(sampler, RandomSampler),
            seed=seed,
            drop_last=self.args.dataloader_drop_last,
        )
        batches = _EpochBatches(share, self._train_batch_size, self.args.dataloader_drop_last)
        return self.session.prepare(rebuilt(loader, batch_sampler=batches))

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """Returns the Trainer's scheduler, which is rolled back together with the job."""
        scheduler = super().create_scheduler(num_training_steps, optimizer)  # type: ignore[misc]
        if self._on_servers and not self._scheduler_given:
            self._scheduler_given = True
            self.session.prepare(scheduler)
        return scheduler

    # -- evaluation --------------------------------------------------------------------------------------------------

    def evaluation_loop(self, dataloader: Any, description: str, *arguments: Any, **more: Any) -> Any:
        """Returns the metrics over all workers, the same on all.

        Where only a loss is asked for, each worker evaluates its part of the data, and the mean is weighted by the
        samples. Predictions, and metrics of a compute_metrics, need all data together: each worker goes through all of
        it, and rank 0's metrics count.
        """
        if self._stepper is None or self.session.world_size == 1:
            return super().evaluation_loop(dataloader, description, *arguments, **more)  # type: ignore[misc]
        only_loss = self.compute_metrics is None and description != "Prediction"
        part = self._part(dataloader) if only_loss else None
        chosen = dataloader if part is None else part
        output = super().evaluation_loop(chosen, description, *arguments, **more)  # type: ignore[misc]
        if part is None:
            metrics = self.session.broadcast(output.metrics)
        else:
            metrics = self.session.mean(output.metrics, weight=len(part.sampler))
        return output._replace(metrics=metrics)

    def _part(self, loader: Any) -> Any:
        """Returns a loader of every world_size-th sample; None if a worker would have no sample."""
        count = self.session.world_size
        if isinstance(loader.dataset, IterableDataset) or len(loader.dataset) < count:
            return None
        indices = range(self.session.rank, len(loader.dataset), count)
        return rebuilt(loader, batch_size=self.args.eval_batch_size, sampler=indices)

    # -- files -------------------------------------------------------------------------------------------------------

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Writes the model, on rank 0. In a checkpoint the others wait for it: they look for the best one's files."""
        super().save_model(output_dir, _internal_call)  # type: ignore[misc]
        if _internal_call and self._stepper is not None:
            self.session.barrier()

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """Writes the weights of the job: in ssp and async with every acknowledged update, in local:H those that the
        round began with, and not rank 0's own."""
        if state_dict is None and self._stepper is not None and self.args.should_save:
            state_dict = _tied(self.model, self.session.global_weights(self.model))
        super()._save(output_dir, state_dict)  # type: ignore[misc]

    def _save_rng_state(self, output_dir: str) -> None:
        """Writes the random states of all workers, on rank 0, so that each continues with its own."""
        if self._stepper is None:
            super()._save_rng_state(output_dir)  # type: ignore[misc]
            return
        with tempfile.TemporaryDirectory() as directory:
            super()._save_rng_state(directory)  # type: ignore[misc]
            state = (Path(directory) / RNG_FILE).read_bytes()
        states = self.session.gather(torch.frombuffer(bytearray(state), dtype=torch.uint8))
        if self.args.should_save:
            for rank, state in enumerate(states):
                (Path(output_dir) / _rng_file(rank)).write_bytes(state.cpu().numpy().tobytes())

    def _load_rng_state(self, checkpoint: str | None) -> None:
        own = None if checkpoint is None else Path(checkpoint) / _rng_file(self.session.rank)
        if not self._on_servers or own is None or not own.exists():
            super()._load_rng_state(checkpoint)  # type: ignore[misc]
            return
        with tempfile.TemporaryDirectory() as directory:
            shutil.copy(own, Path(directory) / RNG_FILE)
            super()._load_rng_state(directory)  # type: ignore[misc]


class PsTrainer(OnServers, Trainer):
    """A Trainer on parameter servers. See OnServers."""


class _Progress(TrainerCallback):
    """Reports how many steps there will be to the session's progress."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Reports the Trainer's number of steps, and how many its own checkpoint has made already."""
        steps = state.max_steps - state.global_step
        if steps > 0:
            self._session.progress(total=self._session.clock + steps)


def _tied(model: nn.Module, weights: dict[str, Any]) -> dict[str, Any]:
    """Returns the weights with tied tensors tied again, as in the model: save_pretrained then writes them once."""
    first: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        source = first.setdefault(id(parameter), name)
        if name in weights and source in weights:
            weights[name] = weights[source]
    return weights


class _EpochBatches(BatchSampler):
    """Batches of a worker's share. The Trainer sets the epoch on a loader's `batch_sampler.batch_sampler`."""

    def __init__(self, share: DistributedSampler[Any], batch_size: int, drop_last: bool) -> None:
        super().__init__(share, batch_size, drop_last)
        self._share = share

    @property
    def batch_sampler(self) -> _EpochBatches:
        return self

    def set_epoch(self, epoch: int) -> None:
        self._share.set_epoch(epoch)


def _rng_file(rank: int) -> str:
    return f"rng_state_{rank}.pth"
