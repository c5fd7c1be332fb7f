"""Where texts wait between the processes that write them and those that learn from them.

    python examples/rl/pool.py --port 8100

It needs no torch, and anybody may come and go: rollout processes POST groups of texts to /put, trainers POST to /take
how many they want and how old these may be. What is older is dropped, and counted. When there are many, those who write
wait. It is for a network that you trust.
"""

from __future__ import annotations

import argparse
import json
import threading
import time
import urllib.error
import urllib.request
from collections import Counter, deque
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

WAIT_SECONDS = 10.0  # after which /put and /take say that there was no room, or that there were no texts
AWAY_SECONDS = 60.0  # for which those who ask put up with a pool that does not answer
LARGEST_REQUEST = 2**24  # bytes

Groups = list[dict[str, Any]]  # each with its version, and the name of the process that wrote it as "rollout"


class Pool:
    """Groups of texts, in the order in which they came. room: how many may wait"""

    def __init__(self, room: int) -> None:
        self._waiting: deque[dict[str, Any]] = deque()
        self._room, self._changed = room, threading.Condition()
        self._used, self._dropped = Counter[str](), Counter[str]()  # by the name of the process that wrote them
        self.version = 0  # the newest of which anybody has told

    def put(self, groups: Groups, seconds: float) -> bool:
        """Adds groups; False: there was no room for so many seconds."""
        with self._changed:
            if not self._changed.wait_for(lambda: len(self._waiting) < self._room, seconds):
                return False
            self._waiting += groups
            self.version = max(self.version, *(group["version"] for group in groups))
            self._changed.notify_all()
            return True

    def take(self, count: int, version: int, bound: int, seconds: float, anew: bool = False) -> tuple[int, Groups]:
        """Takes the `count` groups that came first; none if there were fewer for so many seconds.

        version: of the weights that are to learn from them, as far as the trainer knows. Others may know of a newer one
        bound:   updates that these may be ahead of the weights that wrote a group. Older ones are dropped
        anew:    what others told counts no more: the job may have gone back to a checkpoint, or another run has begun.
                 Groups of later weights than the trainer's are dropped

        Returns the version with which ages were compared, and the groups.
        """
        with self._changed:
            self.version = version if anew else max(self.version, version)
            if anew:
                self._keep(lambda each: each["version"] <= version)
            self._room = max(self._room, count)  # otherwise so many could never wait here together
            self._changed.notify_all()

            def are_enough() -> bool:
                self._keep(lambda each: self.version - each["version"] <= bound)
                return len(self._waiting) >= count

            if not self._changed.wait_for(are_enough, seconds):
                return self.version, []
            taken = [self._waiting.popleft() for _ in range(count)]
            self._used.update(group["rollout"] for group in taken)
            self._changed.notify_all()
            return self.version, taken

    def _keep(self, is_good: Callable[[dict[str, Any]], bool]) -> None:
        """Drops the other groups. The caller holds the lock."""
        self._dropped.update(each["rollout"] for each in self._waiting if not is_good(each))
        self._waiting = deque(each for each in self._waiting if is_good(each))
        self._changed.notify_all()  # there may be room

    def counts(self) -> dict[str, Any]:
        """Returns how many groups were used, were dropped because they were too old, and wait."""
        with self._changed:
            return {
                "version": self.version,
                "used": dict(self._used),
                "dropped": dict(self._dropped),
                "waiting": len(self._waiting),
            }


class Service(ThreadingHTTPServer):
    """POST /put and /take, GET /counts."""

    daemon_threads = True

    def __init__(self, address: tuple[str, int], pool: Pool) -> None:
        super().__init__(address, _Request)
        self.pool = pool

    def start(self) -> str:
        """Serves in the background; returns HOST:PORT."""
        threading.Thread(target=self.serve_forever, name="pool", daemon=True).start()
        return "{}:{}".format(*self.server_address[:2])


class _Request(BaseHTTPRequestHandler):
    server: Service
    timeout = 30

    def do_GET(self) -> None:
        self._answer(200, self.server.pool.counts())

    def do_POST(self) -> None:
        pool = self.server.pool
        try:
            size = int(self.headers.get("Content-Length") or 0)
            if not 0 < size <= LARGEST_REQUEST:
                raise ValueError(f"expected up to {LARGEST_REQUEST} bytes, got {size}")
            asked = json.loads(self.rfile.read(size))
            if self.path == "/put":
                groups = [dict(each, version=int(each["version"]), rollout=str(each["rollout"])) for each in asked]
                answer: Any = pool.put(groups, WAIT_SECONDS) if groups else True
            else:
                count, version, bound = (int(asked[name]) for name in ("count", "version", "bound"))
                answer = pool.take(count, version, bound, WAIT_SECONDS, bool(asked.get("anew")))
        except (ValueError, KeyError, TypeError) as error:
            self._answer(400, {"error": repr(error)})
            return
        self._answer(200, answer)

    def _answer(self, code: int, answer: Any) -> None:
        text = json.dumps(answer).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Writes no line for a request."""


def ask(pool: str, path: str, body: Any = None) -> Any:
    """Asks the pool at HOST:PORT, and waits for one that is away. Raises OSError."""
    text = None if body is None else json.dumps(body).encode()
    deadline = time.monotonic() + AWAY_SECONDS
    while True:
        try:
            with urllib.request.urlopen(f"http://{pool}{path}", text, timeout=3 * WAIT_SECONDS) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            raise OSError(f"the pool refuses this: {error.read().decode()}") from None
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.5)


def main() -> None:
    """Runs a pool by itself, as docker compose does; run.py has one in its own process."""
    parser = argparse.ArgumentParser(description="Keep texts between rollout processes and trainers.")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (%(default)s)")
    parser.add_argument("--port", type=int, default=8100, help="0: any (%(default)s)")
    parser.add_argument("--room", type=int, default=32, help="groups that may wait (%(default)s)")
    arguments = parser.parse_args()
    service = Service((arguments.host, arguments.port), Pool(arguments.room))
    print("the pool is at {}:{}".format(*service.server_address[:2]), flush=True)
    service.serve_forever()


if __name__ == "__main__":
    main()
