"""What the tests of launches share."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

import ps_worker.cli
from tests.tools.launching import Commands, Refusal, Start


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts commands that end with the test: start("-m", "ps_server", "up", PS_SHARDS="1")."""
    with closing(Commands(tmp_path)) as commands:
        yield commands.start


@pytest.fixture
def refusal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Refusal:
    """The exit code of `ps-worker run` and its stderr, where it starts nothing: refusal("--shards=1", "--mode=ddp").

    It runs in this process: another one takes half a second for its imports.
    """

    def refused(*words: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["ps-worker", "run", *words])
        with pytest.raises(SystemExit) as ended:
            ps_worker.cli.main()
        said = capsys.readouterr()
        assert said.out == "", "nothing was started"
        code = ended.value.code
        assert code
        return (1, f"{said.err}{code}\n") if isinstance(code, str) else (code, said.err)

    return refused
