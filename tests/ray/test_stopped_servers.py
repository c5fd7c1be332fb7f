"""The end of `ParameterServer`, with servers that do not end in order. Without Ray."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest


class RayError(Exception):
    """As Ray's."""


class Answer:
    """That of an actor which was asked to stop its server."""

    def __init__(self, found: object) -> None:
        self.found = found

    def get(self) -> object:
        if isinstance(self.found, Exception):
            raise self.found
        return self.found


@pytest.fixture
def server_actors(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module, with a stand-in of Ray."""
    if importlib.util.find_spec("ray") is None:
        stands_in: Any
        for name in ("ray", "ray.util", "ray.util.placement_group", "ray.util.scheduling_strategies"):
            stands_in = ModuleType(name)
            for each in ("placement_group", "remove_placement_group"):
                setattr(stands_in, each, None)
            for each in ("NodeAffinitySchedulingStrategy", "PlacementGroupSchedulingStrategy"):
                setattr(stands_in, each, None)
            monkeypatch.setitem(sys.modules, name, stands_in)
        before = {name: module for name, module in sys.modules.items() if name.startswith("ps_worker.ray")}
        module = importlib.import_module("ps_worker.ray.server_actors")
        for name in {name for name in sys.modules if name.startswith("ps_worker.ray")} - before.keys():
            monkeypatch.delitem(sys.modules, name)
    else:
        module = importlib.import_module("ps_worker.ray.server_actors")

    def wait(answers: list[Answer], num_returns: int, timeout: float) -> tuple[list[Answer], list[Answer]]:
        assert num_returns == len(answers)
        return [each for each in answers if each.found is not None], [each for each in answers if each.found is None]

    fake = SimpleNamespace(wait=wait, get=Answer.get, exceptions=SimpleNamespace(RayError=RayError))
    monkeypatch.setattr(module, "ray", fake)
    return module


@pytest.mark.parametrize(
    ("answers", "said"),
    [
        ([True, True], []),
        ([True, False], ["a shard did not end within 5 s and was killed"]),
        ([True, None], ["a shard did not end within 5 s and was killed"]),
        ([RayError("its node is gone"), True], ["a shard was not stopped in order: its node is gone"]),
    ],
    ids=["in order", "killed by its actor", "no answer", "an error"],
)
def test_a_server_that_does_not_end_in_order_is_reported(
    server_actors: Any, answers: list[object], said: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    actors = [
        SimpleNamespace(stop=SimpleNamespace(remote=lambda seconds, found=found: Answer(found))) for found in answers
    ]
    server_actors._stop("a shard", actors, 5.0)
    assert [record.getMessage() for record in caplog.records if record.name == "ps_worker"] == said


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RayError("its node is gone")], ids=["Ctrl-C", "an error"])
def test_no_server_stays_where_its_stop_is_broken_off(
    server_actors: Any, error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed: list[object] = []

    def broken_off(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(server_actors.ray, "wait", broken_off)
    monkeypatch.setattr(server_actors.ray, "kill", killed.append, raising=False)
    monkeypatch.setattr(server_actors, "remove_placement_group", killed.append)
    actors = [SimpleNamespace(stop=SimpleNamespace(remote=lambda seconds: Answer(None))) for _ in range(3)]
    servers = server_actors.ParameterServer.__new__(server_actors.ParameterServer)
    servers._coordinator, *servers._shards = actors
    servers._group = "the placement group"
    with pytest.raises(type(error)):
        servers.stop()
    assert killed == [*actors[1:], actors[0], "the placement group"]
    servers.stop()
    assert len(killed) == 4
