"""Loaders that are not torch's own: torchdata's is divided, and an error says what to do with the others."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from ps_protocol.errors import InvalidRequest
from ps_worker.data.leased import loader_spec
from ps_worker.data.loaders import PositionedLoader, ShareSampler, prepared_loader, shard_loader, warning_once
from ps_worker.data.pass_position import SharePass
from ps_worker.given import sort_given
from ps_worker.metrics import StepTimer

CPU = torch.device("cpu")


def stateful(size: int = 12, **more: Any) -> Any:
    """torchdata's loader, which has samplers of its own."""
    module = pytest.importorskip("torchdata.stateful_dataloader")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it calls what torch has deprecated
        return module.StatefulDataLoader(list(range(size)), **more)


@pytest.mark.parametrize("more", [{"shuffle": True}, {"shuffle": False}, {"shuffle": True, "drop_last": True}])
def test_torchdatas_loader_is_divided_as_torchs_is(more: dict[str, Any]) -> None:
    found = []
    for make in (stateful, lambda **more: DataLoader(list(range(12)), **more)):
        loader = make(batch_size=2, **more)
        shares = [shard_loader(loader, lambda rank=rank: (rank, 2), seed=3) for rank in range(2)]  # type: ignore[misc]
        found.append([[batch.tolist() for batch in share] for share in shares])
    assert found[0] == found[1]
    assert sorted(index for share in found[0] for batch in share for index in batch) == list(range(12))


def test_torchdatas_loader_is_leased_as_torchs_is() -> None:
    assert loader_spec(0, stateful(batch_size=2, shuffle=True), 5).seed == 5
    assert loader_spec(0, stateful(batch_size=2), 5).seed is None


def test_a_loader_that_is_used_as_it_is_keeps_its_position() -> None:
    """In single, say: the script's own file has it."""
    own = stateful(batch_size=2)
    prepared = prepared_loader(own, CPU, StepTimer(), own.__iter__)
    assert isinstance(prepared, PositionedLoader)
    batches = iter(prepared)
    first = [next(batches).tolist() for _ in range(2)]
    state = prepared.state_dict()
    own = stateful(batch_size=2)
    again = prepared_loader(own, CPU, StepTimer(), own.__iter__)
    assert isinstance(again, PositionedLoader)
    again.load_state_dict(state)
    assert first + [batch.tolist() for batch in again] == [[i, i + 1] for i in range(0, 12, 2)]


def test_torchdatas_loader_that_was_divided_has_the_place_of_all_workers() -> None:
    def prepared() -> PositionedLoader:
        share = shard_loader(stateful(batch_size=2, shuffle=True), lambda: (0, 2), seed=3)
        assert isinstance(share.sampler, ShareSampler)
        position = SharePass(share, share.sampler)
        return PositionedLoader(share, CPU, StepTimer(), position.batches, position)

    first = prepared()
    batches = iter(first)
    next(batches)
    state = first.state_dict()
    assert state == {"order": 3, "samples": 4, "size": 12}
    again = prepared()
    again.load_state_dict(state)
    assert [batch.tolist() for batch in again] == [batch.tolist() for batch in batches]
    loaded = stateful(batch_size=2, shuffle=True)
    loaded.load_state_dict(stateful(batch_size=2, shuffle=True).state_dict())
    with pytest.raises(InvalidRequest, match="load it into the loader that prepare returns"):
        shard_loader(loaded, lambda: (0, 2), seed=3)


def test_the_error_for_another_kind_of_loader_says_what_to_do() -> None:
    of_webdataset = type("WebLoader", (), {"__module__": "webdataset.compat", "__iter__": lambda self: iter(())})
    with pytest.raises(InvalidRequest, match=r"got WebLoader: use it as it is, .*urls\[session.rank"):
        sort_given([of_webdataset()])
    with pytest.raises(InvalidRequest, match=r"got list: use it as it is, .*part session.rank of session.world_size"):
        sort_given([[1, 2]])
    with pytest.raises(InvalidRequest, match=r"got int$"):
        sort_given([3])


class World:
    """What MosaicML's StreamingDataset knows of its place: it reads the launcher's variables as it is made."""

    def __init__(self) -> None:
        self.num_ranks = int(os.environ.get("WORLD_SIZE", 1))


class StreamingDataset(IterableDataset[int]):
    __module__ = "streaming.base.dataset"

    def __init__(self) -> None:
        self._unique_rank_world = World()

    def __iter__(self) -> Iterator[int]:
        return iter(range(8))


class Derived(StreamingDataset):
    __module__ = "the_scripts_own"


@pytest.mark.parametrize("kind", [StreamingDataset, Derived])
def test_a_streaming_dataset_that_found_no_variables_is_told_of_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, kind: type[StreamingDataset]
) -> None:
    def warned(workers: int) -> list[str]:
        caplog.clear()
        loader = DataLoader(kind())
        begin = warning_once(loader, lambda: (0, workers), loader.__iter__)
        assert [len(list(begin())) for _ in range(2)] == [8, 8]
        return caplog.messages

    monkeypatch.delenv("WORLD_SIZE", raising=False)
    [said] = warned(2)
    assert f"{kind.__name__} divides itself by the variables RANK and WORLD_SIZE, and has found none" in said
    assert warned(1) == []
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert warned(2) == [], "it has divided itself"
