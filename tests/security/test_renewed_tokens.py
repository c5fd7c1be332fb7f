"""A worker's token is renewed while it trains: it goes on with the new one, whatever it calls by."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ps_protocol.errors import Unauthenticated
from ps_runtime import reloading, retry
from ps_runtime.credentials import Access
from ps_server.ops import requests
from tests.tools.cases import cases
from tests.tools.cluster import Cluster


def is_known(cluster: Cluster, token: str) -> bool:
    try:
        requests.fetch(cluster.address, Access(token=lambda: token))
    except Unauthenticated:
        return False
    return True


@pytest.mark.parametrize(("transport", "at_once"), cases([("tcp", False), ("grpc", True)], [("shm", False)]))
def test_a_worker_goes_on_with_a_renewed_token(
    make_cluster: Callable[..., Cluster],
    tmp_path: Path,
    transport: str,
    at_once: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """at_once: servers forget the old one before the worker has read the new one."""
    for module in (reloading, retry):  # who shows a token that is not known waits until it has been read again
        monkeypatch.setattr(module, "CHECK_SECONDS", 0.2)
    roles, shown = tmp_path / "roles", tmp_path / "token"
    own, old, new = (secrets.token_hex(16) for _ in range(3))

    def write(*known: str) -> None:
        """Changes the whole file at once: servers read it meanwhile."""
        lines = [f"{role} {token}\n" for token in known for role in ("worker", "reader")]
        (tmp_path / "new-roles").write_text("".join([*lines, f"cluster {own}\n"]))
        (tmp_path / "new-roles").chmod(0o600)
        (tmp_path / "new-roles").replace(roles)

    write(old)
    shown.write_text(old)
    shown.chmod(0o600)
    cluster, model = make_cluster(shards=2, tokens=roles), torch.nn.Linear(4, 4)
    with cluster.connect("sync", world_size=1, transport=transport, token_file=shown) as session:
        trained, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), bucket_bytes=64)

        def step() -> None:
            optimizer.zero_grad()
            trained(torch.ones(1, 4)).sum().backward()
            optimizer.step()

        step()
        if not at_once:
            write(old, new)
            while not is_known(cluster, new):
                step()
        shown.write_text(new)
        if not at_once:
            while session.clock < 5:
                step()
        write(new)
        while is_known(cluster, old):
            step()
        clock = session.clock
        for _ in range(5):
            step()
        assert session.clock == clock + 5
