"""One reader under chaos: a model that follows the job. Each reading is looked at from its begin to its end."""

from __future__ import annotations

import sys
import time
import zlib
from pathlib import Path

import torch

import ps_worker
from ps_protocol.errors import NotFound, Unreachable
from tests.chaos.audience import HALF, ReaderLedger, Seen
from tests.chaos.oracle import Cells, Rules, Violation, whole
from tests.chaos.worker import Task

READING_SECONDS = 0.02  # which stand for what a request computes
LOAD_SECONDS = 600.0


def checksums(model: Cells) -> list[int]:
    """Returns the CRC-32 of each tensor's bytes."""
    return [zlib.crc32(bucket.detach().numpy().data) for bucket in model.buckets]


def wrong(view: torch.Tensor, version: int, rules: Rules, is_one: bool) -> list[Violation]:
    """What is wrong with the weights of one reading. is_one: each bucket has as many updates as the version says"""
    found = whole(view, rules)
    updates = view[:, :, 1:].sum(dim=(1, 2)) / rules.unit
    if is_one and bool((updates != version).any()):
        found.append(Violation(HALF, f"version {version} has {updates.tolist()} updates in its buckets", {}))
    return found


def follow(feed: ps_worker.WeightFeed, model: Cells, task: Task, ledger: ReaderLedger) -> None:
    """Reads until the job ends."""
    rules = Rules.of(task.mode, task.most, task.shape)
    feed.load(model, LOAD_SECONDS)
    readings, last = 0, None
    while not feed.ended:
        restores = feed.restores
        with feed.reading(model) as version:
            # Whose edition it is stands in no public place: no user needs it.
            edition, told = feed._loaded(model).edition, feed.restores
            assert edition is not None
            begun = checksums(model)
            is_new = last is not edition
            found = wrong(model.view(), version, rules, task.mode == "sync") if is_new else []
            time.sleep(READING_SECONDS)  # as a request computes: others may try to change the model meanwhile
            if checksums(model) != begun or feed._loaded(model).edition is not edition:
                found.append(Violation(HALF, f"the model changed while version {version} was read", {}))
        readings += 1
        for violation in found:
            ledger.violation(violation)
        if is_new:
            last, arrays = edition, edition.arrays
            of = {arrays.contents.buckets[index].slices[0].parameter: index for index in arrays.versions}
            places = [(arrays.timelines[of[each]], arrays.versions[of[each]]) for each in sorted(of)]
            buckets = tuple((*both, checksum) for both, checksum in zip(places, begun, strict=True))
            ledger.read(Seen(0.0, edition.run, version, restores, told, readings, buckets))


def main() -> None:
    """Follows the job of a trial's folder: `python -m tests.chaos.reader FOLDER SLOT HOST:PORT`."""
    folder, slot, server = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    torch.set_num_threads(1)
    task, ledger = Task.read(folder), ReaderLedger(folder / "readers", slot)
    try:
        # Every second one asks for changes, so that both ways of an edition are under way.
        with ps_worker.subscribe(server, task.job, changes=slot % 2 == 1) as feed:
            follow(feed, Cells(task.shape), task, ledger)
        ledger.event("left", "the job has ended")
    except (NotFound, Unreachable) as error:  # the job has ended, or nothing was there for very long
        ledger.event(type(error).__name__, str(error))
    except BaseException as error:
        ledger.violation(Violation("a reader gave up", f"{type(error).__name__}: {error}", {"slot": slot}))
        raise


if __name__ == "__main__":
    main()
