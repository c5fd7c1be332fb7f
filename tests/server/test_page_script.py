"""What the page shows of jobs of 4, 64 and 512 workers, and of one that has ended: its script, run without a browser.

tests/browser has a real one, and a real cluster. Here the view is made up, and the document is a stub.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import subprocess
from typing import Any

import pytest

from ps_protocol.v1 import cluster_pb2, figures_pb2, shard_pb2
from ps_server.ops.page import FILES, view_json
from tests.tools.crowd import SILENT, clock_of, response
from tests.tools.launching import ROOT

NODE = shutil.which("node")
pytestmark = pytest.mark.skipif(NODE is None, reason="node is not installed, which runs the page's script")

NOW = 1_800_000_000


def view(workers: int, samples: int = 0, first: int = 0) -> cluster_pb2.WatchStatusResponse:
    """The view of a job that began 200 s ago, with samples of a second of the time up to now."""
    made = response(workers)
    made.process = 7
    made.view_time.FromSeconds(NOW)
    if samples:
        made.history.CopyFrom(history("demo", samples, first))
    return made


def history(job: str, samples: int, first: int = 0) -> cluster_pb2.History:
    """A curve of the loss: NaN, where there was none, in its first sample."""
    times = [NOW - samples + 1 + number for number in range(samples)]
    values = [math.nan, *(float(number) for number in range(1, samples))]
    series = [cluster_pb2.Series(job=job, name="value.loss", values=values)]
    return cluster_pb2.History(first_sample=first, times=times, series=series)


def page(*views: cluster_pb2.WatchStatusResponse, address: str = "") -> dict[str, Any]:
    """What the page shows after each of these answers."""
    answers = "[" + ",".join(view_json(each).decode() for each in views) + "]"
    assert NODE is not None
    words = [NODE, str(ROOT / "tests" / "tools" / "page_stub.mjs"), str(FILES / "page.js"), address]
    american = os.environ | {"TZ": "UTC", "LC_ALL": "en_US.UTF-8"}
    done = subprocess.run(words, input=answers, capture_output=True, text=True, timeout=120, check=False, env=american)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    assert not [each["trouble"] for each in found["shown"] if each["trouble"]]
    return found


def test_of_few_workers_each_has_its_row() -> None:
    [shown] = page(view(4))["shown"]
    assert [row[0] for row in shown["workers"]] == ["0", "1", "2", "3"]
    assert (shown["race"], shown["button"]) == (4, "")


@pytest.mark.parametrize("workers", [64, 512])
def test_of_many_workers_those_in_trouble_are_shown_and_the_fastest(workers: int) -> None:
    found = page(view(workers))
    [shown] = found["shown"]
    rows = [row[0] for row in shown["workers"]]
    assert len(rows) == 8 + 1 + 2
    assert rows[:2] == [str(SILENT), "3"]
    assert {clock_of(int(rank)) for rank in rows[9:]} == {186}
    assert shown["workers"][8][1] == f"{workers - 10} more between"
    assert f"{workers - 10} more between" in shown["raceTexts"]
    assert shown["race"] == 10
    assert shown["raceHeight"] < 320, "as high as the race of a dozen"
    assert shown["button"] == f"show all {workers} workers"
    assert found["afterClick"] == {"race": workers, "button": "show those in trouble and the fastest"}


def test_steps_time_left_and_how_long_it_runs_are_the_first_figures() -> None:
    [shown] = page(view(4))["shown"]
    figures = {name: value for value, name in shown["figures"]}
    assert shown["figures"][0] == ["45 %", "of 400 steps, 2 min left"]
    assert figures["running for"] == "3 min"
    assert "leased data" not in figures, "an ordinary loader leases none"


@pytest.mark.parametrize(("mode", "unit"), [("local:8", "rounds"), ("local:30s", "rounds"), ("ssp:4", "steps")])
def test_clocks_are_rounds_in_modes_of_local_steps(mode: str, unit: str) -> None:
    named = view(4)
    named.status.jobs[0].mode = mode  # a relay sends no more of it
    [shown] = page(named)["shown"]
    assert f"{unit} made" in [name for _, name in shown["figures"]]


def test_a_group_of_processes_is_one_runner() -> None:
    groups = view(2)
    groups.status.jobs[0].group_size = 4
    [shown] = page(groups)["shown"]
    assert {name: value for value, name in shown["figures"]}["groups of 4 processes"] == "2 of 2"
    assert shown["race"] == 2
    assert {"group 0", "group 1"} <= set(shown["raceTexts"])


def test_curves_begin_with_the_job() -> None:
    """The servers may have been there for 15 minutes when it begins."""
    [shown] = page(view(4, samples=800))["shown"]
    times, losses = shown["curves"]["loss"]
    assert (times[0], times[-1]) == (NOW - 200, NOW)
    assert len(times) == len(losses) == 201


def test_the_loss_is_a_row_of_its_own_with_the_workers_spread_around_the_mean() -> None:
    both = view(4, samples=3)
    for name, values in (("accuracy", [0.5, 0.6]), ("least.loss", [1.0, 1.5]), ("most.loss", [3.0, 2.5])):
        series = cluster_pb2.Series(
            job="demo", name=name if "." in name else f"value.{name}", values=[math.nan, *values]
        )
        both.history.series.append(series)
    [shown] = page(both)["shown"]
    assert shown["curves"]["loss"][1:] == [[None, 1.0, 2.0], [None, 1.0, 1.5], [None, 3.0, 2.5]]
    loss, other = shown["charts"]["loss"], shown["charts"]["accuracy"]
    assert (loss["lines"], loss["bands"], loss["row"]) == (
        ["loss, mean", "least of a worker", "most of a worker"],
        1,
        True,
    )
    assert (other["lines"], other["bands"], other["row"]) == (["accuracy"], 0, False)


def test_the_second_of_two_lines_that_may_lie_on_each_other_is_dashed() -> None:
    both = view(4, samples=3)
    for name in ("received_bytes_per_second", "sent_bytes_per_second"):
        both.history.series.append(cluster_pb2.Series(job="demo", name=name, values=[1.0, 2.0, 3.0]))
    charts = page(both)["shown"][0]["charts"]
    first, second = charts["bytes a second"]["dashes"]
    assert (first, bool(second)) == (None, True)
    assert charts["loss"]["dashes"] == [None]


def test_times_have_24_hours_whatever_the_browser_speaks() -> None:
    """On axes, in events and at the foot: here it is an American one."""
    evening = view(4, samples=3)
    evening.view_time.FromSeconds(NOW + 12 * 3600)  # 20:00
    evening.events.add(number=1, first_number=1, kind="join", job="demo", text="worker 0").event_time.FromSeconds(
        NOW + 12 * 3600
    )
    [shown] = page(evening)["shown"]
    assert shown["charts"]["loss"]["hours"] == ["20:05:00"]
    assert [row[0] for row in shown["events"]] == ["20:00:00"]
    assert shown["footer"].endswith("as of 20:00:00")


def test_the_bar_of_a_steps_phases_is_as_wide_as_its_column() -> None:
    """The drawing is stretched: its parts fill it from end to end, and it has no width of its own."""
    made = view(4)
    for worker in made.jobs[0].workers[:2]:
        worker.phase_fractions.extend([0.1, 0.2, 0.3, 0.0, 0.15, 0.25])
    bars = page(made)["shown"][0]["phases"]
    assert len(bars) == 2
    for bar in bars:
        width = float(bar["viewBox"].split()[2])
        assert (bar["class"], bar["preserveAspectRatio"], "width" in bar) == ("split", "none", False)
        ends = [at + length for _, at, length in bar["parts"]]
        assert [at for _, at, _ in bar["parts"]] == pytest.approx([0.0, *ends[:-1]])
        assert ends[-1] == pytest.approx(width)
    assert re.search(r"\.split \{[^}]*width: 100%", (FILES / "page.css").read_text())


@pytest.mark.parametrize(
    ("values", "offered"),
    [
        ([300.0, 2.0], "logarithmic scale"),
        ([30.0, 2.0], ""),
        ([300.0, 0.0], ""),
        ([300.0, math.nan, 2.0], "logarithmic scale"),
        ([-300.0, 300.0], ""),
    ],
)
def test_a_logarithmic_scale_is_offered_where_it_shows_more(values: list[float], offered: str) -> None:
    wide = view(4, samples=len(values))
    wide.history.series[0].values[:] = values
    found = page(wide)
    chart = found["shown"][0]["charts"]["loss"]
    assert (chart["log"], chart["button"]) == (False, offered)
    after = found["afterScale"]["loss"]
    assert (after["log"], after["button"]) == (bool(offered), "linear scale" if offered else "")


def test_no_figure_is_alone_in_the_last_row() -> None:
    """The stub's window has room for six beside each other."""
    without = view(4)
    without.jobs[0].ClearField("age_duration")
    for made in (view(4), without):
        [shown] = page(made)["shown"]
        columns, count = int(shown["columns"].split("(")[1].split(",")[0]), len(shown["figures"])
        assert count > 6 >= columns
        assert count % columns != 1


def test_who_reads_the_weights_is_among_the_figures() -> None:
    """A reader asks all shards: it is one reader, whose edition is what all of them have sent."""
    read = view(4)
    assert not [name for _, name in page(read)["shown"][0]["figures"] if "reader" in name]
    for index, shard in enumerate(read.status.shards):
        feed = shard_pb2.FeedStatus(reader_count=3 - index, edition_version=40 + index, behind=index)
        feed.size_bytes, feed.sent_bytes, feed.element_bytes = 10**6, 10**7, 10**7
        shard.jobs[0].feed.CopyFrom(feed)
    stopped = cluster_pb2.WatchStatusResponse()
    stopped.CopyFrom(read)
    stopped.status.shards[1].jobs[0].feed.trouble = "no room"
    for index, shard in enumerate(stopped.status.shards):
        shard.jobs[0].feed.age_duration.FromSeconds(3 + index)
        shard.jobs[0].feed.element_bytes = 3 * 10**8
    waiting = cluster_pb2.WatchStatusResponse()
    waiting.CopyFrom(read)
    for shard in waiting.status.shards:
        shard.jobs[0].feed.ClearField("edition_version")
    told = [{name: value for value, name in shown["figures"]} for shown in page(read, stopped, waiting)["shown"]]
    assert told[0]["readers of the weights, edition 40 is 1 update behind"] == "3"
    assert told[0]["sent to readers; 2.0\u00a0MB of editions in memory"] == "20.0\u00a0MB"
    assert told[1]["readers of the weights, edition 40 is 1 update behind and 4 s old; shard 1: no room"] == "3"
    whole = "600\u00a0MB in whole editions"
    assert told[1][f"sent to readers in place of {whole}; 2.0\u00a0MB of editions in memory"] == "20.0\u00a0MB"
    assert told[2]["readers of the weights"] == "3"


def test_each_relay_has_a_row_and_of_many_those_with_most_readers() -> None:
    """A relay tells all shards. The newest version that any of them has heard is shown."""
    few, many = view(4), view(4)
    for index, shard in enumerate(few.status.shards):
        feed = shard.jobs[0].feed
        feed.relays.add(name="near:1", reader_count=3, edition_version=40 + index, behind=2 - index)
        feed.relays.add(name="new:1", reader_count=5)
        feed.relay_count, feed.relayed_reader_count = 2, 8
    feed = many.status.shards[0].jobs[0].feed
    for number in range(10):
        feed.relays.add(name=f"r{number}:1", reader_count=number, edition_version=0)
    feed.relay_count, feed.relayed_reader_count = 40, 100
    without, two, ten = page(view(4), few, many)["shown"]
    last = len(few.status.shards) - 1
    assert "relays-part" in without["hidden"]
    assert two["relays"] == [["new:1", "5", "–", "–"], ["near:1", "3", str(40 + last), str(2 - last)]]
    assert two["relaysNote"].startswith("This is what relays say of themselves.")
    assert [row[:2] for row in ten["relays"]] == [[f"r{number}:1", str(number)] for number in range(9, 1, -1)]
    assert ten["relaysNote"].startswith("and 32 more relays with 56 readers. ")
    assert "relays-part" not in ten["hidden"]


def test_nothing_above_the_fold_speaks_of_clocks_and_no_size_breaks_in_two() -> None:
    [shown] = page(view(4))["shown"]
    figures = {name: value for value, name in shown["figures"]}
    above = " ".join([shown["diagnosis"], shown["raceNote"], *figures, *figures.values()]).lower()
    assert "clock" not in above
    assert shown["raceNote"].startswith("Steps made. ")
    assert figures["weights + state"] == "100\u00a0MB + 200\u00a0MB"


def test_a_job_that_has_ended_stays_with_its_curves_and_its_end() -> None:
    gone = view(4, samples=3)
    del gone.jobs[:]
    del gone.status.jobs[:]
    ended = cluster_pb2.FinishedJob(job="demo", run="1", text="the job has finished", min_clock=400, max_clock=401)
    ended.end_time.FromSeconds(NOW - 60)
    ended.age_duration.FromSeconds(300)
    ended.values.append(figures_pb2.LoggedValue(name="loss", last=0.2, mean=0.25))
    ended.history.CopyFrom(history("demo", 50))
    gone.finished_jobs.append(ended)
    later = cluster_pb2.WatchStatusResponse()
    later.CopyFrom(gone)
    later.ClearField("history")
    later.finished_jobs[0].ClearField("history")  # the curves come once
    first, second = page(gone, later)["shown"]
    for shown in (first, second):
        assert shown["title"] == "demo · ended"
        assert shown["diagnosis"] == "the job has finished, 60 s ago"
        assert ["0.25", "loss, mean at the end"] in shown["figures"]
        assert ["5 min", "ran for"] in shown["figures"]
        times, losses = shown["curves"]["loss"]
        assert len(times) == 50
        assert losses[:2] == [None, 1.0]
        assert "race-part" in shown["hidden"]
        assert "empty" in shown["hidden"]


def test_a_job_that_runs_is_shown_before_one_that_has_ended_unless_the_address_names_it() -> None:
    both = view(4)
    both.finished_jobs.add(job="earlier", run="0", text="the job has finished").end_time.FromSeconds(NOW - 60)
    [shown] = page(both)["shown"]
    assert shown["title"].startswith("demo · ")
    assert shown["jobs"] == ["demo", "earlier, ended"]
    [shown] = page(both, address="#job=earlier")["shown"]
    assert shown["title"] == "earlier · ended"
    [shown] = page(both, address="#job=%E0%A4%A")["shown"]
    assert shown["title"].startswith("demo · "), "an address that is no text names none"
