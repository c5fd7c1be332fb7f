"""What `ps-server status --watch` shows of jobs of 4, 64 and 512 workers in a window of 80 columns and 24 lines."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import ps_server
from ps_protocol.convert import duration
from ps_protocol.v1 import cluster_pb2
from ps_runtime.retry import Peer
from ps_server.ops import plan, screen, status_text
from ps_server.ops.columns import lines_of, wrapped
from ps_server.rpc import operator_client
from ps_server.rpc.operator_client import OperatorClient
from ps_server.rpc.plain import plain
from ps_server.rpc.position import Position
from tests.tools.crowd import SILENT, clock_of, response, seen

COLUMNS, LINES = 80, 24


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def drawn(view: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The lines of a terminal of COLUMNS and LINES."""
    monkeypatch.setenv("COLUMNS", str(COLUMNS))
    monkeypatch.setenv("LINES", str(LINES))
    out = Terminal()
    screen._redraw(out, view)
    text = out.getvalue().removeprefix("\x1b[H").removesuffix("\x1b[J")
    return [line.removesuffix("\x1b[K") for line in text.splitlines()]


def ranks(lines: list[str]) -> list[int]:
    """The ranks of the race, from its first line to its last."""
    return [int(found[1]) for line in lines if (found := re.match(r" +(\d+)  +\d+  [─●]+", line))]


class Views:
    """A call that brings these."""

    def __init__(self, *views: Any) -> None:
        self._views = iter(views)

    def __iter__(self) -> Iterator[Any]:
        return self._views

    def __next__(self) -> Any:
        return next(self._views)

    def cancel(self) -> None:
        pass


class EarlierCoordinator:
    """Names no mode of its job, which it describes by other fields of its status."""

    def __init__(self, **fields: Any) -> None:
        self._view = response(4)
        self._view.status.jobs[0].mode = ""
        self._view.status.jobs[0].MergeFrom(cluster_pb2.JobStatus(**fields))

    def GetStatus(self, request: Any, timeout: float) -> Any:
        return self._view.status

    def WatchStatus(self, request: Any, timeout: float = 0.0) -> Any:
        return Views(self._view)


@pytest.mark.parametrize(
    ("mode", "fields"),
    [
        ("ssp:4", {}),
        ("local:8", {"local_steps": 8}),
        ("local:8/4", {"local_steps": 8, "local_fragments": 4}),
        ("local:30s", {"round_duration": duration(30.0)}),
    ],
)
def test_the_mode_is_shown_of_a_coordinator_that_does_not_name_it(
    mode: str, fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operator_client, "ClusterServiceStub", lambda channel: EarlierCoordinator(**fields))
    with OperatorClient(Peer("coordinator", "127.0.0.1:1")) as coordinator:
        views = [coordinator.view(Position()), *coordinator.watch(1.0)]
        assert [each.mode for each in coordinator.status().jobs] == [mode]
    for view in views:
        assert drawn(plain(view), monkeypatch)[0].startswith(f"demo · {mode} · training · ")
    unit = "rounds" if mode.startswith("local") else "steps"
    assert status_text.clock_unit(plain(views[0])["status"]["jobs"][0]) == unit


@pytest.mark.parametrize("workers", [4, 64, 512])
def test_the_sentence_and_the_race_come_first_and_all_fits(workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = drawn(seen(workers), monkeypatch)
    assert max(map(len, lines)) <= COLUMNS
    assert len(lines) < LINES
    assert lines[0] == f"demo · ssp:4 · training · {2.5 * workers:.1f} steps/s · running for 3 min"
    assert lines[1] == "54 % of the workers' time is waiting, most of it for worker 3"
    assert re.fullmatch(r"step 120-18\d of 400 · 45 % · 2 min left · checkpoint 8 s ago", lines[2])
    assert re.match(r" rank +steps +\S+ → \S+ +steps/s +loss  now", lines[3])
    assert [line for line in lines if line.startswith("ROLE ")], "and then the processes"
    assert len([line for line in lines if line.startswith("shard ")]) == 2
    assert not [line for line in lines if "make the window higher" in line]


def test_of_few_workers_all_are_shown_with_what_they_do(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = drawn(seen(4), monkeypatch)
    assert ranks(lines) == [0, 1, 2, 3]
    assert lines[4].endswith("waits 0.4 s for worker 3"), "whole: this is what the window is looked at for"
    assert not [line for line in lines if "more between" in line]


@pytest.mark.parametrize("workers", [64, 512])
def test_of_many_workers_those_in_trouble_are_shown_and_the_fastest(
    workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = drawn(seen(workers), monkeypatch)
    shown = ranks(lines)
    assert len(shown) == 10
    assert shown[:2] == [SILENT, 3], "one that is silent, then the one that is furthest behind"
    clocks = [clock_of(rank) for rank in shown[1:]]
    assert clocks == sorted(clocks)
    assert {clock_of(rank) for rank in shown[8:]} == {186}
    [between] = [line for line in lines if "more between" in line]
    assert between == f" {workers - 10} more between, at 180 to 186 steps"
    assert lines.index(between) == 4 + 8


@pytest.mark.parametrize("workers", [4, 64, 512])
def test_the_table_is_no_wider_than_the_window(workers: int) -> None:
    """Each shard's row had the clock of each worker: 1,538 columns with 256 of them."""
    view = seen(workers)
    view["status"]["coordinator"]["software_version"] = "0.1.0"
    [job] = view["status"]["jobs"]
    job["started"], job["world_size"] = False, 2 * workers + 5
    lines = status_text.table(view["status"], COLUMNS).splitlines()
    assert max(map(len, lines)) <= COLUMNS
    assert f"waits for ranks {workers}-{2 * workers + 4} to join" in " ".join(line.strip() for line in lines)
    whole = status_text.table(view["status"]).splitlines()
    assert max(map(len, whole[: workers + 4])) < 250
    [row] = [line.split() for line in whole if line.split()[:2] == ["shard", "0"]]
    head = whole[0].split()
    assert row[head.index("CLOCK")] == ("120-182" if workers == 4 else "120-186")


def test_a_group_of_processes_is_one_line_that_says_how_many_they_are() -> None:
    view = seen(2)
    [job] = view["status"]["jobs"]
    job["group_size"] = 4
    text = status_text.table(view["status"])
    assert re.findall(r"^group of 4 +(\d) ", text, re.MULTILINE) == ["0", "1"]
    assert "2 of 2 workers, each a group of 4 processes; " in text
    job["group_size"] = 1
    assert "group" not in status_text.table(view["status"])


def test_a_plan_is_no_wider_than_the_window_and_says_the_same() -> None:
    advice = plan.advise(plan.Question(parameters=10**9, workers=512, optimizer="AdamW", shards=16))
    narrow, wide = plan.table(advice, COLUMNS), plan.table(advice)
    assert max(map(len, narrow.splitlines())) <= COLUMNS < max(map(len, wide.splitlines()))
    assert set(narrow.split()) == set(wide.split())
    assert narrow.count("SHARDS ") > 1, "each part of the table says of how many"


def test_a_window_that_is_very_low_shows_who_is_in_trouble(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = screen.screen(seen(64), 80, 8)
    assert ranks(lines[:8])[0] == SILENT
    assert "more between" in "\n".join(lines[:8])


def test_columns_are_left_out_in_their_order_and_lines_are_cut() -> None:
    rows = [("A", "LONG", "B"), ("1", "x" * 10, "2")]
    assert lines_of(rows, 20, ["LONG"]) == ["A  LONG        B", "1  xxxxxxxxxx  2"]
    assert lines_of(rows, 12, ["LONG"]) == ["A  B", "1  2"]
    assert lines_of(rows, 8) == ["A  LONG…", "1  xxxx…"]
    assert wrapped(["one", "two", "three"], 9) == ["one · two", "three"]


def test_no_screen_of_a_user_has_the_word_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the name of what servers count; users read steps, or rounds of local steps."""
    page = Path(ps_server.__file__).parent / "page"
    assert "clock" not in (page / "index.html").read_text()
    assert not re.findall(r"""["'`]clocks?["'`]|(?:at|many) clocks?""", (page / "page.js").read_text())
    of_steps = [line for line in drawn(seen(4), monkeypatch) if not line.startswith("ROLE ")]
    assert not [line for line in of_steps if re.search(r"\bclocks?\b", line)]
