"""The audit log: what is in it, by whom, that no secret is, and that no stranger fills a disk with it."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ps_protocol.errors import Forbidden, InvalidRequest, Unauthenticated
from ps_runtime import audit, reloading
from ps_runtime.audit import LONGEST_SECONDS, MOST_KINDS, Audit, AuditEntry
from ps_runtime.credentials import Access
from ps_runtime.logs import Speaker
from ps_server.ops import requests
from tests.tools.cluster import Cluster, until

TOKENS = {role: f"{role}-token-of-some-length" for role in ("worker", "reader", "admin", "cluster")}
NAMES = {"worker": "alice", "reader": "rita", "admin": "adam"}
STRANGER = Access(token=lambda: "a-token-that-nobody-knows")
REFUSAL = AuditEntry("refused", "alice", "ipv4:192.0.2.1", "job", "/service/Method")


def carrying(role: str) -> Access:
    return Access(token=lambda: TOKENS[role])


@pytest.fixture
def lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], list[dict[str, Any]]]]:
    """Returns what is in the audit log of this process so far."""
    path, before = tmp_path / "audit", logging.getLogger("ps_server.audit").propagate
    monkeypatch.setattr(audit, "_fields", {})
    audit.start(Speaker("shard", 0), str(path))
    [handler] = audit.audit_log.handlers

    def read() -> list[dict[str, Any]]:
        audit.flush(all_of_them=True)
        return [json.loads(line) for line in path.read_text().splitlines()]

    yield read
    audit.flush(all_of_them=True)
    audit.audit_log.removeHandler(handler)
    audit.audit_log.propagate = before
    handler.close()


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    file = tmp_path / "tokens"
    named = {role: f" name={NAMES[role]}" if role in NAMES else "" for role in TOKENS}
    file.write_text("".join(f"{role} {token}{named[role]}\n" for role, token in TOKENS.items()))
    file.chmod(0o600)
    (tmp_path / "worker").write_text(TOKENS["worker"])
    (tmp_path / "worker").chmod(0o600)
    running = Cluster(shards=1, tokens=file, checkpoint_dir=tmp_path / "checkpoints")
    yield running
    running.stop()


def test_it_tells_who_joined_saved_left_and_ended_a_job(
    cluster: Cluster, lines: Callable[[], list[dict[str, Any]]], tmp_path: Path
) -> None:
    with cluster.connect("sync", job="mine", token_file=tmp_path / "worker") as session:
        model = torch.nn.Linear(1, 1)
        module, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
        for parameter in module.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        assert "mine" in cluster.coordinator.jobs()
        requests.end_job(cluster.address, "mine", carrying("admin"))
    found = lines()
    told = [(line["what"], line["principal"], line["host"], line["job"]) for line in found]
    assert ("join", "token:alice", "ipv4:127.0.0.1", "mine") in told
    assert ("started", "token:alice", "ipv4:127.0.0.1", "mine") in told
    assert ("end", "token:adam", "ipv4:127.0.0.1", "mine") in told
    assert all((line["role"], line["index"]) == ("shard", 0) for line in found)
    assert all(line["time"].endswith("+00:00") for line in found)


def test_it_tells_of_a_checkpoint_that_is_begun_and_how_it_ended(
    cluster: Cluster, lines: Callable[[], list[dict[str, Any]]], tmp_path: Path
) -> None:
    with cluster.connect("sync", job="mine", token_file=tmp_path / "worker") as session:
        model = torch.nn.Linear(1, 1)
        session.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    begun, complete = [line for line in lines() if line["what"].startswith("checkpoint")][:2]
    assert (begun["what"], begun["principal"]) == ("checkpoint begun", audit.SERVERS)
    assert (complete["what"], complete["job"]) == ("checkpoint", "mine")
    assert "is complete" in complete["detail"]


def test_it_tells_of_each_refusal_by_role_and_of_a_stranger_by_its_host(
    cluster: Cluster, lines: Callable[[], list[dict[str, Any]]], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    with pytest.raises(Forbidden):
        requests.end_job(cluster.address, "mine", carrying("reader"))
    for _ in range(5):
        with pytest.raises(Unauthenticated):
            requests.fetch(cluster.address, STRANGER)
    refused = [line for line in lines() if line["what"] == "refused"]
    assert [(line["principal"], line["host"]) for line in refused[:2]] == [
        ("token:rita", "ipv4:127.0.0.1"),
        ("unknown", "ipv4:127.0.0.1"),
    ]
    assert refused[0]["about"].endswith("/EndJob")
    assert "takes the role admin" in refused[0]["detail"]
    assert sum(line.get("count", 1) for line in refused[1:]) == 5
    assert "refused: token:rita, ipv4:127.0.0.1: " in caplog.text, "refusals are in the ordinary log, too"


def test_it_tells_of_changed_credentials_and_no_secret_is_in_it(
    cluster: Cluster,
    lines: Callable[[], list[dict[str, Any]]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(reloading, "CHECK_SECONDS", 0.0)
    text = (tmp_path / "tokens").read_text()

    def write(tokens: str) -> None:
        """Changes the whole file at once: servers read it meanwhile."""
        (tmp_path / "new-tokens").write_text(tokens)
        (tmp_path / "new-tokens").chmod(0o600)
        (tmp_path / "new-tokens").replace(tmp_path / "tokens")

    write(text.replace("reader ", "reader:mine "))
    with pytest.raises(Unauthenticated):
        requests.fetch(cluster.address, STRANGER)
    until(lambda: any(line["what"] == "credentials" for line in lines()), "a line")
    write(text + "captain a-third-token-of-some-length\n")
    with pytest.raises(Unauthenticated):
        requests.fetch(cluster.address, STRANGER)
    changed = [line["detail"] for line in lines() if line["what"] == "credentials"]
    assert changed[0].endswith("tokens changed and is used from now on")
    assert any("cannot be used" in detail for detail in changed)
    shown = (tmp_path / "audit").read_text() + caplog.text
    for token in (*TOKENS.values(), "a-token-that-nobody-knows", "a-third-token-of-some-length"):
        assert token not in shown


class Written:
    """An audit log whose time is the test's, and what it has written: by entry, the counts."""

    def __init__(self) -> None:
        self.now = 0.0
        self.lines: list[tuple[AuditEntry, int]] = []
        self.audit = Audit(lambda entry, detail, count: self.lines.append((entry, count)), lambda: self.now)


def test_equal_lines_are_counted_and_written_ever_less_often() -> None:
    written = Written()
    for _ in range(36_000):  # a hundred a second, for six minutes
        written.audit.note(REFUSAL, "words")
        written.now += 0.01
        written.audit.flush()
    written.audit.flush(all_of_them=True)
    assert sum(count for _, count in written.lines) == 36_000
    assert len(written.lines) < 15
    written.now += 2 * LONGEST_SECONDS
    written.audit.flush()
    written.audit.note(REFUSAL, "words")
    assert written.lines[-1] == (REFUSAL, 1), "after a pause the next one is written at once"


def test_of_very_many_different_lines_only_their_number_is_told() -> None:
    written = Written()
    for number in range(10 * MOST_KINDS):
        written.audit.note(REFUSAL._replace(job=f"job-{number}"), "words")
    written.now += LONGEST_SECONDS
    written.audit.flush()
    assert len(written.lines) <= MOST_KINDS + 3
    assert sum(count for _, count in written.lines) == 10 * MOST_KINDS


def test_its_file_is_private_is_appended_to_and_follows_a_rotation(
    lines: Callable[[], list[dict[str, Any]]], tmp_path: Path
) -> None:
    path = tmp_path / "audit"
    assert path.stat().st_mode & 0o777 == 0o600
    audit.note("end", "words", job="one")
    assert [line["job"] for line in lines()] == ["one"]
    path.rename(tmp_path / "audit.1")
    audit.note("end", "words", job="two")
    assert [line["job"] for line in lines()] == ["two"]


def test_a_file_that_cannot_be_written_is_an_error_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"--audit-log: cannot write .* \(No such file or directory\)"):
        audit.start(Speaker("shard"), str(tmp_path / "missing" / "file"))
