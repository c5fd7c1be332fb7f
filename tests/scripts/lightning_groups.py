"""What the members of groups do in the tests of Lightning. Each function is one process' script."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader

import ps_worker
from ps_worker.lightning import FabricParameterServerStrategy, ParameterServerGroupStrategy, ParameterServerStrategy
from tests.scripts.lightning_jobs import Net, Warmed, loaders, trainer, validation_loss
from tests.scripts.models import refusal

logging.getLogger("lightning").setLevel(logging.ERROR)
warnings.filterwarnings("ignore", module="lightning")


class Cut(Net):
    """The regression, cut by tensor parallel and by fully_shard, as far as the mesh has them."""

    def configure_model(self) -> None:
        if isinstance(next(self.net.parameters()), DTensor):
            return
        mesh = self.device_mesh
        if mesh["tensor_parallel"].size() > 1:
            parallelize_module(self.net, mesh["tensor_parallel"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        if mesh["data_parallel"].size() > 1:
            for layer in (self.net[0], self.net[2]):
                fully_shard(layer, mesh=mesh["data_parallel"])
            fully_shard(self.net, mesh=mesh["data_parallel"])

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        loss = super().training_step(batch, index)
        process = self.trainer.strategy.session.rank * self.trainer.world_size + self.trainer.global_rank
        self.log("process", float(process), sync_dist=True, on_epoch=True, on_step=False)
        return loss


def whole(model: nn.Module) -> list[list[float]]:
    """The weights, each as one tensor."""
    tensors = [each.full_tensor() if isinstance(each, DTensor) else each for each in model.state_dict().values()]
    return [tensor.flatten().tolist() for tensor in tensors]


def fit(root: Path, data: int, cut: int, batch: int, epochs: int = 3, **more: Any) -> dict[str, Any]:
    """Trains, with a checkpoint each epoch. more: session, is_one_file, path to begin from, options of a Trainer"""
    path, session = more.pop("path", None), more.pop("session", None)
    keep = ModelCheckpoint(dirpath=root, save_last=True)
    strategy = ParameterServerGroupStrategy(
        data, cut, save_distributed_checkpoint=not more.pop("is_one_file", False), session=session
    )
    options = {"callbacks": [keep], "logger": False, "max_epochs": epochs, "use_distributed_sampler": False}
    made = trainer(root, strategy, **options | more)
    net, (train, validate) = Cut(), loaders(batch)
    made.fit(net, train, validate, ckpt_path=path, weights_only=False)
    return {
        "weights": whole(net.net),
        "rates": [group["lr"] for optimizer in made.optimizers for group in optimizer.param_groups],
        "metrics": {name: float(value) for name, value in made.callback_metrics.items()},
        "place": (made.global_rank, made.world_size, made.is_global_zero, rank_zero_only.rank),
        "steps": (made.global_step, strategy.session.clock),
        "seen": net.seen,
        "best": str(keep.last_model_path),
    }


class CutAndWarmed(Warmed, Cut):
    """The cut regression, whose schedule is over all steps."""


def estimate(root: Path, divides: bool) -> tuple[float, int, list[float]]:
    """The number of steps that the schedule has, that of the steps made, and the samples of this process.

    divides: whether Lightning divides the data
    """
    strategy = ParameterServerGroupStrategy(2, 1)
    options = {"logger": False, "enable_checkpointing": False, "max_epochs": 1, "use_distributed_sampler": divides}
    made = trainer(root, strategy, **options)
    net = CutAndWarmed()
    made.fit(net, loaders(4)[0])
    return net.estimate, made.global_step, [sample for batch in net.seen for sample in batch]


def alone(root: Path, batch: int) -> dict[str, Any]:
    """What one process of Lightning alone ends with."""
    net, (train, validate) = Net(), loaders(batch)
    trainer(root, "auto", logger=False, enable_checkpointing=False).fit(net, train, validate)
    return {"weights": whole(net.net), "loss": validation_loss(net)}


def resume(root: Path, session_job: str, is_one_file: bool) -> tuple[Any, Any, list[str]]:
    """The weights of 4 epochs in one go, and of 2 and 2 with a checkpoint between; and what is in its folder."""

    def run(name: str, epochs: int, path: str | None = None) -> Any:
        with ps_worker.connect(job=f"{session_job}-{name}") as session:
            found = fit(root / name, 2, 1, 2, epochs, session=session, path=path, is_one_file=is_one_file)
            session.barrier()  # the file is there
        return found["weights"], found["rates"], found["steps"][0]

    uninterrupted = run("whole", 4)
    run("first", 2)
    resumed = run("rest", 4, str(root / "first" / "last.ckpt"))
    return uninterrupted, resumed, sorted(str(each.relative_to(root)) for each in root.glob("first/last.ckpt/*"))


def save_apart(root: Path) -> dict[str, bool]:
    """Whether a checkpoint in mid-round has the weights that the round began with, and not a group's own."""
    net, (train, _) = Cut(), loaders(2)
    averaged = {"outer": {"warm_up": 0}}  # from the first step on groups step by themselves
    strategy = ParameterServerGroupStrategy(2, 1, save_distributed_checkpoint=False, prepare_options=averaged)
    made = trainer(root, strategy, logger=False, enable_checkpointing=False, max_steps=3, use_distributed_sampler=False)
    made.fit(net, train)
    own, jobs = whole(net.net), strategy.session.global_weights(net)
    jobs = {name: each.full_tensor().flatten().tolist() for name, each in jobs.items()}
    made.save_checkpoint(root / "apart.ckpt")
    saved = torch.load(root / "apart.ckpt", weights_only=False)["state_dict"]
    found = {name: each.flatten().tolist() for name, each in saved.items()}
    return {"the job's": found == jobs, "not its own": list(found.values()) != own}


def refusals() -> list[str]:
    """What is said to a group of the strategies whose workers are one process each."""
    return [refusal(kind) for kind in (ParameterServerStrategy, FabricParameterServerStrategy)]


def without_a_group() -> str:
    """What the strategy for groups says where no launcher has started one."""
    return refusal(lambda: ParameterServerGroupStrategy(2, 1))


def sharded_in_another_strategy(root: Path) -> str:
    """What is said of a module that fully_shard has cut, where a worker is one process."""
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{root}/store", rank=0, world_size=1)

    class Sharded(Net):
        def configure_model(self) -> None:
            fully_shard(self.net)

    made = trainer(root, "ps", logger=False, enable_checkpointing=False)
    return refusal(lambda: made.fit(Sharded(), DataLoader(loaders(4)[0].dataset, 4)))
