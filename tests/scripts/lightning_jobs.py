"""What workers do in the tests of Lightning and Fabric. Each function is one worker's script."""

from __future__ import annotations

import logging
import os
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric import Fabric
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities import CombinedLoader
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import ps_worker
from ps_worker.lightning import FabricParameterServerStrategy, ParameterServerStrategy
from tests.scripts.models import refusal, weights
from tests.tools.cluster import scrape

logging.getLogger("lightning").setLevel(logging.ERROR)
warnings.filterwarnings("ignore", module="lightning")
warnings.filterwarnings("ignore", module="torch.jit")

SAMPLES = 48


def numbers() -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs (SAMPLES, 3) and targets (SAMPLES, 1), the same on all workers."""
    draw = torch.Generator().manual_seed(3)
    x = torch.randn(SAMPLES, 3, generator=draw)
    return x, x.sum(1, keepdim=True) + 0.1 * torch.randn(SAMPLES, 1, generator=draw)


def loaders(batch: int, shuffle: bool = False) -> tuple[DataLoader[Any], DataLoader[Any]]:
    x, y = numbers()
    whole = TensorDataset(x, y)
    return DataLoader(whole, batch, shuffle=shuffle), DataLoader(TensorDataset(x[:16], y[:16]), 4)


def network() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))


class Net(pl.LightningModule):
    """A regression, with a scheduler, and metrics over workers. `own` is logged without sync_dist."""

    def __init__(self, rate: float = 0.02) -> None:
        super().__init__()
        self.rate = rate
        self.net = network()
        self.seen: list[list[float]] = []

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        batch = batch[0] if len(batch) == 1 else batch  # of a CombinedLoader
        self.seen.append(batch[0][:, 0].tolist())
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.log("train", loss)
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.log("val", loss, sync_dist=True, batch_size=len(batch[0]))
        self.log("rank", float(self.global_rank), sync_dist=True, batch_size=len(batch[0]))
        self.log("sum", 1.0, sync_dist=True, reduce_fx="sum")
        # Gets better on rank 0, and worse on rank 1.
        self.log("own", self.current_epoch * (2.0 * self.global_rank - 1.0), batch_size=len(batch[0]))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.rate, fused=True)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


def trainer(root: Path, strategy: Any, **options: Any) -> pl.Trainer:
    return pl.Trainer(
        **{"strategy": strategy, "accelerator": "cpu", "default_root_dir": str(root), "max_epochs": 3} | options,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def fit(root: Path, batch: int = 4) -> dict[str, Any]:
    """Validation, a scheduler, clipping, accumulation, checkpoints, loggers; every rank has a directory of its own."""
    own = root / f"rank-{ps_worker.connect(mode='single').rank}"
    checkpoint, logger = ModelCheckpoint(monitor="val", save_top_k=1), CSVLogger(str(own))
    watched = LearningRateMonitor("step")
    clipping = {"gradient_clip_val": 0.5, "accumulate_grad_batches": 2}
    made = trainer(own, "ps", callbacks=[checkpoint, watched], logger=logger, log_every_n_steps=1, **clipping)
    net, (train, validate) = Net(), loaders(batch)
    made.fit(net, train, validate)
    session = made.strategy.session
    before, metrics = weights(net), {name: float(value) for name, value in made.callback_metrics.items()}
    tested = made.validate(net, validate, verbose=False)
    return {
        "weights": before,
        "metrics": metrics,
        "validated": tested[0],
        "whole": validation_loss(net),
        "rates": [group["lr"] for optimizer in made.optimizers for group in optimizer.param_groups],
        "monitored": watched.lrs,
        "place": (made.global_rank, made.world_size, made.is_global_zero, rank_zero_only.rank, session.rank),
        "steps": (made.global_step, session.clock),
        "total": scrape(session.metrics_address)["ps_worker_total_steps"],
        "best": checkpoint.best_model_path,
        "batches": len(net.seen),
    }


@torch.no_grad()
def validation_loss(net: Net) -> float:
    """Over all samples of the validation data."""
    x, y = numbers()
    return nn.functional.mse_loss(net.net(x[:16]), y[:16]).item()


def in_order(loader: DataLoader[Any], batch: int) -> DataLoader[Any]:
    """This worker's share, so that batches of two workers make one of twice the size."""
    rank, count = int(os.environ["PS_RANK"]), int(os.environ["PS_WORLD_SIZE"])
    share: Any = DistributedSampler(loader.dataset, count, rank, shuffle=False)  # type: ignore[arg-type]
    return DataLoader(loader.dataset, batch, sampler=share)


def compare(root: Path, batch: int, strategy: Any, **options: Any) -> list[list[float]]:
    """The weights after three epochs; strategy: a name. The data keeps its order, where Lightning would shuffle it."""
    net, (train, validate) = Net(), loaders(batch)
    train = in_order(train, batch)
    trainer(root, strategy, logger=False, enable_checkpointing=False, **options).fit(net, train, validate)
    return weights(net)


def beside_plain(root: Path) -> tuple[list[list[float]], list[list[float]]]:
    """The weights of Lightning alone and of one worker, in one process."""
    return compare(root, 4, "auto", gradient_clip_val=0.5), compare(root, 4, "ps", gradient_clip_val=0.5)


def resume(root: Path, session_job: str) -> tuple[Any, Any]:
    """The weights of 4 epochs in one go, and of 2 and 2 with a checkpoint between them; data is shuffled."""

    def run(job: str, epochs: int, path: str | None = None) -> Any:
        session = ps_worker.connect(job=f"{session_job}-{job}")
        keep = ModelCheckpoint(dirpath=root / job, save_last=True)
        made = trainer(root, ParameterServerStrategy(session), max_epochs=epochs, logger=False, callbacks=[keep])
        net, (train, validate) = Net(), loaders(4, shuffle=True)
        made.fit(net, train, validate, ckpt_path=path, weights_only=False)
        session.barrier()  # the file is there
        session.close()
        return weights(net), net.seen

    whole, seen = run("whole", 4)
    run("first", 2)
    resumed, rest = run("rest", 4, str(root / "first" / "last.ckpt"))
    assert rest == seen[-len(rest) :], "another order of the data"
    return whole, resumed


class Warmed(Net):
    """With a schedule over all steps, as many recipes have it: Lightning makes the loaders before the optimizers."""

    def configure_optimizers(self) -> Any:
        self.estimate = self.trainer.estimated_stepping_batches
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.rate)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.02, total_steps=int(self.estimate))
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def estimate(root: Path, divides: bool, combined: bool) -> tuple[float, int, list[float]]:
    """The number of steps that the schedule has, that of the steps made, and the samples.

    divides: whether Lightning divides the data; combined: whether the loader is one that Lightning changes
    """
    net, (train, _) = Warmed(), loaders(4)
    options: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "max_epochs": 1}
    made = trainer(root, "ps", use_distributed_sampler=divides, **options)
    made.fit(net, CombinedLoader([train], "min_size") if combined else train)
    return net.estimate, made.global_step, sorted(sample for batch in net.seen for sample in batch)


def stop_early(root: Path) -> int:
    """After how many epochs it ends, where rank 1 alone finds that nothing gets better."""
    stopping = EarlyStopping("own", patience=1)
    made = trainer(root, "ps", max_epochs=8, logger=False, enable_checkpointing=False, callbacks=[stopping])
    net, (train, validate) = Net(), loaders(4)
    made.fit(net, train, validate)
    return made.current_epoch


class Apart(pl.Callback):
    """Has rank 1 make its last steps once rank 0 has made all of its own, if it may, and then lets both save.

    own: this worker's weights when it is about to save
    """

    def __init__(self, session: Any) -> None:
        self._session, self.own = session, dict[str, torch.Tensor]()

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, index: int) -> None:
        if index == 2:
            self._session.mean(1.0)

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        if trainer.num_training_batches == 2:
            self._session.mean(1.0)
        self._session.mean(1.0)
        self.own = {name: value.clone() for name, value in module.state_dict().items()}


def save_apart(root: Path) -> dict[str, bool]:
    """What ModelCheckpoint saves on rank 0 after two steps, when rank 1 has made four if it may."""
    session = ps_worker.connect()
    is_local = session.mode.startswith("local")
    strategy = ParameterServerStrategy(session, **({"outer": {"warm_up": 0}} if is_local else {}))
    keep, apart = ModelCheckpoint(dirpath=root, filename="saved"), Apart(session)
    steps = 2 if session.rank == 0 or is_local else 4
    made = trainer(root, strategy, max_epochs=1, limit_train_batches=steps, logger=False, callbacks=[apart, keep])
    net = Net()
    made.fit(net, loaders(4)[0])
    found = {}
    if session.is_main:
        saved = torch.load(root / "saved.ckpt", weights_only=False)
        weights = session.global_weights(net)
        found["the job's"] = all(torch.equal(saved["state_dict"][name], weights[name]) for name in weights)
        found["not its own"] = not all(torch.equal(saved["state_dict"][name], apart.own[name]) for name in weights)
        [state] = saved["optimizer_states"]
        found["the optimizer's"] = len(state["state"]) == len(weights)
    session.mean(1.0)
    return found


class Gan(pl.LightningModule):
    """Two optimizers that the module steps itself."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        torch.manual_seed(2)
        self.generator = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 3))
        self.critic = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))

    def training_step(self, batch: Any, index: int) -> None:
        of_generator, of_critic = self.optimizers()
        real = batch[0]
        loss = self.critic(self.generator(real.flip(1)).detach()).mean() - self.critic(real).mean()
        of_critic.zero_grad()
        self.manual_backward(loss)
        self.clip_gradients(of_critic, gradient_clip_val=1e9, gradient_clip_algorithm="norm")
        of_critic.step()
        if index % 2:
            self.toggle_optimizer(of_generator)
            of_generator.zero_grad()
            self.manual_backward(-self.critic(self.generator(real.flip(1))).mean())
            of_generator.step()
            self.untoggle_optimizer(of_generator)

    def configure_optimizers(self) -> Any:
        return [
            torch.optim.Adam(self.generator.parameters(), lr=0.01, fused=True),
            torch.optim.RMSprop(self.critic.parameters(), lr=0.005),
        ]


def gan(root: Path, strategy: str, batch: int = 4) -> list[list[float]]:
    net = Gan()
    trainer(root, strategy, max_epochs=2, logger=False, enable_checkpointing=False).fit(
        net, in_order(loaders(batch)[0], batch)
    )
    return weights(net)


def once_only(root: Path) -> tuple[Any, str, Any]:
    """What `validate` gives before `fit`, with all data on each worker; and how a second `fit` is refused."""
    net, (train, validate) = Net(), loaders(4)
    made = trainer(root, "ps", max_epochs=1, logger=False, enable_checkpointing=False)
    first, whole = made.validate(net, validate, verbose=False)[0], validation_loss(net)
    made.fit(net, train, validate)
    return first, refusal(lambda: made.fit(net, train, validate)), whole


def synchronised_statistics(root: Path) -> str:
    """How the Trainer's flag for them is refused."""
    net = Net()
    net.net.insert(1, nn.BatchNorm1d(8))
    made = trainer(root, "ps", max_epochs=1, logger=False, enable_checkpointing=False, sync_batchnorm=True)
    return refusal(lambda: made.fit(net, *loaders(4)))


def collectives(root: Path) -> dict[str, Any]:
    """What the strategy's collectives give; each worker gives its rank + 1."""
    strategy = ParameterServerStrategy()
    mine = torch.tensor([float(strategy.session.rank + 1)])
    alone = strategy.reduce(mine), strategy.broadcast(strategy.session.rank), strategy.all_gather(mine)
    net = Net()
    trainer(root, strategy, max_epochs=1, logger=False, enable_checkpointing=False).fit(net, loaders(4)[0])
    given = [strategy.reduce(mine, reduce_op=op).item() for op in ("mean", "avg", "sum", "max", "min", None)]
    given.append(strategy.reduce(mine, reduce_op=torch.distributed.ReduceOp.SUM).item())
    return {
        "alone": [alone[0].item(), alone[1], alone[2].item()],
        "reduced": given,
        "kept": strategy.reduce("no tensor"),
        "decided": [strategy.reduce_boolean_decision(mine.item() > 1, all=every) for every in (True, False)],
        "gathered": strategy.all_gather(mine).tolist(),
        "path": strategy.broadcast(Path(f"of-{strategy.session.rank}")),
        "refused": refusal(lambda: strategy.reduce(mine, reduce_op="product")),
    }


def fabric_loop(
    strategy: Any,
    batch: int,
    save: Path | None = None,
    epochs: int = 3,
    load: Path | None = None,
    max_norm: float = 0.5,
) -> Any:
    """The weights after some epochs with accumulation and clipping; path: where to save; load: what to go on from."""
    fabric = Fabric(strategy=strategy, accelerator="cpu")
    fabric.launch()
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, fused=True)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    model, optimizer = fabric.setup(model, optimizer)
    loader = fabric.setup_dataloaders(loaders(batch)[0])
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "epoch": 0}
    if load is not None:
        fabric.load(load, state)
    for epoch in range(state["epoch"], epochs):
        for index, (x, y) in enumerate(loader):
            accumulates = index % 2 == 0
            with fabric.no_backward_sync(model, enabled=accumulates):
                fabric.backward(nn.functional.mse_loss(model(x), y) / 2)
            if not accumulates:
                fabric.clip_gradients(model, optimizer, max_norm=max_norm)
                optimizer.step()
                optimizer.zero_grad()
        scheduler.step()
        state["epoch"] = epoch + 1
    if save is not None:
        fabric.save(save, state)
    assert fabric.all_reduce(torch.tensor(float(fabric.global_rank))).item() == (fabric.world_size - 1) / 2
    return weights(model.module)


def fabric(batch: int) -> Any:
    # A worker clips its own gradient, before the mean: nothing is clipped where that is compared with one process.
    return fabric_loop(FabricParameterServerStrategy(bucket_bytes=64), batch, max_norm=1e9)


def fabric_beside_plain() -> Any:
    return fabric_loop("auto", 4), fabric_loop(FabricParameterServerStrategy(), 4)


def fabric_resume(root: Path, job: str) -> Any:
    def run(name: str, *arguments: Any) -> Any:
        with ps_worker.connect(job=f"{job}-{name}") as session:
            return fabric_loop(FabricParameterServerStrategy(session), 4, *arguments)

    return run("whole", None, 4), (run("first", root / "two.ckpt", 2), run("rest", None, 4, root / "two.ckpt"))[1]


def fabric_save_apart(root: Path) -> dict[str, bool]:
    """What rank 0 saves after two steps, when rank 1 has made four if it may."""
    session = ps_worker.connect()
    is_local = session.mode.startswith("local")
    strategy = FabricParameterServerStrategy(session, **({"outer": {"warm_up": 0}} if is_local else {}))
    fabric = Fabric(strategy=strategy, accelerator="cpu")
    fabric.launch()
    net, frozen = network(), network()
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
    x, y = numbers()

    def step() -> None:
        fabric.backward(nn.functional.mse_loss(model(x), y))
        optimizer.step()
        optimizer.zero_grad()

    step()
    step()
    session.mean(1.0)  # rank 0 makes no more
    if not session.is_main and not is_local:
        step()
    session.mean(1.0)
    before = {name: value.clone() for name, value in net.state_dict().items()}
    fabric.save(root / "saved.ckpt", {"model": model, "frozen": frozen})  # a barrier is in it
    found = {}
    if session.is_main:
        saved = torch.load(root / "saved.ckpt", weights_only=True)
        weights = session.global_weights()
        found["the job's"] = all(torch.equal(saved["model"][name], weights[name]) for name in weights)
        found["not its own"] = not all(torch.equal(saved["model"][name], before[name]) for name in weights)
        found["another's"] = all(
            torch.equal(saved["frozen"][name], value) for name, value in frozen.state_dict().items()
        )
    session.mean(1.0)
    return found


def fabric_saves_its_own() -> bool:
    """Whether what is saved in sync is the model's own memory, and no second model on its device."""
    strategy = FabricParameterServerStrategy()
    made = Fabric(strategy=strategy, accelerator="cpu")
    made.launch()
    net = network()
    model, _ = made.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
    saved = strategy.get_module_state_dict(model.module)
    return all(saved[name].data_ptr() == value.data_ptr() for name, value in net.state_dict().items())


def fabric_refusals() -> tuple[str, str, Any]:
    """A loader before the model; a second model; and two models that the session prepared before."""
    strategy = FabricParameterServerStrategy()
    made = Fabric(strategy=strategy, accelerator="cpu")
    made.launch()
    loader_first = refusal(lambda: made.setup_dataloaders(loaders(4)[0]))
    first, second = network(), network()
    opt_first, opt_second = (torch.optim.SGD(net.parameters(), lr=0.1) for net in (first, second))
    all_four = strategy.session.prepare(first, opt_first, second, opt_second)
    first, opt_first = made.setup(all_four[0], all_four[1])
    second, opt_second = made.setup(all_four[2], all_four[3])
    x, y = next(iter(made.setup_dataloaders(loaders(4)[0])))
    for net, optimizer in ((first, opt_first), (second, opt_second)):
        made.backward(nn.functional.mse_loss(net(x), y))
        optimizer.step()
    third = network()
    once_more = refusal(lambda: made.setup(third, torch.optim.SGD(third.parameters(), lr=0.1)))
    return loader_first, once_more, (weights(first.module), weights(network()))


def refused_elastic() -> list[str]:
    """What the strategies say of an elastic job."""
    made = ParameterServerStrategy, FabricParameterServerStrategy
    return [refusal(lambda: each(ps_worker.connect(elastic=True))) for each in made]  # noqa: B023
