"""The example that predicts while others train, with real servers: it follows them through the death of a shard."""

from __future__ import annotations

import json
import os
import signal
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

import ps_worker
from ps_server.ops import requests
from ps_server.storage.checkpoints import CheckpointStore
from tests.tools import launching
from tests.tools.cluster import until
from tests.tools.launching import ROOT, Commands

SCRIPT = ROOT / "examples" / "predict.py"
clicks = launching.load(ROOT / "examples" / "clicks.py")


def ask(address: str, path: str, body: bytes | None = None) -> tuple[int, dict[str, Any]]:
    try:
        with urllib.request.urlopen(f"{address}{path}", body, timeout=30) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


class Trainer:
    """A worker that trains the model of clicks.py."""

    def __init__(self, session: ps_worker.Session) -> None:
        torch.manual_seed(0)
        self.own, self._session = clicks.FactorisationMachine(4), session
        optimizer = torch.optim.Adagrad(self.own.parameters(), lr=0.1)
        self._model, self._optimizer = session.prepare(self.own, optimizer)
        self.data = clicks.Clicks(20_000, seed=1)

    def steps(self, count: int) -> int:
        for _ in range(count):
            first = 200 * (self._session.clock % 100)
            part = slice(first, first + 200)
            self._optimizer.zero_grad()
            loss = F.binary_cross_entropy_with_logits(self._model(self.data.ids[part]), self.data.clicks[part])
            loss.backward()
            self._optimizer.step()
        return self._session.clock

    @torch.no_grad()
    def predicted(self, ids: torch.Tensor, bias: float) -> torch.Tensor:
        return (self.own(ids) - self.own.bias + bias).sigmoid()  # type: ignore[no-any-return]


@pytest.mark.long
def test_predictions_follow_training_and_outlive_a_shard(commands: Commands, tmp_path: Path) -> None:
    checkpoints = tmp_path / "checkpoints"
    flags = [
        "--shards=2",
        "--port=0",
        "--metrics-port=0",
        f"--checkpoint-dir={checkpoints}",
        "--checkpoint-every=5steps",
    ]
    servers = commands.start("-m", "ps_server", "up", *flags)
    [server] = servers.says(r"ps-server: ready at (\S+) \(\d shards?\)\n")
    save_file({"bias": torch.tensor([0.25])}, tmp_path / "model.safetensors")
    with ps_worker.connect(server, "sync", rank=0, world_size=1) as session:
        trainer = Trainer(session)
        trainer.steps(3)
        kept = f"--directory={tmp_path / 'rows'}"
        service = commands.start(
            str(SCRIPT), f"--server={server}", f"--model={tmp_path / 'model.safetensors'}", kept, "--port=0"
        )
        [address] = service.says(r"predicting at (http://\S+)/predict with \d+ rows of version \d+\n")
        ids = trainer.data.ids[:50]
        body = json.dumps({"ids": ids.tolist()}).encode()

        def follows(clock: int) -> list[float] | None:
            """What it predicts of this clock, once that is what training has."""
            code, answer = ask(address, "/predict", body)
            assert code == 200, answer
            wanted = trainer.predicted(ids, bias=0.25)
            same = torch.allclose(torch.tensor(answer["probabilities"]), wanted, atol=1e-6)
            return answer["probabilities"] if answer["version"] == clock and same else None

        first = until(lambda: follows(3), "the first predictions")
        later = trainer.steps(5)
        second = until(lambda: follows(later), "predictions after more training")
        assert first != second
        until(lambda: CheckpointStore(checkpoints).names("default"), "a checkpoint")
        [pid] = [each["pid"] for each in requests.fetch(server)["shards"] if each["index"] == 1]
        os.kill(pid, signal.SIGKILL)
        assert ask(address, "/predict", body)[0] == 200, "with the rows that it has"
        clock = trainer.steps(8)
        until(lambda: follows(clock), "predictions after the shard came back")
        code, health = ask(address, "/healthz")
        assert (code, health["version"], health["trouble"]) == (200, clock, None)
        assert health["rows"] == len(trainer.own.rows)
        check_refusals(address)


def check_refusals(address: str) -> None:
    """What is no request gets one clear answer, and the service goes on."""
    wanted = r'expected {"ids": [[8 whole numbers of 64 bits], ...]}'
    for body, said in (
        (b"{", "Expecting property name"),
        (b"[]", wanted),
        (b'{"ids": [[1, 2]]}', f"{wanted}, got [1, 2] of int64"),
        (b'{"ids": [[1, 2, 3, 4, 5, 6, 7, 0.5]]}', f"{wanted}, got [1, 8] of float32"),
        (b'{"ids": [[1, 2, 3, 4, 5, 6, 7, 99999999999999999999]]}', wanted),
        (b'{"ids": "all"}', wanted),
    ):
        code, answer = ask(address, "/predict", body)
        assert code == 400
        assert said in answer["error"]
    assert ask(address, "/other")[0] == ask(address, "/other", b"{}")[0] == 404
    assert ask(address, "/healthz")[0] == 200


def test_help_says_what_it_takes(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit, match="0"):
        launching.run_here(monkeypatch, SCRIPT, "--help")
    assert "PS_SERVER" in capsys.readouterr().out
