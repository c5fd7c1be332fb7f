"""What workers do in the tests of Hugging Face's Trainer and of Accelerate. Each function is one worker's script."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from accelerate import Accelerator
from huggingface_hub import PyTorchModelHubMixin
from safetensors.torch import load_file
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

import ps_worker.accelerate
from ps_worker.huggingface import OnServers, PsTrainer, connect
from tests.scripts.models import refusal, weights
from tests.tools.cluster import scrape

logging.getLogger("transformers").setLevel(logging.ERROR)
warnings.filterwarnings("ignore")

LENGTH, SAMPLES = 8, 32
Weights = list[list[float]]


def data() -> list[dict[str, torch.Tensor]]:
    """SAMPLES sequences of LENGTH tokens, the same on all workers."""
    draw = torch.Generator().manual_seed(3)
    found = [torch.randint(0, 16, (LENGTH,), generator=draw) for _ in range(SAMPLES)]
    return [{"input_ids": ids, "labels": ids} for ids in found]


def gpt(dropout: float = 0.0) -> GPT2LMHeadModel:
    """Two layers, random."""
    torch.manual_seed(1)
    shape = {"vocab_size": 16, "n_positions": LENGTH, "n_embd": 16, "n_layer": 2, "n_head": 2}
    drops = {"resid_pdrop": dropout, "embd_pdrop": dropout, "attn_pdrop": dropout}
    return GPT2LMHeadModel(GPT2Config(**shape, **drops, bos_token_id=0, eos_token_id=0, loss_type="ForCausalLM"))


def arguments(directory: Path, **more: Any) -> TrainingArguments:
    options = {
        "output_dir": str(directory),
        "per_device_train_batch_size": 2,
        "num_train_epochs": 2,
        "learning_rate": 1e-2,
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "save_strategy": "no",
        "optim": "adamw_torch_fused",  # what the shards run too
        "train_sampling_strategy": "sequential",
    }
    return TrainingArguments(**(options | more))


class Watch(TrainerCallback):
    """Which of the Trainer's events a logger would act on; and an average of the weights, as users make one."""

    def __init__(self, model: nn.Module) -> None:
        self.reported = 0
        self.average = AveragedModel(model)

    def on_log(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self.reported += state.is_world_process_zero

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **more: Any) -> None:
        self.average.update_parameters(model)


def train(root: Path) -> dict[str, Any]:
    """Clipping, warm-up, accumulation, evaluation, checkpoints, the best model at the end, a callback."""
    session = connect()
    args = arguments(
        root,
        gradient_accumulation_steps=2,
        max_grad_norm=0.5,
        warmup_steps=2,
        lr_scheduler_type="linear",
        logging_steps=2,
        eval_strategy="steps",
        eval_steps=4,
        save_strategy="steps",
        save_steps=4,
        load_best_model_at_end=True,
        metric_for_best_model="loss",
        train_sampling_strategy="random",
    )
    model, samples = gpt(), data()
    watch = Watch(model)
    trainer = PsTrainer(
        model=model, args=args, train_dataset=samples, eval_dataset=samples[:7], session=session, callbacks=[watch]
    )
    trainer.train()
    again = trainer.evaluate()["eval_loss"]
    whole = Trainer(model=model, args=args, eval_dataset=samples[:7]).evaluate()["eval_loss"]
    return {
        "weights": weights(model),
        "steps": (trainer.state.global_step, session.clock),
        "total": scrape(session.metrics_address)["ps_worker_total_steps"],
        "evaluated": [line["eval_loss"] for line in trainer.state.log_history if "eval_loss" in line],
        "losses": [line["loss"] for line in trainer.state.log_history if "loss" in line],
        "whole": whole,
        "place": (args.process_index, args.should_save, args.should_log, trainer.accelerator.is_main_process),
        "world": (args.world_size, args.n_gpu, str(trainer.accelerator.distributed_type)),
        "reported": watch.reported,
        "average": weights(watch.average.module),
        "again": again,
        "rate": trainer.lr_scheduler.get_last_lr()[0],
    }


def write_apart(root: Path) -> None:
    """Each rank has a directory of its own to write checkpoints and logs to."""
    session = connect()
    args = arguments(root / f"rank-{session.rank}", num_train_epochs=1, save_strategy="steps", save_steps=4)
    trainer = PsTrainer(model=gpt(), args=args, train_dataset=data(), session=session)
    trainer.train()
    trainer.save_model()
    trainer.save_state()
    trainer.log_metrics("train", {"loss": 1.0})
    trainer.save_metrics("train", {"loss": 1.0})


class SaveAt(TrainerCallback):
    """Saves on rank 0 after its second step, while rank 1 has made four: how the file and the model compare."""

    def __init__(self, session: Any, folder: Path) -> None:
        self.session, self.folder, self.found = session, folder, dict[str, bool]()
        self.trainer: Any = None

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **more: Any) -> None:
        if state.global_step == 2:
            self.session.mean(1.0)  # rank 0 makes no more for now
        if state.global_step != (2 if self.session.is_main else self.ahead):
            return
        self.session.mean(1.0)  # rank 1 has made its steps
        if self.session.is_main:
            before = {name: value.clone() for name, value in model.state_dict().items()}
            self.trainer.save_model(str(self.folder / "saved"))
            saved = load_file(self.folder / "saved" / "model.safetensors")
            weights = self.session.global_weights(model)
            self.found["the job's"] = all(torch.equal(saved[name], weights[name]) for name in saved)
            self.found["not its own"] = not all(torch.equal(saved[name], before[name]) for name in saved)
            self.found["tied once"] = weights.keys() - saved.keys() == {"lm_head.weight"}
        self.session.mean(1.0)  # it is saved

    @property
    def ahead(self) -> int:
        return 2 if self.session.mode.startswith("local") else 4


def save_apart(root: Path) -> dict[str, bool]:
    """What rank 0 saves in the middle of a pass."""
    session = connect()
    saving = SaveAt(session, root)
    args = arguments(root, num_train_epochs=1)
    trainer = PsTrainer(
        *(gpt(), args),
        train_dataset=data(),
        session=session,
        callbacks=[saving],
        prepare_options={"outer": {"warm_up": 0}} if session.mode.startswith("local") else {},
    )
    saving.trainer = trainer
    trainer.train()
    return saving.found


def compare(root: Path, batch: int, kind: str, **more: Any) -> Weights:
    """The weights after two epochs; kind: "plain" is the Trainer alone."""
    model, session = gpt(), connect()
    args = arguments(root, per_device_train_batch_size=batch, max_grad_norm=0.0, **more)
    trained: Any = {"model": model, "args": args, "train_dataset": data()}
    (Trainer(**trained) if kind == "plain" else PsTrainer(**trained, session=session)).train()
    return weights(model)


def beside_plain(root: Path) -> tuple[Weights, Weights]:
    """The weights of the Trainer alone and of one worker."""
    return compare(root, 4, "plain"), compare(root, 4, "served")


def resume(root: Path, job: str) -> tuple[Weights, Weights]:
    """The weights of 16 steps in one go, and from a checkpoint of step 6, within a pass; with dropout and shuffle."""

    def run(name: str, **options: Any) -> Weights:
        model = gpt(dropout=0.2)
        place = {"rank": int(os.environ["PS_RANK"]), "world_size": int(os.environ["PS_WORLD_SIZE"])}
        with connect(job=f"{job}-{name}", **place) as session:
            args = arguments(root / name, save_strategy="steps", save_steps=6, train_sampling_strategy="random")
            # Each worker draws from random states of its own.
            torch.manual_seed(session.rank)
            trainer = PsTrainer(model=model, args=args, train_dataset=data(), session=session)
            torch.manual_seed(10 + session.rank)
            trainer.train(**options)
            session.barrier()
        return weights(model)

    whole = run("whole")
    return whole, run("rest", resume_from_checkpoint=str(root / "whole" / "checkpoint-6"))


class Doubled(Trainer):  # type: ignore[misc]
    """A user's own Trainer."""

    def compute_loss(self, *given: Any, return_outputs: bool = False, **more: Any) -> Any:
        loss, outputs = super().compute_loss(*given, return_outputs=True, **more)
        return (2 * loss, outputs) if return_outputs else 2 * loss


class DoubledOnServers(OnServers, Doubled):
    """The same on servers."""


def metrics(root: Path) -> dict[str, Any]:
    """Metrics of predictions, in a user's own Trainer."""
    session, samples = connect(), data()
    counted: list[int] = []

    def right(found: Any) -> dict[str, float]:
        counted.append(len(found.predictions))
        return {"accuracy": float((found.predictions.argmax(-1) == found.label_ids).mean()), "rank": session.rank}

    args = arguments(root, num_train_epochs=1, eval_strategy="epoch")
    given: Any = {"train_dataset": samples, "eval_dataset": samples[:6], "compute_metrics": right}
    trainer = DoubledOnServers(model=gpt(), args=args, session=session, **given)
    trainer.train()
    last = [line for line in trainer.state.log_history if "eval_accuracy" in line][-1]
    predicted = trainer.predict(samples[:5]).predictions
    return {"last": (last["eval_accuracy"], last["eval_rank"]), "counted": counted, "predicted": len(predicted)}


class Stream(IterableDataset[dict[str, torch.Tensor]]):
    """Every world_size-th sample, without a length."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        return iter(data()[self.rank :: self.world_size])


def stream(root: Path) -> tuple[Weights, int, float]:
    """A dataset without a length, to train on and to evaluate."""
    session, model = connect(), gpt()
    args = arguments(root, max_steps=6, eval_strategy="steps", eval_steps=3)
    mine = Stream(session.rank, session.world_size)
    trainer = PsTrainer(model=model, args=args, train_dataset=mine, eval_dataset=Stream(0, 4), session=session)
    trainer.train()
    found = [line["eval_loss"] for line in trainer.state.log_history if "eval_loss" in line]
    return weights(model), session.clock, found[-1]


def refused(root: Path) -> str:
    """A sampler that cannot be divided."""
    args = arguments(root, train_sampling_strategy="group_by_length")
    trainer = PsTrainer(model=gpt(), args=args, train_dataset=data(), session=connect())
    return refusal(trainer.train)


# -- Accelerate ------------------------------------------------------------------------------------------------------


def numbers() -> TensorDataset:
    draw = torch.Generator().manual_seed(3)
    x = torch.randn(SAMPLES, 3, generator=draw)
    return TensorDataset(x, x.sum(1, keepdim=True))


def loop(accelerator: Accelerator, session: Any, batch: int, clip: float, passes: int = 3) -> tuple[Weights, Any]:
    """Passes with accumulation and clipping; what is trained with is prepared by the session if there is one."""
    torch.manual_seed(1)
    model: Any = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.02, fused=True)
    loader: Any = DataLoader(numbers(), batch)
    if session is not None:
        model, optimizer, loader = session.prepare(model, optimizer, loader)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.5)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    for _ in range(passes):
        for x, y in loader:
            with accelerator.accumulate(model):
                accelerator.backward(nn.functional.mse_loss(model(x), y))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), clip)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
    return weights(accelerator.unwrap_model(model)), optimizer


def accelerated(batch: int, clip: float = 0.5) -> dict[str, Any]:
    """The loop on servers, and how Accelerate's own objects are refused."""
    session = ps_worker.accelerate.connect()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    found, optimizer = loop(accelerator, session, batch, clip)
    return {
        "weights": found,
        "clock": session.clock,
        "rate": optimizer.param_groups[0]["lr"],
        "place": (accelerator.process_index, accelerator.is_main_process, accelerator.num_processes),
        "refused": refusal(lambda: session.prepare(nn.Linear(1, 1), optimizer)),
    }


def accelerated_alone(batch: int, clip: float = 0.5) -> Weights:
    """Accelerate without a session."""
    return loop(Accelerator(cpu=True, gradient_accumulation_steps=2), None, batch, clip)[0]


def accelerated_beside_plain() -> tuple[Weights, Weights]:
    """The weights of Accelerate alone and of one worker."""
    return accelerated_alone(4), accelerated(4)["weights"]


class Hubbed(nn.Sequential, PyTorchModelHubMixin):
    """A model that the Hub's own code saves and loads."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))


def saved_by_others(folder: str) -> dict[str, bool]:
    """Whether what Accelerate and the Hub save of a prepared model has all of it, and can be loaded."""
    session = ps_worker.accelerate.connect()
    accelerator = Accelerator(cpu=True)
    net = Hubbed()
    model, optimizer = session.prepare(net, torch.optim.AdamW(net.parameters()))
    model, optimizer = accelerator.prepare(model, optimizer)

    def step() -> None:
        model(torch.ones(4, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    expected = {name: value.clone() for name, value in net.state_dict().items()}

    def equal(state: Mapping[str, torch.Tensor]) -> bool:
        return state.keys() == expected.keys() and all(torch.equal(state[name], expected[name]) for name in state)

    accelerator.save_state(f"{folder}/state")
    accelerator.save_model(model, f"{folder}/model")
    net.save_pretrained(f"{folder}/hub")
    found = {place: equal(load_file(f"{folder}/{place}/model.safetensors")) for place in ("state", "model", "hub")}
    found["hub is loaded"] = equal(Hubbed.from_pretrained(f"{folder}/hub").state_dict())
    step()
    found["changed"] = not equal(net.state_dict())
    accelerator.load_state(f"{folder}/state")
    found["state is loaded"] = equal(net.state_dict())
    return found
