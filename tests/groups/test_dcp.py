"""Groups and torch.distributed.checkpoint (DCP): scripts save and load as plain FSDP2 scripts do, with any cut, and a
checkpoint of the servers is exported for them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from ps_server.storage.dcp_folder import DcpLayout
from ps_server.storage.export import export
from tests.scripts.train_with_dcp import Options
from tests.tools.cases import cases
from tests.tools.cluster import Cluster
from tests.tools.forkserver import Nursery
from tests.tools.groups import LEASE, begun_and_ended, same


def test_what_a_group_saves_is_loaded_with_another_cut_to_the_bit(
    nursery: Nursery, shared: Cluster, job: str, tmp_path: Path
) -> None:
    """By larger groups, and by a plain script of one process, without servers."""
    folder = str(tmp_path / "folder")
    first = Options(2, groups=2, saves=folder)
    _, end = begun_and_ended(nursery, shared.address, f"{job}.1", tmp_path / "first", first)
    begin, _ = begun_and_ended(nursery, shared.address, f"{job}.2", tmp_path / "second", Options(3, loads=folder))
    assert same(begin, end)
    assert "optimizer/0/exp_avg" in begin
    begin, _ = begun_and_ended(nursery, "", "", tmp_path / "third", Options(0, loads=folder))
    assert same(begin, end)


@pytest.mark.parametrize("layout", cases(["flat"], ["nested"]))
def test_a_checkpoint_of_the_servers_is_exported_for_scripts_that_load_it(
    nursery: Nursery, make_cluster: Callable[..., Cluster], job: str, tmp_path: Path, layout: DcpLayout
) -> None:
    cluster = make_cluster(checkpoint_dir=tmp_path / "kept", lease=LEASE)
    _, end = begun_and_ended(nursery, cluster.address, job, tmp_path / "first", Options(2))
    for _ in range(2):  # over what is there, too
        export(tmp_path / "kept", job, None, tmp_path / "out", dcp=layout)
    folder, flat = str(tmp_path / "out" / "dcp"), layout == "flat"
    begin, _ = begun_and_ended(
        nursery, cluster.address, f"{job}.2", tmp_path / "second", Options(3, loads=folder, flat=flat)
    )
    assert same(begin, end)
    begin, _ = begun_and_ended(nursery, "", "", tmp_path / "third", Options(0, loads=folder, flat=flat))
    assert same(begin, end)
