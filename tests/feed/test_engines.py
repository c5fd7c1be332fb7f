"""Engines are given a job's newest weights, and never pass old ones off as new.

vLLM and SGLang need GPUs. Here stand-ins have the interfaces that ps_worker/engines names, which
test_engine_interfaces.py holds against facts from their sources; the job, its feed and the files are real.
tests/frameworks/test_followed_models.py has transformers itself.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import ps_torch as ps
from ps_feed.edition import Contents
from ps_protocol.errors import InvalidRequest, Unreachable, Unsupported
from ps_torch.engines.answers import TellsVersion
from ps_torch.engines.sglang import DiskFollower
from ps_worker.edition_tensors import Edition
from ps_worker.engines import loaded_versions
from ps_worker.engines.folders import saved
from ps_worker.engines.loaded_versions import update
from tests.tools.cluster import Cluster, in_parallel, until
from tests.tools.engine_stand_ins import Engine, EngineModel, Factory, Group, InProcess, Labelled, TransferEngine
from tests.tools.launching import ROOT
from tests.tools.remembering_trainer import RememberingTrainer


def make_model() -> nn.Sequential:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))


@pytest.fixture
def trainer(shared: Cluster, job: str) -> Iterator[RememberingTrainer[nn.Sequential]]:
    with shared.connect("sync", job=job) as session:
        yield RememberingTrainer(session, make_model(), lambda model: model(torch.randn(4, 6)).square().mean())


# -- vLLM ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The adapter, with stand-ins for what it imports of vLLM."""
    group = Group()

    def initialize(model: EngineModel) -> None:
        assert not model.is_reloading
        model.is_reloading, model.loaded = True, {}

    def finalize(model: EngineModel, model_config: Any) -> None:
        assert model.is_reloading
        assert model_config == "its config"
        model.is_reloading = False

    parts: dict[str, dict[str, Any]] = {
        "vllm": {},
        "vllm.distributed": {},
        "vllm.distributed.parallel_state": {"get_world_group": lambda: group},
        "vllm.distributed.weight_transfer": {},
        "vllm.distributed.weight_transfer.base": {
            "WeightTransferEngine": TransferEngine,
            "WeightTransferInitInfo": object,
            "WeightTransferUpdateInfo": object,
        },
        "vllm.distributed.weight_transfer.factory": {"WeightTransferEngineFactory": Factory},
        "vllm.model_executor": {},
        "vllm.model_executor.model_loader": {},
        "vllm.model_executor.model_loader.reload": {
            "initialize_layerwise_reload": initialize,
            "finalize_layerwise_reload": finalize,
        },
    }
    for name, contents in parts.items():
        module = ModuleType(name)
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(Factory, "_registry", {})
    for name in ("ps_worker.engines.vllm", "ps_torch.engines.vllm"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    adapter = importlib.import_module("ps_torch.engines.vllm")
    yield SimpleNamespace(adapter=adapter, group=group)
    for name in ("ps_worker.engines.vllm", "ps_torch.engines.vllm"):
        sys.modules.pop(name, None)


class Workers:
    """The workers of one vLLM engine, which makes each call in all of them."""

    def __init__(self, vllm: Any) -> None:
        self._group = vllm.group
        vllm.adapter.register()
        vllm.adapter.register()  # vLLM may do so twice in a process
        config = SimpleNamespace(model_config="its config")
        made = Factory._registry["ps_torch"]
        self.engines = [made(SimpleNamespace(), config, torch.device("cpu"), EngineModel()) for _ in range(2)]

    def call(self, method: str, *arguments: Any) -> list[str]:
        """Calls all; what each of them raised."""

        def work(rank: int) -> str:
            self._group.enter(rank)
            try:
                getattr(self.engines[rank], method)(*arguments)
            except RuntimeError as error:
                return str(error)
            return ""

        return in_parallel(2, work)

    def follow(self, server: str, job: str, **more: Any) -> None:
        info = self.engines[0].parse_init_info({"server": server, "job": job, "wire": "float32", **more})
        assert self.call("init_transfer_engine", info) == ["", ""]

    def update(self, version: int, timeout: float = 60.0) -> list[str]:
        assert self.call("start_weight_update") == ["", ""]
        said = self.call("update_weights", {"version": version, "timeout": timeout})
        return said if any(said) else self.call("finish_weight_update")


def test_all_workers_of_a_vllm_engine_load_one_version(
    shared: Cluster, job: str, trainer: RememberingTrainer[nn.Sequential], vllm: Any
) -> None:
    workers = Workers(vllm)
    assert [engine.version for engine in workers.engines] == [-1, -1], "its checkpoint's weights are not training's"
    workers.follow(shared.address, job)
    try:
        for _ in range(3):
            clock = trainer.step()
            assert workers.update(clock) == ["", ""]
            assert [engine.version for engine in workers.engines] == [clock, clock]
            assert all(trainer.has(engine.model.loaded, clock) for engine in workers.engines)
        assert workers.engines[1]._feed is None, "the weights come over the network once"
    finally:
        workers.call("shutdown")


def test_a_vllm_engine_that_gets_no_weights_has_no_version(
    shared: Cluster, job: str, trainer: RememberingTrainer[nn.Sequential], vllm: Any
) -> None:
    workers = Workers(vllm)
    assert all("this engine follows no job" in said for said in workers.update(0))
    workers.follow(shared.address, job, names={"0.weight": "layers.0.weight"})
    try:
        assert workers.update(0) == ["", ""]
        assert torch.equal(workers.engines[1].model.loaded["layers.0.weight"], trainer.past[0]["0.weight"])
        assert all("did not come to version 5: it is at 0" in said for said in workers.update(5, timeout=0.1))
        assert [engine.version for engine in workers.engines] == [-1, -1]
        assert not any(engine.model.is_reloading for engine in workers.engines), "vLLM's own state is in order again"
        assert workers.call("start_weight_update") == ["", ""]
        assert all("no weights were received" in said for said in workers.call("finish_weight_update"))
        assert all("start_weight_update comes first" in said for said in workers.call("update_weights", {}))
        assert workers.update(trainer.step()) == ["", ""]
        assert [engine.version for engine in workers.engines] == [1, 1]
    finally:
        workers.call("shutdown")


def test_an_answer_has_the_version_that_a_vllm_engine_has_loaded(
    shared: Cluster, job: str, trainer: RememberingTrainer[nn.Sequential], vllm: Any
) -> None:
    """It may be later than the one that was asked for."""
    workers, last = Workers(vllm), trainer.steps(3)
    workers.follow(shared.address, job)

    async def engine(scope: Any, receive: Any, send: Any) -> None:
        asked = json.loads((await receive())["body"])
        if scope["path"] in ("/start_weight_update", "/update_weights", "/finish_weight_update"):
            infos = [asked["update_info"]] if "update_info" in asked else []
            assert workers.call(scope["path"][1:], *infos) == ["", ""]
        await send({"type": "http.response.start", "status": 200})
        await send({"type": "http.response.body", "body": b""})

    app = TellsVersion(engine)
    try:
        for path, body in (
            ("/start_weight_update", {}),
            ("/update_weights", {"update_info": {"version": 1}}),
            ("/finish_weight_update", {}),
        ):
            assert ask(app, path, body)[0] == 200
        assert ask(app, "/v1/completions", {})[1][b"x-model-version"] == str(last).encode()
    finally:
        workers.call("shutdown")


def test_a_script_with_a_vllm_learns_which_version_it_has(
    shared: Cluster, job: str, trainer: RememberingTrainer[nn.Sequential], vllm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newest, which may be later than the one that was asked for. vLLM's own label is the same."""
    workers = Workers(vllm)
    new, old = Labelled(workers), InProcess(workers)
    workers.follow(shared.address, job)
    try:
        last = trainer.steps(3)
        assert update(new, version=last, timeout=60.0) == last
        assert update(new, version=1) == last
        assert new.get_weight_version() == str(last)
        assert all(trainer.has(engine.model.loaded, last) for engine in workers.engines)
        assert update(old) == last, "a vLLM without labels"
        with pytest.raises(RuntimeError, match="did not come to version 9"):
            update(new, version=9, timeout=0.1)
        # The first worker is on another host.
        monkeypatch.setattr(loaded_versions, "report", lambda address, version: None)
        with pytest.raises(Unreachable, match="no known version"):
            update(new)
        assert new.get_weight_version() == "default", "it does not keep the label of other weights"
    finally:
        workers.call("shutdown")


def test_vllm_finds_the_engine_by_an_entry_point(vllm: Any) -> None:
    text = (ROOT / "pyproject.toml").read_text()
    assert '[project.entry-points."vllm.general_plugins"]\nps_torch = "ps_torch.engines.vllm:register"\n' in text
    assert callable(vllm.adapter.register)
    with pytest.raises(Unsupported, match="parameter servers send the weights"):
        vllm.adapter.FeedTransferEngine.trainer_send_weights(iter(()), {})


# -- SGLang ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """The checkpoint that an engine was started with."""
    folder = tmp_path / "base"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "tiny"}')
    (folder / "model-00001-of-00001.safetensors").write_bytes(b"old weights")
    (folder / "model.safetensors.index.json").write_text("{}")
    return folder


def test_sglang_loads_each_newest_version_and_says_it(
    shared: Cluster, job: str, trainer: RememberingTrainer[nn.Sequential], tmp_path: Path, base: Path
) -> None:
    engine, folder = Engine(), tmp_path / "versions"
    try:
        with ps.subscribe(shared.address, job) as feed:
            follower = DiskFollower(feed, engine.address, folder, base, max_shard_bytes=300)
            for clock in range(4):
                assert follower.update()
                assert trainer.has(engine.weights, clock)
                assert engine.weight_version.split("-")[0] == str(clock)
                assert not follower.update(), "it has them"
                feed.wait_for(trainer.step())
            assert engine.updates == 4
            assert len([*(folder / job / "float32").iterdir()]) == 2, "the one that it has, and the one before"
            engine.refuses = "there is no room on the device"
            with pytest.raises(InvalidRequest, match=r"400 .*there is no room on the device"):
                follower.update()
            assert engine.weight_version.startswith("3-"), "what it serves it says"
        engine.stop()
        with pytest.raises(Unreachable, match="model_info"):
            follower.update()
    finally:
        engine.stop()


def test_a_follower_of_an_sglang_that_takes_nothing_keeps_two_versions_and_nothing_unfinished(
    shared: Cluster, job: str, trainer: RememberingTrainer[nn.Sequential], tmp_path: Path, base: Path
) -> None:
    """The folder may lie in memory."""
    engine, place = Engine(), tmp_path / "versions" / job / "float32"
    engine.refuses = "there is no room on the device"
    (place / "0-of-one-that-died.unfinished").mkdir(parents=True)
    (place / "1-of-one-at-work.unfinished").mkdir()
    os.utime(place / "0-of-one-that-died.unfinished", (1, 1))
    try:
        with ps.subscribe(shared.address, job) as feed:
            follower = DiskFollower(feed, engine.address, tmp_path / "versions", base)
            for _ in range(4):
                with pytest.raises(InvalidRequest, match="no room"):
                    follower.update()
                feed.wait_for(trainer.step())
            found = sorted(each.name.partition("-")[0] for each in place.iterdir() if each.suffix != ".unfinished")
            assert found == ["2", "3"]
            assert [each.name for each in place.glob("*.unfinished")] == ["1-of-one-at-work.unfinished"]
            follower = DiskFollower(feed, engine.address, tmp_path / "versions", tmp_path / "missing")
            with pytest.raises(FileNotFoundError):
                follower.update()
            assert [each.name for each in place.glob("*.unfinished")] == ["1-of-one-at-work.unfinished"]
    finally:
        engine.stop()


def test_an_sglang_has_a_label_for_each_run_and_timeline_whoever_follows(
    shared: Cluster, job: str, trainer: RememberingTrainer[nn.Sequential], tmp_path: Path, base: Path
) -> None:
    engine, folder = Engine(), tmp_path / "versions"
    try:
        with ps.subscribe(shared.address, job) as feed:
            edition = feed.wait_for()
        arrays = edition.arrays
        zeros = {name: np.zeros_like(space) for name, space in arrays.spaces.items()}
        for changed in (
            arrays,
            replace(arrays, timeline=arrays.timeline + 1, spaces=zeros),
            replace(arrays, run=f"{arrays.run[:-1]}z"),
        ):
            given = Edition(changed, job)
            # Each as a process that was started again, and knows nothing of before.
            later = SimpleNamespace(wait_for=lambda timeout, given=given: given, restores=0)
            follower = DiskFollower(later, engine.address, folder, base)  # type: ignore[arg-type]
            assert follower.update()
            assert engine.weight_version == f"0-{changed.run}-{changed.timeline}"
            assert all(torch.equal(engine.weights[name], each) for name, each in given.state_dict().items())
            assert not follower.update(), "it has them"
    finally:
        engine.stop()


def test_followers_of_other_jobs_and_wire_formats_may_have_one_folder(
    shared: Cluster, job: str, trainer: RememberingTrainer[nn.Sequential], tmp_path: Path, base: Path
) -> None:
    engines, folder = [Engine(), Engine(), Engine()], tmp_path / "versions"
    try:
        with ps.subscribe(shared.address, job) as feed, ps.subscribe(shared.address, job, wire="bfloat16") as narrow:
            arrays = feed.wait_for().arrays
            zeros = {name: np.zeros_like(space) for name, space in arrays.spaces.items()}
            spec = replace(arrays.contents.spec, name="other")
            other = replace(arrays, contents=Contents(spec, None, "float32"), spaces=zeros)  # of another cluster, say
            given = Edition(other, "other")
            last = SimpleNamespace(wait_for=lambda timeout: given)
            feeds: list[Any] = [feed, narrow, last]
            for engine, followed in zip(engines, feeds, strict=True):
                assert DiskFollower(followed, engine.address, folder, base).update()
            assert trainer.has(engines[0].weights, 0)
            assert {each.dtype for each in engines[1].weights.values()} == {torch.bfloat16}
            assert not any(each.any() for each in engines[2].weights.values())
            for _ in range(3):
                feed.wait_for(trainer.step())
                assert DiskFollower(feed, engines[0].address, folder, base).update()
            for engine, followed in zip(engines[1:], feeds[1:], strict=True):
                engine.weight_version = "default"  # as one that was started again
                DiskFollower(followed, engine.address, folder, base).update()
            assert not any(each.any() for each in engines[2].weights.values())
    finally:
        for engine in engines:
            engine.stop()


def test_an_sglang_may_have_other_names_than_the_job(
    shared: Cluster, job: str, trainer: RememberingTrainer[nn.Sequential], tmp_path: Path, base: Path
) -> None:
    """Such as separate tensors that the job has in one. Another follower with this folder has the job's names."""
    names = {
        "layers.up.weight": ps.MadeOf("0.weight", lambda both: both.chunk(2)[0]),
        "layers.gate.weight": ps.MadeOf("0.weight", lambda both: both.chunk(2)[1]),
        "head.weight": "2.weight",
    }
    own, other = Engine(), Engine()
    try:
        with ps.subscribe(shared.address, job) as feed:
            follower = DiskFollower(feed, own.address, tmp_path / "versions", base, names=names)
            for clock in range(2):
                assert follower.update()
                assert not follower.update(), "it has them"
                new = trainer.past[clock]
                assert own.weights.keys() == {*names, "0.bias", "2.bias"}
                both = torch.cat((own.weights["layers.up.weight"], own.weights["layers.gate.weight"]))
                assert torch.equal(both, new["0.weight"])
                assert torch.equal(own.weights["head.weight"], new["2.weight"])
                assert own.weight_version.startswith(f"{clock}-")
                assert DiskFollower(feed, other.address, tmp_path / "versions", base).update()
                assert trainer.has(other.weights, clock)
                feed.wait_for(trainer.step())
            # A follower that is started again with other names does not take the engine's weights for its own.
            feed.wait_for(trainer.step())
            assert follower.update()
            own.weights.clear()
            assert DiskFollower(feed, own.address, tmp_path / "versions", base, names={"head": "2.weight"}).update()
            assert "head" in own.weights
    finally:
        own.stop()
        other.stop()


def test_followers_of_one_job_may_write_one_version_at_the_same_time(
    shared: Cluster, job: str, trainer: RememberingTrainer[nn.Sequential], tmp_path: Path, base: Path
) -> None:
    places: list[Path] = []

    class Overtaken(Edition):
        """While it is written, another follower writes the same from its begin to its end."""

        def save(self, path: str | Path, max_shard_bytes: int | None = None, names: Any = None) -> None:
            super().save(path, max_shard_bytes, names)
            places.append(saved(Edition(self.arrays, job), tmp_path, base, 300))

    with ps.subscribe(shared.address, job) as feed:
        edition = Overtaken(feed.wait_for().arrays, job)
    places.append(saved(edition, tmp_path, base, 300))
    assert places[0] == places[1]
    assert [*places[0].parent.iterdir()] == [places[0]]
    names = {each.name for each in base.iterdir() if each.suffix not in (".safetensors", ".bin", ".pt")}
    assert names - {"model.safetensors.index.json"} <= {each.name for each in places[0].iterdir()}
    found: dict[str, torch.Tensor] = {}
    for file in places[0].glob("*.safetensors"):
        found |= load_file(file)
    assert trainer.has(found, 0)


def test_an_sglang_that_was_started_again_is_given_the_newest_weights(
    shared: Cluster, job: str, trainer: RememberingTrainer[nn.Sequential], tmp_path: Path, base: Path
) -> None:
    engine, ended = Engine(), threading.Event()
    port = engine.server_address[1]
    with ps.subscribe(shared.address, job) as feed:
        follower = DiskFollower(feed, engine.address, tmp_path / "versions", base)
        thread = threading.Thread(target=follower.follow, args=(ended, 0.01))
        thread.start()
        try:
            until(lambda: engine.weight_version.startswith("0-"), "the first version")
            engine.stop()
            clock = trainer.step()
            engine = Engine(port)
            until(lambda: engine.weight_version.startswith(f"{clock}-"), "the newest version")
            assert engine.first_told == "default", "nobody takes its answers for new ones"
            assert trainer.has(engine.weights, clock)
        finally:
            ended.set()
            thread.join()
            engine.stop()


# -- answers ---------------------------------------------------------------------------------------------------------


def ask(app: Any, path: str, body: Any = None, method: str = "POST") -> tuple[int, dict[bytes, bytes]]:
    """A request to an ASGI application; the status and the headers of its answer."""
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "http.request", "body": b"" if body is None else json.dumps(body).encode()}

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(app({"type": "http", "path": path, "method": method}, receive, send))
    assert [message["type"] for message in sent] == ["http.response.start", "http.response.body"]
    return sent[0]["status"], dict(sent[0].get("headers", ()))


async def loaded(receive: Any) -> None:
    """Takes a request as an engine does, which reports the version that it has loaded."""
    info = json.loads((await receive())["body"] or "{}").get("update_info", {})
    if "report" in info:
        loaded_versions.report(info["report"], info["version"])


def test_an_engine_answers_with_its_version_and_not_before_it_has_one() -> None:
    failing: set[str] = set()
    refusing: set[str] = set()

    async def engine(scope: Any, receive: Any, send: Any) -> None:
        await loaded(receive)
        status = 500 if scope["path"] in failing else 401 if scope["path"] in refusing else 200
        await send({"type": "http.response.start", "status": status, "headers": [(b"own", b"1")]})
        await send({"type": "http.response.body", "body": b""})

    app = TellsVersion(engine)

    def update(body: Any) -> int:
        ask(app, "/start_weight_update", {})
        ask(app, "/update_weights", body)
        return ask(app, "/finish_weight_update", {})[0]

    assert ask(app, "/v1/completions", {})[0] == 503
    assert ask(app, "/health")[0] == 200, "what does not generate is answered"
    assert ask(app, "/finish_weight_update", {})[0] == 200
    assert ask(app, "/v1/completions", {})[0] == 503, "nothing was loaded"
    assert update({"update_info": {"version": 7}}) == 200
    assert ask(app, "/v1/completions", {}) == (200, {b"own": b"1", b"x-model-version": b"7"})
    assert update({"update_info": {"version": 9}}) == 200
    assert ask(app, "/v1/completions", {})[1][b"x-model-version"] == b"9"
    ask(app, "/update_weights", {}, "GET")
    ask(app, "/x/finish_weight_update", {})
    refusing.add("/update_weights")
    ask(app, "/update_weights", {"update_info": {"version": 10}})
    refusing.clear()
    assert ask(app, "/v1/completions", {})[1][b"x-model-version"] == b"9", "none of these has given it weights"
    for wrong in (0, -1, "10", True, None):
        assert ask(app, "/update_weights", {"update_info": {"version": wrong}})[0] == 400
    assert ask(app, "/update_weights", {"update_info": {}})[0] == 400
    assert ask(app, "/update_weights", [])[0] == 400
    assert ask(app, "/v1/completions", {})[1][b"x-model-version"] == b"9", "the engine has seen none of these"
    failing.add("/update_weights")
    update({"update_info": {"version": 11}})
    assert ask(app, "/v1/completions", {})[0] == 503, "nobody knows what it has now"
    failing.clear()
    update({"update_info": {}})
    assert ask(app, "/v1/completions", {})[0] == 503, "weights of no version"


@pytest.mark.parametrize(
    ("short", "status", "version"),
    [(loaded_versions._SHORT, 200, b"7"), ((), 500, None)],
    ids=["another folder", "none"],
)
def test_an_engine_is_updated_where_the_path_of_tmpdir_is_too_long_for_a_socket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, short: tuple[str, ...], status: int, version: bytes | None
) -> None:
    """Without any folder for one, the engine is not asked, and the answer says what to do."""
    folder = tmp_path / ("long" * 30)
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setattr(loaded_versions, "_SHORT", short)
    asked: list[str] = []

    async def engine(scope: Any, receive: Any, send: Any) -> None:
        await loaded(receive)
        asked.append(scope["path"])
        await send({"type": "http.response.start", "status": 200})
        await send({"type": "http.response.body", "body": b""})

    app = TellsVersion(engine)
    assert ask(app, "/update_weights", {"update_info": {"version": 7}})[0] == status
    assert ("/update_weights" in asked) == (status == 200)
    ask(app, "/finish_weight_update", {})
    assert ask(app, "/v1/completions", {})[1].get(b"x-model-version") == version
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize(("status", "then"), [(200, 503), (500, 503), (401, 200), (404, 200)])
def test_an_engine_that_begins_to_take_weights_has_no_version_any_more(status: int, then: int) -> None:
    """vLLM writes over the weights from there on. What it has refused, or does not know, has not begun."""
    statuses = {"/start_weight_update": status}

    async def engine(scope: Any, receive: Any, send: Any) -> None:
        await loaded(receive)
        await send({"type": "http.response.start", "status": statuses.get(scope["path"], 200)})
        await send({"type": "http.response.body", "body": b""})

    app = TellsVersion(engine)
    ask(app, "/update_weights", {"update_info": {"version": 4}})
    ask(app, "/finish_weight_update", {})
    assert ask(app, "/v1/completions", {})[1][b"x-model-version"] == b"4"
    assert ask(app, "/start_weight_update", {})[0] == status
    assert ask(app, "/v1/completions", {})[0] == then
    assert ask(app, "/finish_weight_update", {})[0] == 200
    assert ask(app, "/v1/completions", {})[0] == 503, "nothing was received"
    ask(app, "/update_weights", {"update_info": {"version": 5}})
    ask(app, "/finish_weight_update", {})
    assert ask(app, "/v1/completions", {})[1][b"x-model-version"] == b"5"


def test_vllm_is_told_the_version_as_the_label_of_its_weights() -> None:
    """FastAPI takes a body by its content type and length."""
    finished: list[Any] = []

    async def engine(scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] == "/finish_weight_update":
            body = (await receive())["body"]
            headers = dict(scope["headers"])
            assert headers[b"content-length"] == str(len(body)).encode()
            assert headers[b"content-type"] == b"application/json"
            finished.append(body if body == b"{" else json.loads(body))
        else:
            await loaded(receive)
        await send({"type": "http.response.start", "status": 200})
        await send({"type": "http.response.body", "body": b""})

    app = TellsVersion(engine)
    for body in (None, {}, {"weight_version": None}):
        assert ask(app, "/update_weights", {"update_info": {"version": 7}})[0] == 200
        ask(app, "/finish_weight_update", body)
        assert finished.pop() == {"weight_version": "7"}
    ask(app, "/update_weights", {"update_info": {"version": 8}})
    ask(app, "/finish_weight_update", {"weight_version": "step-8"})
    assert finished.pop() == {"weight_version": "step-8"}, "the caller's own"
    ask(app, "/finish_weight_update", {})
    assert finished.pop() == {"weight_version": "default"}, "not the one of the weights before"
    assert app.version is None
    for other in ([], "text"):
        ask(app, "/finish_weight_update", other)
        assert finished.pop() == other, "vLLM says what is wrong with it"


def test_the_label_is_of_the_weights_that_the_engine_has_once_the_request_is_whole() -> None:
    """The body of a request may come slowly, and another update end meanwhile."""
    finished: list[Any] = []

    async def engine(scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] == "/finish_weight_update":
            finished.append(json.loads((await receive())["body"]))
        else:
            await loaded(receive)
        await send({"type": "http.response.start", "status": 200})
        await send({"type": "http.response.body", "body": b""})

    async def main() -> None:
        async def post(path: str, receive: Any) -> None:
            await app({"type": "http", "path": path, "method": "POST"}, receive, sent)

        async def sent(message: Any) -> None:
            pass

        def update(version: int) -> Any:
            async def receive() -> Any:
                return {"type": "http.request", "body": json.dumps({"update_info": {"version": version}}).encode()}

            return receive

        async def slow() -> Any:
            await post("/update_weights", update(8))
            return {"type": "http.request", "body": b"{}"}

        await post("/update_weights", update(7))
        await post("/finish_weight_update", slow)

    app = TellsVersion(engine)
    asyncio.run(main())
    assert finished == [{"weight_version": "8"}]
    assert app.version == 8


def test_weights_may_be_asked_for_by_a_list_with_an_entry_for_each_worker() -> None:
    """As vLLM 0.29 takes them. Of several engines the lowest version counts."""

    async def engine(scope: Any, receive: Any, send: Any) -> None:
        for info in json.loads((await receive())["body"]).get("update_info", []):
            loaded_versions.report(info["report"], info["version"] + 1)
        await send({"type": "http.response.start", "status": 200})
        await send({"type": "http.response.body", "body": b""})

    app = TellsVersion(engine)
    assert ask(app, "/update_weights", {"update_info": [{"version": 4}, {"version": 3}]})[0] == 200
    ask(app, "/finish_weight_update", {})
    assert app.version == 4
    for wrong in ([], [{}], [{"version": 4}, {"version": 0}], [4], "4"):
        assert ask(app, "/update_weights", {"update_info": wrong})[0] == 400
    assert app.version == 4


def test_an_answer_whose_request_has_seen_an_update_has_both_versions() -> None:
    async def main() -> None:
        asked, may_answer = asyncio.Event(), asyncio.Event()

        async def engine(scope: Any, receive: Any, send: Any) -> None:
            if scope["path"].startswith("/v1"):
                asked.set()
                await may_answer.wait()
            else:
                await loaded(receive)
            await send({"type": "http.response.start", "status": 200})
            await send({"type": "http.response.body", "body": b""})

        app = TellsVersion(engine)

        async def post(path: str, body: Any) -> dict[bytes, bytes]:
            sent: list[Any] = []

            async def receive() -> Any:
                return {"type": "http.request", "body": json.dumps(body).encode()}

            async def send(message: Any) -> None:
                sent.append(message)

            await app({"type": "http", "path": path, "method": "POST"}, receive, send)
            return dict(sent[0].get("headers", ()))

        async def give(version: int) -> None:
            await post("/start_weight_update", {})
            await post("/update_weights", {"update_info": {"version": version}})
            await post("/finish_weight_update", {})

        async def generate(meanwhile: Any) -> dict[bytes, bytes]:
            asked.clear()
            may_answer.clear()
            generating = asyncio.create_task(post("/v1/completions", {}))
            await asked.wait()
            await meanwhile
            may_answer.set()
            return await generating

        async def nothing() -> None: ...

        await give(3)
        assert await generate(nothing()) == {b"x-model-version": b"3"}
        assert await generate(give(4)) == {b"x-model-version": b"3", b"x-model-version-last": b"4"}
        # The same version may have other weights, after a rollback.
        assert await generate(give(4)) == {b"x-model-version": b"4", b"x-model-version-last": b"4"}
        started = await generate(post("/start_weight_update", {}))
        assert started == {b"x-model-version": b"4", b"x-model-version-last": b"unknown"}

    asyncio.run(main())


def test_two_requests_at_once_that_give_an_engine_weights_leave_no_wrong_version() -> None:
    """No answer says which of the two the engine loaded last. The next update, alone, sets the version again."""

    async def main() -> None:
        statuses: dict[str, asyncio.Future[int]] = {}
        arrived = asyncio.Event()

        async def engine(scope: Any, receive: Any, send: Any) -> None:
            await loaded(receive)
            arrived.set()
            status = await statuses[scope["name"]] if scope["name"] in statuses else 200
            await send({"type": "http.response.start", "status": status})
            await send({"type": "http.response.body", "body": b""})

        app = TellsVersion(engine)

        async def post(path: str, name: str = "", version: int = 0) -> None:
            body = json.dumps({"update_info": {"version": version}}).encode()

            async def receive() -> Any:
                return {"type": "http.request", "body": body}

            async def send(message: Any) -> None: ...

            await app({"type": "http", "path": path, "method": "POST", "name": name}, receive, send)

        async def begun(name: str, path: str, version: int = 0) -> asyncio.Task[None]:
            statuses[name] = asyncio.get_running_loop().create_future()
            arrived.clear()
            task = asyncio.create_task(post(path, name, version))
            await arrived.wait()
            return task

        async def answer(name: str, task: asyncio.Task[None], status: int) -> None:
            statuses[name].set_result(status)
            await task

        async def give(version: int) -> None:
            await post("/update_weights", version=version)
            await post("/finish_weight_update")

        await give(7)
        refused = await begun("refused", "/update_weights", 8)
        assert app.version is None
        await give(9)
        assert app.version is None, "one is under way"
        await answer("refused", refused, 401)
        assert app.version == 9, "what was refused does not bring back the version of before"
        one, other = await begun("one", "/update_weights", 10), await begun("other", "/update_weights", 11)
        await answer("other", other, 200)
        await answer("one", one, 200)
        await post("/finish_weight_update")
        assert app.version is None, "it may have either"
        await give(12)
        assert app.version == 12

    asyncio.run(main())


def test_an_update_counts_when_it_is_answered() -> None:
    """The application may go on after its answer, and the next request comes meanwhile."""

    async def main() -> None:
        seen: list[Any] = []

        async def engine(scope: Any, receive: Any, send: Any) -> None:
            await loaded(receive)
            await send({"type": "http.response.start", "status": 200})
            await send({"type": "http.response.body", "body": b""})
            if scope["path"] == "/update_weights":
                await app({"type": "http", "path": "/finish_weight_update", "method": "POST"}, receive, sent)

        async def receive() -> Any:
            return {"type": "http.request", "body": b'{"update_info": {"version": 3}}'}

        async def sent(message: Any) -> None:
            seen.append(message)

        app = TellsVersion(engine)
        await app({"type": "http", "path": "/update_weights", "method": "POST"}, receive, sent)
        assert app.version == 3
        assert len(seen) == 4

    asyncio.run(main())
