"""Converts optimizer state between torch's form, by parameter, and the shards' form, by bucket and slice."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator, Mapping, Sequence

import torch

from ps_protocol.errors import InvalidRequest, Unsupported
from ps_protocol.job import JobSpec
from ps_protocol.layout import BucketSpec, Layout
from ps_protocol.messages.data import PulledState
from ps_protocol.optimizer_state import is_scalar_state, required_state
from ps_protocol.tensors import TORCH_DTYPES, bytes_of, tensor_from, whole_of
from ps_worker.model.script_stages import ScriptStage
from ps_worker.model.sharded import is_sharded, local
from ps_worker.values import BucketAssignment

# By parameter (its index in the job), the state that torch.optim keeps for it: name -> tensor.
States = Mapping[int, Mapping[str, torch.Tensor]]


def tensors_of(state: Mapping[str, object]) -> dict[str, torch.Tensor]:
    """Returns one parameter's state in torch.optim as tensors, without the entries that are not there yet (None)."""
    return {
        name: local(value) if isinstance(value, torch.Tensor) else torch.tensor(float(value), dtype=torch.float32)  # type: ignore[arg-type]
        for name, value in state.items()
        if value is not None
    }


def check_states(spec: JobSpec, states: States) -> None:
    """Raises Unsupported or InvalidRequest for state from which the shards' optimizers could not continue."""
    for index, state in states.items():
        parameter = spec.parameters[index]
        assert parameter.param_group is not None
        name = spec.optimizer_of(parameter.param_group)
        for key, value in state.items():
            shape = tuple(_real(value).shape)
            if not is_scalar_state(name, key) and shape != parameter.shape:
                of_parts = ", the last one of real and imaginary parts" if parameter.element else ""
                raise InvalidRequest(
                    f"the optimizer state {key!r} of {parameter.name}: expected shape {parameter.shape}, got "
                    f"{shape}{of_parts}"
                )
        missing = required_state(name, spec.param_groups[parameter.param_group]) - state.keys()
        if state and missing:
            raise Unsupported(
                f"the optimizer state of {parameter.name} lacks {', '.join(sorted(missing))}, which {name} needs"
            )


def _real(state: torch.Tensor) -> torch.Tensor:
    """Returns state in the shards' form: for a complex parameter, real and imaginary parts."""
    return torch.view_as_real(state.detach().resolve_conj()) if state.is_complex() else state.detach()


def states_before(
    spec: JobSpec, tensors: Sequence[torch.Tensor], optimizers: Sequence[torch.optim.Optimizer]
) -> States:
    """Returns the state of optimizers that have taken steps already. Raises the errors of `check_states`."""
    indices = {id(tensor): index for index, tensor in enumerate(tensors)}
    of_parameters = states_of(optimizers).items()
    # In a group an optimizer may have a parameter of which there is nothing in this process.
    states = {indices[id(each)]: state for each, state in of_parameters if id(each) in indices or not is_sharded(each)}
    check_states(spec, states)
    return states


def states_of(optimizers: Sequence[torch.optim.Optimizer]) -> dict[torch.Tensor, dict[str, torch.Tensor]]:
    """Returns the state of optimizers that have taken steps already, by parameter."""
    return {
        parameter: tensors_of(state)
        for optimizer in optimizers
        if _has_stepped(optimizer)
        for parameter, state in optimizer.state.items()
    }


def _has_stepped(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a step has made state: Adagrad has some at step 0, from the beginning."""
    return any(
        any(v is not None for v in state.values()) and state.get("step") != 0 for state in optimizer.state.values()
    )


def state_assignments(spec: JobSpec, layout: Layout, states: States) -> Iterator[BucketAssignment]:
    """Yields the assignments after which the parameters in `states` have that state and no other."""
    for bucket in layout.trained:
        given = {p: states[part.parameter] for p, part in enumerate(bucket.slices) if part.parameter in states}
        if not given:
            continue
        yield BucketAssignment(bucket, _without(bucket, given), "", None)
        for name in sorted({name for state in given.values() for name in state}):
            present = {position: state[name] for position, state in given.items() if name in state}
            yield BucketAssignment(bucket, _without(bucket, present), name, _payload(spec, bucket, name, present))


def _without(bucket: BucketSpec, present: Collection[int]) -> tuple[int, ...]:
    return tuple(position for position in range(len(bucket.slices)) if position not in present)


def _payload(spec: JobSpec, bucket: BucketSpec, name: str, present: Mapping[int, torch.Tensor]) -> memoryview:
    if is_scalar_state(spec.optimizers[bucket.optimizer], name):
        numbers = torch.zeros(len(bucket.slices), dtype=torch.float32)
        for position, value in present.items():
            numbers[position] = float(value)
        return bytes_of(numbers)
    flat = torch.zeros(bucket.numel, dtype=TORCH_DTYPES[bucket.dtype])
    for position, value in present.items():
        part = bucket.slices[position]
        whole = _real(value).reshape(-1)
        flat[part.offset : part.offset + part.length] = whole[part.start : part.start + part.length].cpu()
    return bytes_of(flat)


class StateCollector:
    """Collects the chunks that shards send. `land` may be called from several threads, and for the same chunk twice.

    A bucket that has not entered the present stage yet still has the old optimizer's state. That state is left out for
    parameters of an optimizer that began later.
    """

    def __init__(self, stage: ScriptStage, layout: Layout) -> None:
        self._stage = stage
        self._spec = stage.spec
        self._layout = layout
        self._lock = threading.Lock()
        self.states: dict[int, dict[str, torch.Tensor]] = {}

    def land(self, chunk: PulledState) -> None:
        """Adds one kind of state of one bucket. Raises InvalidRequest if its size is not the bucket's, or the job has
        come to a later stage than this script."""
        bucket = self._layout.buckets[chunk.bucket]
        if chunk.stage > self._stage.number:
            raise InvalidRequest(
                f"the job has come to its stage {chunk.stage}, and this script to stage {self._stage.number}: its "
                "optimizers have no state there. Ask for it when this script has handed the later ones to prepare, too"
            )
        parts = [(position, part) for position, part in enumerate(bucket.slices) if self._has(part.parameter, chunk)]
        if not parts:
            return
        scalar = is_scalar_state(self._spec.optimizers[bucket.optimizer], chunk.state)
        values = tensor_from(chunk.payload, "float32" if scalar else bucket.dtype)
        expected = len(bucket.slices) if scalar else bucket.numel
        if values.numel() != expected:
            raise InvalidRequest(
                f"state {chunk.state!r} of bucket {chunk.bucket}: expected {expected} numbers, got {values.numel()}"
            )
        for position, part in parts:
            if position in chunk.absent:
                continue
            if scalar:
                with self._lock:
                    state = self.states.setdefault(part.parameter, {})
                    # A parameter in several buckets has one number in each: the same, unless a step was half lost.
                    before = state.get(chunk.state)
                    value = values[position].clone()
                    state[chunk.state] = value if before is None else torch.maximum(before, value)
            else:
                whole = _real(self._whole(part.parameter, chunk.state)).view(-1)
                whole[part.start : part.start + part.length] = values[part.offset : part.offset + part.length]

    def _has(self, parameter: int, chunk: PulledState) -> bool:
        """Whether a chunk's state of a parameter belongs to the optimizer that steps it now."""
        return self._stage.since.get(parameter, chunk.stage + 1) <= chunk.stage

    def _whole(self, index: int, name: str) -> torch.Tensor:
        parameter = self._spec.parameters[index]
        with self._lock:
            state = self.states.setdefault(index, {})
            if name not in state:
                parts = torch.zeros(parameter.shape, dtype=TORCH_DTYPES[parameter.dtype])
                state[name] = whole_of(parts, parameter.element)
            return state[name]
