"""The example that serves a model while it trains, with real servers: what it answers, and of which version."""

from __future__ import annotations

import asyncio
import copy
import json
import os
import re
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.nn.functional as F

import ps_torch as ps
from ps_server.ops import requests
from tests.tools import launching
from tests.tools.cluster import Cluster, until
from tests.tools.launching import ROOT, Command, Commands, kill_family
from tests.tools.served_model import SHAPE, TEXT, ask

SCRIPT = ROOT / "examples" / "serve.py"
FLAGS = ["--heads=2", "--block=8", "--port=0"]

char_gpt = launching.load(ROOT / "examples" / "char_gpt.py")
launching.load(ROOT / "examples" / "demo.py")  # serve.py imports both
pytest.importorskip("fastapi", reason="needs the extra `examples`")


def served(commands: Commands, server: str, *flags: str) -> str:
    """Starts the service; its address."""
    service = commands.start(str(SCRIPT), f"--server={server}", *FLAGS, *flags)
    [address] = service.says(r"serving version \d+ at (http://\S+)\n")
    return address


class Trainer:
    """A worker that trains the model of char_gpt.py, and remembers its weights by clock."""

    def __init__(self, session: ps.Session) -> None:
        torch.manual_seed(0)
        self.own, self._session = char_gpt.CharGPT(char_gpt.Shape(**SHAPE)), session
        # Fast enough for each update to change what the model writes.
        self._model, self._optimizer = session.prepare(self.own, torch.optim.SGD(self.own.parameters(), lr=1.0))
        self._tokens = torch.tensor([list(TEXT.encode())])
        self.past = {0: copy.deepcopy(self.own.state_dict())}

    def step(self) -> None:
        self._optimizer.zero_grad()
        F.cross_entropy(self._model(self._tokens[:, :-1])[0], self._tokens[0, 1:]).backward()
        self._optimizer.step()
        self.past[self._session.clock] = copy.deepcopy(self.own.state_dict())

    def writes(self, version: int, prompt: str, length: int) -> str:
        model = char_gpt.CharGPT(char_gpt.Shape(**SHAPE))
        model.load_state_dict(self.past[version])
        return "".join(char_gpt.write_text(model, prompt, length))


@pytest.mark.long
def test_each_answer_is_of_the_one_version_that_it_says(shared: Cluster, job: str, commands: Commands) -> None:
    with shared.connect("sync", job=job) as session:
        trainer = Trainer(session)
        address = served(commands, shared.address, f"--job={job}", "--wire=float32", "--models=3")
        answers: list[tuple[int, dict[str, Any]]] = []

        def request() -> None:
            for _ in range(50):
                code, version, answer = ask(address, "/generate", {"prompt": "def ", "length": 40})
                assert code == 200
                answers.append((version, answer))

        threads = [threading.Thread(target=request) for _ in range(4)]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            trainer.step()
        assert len(answers) == 200
        assert all(version == answer["version"] for version, answer in answers)
        expected = {version: trainer.writes(version, "def ", 40) for version, _ in answers}
        assert {answer["text"] == expected[version] for version, answer in answers} == {True}
        assert len({*expected.values()}) > 10, "versions differ in what they write"
        clock = session.clock
        until(lambda: ask(address, "/generate", {"length": 1})[1] == clock, "the newest version, under no load")
        check_refusals(address, clock)


def health(app: Any) -> tuple[int, dict[str, Any]]:
    """What GET /healthz answers."""
    sent: list[Any] = []
    came = [{"type": "http.disconnect"}, {"type": "http.request", "body": b""}]

    async def receive() -> Any:
        return came.pop() if len(came) > 1 else came[0]

    async def send(message: Any) -> None:
        sent.append(message)

    about = {"http_version": "1.1", "scheme": "http", "query_string": b"", "headers": []}
    asyncio.run(app({"type": "http", "method": "GET", "path": "/healthz", **about}, receive, send))
    return sent[0]["status"], json.loads(b"".join(message.get("body", b"") for message in sent[1:]))


def test_a_service_says_that_it_is_further_behind_than_it_may_be(
    shared: Cluster, job: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["serve.py", "--max-behind=4", "--late=3600"])
    serve = launching.load(SCRIPT)
    given = serve.parse_arguments()
    with shared.connect("sync", job=job) as session, ps.subscribe(shared.address, job, every=1000) as feed:
        trainer = Trainer(session)
        app = serve.application(serve.Served(feed, 1, 2, 8, 60.0), given.late, given.max_behind)
        for behind, status, why in ((4, 200, None), (5, 503, "5 updates behind, more than 4")):
            while session.clock < behind:
                trainer.step()
            until(lambda: feed.behind == behind, "what the shards tell")  # noqa: B023
            found, answer = health(app)
            assert (found, answer["behind"], answer["trouble"]) == (status, behind, why)


def check_refusals(address: str, version: int) -> None:
    """What is no request gets an answer that says so, and a version, as all do."""
    for path, body, code in (
        ("/generate", "{", 422),
        ("/generate", {"length": 0}, 422),
        ("/generate", {"prompt": ""}, 422),
        ("/score", {"text": "a"}, 422),
        ("/other", None, 404),
        ("/healthz", None, 200),
    ):
        assert ask(address, path, body)[:2] == (code, version), (path, body)


def trained(commands: Commands, server: str) -> Command:
    """Starts a process that trains the model for as long as it lives."""
    shape = [f"--{name}={value}" for name, value in SHAPE.items()]
    where = {"PS_SERVER": server, "PS_MODE": "sync", "PS_RANK": "0", "PS_WORLD_SIZE": "1"}
    script = str(ROOT / "examples" / "char_gpt.py")
    return commands.start(script, *shape, "--steps=1000000", "--batch-size=8", "--lr=0.01", **where)


def relay_of(commands: Commands, server: str) -> tuple[Command, str]:
    """Starts a relay of servers; its process and address."""
    process = commands.start("-m", "ps_server", "relay", f"--upstream={server}", "--port=0", "--metrics-port=0")
    [address] = process.says(r"ready at (\S+)")
    return process, address


@pytest.mark.long
def test_the_model_is_served_while_it_trains_and_when_a_relay_a_shard_the_trainer_and_the_servers_are_killed(
    commands: Commands, tmp_path: Path
) -> None:
    checkpoints = [f"--checkpoint-dir={tmp_path / 'checkpoints'}", "--checkpoint-every=1s"]
    servers = commands.start("-m", "ps_server", "up", "--shards=2", "--port=0", "--metrics-port=0", *checkpoints)
    [server] = servers.says(r"ps-server: ready at (\S+) \(\d shards?\)\n")
    trainer = trained(commands, server)
    relays = [relay_of(commands, server) for _ in range(2)]
    address = served(commands, ",".join(each for _, each in relays), "--late=1")
    first = ask(address, "/score", {"text": TEXT})[2]

    def lower(than: float) -> dict[str, Any] | None:
        code, _, answer = ask(address, "/score", {"text": TEXT})
        assert code == 200
        return answer if answer["loss"] < than else None

    second = until(lambda: lower(first["loss"] - 0.5), "a served model that has learnt")
    assert second["version"] > first["version"]

    relays[0][0].process.kill()  # the one that the service reads from
    lost = ask(address, "/generate", {})
    assert lost[0] == 200
    until(lambda: ask(address, "/generate", {})[1] > lost[1] + 2, "newer weights from the other relay")
    assert ask(address, "/generate", {})[0] == 200

    [pid] = [each["pid"] for each in requests.fetch(server)["shards"] if each["index"] == 1]
    psutil.Process(pid).suspend()  # cut off for as long as this test wants, in place of the second that a restart takes
    until(lambda: ask(address, "/healthz")[0] == 503, "the service's saying that it is behind")
    assert "nothing has come for 1 s" in ask(address, "/healthz")[2]["trouble"]
    assert ask(address, "/generate", {})[0] == 200, "with the weights that it has"
    stale = ask(address, "/healthz")[1]
    os.kill(pid, signal.SIGKILL)
    until(lambda: ask(address, "/healthz")[0] == 200, "the service's following the shard that came back")
    until(lambda: ask(address, "/generate", {})[1] > stale, "newer weights than before")
    assert ask(address, "/healthz")[2]["restores"] > 0, "it says that the version fell meanwhile"

    kill_family(trainer.process.pid)
    until(lambda: ask(address, "/healthz")[2]["unchanged_seconds"] > 2, "its saying that nothing changes")
    # On a busy machine nothing may come for the second of --late.
    _, version, health = until(lambda: found if (found := ask(address, "/healthz"))[0] == 200 else None, "its health")
    assert health["behind"] == 0, "it has the newest weights that there are"
    assert ask(address, "/generate", {})[:2] == (200, version)

    kill_family(servers.process.pid)
    until(lambda: ask(address, "/healthz")[0] == 503, "its saying that it may be behind")
    assert ask(address, "/generate", {})[:2] == (200, version)


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_servers_training_and_the_service_start_with_one_command_and_end_with_it(
    commands: Commands, tmp_path: Path, number: int
) -> None:
    shape = [f"--{name}={value}" for name, value in SHAPE.items()]
    more = ["--batch-size=8", "--lr=0.01", "--steps=1000000"]
    service = commands.start(str(SCRIPT), "--demo", f"--out={tmp_path}", "--port=0", *shape, *more)
    [address] = service.says(r"serving version \d+ at (http://\S+)\n")
    first = ask(address, "/score", {"text": TEXT})[2]["loss"]
    until(lambda: ask(address, "/score", {"text": TEXT})[2]["loss"] < first - 0.5, "a served model that has learnt")
    started = psutil.Process(service.process.pid).children(recursive=True)
    assert len(started) >= 4, "a coordinator, shards, workers"
    service.process.send_signal(number)
    until(lambda: not any(each.is_running() for each in started), "the end of all that was started")
    assert service.process.wait(60) == 128 + number


@pytest.mark.long
def test_a_demo_whose_workers_fail_says_so(commands: Commands, tmp_path: Path) -> None:
    service = commands.start(str(SCRIPT), "--demo", f"--out={tmp_path}", "--port=0", "--job=other", "--stepz=5")
    assert service.process.wait(launching.START_SECONDS) == 1
    assert re.search(r"serve: the workers ended with code \d+; their log is \S+workers.log\n", service.err)
    assert "--stepz" in (tmp_path / "workers.log").read_text()


def test_flags_of_the_training_are_for_those_who_start_it_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    serve = launching.load(SCRIPT)
    for way in ("--demo", "--ray"):
        monkeypatch.setattr(sys, "argv", ["serve.py", way, "--lr=0.01", "--mode=async", "--heads=2"])
        arguments = serve.parse_arguments()
        assert arguments.training == ["--lr=0.01", "--mode=async"]
        assert {"--heads=2", "--lr=0.01"} <= {*serve.words(arguments)}
    monkeypatch.setattr(sys, "argv", ["serve.py", "--lr=0.01"])
    with pytest.raises(SystemExit):
        serve.parse_arguments()
    assert "unrecognized arguments: --lr=0.01" in capsys.readouterr().err
