"""Groups of processes that train, each in a process of its own: what they begin and end with."""

from __future__ import annotations

import inspect
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from ps_server.storage.checkpoints import CheckpointStore
from tests.scripts.train_in_group import Options, batch, clip_by_data, loss, make_model, make_optimizer
from tests.tools.cluster import Cluster, until
from tests.tools.forkserver import Forked, Nursery

WAIT_SECONDS = 180
LEASE = 30.0  # a group loses its place for the reason of the test, and for no other

Tensors = dict[str, torch.Tensor]


class Groups:
    """The processes of a job, each group as a torchrun of its own starts it; ended with the `with`.

    options: go to the script that declares them
    only:    this group; None: all
    told:    their environment says how many members a group has
    variables: more of their environment
    """

    def __init__(
        self,
        nursery: Nursery,
        address: str,
        job: str,
        directory: Path,
        options: Any,
        only: int | None = None,
        told: bool = False,
        variables: dict[str, str] | None = None,
    ) -> None:
        self.directory = directory
        directory.mkdir(exist_ok=True)
        script, members = Path(inspect.getfile(type(options))), options.members
        groups = range(options.groups) if only is None else [only]
        self.each = [(group, member) for group in groups for member in range(max(1, members))]
        self.processes: dict[tuple[int, int], Forked] = {
            (group, member): nursery.run(
                script,
                [directory, group, member, json.dumps(asdict(options))],
                directory / f"log-{group}-{member}",
                PS_SERVER=address,
                JOB=job,
                PS_BUSY_SECONDS="0",  # no process that beats for the member: it would take 40 ms of a core
                **({"TORCHELASTIC_RUN_ID": f"{directory}-{group}"} if members else {}),
                **({"RANK": str(member), "WORLD_SIZE": str(members)} if members else {}),
                **({"PS_GROUP_SIZE": str(members)} if told else {}),
                **(variables or {}),
            )
            for group, member in self.each
        }

    def __enter__(self) -> Groups:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes.values():
            process.kill()

    def are_held(self, clock: int, groups: tuple[int, ...] = (0, 1)) -> bool:
        """Whether the processes of groups stand at a clock."""
        own = [each for each in self.each if each[0] in groups]
        assert all(self.processes[each].poll() is None for each in own), self.logs()
        return all((self.directory / f"held-{clock}-{10 * group + member}").exists() for group, member in own)

    def let_go(self, clock: int) -> None:
        (self.directory / f"go-{clock}").touch()

    def ended(self, *groups: int) -> list[Tensors]:
        """What each process of these groups ended with; without names, of all."""
        own = [each for each in self.each if not groups or each[0] in groups]
        codes = [self.processes[each].wait(WAIT_SECONDS) for each in own]
        assert codes == [0] * len(own), self.logs()
        return self._left("end", own)

    def begun_and_ended(self) -> tuple[Tensors, Tensors]:
        """What the processes began with, and what they ended with: the same in all."""
        ends, begins = self.ended(), self._left("begin", self.each)
        assert all(same(each, begins[0]) for each in begins)
        assert all(same(each, ends[0]) for each in ends)
        return begins[0], ends[0]

    def logs(self) -> str:
        return "\n".join((self.directory / f"log-{g}-{m}").read_text()[-2000:] for g, m in self.each)

    def _left(self, when: str, own: list[tuple[int, int]]) -> list[Tensors]:
        return [load_file(self.directory / f"{when}-{group}-{member}.safetensors") for group, member in own]


def begun_and_ended(nursery: Nursery, address: str, job: str, directory: Path, options: Any) -> tuple[Tensors, Tensors]:
    """What the processes of a job begin with, and what they end with: the same in all."""
    with Groups(nursery, address, job, directory, options, told=options.members > 0) as groups:
        return groups.begun_and_ended()


def one_process(options: Options) -> Tensors:
    """What one process ends with on the combined batches, without servers."""
    model = make_model()
    optimizer = make_optimizer(options.optimizer, model)
    for step in range(options.steps):
        is_left_out = step in (options.poison, options.unassigned)
        if not is_left_out:
            loss(model, *batch(step, options.learns)).backward()
        if options.clip:
            clip_by_data(model, options.clip)
        if step == options.scaled:
            for parameter in model.parameters():
                parameter.data.mul_(0.5)
        if not is_left_out:
            optimizer.step()
        optimizer.zero_grad()
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def mean_loss(weights: Tensors) -> float:
    """The loss of weights on samples that no step has seen."""
    model = make_model()
    model.load_state_dict({name: weights[name] for name in model.state_dict()})
    with torch.no_grad():
        return sum(float(loss(model, *batch(9000 + step, learns=True))) for step in range(20)) / 20


def relative_distance(found: Tensors, expected: Tensors, least: float = 0.0) -> float:
    """The largest difference, as a part of the largest element of its tensor. A clock in `found` is left out.

    least: what the largest element counts as at least. In the middle of a training a bias of one element may be near 0
    """
    assert found.keys() - {"clock"} == expected.keys()
    return max(
        float((found[name] - each).abs().max()) / (max(least, float(each.abs().max())) or 1.0)
        for name, each in expected.items()
    )


def same(found: Tensors, expected: Tensors) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


def begun(cluster: Cluster, job: str) -> set[int | None]:
    """The clocks of the checkpoints that the shards have begun last."""
    captures = [shard.jobs()[job].snapshot_task for shard in cluster.shards]
    return {capture.clock if capture is not None else None for capture in captures}


def let_go_once_begun(
    groups: Groups, cluster: Cluster, job: str, clock: int, due: int, which: tuple[int, ...] = (0, 1)
) -> None:
    """Lets groups go that stand at a clock, once the shards have begun the checkpoint that is due at another one."""
    until(lambda: groups.are_held(clock, which), "the step before a checkpoint")
    until(lambda: begun(cluster, job) == {due}, "the beginning of the checkpoint")
    groups.let_go(clock)


def last(store: CheckpointStore, job: str) -> int:
    names = store.names(job)
    return store.manifest(job, names[-1]).clock if names else 0


def log_of(directory: Path, each: tuple[int, int]) -> str:
    """The random number that a process ended with."""
    lines = (directory / f"log-{each[0]}-{each[1]}").read_text().splitlines()
    return next(line for line in lines if line.startswith("random"))
