"""The page in a real browser, beside a cluster that was started as users start one.

With WATCHING_PICTURES=DIR, the pictures of docs/watching.md are made anew in a folder.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.tools.cluster import until
from tests.tools.launching import Commands

sync_api = pytest.importorskip(
    "playwright.sync_api", reason="playwright is not installed: make test-browser installs it"
)
CHROMIUM = shutil.which("chromium")
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed (Debian: apt-get install chromium)"),
    # The pipes of the browser's driver are closed when its process ends, after the loop that read them.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

SECONDS = 60.0
# Worker 3 takes four times as long for a step as the others.
TRAINING = """
import threading
import torch
from torch import nn
import ps_worker

session = ps_worker.connect()
torch.manual_seed(session.rank)
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 1))
model, optimizer = session.prepare(model, torch.optim.Adam(model.parameters(), lr=1e-3), bucket_bytes=4096)
pause = threading.Event()
while True:
    x = torch.randn(32, 64)
    loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    pause.wait(0.4 if session.rank == 3 else 0.1)
    optimizer.step()
    session.log(loss=loss)
"""

# What a shard says of a table.
TABLE = {
    "table": "items",
    "row_count": 10,
    "size_bytes": 1000,
    "file_row_count": 4,
    "found_id_count": 75,
    "missing_id_count": 25,
    "admitted_row_count": 12,
    "expired_row_count": 1,
    "evicted_row_count": 1,
}


class Running:
    """A cluster, its workers, and the address of its page."""

    def __init__(self, folder: Path) -> None:
        self.commands = Commands(folder)
        checkpoints = ["--checkpoint-dir", str(folder / "checkpoints"), "--checkpoint-every", "5s"]
        ports = ["--port", "0", "--metrics-port", "0"]
        self.up = self.commands.start("-m", "ps_server", "up", "--shards", "2", "--lease", "4", *ports, *checkpoints)
        [server] = self.up.says(r"ready at (\S+) \(2 shards\)")
        [self.page] = self.up.says(r"the page, for a browser on this machine: (http://\S+)")
        script = folder / "train.py"
        script.write_text(TRAINING)
        workers = ["--workers", "4", "--mode", "ssp:4", "--job", "demo", "--server", server]
        self.workers = self.commands.start("-m", "ps_worker", "run", *workers, str(script), OMP_NUM_THREADS="1")

    def shard(self, index: int) -> psutil.Process:
        """The process of a shard."""
        return next(each for each in self.up.family() if f"--index {index}" in " ".join(each.cmdline()))


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    started = Running(tmp_path_factory.mktemp("watched"))
    yield started
    started.commands.close()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture
def look(browser: Any, running: Running) -> Iterator[Callable[..., Any]]:
    """Opens the page as somebody sees it; the test fails if the console has said anything."""
    contexts, said = [], []

    def opened(scheme: str = "light", width: int = 1280, route: Callable[[Any], None] | None = None) -> Any:
        context = browser.new_context(color_scheme=scheme, viewport={"width": width, "height": 900})
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on(
            "request", lambda request: said.append(request.url) if not request.url.startswith(running.page) else None
        )
        if route is not None:
            page.route("**/api/view*", route)
        page.goto(running.page)
        page.wait_for_selector("#workers tbody tr:nth-child(4)", timeout=1000 * SECONDS)
        return page

    yield opened
    for context in contexts:
        for page in context.pages:
            page.unroute_all(behavior="wait")  # else a view that is passed on at this moment has lost its answer
        context.close()
    assert said == []


def looks(page: Any, count: int) -> None:
    """Waits until the page has drawn so many views."""
    until(lambda: page.evaluate("Number(document.body.dataset.looks ?? 0)") >= count, "views", SECONDS)


def says(page: Any, selector: str, text: str) -> str:
    """Waits until an element has a text in it."""
    found: str = until(lambda: text in (seen := page.inner_text(selector)) and seen, f"{text!r} in {selector}", SECONDS)
    return found


def picture(page: Any, name: str) -> None:
    """Keeps a picture of the page for the documentation, if that is wanted."""
    folder = os.environ.get("WATCHING_PICTURES")
    if folder:
        page.screenshot(path=Path(folder) / f"{name}.png", full_page=True)


def test_the_straggler_is_named_and_every_worker_has_its_row(look: Callable[..., Any]) -> None:
    page = look()
    diagnosis = says(page, "#diagnosis", "most of it for worker 3")
    assert "% of the workers' time is waiting" in diagnosis
    assert page.inner_text("#title") == "demo · ssp:4 · training"
    assert page.locator("#workers tbody tr").count() == 4
    assert page.locator("#race circle").count() == 4
    says(page, "#workers thead", "loss")
    until(lambda: page.locator("#workers svg rect.wait").count() == 4, "where the time goes", SECONDS)
    until(lambda: page.locator("#curves canvas").count() == 3, "curves", SECONDS)
    says(page, "#curves", "worker 3")
    says(page, "#awaited", "worker 3")
    says(page, "#events", "worker 3 on")
    says(page, "#figures", "4 of 4")
    until(lambda: page.locator("#race .waits").count() > 0, "an arrow from a worker that waits", SECONDS)


def test_the_first_screen_of_a_laptop_has_the_loss(look: Callable[..., Any]) -> None:
    """Sentence, figures and the curve of the loss, without scrolling, at 1280 by 900."""
    page = look()
    until(lambda: page.locator("#curves canvas").count() == 3, "curves", SECONDS)
    looks(page, 3)
    for selector in ("#diagnosis", "#figures", "#curves canvas >> nth=0"):
        box = page.locator(selector).bounding_box()
        assert box["y"] >= 0, selector
        assert box["y"] + box["height"] <= 900, selector


def test_no_worker_is_drawn_beyond_what_the_mode_allows(look: Callable[..., Any]) -> None:
    page = look()
    for count in range(2, 8):
        looks(page, count)
        clocks = page.evaluate(
            "[...document.querySelectorAll('#workers tbody tr')].map(row => +row.cells[2].textContent)"
        )
        assert max(clocks) - min(clocks) <= 5, clocks


def on_named_hosts(times: int = 1) -> Callable[[Any], None]:
    """Passes on a view whose workers run on hosts of their own, and so many times as many of them."""

    def pass_on(route: Any) -> None:
        answer = route.fetch()
        seen = answer.json()
        for job in [*seen["status"]["jobs"], *seen["jobs"]]:
            found = job["workers"]
            job["workers"] = [
                {**worker, "rank": worker["rank"] + turn * len(found)} for turn in range(times) for worker in found
            ]
        for job in seen["status"]["jobs"]:
            for worker in job["workers"]:
                worker["host"] = f"trainer-{worker['rank']}"
        route.fulfill(response=answer, body=json.dumps(seen))

    return pass_on


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_fits_and_is_readable(look: Callable[..., Any], scheme: str, width: int) -> None:
    page = look(scheme, width, on_named_hosts())
    says(page, "#diagnosis", "worker 3")
    until(lambda: page.locator("#curves canvas").count() == 3, "curves", SECONDS)
    looks(page, 3)
    assert page.evaluate("document.documentElement.scrollWidth") <= width, "the page does not scroll sideways"
    colors = page.evaluate("[getComputedStyle(document.body).color, getComputedStyle(document.body).backgroundColor]")
    bright = [sum(map(int, color.removeprefix("rgb(").removesuffix(")").split(","))) / 3 for color in colors]
    assert (bright[0] > 200 and bright[1] < 60) if scheme == "dark" else (bright[0] < 60 and bright[1] > 200)
    picture(page, f"page-{scheme}-{width}")


@pytest.mark.parametrize("width", [1280, 390])
def test_a_page_of_64_workers_fits_and_folds_most_of_them(look: Callable[..., Any], width: int) -> None:
    page = look("light", width, on_named_hosts(times=16))
    looks(page, 3)
    assert page.evaluate("document.documentElement.scrollWidth") <= width, "the page does not scroll sideways"
    says(page, "#workers", "54 more")
    assert page.locator("#workers tbody tr").count() <= 12


def test_tables_of_rows_are_added_up_over_the_shards(look: Callable[..., Any]) -> None:
    def with_tables(route: Any) -> None:
        answer = route.fetch()
        seen = answer.json()
        for shard in seen["status"]["shards"]:
            for held in shard["jobs"]:
                plain = {"table": "tags", "found_id_count": 0, "missing_id_count": 0}
                held["tables"] = [TABLE, {**TABLE, **plain}]
        route.fulfill(response=answer, body=json.dumps(seen))

    assert not look().is_visible("#rows"), "a job without tables"
    page = look(route=with_tables)
    looks(page, 2)
    rows = page.evaluate(
        "[...document.querySelectorAll('#tables tbody tr')].map(row => row.innerText.split(/\\s*\\t/))"
    )
    assert rows == [
        ["items", "20", "2.0\u00a0kB", "8", "24", "2", "2", "200", "75.0 %"],
        ["tags", "20", "2.0\u00a0kB", "8", "24", "2", "2", "0", "–"],
    ]


def test_what_a_peer_sends_stays_text(look: Callable[..., Any]) -> None:
    evil = "<img src=x onerror=\"document.title='pwned'\"><b>"

    def lie(route: Any) -> None:
        answer = route.fetch()
        seen = answer.json()
        for job in seen["status"]["jobs"]:
            for worker in job["workers"]:
                worker["host"] = evil
            job["last_checkpoint"] = {"name": evil, "clock": 1, "size_bytes": 0, "missing_ranks": []}
        for job in seen["jobs"]:
            job["diagnosis"] = evil
            for worker in job["workers"]:
                worker["activity"] = evil
        for shard in seen["status"]["shards"]:
            shard["address"] = evil
            for held in shard["jobs"]:
                held["tables"] = [{**TABLE, "table": evil}]
        for event in seen["events"]:
            event["text"] = event["kind"] = evil
        seen["status"]["coordinator"]["address"] = evil
        route.fulfill(response=answer, body=json.dumps(seen))

    page = look(route=lie)
    looks(page, 3)
    assert page.locator("img").count() == 0
    assert page.locator("#workers b").count() == 0
    assert page.inner_text("#diagnosis") == evil
    assert page.inner_text("#workers tbody tr:first-child td:nth-child(2)") == evil
    assert page.title() == "demo: training"


def test_a_shard_that_hangs_and_one_that_is_killed_show(look: Callable[..., Any], running: Running) -> None:
    page = look()
    hung = running.shard(1)
    hung.suspend()
    try:
        says(page, "#title", "shard 1 does not answer for")
        says(page, "#shards", "does not answer for")
        says(page, "#figures", "1 of 2")
        assert page.inner_text("#diagnosis") == "", "what limits a job that stands still is not guessed"
        picture(page, "page-shard-lost")
    finally:
        hung.resume()
    says(page, "#title", "training")
    running.shard(1).kill()
    says(page, "#shards", "1 restart")
    says(page, "#events", "shard 1 is served by a new process")
    says(page, "#events", "it goes back to clock")
    says(page, "#title", "training")
    says(page, "#progress", "lost with shards")


def test_a_coordinator_that_hangs_is_told_and_what_it_said_stays(look: Callable[..., Any], running: Running) -> None:
    page = look()
    looks(page, 2)
    hung = running.shard(0)  # the coordinator, too
    hung.suspend()
    try:
        says(page, "#trouble", "The coordinator does not answer")
        assert page.locator("#workers tbody tr").count() == 4
    finally:
        hung.resume()
    until(lambda: not page.is_visible("#trouble"), "the end of the trouble", SECONDS)
    says(page, "#title", "training")
