"""A feed of weights: how fast editions come to readers, and what readers cost training, a relay, and themselves.

The weights are --mb megabytes in bfloat16, twice as many in the float32 in which they are trained, on two shards. The
trainer is one process that waits for --pause-ms in each step, as for a GPU, and takes next to no other time. All
processes are on this machine: see each part for what that means. Times are from the moment at which the trainer's
`optimizer.step()` returned. A shard copies a bucket for an edition before that, in the step: the part about training
says what that costs. `worst` is the largest time of all editions.

A reader on the shards' host maps their memory, and one elsewhere gets messages. Where a part has "ours" and "ours, in
messages", it measures both: the second reader is on this host, too, and is shown no directory in which memory could be
handed over. Each of them follows a cluster of its own.

**one host**: until a reader has the edition in its model, in turns with other ways from a trainer to a reader, which
load the same weights into the same model. A peer's time divided by ours is `÷ ours`, and ours by plain sockets, which
carry the same bytes into a buffer, `÷ sockets`. The folder is on the local disk, in the page cache, and not on a
network. Peers make their bfloat16 copy after the step, and ours is made in it. A reader's own memory, after the last
edition and less that before it subscribed, is divided by two copies of the weights; pages that it has mapped are the
shards'.

**a relay's host**: the same for a reader of a relay on this host, which maps the relay's memory, and for one that gets
messages of this relay, in turns. Its own memory is measured in the same way.

**training**: steps a second with readers, divided by those without, in pairs of turns; a turn's first step does not
count. One reader follows a GPT that computes on one of the cores, for which trainer, shards and reader compete where
there are few. The readers behind relays follow a model of --relayed-mb. They are threads of one process, without torch
and with a connection each. They and the relays stand for other hosts: they run with --nice, on cores that
would be idle. How many editions each has had is in the results.

**changed bytes**: what an update of a GPT by AdamW changes of its bfloat16 weights, packed as shards do, divided by
all of them. The GPT is small, and has taken --trained steps on real text at 3e-4 before, and --changes-warm-up with a
new AdamW at the rate. `ms` is what one core takes to make and to apply the change. This is a calculation, without a
cluster.

**a link**: servers and trainer on one host, a reader on another: network namespaces with a link that is shaped by tc.
The weights are random numbers as small as a language model's, and AdamW steps them with 1e-6; all gradients are
of about equal size, so that the part of the bytes that change is that of a first step, and more than a GPT's. The peer
saves a bfloat16 file, sends it over a socket, writes it at the other end, and loads it.

**304 answers**: requests with the newest ETag over connections that stay, for a second of a core that the relay uses,
by its process' own count. The peer is Python's http.server with an answer as short.

**requests**: one thread reads the model in a loop within `reading`, about 2 ms each, while weights are put in. Each
weight is the number of its updates: so a request that saw two versions is seen. `stalled` is the longest that a
request waited for its block to begin; `worst` its longest time, which has whatever else the machine does. The peer is
the same loop while training stands still.

**memory**: the peak of a reader with a model, less that of its process before it subscribes (interpreter, torch),
divided by two copies of its weights. Editions come in messages: pages that are mapped would count as the reader's."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from bench import options
from bench.feed_beside import same_host, slow_link
from bench.feed_costs import changes, memory, requests, unchanged
from bench.feed_mapped import mapped
from bench.feed_training import many_readers, one_reader
from bench.pictures import Bar, bars
from bench.results import Result

PARTS: dict[str, Callable[[argparse.Namespace], list[Result]]] = {
    "host": same_host,
    "mapped": mapped,
    "training": one_reader,
    "relays": many_readers,
    "changes": changes,
    "link": slow_link,
    "304": unchanged,
    "requests": requests,
    "memory": memory,
}
SHORT = {
    "mb": 10.0,
    "turns": 2,
    "editions": 3,
    "copies": 1,
    "pairs": 2,
    "turn_seconds": 2.0,
    "seconds": 2.0,
    "layers": 2,
    "width": 128,
    "changes_layers": 2,
    "changes_width": 128,
    "trained": 50,
    "readers": 8,
    "relays": 2,
}


def flags(parser: argparse.ArgumentParser) -> None:
    """The command line of `python -m bench feed`."""
    options.add(parser, shards=2, layers=8, width=512, batch=8, turns=4, pause_ms=400.0)
    number = parser.add_argument
    number("--mb", type=float, default=100.0, help="of an edition, in millions of bytes (%(default)s)")
    number("--editions", type=int, default=8, help="of each turn (%(default)s)")
    number("--copies", type=int, default=2, help="of a file over the link, of each turn (%(default)s)")
    number("--link-mbit", type=float, default=200.0, help="that the link carries (%(default)s)")
    number("--pairs", type=int, default=6, help="turns of training with readers, and without (%(default)s)")
    number("--turn-seconds", type=float, default=6.0, help="of training in each of these (%(default)s)")
    number("--readers", type=int, default=256, help="behind relays (%(default)s)")
    number("--relays", type=int, default=4, help="(%(default)s)")
    number("--relayed-mb", type=float, default=2.0, help="of an edition behind relays (%(default)s)")
    number("--nice", type=int, default=19, help="of relays and their readers (%(default)s)")
    number("--learning-rates", default="1e-6,1e-5,1e-4", help="of changed bytes (%(default)s)")
    number("--changes-layers", type=int, default=4, help="of the GPT whose bytes are counted (%(default)s)")
    number("--changes-width", type=int, default=256, help="of this GPT (%(default)s)")
    number("--trained", type=int, default=300, help="its steps before anything (%(default)s)")
    number("--changes-warm-up", type=int, default=20, help="its steps at the rate before (%(default)s)")
    number("--updates", type=int, default=5, help="of it that are counted (%(default)s)")
    number("--seconds", type=float, default=10.0, help="of requests, and of 304 answers (%(default)s)")
    number("--parts", default=",".join(PARTS), help="(%(default)s)")


def run(arguments: argparse.Namespace) -> list[Result]:
    """Measures each part, with a cluster of its own."""
    unknown = [name for name in arguments.parts.split(",") if name not in PARTS]
    if unknown:
        raise SystemExit(f"expected --parts of {', '.join(PARTS)}, got {unknown[0]!r}")
    return [line for name in arguments.parts.split(",") for line in PARTS[name](arguments)]


def draw(lines: list[Result], path: Path) -> None:
    """A bar for each system, for times of editions."""
    panels = dict.fromkeys(line["scenario"] for line in lines if line["ms"] is not None)
    bars(
        path,
        "milliseconds",
        {
            scenario: [
                Bar(line["system"], line["ms"], line["system"] == "ours")
                for line in lines
                if line["scenario"] == scenario and line["ms"] is not None
            ]
            for scenario in panels
        },
    )
