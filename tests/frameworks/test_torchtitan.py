"""torchtitan's checkpoints come and go: its CheckpointManager loads what is exported, and scripts here load what it
has saved.

Not by `make test-frameworks`: torchtitan 0.3.0 wants an older datasets, and with it an older fsspec, than the other
frameworks here. Its classes for checkpoints need neither:

    pip install --no-deps torchtitan torch_checkpointing spmd_types tyro docstring-parser typeguard
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

from ps_server.storage.export import export
from tests.scripts import train_with_dcp
from tests.tools.cluster import Cluster
from tests.tools.forkserver import Nursery
from tests.tools.groups import LEASE, begun_and_ended, same

pytestmark = [
    pytest.mark.frameworks,
    pytest.mark.skipif(find_spec("torchtitan") is None, reason="needs the package torchtitan: see this file"),
]


def test_torchtitan_loads_an_exported_checkpoint_to_the_bit(
    nursery: Nursery, make_cluster: Callable[..., Cluster], job: str, tmp_path: Path
) -> None:
    """With its optimizers and a schedule, which are there before the load."""
    from tests.scripts.train_with_torchtitan import Options

    cluster = make_cluster(checkpoint_dir=tmp_path / "kept", lease=LEASE)
    _, end = begun_and_ended(nursery, cluster.address, job, tmp_path / "first", train_with_dcp.Options(2))
    export(tmp_path / "kept", job, None, tmp_path / "out", dcp="flat")
    options = Options(3, loads=str(tmp_path / "out" / "dcp"))
    begin, _ = begun_and_ended(nursery, "", "", tmp_path / "second", options)
    assert same(begin, end)


def test_a_group_loads_what_torchtitan_has_saved_to_the_bit(
    nursery: Nursery, shared: Cluster, job: str, tmp_path: Path
) -> None:
    from tests.scripts.train_with_torchtitan import Options

    _, end = begun_and_ended(nursery, "", "", tmp_path / "first", Options(2, saves=True))
    folder = str(tmp_path / "first" / "checkpoint" / "step-3")
    options = train_with_dcp.Options(3, loads=folder, flat=True)
    begin, _ = begun_and_ended(nursery, shared.address, job, tmp_path / "second", options)
    assert "optimizer/0/exp_avg" in begin
    assert same(begin, end)
