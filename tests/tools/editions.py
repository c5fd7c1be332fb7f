"""Buckets of an edition of a small job, as readers get them."""

from __future__ import annotations

import zlib

import numpy as np

from ps_feed.edition import Contents
from ps_protocol.convert import AnsweringShard
from ps_protocol.messages.editions import EditionBucket
from tests.tools.raw_worker import vector_job

CONTENTS = Contents(vector_job("job", "sync", 64, 1), None, "float32")
ORIGIN = AnsweringShard(0, 1).of("1")


def elements(index: int, value: float) -> bytes:
    """The elements of a bucket, all of one value."""
    return np.full(CONTENTS.buckets[index].numel, value, np.float32).tobytes()


def bucket(index: int, value: float, version: int = 1) -> EditionBucket:
    """A whole bucket of a version, with its checksum."""
    payload = elements(index, value)
    return EditionBucket(index, version, "", zlib.crc32(payload), payload)
