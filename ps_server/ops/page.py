"""The page on which a browser shows a cluster: its files, and the view as JSON; and `ps-server page`, which serves it.

The page is read-only, and served only on this machine's loopback: at the metrics port of a coordinator that listens
there, or by `ps-server page`, which queries a coordinator elsewhere as `status` does.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs

from ps_protocol.errors import InvalidRequest
from ps_runtime.credentials import PLAINTEXT, Access, is_loopback
from ps_runtime.retry import Peer
from ps_runtime.signals import await_event
from ps_runtime.web import Site, serve
from ps_server.rpc.operator_client import OperatorClient
from ps_server.rpc.plain import json_text, plain
from ps_server.rpc.position import Position

if TYPE_CHECKING:
    from ps_server.rpc.views import Views  # only a coordinator has views: importing it needs torch

FILES = Path(__file__).parents[1] / "page"
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
}
LOOPBACK = "127.0.0.1"
DIGITS = 5  # significant digits of a sample: enough for a curve


def page_site(answer: Callable[[Position], Any]) -> Site:
    """Returns the page. answer: returns the WatchStatusResponse for a reader's position"""
    files = {f"/{path.name}": (TYPES[path.suffix], path.read_bytes()) for path in sorted(FILES.iterdir())}
    files["/"] = files.pop("/index.html")
    return Site(files, {"/api/view": lambda query: view_json(answer(_position(query)))})


def coordinators_page(views: Views) -> Site:
    """Returns the page of a coordinator in this process, which shows all jobs."""
    return page_site(lambda seen: views.answer(lambda _: True, seen, history=True)[0])


def view_json(response: Any) -> bytes:
    """Returns a WatchStatusResponse as JSON; a missing sample is null."""
    view = plain(response)
    for history in (view["history"], *(job["history"] for job in view["finished_jobs"])):
        for series in (history or {}).get("series", ()):
            series["values"] = [None if math.isnan(each) else float(f"{each:.{DIGITS}g}") for each in series["values"]]
    return json_text(view).encode()


def _position(query: str) -> Position:
    """Returns the reader's position in a query. Raises InvalidRequest for anything but numbers."""
    try:
        given = parse_qs(query, keep_blank_values=True, max_num_fields=8)
    except ValueError:
        raise InvalidRequest("too much is asked for at once") from None
    numbers = {}
    for name in ("process", "last_event", "next_sample"):
        text = given.pop(name, ["0"])[-1]
        if not (text.isascii() and text.isdigit() and len(text) <= 16):
            raise InvalidRequest(f"{name} must be a whole number below 10^16, got {text[:40]!r}")
        numbers[name] = int(text)
    if given:
        raise InvalidRequest("the view is asked for with process, last_event and next_sample, got " + ", ".join(given))
    return Position(**numbers)


def serve_page(server: str, host: str, port: int, insecure: bool, access: Access = PLAINTEXT) -> None:
    """Serves the page of a cluster until it is interrupted.

    The page answers only requests that name a loopback host, wherever it listens. Elsewhere than on loopback it is for
    a container, to which a port of this machine's loopback leads.

    insecure: the page may listen elsewhere than on loopback

    Raises PSError if the coordinator cannot be queried, InvalidRequest if the address may not be used, or is in use.
    """
    if not (insecure or is_loopback(host)):
        raise InvalidRequest(
            f"the page on {host} would be open to all that reach its port: listen on 127.0.0.1, or say --page-insecure"
        )
    with OperatorClient(Peer("coordinator", server, access)) as coordinator:
        coordinator.view(Position())  # raises early for a wrong address or wrong certificates
        bound, stop = serve(host, port, page_site(coordinator.view).app, "the page", "--page-port")
        print(
            f"ps-server: the page of {server} is at http://{host if is_loopback(host) else LOOPBACK}:{bound}/",
            flush=True,
        )
        try:
            await_event(threading.Event())
        finally:
            stop()
