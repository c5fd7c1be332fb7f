"""A process of `bench feed` that follows a job: it reads its orders from stdin, a line of JSON each.

The first line of its input says what it follows: see Followed. Each line after it is an order, answered when it is
done: {"open": true} begins to follow and waits for an edition, {"until": V} puts each edition into the model as it
comes, until version V, {"answer": SECONDS} answers requests in a loop, {"close": true} ends the feed.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bench.machine import memory
from bench.talk import own_output
from ps_feed.subscription import Subscription
from ps_worker.followed_model import WeightFeed

WAIT_SECONDS = 120.0
REQUEST_SECONDS = 0.002  # that a request computes, at least


@dataclass(frozen=True)
class Followed:
    """What a reader follows.

    servers:  addresses; none: `readers` of them get theirs with the order "open", where each takes the next
    model:    elements of the model that the weights are put into, in vectors of `vector`; 0: none
    readers:  in this process, without a model
    changes:  as ps_torch.subscribe takes it
    shared_directory: where a server on this host may hand over its memory; empty: all comes in messages
    """

    servers: list[str]
    job: str = "default"
    model: int = 0
    vector: int = 2**20
    readers: int = 1
    changes: bool | None = None
    shared_directory: str = ""


class Twin(nn.Module):
    """A bfloat16 twin of the trained model, in memory that nothing has touched yet."""

    def __init__(self, elements: int, vector: int) -> None:
        super().__init__()
        sizes = [min(vector, elements - start) for start in range(0, elements, vector)]
        empty = [torch.empty(each, dtype=torch.bfloat16) for each in sizes]
        self.vectors = nn.ParameterList(nn.Parameter(each, requires_grad=False) for each in empty)


class Reader:
    """One reader with a model."""

    def __init__(self, followed: Followed) -> None:
        self._followed = followed
        self._model = Twin(followed.model, followed.vector)

    def open(self) -> dict[str, Any]:
        """Begins to follow; returns the version that came first."""
        followed = self._followed
        # As ps_torch.subscribe does; it does not say what was received.
        self._subscription = Subscription(
            followed.servers[0],
            followed.job,
            wire="bfloat16",
            changes=followed.changes,
            shared_directory=Path(followed.shared_directory) if followed.shared_directory else None,
        )
        self._feed = WeightFeed(self._subscription, followed.job, None)
        self._feed.wait_for(timeout=WAIT_SECONDS)
        if followed.model:
            self._feed.load(self._model)
        return {"version": self._feed.version}

    def until(self, version: int) -> dict[str, Any]:
        """Puts each edition into the model; returns which were in it when, by this machine's clock."""
        loaded, current = [], self._feed.version
        received = self._subscription.received
        before = received.nbytes, received.elements
        while current < version:
            self._feed.wait_for(current + 1, WAIT_SECONDS)
            with self._feed.reading(self._model) as current:
                loaded.append([current, time.perf_counter()])
        sent, elements = received.nbytes - before[0], received.elements - before[1]
        return {"loaded": loaded, "received": sent, "elements": elements}

    def answer(self, seconds: float) -> dict[str, Any]:
        """Answers requests in a loop. Returns their times, and those of them that have seen two versions."""
        entries, requests, torn, versions = [], [], 0, set()
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            began = time.perf_counter()
            with self._feed.reading(self._model) as version:
                entered = time.perf_counter()
                torn += not self._request(version)
            requests.append(time.perf_counter() - began)
            entries.append(entered - began)
            versions.add(version)
        return {
            "requests": len(requests),
            "entry": max(entries),
            "longest": max(requests),
            "median": statistics.median(requests),
            "torn": torn,
            "versions": len(versions),
        }

    def _request(self, version: int) -> bool:
        """Whether all elements that it looks at, at its beginning and its end, are of that version."""
        first = self._seen()
        end = time.perf_counter() + REQUEST_SECONDS
        vector = self._model.vectors[0]
        while time.perf_counter() < end:
            vector[: 2**14].sum()
        return first | self._seen() == {float(version)}

    def _seen(self) -> set[float]:
        return set(torch.cat([vector[:: max(1, len(vector) - 1)] for vector in self._model.vectors]).tolist())

    def close(self) -> dict[str, Any]:
        """Ends the feed."""
        self._feed.close()
        return {}


class ManyReaders:
    """Readers without a model or torch: each is a Subscription, which has two threads and a connection of its own."""

    def __init__(self, followed: Followed) -> None:
        self._followed = followed
        self._open: list[Subscription] = []

    def open(self, servers: list[str]) -> dict[str, Any]:
        """Begins to follow, and waits until each reader has an edition."""
        job, count = self._followed.job, self._followed.readers
        self._open = [Subscription(servers[number % len(servers)], job, wire="bfloat16") for number in range(count)]
        for each in self._open:
            each.wait(timeout=WAIT_SECONDS)
        return {}

    def close(self) -> dict[str, Any]:
        """Ends all; returns how many editions they had, and their bytes."""
        for each in self._open:
            each.close()
        editions = [each.received.editions for each in self._open]
        received = sum(each.received.nbytes for each in self._open)
        self._open = []
        return {"editions": editions, "received": received}


def main() -> None:
    """Follows orders until there are no more."""
    say = own_output()
    imports = private = 0
    followed = Followed(**json.loads(sys.stdin.readline()))
    reader: Any = Reader(followed) if followed.servers else ManyReaders(followed)
    say({"ready": True})
    for line in sys.stdin:
        [(order, value)] = json.loads(line).items()
        if order == "open":
            Path("/proc/self/clear_refs").write_text("5")  # the kernel begins anew with this process' peak
            imports, private = memory()["peak"], memory()["private"]
        given = () if value is True else (value,)
        answer = getattr(reader, order)(*given)
        say({**answer, "memory": {"imports": imports, "private_before": private, **memory()}})


if __name__ == "__main__":
    main()
