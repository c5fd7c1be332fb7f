"""The adapter of vLLM fits the one that is installed: its sources are read, because it needs a GPU to run."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from tests.tools.engine_sources import facts_of, misfits_of_vllm
from tests.tools.framework_processes import needs
from tests.tools.launching import ROOT

pytestmark = needs("vllm")


def test_the_adapter_fits_the_vllm_that_is_installed() -> None:
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    facts = facts_of("vllm", Path(spec.origin).parents[1])
    adapter = ROOT / "ps_worker" / "engines"
    assert misfits_of_vllm(facts, adapter / "vllm.py", adapter / "loaded_versions.py") == []
