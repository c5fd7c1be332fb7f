"""Where processes are to meet that are still importing what they need: at a port that nothing takes meanwhile."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from ps_runtime import free_ports
from ps_runtime.free_ports import free_port


@pytest.fixture
def given_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that says which ports the system gives to outgoing connections."""
    monkeypatch.setattr(free_ports, "_RANGE", tmp_path / "range")
    return tmp_path / "range"


@pytest.mark.parametrize(
    ("said", "found"),
    [("32768\t60999\n", range(10_000, 32_768)), ("10500\t40000\n", range(40_001, 65_536))],
    ids=["below", "above"],
)
def test_it_is_none_that_the_system_gives_to_outgoing_connections(given_out: Path, said: str, found: range) -> None:
    given_out.write_text(said)
    port = free_port()
    assert port in found
    with socket.create_server(("127.0.0.1", port)):
        pass


@pytest.mark.parametrize("said", ["1024 65535", "no numbers", None])
def test_where_these_are_all_or_unknown_it_is_one_that_is_free(given_out: Path, said: str | None) -> None:
    if said is not None:
        given_out.write_text(said)
    with socket.create_server(("127.0.0.1", free_port())):
        pass


def test_it_is_none_that_is_in_use_or_that_others_are_about_to_take(given_out: Path) -> None:
    given_out.write_text("10004 65535")
    taken: list[int] = []
    with socket.create_server(("127.0.0.1", free_port())) as used:
        for _ in range(3):
            taken.append(free_port(taken=taken))
        assert used.getsockname()[1] not in taken
        assert len(set(taken)) == 3
