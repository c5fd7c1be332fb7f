"""The coverage-guided fuzzer behind `make fuzz`: python -m tests.tools.fuzz --seconds 60 (or --runs 1000000).

Every input goes to the handler that its first byte names, as it is and with the rest taken for damage to a well-formed
request. It ends with an exception at the first Finding; the input goes into tests/attacks/ as a test with a sentence.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from pathlib import Path

MAX_BYTES = 512


def main() -> None:
    """Runs for the time given, or for the number of inputs, and says how many there were."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=int, default=0)
    parser.add_argument("--runs", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    try:
        import atheris
    except ImportError:
        print("make fuzz: skipped, because atheris is not installed (pip install --group fuzz)")
        return
    with atheris.instrument_imports(include=["ps_protocol", "ps_server"], enable_loader_override=False):
        from tests.tools.fuzz_requests import SEEDS
        from tests.tools.fuzzing import Target

    target = Target()
    names = sorted(target.handlers)
    count, begun, passed = 0, time.monotonic(), dict.fromkeys(names, 0)

    def one(data: bytes) -> None:
        nonlocal count, target
        if len(data) < 2:
            return
        count += 1
        name, raw = names[data[0] % len(names)], data[2:]
        if data[1] % 2:
            raw = _damage(SEEDS[name][data[1] // 2 % len(SEEDS[name])], raw)
        if target.throw(name, raw) is None:
            passed[name] += 1
        if count % REPORT_EVERY == 0:
            took, taken = time.monotonic() - begun, sum(passed.values())
            print(f"{count} inputs in {took:.0f} s: {count - taken} refused, {taken} taken, no finding", flush=True)
        if len(target.shard.jobs()) > JOBS_TOO_MANY or count % INPUTS_A_TARGET == 0:
            target.stop()  # what was taken must not pile up, nor hide what a fresh one would do
            target = Target()

    with tempfile.TemporaryDirectory() as corpus:
        for index, name in enumerate(names):
            for number, raw in enumerate(SEEDS[name]):
                (Path(corpus) / f"{name}-{number}").write_bytes(bytes((index, 0)) + raw)
        options = [
            f"-max_len={MAX_BYTES}",
            f"-seed={arguments.seed or random.randrange(1, 2**31)}",
            "-rss_limit_mb=4096",
            f"-timeout={HANGS_SECONDS}",  # then it is a finding: libFuzzer keeps the input, and the threads are shown
        ]
        options += [f"-max_total_time={arguments.seconds}"] if arguments.seconds else []
        options += [f"-runs={arguments.runs}"] if arguments.runs else []
        atheris.Setup([sys.argv[0], *options, corpus], one)
        atheris.Fuzz()


JOBS_TOO_MANY = 8
INPUTS_A_TARGET = 20_000
REPORT_EVERY = 50_000
HANGS_SECONDS = 20


def _damage(whole: bytes, edits: bytes) -> bytes:
    """A request with bytes replaced, removed or put in: each edit is where, how, and how many or which byte."""
    raw = bytearray(whole)
    for where, how, value in zip(edits[::3], edits[1::3], edits[2::3], strict=False):
        at = where % (len(raw) + 1)
        if how % 3 == 0:
            raw[at : at + 1] = bytes((value,))
        elif how % 3 == 1:
            del raw[at : at + value % 16]
        else:
            raw[at:at] = bytes((value,)) * (1 + how % 5)
    return bytes(raw)


if __name__ == "__main__":
    main()
