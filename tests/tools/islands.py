"""Rounds of local steps by hand, in plain torch: workers that step on their own, and the servers' outer optimizer."""

from __future__ import annotations

import torch
from torch import nn

from ps_protocol.fragments import Fragments
from ps_protocol.layout import ParameterSpec, PiecePlace, bucket_layout
from tests.scripts.train_in_group import BUCKET_BYTES, ROWS, Options, batch, loss, make_model, make_optimizer
from tests.tools.groups import Tensors


class Island:
    """One worker: what steps on its own."""

    def __init__(self, options: Options, group: int) -> None:
        self.options, self.group, self.made = options, group, 0
        self.model = make_model(frozen=options.frozen)
        self.optimizer = make_optimizer(options.optimizer, self.model, options.frozen)

    def step(self, step: int) -> None:
        size = ROWS // self.options.groups
        rows, wanted = batch(step, self.options.learns)
        loss(self.model, rows[self.group * size :][:size], wanted[self.group * size :][:size]).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.made += 1

    def go_back(self, base: nn.Module) -> None:
        self.model.load_state_dict(base.state_dict())
        self.optimizer.state.clear()


def fragment_of_each_element(options: Options, fragments: Fragments) -> list[torch.Tensor]:
    """Of each parameter, to which fragment its elements belong: by the buckets of the pieces of all members."""
    parameters = list(make_model(frozen=options.frozen).named_parameters())
    found, specs, pieces = [torch.full(each.shape, -1) for _, each in parameters], [], []
    for member in range(options.members):
        for index, (name, each) in enumerate(parameters):
            rows = -(-len(each) // options.members)
            piece = found[index][member * rows :][:rows]
            if each.requires_grad and len(piece):
                place = PiecePlace(tuple(each.shape), (member * rows, *[0] * (each.dim() - 1)))
                specs.append(ParameterSpec(name, tuple(piece.shape), "float32", 0, member=member, piece=place))
                pieces.append(piece.view(-1))
    for position, bucket in enumerate(bucket_layout(specs, BUCKET_BYTES).buckets):
        for part in bucket.slices:
            pieces[part.parameter][part.start : part.start + part.length] = fragments.of(position)
    trained = [each for each, (_, parameter) in zip(found, parameters, strict=True) if parameter.requires_grad]
    assert {int(each) for tensor in trained for each in tensor.view(-1)} == set(range(fragments.count))
    return found


class StreamedRounds:
    """Streaming DiLoCo of some workers, whose optimizers step on their own.

    islands: the workers
    """

    def __init__(self, options: Options, fragments: Fragments) -> None:
        outer = {name: options.prepared["outer"][name] for name in ("lr", "momentum", "nesterov")}
        self.islands = [Island(options, group) for group in range(options.groups)]
        self._fragments, self._masks = fragments, fragment_of_each_element(options, fragments)
        # Of each fragment a whole model: only the elements of the fragment mean anything there.
        self._servers = [make_model() for _ in range(fragments.count)]
        self._outer = [torch.optim.SGD(each.parameters(), **outer) for each in self._servers]
        self._made, self._pushed = 0, 0
        self._flight: tuple[int, list[torch.Tensor]] | None = None  # when it is due, and the weights that were pulled

    def step(self, step: int) -> None:
        """Makes a step on each worker."""
        for island in self.islands:
            island.step(step)

    def exchange(self, is_left_out: bool = False) -> None:
        """Ends a step: mixes in the fragment that is due, and pushes the one that is. is_left_out: that one is empty"""
        self._made += 1
        self._land()
        if self._pushed < self._fragments.count and self._made >= self._fragments.leaves(self._pushed):
            self._push(is_left_out)
            self._land()

    def lose(self) -> None:
        """Ends a step in which the only worker finds its place lost: the rest of the round leaves at once, and the
        worker goes on with the servers' weights.
        """
        while self._pushed < self._fragments.count:
            self._push(is_left_out=False)
        self._flight = None
        self._begin()
        self.set_back()

    def set_back(self) -> None:
        """Sets the weights of all workers to those of the servers."""
        for island in self.islands:
            for parameter, weights in zip(island.model.parameters(), self._weights(), strict=True):
                parameter.data.copy_(weights)

    def servers(self) -> Tensors:
        """The servers' weights, by name."""
        names = [name for name, _ in make_model().named_parameters()]
        return dict(zip(names, self._weights(), strict=True))

    def _begin(self) -> None:
        self._made, self._pushed = self._fragments.delay, 0

    def _push(self, is_left_out: bool) -> None:
        fragment, islands = self._pushed, [each.model.parameters() for each in self.islands]
        if not is_left_out:
            for parameter, *own in zip(self._servers[fragment].parameters(), *islands, strict=True):
                parameter.grad = parameter.detach() - torch.stack([each.detach() for each in own]).mean(0)
            self._outer[fragment].step()
        self._flight = self._fragments.lands(fragment), self._weights()
        self._pushed += 1

    def _land(self) -> None:
        if self._flight is None or self._made < self._flight[0]:
            return
        fragment, mixing = self._pushed - 1, self._fragments.mixing
        for island in self.islands:
            for parameter, pulled, mask in zip(island.model.parameters(), self._flight[1], self._masks, strict=True):
                mixed = mixing * parameter.data + (1 - mixing) * pulled
                parameter.data.copy_(torch.where(mask == fragment, mixed, parameter.data))
        self._flight = None
        if self._pushed == self._fragments.count:
            self._begin()

    def _weights(self) -> list[torch.Tensor]:
        models = [[each.detach() for each in model.parameters()] for model in self._servers]
        found = [each.clone() for each in models[0]]
        for fragment, model in enumerate(models):
            for index, (tensor, mask) in enumerate(zip(model, self._masks, strict=True)):
                found[index] = torch.where(mask == fragment, tensor, found[index])
        return found
