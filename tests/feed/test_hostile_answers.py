"""What a reader is sent may be anything: it is refused, or it is what the checksum says. Nothing else comes of it."""

from __future__ import annotations

import random
import zlib
from collections import Counter

from ps_feed.edition import Arriving, Damaged, EditionArrays
from ps_feed.edition_client import _part
from ps_protocol.changes import encode_change
from ps_protocol.errors import PSError
from ps_protocol.messages.editions import (
    EditionBegin,
    EditionBucket,
    EditionMessage,
    WeightsHere,
    read_weights_here,
    write_edition_part,
    write_weights_here,
)
from tests.tools.editions import CONTENTS, ORIGIN, bucket, elements
from tests.tools.fuzz import _damage

DAMAGED = 20_000


def changed(index: int, version: int, sparse: bool = False) -> EditionBucket:
    of = elements(index, version)
    new = elements(index, version - 1)[:-4] + of[-4:] if sparse else of
    change = encode_change(elements(index, version - 1), new, 4, sparse)
    assert change is not None
    assert change.is_sparse == sparse
    how = bucket(index, version, version)._replace(payload=change.payload, base=version - 1, sparse=sparse)
    return how._replace(checksum=zlib.crc32(new))


def sparse(index: int, version: int) -> EditionBucket:
    return changed(index, version, sparse=True)


def whole(index: int, version: int) -> EditionBucket:
    return bucket(index, version, version)


def edition(version: int) -> EditionArrays:
    arriving = Arriving(CONTENTS, None)
    for index in CONTENTS.buckets:
        arriving.take(whole(index, version), 0, "an edition")
    return arriving.complete("1", 0)


def test_damaged_parts_of_editions_are_refused_or_have_their_checksum() -> None:
    before, chance, came = edition(1), random.Random(1), Counter[str]()
    buckets = [make(index, 2) for index in CONTENTS.buckets for make in (whole, changed, sparse)]
    parts = [EditionMessage(2, bucket=each) for each in buckets] + [EditionMessage(2, EditionBegin(2, 0, 4), age=0.5)]
    seeds = [bytes(write_edition_part(ORIGIN, part).whole()) for part in parts]
    for _ in range(DAMAGED):
        raw = _damage(chance.choice(seeds), chance.randbytes(3 * chance.randint(1, 3)))
        arriving = Arriving(CONTENTS, before)
        try:
            sent = _part(raw).bucket
            if sent is not None:
                arriving.take(sent, 0, "an edition")
        except Damaged:  # which does not end a feed
            came["refused"] += 1
            assert arriving.nbytes == 0
        else:
            came["taken"] += 1
            if sent is not None:
                of = CONTENTS.buckets[sent.bucket]
                taken = arriving._spaces[of.space][4 * of.start : 4 * (of.start + of.numel)]
                assert zlib.crc32(taken.tobytes()) == sent.checksum
    assert came.keys() == {"refused", "taken"}


def test_damaged_descriptions_are_refused_or_read() -> None:
    chance, came = random.Random(2), Counter[str]()
    here = WeightsHere("1", 1, 2, 0, 1, tuple(CONTENTS.buckets), True, (1,), CONTENTS.spec)
    whole = write_weights_here(ORIGIN, here)
    for _ in range(DAMAGED // 10):
        try:
            read_weights_here(_damage(whole, chance.randbytes(3 * chance.randint(1, 3))))
            came["taken"] += 1
        except PSError as error:
            came[type(error).__name__] += 1
    assert came.keys() == {"InvalidRequest", "taken"}
