"""Groups whose members hold the stages of a pipeline, with the schedules of torch.distributed.pipelining."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import ps_torch
from ps_protocol.errors import InvalidRequest, JobMismatch, PSError
from ps_protocol.job import JobSpec
from ps_protocol.layout import ParameterSpec, PiecePlace
from ps_protocol.local import Local
from ps_protocol.modes import parse_mode
from ps_server.storage.checkpoints import CheckpointStore
from ps_server.storage.export import export, model_state_dict
from ps_worker.model.group_spec import check_own_optimizers
from ps_worker.model.job_spec import describe
from ps_worker.model.pipeline_stages import check_values, stages_of
from ps_worker.model.refused import has_scaler
from ps_worker.model.replicated import ReplicatedParameters
from ps_worker.values import PrepareOptions
from tests.scripts.train_pipeline import Model, Options, one_process, trained
from tests.tools.cases import cases
from tests.tools.cluster import Cluster, until
from tests.tools.forkserver import Nursery
from tests.tools.groups import (
    LEASE,
    WAIT_SECONDS,
    Groups,
    Tensors,
    last,
    let_go_once_begun,
    relative_distance,
    same,
)

ONE = Options(groups=1)
NAMES = {name for name, _ in Model().named_parameters()}


def joined(members: Sequence[Tensors]) -> Tensors:
    """What the members of a group have together; what several of them have is the same in all."""
    found: Tensors = {}
    for each in members:
        for name, tensor in each.items():
            if not name.startswith("table"):
                assert torch.equal(found.setdefault(name, tensor), tensor), name
    return found


def weights(found: Tensors) -> Tensors:
    return {name: tensor for name, tensor in found.items() if name in NAMES}


def counted(found: Tensors) -> Tensors:
    """Without how often layers were called, which each worker counts for itself."""
    return {name: tensor for name, tensor in found.items() if not name.endswith("calls")}


def ended(groups: Groups) -> Tensors:
    """What the job ended with: the same in all groups."""
    ends = groups.ended()
    size = max(1, groups.each[-1][1] + 1)
    each = [joined(ends[first:][:size]) for first in range(0, len(ends), size)]
    assert all(same(counted(one), counted(each[0])) for one in each)
    return each[0]


def begun_and_ended(
    nursery: Nursery, address: str, job: str, directory: Path, options: Options
) -> tuple[Tensors, Tensors]:
    with Groups(nursery, address, job, directory, options, told=options.members > 0) as groups:
        end = ended(groups)
        begin = joined([load_file(directory / f"begin-{g}-{m}.safetensors") for g, m in groups.each if g == 0])
    return begin, end


@pytest.mark.parametrize(
    "options",
    [
        Options(clip=0.02),
        Options(groups=1, schedule="GPipe", optimizer="SGD", clip=0.02),
        Options(groups=1, schedule="Interleaved1F1B", each=2, clip=0.02),
        Options(groups=1, members=3, micro=4),
        Options(groups=1, members=4, both=True),
    ],
    ids=["1F1B", "GPipe", "interleaved", "three", "sharded stages"],
)
def test_stages_of_a_pipeline_end_as_one_process(
    nursery: Nursery, shared: Cluster, job: str, tmp_path: Path, options: Options
) -> None:
    """With an embedding that the first and last have, and a frozen layer. A group clips the sum of its microbatches."""
    begin, end = begun_and_ended(nursery, shared.address, job, tmp_path, options)
    assert relative_distance(weights(end), one_process(options)) <= 1e-6
    assert same(weights(begin), dict(Model().named_parameters()))
    tables = [load_file(path)["table-0"] for path in tmp_path.glob("end-*-[12].safetensors")]
    assert all(torch.equal(each, Model().table.real) for each in tables), "those of group 0, in all groups"


def test_gradients_that_a_script_sums_after_backward_leave_with_the_step(
    nursery: Nursery, shared: Cluster, job: str, tmp_path: Path
) -> None:
    """Here of all parameters, as members with parts of each sample have them. torch counts no change of them."""
    options = replace(ONE, copies=True, prepared={"overlap": True}, connected={"transport": "tcp"})
    _, end = begun_and_ended(nursery, shared.address, job, tmp_path, options)
    assert relative_distance(weights(end), one_process(options)) <= 1e-6


def test_members_of_a_pipeline_have_the_same_batches(
    nursery: Nursery, shared: Cluster, job: str, tmp_path: Path
) -> None:
    begun_and_ended(nursery, shared.address, job, tmp_path, Options(steps=0, reads=True))
    seen = [json.loads((tmp_path / f"seen-{g}-{m}").read_text()) for g in (0, 1) for m in (0, 1)]
    assert seen[0] == seen[1]
    assert seen[2] == seen[3]
    assert sorted(seen[0] + seen[2]) == list(range(4))


@pytest.mark.parametrize("mode", cases(["local:2", "async", "local:4/1"], ["ssp:1"]))
def test_stages_of_a_pipeline_train_as_a_worker_of_one_process_in_other_modes(
    nursery: Nursery, shared: Cluster, job: str, tmp_path: Path, mode: str
) -> None:
    options = replace(ONE, mode=mode, prepared={"outer": {"warm_up": 0}})
    _, end = begun_and_ended(nursery, shared.address, job, tmp_path / "stages", options)
    plain = replace(options, members=0)
    _, expected = begun_and_ended(nursery, shared.address, f"{job}-plain", tmp_path / "plain", plain)
    assert relative_distance(weights(end), weights(expected)) <= 1e-6


def test_a_fragment_of_stages_without_another_group_changes_nothing_where_it_is_averaged_at_once(
    nursery: Nursery, shared: Cluster, job: str, tmp_path: Path
) -> None:
    """Each stage has pieces in both fragments, and of the tied embedding one of them has none."""
    outer = {"warm_up": 0, "lr": 1.0, "momentum": 0.0, "nesterov": False, "delay": 0}
    options = replace(ONE, mode="local:4/2", steps=9, prepared={"outer": outer})
    _, end = begun_and_ended(nursery, shared.address, job, tmp_path, options)
    assert relative_distance(weights(end), one_process(options)) <= 1e-6


@pytest.mark.parametrize("non_finite", cases(["refuse"], ["skip"]))
def test_a_gradient_of_one_stage_that_is_not_finite_is_pushed_by_none(
    nursery: Nursery, shared: Cluster, job: str, tmp_path: Path, non_finite: str
) -> None:
    """Refused: all raise, and the script makes the step again. Left out: all leave it out."""
    options = replace(ONE, poison=3, non_finite=non_finite)
    with Groups(nursery, shared.address, job, tmp_path, options) as groups:
        found = ended(groups)
    refused = {path.name: path.read_text() for path in tmp_path.glob("refused-*")}
    assert refused.keys() == ({"refused-0-0", "refused-0-1"} if non_finite == "refuse" else set())
    assert all("the gradient of norm.bias is not finite" in text for text in refused.values())
    assert relative_distance(weights(found), one_process(options)) <= 1e-6


def test_stages_have_the_same_bits_of_what_they_share_on_a_narrow_wire(
    nursery: Nursery, shared: Cluster, job: str, tmp_path: Path
) -> None:
    """What the wire rounds off of the tied embedding is kept by the stage that pushes it."""
    wires = {"gradient_wire": "int8", "weight_wire": "int8"}
    options = replace(ONE, prepared=wires, connected={"transport": "tcp"}, optimizer="SGD", steps=12)
    _, end = begun_and_ended(nursery, shared.address, job, tmp_path, options)
    expected = one_process(options)
    moved = relative_distance(one_process(replace(options, steps=0)), expected)
    assert 0 < relative_distance(weights(end), expected) < moved / 10


def test_late_steps_of_a_pipeline_count_on_all_stages_where_an_update_waits_for_a_quorum(
    nursery: Nursery, shared: Cluster, job: str, tmp_path: Path
) -> None:
    options = Options(connected={"quorum": 1}, slow=2, holds=[4])
    with Groups(nursery, shared.address, job, tmp_path, options) as groups:
        until(lambda: groups.are_held(2, (1,)), "group 1 to stand at clock 2")
        until(lambda: groups.are_held(4, (0,)), "group 0 to go on without it")
        groups.let_go(2)
        until(lambda: groups.are_held(4), "group 1 to come to clock 4")
        rules = [bucket.rule for shard in shared.shards for bucket in shard.jobs()[job].buckets.values()]
        pushed = [rule.pushed for rule in rules if rule.version]
        assert pushed == [{0: 4, 1: 4}] * len(pushed)
        groups.let_go(4)
        found = groups.ended()
    for first in (0, 2):
        assert {name for name in joined(found[first:][:2]) if name in NAMES} == NAMES


def test_a_tied_embedding_goes_once_a_step_to_the_stages_that_have_it(
    nursery: Nursery, shared: Cluster, job: str, tmp_path: Path
) -> None:
    """The stage between them gets none of it."""
    options = Options(groups=1, members=3, micro=4, counts=True)
    begun_and_ended(nursery, shared.address, job, tmp_path, options)
    moved = [json.loads((tmp_path / f"bytes-0-{member}").read_text()) for member in range(3)]
    once = Model().words.weight.nbytes
    assert moved == [[once] * options.steps, [], [once] * options.steps]


@pytest.mark.parametrize("mode", cases(["sync"], ["local:2"]))
def test_a_tied_embedding_whose_gradient_the_script_does_not_sum_is_refused(
    nursery: Nursery, shared: Cluster, job: str, tmp_path: Path, mode: str
) -> None:
    """In the first step."""
    options = replace(ONE, sums=False, mode=mode)
    with Groups(nursery, shared.address, job, tmp_path, options) as groups:
        assert all(process.wait(WAIT_SECONDS) == 0 for process in groups.processes.values()), groups.logs()
    for member in (0, 1):
        said = (tmp_path / f"refused-0-{member}").read_text()
        assert "members 0 and 1 of a group hold the same of words.weight, and have unlike gradients of it" in said
        assert "all_reduce(parameter.grad, group=...) over those that hold it" in said


@pytest.mark.parametrize("when", cases(["before"], ["after"]))
def test_a_step_in_which_one_stage_loses_the_place_counts_once(
    nursery: Nursery, shared: Cluster, job: str, tmp_path: Path, when: str
) -> None:
    options = replace(ONE, loses=when)
    with Groups(nursery, shared.address, job, tmp_path, options) as groups:
        found = ended(groups)
    assert groups.logs().count("lost its place") == 2
    assert relative_distance(weights(found), one_process(options)) <= 1e-6


def test_a_pipeline_that_lost_a_stage_leaves_and_comes_back(
    nursery: Nursery, shared: Cluster, job: str, tmp_path: Path
) -> None:
    options = Options(steps=8, holds=[3, 6])
    with Groups(nursery, shared.address, job, tmp_path, options) as groups:
        until(lambda: groups.are_held(3), "all to stand at step 3")
        groups.processes[1, 1].kill()
        groups.let_go(3)
        assert groups.processes[1, 0].wait(WAIT_SECONDS) != 0  # its collectives end
        until(lambda: groups.are_held(6, (0,)), "group 0 to go on alone")
        with Groups(nursery, shared.address, job, tmp_path / "again", replace(options, holds=[]), only=1) as again:
            until(lambda: len(list((tmp_path / "again").glob("begin-*"))) == 2, "group 1 to have the weights")
            groups.let_go(6)
            found = joined(groups.ended(0)), joined(again.ended())
    assert same(counted(found[0]), counted(found[1]))


@pytest.mark.parametrize(
    ("before", "after"),
    cases(
        [(ONE, replace(ONE, members=0)), (replace(ONE, shards=True), replace(ONE, members=3, micro=4))],
        [
            (replace(ONE, members=0), replace(ONE, members=3, micro=4)),
            (replace(ONE, schedule="Interleaved1F1B", each=2), replace(ONE, shards=True)),
        ],
    ),
    ids=["to one process", "from fully_shard", "from one process", "to fully_shard"],
)
def test_a_checkpoint_goes_on_with_another_cut_to_the_bit(
    nursery: Nursery,
    make_cluster: Callable[..., Cluster],
    job: str,
    tmp_path: Path,
    before: Options,
    after: Options,
) -> None:
    """Weights, buffers and optimizer state, of a tied embedding once; and the rest of the training is that of one
    process. An export has them whole."""
    kept = tmp_path / "checkpoints"
    first = make_cluster(checkpoint_dir=kept, lease=LEASE)
    _, left = begun_and_ended(nursery, first.address, job, tmp_path / "first", before)
    first.stop()
    export(kept, job, None, tmp_path / "exported")
    assert same(model_state_dict(tmp_path / "exported"), {name: left[name] for name in Model().state_dict()})
    second = make_cluster(shards=3, checkpoint_dir=kept, restore=True, lease=LEASE)
    longer = replace(after, steps=after.steps + 3)
    begin, end = begun_and_ended(nursery, second.address, job, tmp_path / "second", longer)
    assert same(begin, left)
    assert relative_distance(weights(end), one_process(longer)) <= 1e-6


def test_a_pipeline_that_lost_a_shard_ends_as_undisturbed(
    nursery: Nursery, make_cluster: Callable[..., Cluster], job: str, tmp_path: Path
) -> None:
    cluster = make_cluster(lease=LEASE, checkpoint_dir=tmp_path / "checkpoints", checkpoint_every="2steps")
    store = CheckpointStore(tmp_path / "checkpoints")
    with Groups(nursery, cluster.address, job, tmp_path, replace(ONE, holds=[0, 5])) as groups:
        let_go_once_begun(groups, cluster, job, 0, 1, (0,))  # or it might be of a clock that is not reached here
        until(lambda: groups.are_held(5, (0,)), "the pipeline to stand at step 5")
        until(lambda: last(store, job) > 0, "a checkpoint")
        cluster.start_again(1)
        groups.let_go(5)
        found = ended(groups)
    assert "the job was rolled back" in groups.logs()
    assert relative_distance(weights(found), one_process(ONE)) <= 1e-6


def test_readers_get_all_stages_under_the_names_of_the_model(
    nursery: Nursery, shared: Cluster, job: str, tmp_path: Path
) -> None:
    with (
        ps_torch.subscribe(shared.address, job) as feed,
        Groups(nursery, shared.address, job, tmp_path, replace(ONE, holds=[2])) as groups,
    ):
        until(partial(groups.are_held, 2, (0,)), "the pipeline to stand at step 2")
        edition = feed.wait_for(version=2)
        held = joined([load_file(tmp_path / f"2-0-{member}.safetensors") for member in (0, 1)])
        assert same(weights(dict(edition.state_dict())), weights(held))
        assert edition.state_dict().keys() == Model().state_dict().keys()
        groups.let_go(2)
        end = ended(groups)
        until(lambda: feed.ended, "the end of the job")
        model = feed.load(Model())
        with feed.reading(model):
            assert same(dict(model.state_dict()), {name: end[name] for name in model.state_dict()})


# -- what is refused before anything joins -----------------------------------------------------------------------------


class Members:
    """The members of a group as threads of this process, which meet as processes do."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._told: list[bytes] = [b""] * size
        self._barrier = threading.Barrier(size, timeout=WAIT_SECONDS)

    def gather(self, member: int, own: bytes) -> list[bytes]:
        self._told[member] = own
        self._barrier.wait()
        told = [*self._told]
        self._barrier.wait()
        return told


class OneOf:
    """A group, as one of its members has it."""

    def __init__(self, members: Members, member: int) -> None:
        self._members, self.size, self.member = members, members.size, member
        self.ranks, self.pipeline_stages, self.data = range(members.size), [0] * members.size, (0, 1)
        self.given = None

    @property
    def is_pipeline(self) -> bool:
        return len(set(self.pipeline_stages)) > 1

    def gather(self, own: bytes) -> list[bytes]:
        return self._members.gather(self.member, own)

    def connect(self, parts: object) -> None:
        """These only compare."""

    def all_through(self, make: Callable[[], Any]) -> Any:
        """The error of one member is that of all."""
        made, error = None, b""
        try:
            made = make()
        except PSError as raised:
            error = str(raised).encode()
        said = [each.decode() for each in self.gather(error) if each]
        if said:
            raise InvalidRequest(said[0])
        return made


Held = tuple[Sequence[nn.Module], Sequence[torch.optim.Optimizer]]


def in_members(size: int, call: Callable[[Any], Any]) -> list[Any]:
    """What a call returns in each member of a group. Its error is the same in all."""
    members = Members(size)

    def of(member: int) -> Any:
        try:
            return call(OneOf(members, member))
        except PSError as error:
            return error

    with ThreadPoolExecutor(size) as threads:
        found = list(threads.map(of, range(size)))
    errors = [each for each in found if isinstance(each, PSError)]
    if errors:
        assert {str(each) for each in found} == {str(errors[0])}
        raise errors[0]
    return found


def described(*held: Held, options: PrepareOptions | None = None) -> list[tuple[JobSpec, list[torch.Tensor]]]:
    """The job of members that hold these models and optimizers, as each of them describes it."""
    consistency = parse_mode("sync")
    given = options or PrepareOptions()
    return in_members(len(held), lambda group: describe(*held[group.member], given, "job", consistency, 1, group))


def sgd(*models: nn.Module, lr: float = 0.1) -> Held:
    own = list(trained(*models).values())
    return models, [torch.optim.SGD([{"params": own}], lr=lr)]


def linear(*sizes: int, seed: int = 0, **more: nn.Module) -> nn.ModuleDict:
    torch.manual_seed(seed)
    layers = {str(number): nn.Linear(*each) for number, each in enumerate(pairwise(sizes))}
    return nn.ModuleDict({**layers, **more})


def test_the_job_has_what_any_stage_has_once() -> None:
    one, other = (Model().stage(index, 2) for index in (0, 1))
    (spec, tensors), (again, others) = described(sgd(one), sgd(other))
    assert spec == again
    assert {each.name for each in spec.parameters} == {*Model().state_dict(), "table"}
    members = {each.name: each.member for each in spec.parameters}
    assert [members[name] for name in ("words.weight", "layers.1.linear.weight", "norm.bias")] == [0, 0, 1]
    assert all(a.is_meta == (each.member == 1) for a, each in zip(tensors, spec.parameters, strict=True))
    both = {
        each.name for each, a, b in zip(spec.parameters, tensors, others, strict=True) if not (a.is_meta or b.is_meta)
    }
    assert both == {"words.weight", "table"}


def test_stages_of_one_process_have_the_names_of_the_model_too() -> None:
    parts = [Model().stage(index, 4) for index in range(4)]
    parts[3].table, parts[2].table, parts[0].words = parts[1].table, None, None
    spec, _ = described(sgd(parts[0], parts[2]), sgd(parts[1], parts[3]))[0]
    assert {each.name for each in spec.parameters} == {*Model().state_dict(), "table"}


def test_several_models_of_all_members_are_numbered() -> None:
    held = [sgd(linear(2, 3), linear(3, 4)) for _ in range(2)]
    spec, _ = described(*held)[0]
    assert [each.name for each in spec.parameters] == ["0.0.weight", "0.0.bias", "1.0.weight", "1.0.bias"]


def test_a_member_may_hold_nothing_that_trains_and_nothing_of_a_group() -> None:
    one, other = linear(2, 3), nn.ModuleDict({"1": nn.Linear(3, 2).requires_grad_(False)})
    more = nn.ModuleDict({"2": nn.Linear(2, 2)})
    groups = [([*one.parameters()], []), ([], []), ([], [*more.parameters()])]
    held: list[Held] = [
        ([model], [torch.optim.SGD([{"params": first}, {"params": second, "lr": 0.5}], lr=0.1)])
        for model, (first, second) in zip((one, other, more), groups, strict=True)
    ]
    spec, _ = described(*held)[0]
    assert {each.name: (each.member, each.param_group) for each in spec.parameters} == {
        "0.weight": (0, 0),
        "0.bias": (0, 0),
        "1.weight": (1, None),
        "1.bias": (1, None),
        "2.weight": (2, 1),
        "2.bias": (2, 1),
    }


UNLIKE_VALUES = "both hold 0.weight, with unlike values"


@pytest.mark.parametrize(
    ("held", "said"),
    [
        ([sgd(linear(2, 3)), sgd(linear(4, 3))], r"hold the same of 0.weight, .* shape is \(3, 2\) and \(3, 4\)"),
        ([sgd(linear(2, 3)), sgd(linear(2, 3, seed=1))], UNLIKE_VALUES),
        ([sgd(linear(2, 3, 3)), sgd(linear(2, 3, seed=1))], UNLIKE_VALUES),
        (
            [sgd(linear(2, 3, norm=nn.LayerNorm(3))), sgd(nn.ModuleDict({"norm": nn.LayerNorm(3)}))],
            "its elements are 1",
        ),
        ([sgd(linear(2, 3), linear(2, 3)), sgd(nn.ModuleDict({"1": nn.Linear(3, 2)}))], "in this process both have 0"),
    ],
    ids=["shapes", "all names", "some names", "constant", "one process"],
)
def test_names_of_more_than_one_parameter_are_refused(held: Sequence[Held], said: str) -> None:
    """With what to name them."""
    with pytest.raises((InvalidRequest, JobMismatch), match=rf"(?s){said}.*Stages of a pipeline have the names of the"):
        described(*held)


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (sgd(nn.ModuleDict({"1": nn.Linear(3, 2)}), lr=0.2), "have lr 0.1 and 0.2 in parameter group 0"),
        (
            ([nn.ModuleDict({"1": nn.Linear(3, 2)})], [torch.optim.SGD([{"params": []}, {"params": []}], lr=0.1)]),
            r'have 1 and 2 parameter groups: .* \{"params": \[\], ...\}',
        ),
    ],
)
def test_the_optimizer_is_one(other: Held, said: str) -> None:
    with pytest.raises(JobMismatch, match=said):
        described(sgd(linear(2, 3)), other)


@pytest.mark.parametrize("which", ["first", "second", "none", "buffer"])
def test_what_two_stages_of_one_process_have_is_one_tensor(which: str) -> None:
    """Also where an optimizer has one of the two alone, and where none has any: the other gets no weights."""
    one, other = linear(2, 3), linear(2, 3)
    if which == "buffer":
        one, other = nn.ModuleDict({"1": nn.BatchNorm1d(2, affine=False)}), nn.ModuleDict({"1": nn.BatchNorm1d(2)})
    own = {"first": one, "second": other}.get(which, nn.Module())
    held: Held = (one, other), [torch.optim.SGD([{"params": [*own.parameters()]}], lr=0.1)]
    with pytest.raises(InvalidRequest, match=r"two stages in this process both have .* is one tensor in the two"):
        described(held, sgd(nn.ModuleDict({"2": nn.Linear(3, 2)})))


@pytest.mark.parametrize("local", [False, True], ids=["sync", "local"])
def test_layers_of_one_name_with_the_same_values_are_refused_in_the_first_step(local: bool) -> None:
    """As of stages that are built apart, from one seed: with what to name them."""
    held = [sgd(linear(2, 3)), sgd(linear(2, 3))]
    jobs = described(*held)

    def step(group: Any) -> None:
        spec, tensors = jobs[group.member]
        alike = ReplicatedParameters(group, replace(spec, local=Local(2) if local else None), tensors)
        held[group.member][0][0]["0"](torch.full((1, 2), 1.0 + group.member)).sum().backward()
        alike.check()

    with pytest.raises(InvalidRequest, match=r"unlike gradients of it: .* If they are two layers, .*Stages of a pipe"):
        in_members(2, step)


def test_a_number_that_two_stages_have_is_one_parameter() -> None:
    """Its gradient tells, in the first step, whether it is."""
    scales = [nn.ParameterDict({"logit": nn.Parameter(torch.tensor(2.5))}) for _ in range(2)]
    held = [sgd(linear(2, 3, scale=scales[0])), sgd(nn.ModuleDict({"scale": scales[1]}))]
    spec, _ = described(*held)[0]
    assert [each.name for each in spec.parameters] == ["0.weight", "0.bias", "scale.logit"]


def test_members_have_the_same_shares_of_the_data() -> None:
    assert in_members(2, lambda group: stages_of(group, str(group.member), 2)) == [[0, 1], [0, 1]]
    with pytest.raises(InvalidRequest, match="members 0 and 1 of this worker's group share its data by 1 and by 2"):
        in_members(2, lambda group: stages_of(group, "", 1 + group.member))


def over(mesh: list[int], values: torch.Tensor) -> Any:
    """What a process has of a DTensor over these processes, as far as its values are compared."""
    made = type("DTensor", (), {})()
    made.device_mesh, made._local_tensor = SimpleNamespace(mesh=torch.tensor(mesh)), values
    return made


@pytest.mark.parametrize("meshes", [([0, 1], [1, 0]), ([0, 2], [1, 3])], ids=["one mesh", "two meshes"])
def test_what_is_cut_over_two_meshes_has_the_same_values(meshes: Sequence[list[int]]) -> None:
    """Stages that are built apart may be cut apart, too: then they have the same pieces of the same names."""
    piece = ParameterSpec("0.weight", (3,), "float32", 0, piece=PiecePlace((6,), (0,)))

    def check(group: Any) -> None:
        check_values(group, [[piece]] * 2, {piece.key: over(meshes[group.member], torch.rand(3))})

    if sorted(meshes[0]) == sorted(meshes[1]):
        in_members(2, check)
        return
    with pytest.raises(InvalidRequest, match=r"(?s)both hold 0.weight, with unlike values. What members .*None or nn"):
        in_members(2, check)


def test_a_scaler_finds_infinities_in_one_stage_alone() -> None:
    """One that is switched off finds none. Without pipeline stages all members find them together."""
    scaler = torch.amp.GradScaler("cpu")
    assert has_scaler([object(), scaler])
    assert not has_scaler([torch.amp.GradScaler("cpu", enabled=False)])
    options = PrepareOptions(has_scaler=True)
    described(sgd(linear(2, 3)), sgd(linear(2, 3)), options=options)
    with pytest.raises(PSError, match=r"got a GradScaler, .*bfloat16.*non_finite=\"skip\""):
        described(sgd(linear(2, 3)), sgd(nn.ModuleDict({"1": nn.Linear(3, 2)})), options=options)


def adam(*groups: dict[str, Any], **more: Any) -> torch.optim.Optimizer:
    own = [{"params": [nn.Parameter(torch.zeros(1))], **each} for each in groups]
    return torch.optim.Adam(own, **more)


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ([adam({})], ""),
        ([adam({"betas": [0.9, 0.999]}, foreach=True)], ""),
        ([adam({}), adam({})], "1 and 2 optimizers"),
        ([torch.optim.AdamW([nn.Parameter(torch.zeros(1))])], "Adam and AdamW as optimizer 0"),
        ([adam({}, {})], "1 and 2 parameter groups in optimizer 0"),
        ([adam({"lr": 0.2})], "lr 0.001 and 0.2 in parameter group 0 of optimizer 0"),
        ([adam({"name": "all"})], "name None and all in parameter group 0 of optimizer 0"),
    ],
)
def test_optimizers_that_step_in_the_members_are_the_same(other: Sequence[torch.optim.Optimizer], said: str) -> None:
    """In local:H the job tells nothing of them."""
    held = [[adam({})], other]
    compare = partial(in_members, 2, lambda group: check_own_optimizers(group, held[group.member]))
    if not said:
        compare()
        return
    with pytest.raises(JobMismatch, match=f"members 0 and 1 of this worker's group have {said}: the optimizer is one"):
        compare()


def test_what_has_no_memory_is_refused() -> None:
    held = [sgd(linear(2, 3)), sgd(nn.ModuleDict({"1": nn.Linear(3, 2, device="meta")}))]
    with pytest.raises(InvalidRequest, match=r"1\.weight is on the meta device, .*model.to_empty"):
        described(*held)
