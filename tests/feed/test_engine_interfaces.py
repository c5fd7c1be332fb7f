"""The adapters of inference engines, and the stand-ins by which they are tested, fit the releases whose facts are here.

data/engine_interfaces.json has names of methods, parameters and routes, as tests/tools/engine_sources.py reads them.
tests/frameworks/test_engine_sources.py does the same with an engine that is installed.
"""

from __future__ import annotations

import copy
import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.tools import engine_stand_ins as stand_ins
from tests.tools.engine_sources import GIVES_WEIGHTS, MEMBERS, WANTED, facts_of, misfits_of_vllm
from tests.tools.launching import ROOT

FACTS = json.loads((Path(__file__).parent / "data" / "engine_interfaces.json").read_text())
VLLM = {each["release"]: each for each in FACTS["vllm"]}
SGLANG = {each["release"]: each for each in FACTS["sglang"]}
ADAPTER = [ROOT / "ps_worker/engines/vllm.py", ROOT / "ps_worker/engines/loaded_versions.py"]
FIRST_WITH_LABEL, FIRST_WITH_LISTS = "0.27.0", "0.29.0"


def parameters(function: Callable[..., Any]) -> list[str]:
    return [name for name in inspect.signature(function).parameters if name != "self"]


@pytest.mark.parametrize("release", VLLM)
def test_the_adapter_fits_vllm(release: str) -> None:
    assert misfits_of_vllm(VLLM[release], *ADAPTER) == []


def test_a_vllm_that_the_adapter_does_not_fit_is_seen() -> None:
    newest = VLLM[[*VLLM][-1]]

    def said(change: Callable[[Any], object]) -> str:
        changed = copy.deepcopy(newest)
        change(changed)
        [why] = misfits_of_vllm(changed, *ADAPTER)
        return why

    takes = "WeightTransferEngine.receive_weights"
    assert said(lambda facts: facts["abstract"].append("WeightTransferEngine.resume")).endswith("resume is missing")
    assert takes in said(lambda facts: facts["takes"][takes].append("stream"))
    assert "initialize_layerwise_reload" in said(lambda facts: facts["takes"].pop("initialize_layerwise_reload"))
    assert "broadcast_object" in said(lambda facts: facts["takes"]["GroupCoordinator.broadcast_object"].remove("src"))
    assert "weight_version" in said(lambda facts: facts["takes"]["LLM.finish_weight_update"].clear())
    assert "/update_weights" in said(lambda facts: facts["routes"].pop("POST /update_weights"))


@pytest.mark.parametrize("release", VLLM)
def test_the_stand_in_of_vllm_has_its_interface(release: str) -> None:
    facts = VLLM[release]
    stand_in = stand_ins.TransferEngine
    abstract = {f"WeightTransferEngine.{name}" for name in stand_in.__abstractmethods__}
    assert abstract >= set(facts["abstract"])
    told = facts["takes"]
    for name in ("__init__", "parse_init_info", "update_weights", *stand_in.__abstractmethods__):
        own = parameters(vars(stand_in)[name])
        assert told.get(f"WeightTransferEngine.{name}", own) == own
    assert len(parameters(stand_ins.Factory.register_engine)) == len(
        told["WeightTransferEngineFactory.register_engine"]
    )
    for name in ("broadcast", "broadcast_object"):
        assert parameters(vars(stand_ins.Group)[name]) == told[f"GroupCoordinator.{name}"]
    has_label = "LLM.get_weight_version" in told
    assert has_label == (tuple(map(int, release.split("."))) >= tuple(map(int, FIRST_WITH_LABEL.split("."))))
    llm = stand_ins.Labelled if has_label else stand_ins.InProcess
    for name in MEMBERS["LLM"] - {"init_weight_transfer_engine"}:
        assert (f"LLM.{name}" in told) == hasattr(llm, name)
        if f"LLM.{name}" in told:
            own = next(vars(each)[name] for each in llm.__mro__ if name in vars(each))
            assert parameters(own) == told[f"LLM.{name}"]
    assert ("weight_version" in facts["routes"]["POST /finish_weight_update"]) == has_label


def test_the_stand_in_of_vllm_demands_no_method_that_none_of_its_releases_does() -> None:
    demanded = {name for facts in VLLM.values() for name in facts["abstract"]}
    assert {f"WeightTransferEngine.{name}" for name in stand_ins.TransferEngine.__abstractmethods__} == demanded


@pytest.mark.parametrize("release", SGLANG)
def test_the_follower_and_the_stand_in_of_sglang_fit_it(release: str) -> None:
    facts = SGLANG[release]
    fields = set(facts["takes"]["UpdateWeightFromDiskReqInput"])
    assert fields >= {"model_path", "weight_version"}, "what DiskFollower sends"
    assert fields >= stand_ins.FIELDS
    assert facts["routes"].keys() == {"GET /model_info", "POST /update_weights_from_disk"}


def test_facts_are_read_from_sources(tmp_path: Path) -> None:
    """Where a release has moved a class, it is found at its new place, and at the old one before."""
    for place, text in {
        "vllm/distributed/weight_transfer/base.py": (
            "class WeightTransferEngine(ABC):\n    init_info_cls: type\n    _own: int\n"
            "    def __init__(self, config): ...\n    @abstractmethod\n    def shutdown(self, *, now): ...\n"
            "    def _private(self): ...\n"
        ),
        "vllm/entrypoints/llm.py": "class LLM:\n    def update_weights(self, request): ...\n    def other(self): ...\n",
        "vllm/entrypoints/serve/dev/rlhf/api_router.py": (
            "@router.post('/update_weights')\nasync def update(raw): ...\n"
            "@router.get('/other')\nasync def other(): ...\n"
        ),
    }.items():
        (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / place).write_text(text)
    assert facts_of("vllm", tmp_path) == {
        "takes": {
            "WeightTransferEngine.__init__": ["config"],
            "WeightTransferEngine.shutdown": ["now"],
            "WeightTransferEngine": ["init_info_cls"],
            "LLM.update_weights": ["request"],
        },
        "abstract": ["WeightTransferEngine.shutdown"],
        "routes": {"POST /update_weights": ["raw"]},
    }
    moved = tmp_path / "vllm/entrypoints/rl/offline.py"
    moved.parent.mkdir(parents=True)
    moved.write_text("class RLOfflineMixin:\n    def update_weights(self, what): ...\n")
    assert facts_of("vllm", tmp_path)["takes"]["LLM.update_weights"] == ["what"]


def test_each_fact_has_a_date_and_where_there_is_one_a_commit() -> None:
    for each in (*FACTS["vllm"], *FACTS["sglang"]):
        assert each["date"] >= "2026-07-01"
        assert each["commit"] is None or len(each["commit"]) == 9
    assert all(set(GIVES_WEIGHTS) <= facts["routes"].keys() for facts in VLLM.values())
    assert {*WANTED} == {"vllm", "sglang"}
