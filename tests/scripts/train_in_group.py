"""One member of a group that trains a model which fully_shard has cut: uneven shards, and empty ones.

python tests/scripts/train_in_group.py DIRECTORY GROUP MEMBER OPTIONS

OPTIONS is JSON: see `Options`. Leaves the whole weights that it ended with in DIRECTORY, and its errors.
"""

from __future__ import annotations

import json
import math
import os
import random
import sys
from collections import Counter
from collections.abc import Callable
from concurrent.futures import wait
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

import ps_torch
import ps_worker.group
from ps_torch import InvalidRequest, LimitExceeded, NonFiniteGradient, PSError, Session
from ps_worker.cluster import own_membership
from tests.scripts.train_with_state import Noisy, hold
from tests.tools.cluster import until

ROWS = 16
LOST_STEP = 3
BUCKET_BYTES = 64
HEARTBEATS_PER_LEASE = 30


@dataclass(frozen=True)
class Options:
    """How it trains.

    alone:      plain FSDP2, without servers
    micro:      backwards in a step
    switched:   of these the group reduces the last one alone: by torch's "switch", or by "switch and no_sync" together
    clip:       the norm that gradients are clipped to by way of `.data`, where it is not 0
    poison:     the clock before which a gradient of member 1 of group 0 is `poison_value`
    non_finite: as of prepare
    noisy:      trains with a loader, dropout, noise and a schedule, which a checkpoint has to bring back
    holds:      the clocks at which it waits
    astray:     each member takes its own number for the group's
    loses:      "before" or "after": the place of member 1 of the last group is lost for it before or after it pushes
                step 3. "end": that of member 0, before it ends that step
    empty:      the model is so small that member 1 holds nothing of it
    unassigned: the clock before which member 1 of group 0 sets weights that the servers refuse
    mode:       as of connect
    connected:  more that goes to connect
    prepared:   more that goes to prepare
    learns:     there is something to learn in the data
    slow:       the clock at which group 1 waits, and no other
    scaled:     the clock before which all weights are made smaller, by all groups
    leaves:     the clocks at which it leaves its weights
    meets:      the clock at which it meets all others in a barrier
    refreshes:  the clock at which it fetches the weights
    part_ways:  after its steps member 0 fetches the weights, and the others meet in a barrier
    late:       member 1 comes late to a call of all members, once it is let go
    given:      its gradients are `given_gradient`s, whatever the weights are. Those of so many last steps are zeros; 0:
                its gradients are its own
    baseless:   the clock at which member 1 of group 0 has lost the base of its round
    interrupted: the clock at which Ctrl-C comes to member 0 in a step that the others are in still. It goes on with the
                next one, which fails for all. One more is the last; in local:H/F there is none
    cut_short:  "waiting" or "between": after its steps Ctrl-C comes to member 0 in a call of all members, in the first
                of two collectives or between them. It makes the call once more
    unpushed:   the clock after which member 1 of group 0 fails before it has pushed anything
    frozen:     the second layer is frozen, and the model has a buffer that counts its steps
    servers:    wherever it leaves its weights it leaves those of the servers, too, and the number of rounds
    passes:     over the data, where it trains with a loader
    short:      the steps of group 0, if it has fewer than the others; 0: it has not
    absent:     member 1 does not come to prepare
    norm:       the norm that DTensors of gradients are clipped to, where it is not 0
    reduced:    the type in which `fully_shard` reduces gradients of layers that compute in bfloat16; empty: none does
    recomputes: layers compute their activations once more, in backward
    compiled:   layers are compiled
    drafts:     counts the buckets that leave during backward
    """

    groups: int = 2
    members: int = 2
    optimizer: str = "AdamW"
    steps: int = 8
    alone: bool = False
    micro: int = 1
    switched: str = ""
    clip: float = 0.0
    poison: int = -1
    non_finite: str = "refuse"
    noisy: bool = False
    holds: list[int] = field(default_factory=list)
    astray: bool = False
    loses: str = ""
    empty: bool = False
    unassigned: int = -1
    mode: str = "sync"
    connected: dict[str, Any] = field(default_factory=dict)
    prepared: dict[str, Any] = field(default_factory=dict)
    learns: bool = False
    slow: int = -1
    scaled: int = -1
    unpushed: int = -1
    interrupted: int = -1
    poison_value: float = math.nan
    leaves: list[int] = field(default_factory=list)
    meets: int = -1
    refreshes: int = -1
    part_ways: bool = False
    late: bool = False
    baseless: int = -1
    given: int = 0
    cut_short: str = ""
    frozen: bool = False
    servers: bool = False
    passes: int = 2
    short: int = 0
    absent: bool = False
    norm: float = 0.0
    reduced: str = ""
    recomputes: bool = False
    compiled: bool = False
    drafts: bool = False


def make_model(noisy: bool = False, frozen: bool = False) -> nn.Sequential:
    """A model of which two members hold 5 = 3 + 2 rows, 3 = 2 + 1 and 1 = 1 + 0. frozen: the second layer is"""
    torch.manual_seed(0)
    layers = [nn.Linear(4, 5), nn.Dropout(0.3) if noisy else nn.Tanh(), nn.Linear(5, 3), nn.Tanh(), nn.Linear(3, 1)]
    layers[2].requires_grad_(not frozen)
    return nn.Sequential(*layers)


def make_empty() -> nn.Sequential:
    """A model of which member 0 holds all: it has 1 row."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 1))


def make_optimizer(name: str, model: nn.Module, frozen: bool = False) -> torch.optim.Optimizer:
    """frozen: what is frozen at first is never trained"""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad or not frozen]
    if name == "SGD":
        return torch.optim.SGD(trained, lr=0.05, momentum=0.9)
    if name == "plain SGD":
        return torch.optim.SGD(trained, lr=0.05)
    if name != "AdamW":
        made: torch.optim.Optimizer = getattr(torch.optim, name.removeprefix("fused "))(
            trained, **({"fused": True} if name.startswith("fused ") else {})
        )
        return made
    return torch.optim.AdamW(trained, lr=1e-2, weight_decay=0.1)


def batch(step: int, learns: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """The samples of one step of all processes."""
    generator = torch.Generator().manual_seed(1000 + step)
    rows = torch.randn(ROWS, 4, generator=generator)
    return rows, rows.mean(1, keepdim=True) if learns else torch.randn(ROWS, 1, generator=generator)


def loss(model: nn.Module, rows: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(model(rows), wanted)


def given_gradient(options: Options, step: int, member: int, index: int, shape: torch.Size) -> torch.Tensor:
    """Returns a member's gradient of its piece of a parameter.

    The last ones are zeros, so that the residual is sent: each push of them leaves a part in 254 of it at most.
    """
    if step >= options.steps - options.given:
        return torch.zeros(shape)
    return torch.randn(shape, generator=torch.Generator().manual_seed(1000 * step + 100 * member + index))


def cut(model: nn.Module, mesh: DeviceMesh, options: Options) -> Counter[str]:
    """Cuts a model by `fully_shard`, and each layer by itself. Returns counts of what the layers do from then on."""
    counts: Counter[str] = Counter()
    policy = MixedPrecisionPolicy()
    if options.reduced:
        policy = MixedPrecisionPolicy(torch.bfloat16, getattr(torch, options.reduced), output_dtype=torch.float32)
    for layer in model.children():
        if isinstance(layer, nn.Linear):
            if options.recomputes:
                recompute(layer, counts)
            if options.compiled:
                compile_layer(layer, counts)
            fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return counts


def recompute(layer: Any, counts: Counter[str]) -> None:
    """Has a layer compute its activations once more in backward."""
    forward = layer.forward

    def counted(rows: torch.Tensor) -> Any:
        counts["forwards"] += 1
        return forward(rows)

    layer.forward = lambda rows: checkpoint(counted, rows, use_reentrant=False)


def linear(layer: nn.Linear, rows: torch.Tensor) -> torch.Tensor:
    return nn.functional.linear(rows, layer.weight, layer.bias)


def compile_layer(layer: Any, counts: Counter[str]) -> None:
    """Compiles a layer by a backend that runs its graphs as they are, and needs no compiler of C++. Its forward method
    is of this script, as torch compiles no frame of its own layers between the hooks of `fully_shard`.
    """

    def backend(graph: Any, _: Any) -> Any:
        def counted(*given: Any) -> Any:
            counts["graphs"] += 1
            return graph.forward(*given)

        return counted

    layer.forward = partial(linear, layer)
    layer.compile(backend=backend)


def clip_by_data(model: nn.Module, most: float) -> None:
    """Scales gradients as scripts do that read `.data`."""
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.data.mul_(most)


def participation_of(session: Session) -> Any:
    return session._strategy._training.participation  # type: ignore[attr-defined]


def refuse_assignments(session: Session) -> None:
    """Has what this member sets next be refused, as by servers that have no room for it."""
    connection = participation_of(session).connection
    assign = connection.assign

    def refuse(*given: Any) -> None:
        connection.assign = assign
        raise LimitExceeded("there is no room")

    connection.assign = refuse


def lose_place(session: Session, when: str, all_have_pushed: Callable[[], None]) -> None:
    """Has this member alone lose its place in its next step: before its pushes leave, or after those of all members."""
    participation = participation_of(session)
    connection = participation.connection
    push_pull, settle = connection.push_pull, connection.settle
    if when == "end":
        participation.membership._join_again(connection.place)
        return

    def cut_off() -> PSError:
        settle()
        return PSError("the weights are lost on their way")

    def losing(*given: Any, **more: Any) -> Any:
        if when == "before":
            participation.membership._join_again(connection.place)
        made = push_pull(*given, **more)
        if when == "after":
            wait([*made[0], *made[1]])  # drafts are committed by the pulls
            all_have_pushed()
            participation.membership._join_again(connection.place)
            connection.settle = cut_off  # the weights may be there: they would end the step
        return made

    if when:
        connection.push_pull = losing


def count_drafts(session: Session, counts: Counter[str]) -> None:
    """Counts the buckets that leave during backward."""
    steps = session._strategy._training._steps  # type: ignore[attr-defined]
    draft = steps._draft

    def counted(bucket: Any) -> int:
        size: int = draft(bucket)
        counts["drafts"] += size > 0
        return size

    steps._draft = counted


def fail_before_push(session: Session) -> None:
    """Has this member fail in its next step, before it has sent anything of it."""
    connection = participation_of(session).connection
    push_pull = connection.push_pull

    def failing(*given: Any, **more: Any) -> Any:
        connection.push_pull = push_pull
        raise LimitExceeded("no thread can be started")

    connection.push_pull = failing


def interrupt_next_wait(session: Session, is_over: bool = False) -> None:
    """Has Ctrl-C come while this member waits for the others, who have not come. is_over: just after, when they have"""
    group = participation_of(session).group
    usual = group._await

    def interrupted(work: Any) -> None:
        group._await = usual
        if is_over:
            usual(work)
        raise KeyboardInterrupt

    group._await = interrupted


def say_assigned(session: Session, said: Path) -> None:
    """Leaves a file where this member sends weights that its script has set."""
    connection = participation_of(session).connection
    assign = connection.assign

    def saying(*given: Any) -> None:
        said.touch()
        assign(*given)

    connection.assign = saying


def hear_of_no_other(session: Session) -> None:
    """Has this member take itself for the only worker that is left, as if it had heard of the others' end alone."""
    membership = participation_of(session).membership
    membership.roster = replace(membership.roster, ranks=(session.rank,))


def say_pushed(session: Session, said: Path) -> None:
    """Leaves a file once the shards have all that the next step of this member pushes."""
    connection = participation_of(session).connection
    push_pull = connection.push_pull

    def saying(*given: Any, **more: Any) -> Any:
        connection.push_pull = push_pull
        made = push_pull(*given, **more)
        wait([*made[0], *made[1]])  # drafts are committed by the pulls
        said.touch()
        return made

    connection.push_pull = saying


def begin_process() -> None:
    """Has this process compute in one thread, and send heartbeats often: others wait for one where a place is taken
    anew, and leases are long.
    """
    torch.set_num_threads(1)
    own_membership.HEARTBEATS_PER_LEASE = HEARTBEATS_PER_LEASE


class Member:
    """One process of a group."""

    def __init__(self, directory: Path, group: int, member: int, options: Options) -> None:
        self.directory, self.group, self.member, self.options = directory, group, member, options
        dist.init_process_group(
            "gloo", init_method=f"file://{directory}/group-{group}", rank=member, world_size=options.members
        )
        self.mesh: DeviceMesh = init_device_mesh("cpu", (options.members,))
        self.session: Session | None = None
        self.model: Any = make_empty() if options.empty else make_model(options.noisy, options.frozen)
        if group:
            nn.init.zeros_(self.model[0].weight)  # it is given group 0's
        if options.frozen:
            self.model.register_buffer("steps", torch.tensor(100.0 * group))
        self.counts = cut(self.model, self.mesh, options)
        self.optimizer: Any = make_optimizer(options.optimizer, self.model, options.frozen)

    def train(self) -> None:
        if self.options.alone:
            self.steps(None)
            self.leave_weights("end")
            return
        world, rank = self.options.groups, self.member if self.options.astray else self.group
        place = {"job": os.environ["JOB"], "rank": rank, "world_size": world}
        with ps_torch.connect(mode=self.options.mode, **place, **self.options.connected) as session:
            self.session = session
            more: dict[str, Any] = {"group": self.mesh, "bucket_bytes": BUCKET_BYTES}
            more |= {"non_finite": self.options.non_finite, **self.options.prepared}
            if self.options.absent:
                self.without_others(session, more)
                return
            if self.options.noisy:
                self.with_loader(session, more)
            else:
                self.model, self.optimizer = session.prepare(self.model, self.optimizer, **more)
                (self.directory / f"begun-{self.group}-{self.member}").touch()
                if self.options.drafts:
                    count_drafts(session, self.counts)
                self.steps(session)
                if self.options.part_ways:
                    self.part_ways(session)
                if self.options.cut_short:
                    self.gather_once_more(session)
                if self.options.late:
                    ps_worker.group.NOTICE_SECONDS = 0.1
                    if self.member:
                        hold(self.directory, self.member, self.options.steps)
                    session.global_weights()
            (self.directory / f"met-{self.group}-{self.member}").write_text(
                json.dumps(
                    [
                        session.gather([self.group, self.member]),
                        session.mean(self.member),
                        session.broadcast([self.group, self.member], source=1),
                        session.is_main,
                    ]
                )
            )
            (self.directory / f"counted-{self.group}-{self.member}").write_text(json.dumps(self.counts))
            self.leave_weights("end", clock=session.clock)

    def without_others(self, session: Session, more: dict[str, Any]) -> None:
        refused = self.directory / f"refused-{self.group}-0"
        if self.member:
            until(refused.exists, "the first member's error")
            return
        try:
            session.prepare(self.model, self.optimizer, **more)
        except LimitExceeded as error:
            refused.write_text(str(error))

    def with_loader(self, session: Session, more: dict[str, Any]) -> None:
        random.seed(10 * self.group + self.member)
        torch.manual_seed(10 * self.group + self.member)
        schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, step_size=3, gamma=0.8)
        loader = DataLoader(Noisy(), 2, shuffle=True)
        self.model, self.optimizer, loader, schedule = session.prepare(
            self.model, self.optimizer, loader, schedule, **more
        )
        self.pause_at(session.clock)
        for _ in range(self.options.passes):
            for rows in loader:
                self.model(rows).square().mean().backward()
                self.optimizer.step()
                schedule.step()
                self.optimizer.zero_grad()
                self.pause_at(session.clock)
        print("random", torch.rand(()).item(), flush=True)

    def steps(self, session: Session | None) -> None:
        options, count = self.options, self.options.members * self.options.groups
        if options.alone:
            count = options.members
        own = (self.group * options.members + self.member) % count
        size = ROWS // count // options.micro
        for step in range(options.short if options.short and not self.group else options.steps):
            self.pause_at(step)
            if session is not None and step == options.baseless and (self.group, self.member) == (0, 1):
                session._strategy._training.model.base.is_there = False  # type: ignore[attr-defined]
            if session is not None and step == options.meets:
                session.barrier()
            if session is not None and step == options.refreshes:
                session.global_weights()
            rows, wanted = batch(step, options.learns)
            for part in range(options.micro):
                first = (own * options.micro + part) * size
                is_last = part == options.micro - 1
                if options.switched:
                    self.model.set_requires_gradient_sync(is_last)
                is_synced = session is None or is_last or options.switched == "switch"
                with nullcontext() if is_synced else session.no_sync():
                    (loss(self.model, rows[first:][:size], wanted[first:][:size]) / options.micro).backward()
                assert (self.model[0].weight.grad is not None) == (is_last or not options.switched)
            if options.clip:
                clip_by_data(self.model, options.clip)
            if options.norm:
                nn.utils.clip_grad_norm_(self.model.parameters(), options.norm)
            if options.given:
                self.give_gradients(step)
            loser = options.groups - 1, 0 if options.loses == "end" else 1
            if session is not None and step == LOST_STEP and (self.group, self.member) == loser:
                lose_place(session, options.loses, self.others_have_pushed)
            elif session is not None and step == LOST_STEP and options.loses == "after":
                say_pushed(session, self.directory / f"pushed-{self.group}-{self.member}")
            if session is not None and step == options.unpushed and (self.group, self.member) == (0, 1):
                fail_before_push(session)
            if session is not None and step == options.scaled:
                self.scale(session)
            if session is not None and step == options.unassigned and (self.group, self.member) == (0, 1):
                self.model[0].weight.to_local().data.add_(1e-7)
                refuse_assignments(session)
            if step == options.poison and (self.group, self.member) == (0, 1):
                self.model[0].weight.grad.to_local()[0, 0] = options.poison_value
            if session is not None and step == options.interrupted:
                self.interrupted_step(session)
                return
            try:
                self.optimizer.step()
            except (NonFiniteGradient, LimitExceeded) as error:
                (self.directory / f"refused-{self.group}-{self.member}").write_text(str(error))
                # Where a push has failed, the weights that the round began with are gone.
                if session is not None and options.mode.startswith("local:") and isinstance(error, NonFiniteGradient):
                    self.model.load_state_dict(session.global_weights())
                    self.optimizer.state.clear()
            self.optimizer.zero_grad()
            if options.frozen:
                self.model.steps += 1
            if step + 1 in options.leaves:
                self.leave_weights(str(step + 1))

    def give_gradients(self, step: int) -> None:
        for index, parameter in enumerate(self.model.parameters()):
            own = parameter.grad.to_local()
            own.copy_(given_gradient(self.options, step, self.member, index, own.shape))

    def interrupted_step(self, session: Session) -> None:
        if self.member == 0:
            interrupt_next_wait(session)
            with suppress(KeyboardInterrupt):
                self.optimizer.step()
        elif "/" in self.options.mode:  # the others are through with that step
            self.optimizer.step()
        try:
            self.optimizer.step()
        except InvalidRequest as error:
            (self.directory / f"refused-{self.group}-{self.member}").write_text(str(error))
            if "/" not in self.options.mode:
                self.optimizer.step()

    def part_ways(self, session: Session) -> None:
        """Makes another call than the other members."""
        try:
            session.barrier() if self.member else session.global_weights()
        except InvalidRequest as error:
            (self.directory / f"refused-{self.group}-{self.member}").write_text(str(error))

    def gather_once_more(self, session: Session) -> None:
        """Makes a call in which member 0 is interrupted, and makes it again."""
        if self.member == 0:
            interrupt_next_wait(session, is_over=self.options.cut_short == "between")
            with suppress(KeyboardInterrupt):
                session.gather(self.member)
        try:
            session.gather(self.member)
        except InvalidRequest as error:
            (self.directory / f"refused-{self.group}-{self.member}").write_text(str(error))

    def scale(self, session: Session) -> None:
        """Sets all weights, as each group does; member 1 of the last one has heard of the end of all others."""
        for parameter in self.model.parameters():
            parameter.to_local().data.mul_(0.5)
        say_assigned(session, self.directory / f"assigned-{self.group}-{self.member}")
        if (self.group, self.member) == (self.options.groups - 1, 1):
            hear_of_no_other(session)

    def others_have_pushed(self) -> None:
        """Waits until the shards have all that the other processes push of a step."""
        others = self.options.groups * self.options.members - 1
        until(lambda: len(list(self.directory.glob("pushed-*"))) == others, "the other members' pushes")

    def pause_at(self, clock: int) -> None:
        if clock in self.options.holds or (clock == self.options.slow and self.group == 1):
            self.options.holds[:] = [each for each in self.options.holds if each != clock]
            self.leave_weights(str(clock))
            hold(self.directory, 10 * self.group + self.member, clock)

    def leave_weights(self, when: str, **more: int) -> None:
        found = {name: whole(tensor) for name, tensor in self.model.state_dict().items()}
        if self.options.servers and self.session is not None:
            found |= {f"servers.{name}": whole(tensor) for name, tensor in self.session.global_weights().items()}
            more |= {"round": self.session.round}
        numbers = {name: torch.tensor(number) for name, number in more.items()}
        save_file(found | numbers, self.directory / f"{when}-{self.group}-{self.member}.safetensors")


def whole(tensor: Any) -> torch.Tensor:
    """A DTensor, or a buffer that each process has whole, as the processes have it together."""
    found: torch.Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return found.detach().clone()


def main() -> None:
    directory, group, member = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    begin_process()
    Member(directory, group, member, Options(**json.loads(sys.argv[4]))).train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
