"""Readers of a job whose workers are groups get whole tensors, under the model's own names."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import ps_torch
from ps_feed.edition import Contents, EditionArrays
from ps_protocol.errors import InvalidRequest
from ps_protocol.job import JobSpec
from ps_protocol.layout import ParameterSpec, PiecePlace
from ps_protocol.modes import parse_mode
from tests.scripts import train_cut_anew, train_parallel
from tests.tools.cluster import Cluster, until
from tests.tools.forkserver import Nursery
from tests.tools.groups import Groups, same


def test_each_edition_is_the_whole_model_as_groups_have_it_at_one_clock(
    nursery: Nursery, shared: Cluster, job: str, tmp_path: Path
) -> None:
    """Of four members that each hold boxes, and some alike. A plain model takes it."""
    options = train_parallel.Options(groups=1, members=4, shards=True, even=True, steps=4, holds=[0, 2])
    names = set(train_parallel.Model(True).state_dict())
    with (
        ps_torch.subscribe(shared.address, job) as feed,
        Groups(nursery, shared.address, job, tmp_path, options) as run,
    ):
        for clock in (0, 2):
            until(partial(run.are_held, clock, (0,)), "all to stand still")
            edition = feed.wait_for(version=clock)
            assert edition.version == clock
            assert same(edition.state_dict(), load_file(tmp_path / f"{clock}-0-0.safetensors"))
            run.let_go(clock)
        last = run.ended()[0]
        until(lambda: feed.ended, "the end of the job")
        model = feed.load(train_parallel.Model(True))
        with feed.reading(model) as version:
            assert version == options.steps
            assert same(dict(model.state_dict()), {name: last[name] for name in names})
        feed.save(tmp_path / "saved.safetensors")
        assert same(load_file(tmp_path / "saved.safetensors"), {name: last[name] for name in names})


def test_readers_get_the_buffers_and_what_is_not_trained_of_groups(
    nursery: Nursery, shared: Cluster, job: str, tmp_path: Path
) -> None:
    options = train_cut_anew.Options(2, 4, "AdamW", {"lr": 0.02}, columns=True, mode="sync", prepared={}, holds=1)
    wanted = ["2.weight", "3.batches", "0.weight"]
    with (
        ps_torch.subscribe(shared.address, job, wire="bfloat16", parameters=wanted) as feed,
        Groups(nursery, shared.address, job, tmp_path, options) as groups,
    ):
        until(lambda: groups.are_held(1, (0,)), "both to stand still")
        feed.wait_for(version=1)
        groups.let_go(1)
        last = groups.ended()[0]
        until(lambda: feed.ended, "the end of the job")
        found = feed.state_dict()
    assert found.keys() == {"2.weight", "3.batches", "0.weight"}
    assert torch.equal(found["2.weight"], last["2.weight"])
    assert torch.equal(found["3.batches"], last["3.batches"])
    assert torch.equal(found["0.weight"], last["0.weight"].bfloat16())


def piece(member: int, shape: tuple[int, ...], at: tuple[int, ...], whole: tuple[int, ...]) -> ParameterSpec:
    return ParameterSpec("w", shape, "float32", 0, member=member, piece=PiecePlace(whole, at))


PLACES = [(row, column) for row in (0, 2) for column in (0, 2)]
BOXES = JobSpec(
    name="job",
    parameters=tuple(piece(member, (2, 2), at, (4, 4)) for member, at in enumerate(PLACES)),
    optimizer="SGD",
    param_groups=({"lr": 0.1},),
    consistency=parse_mode("sync"),
    bucket_bytes=64,
    world_size=1,
    group_size=4,
)


def test_a_tensor_is_joined_of_boxes() -> None:
    contents = Contents(BOXES, None, "float32")
    spaces = {
        bucket.space: np.arange(4 * bucket.member, 4 * bucket.member + 4, dtype=np.float32).view(np.uint8)
        for bucket in contents.buckets.values()
    }
    arrays = EditionArrays(contents, "run", 1, {}, 0, spaces, {})
    expected = [[0, 1, 4, 5], [2, 3, 6, 7], [8, 9, 12, 13], [10, 11, 14, 15]]
    assert arrays.names() == ["w"]
    assert arrays.tensor("w").values.tolist() == expected
    assert not arrays.tensor("w").values.flags.writeable


def test_pieces_that_are_no_whole_tensor_are_refused() -> None:
    """Whatever a server says: memory is taken for whole tensors."""
    huge = replace(BOXES, parameters=(piece(0, (2, 2), (0, 0), (2**30, 2)), *BOXES.parameters[1:]))
    with pytest.raises(InvalidRequest, match="pieces of unlike parameters"):
        Contents(huge, None, "float32")
    with pytest.raises(InvalidRequest, match="expected 4 at as many places, got 3"):
        Contents(replace(BOXES, parameters=BOXES.parameters[:3]), None, "float32")
