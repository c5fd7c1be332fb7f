"""Tokens with a name and an end: what the file says of them, and what an ended one is told."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path

import pytest

from ps_protocol.errors import InvalidRequest, Unauthenticated
from ps_runtime import reloading
from ps_server.rpc.auth import Authenticator, parse_access_list
from ps_server.rpc.permissions import Permission, Role

TOKEN, SERVERS, OTHER = "a-token-of-some-length", "a-token-of-the-servers", "another-token-of-a-length"
NEW_YEAR = datetime(2027, 1, 1, tzinfo=timezone.utc).timestamp()


class ShownToken:
    """A call that shows a token."""

    def __init__(self, token: str) -> None:
        self._token = token

    def invocation_metadata(self) -> object:
        """As gRPC has it."""
        return [("authorization", f"Bearer {self._token}")]

    def auth_context(self) -> dict[str, object]:
        """Of no certificate."""
        return {}

    def peer(self) -> str:
        """Some place."""
        return "ipv4:192.0.2.1:5"


@pytest.fixture
def authenticator(tmp_path: Path) -> Callable[[str, float], Authenticator]:
    """What tells principals by a file of these lines, at that time."""

    def made(lines: str, now: float) -> Authenticator:
        path = tmp_path / "tokens"
        path.write_text(lines)
        path.chmod(0o600)
        return Authenticator(path, lambda: now)

    return made


Make = Callable[[str, float], Authenticator]


def test_a_token_has_the_name_that_its_line_gives_and_is_good_until_its_end(authenticator: Make) -> None:
    line = f"worker:mine {TOKEN} name=alice until=2027-01-01\n"
    principal = authenticator(line, NEW_YEAR - 1).identify(ShownToken(TOKEN))
    assert (principal.name, principal.permissions) == ("token:alice", {Permission(Role.WORKER, "mine")})
    for moment in (NEW_YEAR, NEW_YEAR + 1e6):
        with pytest.raises(Unauthenticated, match="token of alice ended on 2027-01-01 00:00:00 UTC: ask for a new one"):
            authenticator(line, moment).identify(ShownToken(TOKEN))


def test_each_line_of_a_token_ends_by_itself(authenticator: Make) -> None:
    lines = f"admin {TOKEN} until=2027-01-01\nreader {TOKEN} until=2027-01-01T00:00:10Z\n"
    roles = [
        {permission.role for permission in authenticator(lines, now).identify(ShownToken(TOKEN)).permissions}
        for now in (NEW_YEAR - 1, NEW_YEAR + 9)
    ]
    assert roles == [{Role.ADMIN, Role.READER}, {Role.READER}]


def test_servers_show_each_other_the_first_token_that_is_good(authenticator: Make) -> None:
    lines = f"cluster {SERVERS} until=2027-01-01\ncluster {OTHER}\n"
    assert authenticator(lines, NEW_YEAR - 1).cluster_token() == SERVERS
    assert authenticator(lines, NEW_YEAR).cluster_token() == OTHER
    assert authenticator(lines.splitlines()[0], NEW_YEAR).cluster_token() is None


def test_a_token_that_has_ended_is_named_by_its_line_in_the_log(
    authenticator: Make, caplog: pytest.LogCaptureFixture
) -> None:
    authenticator(f"# a comment\nreader {TOKEN} until=2027-01-01\n", NEW_YEAR)
    assert "tokens, line 2: this token ended on 2027-01-01 00:00:00 UTC" in caplog.text
    assert TOKEN not in caplog.text


def test_an_end_may_be_moved_in_the_file(authenticator: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reloading, "CHECK_SECONDS", 0.0)
    asked = authenticator(f"reader {TOKEN} name=alice until=2027-01-01\n", NEW_YEAR)
    with pytest.raises(Unauthenticated):
        asked.identify(ShownToken(TOKEN))
    # Another file: in the same one, a change so soon after would have the size and the time of what was there.
    (tmp_path / "new").write_text(f"reader {TOKEN} name=alice until=2027-02-01\n")
    (tmp_path / "new").chmod(0o600)
    (tmp_path / "new").replace(tmp_path / "tokens")
    assert asked.identify(ShownToken(TOKEN)).name == "token:alice"


@pytest.mark.parametrize(
    "wrong",
    [
        "until=tomorrow",
        "until=2027-13-01",
        "until=2027-01-01T25:00Z",
        "until=2027-01-01T12:00",
        "until=",
        "name=",
        "name=two/words",
        "name=" + "x" * 65,
        "name=a name=b",
        "until=2027-01-01 until=2028-01-01",
        "a-second-token-of-some-length",
        "owner=alice",
    ],
)
def test_what_a_line_cannot_say_is_refused_without_telling_it(wrong: str) -> None:
    with pytest.raises(InvalidRequest, match="line 1: after the token come name=NAME") as caught:
        parse_access_list(f"worker {TOKEN} {wrong}", "tokens")
    assert "some-length" not in str(caught.value)
