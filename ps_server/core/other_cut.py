"""Assembles the buckets of a job from a checkpoint of the same job whose parameters were cut into other pieces.

Where a worker is a group of processes, a bucket has pieces of parameters. A checkpoint of groups of two has other
pieces than groups of four have, and other ones than a worker of one process, which has whole parameters. State with one
value for each element (weights, momentum) goes to the element's new position. State with one value for a piece, such as
a count of steps, must be the same in all pieces of a parameter.

The tensors of a checkpoint come one after the other, in any order. The elements that are needed are copied, since the
next tensor may reuse the memory.
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


class SliceOfPiece:
    """Elements [start, start + length) of a piece.

    lies: the stretches of the whole parameter of which the piece consists
    span: the offsets in the whole parameter of the slice's first element, and just behind its last one
    """

    def __init__(self, lies: Stretches, start: int, length: int) -> None:
        self.lies, self.start, self.length = lies, start, length
        self.span = self._in_whole(start), self._in_whole(start + length - 1) + 1

    def _in_whole(self, element: int) -> int:
        stretch, within = divmod(element, self.lies.length)
        return self.lies.first + stretch * self.lies.step + within

    def places(self, first: int, length: int, count: int, step: int) -> Stretches:
        """Returns the positions in this slice of some elements of the whole parameter. The slice must have them all.

        The elements are `count` stretches of `length`, `step` apart, from offset `first` of the whole parameter on.
        """
        lies = self.lies
        stretch, within = divmod(first - lies.first, lies.step)
        place = stretch * lies.length + within - self.start
        return Stretches(place, length, lies.length if lies.count > 1 else step, count)


@dataclass
class _Bucket:
    """A bucket that is being assembled.

    memory:  the memory for its weights; None: allocated when it is needed
    state, scalars: the optimizer state that has come, by the slice's position and the state's name; a scalar has the
                    version of its source bucket
    filled:  how many elements have come of each state, of the weights, and of the workers' copy of them
    sources: the buckets of the other cut that it gets elements from, without their tensors
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
    """A slice of a bucket that is being assembled."""

    part: SliceOfPiece
    bucket: _Bucket
    position: int

    @property
    def offset(self) -> int:
        return self.bucket.spec.slices[self.position].offset


_WEIGHTS, _SENT = "weights", "sent"  # names in `filled`, at position -1, for elements that are no optimizer state


class OtherCut:
    """Buckets of a job that are assembled from those of another cut. Not thread-safe.

    before:  the job with its former cut
    spec:    the same job with its present cut; see difference_of_uncut
    buckets: the buckets of `spec` to assemble
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
        # Raised only by `snapshots`, when all files were read: a damaged file must be reported as damaged first.
        self._refused: JobMismatch | None = None
        for bucket in buckets:
            made = self._buckets[bucket.index] = _Bucket(bucket)
            for position, cut in enumerate(bucket.slices):
                parameter = spec.parameters[cut.parameter]
                part = SliceOfPiece(stretches_of(parameter), cut.start, cut.length)
                self._targets.setdefault(parameter.name, []).append(_Target(part, made, position))

    def use(self, weights: Mapping[int, torch.Tensor]) -> None:
        """Assembles the weights in this memory, which must be all zeros. weights: the memory of each bucket"""
        for index, memory in weights.items():
            self._buckets[index].memory = memory

    def sources(self) -> list[BucketSpec]:
        """Returns the buckets of the other cut that have elements of the assembled ones."""
        layout = bucket_layout(self._before.parameters, self._before.bucket_bytes)
        return [bucket for bucket in layout.buckets if self._has_any(bucket)]

    def _has_any(self, bucket: BucketSpec) -> bool:
        return any(True for position in range(len(bucket.slices)) for _ in self._shared(bucket, position))

    def _shared(self, bucket: BucketSpec, position: int) -> Iterator[tuple[_Target, Stretches, Stretches]]:
        """Yields the slices that get elements of a slice of the other cut, with the elements' positions in both
        slices.
        """
        cut = bucket.slices[position]
        parameter = self._before.parameters[cut.parameter]
        part = SliceOfPiece(stretches_of(parameter), cut.start, cut.length)
        for target in self._targets.get(parameter.name, ()):
            for own, there in shared(part, target.part):
                yield target, own, there

    # -- input -------------------------------------------------------------------------------------------------------

    def take_weights(self, bucket: BucketSpec, head: BucketSnapshot, values: torch.Tensor, sent: bool = False) -> None:
        """Copies the weights of a bucket of the other cut, or the workers' copy of them.

        head: the bucket's snapshot, of which no tensor is read
        sent: `values` is the workers' copy
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
                _at(memory[target.offset :], there).copy_(_at(of_slice, own))
                made.count(-1, _SENT if sent else _WEIGHTS, _count(own))
                made.sources[bucket.index] = head

    def take_state(
        self, bucket: BucketSpec, head: BucketSnapshot, position: int, name: str, values: torch.Tensor
    ) -> None:
        """Copies one kind of optimizer state of a slice of the other cut.

        Raises ValueError for a state that the optimizer does not have, and for one of a slice that no optimizer steps.
        """
        parameter = self._before.parameters[bucket.slices[position].parameter]
        if parameter.param_group is None:
            raise ValueError(f"{parameter.name} has the state {name} of an optimizer, and none steps it")
        try:
            is_scalar = is_scalar_state(self._spec.optimizer_of(parameter.param_group), name)
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
                        f"and {values.item():g} in another: they cannot be joined. Train with "
                        "the cut of before, or export the checkpoint"
                    )
                made.scalars[key] = max(before, (head.version, values.clone()), key=lambda each: each[0])
            else:
                if key not in made.state:
                    made.state[key] = torch.zeros(target.part.length, dtype=values.dtype)
                _at(made.state[key], there).copy_(_at(values, own))

    def take_changed(self, parameter: int, values: torch.Tensor) -> None:
        """Copies the value of a tensor that no optimizer steps, over the value that its bucket had.

        parameter: its index among those of the other cut
        """
        spec = self._before.parameters[parameter]
        flat = values.reshape(-1)
        for target in self._targets.get(spec.name, ()):
            memory = target.bucket.weights[target.offset :]
            for own, there in shared(SliceOfPiece(stretches_of(spec), 0, spec.numel), target.part):
                _at(memory, there).copy_(_at(flat, own))

    def _refuse(self, text: str) -> None:
        self._refused = self._refused or JobMismatch(text)

    # -- result -----------------------------------------------------------------------------------------------------

    def snapshots(self) -> dict[int, BucketSnapshot]:
        """Returns the buckets, by index, once all tensors have come.

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
                found = made.state[position, name] if scalar is None else scalar.clone()  # a tensor for each slice
                state.setdefault(position, {})[name] = found
            elif position >= 0 and self._refuses:
                parameter = self._spec.parameters[cut.parameter].name
                self._refuse(
                    f"only some pieces of {parameter!r} have the optimizer's state {name!r}: they cannot be joined. "
                    "Train with the cut of before, or export the checkpoint"
                )
        return replace(_head(made, self._spec), weights=made.weights, sent=made.sent, state=state)


def _head(made: _Bucket, spec: JobSpec) -> BucketSnapshot:
    """Returns the snapshot of a bucket, without tensors: its version and clocks come from the source buckets.

    If these differ, a step counts as applied if all of them have it, and as pushed if one has it.
    """
    sources = sorted(made.sources.values(), key=lambda each: each.version)
    ranks = sorted({rank for each in sources for rank in each.clocks})
    clocks = {rank: min(each.clocks.get(rank, 0) for each in sources) for rank in ranks}
    pushed = {rank: max(each.pushed.get(rank, each.clocks.get(rank, 0)) for each in sources) for rank in ranks}
    own = {spec.parameters[cut.parameter].param_group for cut in made.spec.slices}
    return BucketSnapshot(
        made.spec.index,
        max((each.version for each in sources), default=0),
        clocks,
        made.weights,
        groups={group: values for each in sources for group, values in each.groups.items() if group in own},
        committed=in_all([each.committed for each in sources]),
        pushed={rank: clock for rank, clock in pushed.items() if clock != clocks[rank]},
    )


def _count(places: Stretches) -> int:
    return places.length * places.count


def _at(values: torch.Tensor, places: Stretches) -> torch.Tensor:
    """Returns elements of a flat tensor, as [count, length] of its memory."""
    first = values.storage_offset() + places.first
    return torch.as_strided(values, (places.count, places.length), (places.step, 1), first)


def shared(one: SliceOfPiece, other: SliceOfPiece) -> Iterator[tuple[Stretches, Stretches]]:
    """Yields the elements that two slices of pieces of the same parameter have in common, by their positions in each.

    The whole parameter is treated as a matrix, whose rows are as long as the step at which a piece's stretches repeat.
    A slice then has the same columns of all rows that it spans. A slice that is a single stretch has all columns.
    """
    first, last = max(one.span[0], other.span[0]), min(one.span[1], other.span[1])
    if first >= last:
        return
    in_rows = [each.lies for each in (one, other) if each.lies.count > 1]
    if len({lies.step for lies in in_rows}) > 1:
        yield from _by_stretch(one, other, first, last)
        return
    row = in_rows[0].step if in_rows else last
    columns = [(lies.first % row, lies.first % row + lies.length) for lies in in_rows]
    begin = max([0, *(column for column, _ in columns)])
    end = min([row, *(column for _, column in columns)])
    if begin >= end:
        return
    full = range(-((begin - first) // row), (last - end) // row + 1)  # the rows whose columns are all in the span
    blocks = [(full.start * row + begin, end - begin, len(full))] if full else []
    for partial in {first // row, (last - 1) // row}.difference(full):
        start, stop = max(first, partial * row + begin), min(last, partial * row + end)
        blocks += [(start, stop - start, 1)] if start < stop else []
    for block in blocks:
        yield one.places(*block, row), other.places(*block, row)


def _by_stretch(one: SliceOfPiece, other: SliceOfPiece, first: int, last: int) -> Iterator[tuple[Stretches, Stretches]]:
    """As `shared`, for pieces whose stretches repeat at different steps: one stretch of the first after the other."""
    lies = one.lies
    for stretch in range((first - lies.first) // lies.step, (last - 1 - lies.first) // lies.step + 1):
        begin = lies.first + stretch * lies.step
        start, stop = max(first, begin), min(last, begin + lies.length)
        if start < stop:
            length = stop - start
            at = one.places(start, length, 1, length).first
            for own, there in shared(SliceOfPiece(Stretches(start, length, length, 1), 0, length), other):
                yield replace(own, first=own.first + at), there
