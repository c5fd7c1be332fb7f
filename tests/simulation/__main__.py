"""make simulate: runs seeds until one fails, and says how to replay it."""

from __future__ import annotations

import argparse
import logging
import sys
import time

from ps_tables.choosing import AUTO, OFF, choose
from tests.simulation.cluster import MODES, NARROW_MODES, QUORUM_MODES, Cluster
from tests.simulation.world import Log

EVERY_MODE = (*MODES, *QUORUM_MODES, *NARROW_MODES)


def parser() -> argparse.ArgumentParser:
    """Returns the command line's."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--mode", choices=EVERY_MODE, help="only this one (all)")
    parser.add_argument("--seed", type=int, help="only this one")
    parser.add_argument("--first", type=int, default=0, help="from this one on (%(default)s)")
    parser.add_argument("--seeds", type=int, default=200, help="so many (%(default)s)")
    parser.add_argument("--keep-going", action="store_true", help="also after a seed that fails")
    parser.add_argument("--tables", action="store_true", help="the jobs of all seeds have tables (of some)")
    parser.add_argument("--readers", type=int, default=0, help="processes that follow the job (%(default)s)")
    parser.add_argument("--relays", type=int, default=0, help="that some of them follow (%(default)s)")
    parser.add_argument("--members", type=int, default=1, help="of each worker; above 1 they are groups (%(default)s)")
    parser.add_argument(
        "--sharing", action="store_true", help="workers of all seeds share memory with shards (of some)"
    )
    parser.add_argument("--in-turn", action="store_true", help="one mode a seed, in turn, not all modes with each seed")
    parser.add_argument("--native", choices=(AUTO, OFF), default=AUTO, help="the library for tables (%(default)s)")
    parser.add_argument("--trace", action="store_true", help="print what happened")
    return parser


def replay(arguments: argparse.Namespace, mode: str, seed: int) -> str:
    """Returns the command that repeats one seed of a run."""
    more = {
        "TABLES": int(arguments.tables),
        "SHARING": int(arguments.sharing),
        "READERS": arguments.readers,
        "RELAYS": arguments.relays,
        "MEMBERS": arguments.members if arguments.members > 1 else 0,
        "NATIVE": arguments.native if arguments.native != AUTO else "",
    }
    variables = "".join(f" {name}={value}" for name, value in more.items() if value)
    return f"make simulate SEED={seed} MODE='{mode}'{variables}"


def main() -> None:
    """Runs seeds, and prints what the first one that fails breaks."""
    arguments = parser().parse_args()
    print(choose(arguments.native).text)
    log = logging.getLogger("ps_server")
    log.setLevel(logging.CRITICAL + 1)
    seeds = range(arguments.first, arguments.first + arguments.seeds)
    seeds = seeds if arguments.seed is None else range(arguments.seed, arguments.seed + 1)
    modes = (arguments.mode,) if arguments.mode else EVERY_MODE
    runs, failed, began = 0, 0, time.monotonic()
    for seed in seeds:
        for mode in modes[seed % len(modes) :][:1] if arguments.in_turn else modes:
            runs += 1
            more = {"tables": arguments.tables, "wholesale": seed % 3 == 0, "readers": arguments.readers}
            more |= {"relays": arguments.relays, "members": arguments.members, "sharing": arguments.sharing}
            cluster = Cluster(mode, seed, arguments.trace, **more)
            handler = Log(cluster.world)
            if arguments.trace:
                log.setLevel(logging.INFO)
                log.addHandler(handler)
                log.propagate = False
            violations = cluster.run()
            log.removeHandler(handler)
            print("".join(f"{event}\n" for event in cluster.world.events), end="")
            if violations:
                failed += 1
                for violation in violations[:3]:
                    print(f"{mode} {seed}: {violation.kind}: {violation.said} {dict(violation.where)}", flush=True)
                if not arguments.keep_going:
                    sys.exit(f"replay: {replay(arguments, mode, seed)}; TRACE=1 says what happened")
    print(f"{len(seeds)} seeds, {runs} runs, {failed} failures, {time.monotonic() - began:.0f} s")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
