"""What a worker's step takes beside principals of the same cluster that flood its server with calls.

Each of them has a token for a job of its own and, from one connection, keeps as many calls in flight as the server lets
a connection have: their requests are never whole (`half`), or the caller cancels each at once and begins the next
(`cancelled`). The worker trains alone in its job. `ms` is the median of its steps, of which the first seconds of the
flood are not counted; `worst_ms` is the longest of all, with those. Where no step ends in the time that is measured,
`ms` is that time. The ratio is to the same worker's median before. `allowed_ms` is what docs/security.md promises:
twice that median, and 20 ms.
Everything runs on one machine, the flood in a process of its own, which needs a core, too: `elsewhere` is the same
flood of another server, so what that alone costs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench import options
from bench.cluster import HERE, START_SECONDS, servers, trainers
from bench.pictures import Bar, bars
from bench.results import MIB, Result, median_ms, result, step_times
from bench.talk import answer, end, own_output, tell
from bench.training import Task
from ps_server.rpc.call_limits import STREAMS_OF_A_CONNECTION
from tests.tools.unfinished import Unfinished

SHORT = {"principals": "8", "seconds": 4.0, "transport": "tcp,grpc"}
SIZE, KEPT_BACK = 1000, 500  # bytes of a request, and of those that never come
SETTLING_SECONDS = 12.0  # in which each of those that flood has its turn
ATTACKS = {
    "push": "/ps_protocol.v1.DataService/Push",
    "exchange": "/ps_protocol.v1.DataService/Exchange",
    "register": "/ps_protocol.v1.JobService/RegisterJob",
    "heartbeat": "/ps_protocol.v1.MembershipService/Heartbeat",
}
VICTIM = "the-token-of-the-worker"


def flags(parser: argparse.ArgumentParser) -> None:
    """The command line of `python -m bench flood`."""
    options.add(parser, mib=1, shards=1, seconds=10.0, transport="shm,tcp,grpc")
    parser.add_argument("--principals", default="1,2,8", help="that flood at the same time (%(default)s)")
    every = ",".join(f"{name}:{end}" for name in ATTACKS for end in ("half", "cancelled"))
    parser.add_argument("--attacks", default=every, help="what they call, and how it ends (%(default)s)")


def run(arguments: argparse.Namespace) -> list[Result]:
    """Measures; one result for each transport, attack and number of principals."""
    most = max(map(int, arguments.principals.split(",")))
    found: list[Result] = []
    with tempfile.TemporaryDirectory() as folder:
        tokens = Path(folder, "tokens")
        tokens.touch(mode=0o600)
        others = "".join(f"worker:other-{number} {_token(number)}\n" for number in range(most))
        tokens.write_text(f"worker:flood {VICTIM}\n{others}cluster the-token-of-the-cluster\n")
        own = Path(folder, "token")
        own.touch(mode=0o600)
        own.write_text(VICTIM)
        worker = replace(HERE, variables=(f"PS_TOKEN_FILE={own}",))
        for transport in arguments.transport.split(","):
            task = Task("vectors", "sync", parameters=arguments.mib * MIB // 4, job="flood", transport=transport)
            flags = (f"--tokens={tokens}",)
            for attack in ("elsewhere", *arguments.attacks.split(",")):
                with (
                    servers([HERE] * arguments.shards, flags) as cluster,
                    servers([HERE], flags) if attack == "elsewhere" else contextlib.nullcontext(cluster) as target,
                    trainers([worker], replace(task, server=cluster.address)) as group,
                ):
                    alone = 0.0
                    for count in [0, *map(int, arguments.principals.split(","))]:
                        kind = "push:half" if attack == "elsewhere" else attack
                        with _flood(target.address, kind, count) as begun:
                            settled = group.run(START_SECONDS, seconds=SETTLING_SECONDS if count else 1.0)
                            turn = group.run(START_SECONDS, seconds=arguments.seconds)
                        first, last = (step_times(each[0]["ends"]) for each in (settled, turn))
                        alone = alone if count else median_ms(last)
                        if count:
                            found.append(_result(arguments, transport, attack, count, first, last, alone, begun))
    return found


def allowed_ms(alone_ms: float) -> float:
    """The longest median of a step beside any flood, for a worker whose median is `alone_ms` without one."""
    return 2 * alone_ms + 20


def _result(
    arguments: argparse.Namespace,
    transport: str,
    attack: str,
    count: int,
    first: list[float],
    last: list[float],
    alone: float,
    begun: list[int],
) -> Result:
    ms = median_ms(last) if last else 1e3 * arguments.seconds
    return result(
        "flood",
        attack,
        transport=transport,
        workers=1,
        shards=arguments.shards,
        size=arguments.mib * MIB,
        ms=ms,
        ratios={"alone": ms / alone},
        principals=count,
        alone_ms=alone,
        allowed_ms=round(allowed_ms(alone), 2),
        worst_ms=round(1e3 * max([*first, *last], default=arguments.seconds), 1),
        calls_begun=begun[0],
    )


def _token(number: int) -> str:
    return f"the-token-of-principal-{number}"


@contextlib.contextmanager
def _flood(address: str, attack: str, count: int) -> Iterator[list[int]]:
    """Floods a server from a process of its own; the list has the number of calls that were begun at its end."""
    begun: list[int] = []
    if not count:
        yield begun
        return
    process = HERE.start("bench.flood")
    try:
        tell(process, json.dumps({"address": address, "attack": attack, "count": count}))
        answer(process, START_SECONDS)
        yield begun
        tell(process, "")
        begun.append(answer(process, START_SECONDS)["begun"])
    finally:
        end([process])


def draw(found: list[Result], path: Path) -> None:
    """A panel for each transport, with the floods of the most principals."""
    most = max(line["principals"] for line in found)
    panels = {
        f"A worker's step over {transport}, beside {most} principals that flood the server": [
            Bar("alone", next(line["alone_ms"] for line in found if line["transport"] == transport), True)
        ]
        + [
            Bar(line["system"], line["ms"], True)
            for line in found
            if (line["transport"], line["principals"]) == (transport, most)
        ]
        for transport in dict.fromkeys(line["transport"] for line in found)
    }
    bars(path, "milliseconds", panels)


# -- the process that floods -------------------------------------------------------------------------------------------


def main() -> None:
    """Floods a server until a line arrives on stdin. Prints a line once it floods, and its number of calls."""
    say = own_output()
    order: dict[str, Any] = json.loads(sys.stdin.readline())
    name, _, ending = order["attack"].partition(":")
    with contextlib.ExitStack() as stack:
        floods = [
            stack.enter_context(
                Unfinished(
                    *(order["address"], (ATTACKS[name],), SIZE, KEPT_BACK),
                    calls=STREAMS_OF_A_CONNECTION,
                    token=_token(number),
                    cancels=ending == "cancelled",
                )
            )
            for number in range(order["count"])
        ]
        say({"ready": True})
        sys.stdin.readline()
        say({"begun": sum(flood.begun for flood in floods)})


if __name__ == "__main__":
    main()
