"""What a user's script does under a launcher, with each framework: two workers, in sync and in async.

python tests/scripts/train_with_frameworks.py DIRECTORY KIND ...

KIND: lightning, trainer, accelerate: with this package's integrations. plain-trainer, plain-accelerate: the frameworks
as they are, under torchrun, with a model and an optimizer that a session has prepared before; sync only.
Leaves the weights of before and after, and the rank, as DIRECTORY/KIND-MODE-RANK.json.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import ps_worker

HERE = {"rank": os.environ.get("RANK", os.environ.get("PS_RANK")), "world_size": "2"}


def connect(job: str, mode: str, with_accelerate: bool = True) -> Any:
    """A session of this kind's own job; the launcher's variables tell the first one the rank."""
    place = {} if "RANK" in os.environ or "PS_RANK" in os.environ else {k: int(v or 0) for k, v in HERE.items()}
    if with_accelerate:
        from ps_worker.accelerate import connect

        return connect(mode=mode, job=job, **place)
    return ps_worker.connect(mode=mode, job=job, **place)


def lightning(mode: str, directory: Path, session: Any) -> tuple[Any, Any, int]:
    import lightning_jobs as jobs

    net = jobs.Net()
    before = jobs.weights(net)
    made = jobs.trainer(directory, jobs.ParameterServerStrategy(session), logger=False, enable_checkpointing=False)
    train, validate = jobs.loaders(4)
    made.fit(net, train, validate)
    assert made.callback_metrics["rank"] == 0.5
    return before, jobs.weights(net), made.global_rank


def trainer(mode: str, directory: Path, session: Any) -> tuple[Any, Any, int]:
    import huggingface_jobs as jobs

    model = jobs.gpt()
    before = jobs.weights(model)
    made = jobs.PsTrainer(model=model, args=jobs.arguments(directory), train_dataset=jobs.data(), session=session)
    made.train()
    return before, jobs.weights(model), made.args.process_index


def accelerate(mode: str, directory: Path, session: Any) -> tuple[Any, Any, int]:
    import huggingface_jobs as jobs

    before, _ = jobs.loop(jobs.Accelerator(cpu=True), None, 4, 1e9, passes=0)
    accelerator = jobs.Accelerator(cpu=True, gradient_accumulation_steps=2)
    return before, jobs.loop(accelerator, session, 4, 1e9)[0], accelerator.process_index


def plain_trainer(mode: str, directory: Path, session: Any) -> tuple[Any, Any, int]:
    import huggingface_jobs as jobs

    model: Any = jobs.gpt()
    before = jobs.weights(model)
    args = jobs.arguments(directory, max_grad_norm=0.0, lr_scheduler_type="constant")
    model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    made = jobs.Trainer(model=model, args=args, train_dataset=jobs.data(), optimizers=(optimizer, None))
    made.train()
    assert made.args.world_size == 2, "torchrun's"
    with pytest.raises(ps_worker.PSError, match=r"before Accelerator\(\) and TrainingArguments\(\)"):
        jobs.PsTrainer(model=model, args=args, session=session)
    return before, jobs.weights(model), made.args.process_index


def plain_accelerate(mode: str, directory: Path, session: Any) -> tuple[Any, Any, int]:
    import huggingface_jobs as jobs

    accelerator = jobs.Accelerator(cpu=True)
    before, _ = jobs.loop(accelerator, None, 4, 1e9, passes=0)
    return before, jobs.loop(accelerator, session, 4, 1e9)[0], accelerator.process_index


def main() -> None:
    """Trains in each mode with each framework."""
    torch.set_num_threads(1)
    directory, kinds = Path(sys.argv[1]), sys.argv[2:]
    for kind in kinds:
        plain = kind.startswith("plain")
        for mode in ("sync",) if plain else ("sync", "async"):
            with connect(f"{os.environ['PS_JOB']}-{kind}-{mode}", mode, not plain) as session:
                before, after, rank = globals()[kind.replace("-", "_")](mode, directory / f"{kind}-{mode}", session)
                session.barrier()  # in async the last pull of one worker may come before the last push of the other
                found = {"before": before, "after": after, "rank": rank, "session": session.rank}
                (directory / f"{kind}-{mode}-{session.rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
