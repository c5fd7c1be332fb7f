"""The buckets of a job, put together from those of the same job whose parameters were cut otherwise.

Where a worker is a group of processes, a bucket has pieces of parameters. A checkpoint of groups of two has other
pieces than groups of four have, and other ones than a worker of one process, which has whole parameters. What is kept
for each element, weights and optimizer state, goes to the element's new place. What is kept once for a piece, such as a
count of steps, is the same in all pieces of a parameter.

The tensors of a checkpoint are taken one after the other, in any order: none of them has to stay in memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from ps_protocol.errors import InvalidRequest, JobMismatch
from ps_protocol.job import JobSpec
from ps_protocol.layout import BucketSpec, bucket_layout
from ps_protocol.optimizer_state import is_scalar_state
from ps_protocol.pieces import Stretches, stretches_of
from ps_protocol.tensors import TORCH_DTYPES
from ps_server.core.data_commits import in_all
from ps_server.core.snapshot import BucketSnapshot

_CHUNK = 2**18  # elements whose places are computed at a time, where a piece is not one stretch of its parameter

Places = slice | torch.Tensor  # of elements: a range, or [count] int64


class SliceOfPiece:
    """Elements [start, start + length) of a piece that lies as `lies` says.

    span: where the first of them lies in the whole parameter, and where the last one ends
    """

    def __init__(self, lies: Stretches, start: int, length: int) -> None:
        self.lies, self.start, self.length = lies, start, length
        self.span = self._place(start), self._place(start + length - 1) + 1

    def _place(self, element: int) -> int:
        stretch, within = divmod(element, self.lies.length)
        return self.lies.first + stretch * self.lies.step + within


@dataclass
class _Bucket:
    """A bucket that is being put together.

    memory:  for its weights; None: is taken once it is needed
    state, scalars: by the slice's position and the name of the state, what has come; a scalar with the version of the
                    bucket that it comes from
    filled:  of each, and of the weights and what was sent, how many elements have come
    sources: the buckets that it has elements of, without their tensors
    """

    spec: BucketSpec
    memory: torch.Tensor | None = None
    sent: torch.Tensor | None = None
    state: dict[tuple[int, str], torch.Tensor] = field(default_factory=dict)
    scalars: dict[tuple[int, str], tuple[int, torch.Tensor]] = field(default_factory=dict)
    filled: dict[tuple[int, str], int] = field(default_factory=dict)
    sources: dict[int, BucketSnapshot] = field(default_factory=dict)

    @property
    def weights(self) -> torch.Tensor:
        if self.memory is None:
            self.memory = torch.zeros(self.spec.numel, dtype=TORCH_DTYPES[self.spec.dtype])
        return self.memory

    def count(self, position: int, name: str, count: int) -> None:
        self.filled[position, name] = self.filled.get((position, name), 0) + count


@dataclass(frozen=True)
class _Target:
    """A slice of a bucket that is being put together."""

    part: SliceOfPiece
    bucket: _Bucket
    position: int

    @property
    def offset(self) -> int:
        return self.bucket.spec.slices[self.position].offset


_WEIGHTS, _SENT = "weights", "sent"  # in `filled`, as names that no state has, at position -1


class OtherCut:
    """Buckets of a job that are put together from those of another cut. Not thread-safe.

    before:  the job, as it was cut
    spec:    the same job, as it is cut now; see difference_of_uncut
    buckets: of `spec`, those to put together
    refuses: whether state that is not the same in all pieces of a parameter is refused. Otherwise the piece that has
             had most updates counts, and state that some pieces lack is left out
    """

    def __init__(
        self,
        before: JobSpec,
        spec: JobSpec,
        buckets: Sequence[BucketSpec],
        refuses: bool = True,
    ) -> None:
        self._before, self._spec, self._refuses = before, spec, refuses
        self._buckets: dict[int, _Bucket] = {}
        self._targets: dict[str, list[_Target]] = {}
        self._refused: JobMismatch | None = None  # by `snapshots`: a file that is damaged is found to be so before
        for bucket in buckets:
            made = self._buckets[bucket.index] = _Bucket(bucket)
            for position, cut in enumerate(bucket.slices):
                parameter = spec.parameters[cut.parameter]
                part = SliceOfPiece(stretches_of(parameter), cut.start, cut.length)
                self._targets.setdefault(parameter.name, []).append(_Target(part, made, position))

    def use(self, weights: Mapping[int, torch.Tensor]) -> None:
        """Has weights be put together in this memory, all zeros. weights: by bucket"""
        for index, memory in weights.items():
            self._buckets[index].memory = memory

    def sources(self) -> list[BucketSpec]:
        """Returns the buckets of the other cut that have something of those that are put together."""
        layout = bucket_layout(self._before.parameters, self._before.bucket_bytes)
        return [bucket for bucket in layout.buckets if self._has_any(bucket)]

    def _has_any(self, bucket: BucketSpec) -> bool:
        return any(True for position in range(len(bucket.slices)) for _ in self._shared(bucket, position))

    def _shared(self, bucket: BucketSpec, position: int) -> Iterator[tuple[_Target, Places, Places]]:
        """Yields where the elements of a slice of the other cut go, with their places in both slices."""
        cut = bucket.slices[position]
        parameter = self._before.parameters[cut.parameter]
        part = SliceOfPiece(stretches_of(parameter), cut.start, cut.length)
        for target in self._targets.get(parameter.name, ()):
            for own, there in shared(part, target.part):
                yield target, own, there

    # -- what comes --------------------------------------------------------------------------------------------------

    def take_weights(self, bucket: BucketSpec, head: BucketSnapshot, values: torch.Tensor, sent: bool = False) -> None:
        """Takes the weights of a bucket of the other cut, or what workers have of it.

        head: the bucket's snapshot, of which no tensor is read
        """
        if head.stage is not None:
            self._refuse(
                f"bucket {bucket.index} is trained by {head.stage.optimizer or 'no optimizer'}, in stage "
                f"{head.stage.number} of its script: only the first stage of a job can be cut anew"
            )
        for position, cut in enumerate(bucket.slices):
            of_slice = values[cut.offset : cut.offset + cut.length]
            for target, own, there in self._shared(bucket, position):
                made = target.bucket
                if sent and made.sent is None:
                    made.sent = torch.zeros(made.spec.numel, dtype=values.dtype)
                memory = made.sent if sent else made.weights
                assert memory is not None
                memory[target.offset :][: target.part.length][there] = of_slice[own]
                made.count(-1, _SENT if sent else _WEIGHTS, _count(own))
                made.sources[bucket.index] = head

    def take_state(
        self, bucket: BucketSpec, head: BucketSnapshot, position: int, name: str, values: torch.Tensor
    ) -> None:
        """Takes one state of the optimizer for a slice of the other cut.

        Raises ValueError for a state that the optimizer does not have, and for one of a slice that no optimizer steps.
        """
        parameter = self._before.parameters[bucket.slices[position].parameter]
        if parameter.group is None:
            raise ValueError(f"{parameter.name} has the state {name} of an optimizer, and none steps it")
        try:
            is_scalar = is_scalar_state(self._spec.optimizer_of(parameter.group), name)
        except InvalidRequest as error:
            raise ValueError(str(error)) from None
        if not is_scalar and values.shape != (bucket.slices[position].length,):
            self._refuse(
                f"the optimizer's state {name!r} of {parameter.name!r} has shape {tuple(values.shape)}, and only state "
                "for each element of a parameter can be cut anew"
            )
            return
        for target, own, there in self._shared(bucket, position):
            made, key = target.bucket, (target.position, name)
            made.count(*key, _count(own))
            if is_scalar:
                before = made.scalars.get(key, (-1, values))
                if self._refuses and not torch.equal(before[1], values):
                    self._refuse(
                        f"the optimizer's state {name!r} of {parameter.name!r} is {before[1].item():g} in one piece "
                        f"and {values.item():g} in another: they cannot be joined"
                    )
                made.scalars[key] = max(before, (head.version, values), key=lambda each: each[0])
            else:
                if key not in made.state:
                    made.state[key] = torch.zeros(target.part.length, dtype=values.dtype)
                made.state[key][there] = values[own]

    def take_changed(self, parameter: int, values: torch.Tensor) -> None:
        """Takes the value of a tensor that no optimizer steps, in place of the one that its bucket had.

        parameter: its index among those of the other cut
        """
        spec = self._before.parameters[parameter]
        flat = values.reshape(-1)
        for target in self._targets.get(spec.name, ()):
            memory = target.bucket.weights[target.offset :][: target.part.length]
            for own, there in shared(SliceOfPiece(stretches_of(spec), 0, spec.numel), target.part):
                memory[there] = flat[own]

    def _refuse(self, text: str) -> None:
        self._refused = self._refused or JobMismatch(text)

    # -- what becomes of it ------------------------------------------------------------------------------------------

    def snapshots(self) -> dict[int, BucketSnapshot]:
        """Returns the buckets, by index, once all is taken.

        Raises JobMismatch for what cannot be cut anew, or cannot be joined: state that is kept once for a parameter,
        and is not the same in all of its pieces, or that only some of them have; a job whose script has gone on to
        another optimizer. Raises ValueError if there are not all weights.
        """
        found = {index: self._snapshot(made) for index, made in self._buckets.items()}
        if self._refused is not None:
            raise self._refused
        return found

    def _snapshot(self, made: _Bucket) -> BucketSnapshot:
        expected = sum(cut.length for cut in made.spec.slices)
        for name in (_WEIGHTS, _SENT) if made.sent is not None else (_WEIGHTS,):
            if made.filled.get((-1, name)) != expected:
                raise ValueError(f"bucket {made.spec.index} has {expected} {name}, found {made.filled.get((-1, name))}")
        state: dict[int, dict[str, torch.Tensor]] = {}
        for (position, name), count in made.filled.items():
            cut = made.spec.slices[position]
            if position >= 0 and count == cut.length:
                _, scalar = made.scalars.get((position, name), (0, None))
                found = made.state[position, name] if scalar is None else scalar.clone()  # not that of another slice
                state.setdefault(position, {})[name] = found
            elif position >= 0 and self._refuses:
                parameter = self._spec.parameters[cut.parameter].name
                self._refuse(
                    f"only some pieces of {parameter!r} have the optimizer's state {name!r}: they cannot be joined"
                )
        return replace(_head(made, self._spec), weights=made.weights, sent=made.sent, state=state)


def _head(made: _Bucket, spec: JobSpec) -> BucketSnapshot:
    """Returns the snapshot of a bucket without tensors: it is as far as the buckets are that it has elements of.

    Where these are not of one moment, a step counts as applied if all have it, and as pushed if one has it.
    """
    sources = sorted(made.sources.values(), key=lambda each: each.version)
    ranks = sorted({rank for each in sources for rank in each.clocks})
    clocks = {rank: min(each.clocks.get(rank, 0) for each in sources) for rank in ranks}
    pushed = {rank: max(each.pushed.get(rank, each.clocks.get(rank, 0)) for each in sources) for rank in ranks}
    own = {spec.parameters[cut.parameter].group for cut in made.spec.slices}
    return BucketSnapshot(
        made.spec.index,
        max((each.version for each in sources), default=0),
        clocks,
        made.weights,
        groups={group: values for each in sources for group, values in each.groups.items() if group in own},
        committed=in_all([each.committed for each in sources]),
        pushed={rank: clock for rank, clock in pushed.items() if clock != clocks[rank]},
    )


def _count(places: Places) -> int:
    return places.numel() if isinstance(places, torch.Tensor) else places.stop - places.start


def shared(one: SliceOfPiece, other: SliceOfPiece) -> Iterator[tuple[Places, Places]]:
    """Yields the elements that two parts of the same parameter have in common, by their places in each part."""
    (begin, end), (begin_there, end_there) = one.span, other.span
    first, last = max(begin, begin_there), min(end, end_there)
    if first >= last:
        return
    if one.lies.count == other.lies.count == 1:
        yield slice(first - begin, last - begin), slice(first - begin_there, last - begin_there)
        return
    for start in range(0, one.length, _CHUNK):
        places = torch.arange(start, min(one.length, start + _CHUNK))
        stretch, within = _divided(places + one.start, one.lies.length)
        stretch, within = _divided(one.lies.first + stretch * one.lies.step + within, other.lies.step)
        there = stretch * other.lies.length + within - other.lies.first - other.start
        is_there = (within >= other.lies.first) & (within < other.lies.first + other.lies.length)
        is_there &= (there >= 0) & (there < other.length)
        if bool(is_there.any()):
            yield places[is_there], there[is_there]


def _divided(places: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    quotient = torch.div(places, size, rounding_mode="floor")
    return quotient, places - quotient * size
